"""Computed tokens of a draft model for each request: KV pages, and a row of its request table."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ...core.request import Request
from ...core.step import PageWrite
from ...mem_cache.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator


@dataclass(eq=False, slots=True)
class DraftSequence:
    """One request, as the draft model sees it."""

    request: weakref.ref[Request]
    row: int
    """Row of the draft model's request table."""
    first: int = 0
    """The token at the draft's position 0 has this position in the request."""
    tokens: list[int] = field(default_factory=list)
    """Tokens with KV in `pages`, by position. The last ones may be drafts."""
    num_known: int = 0
    """The first of them are the request's own."""
    pages: list[int] = field(default_factory=list)
    num_pages_sent: int = 0
    """Pages that the draft's runner knows."""
    entered: bool = False
    """Whether the draft's table has the request."""


class DraftSequences:
    """The sequences of a draft model. They are a cache: one without room is dropped, and computed again when it is asked for.

    Args:
        rows, allocator: request table and page allocator of the draft's runner.
    """

    def __init__(self, rows: ReqToTokenPool, allocator: TokenToKVPoolAllocator) -> None:
        self._rows, self._allocator = rows, allocator
        self._found: dict[str, DraftSequence] = {}  # the least recently used first
        self.dropped: set[str] = set()
        """Requests without a sequence that the runner must still drop."""

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[DraftSequence]:
        return iter(self._found.values())

    def get(self, request_id: str) -> DraftSequence | None:
        """The request's sequence, if there is one."""
        return self._found.get(request_id)

    def drop_ended(self) -> None:
        """Drop the sequences of requests that have ended."""
        for request_id, sequence in list(self._found.items()):
            request = sequence.request()
            if request is None or request.finished:
                self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Release the pages and the row of the request's sequence."""
        sequence = self._found.pop(request_id, None)
        if sequence is not None:
            self._allocator.free_pages(sequence.pages)
            self._rows.free(sequence.row)
            if sequence.entered:
                self.dropped.add(request_id)

    def clear(self) -> None:
        """Drop all: a pass of the draft failed."""
        for request_id in list(self._found):
            self.drop(request_id)

    def take(self, request: Request, num_tokens: int, busy: Collection[str]) -> DraftSequence | None:
        """The request's sequence with pages for this many tokens, marked as used. None without room.

        Args:
            busy: requests with sequences that must stay.
        """
        request_id, size = request.request_id, self._allocator.page_size
        found = self._found.pop(request_id, None)
        if found is None:
            row = self._rows.alloc()
            if row is None and self._evict(busy):
                row = self._rows.alloc()
            if row is None:
                return None
            found = DraftSequence(weakref.ref(request), row)
        self._found[request_id] = found
        missing = -(-num_tokens // size) - len(found.pages)
        while missing > self._allocator.available_pages() and self._evict({*busy, request_id}):
            pass
        pages = self._allocator.alloc_pages(max(missing, 0))
        if pages is None:
            self.drop(request_id)
            return None
        found.pages += pages
        return found

    def _evict(self, busy: Collection[str]) -> bool:
        """Drop the least recently used sequence; False: all are busy."""
        oldest = next((request_id for request_id in self._found if request_id not in busy), None)
        if oldest is not None:
            self.drop(oldest)
        return oldest is not None

    @staticmethod
    def page_writes(sequences: Sequence[DraftSequence]) -> list[PageWrite]:
        """The pages that the runner does not know yet, which it is now told."""
        found = []
        for sequence in sequences:
            if sequence.num_pages_sent < len(sequence.pages):
                found.append(
                    PageWrite(sequence.row, sequence.num_pages_sent, sequence.pages[sequence.num_pages_sent :])
                )
                sequence.num_pages_sent = len(sequence.pages)
        return found

    def check_integrity(self) -> None:
        """Every page and row is free or held by one sequence. Raises AssertionError otherwise."""
        self._allocator.check_integrity(page for sequence in self for page in sequence.pages)
        rows = [sequence.row for sequence in self]
        assert len(set(rows)) == len(rows) and self._rows.available_size() + len(rows) == self._rows.size, rows
