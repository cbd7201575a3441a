"""Launching Triton kernels: without what Triton does at each launch, and before the kernel in front has ended.

Triton binds the arguments by name, and looks up what it compiled by the types and values of all of them: 25 us of the host for
each kernel of a pass, of which a layer has four. A `Launcher` remembers what was compiled by the little that can differ.

Between two kernels the device idles for microseconds: one drains, the other starts and waits for its first read. Hopper can
start a kernel while those in front of it run (programmatic dependent launch in the CUDA programming guide). Such a kernel
says at its beginning that the next one may start, and `awaits` what the kernels in front write before it reads any of that,
or writes at all. What it reads sooner must come from before the pass, as weights and tables do: several kernels may be under
way at once, but each pass begins with kernels of torch's, which wait for all that was launched before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

ALIGNMENT = 16
"""Triton compiles a kernel for addresses that are multiples of this, and another one for those that are not."""


@triton.jit
def begins(EARLY: tl.constexpr):
    """The kernel behind this one may start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def awaits(EARLY: tl.constexpr):
    """What the kernels in front write is there, and nobody reads any more what this one writes."""
    if EARLY:
        gdc_wait()


@cache
def starts_early(device: int) -> bool:
    """Whether kernels on a CUDA device, by its number, can start before those in front of them have ended."""
    on_nvidia = device >= 0 and torch.version.cuda is not None
    return on_nvidia and torch.cuda.get_device_capability(device) >= (9, 0) and not knobs.runtime.interpret


class Launcher:
    """A kernel whose parameters are tensors first, then numbers, then compile-time constants.

    Numbers are floats, or 32-bit integers of the kernel's `do_not_specialize`: what is compiled for one value serves all. The
    first launch of a kind is Triton's own, as are those with an address that is not aligned, those under its interpreter, and
    those within `torch.compile`. Hooks that profilers set on Triton's launches see these alone.

    Args:
        kernel: of `triton.jit`.
        early: its last parameter, EARLY, says whether it starts before the kernel in front of it has ended: wherever it can.
        options: of its compilation, beside `num_warps`.
    """

    def __init__(self, kernel: Any, early: bool = False, **options: Any) -> None:
        self.kernel, self.early, self.options = kernel, early, options
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
        compiling = torch.compiler.is_compiling()
        early = self.early and not compiling and starts_early(tensors[0].get_device())
        if self.early:
            constants = (*constants, early)
        if compiling:  # a tensor has no address there
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
            options = {**self.options, "launch_pdl": True} if early else self.options
            compiled = self.kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, **options)
            if compiled is not None and key[0]:
                self._compiled[key] = compiled
            return
        stream = driver.active.get_current_stream(kinds[0][1])  # pyright: ignore[reportAttributeAccessIssue]
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *numbers, *constants
        )  # fmt: skip
