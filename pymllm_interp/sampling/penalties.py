"""Repetition, frequency and presence penalties, with vLLM's meaning, for the few rows that ask for them.

For a token with `count` occurrences in the output: the repetition penalty divides a positive logit and multiplies a
negative one, once, and for tokens of the prompt too; then ``logit - frequency * count - presence * (count > 0)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ..core.upload import upload
from .sampling_request import SamplingRequest


def count_tokens(token_lists: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """The occurrences of each token in each list.

    Returns:
        [lists, vocab] int32.

    Raises:
        ValueError: a token is outside the vocabulary.
    """
    tokens = torch.tensor(list(chain.from_iterable(token_lists)), dtype=torch.int64)
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"a token history holds token {wrong}; expected 0 to {vocab_size - 1}, the logits' vocabulary")
    lengths = torch.tensor([len(token_list) for token_list in token_lists], dtype=torch.int64)
    places = torch.arange(len(token_lists)).repeat_interleave(lengths) * vocab_size + tokens
    (places,) = upload(device, places)
    counts = torch.zeros(len(token_lists) * vocab_size, dtype=torch.int32, device=device)
    counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    return counts.view(len(token_lists), vocab_size)


def _penalised(
    scores: torch.Tensor,  # [k, vocab] float32
    output_counts: torch.Tensor,  # [k, vocab] int32
    prompt_mask: torch.Tensor | None,  # [k, vocab] bool
    repetition: torch.Tensor | None,  # [k] float32, as the next two
    frequency: torch.Tensor | None,
    presence: torch.Tensor | None,
) -> torch.Tensor:
    """The penalised scores, in fresh memory: `scores` is not changed."""
    present = output_counts > 0
    if repetition is not None:
        seen = present if prompt_mask is None else present | prompt_mask
        factor = torch.where(seen, repetition[:, None], 1.0)
        scores = torch.where(scores > 0, scores / factor, scores * factor)
    if frequency is not None:
        scores = scores - frequency[:, None] * output_counts
    if presence is not None:
        scores = scores - presence[:, None] * present
    return scores


@dataclass
class PenaltyBatch:
    """The penalties of `k` rows of a batch, and the tokens that they penalise."""

    # fmt: off
    rows:          torch.Tensor  # [k] int64, rows of the batch
    repetition:    torch.Tensor  # [k] float32
    frequency:     torch.Tensor  # [k] float32
    presence:      torch.Tensor  # [k] float32
    prompt_mask:   torch.Tensor  # [k, vocab] bool, tokens of the prompt
    output_counts: torch.Tensor  # [k, vocab] int32
    # fmt: on

    @classmethod
    def from_requests(
        cls, requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str
    ) -> PenaltyBatch | None:
        """The penalties of the requests that have any; None where no request has.

        Raises:
            ValueError: a token of such a request is outside the vocabulary.
        """
        rows = [row for row, request in enumerate(requests) if request.params.penalised]
        if not rows:
            return None
        asking = [requests[row] for row in rows]
        params = [request.params for request in asking]
        values = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        strengths, places = upload(device, torch.tensor(values, dtype=torch.float32), torch.tensor(rows))
        repetition, frequency, presence = strengths.unbind(1)
        # Only the repetition penalty looks at the prompt, which may be long.
        prompts = [request.prompt_token_ids if request.params.repetition_penalty != 1 else [] for request in asking]
        return cls(
            rows=places,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            prompt_mask=count_tokens(prompts, vocab_size, device) > 0,
            output_counts=count_tokens([request.output_token_ids for request in asking], vocab_size, device),
        )

    def apply_(self, scores: torch.Tensor) -> None:
        """Penalise this batch's rows of `scores` [batch, vocab] float32 in place."""
        penalised = _penalised(
            scores.index_select(0, self.rows),
            self.output_counts,
            self.prompt_mask,
            self.repetition,
            self.frequency,
            self.presence,
        )
        scores.index_copy_(0, self.rows, penalised)


def apply_penalties(
    logits: torch.Tensor,  # [batch, vocab]
    repetition_penalties: torch.Tensor | None,  # [batch], as the next two; None: off
    frequency_penalties: torch.Tensor | None,
    presence_penalties: torch.Tensor | None,
    token_histories: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Penalise each row for the tokens of its history, which count as output for all three penalties.

    Returns:
        [batch, vocab] float32; `logits` is not changed.

    Raises:
        ValueError: a length other than the batch's, or a token outside the vocabulary.
    """
    batch, vocab = logits.shape
    if len(token_histories) != batch:
        raise ValueError(
            f"token_histories has {len(token_histories)} lists, logits has {batch} rows: give one for each"
        )
    penalties = {
        "repetition_penalties": repetition_penalties,
        "frequency_penalties": frequency_penalties,
        "presence_penalties": presence_penalties,
    }
    for name, values in penalties.items():
        if values is not None and values.shape != (batch,):
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected ({batch},): one value for each row")
    counts = count_tokens(token_histories, vocab, logits.device)
    scores = logits.to(torch.float32, copy=True)
    on_device = [None if values is None else values.to(scores) for values in penalties.values()]
    return _penalised(scores, counts, None, *on_device)
