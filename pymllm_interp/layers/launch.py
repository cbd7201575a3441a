"""Launching Triton kernels without what Triton does at each launch.

Triton binds the arguments by name, and looks up what it compiled by the types and values of all of them: 25 us of the host for
each kernel of a pass, of which a layer has four. A `Launcher` remembers what was compiled by the little that can differ.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver

ALIGNMENT = 16
"""Triton compiles a kernel for addresses that are multiples of this, and another one for those that are not."""


class Launcher:
    """A kernel whose parameters are tensors first, then numbers, then compile-time constants.

    Numbers are floats, or 32-bit integers of the kernel's `do_not_specialize`: what is compiled for one value serves all. The
    first launch of a kind is Triton's own, as are those with an address that is not aligned, those under its interpreter, and
    those within `torch.compile`. Hooks that profilers set on Triton's launches see these alone.

    Args:
        kernel: of `triton.jit`.
        options: of its compilation, beside `num_warps`.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launch on the current device, which is that of all tensors, and on its current stream."""
        if torch.compiler.is_compiling():  # a tensor has no address there
            self.kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, **self.options)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        # The devices, too: Triton's own launch refuses a tensor of the host.
        kinds = [(tensor.dtype, tensor.get_device()) for tensor in tensors]
        key = (bits % ALIGNMENT == 0, num_warps, constants, *kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, **self.options)
            if compiled is not None and key[0]:
                self._compiled[key] = compiled
            return
        stream = driver.active.get_current_stream(kinds[0][1])  # pyright: ignore[reportAttributeAccessIssue]
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *numbers, *constants
        )  # fmt: skip
