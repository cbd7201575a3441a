"""One step as plain data: the decisions of the scheduler, and the results of its execution.

A `SchedulerOutput` holds numbers, token ids and small records, no live request, device tensor or callback. It round-trips
through pickle, so that another process, or another rank, can run the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from .image_input import ImageInput
from .pass_parts import EncoderRun, PromptEmbeds
from .sampling_params import SamplingParams

VectorRow = tuple[int, tuple[bytes, int]]
"""(first row in the pool of vectors, key of the content) of a vector (hooks.interventions.vector_pool)."""


@dataclass(eq=False)
class RequestHooks:
    """The hooks of a request: specs that are not bound to a model yet, and the key of its trace.

    The worker binds the specs when the request enters its table. A trace is looked up by its key, so it stays in one process.
    """

    interventions: Sequence[Any] = ()
    """Interventions (`hooks.interventions`), in the given order."""
    captures: Sequence[Any] = ()
    """Capture specs (`hooks.captures.spec`)."""
    max_tokens: int = 0
    """Upper bound of new tokens."""
    logits_from: int = 0
    """First position with logits."""
    differentiable: bool = False
    """Its pass runs with gradients."""
    vector_rows: tuple[VectorRow, ...] = ()
    """Vector-pool row of each distinct vector, in the order of `BoundHooks.tensors`; empty if ops are functions."""
    trace_key: int | None = None
    """`RequestTrace.key`; None without a trace."""
    single: bool = False
    """The request is one forward pass, and generates nothing."""
    parts: Mapping[str, RequestHooks] = field(default_factory=dict)
    """Key in `ModelSpec.parts` -> hooks at the part's sites, without the prefix of their names."""
    bound: Any = field(default=None, repr=False)
    """Binding made by the check of the specs (`hooks.declared.Declared`), for a worker of the same process. Not pickled."""

    @property
    def declares(self) -> bool:
        """Whether there are interventions or captures."""
        return bool(self.interventions or self.captures or self.parts)

    @property
    def edits(self) -> bool:
        """Whether they may change hidden states: interventions, or a trace."""
        return self.trace_key is not None or any(part.interventions for part in (self, *self.parts.values()))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"bound": None}


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the runner's table: scheduled for the first time, or again after a preemption."""

    request_id: str
    row: int
    """Row of the request table."""
    prompt_len: int
    token_ids: list[int]
    """Prompt and, after a preemption, generated tokens."""
    num_computed_tokens: int
    """Positions that have KV already."""
    params: SamplingParams
    seed: int
    """Seed of the sampling noise."""
    sample_index: int = 0
    """Index among the prompt's `n` completions."""
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of `params.bad_words`."""
    hooks: RequestHooks | None = None
    adapter: str | None = None
    """LoRA adapter of the weights that it runs with; None: the model itself."""
    drafted: bool = False
    """Whether drafts may be proposed for it."""
    embeds: PromptEmbeds | None = None
    """Vectors in place of some of the prompt's token embeddings; None without any."""
    images: tuple[ImageInput, ...] = ()
    encoder: EncoderRun | None = None
    num_counted: int = 0
    """Positions that were computed before, which results report already (`Request.computed_once`)."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request with hooks has ended: the worker completes their results."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    num_computed: int
    """Positions that results report (`Request.computed_once`)."""
    expected_len: int | None
    """`Request.expected_len`."""
    num_preemptions: int
    hooks: RequestHooks
    captures_lost: str | None = None
    """Reason that the captures are lost, or None."""
    num_streamed: int | None = None
    """Positions with captured rows in its stream; None if no capture streams."""

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt tokens followed by generated tokens."""
        return self.prompt_token_ids + self.output_token_ids


@dataclass(slots=True)
class DeclaredResult:
    """The worker's answer to the `RequestEnd` of a request that declared something."""

    applied: list[Any]
    """List of `core.receipt.Applied`."""
    captured: list[Any] = field(default_factory=list)
    """List of `core.receipt.Captured`; empty if the captures are lost."""
    activations: Any = None
    """hooks.captures.activations.Activations, or None without captures."""
    rows: Any = None
    """Rows that its stream lacks (hooks.captures.streamed.StreamedRows); None if no capture streams."""


class ScheduledRequest(NamedTuple):
    """A request's part of a step."""

    request_id: str
    row: int
    """Row of the request table."""
    num_tokens: int
    """Tokens to compute."""
    start: int
    """Positions that had KV before the step."""
    samples: bool
    """Whether the step computes the request's last token, so that the next one is sampled."""
    decodes: bool
    """Whether that token is the last one sampled. It is fed on the device; the host may not know it yet. False with drafts."""
    logit_rows: int
    """Positions that the head runs on, counted from the part's end."""
    depth: int | None = None
    """`Request.depth`."""


