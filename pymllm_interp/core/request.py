"""A request, as the engine carries it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .sampling_params import (
    SamplingParams,
)


class RequestStatus(Enum):
    """Where a request stands. A finished request never comes back."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and its generation, as the engine carries it.

    `trace` is opaque here: what stands behind it belongs to `hooks`. The scheduler needs only to know that a request with
    a trace is not split into chunks and never computed twice.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """New tokens at most, with the context's limit applied."""
    seed: int
    """Of the sampling noise."""
    sample_index: int = 0
    """Which of the prompt's `n` completions this is; part of the noise's key."""
    deadline: float | None = None
    """`time.monotonic()` at which the request ends with "timeout"."""
    eos_token_ids: frozenset[int] = frozenset()
    """Token ids that end the generation: the model's, unless `ignore_eos`, and the caller's."""
    trace: Any = None
    """What watches this request's forward passes (hooks.trace.RequestTrace), or None."""
    declared: Any = None
    """Its interventions, bound to the model (hooks.tables.Declared), or None."""
    forward_only: bool = False
    """One forward pass that serves the logits of all positions, and no generation."""
    alone: bool = False
    """No other request may take part in its pass (gradients)."""
    gang: list[Request] | None = None
    """The requests that are admitted, stepped and moved together with this one, itself included."""
    leader: Request | None = None
    """The completion of the same prompt whose prefill this one takes over, or None."""

    # State, owned by the scheduler.
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    """Tokens that a launched step samples and the host has not read yet."""
    num_computed_tokens: int = 0
    """Positions that have KV, or get it in a step that was launched."""
    req_pool_idx: int | None = None
    pages: list[int] = field(default_factory=list)
    """KV pages, in order of position."""
    host_kv: Any = None
    """The KV while swapped out."""
    num_preemptions: int = 0
    arrival: int = 0

    # Results, written by the engine.
    logprobs: list[dict] | None = None
    prompt_logprobs: list[dict | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    receipt: Any = None
    """What was applied (hooks.receipt.Receipt), where something was declared."""
    activations: Any = None
    """What was captured (hooks.capture.Activations)."""
    error: BaseException | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

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
        """Tokens to compute before the next one can be sampled; 0 where none is to be sampled any more."""
        return 0 if self.num_generated >= self.max_tokens else self.num_tokens - self.num_computed_tokens

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def logits_from(self) -> int:
        """The first position whose logits are computed: the prompt's last, unless those of the whole prompt are asked for."""
        return 0 if self.forward_only or self.params.prompt_logprobs is not None else self.prompt_len - 1

    @property
    def max_total_tokens(self) -> int:
        """Positions that the request may come to need KV for."""
        return self.prompt_len + self.max_tokens - 1

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Whether one token is left to compute: the last one sampled."""
        generated = len(self.output_token_ids) + self.num_pending
        computed = self.num_computed_tokens
        return 0 < generated < self.max_tokens and len(self.prompt_token_ids) + generated - computed == 1

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step cannot be prepared before the host has read this one's token.

        Penalties count it, and a gang is scheduled as one, those of its members that have not finished.
        """
        return self.params.penalised or bool(self.gang)
