"""The three pools behind paged attention.

`ReqToTokenPool` gives each running request a row with the KV slot of each of its positions. `TokenToKVPoolAllocator` hands out
pages of slots, and `KVPool` holds their K and V:

    pages = allocator.alloc_pages(2)                                   # [7, 3]
    row = req_to_token_pool.alloc()
    req_to_token_pool.write(row, 0, allocator.slots_of(pages, 0, 20))  # page_size 16: 112..127, 48..51
    req_to_token_pool.apply_staged_writes()

Row 0 and page 0 are dummies for padding. They are never handed out, so a padded row of a captured graph reads and
writes no request's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from ..utils.device import resolve_dtype
from .state_pool import HostState


class ReqToTokenPool:
    """Rows that map a request's positions to KV slots.

    Args:
        size: rows to hand out, numbered 1..size; row 0 is the dummy.
        max_context_len: positions in a row.
        device: device of `req_to_token`.

    `req_to_token`: [size + 1, max_context_len] int32. It changes in `apply_staged_writes` and `clear` only, never
    during a pass. Entries beyond a request's length are stale.
    """

    def __init__(self, size: int, max_context_len: int, device: str | torch.device) -> None:
        for name, value in (("size", size), ("max_context_len", max_context_len)):
            if value < 1:
                raise ValueError(f"ReqToTokenPool({name}={value}): expected at least 1")
        self.size = size
        self.max_context_len = max_context_len
        self.device = torch.device(device)
        self.req_to_token = torch.zeros(size + 1, max_context_len, dtype=torch.int32, device=self.device)
        self._host = np.zeros((size + 1, max_context_len), dtype=np.int32)
        self.clear()

    def close(self) -> None:
        """Free the memory on the device, whoever still holds the pool."""
        self.req_to_token = torch.empty(0, dtype=torch.int32, device=self.device)

    def clear(self) -> None:
        """Take back all rows, drop staged writes, and zero the table."""
        self._free = list(range(self.size, 0, -1))
        self._live: set[int] = set()
        self._dirty: dict[int, tuple[int, int]] = {}
        self._host.fill(0)
        self.req_to_token.zero_()

    def available_size(self) -> int:
        """Rows that can be handed out."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A row, or None when all are in use."""
        if not self._free:
            return None
        row = self._free.pop()
        self._live.add(row)
        return row

    def claim(self, row: int) -> None:
        """Mark `row` as used, if the pool of another process handed it out. A used row is unchanged.
        Raises ValueError: not one of rows 1..size."""
        if row not in self._live:
            if row not in self._free:
                raise ValueError(f"claim(row={row}): expected a row of 1..{self.size}")
            self._free.remove(row)
            self._live.add(row)

    def free(self, row: int) -> None:
        """Take `row` back; its staged writes are dropped.
        Raises ValueError: the row is not in use (freed twice, or the dummy row 0)."""
        self._check_live("free", row)
        self._live.remove(row)
        self._dirty.pop(row, None)
        self._free.append(row)

    def write(self, row: int, start: int, slots: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Stage the slots of positions ``start, start + 1, ...`` of `row`: visible after `apply_staged_writes`.
        Raises ValueError: the row is not in use, or the positions do not fit in it."""
        self._check_live("write", row)
        stop = start + len(slots)
        if start < 0 or stop > self.max_context_len:
            raise ValueError(
                f"write(row={row}) to positions {start}..{stop - 1}, but a row is {self.max_context_len} wide; admit only "
                "requests whose prompt and new tokens fit in max_context_len"
            )
        if stop == start:
            return
        self._host[row, start:stop] = slots.cpu().numpy() if isinstance(slots, torch.Tensor) else slots
        low, high = self._dirty.get(row, (start, stop))
        self._dirty[row] = min(low, start), max(high, stop)

    def apply_staged_writes(self) -> None:
        """Make the staged writes visible: one transfer and one index copy, whatever their number."""
        if not self._dirty:
            return
        rows = np.fromiter(self._dirty, dtype=np.int64)
        low, high = np.array(list(self._dirty.values()), dtype=np.int64).T
        sizes = high - low
        first = np.cumsum(sizes) - sizes
        index = np.repeat(rows * self.max_context_len + low - first, sizes) + np.arange(sizes.sum())
        staged = torch.from_numpy(np.stack((index, self._host.reshape(-1)[index])))
        if self.device.type == "cuda":
            staged = staged.pin_memory().to(self.device, non_blocking=True)
        self.req_to_token.view(-1).index_copy_(0, staged[0], staged[1].to(torch.int32))
        self._dirty.clear()

    def _check_live(self, action: str, row: int) -> None:
        if row not in self._live:
            why = "row 0 is the dummy row of padding" if row == 0 else "it was freed already, or never handed out"
            raise ValueError(f"{action}(row={row}): expected a row that alloc() handed out; {why}")


class TokenToKVPoolAllocator:
    """Hands out pages of KV slots; page ``p`` is the slots ``p * page_size`` up to ``(p + 1) * page_size``.

    Args:
        size: slots to hand out; rounded down to whole pages. The dummy page 0 comes on top.
        page_size: slots in a page.
    """

    def __init__(self, size: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = _num_pages(size, page_size)
        self.size = self.num_pages * page_size
        self.clear()

    def clear(self) -> None:
        """Take back all pages."""
        self._free = list(range(self.num_pages, 0, -1))
        self._live: set[int] = set()

    def available_pages(self) -> int:
        return len(self._free)

    def available_size(self) -> int:
        """Slots in the free pages."""
        return len(self._free) * self.page_size

    def alloc_pages(self, n: int) -> list[int] | None:
        """`n` pages, or None (and nothing taken) when fewer are free."""
        if n < 0:
            raise ValueError(f"alloc_pages(n={n}): expected 0 or more")
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._live.update(pages)
        return pages

    def free_pages(self, pages: Iterable[int]) -> None:
        """Take `pages` back: all of them, or none when it raises.
        Raises ValueError: a page is not in use (freed twice, or the dummy page 0)."""
        pages = list(pages)
        if len(set(pages)) != len(pages) or not self._live.issuperset(pages):
            wrong = sorted({page for page in pages if page not in self._live or pages.count(page) > 1})
            raise ValueError(
                f"free_pages: pages {wrong} are not in use or come twice; free each page that alloc_pages() handed out "
                "once (page 0 is the dummy page of padding)"
            )
        self._live.difference_update(pages)
        self._free.extend(pages)

    def slots_of(self, pages: Sequence[int], start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: slots of positions ``start`` up to `stop` of a request; its `pages` are in order of position.
        Raises ValueError: the pages do not reach that far."""
        size = self.page_size
        if start < 0 or stop > len(pages) * size:
            raise ValueError(
                f"slots_of(start={start}, stop={stop}): {len(pages)} pages of {size} slots do not reach there"
            )
        first, positions = start // size, np.arange(start, stop)
        held = np.array(pages[first : -(-stop // size)], dtype=np.int64)
        return held[positions // size - first] * size + positions % size

    def check_integrity(self, live: Iterable[int]) -> None:
        """Check that the free pages and `live` (the pages that requests and caches hold) are all pages, each once.
        Raises AssertionError: a page is lost, held twice, free and held, or the dummy page 0."""
        held = list(live)
        if sorted(self._free + held) == list(range(1, self.num_pages + 1)):
            return
        counts = Counter(self._free + held)
        wrong = [
            page for page in {*range(1, self.num_pages + 1), *counts} if counts[page] != (1 <= page <= self.num_pages)
        ]
        raise AssertionError(
            f"{len(self._free)} pages are free and {len(held)} held of {self.num_pages}; each of 1..{self.num_pages} must "
            f"stand there once and no other, but found { ({page: counts[page] for page in sorted(wrong)[:16]}) } times"
        )


def _num_pages(size: int, page_size: int) -> int:
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: expected at least 1")
    if size < page_size:
        raise ValueError(f"size={size} slots do not make one page of page_size={page_size}; raise kv_cache_tokens")
    return size // page_size


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
        """Write K and V from `swap_out` to `slots`, bit for bit. Raises ValueError: the numbers of slots and tokens differ."""
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
