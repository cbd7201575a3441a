"""`KVPool`: K and V of all layers, in pages, in the dtype of the cache. FP8 rows are divided by a scale and rounded to E4M3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from ..utils.device import resolve_dtype
from .memory_pool import _num_pages
from .state_pool import HostState

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MOST_STAGED = 64 << 20
"""Bytes of pages that are gathered on the device at a time."""


@dataclass(frozen=True)
class HostKV:
    """The K and V of some tokens in all layers, copied to the host by `KVPool.swap_out`.

    Attributes:
        states: recurrent states of the request, or None.
        cross: its cross keys and values, or None.
    """

    kv: torch.Tensor  # CPU tensor [layers, 2, tokens, kv_heads, head_dim]
    states: HostState | None = None
    cross: HostKV | None = None

    @property
    def num_tokens(self) -> int:
        return self.kv.shape[2]

    @property
    def nbytes(self) -> int:
        beside = (own.nbytes for own in (self.states, self.cross) if own is not None)
        return self.kv.nbytes + sum(beside)


class KVPool:
    """K and V of all layers, in one allocation that starts as zeros.

    Args:
        num_layers, num_kv_heads, head_dim: the model's.
        size: slots to hand out; rounded down to whole pages. The dummy page 0 comes on top.
        dtype, device: dtype and device of the memory.
        page_size: slots in a page.
        scales: layer -> dequantization scales (k, v), for an FP8 cache; (1, 1) for other layers.

    `k_buffer[layer]` and `v_buffer[layer]`: [num_slots, num_kv_heads, head_dim], contiguous.
    Rows of padding write to page 0, and no other row reads it.
    """

    def __init__(
        self,
        num_layers: int,
        size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device,
        page_size: int,
        scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        self._scales = scales or {}
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.page_size = page_size
        self.num_pages = _num_pages(size, page_size)
        self.size = self.num_pages * page_size
        self.num_slots = self.size + page_size
        self._kv = torch.zeros(num_layers, 2, self.num_slots, num_kv_heads, head_dim, dtype=dtype, device=self.device)
        self.k_buffer = list(self._kv[:, 0].unbind())
        self.v_buffer = list(self._kv[:, 1].unbind())

    def close(self) -> None:
        """Free the memory, whoever still holds the pool."""
        self._kv = torch.empty(0, dtype=self.dtype, device=self.device)
        self.k_buffer, self.v_buffer = [], []

    def tensors(self) -> list[torch.Tensor]:
        """The memory."""
        return [self._kv]

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    def get_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, [num_slots, kv_heads, head_dim] each: the pool's own memory."""
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def paged(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same memory as [num_pages + 1, page_size, kv_heads, head_dim]."""
        shape = (-1, self.page_size, self.num_kv_heads, self.head_dim)
        return self.k_buffer[layer_id].view(shape), self.v_buffer[layer_id].view(shape)

    def set_kv(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write `k` and `v` [tokens, kv_heads, head_dim] to `slots` [tokens] int64, in the pool's dtype."""
        for stored, rows, scale in zip(self.get_kv(layer_id), (k, v), self.scales(layer_id), strict=True):
            write_rows(stored, slots, rows, scale)

    def scales(self, layer_id: int) -> tuple[float, float]:
        """Dequantization scales (k, v) of the layer."""
        return self._scales.get(layer_id, (1.0, 1.0))

    def swap_out(self, slots: Sequence[int] | np.ndarray | torch.Tensor) -> HostKV:
        """A copy of the slots' K and V on the host, bit for bit. Takes the memory of one layer's on the device while it runs."""
        index = self._index(slots)
        kv = torch.empty(self.num_layers, 2, len(index), self.num_kv_heads, self.head_dim, dtype=self.dtype)
        for layer, own in enumerate(memory_of(self._kv)):
            memory_of(kv)[layer].copy_(own.index_select(1, index))
        return HostKV(kv)

    def swap_in(self, slots: Sequence[int] | np.ndarray | torch.Tensor, host: HostKV) -> None:
        """Write K and V from `swap_out` to `slots`, bit for bit.

        Raises:
            ValueError: the numbers of slots and tokens differ.
        """
        if len(slots) != host.num_tokens:
            raise ValueError(f"swap_in got {len(slots)} slots for the K and V of {host.num_tokens} tokens")
        index = self._index(slots)
        for layer, own in enumerate(memory_of(self._kv)):
            own.index_copy_(1, index, memory_of(host.kv)[layer].to(self.device))

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2, page_size, kv_heads, head_dim]: a page's K and V of all layers."""
        return self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim

    @property
    def page_bytes(self) -> int:
        return prod(self.page_shape) * self.dtype.itemsize

    def pages_out(self, pages: Sequence[int], memory: torch.Tensor, places: Sequence[int]) -> None:
        """Copy pages to `memory` [places, *page_shape] on the host. On CUDA the copy to pinned memory is not waited for."""
        for part in self._parts(pages):
            held = self._by_page.index_select(0, self._index(pages[part]))
            for at, place, count in _runs(places[part]):
                memory_of(memory)[place : place + count].copy_(held[at : at + count], non_blocking=True)

    def pages_in(self, pages: Sequence[int], memory: torch.Tensor, places: Sequence[int]) -> None:
        """Copy pages from `memory`, as `pages_out` left them."""
        for part in self._parts(pages):
            staged = torch.empty_like(self._by_page[: len(pages[part])], memory_format=torch.contiguous_format)
            for at, place, count in _runs(places[part]):
                staged[at : at + count].copy_(memory_of(memory)[place : place + count], non_blocking=True)
            self._by_page.index_copy_(0, self._index(pages[part]), staged)

    def copy(
        self,
        src_slots: Sequence[int] | np.ndarray | torch.Tensor,
        dst_slots: Sequence[int] | np.ndarray | torch.Tensor,
    ) -> None:
        """Copy K and V of all layers from slot to slot; `src_slots` are read before `dst_slots` are written."""
        if len(src_slots) != len(dst_slots):
            raise ValueError(f"copy got {len(src_slots)} source slots and {len(dst_slots)} destination slots")
        source, target = self._index(src_slots), self._index(dst_slots)
        for own in memory_of(self._kv):
            own.index_copy_(1, target, own.index_select(1, source))

    def _parts(self, pages: Sequence[int]) -> Iterator[slice]:
        """Parts of the pages that take little memory of the device."""
        step = max(MOST_STAGED // self.page_bytes, 1)
        return (slice(start, start + step) for start in range(0, len(pages), step))

    @property
    def _by_page(self) -> torch.Tensor:
        """The memory as [num_pages + 1, *page_shape], not contiguous."""
        own = memory_of(self._kv)
        return own.view(self.num_layers, 2, -1, *self.page_shape[2:]).permute(2, 0, 1, 3, 4, 5)

    def _index(self, slots: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(slots, dtype=torch.int64, device=self.device)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, place, count) of each run of consecutive places."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield start, places[start], end - start
            start = end


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype of a cache: "auto" is the model's, "fp8" or "fp8_e4m3" E4M3."""
    if name == "auto":
        return dtype
    return FP8 if name.startswith("fp8") else resolve_dtype(name, device)


def memory_of(stored: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype that torch indexes: FP8 as bytes."""
    return stored.view(torch.uint8) if stored.dtype is FP8 else stored


def write_rows(stored: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float = 1.0) -> None:
    """Write rows [tokens, ...] to the slots [tokens] int64 of a cache. They are detached: a cache outlives every autograd graph.

    Args:
        scale: quantization scale of an FP8 cache. Values are clamped to 448 times the scale.
    """
    rows = rows.detach()
    if stored.dtype is FP8:
        rows = (rows.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    memory_of(stored).index_copy_(0, slots, memory_of(rows.to(stored.dtype)))


def read_rows(stored: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The slots [tokens] int64 of a cache as rows [tokens, ...] of a dtype, in fresh memory."""
    found = memory_of(stored).index_select(0, slots)
    if stored.dtype is not FP8:
        return found.to(dtype)
    rows = found.view(FP8).to(dtype)
    return rows if scale == 1 else rows.mul_(scale)
