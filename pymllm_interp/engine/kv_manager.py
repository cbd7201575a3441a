"""KV pages and rows of live requests. It is the only owner of free, held and cached pages.

A request's first `num_shared_pages` pages belong to the prefix cache, which it holds; the others are its own. Its owner writes a
page before a later request can share it, in the same step or a later one.

Invariant (`check_integrity`): a page is exactly one of free, a live request's, in the prefix cache, or page 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ..core.request import Request, RequestStatus
from ..core.step import PageWrite
from ..mem_cache.kv_connector import page_keys
from ..mem_cache.memory_pool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from ..mem_cache.radix_cache import TOKEN, Match, Node, RadixCache
from ..mem_cache.spill_connector import SpillConnector
from ..mem_cache.state_pool import StatePool
from ..runner.interp_model_runner import InterpModelRunner
from .cross_pages import CrossPages
from .prefix_sharing import PrefixSharing


class KVManager:
    """Gives requests pages and rows, swaps their KV to the host and back, and shares pages by the prefix cache.

    Args:
        rows: rows of the request table.
        allocator: pages of the pool.
        kv_pool: the K and V themselves.
        sharing: the prefix cache's sharing; None: off.
        states: recurrent states by row; None if no layer has any.
        rope_boundary: see `ModelSpec`.
        cross: pages of encoder inputs; None in a model without an encoder.

    Attributes:
        sharing: the rules and counts of the prefix cache.
    """

    def __init__(
        self,
        rows: ReqToTokenPool,
        allocator: TokenToKVPoolAllocator,
        kv_pool: KVPool,
        sharing: PrefixSharing | None = None,
        states: StatePool | None = None,
        rope_boundary: int | None = None,
        cross: CrossPages | None = None,
        whole_images: bool = False,
        spill: SpillConnector | None = None,
    ) -> None:
        self.cross, self.whole_images = cross, whole_images
        self._freed_images: set[bytes] = set()
        self.states, self.rope_boundary = states, rope_boundary
        self.rows, self.allocator, self.kv_pool = rows, allocator, kv_pool
        self.page_size = allocator.page_size
        self.sharing = sharing or PrefixSharing(RadixCache(self.page_size), None)
        self._tree = self.sharing.tree
        self._changed: dict[str, Request] = {}
        self._snapshots = None if states is None or not states.snapshots.size else states.snapshots
        self._unwritten: set[int] = set()  # pages that entered the tree since the last launch
        self._weights_are_known = False
        self._spill = spill
        if spill is not None:
            self._tree.on_evict = self._spill_pages

    @classmethod
    def of(cls, runner: InterpModelRunner) -> KVManager:
        """The pools of an initialised runner."""
        rows, allocator, kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool_allocator, runner.token_to_kv_pool
        assert rows is not None and allocator is not None and kv_pool is not None, "call initialize() first"
        why_off, spec = _why_no_prefixes(runner), runner.model_spec
        sharing = PrefixSharing(RadixCache(allocator.page_size), None if why_off else runner.model_state, why_off)
        cross, whole = None if runner.cross_pool is None else CrossPages(runner.cross_pool), spec.image_span > 0
        spill = runner.kv_connector if isinstance(runner.kv_connector, SpillConnector) else None
        return cls(rows, allocator, kv_pool, sharing, runner.gdn_pool, spec.rope_boundary, cross, whole, spill)

    # -- pages -------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages for this many positions."""
        return -(-num_tokens // self.page_size)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free, or can be evicted."""
        return self.allocator.available_pages() + self._tree.num_evictable

    def fits(self, requests: list[Request], spare: int = 0) -> bool:
        """Whether there are pages for all tokens that the requests have so far, and `spare` more."""
        if self.cross is not None and not self.cross.fits(requests):
            return False
        missing = sum([self.pages_for(r.num_tokens) - len(r.pages) for r in requests]) + spare
        if missing <= self.num_available_pages:
            return True
        matches = [match for r in requests if (match := self._match(r)) is not None]
        missing -= sum([len(match.pages) - match.num_evictable for match in matches])
        return missing <= self.num_available_pages

    def num_cached_tokens(self, request: Request) -> int:
        """Positions of a waiting request that would use KV of the prefix cache."""
        match = self._match(request)
        return 0 if match is None else len(match.pages) * self.page_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request pages for `num_tokens` positions in all. False, and nothing given: too few are available."""
        missing = self.pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.allocator.available_pages():
            if self._spill is not None:
                self._check_weights()  # else it keeps KV of old weights by the name of the new ones
            self._free(self._tree.evict(max(missing - self.allocator.available_pages(), 0)))
        pages = self.allocator.alloc_pages(missing)
        if pages is None:
            return False
        request.pages.extend(pages)
        self._changed[request.request_id] = request
        return True

    def trim(self, request: Request, num_tokens: int) -> None:
        """Take back the request's own pages behind its first `num_tokens` positions: drafts had them that were not accepted."""
        kept = max(self.pages_for(num_tokens), request.num_shared_pages)
        self._free(request.pages[kept:])
        del request.pages[kept:]
        request.num_pages_sent = min(request.num_pages_sent, kept)

    def admit(self, request: Request) -> None:
        """Give the request a row, and pages for the tokens that it has: known ones first. `fits` must hold for it."""
        row = self.rows.alloc()
        assert row is not None, "there are as many rows as running requests"
        request.req_pool_idx, request.num_entered = row, request.num_tokens
        if self.cross is not None:
            self.cross.admit(request)
        match = self._match(request)
        if match is not None:
            request.prefix.node = self._tree.hold(match)
            match = self._with_spilled(request, match)
            request.pages, request.num_shared_pages = list(match.pages), len(match.pages)
            request.kv_len = len(match.pages) * self.page_size
            if self._snapshots is not None:
                if match.pages:
                    self._snapshots.restore(match.pages[-1], row)
                self._plan_snapshots(request)
        grown = self.grow(request, request.num_tokens)
        assert grown, "fits() counted the pages"
        self.resend(request)

    def _spill_pages(self, node: Node, kept: int) -> None:
        """Keep the KV of a node's pages behind its first `kept`, which are evicted."""
        assert self._spill is not None
        if self._key_of(node) is not None:
            self._spill.save(node.keys[kept:], node.pages[kept:])

    def _key_of(self, node: Node) -> bytes | None:
        """Key of the node's last page. Nodes keep their keys. None: a namespace has no value outside of this process."""
        assert self._spill is not None
        key = self._spill.root
        for each in reversed(list(node.path())):
            if (known := len(each.keys)) < len(each.pages):
                start = each.keys[-1] if known else key
                each.keys += page_keys(start, each.edges(known, self.page_size * TOKEN))
                if len(each.keys) < len(each.pages):
                    return None
            key = each.keys[-1] if each.keys else key
        return key

    def _with_spilled(self, request: Request, match: Match) -> Match:
        """The match, after pages of the connector that follow it entered the tree. The request holds it."""
        spill, key, known = self._spill, request.prefix.key, len(match.pages)
        most = self.sharing.limit_of(request) // self.page_size
        held = request.prefix.node
        if spill is None or known >= most or (start := self._key_of(held)) is None:
            return match
        keys = spill.known(page_keys(start, map(key.edge, range(known, most))))
        count = self._whole(request, known + len(keys)) - known
        if (short := count - self.allocator.available_pages()) > 0:
            self._free(self._tree.evict(short))
        pages = self.allocator.alloc_pages(count) if count > 0 else None
        if pages is None:
            return match
        count = max(self._whole(request, known + spill.restore(keys[:count], pages)) - known, 0)
        self._free(pages[count:])
        self._free(self._tree.insert(held, key, known, pages[:count]))
        found = self._tree.match(key, known + count)
        request.prefix.node = self._tree.hold(found)
        self._free(self._tree.release(held))
        return found

    def _whole(self, request: Request, count: int) -> int:
        """Number of pages, at most `count`, that end inside of no edit of K and V."""
        return count if request.declared is None else request.declared.whole_pages(count, self.page_size)

    def _match(self, request: Request) -> Match | None:
        if request.status is RequestStatus.SWAPPED:
            return None
        self._check_weights()
        match = self.sharing.match(request)
        if match is None or self._snapshots is None:
            return match
        known, prefix = self._snapshots.longest(match.pages), request.prefix
        prefix.num_known = len(match.pages)
        if known == prefix.num_known:
            return match
        reason = prefix.reason or "no states were kept there"
        match, prefix.reason = self.sharing.match(request, known), reason
        return match

    def outgrown(self, requests: Iterable[Request]) -> list[Request]:
        """Requests with a next position behind `rope_boundary`, and keys that were rotated for a length within it."""
        boundary = self.rope_boundary
        if boundary is None:
            return []
        return [r for r in requests if r.num_entered <= boundary <= r.kv_len and r.num_tokens_left]

    def withdraw(self, request: Request) -> None:
        """Undo `admit` for a request."""
        self.release(request, keep=False)
        request.kv_len = 0

    def release(self, request: Request, keep: bool = True) -> None:
        """Take back the request's row and pages. A second call does nothing.

        Args:
            keep: leave its computed KV to the prefix cache.
        """
        first, prefix = request.num_shared_pages, request.prefix
        own = request.pages[first:]
        if prefix is not None and prefix.node is not None:
            known = self._settled(request, request.num_known_tokens) // self.page_size
            if keep and first < known and self._may_insert(request):
                self.sharing.complete(request, prefix.key)
                own = own[known - first :] + self._tree.insert(prefix.node, prefix.key, first, own[: known - first])
            own += self._tree.release(prefix.node)
            prefix.node = None
        self._free(own)
        request.state_stops.clear()
        request.pages, request.num_shared_pages, request.num_pages_sent = [], 0, 0
        self._changed.pop(request.request_id, None)
        if self.cross is not None:
            self.cross.release(request)
        if request.cache_salt is not None:
            self._freed_images |= {image.content for image in request.scoped_images}
        if request.req_pool_idx is not None:
            self.rows.free(request.req_pool_idx)
            request.req_pool_idx = None

    # -- the prefix cache ------------------------------------------------------------------

    def share(self, request: Request, stop: int) -> None:
        """Give the full pages of the request's first `stop` positions to the prefix cache, if their tokens are accepted.

        They are computed, or will be in the step that is being scheduled. Later requests may use them in that step: each layer
        writes all rows' K and V before its attention.
        """
        stop = self._settled(request, min(stop, request.prompt_len + request.accepted_len))
        first, full = request.num_shared_pages, stop // self.page_size
        if first < full and self._may_insert(request):
            prefix, pages = request.prefix, request.pages[first:full]
            self.sharing.complete(request, prefix.key)
            prefix.node, taken = self._tree.extend(prefix.node, prefix.key, first, pages)
            request.num_shared_pages += taken
            self._unwritten.update(pages[:taken])

    @staticmethod
    def _settled(request: Request, stop: int) -> int:
        """The request's positions before `stop` with K and V that are not replaced later."""
        settled = None if request.declared is None else request.declared.settled(request.kv_len)
        return stop if settled is None else min(stop, settled)

    def _may_insert(self, request: Request) -> bool:
        self._check_weights()
        return self.sharing.may_insert(request)

    def begin(self) -> None:
        """Something is about to be scheduled, or read: the weights may have been edited since."""
        self._weights_are_known = False

    def _check_weights(self) -> None:
        if not self._weights_are_known:
            self._weights_are_known = True
            if self.sharing.model_changed():
                self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all KV of requests that have ended. Running requests keep theirs."""
        if self.cross is not None:
            self.cross.forget()
        if self._snapshots is not None:
            self._snapshots.clear()
        self._free(self._tree.reset())

    def discard_unwritten(self) -> None:
        """Remove the pages that the failed last step was to write from the prefix cache. No request may hold them."""
        self._free(self._tree.discard(self._unwritten))
        self._unwritten.clear()

    # -- snapshots of recurrent states -----------------------------------------------------

    def chunk(self, request: Request, budget: int) -> int:
        """Tokens of the request's next chunk. Chunks end at captured states, and at due snapshots. A snapshot that is due now
        is taken.

        Args:
            budget: the chunk's tokens at most. An image that is not split may exceed it.
        """
        tokens, stops = min(request.num_tokens_left, budget), request.state_stops
        while stops and stops[0] <= request.kv_len:
            if stops.pop(0) == request.kv_len:
                self._keep_snapshot(request)
        stop = None if request.declared is None else request.declared.state_stop(request.kv_len)
        tokens = min([tokens, *(each - request.kv_len for each in (*stops[:1], stop) if each is not None)])
        return self.with_whole_images(request, tokens)

    def with_whole_images(self, request: Request, tokens: int) -> int:
        """Tokens of a chunk that splits no image with attention in both directions. It may end behind one that it begins with."""
        if not (self.whole_images and tokens):
            return tokens
        start, end = request.kv_len, request.kv_len + tokens
        for image in request.images:
            first, stop = int(image.positions[0]), int(image.positions[-1]) + 1
            if first < end < stop:
                return first - start if first > start else stop - start
        return tokens

    def _plan_snapshots(self, request: Request) -> None:
        """Plan snapshots of an admitted request: at the end of its cached pages, and at its prompt's last page."""
        if len(request.unit) > 1:  # its prompt runs in one pass
            return
        pages = {request.prefix.num_known, (request.prompt_len - 1) // self.page_size}
        request.state_stops = sorted(n * self.page_size for n in pages if n * self.page_size > request.kv_len)

    def _keep_snapshot(self, request: Request) -> None:
        """Keep the states of all positions so far, with the page that ends there."""
        assert self._snapshots is not None and request.req_pool_idx is not None
        if self._may_insert(request):
            self._adopt(request, request.kv_len // self.page_size)
            self._snapshots.keep(request.pages[request.kv_len // self.page_size - 1], request.req_pool_idx)

    def _adopt(self, request: Request, num_pages: int) -> None:
        """Make the prefix cache own the request's first pages. If the cache has equal pages, the request releases its
        duplicates.

        `share` stops at pages that the cache has. A request that computes them again, for its states, has separate pages.
        """
        first, prefix = request.num_shared_pages, request.prefix
        if first >= num_pages:
            return
        own = self._tree.insert(prefix.node, prefix.key, first, request.pages[first:num_pages])
        match = self._tree.match(prefix.key, num_pages)
        node = self._tree.hold(match)
        own += self._tree.release(prefix.node)
        prefix.node, request.num_shared_pages = node, num_pages
        request.pages[:num_pages] = match.pages
        self._free(own)
        self.resend(request)

    def comes_after(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a snapshot of the same prompt is about to be kept, which another of its samples will start from."""
        if self._snapshots is None or not request.sample_index:
            return False
        return any(other.state_stops and other.prompt_token_ids is request.prompt_token_ids for other in running)

    def _free(self, pages: list[int]) -> None:
        if self._snapshots is not None:
            self._snapshots.drop(pages)
        self.allocator.free_pages(pages)

    # -- updates for the runner --------------------------------------------------------------

    def take_freed_images(self) -> set[bytes]:
        """Contents of images of released requests with a cache salt, since the last call."""
        freed, self._freed_images = self._freed_images, set()
        return freed

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
        self._unwritten.clear()
        if self.cross is not None:
            self.cross.sent()

    def resend(self, request: Request) -> None:
        """Tell the runner all pages of the request again."""
        request.num_pages_sent = 0
        if request.pages:
            self._changed[request.request_id] = request

    # -- moving KV ---------------------------------------------------------------------------

    def swap_out(self, request: Request) -> None:
        """Copy the request's KV and states to host memory. Raises RuntimeError, MemoryError: no memory for the copy."""
        host = self.kv_pool.swap_out(self._slots(request, request.kv_len))
        if self.states is not None and request.req_pool_idx is not None:
            host = replace(host, states=self.states.swap_out(request.req_pool_idx))
        if self.cross is not None:
            host = replace(host, cross=self.cross.swap_out(request))
        request.host_kv = host

    def swap_in(self, request: Request) -> None:
        """Copy the request's KV from host memory to its pages, and its states to its slot.
        Raises RuntimeError, MemoryError: no memory for the copy."""
        self.kv_pool.swap_in(self._slots(request, request.kv_len), request.host_kv)
        if self.states is not None and request.req_pool_idx is not None:
            self.states.swap_in(request.req_pool_idx, request.host_kv.states)
        if self.cross is not None:
            self.cross.swap_in(request, request.host_kv.cross)
        request.host_kv = None

    def _slots(self, request: Request, stop: int) -> np.ndarray:
        """KV slots of the request's positions below `stop`, [stop] int64."""
        return self.allocator.slots_of(request.pages, 0, stop)

    # -- checks ------------------------------------------------------------------------------

    def check_integrity(self, running: Iterable[Request], idle: Iterable[Request]) -> None:
        """Every page is free, in the prefix cache, or held by one live request. Raises AssertionError otherwise."""
        running, idle = list(running), list(idle)
        own = [page for request in running for page in request.pages[request.num_shared_pages :]]
        kept = self._tree.pages()
        self.allocator.check_integrity([*own, *kept])
        self._tree.check_integrity(
            [r.prefix.node for r in running if r.prefix is not None and r.prefix.node is not None]
        )
        rows = [request.req_pool_idx for request in running]
        if self.cross is not None:
            self.cross.check_integrity(running)
        assert None not in rows and 0 not in rows and len(set(rows)) == len(rows), f"rows {rows}"
        assert self.rows.available_size() + len(rows) == self.rows.size, "rows leaked"
        for request in running:
            held = len(request.pages) * self.page_size
            assert request.kv_len <= held, request.request_id
            if request.num_shared_pages:
                path = [page for node in reversed(list(request.prefix.node.path())) for page in node.pages]
                assert path == request.pages[: request.num_shared_pages], f"{request.request_id} holds other pages"
        wrong = [r.request_id for r in idle if r.req_pool_idx is not None or r.pages]
        assert not wrong, f"rows or pages held by requests that do not run: {wrong}"
        started = [r for r in idle if r.kv_len and r.status is not RequestStatus.SWAPPED]
        assert not started, f"{[r.request_id for r in started]} wait, and have KV"


def _why_no_prefixes(runner: InterpModelRunner) -> str:
    """Reason that requests share no prefixes, or ""."""
    if not runner.server_config.enable_prefix_caching:
        return "enable_prefix_caching=False"
    if runner.gdn_pool is not None and not runner.gdn_pool.snapshots.size:
        return "state_cache_bytes holds no snapshot of the recurrent states, which cannot be cut at a page"
    return "a position's rotation depends on its sequence's length" if runner.model_spec.rope_depends_on_length else ""