class StepRows(Protocol):
    """A step's requests, and the rows of each in the flat batch (`runner.input_batch.InputBatch`; vLLM's steps)."""

    @property
    def entries(self) -> Sequence[ScheduledRequest]:
        """The scheduled requests of the step."""
        ...

    @property
    def query_start_loc(self) -> np.ndarray:
        """[reqs + 1] int32, first token row of each request."""
        ...

    @property
    def cu_num_logits(self) -> np.ndarray:
        """[reqs + 1] int32, first logit row of each request."""
        ...

    @property
    def sample_rows(self) -> list[int]:
        """Logit row of each request that samples."""
        ...


class PageWrite(NamedTuple):
    """KV pages that a request was given since the runner's last step."""

    row: int
    first: int
    """Index of the first page among the request's pages."""
    pages: list[int]


AcceptedToken = tuple[str, int, int]
"""(request id, position, token id) of a sampled token that the engine appended to its request."""


@dataclass
class SchedulerOutput:
    """One step's work, in the order of the batch's rows: decode first, then prefill."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    accepted: list[AcceptedToken] = field(default_factory=list)
    """Tokens appended since the last step."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Request id -> draft tokens, the inputs of its part's rows after the first. Its hooks count when they are `settled`."""
    by_row: bool = False
    """Whether a step with short parts may run as a decode pass with a row for each token. All rows have logits."""
    settled: dict[str, int] = field(default_factory=dict)
    """Request id -> positions that stay of those that it computed with drafts, since the last step."""
    fired: dict[str, dict[int, int]] = field(default_factory=dict)
    """Request id -> slot of a monitor's flag -> first position at which its ops act, since the last step."""
    finished_req_ids: set[str] = field(default_factory=set)  # since the last step
    preempted_req_ids: set[str] = field(default_factory=set)
    free_encoder_mm_hashes: set[bytes] = field(
        default_factory=set
    )  # contents of images of requests with a `cache_salt`
    lost_captures: dict[str, str] = field(default_factory=dict)
    """Request id -> why its captures are lost, since the last step."""

    def drop(self, request_ids: Collection[str]) -> None:
        """Take requests out of a step that is being scheduled."""
        self.scheduled[:] = [entry for entry in self.scheduled if entry.request_id not in request_ids]

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Token rows of the step."""
        return sum([entry.num_tokens for entry in self.scheduled])

    @property
    def depth(self) -> int | None:
        """Number of layers in the pass: the largest `Request.depth`. None: all layers, and the head."""
        deepest = 0
        for entry in self.scheduled:  # decode rows, which need all, come first
            if entry.depth is None:
                return None
            deepest = max(deepest, entry.depth)
        return deepest or None

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Request id -> tokens to compute."""
        return {entry.request_id: entry.num_tokens for entry in self.scheduled}


@dataclass
class SampledLogprobs:
    """Log probabilities of one row: the sampled token's first, then the top ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass
class ModelRunnerOutput:
    """Results of one step."""

    req_ids: list[str] = field(default_factory=list)
    """Requests, in the order of the batch's rows. The lists below have an entry for each."""
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    """Next tokens of each request; empty where its prompt is not complete yet."""
    logprobs: list[list[SampledLogprobs]] = field(default_factory=list)
    """Log probabilities of each of these tokens; empty if not requested."""
    prompt_logprobs: dict[str, list[SampledLogprobs]] = field(default_factory=dict)
    """Request id -> log probabilities of the prompt tokens after the step's positions; position 0 has none."""
    masked: dict[str, list[bool]] = field(default_factory=dict)
    """Constrained request -> of each of these tokens, whether its mask forbade the likeliest one."""
    flat: dict[str, list[bool]] = field(default_factory=dict)
    """Request with edits -> of each of these tokens, whether its logits had no distribution (`SamplerOutput.flat`)."""
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    """Request with monitors -> dot products [slots, tokens] float32 of its part."""
    decided: set[str] = field(default_factory=set)
    """Requests with monitors that may have fired; the scores of others may wait."""
    execution: str = ""
    """Value of the step's `runner.partition.Execution`."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    """Request id -> error that its hooks raised in this step."""
    stopped: set[str] = field(default_factory=set)
    """Requests that called `tracer.stop()`."""
    saves: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Request id -> values saved by its trace, by name; set by `finish_nnsight`."""
    shared_saves: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Key of a trace without its own request (an invoke without a prompt) -> saved values by name."""

    @property
    def req_id_to_index(self) -> dict[str, int]:
        """Request id -> its index in the lists."""
        return {request_id: index for index, request_id in enumerate(self.req_ids)}


@dataclass
class LogitsProcessorOutput:
    """Logits of a forward pass, and its hidden states on request."""

    next_token_logits: torch.Tensor
    """[batch, vocab]: logits of each request's last token, in batch order. In a step: [logit rows, vocab]."""
    hidden_states: torch.Tensor | None = None
    """[tokens, hidden] after the final norm, where asked for."""
    next_token_logprobs: list[SampledLogprobs] | None = None
    """Set by `ModelRunner.sample` for a batch with `return_logprob`."""
