"""Repetition, frequency and presence penalties, with vLLM's meaning, for the few rows that ask for them.

For a token with `count` occurrences in the output: the repetition penalty divides positive logits and multiplies negative ones. It
acts once, also for tokens of the prompt. Then the logit is ``logit - frequency * count - presence * (count > 0)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ..utils.upload import upload
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
    prompt_mask: torch.Tensor,  # [k, vocab] bool
    repetition: torch.Tensor,  # [k] float32, as the next two
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """The penalised scores, in fresh memory: `scores` is not changed."""
    present = output_counts > 0
    factor = torch.where(present | prompt_mask, repetition[:, None], 1.0)
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    return scores - frequency[:, None] * output_counts - presence[:, None] * present


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
    def of_histories(
        cls, logits: torch.Tensor, token_histories: Sequence[Sequence[int]], **penalties: torch.Tensor | None
    ) -> PenaltyBatch:
        """The penalties of all rows of logits [rows, vocab], for sampling by hand.

        Args:
            token_histories: token ids by row.
            penalties: `repetition_penalties`, `frequency_penalties` and `presence_penalties`, [rows] each.

        Raises:
            ValueError: a list or a penalty does not have one entry for each row.
        """
        rows, vocab = logits.shape
        if len(token_histories) != rows:
            raise ValueError(
                f"token_histories has {len(token_histories)} lists, logits has {rows} rows: give one for each"
            )
        strengths = torch.tensor([[1.0, 0.0, 0.0]], device=logits.device).repeat(rows, 1)
        for column, name in enumerate(("repetition_penalties", "frequency_penalties", "presence_penalties")):
            if (values := penalties.get(name)) is not None:
                if values.shape != (rows,):
                    raise ValueError(
                        f"{name} has shape {tuple(values.shape)}, expected ({rows},): one value for each row"
                    )
                strengths[:, column] = values
        every = torch.arange(rows, device=logits.device)
        return cls.of_tokens(every, strengths, [[]] * rows, token_histories, vocab)

    @classmethod
    def from_requests(
        cls, requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str
    ) -> PenaltyBatch | None:
        """The penalties of the requests; None if no request has any.
        Raises ValueError: a token of such a request is outside the vocabulary."""
        rows = [row for row, request in enumerate(requests) if request.params.penalised]
        if not rows:
            return None
        asking = [requests[row] for row in rows]
        params = [request.params for request in asking]
        values = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        strengths, places = upload(device, torch.tensor(values, dtype=torch.float32), torch.tensor(rows))
        # Only the repetition penalty looks at the prompt, which may be long.
        prompts = [request.prompt_token_ids if request.params.repetition_penalty != 1 else [] for request in asking]
        return cls.of_tokens(places, strengths, prompts, [request.output_token_ids for request in asking], vocab_size)

    @classmethod
    def of_tokens(
        cls,
        rows: torch.Tensor,
        strengths: torch.Tensor,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> PenaltyBatch:
        """The penalties of `k` rows.

        Args:
            rows: [k] int64, rows of the batch.
            strengths: [k, 3] float32: repetition, frequency and presence penalty; 1, 0 and 0 are off.
            prompts, outputs: the tokens of each row.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        repetition, frequency, presence = strengths.unbind(1)
        return cls(
            rows=rows,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            prompt_mask=count_tokens(prompts, vocab_size, rows.device) > 0,
            output_counts=count_tokens(outputs, vocab_size, rows.device),
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
