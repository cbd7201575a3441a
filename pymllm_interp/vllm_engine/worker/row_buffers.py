"""`VllmRowBuffers`: per-row inputs of a pass's kernels, in memory that never moves."""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.edit_codes import MAX_SCORES
from ...utils.upload import upload


class VllmRowBuffers:
    """Buffers by token row (`TableOps`). Rows after a step's own have no owner: a captured graph may be longer than its step.

    Args:
        tokens: most token rows of a pass, padding included.

    Attributes:
        edited: [table rows] int32, unused here: `op_rows` names owners only.
        seen: [table rows] int32, how many rows of each request the op has met.
        used: rows of the last `fill`, which may have owners.
    """

    def __init__(self, tokens: int, rows: int, device: torch.device | str) -> None:
        self._all = torch.zeros(4, tokens, dtype=torch.int64, device=device)
        self.op_rows, self.positions, self.blocks = self._all[0].fill_(-1), self._all[1], self._all[2:]
        self.flags = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.scores = torch.zeros(MAX_SCORES, tokens, device=device)
        self.edited = torch.zeros(rows, dtype=torch.int32, device=device)
        self.seen = torch.zeros(rows, dtype=torch.int32, device=device)
        self.used = 0

    def fill(self, owners: np.ndarray, positions: np.ndarray, records: np.ndarray | None) -> None:
        """Write a step's rows, in one copy.

        Args:
            owners: [tokens] int64, -1 for none.
            positions: [tokens] int64.
            records: [2, tokens] int64, start and stop in the ring; None without captures.
        """
        count, length = len(owners), max(len(owners), self.used)
        host = np.zeros((2 if records is None else 4, length), dtype=np.int64)
        host[0] = -1
        host[0, :count], host[1, :count] = owners, positions
        if records is not None:
            host[2:, :count] = records
        (on_device,) = upload(self.op_rows.device, host)
        self._all[: len(host), :length].copy_(on_device)
        self.used = count

    def clear(self) -> None:
        """Clear the owners of all rows."""
        if self.used:
            self.op_rows[: self.used].fill_(-1)
            self.used = 0
