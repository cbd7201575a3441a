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
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.cpu.cpu_dispatch import cpu_kernels_for
from ..utils.upload import upload
from .filters import filtered_weights, kept_tokens
from .logprobs import LogprobTensors, gather_logprobs
from .noise import uniform_noise
from .sampling_batch import SamplingBatch


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

        Raises:
            ValueError: `logits` is not [batch.rows, vocab].
        """
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
