"""The requests of a vLLM step, as our declared stage reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.step import ScheduledRequest


@dataclass
class VllmStep:
    """The token rows of a step. A `hooks.declared_stage.StepRows`.

    Attributes:
        entries: the requests, in the order of the batch.
        query_start_loc: [reqs + 1] int32, first token row of each request.
        cu_num_logits: [reqs + 1] int32, first row of the logits of each request.
        mode: how the pass runs, for receipts.
        sample_rows: the row of the logits that each request samples from: its last.
    """

    entries: Sequence[ScheduledRequest]
    query_start_loc: np.ndarray
    cu_num_logits: np.ndarray
    mode: str
    sample_rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sample_rows = (self.cu_num_logits[1:] - 1).tolist()

    @property
    def num_tokens(self) -> int:
        """Token rows."""
        return int(self.query_start_loc[-1])

    @property
    def samples_only(self) -> bool:
        """Whether the logits are those that tokens are sampled from, and no others."""
        return int(self.cu_num_logits[-1]) == len(self.entries)

    def logit_token_rows(self) -> np.ndarray:
        """[logit rows] int64: the token row of each row of the logits."""
        return np.concatenate([
            np.arange(stop - entry.logit_rows, stop, dtype=np.int64)
            for entry, stop in zip(self.entries, self.query_start_loc[1:].tolist(), strict=True)
        ])  # fmt: skip
