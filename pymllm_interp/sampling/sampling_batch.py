"""The sampling parameters of one step's rows, as tensors. A field that no row asks for is None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.sampling_params import BEGIN
from ..utils.upload import upload
from .bitmasks import BitmaskRows
from .filters import filter_width
from .noise import host_noise
from .penalties import PenaltyBatch
from .sampling_request import SamplingRequest


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

        Raises:
            ValueError: a token of a request's `logit_bias`, or one that a penalty counts, is outside the vocabulary.
        """
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
