"""Detection of data-dependent control flow, which prevents CUDA graph capture of a model's passes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default: "reads a number off the device",
    aten.nonzero.default: "looks for entries that are not 0",
    aten.masked_select.default: "selects by a mask",
    aten._unique2.default: "looks for distinct values",
    aten.repeat_interleave.Tensor: "repeats by numbers on the device",
    aten.bincount.default: "counts by values on the device",
}
"""Operation -> description of its effect on a pass."""
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class WaitsForDevice(TorchDispatchMode):
    """Record of operations for which the host waits for the device.

    Attributes:
        found: descriptions of the operations, without duplicates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in WAITING:
            self.found[WAITING[func]] = None
        elif func in INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.found["indexes by a mask"] = None
        return func(*args, **(kwargs or {}))
