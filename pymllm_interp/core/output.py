"""What comes back: to the user, and between the parts of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .request import Request


class Logprob(NamedTuple):
    """A token's log probability; under the raw logits, unless `ServerConfig.logprobs_mode` says otherwise."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of a prompt's `n` completions."""

    index: int
    text: str
    """Without the stop string and, by default, special tokens."""
    token_ids: list[int]
    """With the token that stopped the generation."""
    finish_reason: str | None = None
    """stop, length, abort, timeout or error; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or token id, where that was the reason."""
    logprobs: list[dict[int, Logprob]] | None = None
    error: BaseException | None = None
    activations: Any = None
    """What was captured (hooks.capture.Activations): empty, so false, where nothing was asked for."""
    receipt: Any = None
    """What was applied, and how its steps ran (hooks.receipt.Receipt), or None."""


@dataclass
class RequestOutput:
    """A prompt and its completions. `text`, `token_ids`, `finish_reason`, `logprobs`, `activations` and `receipt` are the first
    one's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    warnings: list[str] = field(default_factory=list)

    @property
    def activations(self) -> Any:
        """What was captured of the first completion."""
        return self.outputs[0].activations

    @property
    def receipt(self) -> Any:
        """What was applied for the first completion, and how its steps ran."""
        return self.outputs[0].receipt

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """The first completion's log probabilities, a dict for each token; None where not asked for."""
        return self.outputs[0].logprobs


class ScheduledRequest(NamedTuple):
    """A request's share of a step, as it was when the step was scheduled."""

    request: Request
    num_tokens: int
    """Tokens to compute in this step."""
    start: int
    """Positions that had KV before the step."""
    samples: bool
    """Whether the step computes the request's last token, so that the next one is sampled."""
    decodes: bool
    """Whether that is the last token sampled, which the host need not know yet."""

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> ScheduledRequest:
        """The next `num_tokens` tokens of the request."""
        start = request.num_computed_tokens
        return cls(request, num_tokens, start, start + num_tokens == request.num_tokens, request.is_decoding)

    @property
    def logit_rows(self) -> int:
        """Rows that the head runs on: all where every position's logits are asked for, else the last one's."""
        if self.request.forward_only or self.request.params.prompt_logprobs is not None:
            return self.num_tokens
        return int(self.samples)


@dataclass
class SchedulerOutput:
    """One step's work, in the order of the batch's rows: decode first, then prefill."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    scheduled_new_reqs: list[Request] = field(default_factory=list)
    """Scheduled for the first time, or again after a preemption."""
    finished_req_ids: set[str] = field(default_factory=set)
    """Finished since the last step."""
    preempted_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {entry.request.request_id: entry.num_tokens for entry in self.scheduled}


@dataclass
class SampledLogprobs:
    """Log probabilities of one row: the sampled token's first, then the top ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass
class ModelRunnerOutput:
    """What a step made, by request."""

    req_ids: list[str] = field(default_factory=list)
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    sampled_token_ids: list[int | None] = field(default_factory=list)
    """The next token of each request; None where its prompt is not complete yet."""
    logprobs: list[SampledLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[str, list[SampledLogprobs]] = field(default_factory=dict)
    """For prompt positions computed in this step, in order; position 0 has none."""
    execution: str = ""
    """How the forward pass ran (a `runner.partition.Execution`'s value)."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    """Requests whose hooks raised in this step."""
    stopped: set[str] = field(default_factory=set)
    """Requests whose trace called `tracer.stop()`."""
    saves: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the traces of finished requests saved, by request and name."""


@dataclass
class LogitsProcessorOutput:
    """What a model's forward pass made."""

    next_token_logits: torch.Tensor
    """[batch, vocab]: the last token's, in batch order. In a step: [logit rows, vocab], those of its `InputBatch`."""
    hidden_states: torch.Tensor | None = None
    """[tokens, hidden] after the final norm, where asked for."""
    next_token_logprobs: list[SampledLogprobs] | None = None
    """Of each request's sampled token; set by `ModelRunner.sample` for a batch with `return_logprob`."""
