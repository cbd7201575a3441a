"""Launching Triton kernels: with a cache of compiled kernels, and with programmatic dependent launch.

Triton binds a launch's arguments by name, and looks the compiled kernel up by all types and values. That takes 25 us of host
time per kernel, and a layer launches four. A `Launcher` keeps compiled kernels under a smaller key.

Between two kernels the device idles for microseconds, while one drains and the next one starts. With programmatic dependent launch
a kernel starts while earlier kernels still run. See "PDL" in the CUDA programming guide; it needs Hopper or later. Such a kernel
calls `launch_dependents` at its beginning. It calls `grid_wait` before it reads the output of an earlier kernel, and before its
first write. Reads before `grid_wait` are safe for memory that was written before the pass, such as weights and tables. Several
kernels may overlap, but each pass begins with torch kernels, which wait for all earlier work.
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
"""Bytes. Triton compiles one kernel for addresses that are multiples of this, and another for all other addresses."""


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def grid_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended, and their writes are visible."""
    if PDL:
        gdc_wait()


@cache
def supports_pdl(device: int) -> bool:
    """Whether a CUDA device, by its index, has programmatic dependent launch."""
    on_nvidia = device >= 0 and torch.version.cuda is not None
    return on_nvidia and torch.cuda.get_device_capability(device) >= (9, 0) and not knobs.runtime.interpret


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a program may have on a CUDA device, by its index; -1: the interpreter's."""
    if device < 0 or knobs.runtime.interpret:
        return 1 << 30
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


class Launcher:
    """A kernel with parameters in this order: tensors, numbers, compile-time constants.

    Numbers are floats, or 32-bit integers in the kernel's `do_not_specialize`: one compiled kernel serves all values. Triton's
    own launch serves the first launch of each key, unaligned addresses, its interpreter, and `torch.compile`. Launch hooks of
    profilers see only Triton's own launches.

    Args:
        kernel: a `triton.jit` function.
        pdl: the kernel's last parameter, PDL, turns programmatic dependent launch on. It is used if the device has it.
        options: compile options other than `num_warps`.
    """

    def __init__(self, kernel: Any, pdl: bool = False, **options: Any) -> None:
        self.kernel, self.pdl, self.options = kernel, pdl, options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launch on the current stream of the current device. All tensors must be on that device."""
        compiling = torch.compiler.is_compiling()
        pdl = self.pdl and not compiling and supports_pdl(tensors[0].get_device())
        if self.pdl:
            constants = (*constants, pdl)
        if compiling:  # traced tensors have no address
            self.kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, **self.options)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        # With the devices, because Triton's own launch refuses tensors on the host.
        kinds = [(tensor.dtype, tensor.get_device()) for tensor in tensors]
        key = (bits % ALIGNMENT == 0, num_warps, constants, *kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            options = {**self.options, "launch_pdl": True} if pdl else self.options
            compiled = self.kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, **options)
            if compiled is not None and key[0]:
                self._compiled[key] = compiled
            return
        stream = driver.active.get_current_stream(kinds[0][1])  # pyright: ignore[reportAttributeAccessIssue]
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *numbers, *constants
        )  # fmt: skip
