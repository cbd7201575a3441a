"""`QuantizedWeight`: a matrix as small codes with a scale for each group of inputs.

All checkpoint formats become this one (models/weights/formats.py)::

    weight[o, i] = (code[o, i] - zero[o, i // group_size]) * scale[o, i // group_size]

A scale of a whole row is a group as wide as the matrix. A scale of a block of rows is repeated for each row:
4 bytes for 128 weights. So rows of different projections can be concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dispatch import triton_kernels_for

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 (E2M1) by the low three bits of a code; the top bit is the sign."""
BITS = {"fp8": 8, "uint8": 8, "uint4": 4, "fp4": 4}
"""Kind of codes -> bits of each."""
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
CHUNK = 1 << 18
"""Elements that are dequantised at a time on a CPU: their float32 values fit in its cache."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in].

    Attributes:
        kind: kind of the codes: "fp8" (E4M3), "uint8", "uint4" or "fp4" (E2M1).
        codes: [out, in] float8_e4m3fn or uint8. Of 4 bits: [out, in / 2] uint8; see `pair`.
        scales: [out, groups] float32, float16 or bfloat16; or uint8: E8M0, exponents of 2 plus 127.
        zeros: [out, groups] uint8: the codes of zero; None: 2^(bits - 1) of integers, 0 of others.
        group_size: inputs of a group; the last group may be smaller.
        dtype: dtype of the dequantised weight.
        pair: distance of the two inputs in a byte of 4-bit codes. The inputs are divided into blocks of ``2 * pair``.
            The first half of a block is in the low bits.
        scale_dtype: a dtype that has the scales exactly; None: their own.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    dtype: torch.dtype
    pair: int = 1
    scale_dtype: torch.dtype | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape [out, in]."""
        rows, width = self.codes.shape
        return torch.Size((rows, width * 8 // BITS[self.kind]))

    @property
    def device(self) -> torch.device:
        """Device of the codes, scales and zero points."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a CUDA device."""
        return self.codes.is_cuda

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, without those that are None."""
        found = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def split(self, sizes: Sequence[int]) -> list[QuantizedWeight]:
        """The weights of consecutive rows: views."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.rows(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """The weight of some rows: a view."""
        return self._mapped(lambda tensor: tensor[start:stop])

    @property
    def scale_values(self) -> torch.Tensor:
        """The scales [out, groups] as numbers."""
        if self.scales.is_floating_point():
            return self.scales
        return powers_of_two(self.scales)

    def to(self, device: str | torch.device) -> QuantizedWeight:
        """The weight with its tensors on a device, contiguous."""
        return self._mapped(lambda tensor: tensor.to(device).contiguous())

    def paired(self, pair: int) -> QuantizedWeight:
        """The same weight of 4 bits with another `pair`. ``2 * pair`` divides its inputs."""
        codes = torch.empty_like(self.codes)
        for start in range(0, len(codes), step := max(1, CHUNK // codes.shape[1])):
            rows = slice(start, start + step)
            halves = self.nibbles(rows).view(len(codes[rows]), -1, 2, pair)
            codes[rows] = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
        return replace(self, codes=codes, pair=pair)

    def nibbles(self, rows: slice) -> torch.Tensor:
        """Codes of 4 bits [rows, in], uint8."""
        codes = self.codes[rows].view(len(self.codes[rows]), -1, self.pair)
        return torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)

    def _mapped(self, function: Any) -> QuantizedWeight:
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors.items()})

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [out, in]: computed in float32, rounded once."""
        dtype = dtype or self.dtype
        rows, width = self.shape
        if rows and width and triton_kernels_for(self.codes) is not None:
            from ...kernels.products.quantized import dequantize

            return dequantize(self.kind, self.codes, self.scale_values, self.zeros, self.group_size, self.pair, dtype)
        out = torch.empty(rows, width, dtype=dtype, device=self.device)
        step = rows if self.is_cuda else max(1, CHUNK // max(width, 1))
        for start in range(0, rows, step):
            self._dequantize_rows(slice(start, start + step), out)
        return out

    def _dequantize_rows(self, rows: slice, out: torch.Tensor) -> None:
        values, scales = self._values(rows), self.scale_values[rows].float()
        groups, width = scales.shape[1], values.shape[1]
        if self.kind in ("uint8", "uint4"):
            middle = 1 << (BITS[self.kind] - 1)
            values = values.sub_(middle if self.zeros is None else self._spread(self.zeros[rows].float(), width))
        if groups > 1 and width % self.group_size == 0:
            out[rows].view(-1, groups, self.group_size).copy_(
                values.view(-1, groups, self.group_size).mul_(scales[..., None])
            )
        else:
            out[rows].copy_(values.mul_(self._spread(scales, width)))

    def _values(self, rows: slice) -> torch.Tensor:
        """The codes' own values [rows, in], float32."""
        codes = self.codes[rows]
        if self.kind == "fp8" and not codes.is_cuda:
            return _float8_values(codes)
        if BITS[self.kind] == 8:
            return codes.float()
        if self.kind == "fp4":
            table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
            return table[self.nibbles(rows).long()]
        return self.nibbles(rows).float()

    def _spread(self, of_groups: torch.Tensor, width: int) -> torch.Tensor:
        """[rows, groups] -> [rows, in], or [rows, 1]."""
        if of_groups.shape[1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group_size, 1)[:, :width]


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0 uint8 -> 2^(exponent - 127) in bfloat16, which has the same exponents."""
    bits = exponents.short() << 7
    return torch.where(exponents == 0, 1 << 6, bits).short().view(torch.bfloat16)


def _float8_values(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 without NaN as float32: the bits of a float16 that is 2^8 times smaller. Five times as fast as torch's cast."""
    bits = codes.view(torch.int8).short()
    bits <<= 7
    bits &= ~0x4000  # the sign was extended into the exponent
    return bits.view(torch.float16).float().mul_(256.0)


def concatenated(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The rows of all parts as one weight; None if their codes or groups differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    forms = {
        (part.kind, part.group_size, part.pair, part.zeros is None, part.shape[1], part.scales.shape[1])
        for part in parts
    }
    if len(forms) > 1:
        return None
    scale_dtypes = {part.scales.dtype for part in parts}
    scales = [part.scales if len(scale_dtypes) == 1 else part.scales.float() for part in parts]
    return replace(
        first,
        codes=torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype),
        scales=torch.cat(scales),
        zeros=None if first.zeros is None else torch.cat([part.zeros for part in parts]),  # pyright: ignore[reportArgumentType, reportCallIssue]
    )


@torch.no_grad()
def quantized(weight: torch.Tensor, kind: str = "fp8", group_size: int | None = None) -> QuantizedWeight:
    """A weight [out, in], rounded to the nearest codes with symmetric scales.

    Args:
        weight: weight in the dtype of dequantised weights.
        kind: "fp8", "uint8" or "uint4".
        group_size: inputs of a group; None: a scale for each output channel.
    """
    rows, width = weight.shape
    group_size = group_size or width
    groups = -(-width // group_size)
    values = torch.nn.functional.pad(weight.float(), (0, groups * group_size - width)).view(rows, groups, group_size)
    largest = FP8_MAX if kind == "fp8" else float((1 << (BITS[kind] - 1)) - 1)
    scales = values.abs().amax(-1).div_(largest)
    scales = scales.masked_fill_(scales == 0, 1.0)
    values = values.div_(scales[..., None]).flatten(1)[:, :width]
    if kind == "fp8":
        codes = values.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    else:
        codes = values.round_().add_(1 << (BITS[kind] - 1)).to(torch.uint8)
        codes = packed(codes) if kind == "uint4" else codes
    return QuantizedWeight(kind, codes, scales, None, group_size, weight.dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] of 4 bits, uint8 -> [out, in / 2], two in a byte."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
