"""LoRA: adapters' additions to a matrix product (Hu et al., 2021), for each token row by its own adapter.

A row with an adapter gets ``product + (x A^T) (scaling B)^T``, like PEFT's module. `LoRASlots` holds A and B of several
adapters for one product, each in a slot. Of merged projections (q, k and v) each part has its own A and B.

Rows in few tiles run native Triton kernels on CUDA, in CUDA graphs too. Long prompts, and all rows on a CPU, run as matrix
products. On a CPU a row's result does not depend on the other rows, if native kernels compute the product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from ..core.pass_parts import AdapterRows, RowTiles, rows_of
from .dispatch import triton_kernels_for
from .gemm import Gemm
from .quantization.weight import QuantizedWeight

MIN_RANK = 16
"""Ranks are padded to a power of 2 from here on, for the kernels."""


def padded_rank(rank: int) -> int:
    """The rank that memory on a device is laid out for."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


class _Part:
    """A and B of an adapter for one projection.

    Args:
        a: [rank, in].
        b: [out, rank], times the scaling.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b
        self._shrink, self._expand = Gemm([a], a, None), Gemm([b], b, None)

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, rank]."""
        return self._shrink(x)

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        return self._expand(self._shrink(x))


class LoRASlots:
    """The adapters' parts of one product.

    Args:
        in_features: input features of the product.
        sizes: out features of each projection in it.
        num_slots: adapters at most.
        rank: maximum rank of an adapter.
        weight: weight of the product; it gives dtype and device.
    """

    def __init__(
        self, in_features: int, sizes: Sequence[int], num_slots: int, rank: int, weight: torch.Tensor | QuantizedWeight
    ) -> None:
        self.in_features, self.sizes, self.rank = in_features, list(sizes), padded_rank(rank)
        self._dtype, self._device = weight.dtype, weight.device
        self._starts = [sum(self.sizes[:part]) for part in range(len(self.sizes))]
        self._slots: dict[int, dict[int, _Part]] = {}  # slot -> part -> weights
        self._a = self._b = torch.empty(0)
        if weight.is_cuda:
            ranks = self.rank * len(self.sizes)
            self._a = torch.zeros(num_slots, ranks, in_features, dtype=weight.dtype, device=weight.device)
            self._b = torch.zeros(num_slots, sum(self.sizes), self.rank, dtype=weight.dtype, device=weight.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module is plain: it serves no adapters."""
        return None

    def clear(self, slot: int) -> None:
        """Empty a slot: rows with it get no delta."""
        self._slots[slot] = {}
        if self._a.is_cuda:
            self._a[slot].zero_()
            self._b[slot].zero_()

    def write(self, slot: int, part: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Put an adapter's weights into an empty slot.

        Args:
            part: index of the projection.
            a: [rank, in].
            b: [out, rank], times the scaling.
        """
        rank, start = a.shape[0], self._starts[part]
        a, b = (tensor.to(self._device, self._dtype).contiguous() for tensor in (a, b))
        if self._a.is_cuda:
            # Views, which captured passes read as a whole.
            own = self._a[slot, part * self.rank :][:rank], self._b[slot, start : start + self.sizes[part], :rank]
            own[0].copy_(a)
            own[1].copy_(b)
            a, b = own
        self._slots.setdefault(slot, {})[part] = _Part(a, b)

    def product(
        self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: AdapterRows, part: int | None = None
    ) -> torch.Tensor:  # fmt: skip
        """``multiply(x)`` plus the adapters' deltas.

        Args:
            multiply: x [..., in] -> the base's product [..., out], in fresh memory; or one part of it.
            rows: adapter rows of the pass.
            part: index of the product's part; None: all parts.
        """
        flat, tiles, spans = x.reshape(-1, self.in_features), rows.tiles, rows.spans
        if x.is_cuda and tiles is not None and part is None and triton_kernels_for(x) is not None:
            found = self._by_kernels(multiply, x, flat, tiles)
            spans = rows.products
        else:
            found = multiply(x)
        out = found.view(-1, found.shape[-1])
        if x.is_cuda:
            for span in spans:
                self._add_product(out, flat, span.slot, rows_of([span]), part)
        else:
            places = rows.by_slot if tiles is None or torch.is_grad_enabled() else _rows_of_tiles(rows, tiles)
            for slot, own in places:
                self._add_product(out, flat, slot, own, part)
        return found

    def _add_product(
        self, out: torch.Tensor, x: torch.Tensor, slot: int, rows: slice | torch.Tensor, only: int | None
    ) -> None:
        own = x[rows].to(self._dtype)
        for part, weights in self._slots.get(slot, {}).items():
            if only is None or part == only:
                start = 0 if only is not None else self._starts[part]
                stop = start + self.sizes[part]
                if out.is_cuda and not torch.is_grad_enabled():  # one kernel, which rounds once
                    out[rows, start:stop].addmm_(weights.shrink(own), weights.b.t())
                else:
                    out[rows, start:stop] += weights.delta(own)

    def _by_kernels(
        self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, flat: torch.Tensor, tiles: RowTiles
    ) -> torch.Tensor:  # fmt: skip
        from ..kernels.products.lora import expand, shrink, shrunk_memory

        flat = flat.contiguous()
        beside = len(flat) > 1 and torch.cuda.is_current_stream_capturing()
        if beside:
            h = shrunk_memory(flat, self._a)
            main, side = torch.cuda.current_stream(), side_stream(x.get_device())
            side.wait_stream(main)
            with torch.cuda.stream(side):
                h = shrink(flat, self._a, tiles, h)
            found = multiply(x)
            main.wait_stream(side)
        else:
            # First: a matrix-vector kernel that follows loads its weights meanwhile.
            h = shrink(flat, self._a, tiles)
            found = multiply(x)
        expand(found.view(-1, found.shape[-1]), h, self._b, self.sizes, tiles, beside)
        return found


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of a device on which captured passes have small products beside large ones."""
    return torch.cuda.Stream(device)


def _rows_of_tiles(rows: AdapterRows, tiles: RowTiles) -> Iterator[tuple[int, slice | torch.Tensor]]:
    """(slot, token rows) of a pass's layout for kernels, on a CPU."""
    for slot, start, count in tiles.tiles.tolist():
        if count:
            yield slot, tiles.order[start : start + count].long()
    for span in rows.products:
        yield span.slot, rows_of([span])
