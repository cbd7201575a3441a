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
from collections.abc import Iterable, Sequence

import numpy as np
import torch


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

        Raises:
            ValueError: not one of rows 1..size.
        """
        if row not in self._live:
            if row not in self._free:
                raise ValueError(f"claim(row={row}): expected a row of 1..{self.size}")
            self._free.remove(row)
            self._live.add(row)

    def free(self, row: int) -> None:
        """Take `row` back; its staged writes are dropped.

        Raises:
            ValueError: the row is not in use (freed twice, or the dummy row 0).
        """
        self._check_live("free", row)
        self._live.remove(row)
        self._dirty.pop(row, None)
        self._free.append(row)

    def write(self, row: int, start: int, slots: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Stage the slots of positions ``start, start + 1, ...`` of `row`: visible after `apply_staged_writes`.

        Raises:
            ValueError: the row is not in use, or the positions do not fit in it.
        """
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

        Raises:
            ValueError: a page is not in use (freed twice, or the dummy page 0).
        """
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

        Raises:
            ValueError: the pages do not reach that far.
        """
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

        Raises:
            AssertionError: a page is lost, held twice, free and held, or the dummy page 0.
        """
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
