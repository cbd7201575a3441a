"""`VllmRowBuffers`: what the kernels of a pass read of each token row, in memory that never moves."""

from __future__ import annotations

import numpy as np
import torch

from ...utils.upload import upload


class VllmRowBuffers:
    """A `hooks.declared_stage.RowBuffers`. Rows behind a step's own have no owner: a captured graph may be longer than its step.

    Args:
        tokens: most token rows of a pass, padding included.

    Attributes:
        edited: [table rows] int32, unused here: `op_rows` names owners only.
        seen: [table rows] int32, how many rows of each request the op has met.
        used: rows of the last `fill`, which may have owners.
    """

    def __init__(self, tokens: int, rows: int, device: torch.device | str) -> None:
        self.op_rows = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self.flags = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.edited = torch.zeros(rows, dtype=torch.int32, device=device)
        self.seen = torch.zeros(rows, dtype=torch.int32, device=device)
        self.used = 0

    def fill(self, owners: np.ndarray, positions: np.ndarray) -> None:
        """Write a step's rows: owners [tokens] int64, -1 for none, and positions [tokens] int64."""
        count, length = len(owners), max(len(owners), self.used)
        padded = np.full(length, -1, dtype=np.int64)
        padded[:count] = owners
        on_device, places = upload(self.op_rows.device, padded, positions)
        self.op_rows[:length].copy_(on_device)
        self.positions[:count].copy_(places)
        self.blocks[:, :count].zero_()
        self.used = count

    def clear(self) -> None:
        """No row has an owner."""
        if self.used:
            self.op_rows[: self.used].fill_(-1)
            self.used = 0
