"""A request, as the engine carries it from submission to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from .events import Logprob
from .image_input import ImageInput
from .pass_parts import EncoderInput, PromptEmbeds
from .request_drafts import RequestDrafts
from .sampling_params import SamplingParams
from .step import NewRequest, RequestEnd, RequestHooks, ScheduledRequest


class RequestStatus(Enum):
    """State of a request. A finished request never runs again."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class StopChecker(Protocol):
    """Looks for stop strings in the text of the tokens so far (client/detokenizer.py)."""

    def push(self, token_ids: list[int], may_stop: bool) -> str | None:
        """Decode the newest token; the stop string that it completed, or None."""
        ...

    @property
    def text_length(self) -> int | None:
        """Characters of the text that are kept, once a stop string was found."""
        ...


@dataclass(eq=False)
class Request:
    """One prompt and one of its generations: the owner of its tokens, counts and KV pages.

    `trace` and `declared` are opaque here; `hooks` owns their classes. The scheduler only knows that a request with a trace
    is not split into chunks and never recomputed.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Upper bound of new tokens, with the context's limit applied."""
    seed: int
    """Seed of the sampling noise."""
    sample_index: int = 0
    """Index among the prompt's `n` completions; part of the noise's key."""
    deadline: float | None = None
    """`time.monotonic()` at which the request ends with "timeout"."""
    eos_token_ids: frozenset[int] = frozenset()
    """Token ids that end the generation: the model's, unless `ignore_eos`, and the caller's."""
    ignored_eos_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids under `ignore_eos`. They end nothing, and are masked before `min_tokens`, as in vLLM."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of `params.bad_words`."""
    embeds: PromptEmbeds | None = None
    """Vectors in place of some of the prompt's token embeddings; None without any. Their token ids are placeholders."""
    images: tuple[ImageInput, ...] = ()
    """Images of the prompt, in the order of their placeholders."""
    image_edits: str | None = None
    """Fingerprint of its ops in the vision tower; None without."""
    encoder: EncoderInput | None = None
    """Input of the encoder, in an encoder-decoder model."""
    private_encoder: bool = False
    """Whether hooks may change its encoder's states: its cross keys and values are its own."""
    adapter: str | None = None
    """LoRA adapter of the weights that it runs with, as part of the model's state; None: the model itself."""
    adapter_hold: Any = None
    """Keeps the adapter in its slot (models.adapters.slots.AdapterHold), from submission to the end."""
    constraint: Any = None
    """State of its structured output (`engine.constraints.RequestConstraint`); None if unconstrained."""
    eos_token_id: int | None = None
    """The model's main one, which ends it without a `stop_reason`, as in vLLM."""
    trace: Any = None
    """Its trace (hooks.traces.trace.RequestTrace), or None."""
    hooks: RequestHooks | None = None
    """Hooks that the worker receives; None for a request without hooks."""
    declared: Any = None
    """Scheduling needs of its interventions and captures (`hooks.declared.Demands`); None if it has none."""
    monitors: Any = None
    """Scores of its monitors, and their decisions (`hooks.monitors.request_monitors.RequestMonitors`); None without."""
    one_pass: bool = False
    """Whether attention goes both ways, so that its prompt runs in one pass and shares no KV."""
    forward_only: bool = False
    """One forward pass that computes the logits of all positions, and no generation."""
    prompt_logits: bool = False
    """The logits of all prompt positions are computed."""
    exclusive: bool = False
    """Whether its passes have no other request."""
    differentiable: bool = False
    """Its pass runs with gradients, and serves no other request."""
    gang: list[Request] | None = None
    """Requests that are admitted, stepped and swapped together with this one, itself included."""
    priority: int = 0
    """Requests with lower numbers are scheduled first."""
    cache_salt: str | None = None
    """Only requests with the same salt share KV."""
    cache_owner: str | None = None
    """Owner of the request. Only requests of one owner share KV."""
    stream: bool = False
    """Whether an event is emitted for each token."""
    num_streamed: int | None = None
    """Positions with captured rows in its stream; None if no capture streams. Written by the engine."""
    live_objects: Any = None
    """Freed with it (gc_threshold.LiveObjects)."""
    drafts: RequestDrafts | None = None
    """Speculative-decoding state; None if no drafts are proposed."""
    stop_checker: StopChecker | None = None
    """Set where `params` has stop strings."""
    generates: bool = field(init=False)
    """Whether sampled tokens are kept. Otherwise the request ends with its prompt."""

    # State, written by the scheduler and its KV manager.
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    """Tokens that a launched step samples and the host has not read yet."""
    kv_len: int = 0
    """Positions that have KV, or get it in a launched step. A preemption resets it."""
    num_entered: int = 0
    """Tokens that it had when it was last admitted. Rotations that depend on the length count them as its prompt."""
    prompt_computed: int = 0
    """Positions up to which the prompt was computed, in steps with tokens that the host has read. See `computed_once`."""
    req_pool_idx: int | None = None
    """Row of the request table, while it runs."""
    pages: list[int] = field(default_factory=list)
    """KV pages, in order of position."""
    num_shared_pages: int = 0
    """The first of them belong to the prefix cache."""
    num_pages_sent: int = 0
    """Pages that launched steps sent to the runner."""
    cross: Any = None
    """Pages of its cross keys and values (`engine.cross_pages.HeldPages`), while it runs."""
    host_kv: Any = None
    """KV in host memory, while swapped out."""
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Requests that were admitted before it, though they came later."""
    arrival: int = 0
    prefix: Any = None
    """Shared prefix (`engine.prefix_sharing.Prefix`), set when the scheduler first considers the request."""
    state_stops: list[int] = field(default_factory=list)
    """Positions, ascending, at which a chunk of it ends, so that a snapshot of its states is kept there."""
    num_cached_tokens: int = 0
    """Positions with KV in the prefix cache when it was first admitted."""
    not_reused: str = ""
    """Number of further tokens in the prefix cache, and the reason that they were recomputed."""

    # Results, written by the engine.
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    """Time of the first admission to a step."""
    first_token_at: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_flat: int = 0
    """Its tokens of `Receipt.flat_logits`; a trace of several requests has one receipt."""
    num_hidden_tokens: int = 0
    """Tokens at the end that the text leaves out."""
    receipt: Any = None
    """The `core.receipt.Receipt` of a request with hooks, or None."""
    activations: Any = None
    """The captured `hooks.captures.activations.Activations`, or None."""
    saves: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Key of a trace -> saved values by name: its own, and traces that end with this request."""
    error: BaseException | None = None
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generates = not self.forward_only and self.params.max_tokens != 0

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def accepted_len(self) -> int:
        """Generated tokens that the host has read and kept."""
        return len(self.output_token_ids)

    @property
    def computed_once(self) -> int:
        """Positions computed at least once, in steps with tokens that the host has read. Results report these; a preemption keeps
        them.
        """
        accepted = len(self.output_token_ids)
        if not accepted:
            return self.prompt_computed
        return self.prompt_len + accepted - (self.finish_reason != "monitor")

    @property
    def expected_len(self) -> int | None:
        """Positions that results must report; None if the request ended before its prompt was complete, or by an error."""
        if self.finish_reason == "error":
            return None
        if self.finish_reason == "monitor":
            return self.computed_once
        if self.output_token_ids or self.finish_reason in ("stop", "length"):
            return self.prompt_len + max(len(self.output_token_ids) - 1, 0)
        return None

    @property
    def is_whole(self) -> bool:
        """Whether its prompt runs in one pass, and shares no KV."""
        return self.one_pass or self.trace is not None

    @property
    def depth(self) -> int | None:
        """Number of layers in its passes: up to the last capture or intervention. None: all layers, and the head."""
        if self.generates or self.all_logits or self.trace is not None or self.declared is None:
            return None
        return self.declared.depth

    @property
    def awaits_last_token(self) -> bool:
        """Whether a launched step computes all that is left of it: it ends when that step's results are read."""
        if self.generates:
            return self.num_generated >= self.max_tokens
        return self.kv_len >= self.prompt_len

    @property
    def num_generated(self) -> int:
        """Generated tokens, with those that the host has not read yet."""
        return len(self.output_token_ids) + self.num_pending

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens. All but the last generated one get KV."""
        return len(self.prompt_token_ids) + self.num_generated

    @property
    def num_tokens_left(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 if no token is to be sampled."""
        return 0 if self.awaits_last_token else self.num_tokens - self.kv_len

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and generated tokens that the host has read."""
        return self.prompt_token_ids + self.output_token_ids

    def token_ids_between(self, start: int, stop: int) -> list[int]:
        """The slice of `all_token_ids`, without a copy of the rest."""
        first, last = max(start - self.prompt_len, 0), max(stop - self.prompt_len, 0)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[first:last]

    @property
    def all_logits(self) -> bool:
        """Whether the logits of every position are asked for."""
        return self.forward_only or self.prompt_logits or self.params.prompt_logprobs is not None

    @property
    def num_known_tokens(self) -> int:
        """Positions that have KV. The last sampled token does not count: it may belong to a step that is dropped."""
        return min(self.kv_len, self.prompt_len + max(len(self.output_token_ids) - 1, 0))

    @property
    def logits_from(self) -> int:
        """First position that logits are computed for: 0 with `all_logits`, else the prompt's last."""
        return 0 if self.all_logits else self.prompt_len - 1

    @property
    def max_total_tokens(self) -> int:
        """Upper bound of positions that need KV."""
        return self.prompt_len + self.max_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Whether one token is left to compute: the last one sampled."""
        generated = len(self.output_token_ids) + self.num_pending
        computed = self.kv_len
        return 0 < generated < self.max_tokens and len(self.prompt_token_ids) + generated - computed == 1

    @property
    def in_prompt(self) -> bool:
        """Whether it has tokens to compute before it decodes."""
        return self.num_tokens_left > 0 and not self.is_decoding

    @property
    def scoped_images(self) -> tuple[ImageInput, ...]:
        """The images for the encoder cache, which requests share as they share KV."""
        return tuple(image.scoped(self.cache_salt, self.cache_owner) for image in self.images)

    @property
    def unit(self) -> list[Request]:
        """The request, or the members of its gang that have not finished."""
        return [r for r in self.gang if not r.finished] if self.gang else [self]

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step cannot be prepared before the host has read this step's token.

        Penalties count the token, and bad words of several tokens are compared with it. A monitor that acts decides on the
        step's scores. The requests of a gang are scheduled
        together while they have not finished.
        """
        if self.monitors is not None and self.monitors.may_act:
            return True
        return (
            self.params.penalised or bool(self.gang) or any(len(word) > 1 and word[0] >= 0 for word in self.bad_words)
        )

    def scheduled(self, num_tokens: int) -> ScheduledRequest:
        """The request's part of a step that computes its next `num_tokens` tokens."""
        assert self.req_pool_idx is not None, "a scheduled request has a row"
        start, depth = self.kv_len, self.depth
        samples = depth is None and start + num_tokens == self.num_tokens
        logit_rows = num_tokens if self.all_logits else int(samples)
        return ScheduledRequest(
            self.request_id, self.req_pool_idx, num_tokens, start, samples, self.is_decoding, logit_rows, depth
        )

    def entering(self) -> NewRequest:
        """The request as an entry of the runner's table."""
        assert self.req_pool_idx is not None, "a scheduled request has a row"
        return NewRequest(
            request_id=self.request_id,
            row=self.req_pool_idx,
            prompt_len=self.prompt_len,
            token_ids=self.all_token_ids,
            num_computed_tokens=self.kv_len,
            params=self.params,
            seed=self.seed,
            sample_index=self.sample_index,
            eos_token_ids=self.eos_token_ids | self.ignored_eos_ids,
            bad_words=self.bad_words,
            hooks=self.hooks,
            adapter=self.adapter,
            drafted=self.drafts is not None,
            embeds=self.embeds,
            images=self.scoped_images,
            encoder=None if self.encoder is None else self.cross.run_of(self.encoder),
            num_counted=self.computed_once,
        )

    def ending(self) -> RequestEnd:
        """The end of a request with hooks, as the worker receives it."""
        assert self.hooks is not None, "the worker knows nothing of its hooks"
        captures = None if self.declared is None else self.declared.captures
        lost = None if captures is None else captures.error
        return RequestEnd(
            self.request_id, self.prompt_token_ids, self.output_token_ids, self.computed_once, self.expected_len,
            self.num_preemptions, self.hooks, captures_lost=None if lost is None else str(lost),
            num_streamed=self.num_streamed,
        )  # fmt: skip
