"""Verification of drafts: a draft is accepted if the model sampled it and accepted all drafts before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..utils.upload import upload


@dataclass
class VerifiedTokens:
    """The tokens of a step with drafts, by request, on the device. The names are vLLM's."""

    # fmt: off
    sampled:      torch.Tensor  # [requests, most rows] int64: the tokens of a request are its first `num_sampled`
    num_sampled:  torch.Tensor  # [requests] int64: 1 + accepted drafts; 0 for a chunk of a prompt
    num_rejected: torch.Tensor  # [requests] int64: drafts that are not accepted
    # fmt: on

    @property
    def last(self) -> torch.Tensor:
        """[requests] int64: the last token of each request that samples."""
        return self.sampled.gather(1, (self.num_sampled - 1).clamp(min=0)[:, None])[:, 0]


class RejectionSampler:
    """Compares the token that was sampled in each row with the draft that follows it.

    The model samples a token at each drafted position, with the noise of that position. The drafts before the first one that
    differs from its token are accepted. So the tokens are the same as without drafts, whatever the sampling parameters.

    Args:
        drafts: drafts of each request, in batch order; None for a request that samples nothing in the step. A request
            has one more sampled row than drafts.
    """

    def __init__(self, drafts: Sequence[Sequence[int] | None]) -> None:
        counts = [0 if own is None else 1 + len(own) for own in drafts]
        self.starts = np.concatenate(([0], np.cumsum(counts)))
        """[requests + 1] int64: the first sampled row of each request."""
        self._num_rows = np.array(counts)
        self._following = np.full((len(counts), max(counts)), -1)  # the draft behind each row; -1: none
        for row, own in zip(self._following, drafts, strict=True):
            row[: len(own or ())] = own or ()

    def __call__(self, token_ids: torch.Tensor) -> VerifiedTokens:
        """Accept the leading drafts that equal the sampled tokens. Does not synchronize.

        Args:
            token_ids: [sampled rows] int, sampled token of each row.
        """
        rows = np.minimum(self.starts[:-1, None] + np.arange(self._following.shape[1]), len(token_ids) - 1)
        rows, following, num_rows = upload(token_ids.device, rows, self._following, self._num_rows)
        sampled = token_ids.to(torch.int64)[rows]
        accepted = (sampled == following).cumprod(1).sum(1)
        num_sampled = torch.minimum(accepted + 1, num_rows)
        return VerifiedTokens(sampled, num_sampled, num_rows - num_sampled)
