"""Sampling of the next tokens from logits.

    sampler = Sampler()
    output = sampler(logits, SamplingBatch.from_requests(requests, logits.shape[-1], logits.device))
    output.token_ids  # [rows] int32

The order is vLLM's: raw log probabilities, constraints, logit bias, min_tokens and bad words, penalties, allowed tokens.
Temperature, min_p, top_k, top_p and the draw follow. A row's token depends only on its logits and its key (seed, sample index,
generated index).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.sampling_params import BEGIN
from ..kernels.cpu.cpu_dispatch import cpu_kernels_for
from ..utils.upload import upload
from .bitmasks import BitmaskRows
from .filters import filter_width, filtered_weights, kept_tokens
from .logprobs import LogprobTensors, gather_logprobs
from .noise import host_noise, uniform_noise
from .penalties import PenaltyBatch
from .sampling_request import SamplingRequest


@dataclass
class SamplerOutput:
    """One step's tokens, by row, on the device."""

    token_ids: torch.Tensor
    """[rows] int32, on the logits' device."""
    logprobs: LogprobTensors | None = None
    """Log probabilities; None if no row requests them."""
    masked: torch.Tensor | None = None
    """[rows] bool: whether a constraint forbade the largest logit. None without constraints."""
    flat: torch.Tensor | None = None
    """[rows] bool: whether the logits are all equal, or the largest is NaN or infinite. False in rows that are not
    `SamplingBatch.checked`; None if no row is."""


class Sampler:
    """Samples one token for each row.

    Temperature 0 and top_k 1 take the largest logit, the first of equals. So does a row without a distribution: with a NaN (which
    counts as largest), with +inf, or without finite values. The other rows are not affected.

    Args:
        logprobs_mode: kind of log probabilities, with vLLM's names. "raw_logprobs": the log-softmax of the logits.
            "raw_logits": the logits. "processed_logprobs", "processed_logits": the same after bias, min_tokens,
            penalties, temperature and filters, -inf for dropped tokens. A greedy row has no temperature and no filters.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        self._processed = logprobs_mode.startswith("processed")
        self.as_logits = logprobs_mode.endswith("logits")

    def __call__(
        self,
        logits: torch.Tensor,  # [rows, vocab], any float dtype; not changed
        batch: SamplingBatch,
    ) -> SamplerOutput:
        """Sample a token for each row. Does not synchronize with a CUDA device.
        Raises ValueError: `logits` is not [batch.rows, vocab]."""
        if logits.dim() != 2 or logits.shape[0] != batch.rows:
            raise ValueError(
                f"logits has shape {tuple(logits.shape)}, expected ({batch.rows}, vocab): one row a request"
            )
        scores, masked = _adjusted(logits, batch)
        output = SamplerOutput(_sample(scores, batch), masked=masked)
        if batch.any_logprobs:
            values = _processed(scores, batch) if self._processed else logits
            output.logprobs = gather_logprobs(values, output.token_ids, batch.num_logprobs, self.as_logits)
        if batch.checked:
            output.flat = _flat(logits, batch.checked)
        return output


def _flat(logits: torch.Tensor, checked: Sequence[int]) -> torch.Tensor:
    """The rows' `SamplerOutput.flat`."""
    rows = None if len(checked) == len(logits) else upload(logits.device, np.array(checked, dtype=np.int64))[0]
    least, largest = (logits if rows is None else logits[rows]).aminmax(dim=-1)  # both NaN, if any is
    flat = ~((largest > least) & largest.isfinite())
    return flat if rows is None else flat.new_zeros(len(logits)).index_copy_(0, rows, flat)


