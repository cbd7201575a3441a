"""KV pages and rows of live requests: the only owner of what is free and what is held.

Invariant (`check_integrity`): free pages and pages of live requests are all pages, disjoint, without page 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..core.request import Request, RequestStatus
from ..core.step import PageWrite
from ..mem_cache.kv_pool import KVPool
from ..mem_cache.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator


class KVManager:
    """Gives pages and rows to requests, moves their KV to the host and back, and shares a prompt's KV.

    Args:
        rows: rows of the request table.
        allocator: pages of the pool.
        kv_pool: the K and V themselves.
    """

    def __init__(self, rows: ReqToTokenPool, allocator: TokenToKVPoolAllocator, kv_pool: KVPool) -> None:
        self.rows, self.allocator, self.kv_pool = rows, allocator, kv_pool
        self.page_size = allocator.page_size
        self._changed: dict[str, Request] = {}

    # -- pages -------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many positions take."""
        return -(-num_tokens // self.page_size)

    def fits(self, requests: list[Request]) -> bool:
        """Whether pages are free for all tokens that the requests have so far."""
        missing = sum([self.pages_for(r.num_tokens) - len(r.pages) for r in requests])
        return missing <= self.allocator.available_pages()

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request pages for `num_tokens` positions in all. False, and nothing given: too few are free."""
        missing = self.pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        pages = self.allocator.alloc_pages(missing)
        if pages is None:
            return False
        request.pages.extend(pages)
        self._changed[request.request_id] = request
        return True

    def admit(self, request: Request) -> None:
        """Give the request a row, and pages for the tokens that it has. `fits` must hold for it."""
        row = self.rows.alloc()
        assert row is not None, "there are as many rows as running requests"
        request.req_pool_idx = row
        grown = self.grow(request, request.num_tokens)
        assert grown, "fits() counted the pages"
        self.resend(request)

    def release(self, request: Request) -> None:
        """Take back the request's row and pages. A second call does nothing."""
        if request.pages:
            self.allocator.free_pages(request.pages)
            request.pages = []
        request.num_pages_sent = 0
        self._changed.pop(request.request_id, None)
        if request.req_pool_idx is not None:
            self.rows.free(request.req_pool_idx)
            request.req_pool_idx = None

    # -- what the runner is told -----------------------------------------------------------

    def page_writes(self) -> list[PageWrite]:
        """Pages of running requests that the runner does not know yet."""
        return [
            PageWrite(request.req_pool_idx, request.num_pages_sent, request.pages[request.num_pages_sent :])
            for request in self._changed.values()
            if request.req_pool_idx is not None
        ]

    def sent(self) -> None:
        """The step with the last `page_writes` was launched."""
        for request in self._changed.values():
            if request.req_pool_idx is not None:
                request.num_pages_sent = len(request.pages)
        self._changed = {rid: request for rid, request in self._changed.items() if request.req_pool_idx is None}

    def resend(self, request: Request) -> None:
        """Tell the runner all pages of the request again."""
        request.num_pages_sent = 0
        if request.pages:
            self._changed[request.request_id] = request

    # -- moving KV ---------------------------------------------------------------------------

    def swap_out(self, request: Request) -> None:
        """Copy the request's KV to host memory.

        Raises:
            RuntimeError, MemoryError: no memory for the copy.
        """
        request.host_kv = self.kv_pool.swap_out(self._slots(request, request.num_computed_tokens))

    def swap_in(self, request: Request) -> None:
        """Copy the request's KV from host memory to its pages.

        Raises:
            RuntimeError, MemoryError: no memory for the copy.
        """
        self.kv_pool.swap_in(self._slots(request, request.num_computed_tokens), request.host_kv)
        request.host_kv = None

    def share_prefix(self, leader: Request, follower: Request) -> None:
        """Copy the KV of the leader's prompt, without its last token, to a request with the same prompt.

        Nothing is copied where the leader was preempted, where the follower has pages, or where no page is free.
        """
        shared = leader.prompt_len - 1 if leader.pages else 0
        if shared and not follower.pages and self.grow(follower, shared):
            self.kv_pool.copy(self._slots(leader, shared), self._slots(follower, shared))
            follower.num_computed_tokens = shared

    def drop_prefix(self, request: Request) -> bool:
        """Take back the pages of a waiting request that shares a prefix. False: it has none."""
        if not request.pages:
            return False
        self.release(request)
        request.num_computed_tokens = 0
        return True

    def _slots(self, request: Request, stop: int) -> np.ndarray:
        """[stop] int64."""
        return self.allocator.slots_of(request.pages, 0, stop)

    # -- checks ------------------------------------------------------------------------------

    def check_integrity(self, running: Iterable[Request], idle: Iterable[Request]) -> None:
        """Every page and row is free or held by one live request. Raises AssertionError otherwise."""
        running, idle = list(running), list(idle)
        live = [*running, *idle]
        self.allocator.check_integrity([page for request in live for page in request.pages])
        rows = [request.req_pool_idx for request in running]
        assert None not in rows and 0 not in rows and len(set(rows)) == len(rows), f"rows {rows}"
        assert self.rows.available_size() + len(rows) == self.rows.size, "rows leaked"
        for request in live:
            held = len(request.pages) * self.page_size
            assert request.num_computed_tokens <= held or request.status is RequestStatus.SWAPPED, request.request_id
        wrong = [r.request_id for r in idle if r.req_pool_idx is not None]
        assert not wrong, f"rows held by requests that do not run: {wrong}"
