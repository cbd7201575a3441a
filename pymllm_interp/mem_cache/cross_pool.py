"""`CrossPool`: keys and values of encoders' outputs, which decoder layers attend to across.

They have pages apart from the decoder's KV, since an encoder's output does not grow. The engine hands the pages out
(`engine.cross_pages`), and the runner writes them, once for each encoder input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .memory_pool import KVPool, TokenToKVPoolAllocator


class CrossPool:
    """K and V of all cross-attention layers, and the slots of each request.

    Args:
        num_layers, num_kv_heads, head_dim, dtype, device, page_size: see `KVPool`.
        size: slots to hand out.
        rows: rows of the request table.
        longest: most positions of one encoder output.

    Attributes:
        kv: the memory.
        allocator: hands out its pages.
        table: [rows + 1, longest] int32, slots of each row's encoder positions.
        lens: [rows + 1] int64 on the host, number of them.
    """

    def __init__(
        self,
        num_layers: int,
        size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        page_size: int,
        rows: int,
        longest: int,
    ) -> None:
        self.kv = KVPool(num_layers, size, num_kv_heads, head_dim, dtype, device, page_size)
        self.allocator = TokenToKVPoolAllocator(size, page_size)
        self.longest = longest
        self.table = torch.zeros(rows + 1, longest, dtype=torch.int32, device=device)
        self.lens = np.zeros(rows + 1, dtype=np.int64)

    def enter(self, row: int, pages: Sequence[int], length: int) -> torch.Tensor:
        """Give a row of the table these pages. Returns their slots [length] int64 on the device."""
        slots = torch.from_numpy(self.allocator.slots_of(pages, 0, length)).to(self.table.device)
        self.table[row, :length] = slots.to(torch.int32)
        self.lens[row] = length
        return slots

    def tensors(self) -> list[torch.Tensor]:
        """The memory of keys and values."""
        return self.kv.tensors()

    def close(self) -> None:
        """Free the memory, whoever still holds the pool."""
        self.kv.close()
        self.table = torch.empty(0, dtype=torch.int32)