def _adjusted(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits after constraints, bias, bans and penalties: a float32 copy, or `logits` themselves without any of these.

    With constraints also [rows] bool: rows in which the largest logit is forbidden.
    """
    if batch.logit_bias is None and batch.penalties is None and batch.allowed is None and batch.constrained is None:
        return logits, None
    scores = logits.to(torch.float32, copy=True)
    masked = None if batch.constrained is None else batch.constrained.apply_(scores)
    if batch.logit_bias is not None:
        rows, tokens, values = batch.logit_bias
        scores[rows, tokens] += values
    if batch.penalties is not None:
        batch.penalties.apply_(scores)
    if batch.allowed is not None:
        batch.allowed.apply_(scores)
    return scores, masked


def _sample(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    if batch.temperatures is None:
        return _greedy(scores)
    uniforms = batch.uniforms
    if uniforms is None:
        if batch.seeds is None or batch.sample_indices is None or batch.gen_indices is None:
            raise ValueError(
                "SamplingBatch has temperatures, but seeds, sample_indices or gen_indices is None: set all three"
            )
        uniforms = uniform_noise(batch.seeds, batch.sample_indices, batch.gen_indices)
    return _draw(scores, batch.temperatures, uniforms, batch.top_ks, batch.top_ps, batch.min_ps, batch.filter_width)


def _processed(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The logits that each row is drawn from: after temperature, -inf for tokens that a filter dropped."""
    if batch.temperatures is None:
        return scores
    scores = scores.to(torch.float32)
    temperatures = torch.where(batch.temperatures > 0, batch.temperatures, 1.0)[:, None]
    scaled, filters = scores / temperatures, (batch.top_ks, batch.top_ps, batch.min_ps)
    if all(limits is None for limits in filters):
        return scaled
    cooled = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures
    return scaled.masked_fill_(~kept_tokens(cooled, *filters, batch.filter_width), -torch.inf)


def _greedy(scores: torch.Tensor) -> torch.Tensor:
    """[rows] int32: the largest score, the first of equals; a NaN counts as largest."""
    if scores.is_cuda and scores.stride(-1) == 1:
        from ..kernels.triton_argmax import argmax

        return argmax(scores)
    if scores.shape[-1] and scores.stride(-1) == 1 and (kernels := cpu_kernels_for(scores)) is not None:
        return kernels.argmax(scores)
    return scores.max(dim=-1).indices.to(torch.int32)  # four times as quick as argmax on a CPU


def _draw(
    scores: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    width: int | None,
) -> torch.Tensor:
    """Inverse CDF over the filtered weights in vocabulary order; the largest score for rows without a distribution.

    The target lies below the total, and a token of weight 0 does not raise the CDF. No such token is ever drawn.
    """
    scores = scores.to(torch.float32)
    temperatures = temperatures.to(torch.float32)
    peak, best = scores.max(dim=-1)
    sampled = temperatures > 0
    if top_ks is not None:
        sampled &= top_ks != 1  # the filters keep equals of the largest score; one token is asked for
    # Subtract first: no temperature, however small, can then overflow the largest score.
    cooled = (scores - peak[:, None]) / torch.where(sampled, temperatures, 1.0)[:, None]
    cdf = filtered_weights(cooled, top_ks, top_ps, min_ps, width).cumsum(dim=-1)
    total = cdf[:, -1]
    target = (uniforms.to(torch.float64) * total).floor().to(torch.int64)
    target = torch.minimum(target, total - 1)
    drawn = torch.searchsorted(cdf, target[:, None], right=True).squeeze(1)
    return torch.where(sampled & peak.isfinite(), drawn, best).to(torch.int32)


class LogitBias(NamedTuple):
    """``logits[rows[i], tokens[i]] += values[i]``; no pair of row and token comes twice."""

    rows: torch.Tensor  # [m] int64
    tokens: torch.Tensor  # [m] int64
    values: torch.Tensor  # [m] float32, -inf for tokens that may not be sampled yet


class AllowedTokens(NamedTuple):
    """The only tokens that `k` rows of a batch may sample."""

    rows: torch.Tensor  # [k] int64
    tokens: torch.Tensor  # [k, most] int64; shorter lists repeat their first token

    def apply_(self, scores: torch.Tensor) -> None:
        """Set all others in `scores` [batch, vocab] to -inf."""
        some = scores.index_select(0, self.rows)
        kept = torch.full_like(some, -torch.inf).scatter_(1, self.tokens, some.gather(1, self.tokens))
        scores.index_copy_(0, self.rows, kept)


@dataclass
class SamplingBatch:
    """Sampling parameters by row, on the logits' device. A field is None if no row needs it.

    A greedy row in a mixed batch has temperature 0 and its filters off.
    """

    # fmt: off
    rows:           int
    temperatures:   torch.Tensor | None = None  # [rows] float32, 0 is greedy; None: all are
    seeds:          torch.Tensor | None = None  # [rows] int64; set with temperatures, as the next two
    sample_indices: torch.Tensor | None = None  # [rows] int64
    gen_indices:    torch.Tensor | None = None  # [rows] int64
    uniforms:       torch.Tensor | None = None  # [rows] float64, the noise of these keys; None: the sampler computes it
    top_ks:         torch.Tensor | None = None  # [rows] int64; below 1, or vocab and above: off
    top_ps:         torch.Tensor | None = None  # [rows] float32
    min_ps:         torch.Tensor | None = None  # [rows] float32
    filter_width:   int | None          = None  # filters.filter_width of top_ks and top_ps; None: the whole vocabulary
    logit_bias:     LogitBias | None    = None  # includes -inf for tokens that min_tokens and bad_words forbid
    allowed:        AllowedTokens | None = None
    constrained:    BitmaskRows | None  = None  # set by the runner, from the step's masks
    penalties:      PenaltyBatch | None = None
    num_logprobs:   list[int | None]    = field(default_factory=list)  # number of log probabilities of each row; empty: none
    checked:        list[int]           = field(default_factory=list)  # rows of requests with edits; set by the runner
    # fmt: on

    @property
    def any_logprobs(self) -> bool:
        """Whether a row asks for log probabilities."""
        return any(num is not None for num in self.num_logprobs)

    @classmethod
    def of_tensors(
        cls,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        top_ps: torch.Tensor | None = None,
        top_ks: torch.Tensor | None = None,
        penalty_params: dict[str, Any] | None = None,
    ) -> SamplingBatch:
        """The batch that samples from logits [rows, vocab] by hand, with random seeds.

        Args:
            temperatures, top_ps, top_ks: [rows]; a top_k of -1 or 0 keeps all tokens.
            penalty_params: `repetition_penalties`, `frequency_penalties`, `presence_penalties` ([rows] each) and
                `token_histories` (a list of token ids for each row).
        """
        batch = cls(rows=len(logits), temperatures=temperatures, top_ps=top_ps, top_ks=top_ks)
        if temperatures is not None:
            zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            batch.seeds = torch.randint(2**62, zeros.shape, device=logits.device)
            batch.sample_indices = batch.gen_indices = zeros
        if penalty_params is not None:
            batch.penalties = PenaltyBatch.of_histories(logits, **penalty_params)
        return batch

    @classmethod
    def from_requests(
        cls, requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str
    ) -> SamplingBatch:
        """The batch that samples the next token of `requests[i]` in row i. Nothing waits for the device.
        Raises ValueError: a token of a request's `logit_bias`, or one that a penalty counts, is outside the vocabulary."""
        if all(request.params.plain and not request.bad_words for request in requests):
            return cls(rows=len(requests))
        device = torch.device(device)
        batch = cls(
            rows=len(requests),
            logit_bias=_logit_bias(requests, vocab_size, device),
            allowed=_allowed(requests, vocab_size, device),
            penalties=PenaltyBatch.from_requests(requests, vocab_size, device),
        )
        if any(request.params.logprobs is not None for request in requests):
            batch.num_logprobs = [request.params.logprobs for request in requests]
        if not all(request.params.greedy for request in requests):
            batch._set_sampling(requests, vocab_size, device)
        return batch

    def _set_sampling(self, requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device) -> None:
        """Fill temperatures, keys and filters: one copy to the device, whatever the number of rows."""
        params = [request.params for request in requests]
        top_ks = [0 if p.greedy or p.top_k >= vocab_size else int(p.top_k) for p in params]
        top_ps = [1.0 if p.greedy else p.top_p for p in params]
        min_ps = [0.0 if p.greedy else p.min_p for p in params]
        floats = np.array([[p.temperature for p in params], top_ps, min_ps], dtype=np.float32)
        ints = np.array(
            [
                [_int64(request.seed) for request in requests],
                [request.sample_index for request in requests],
                [request.num_generated for request in requests],
                top_ks,
            ],
            dtype=np.int64,
        )
        on_device, keys, self.uniforms = upload(device, floats, ints, host_noise(ints[:3]))
        self.temperatures = on_device[0]
        self.top_ps = on_device[1] if any(p < 1 for p in top_ps) else None
        self.min_ps = on_device[2] if any(p > 0 for p in min_ps) else None
        self.seeds, self.sample_indices, self.gen_indices = keys[:3]
        self.top_ks = keys[3] if any(k > 0 for k in top_ks) else None
        self.filter_width = filter_width(top_ks, top_ps, vocab_size, device)


def _int64(seed: int) -> int:
    """The low 64 bits of any whole number, as a signed int64."""
    return (seed + 2**63) % 2**64 - 2**63


def _logit_bias(requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device) -> LogitBias | None:
    """The requests' `logit_bias`, and -inf for tokens that they may not get yet. Those are end tokens before `min_tokens`, and
    tokens that would complete a bad word.
    """
    rows, tokens, values = [], [], []
    for row, request in enumerate(requests):
        bias = dict(request.params.logit_bias or {})
        wrong = next((token for token in bias if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"request {request.request_id!r}: logit_bias names token {wrong}; expected 0 to {vocab_size - 1}, "
                "the vocabulary of the logits"
            )
        if request.num_generated < request.params.min_tokens:
            # An id past the logits cannot be sampled in any case.
            bias |= dict.fromkeys((t for t in request.eos_token_ids if 0 <= t < vocab_size), float("-inf"))
        if request.bad_words:
            bias |= dict.fromkeys(_completing(request), float("-inf"))
        rows += [row] * len(bias)
        tokens += bias.keys()
        values += bias.values()
    if not rows:
        return None
    places, biases = upload(device, torch.tensor([rows, tokens]), torch.tensor(values, dtype=torch.float32))
    return LogitBias(places[0], places[1], biases)


def _completing(request: SamplingRequest) -> set[int]:
    """Tokens that would complete one of the request's bad words."""
    first = {word[1] for word in request.bad_words if word[0] == BEGIN and request.num_generated == 0}
    words = [word for word in request.bad_words if word[0] != BEGIN]
    longest = max(map(len, words), default=1)
    last = list(request.output_token_ids[-(longest - 1) :]) if longest > 1 else []
    return first | {word[-1] for word in words if list(word[:-1]) == last[len(last) - len(word) + 1 :]}


def _allowed(requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device) -> AllowedTokens | None:
    """The requests' `allowed_token_ids`; None if no request has any."""
    params = [(row, request.params) for row, request in enumerate(requests)]
    found = [(row, torch.frombuffer(p.allowed, dtype=torch.int64)) for row, p in params if p.allowed_token_ids]
    if not found:
        return None
    for row, tokens in found:
        if not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(
                f"request {requests[row].request_id!r}: allowed_token_ids names a token outside 0 to {vocab_size - 1}, the "
                "vocabulary of the logits"
            )
    most = max(len(tokens) for _, tokens in found)
    padded = torch.stack([torch.cat([tokens, tokens[:1].expand(most - len(tokens))]) for _, tokens in found])
    rows, tokens = upload(device, torch.tensor([row for row, _ in found]), padded)
    return AllowedTokens(rows, tokens)
