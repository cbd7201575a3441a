"""One step as plain data: what the scheduler decides, and what its execution answers.

A `SchedulerOutput` holds numbers, token ids and small records, no live request, device tensor or callback. It round-trips
through pickle, so that another process, or another rank, can run the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .sampling_params import SamplingParams


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
    """Whether that token is the last one sampled. It is fed on the device; the host may not know it yet."""
    logit_rows: int
    """Positions that the head runs on, counted from the part's end."""


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
    finished_req_ids: set[str] = field(default_factory=set)
    """Finished since the last step."""
    preempted_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Token rows of the step."""
        return sum([entry.num_tokens for entry in self.scheduled])

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
    """What a step computed."""

    req_ids: list[str] = field(default_factory=list)
    """Requests, in the order of the batch's rows. The lists below have an entry for each."""
    sampled_token_ids: list[int | None] = field(default_factory=list)
    """Next token of each request; None where its prompt is not complete yet."""
    logprobs: list[SampledLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[str, list[SampledLogprobs]] = field(default_factory=dict)
    """Request id -> log probabilities of the prompt tokens after the step's positions; position 0 has none."""
    execution: str = ""
    """How the forward pass ran (value of a `runner.partition.Execution`)."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    """Request id -> what its hooks raised in this step."""
    stopped: set[str] = field(default_factory=set)
    """Requests that called `tracer.stop()`."""
    saves: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Request id -> what its trace saved, by name; set by `finish_nnsight`."""

    @property
    def req_id_to_index(self) -> dict[str, int]:
        """Request id -> its index in the lists."""
        return {request_id: index for index, request_id in enumerate(self.req_ids)}


@dataclass
class LogitsProcessorOutput:
    """What a model's forward pass computed."""

    next_token_logits: torch.Tensor
    """[batch, vocab]: logits of each request's last token, in batch order. In a step: [logit rows, vocab]."""
    hidden_states: torch.Tensor | None = None
    """[tokens, hidden] after the final norm, where asked for."""
    next_token_logprobs: list[SampledLogprobs] | None = None
    """Set by `ModelRunner.sample` for a batch with `return_logprob`."""
