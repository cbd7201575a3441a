"""`CrossPages`: hands pages of the cross pool to requests of an encoder-decoder model.

Requests with equal encoder inputs and cache salts share pages. One of them runs the encoder. A request with hooks in the
encoder has pages for itself. Pages are freed with their last request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.pass_parts import EncoderInput, EncoderRun
from ..core.request import Request
from ..mem_cache.cross_pool import CrossPool
from ..mem_cache.memory_pool import HostKV


@dataclass(eq=False)
class HeldPages:
    """Pages of one encoder input.

    Attributes:
        key: content of the input, or the request that has them for itself; another object once the model was edited.
        computed: a launched step has written them.
    """

    key: Any
    pages: list[int]
    holders: int = 0
    computed: bool = False

    def run_of(self, encoder: EncoderInput) -> EncoderRun:
        """The encoder's side of a request with these pages, as the runner gets it."""
        return EncoderRun(encoder, self.pages, self.computed)


class CrossPages:
    """The pages of running requests, by encoder input."""

    def __init__(self, pool: CrossPool) -> None:
        self._pool = pool
        self._held: dict[Any, HeldPages] = {}
        self._new: list[HeldPages] = []

    @property
    def num_free_tokens(self) -> int:
        """Positions in free pages."""
        return self._pool.allocator.available_size()

    def fits(self, requests: Iterable[Request]) -> bool:
        """Whether there are pages for the encoder inputs of all these requests."""
        missing = {_key(r): self._num_pages(r) for r in requests if _key(r) not in self._held}
        return sum(missing.values()) <= self._pool.allocator.available_pages()

    def cost(self, requests: Iterable[Request]) -> int:
        """Encoder positions to compute if the requests are admitted now. They take a step's time as tokens do."""
        found = {_key(r): r.encoder.length for r in requests if r.encoder is not None}
        return sum(length for key, length in found.items() if key not in self._held)

    def admit(self, request: Request) -> None:
        """Give the request its pages. `fits` must hold for it."""
        key = _key(request)
        held = self._held.get(key)
        if held is None:
            pages = self._pool.allocator.alloc_pages(self._num_pages(request))
            assert pages is not None, "fits() counted the pages"
            held = self._held[key] = HeldPages(key, pages)
            self._new.append(held)
        held.holders += 1
        request.cross = held

    def release(self, request: Request) -> None:
        """Take back the request's share of its pages. A second call does nothing."""
        held, request.cross = request.cross, None
        if held is None:
            return
        held.holders -= 1
        if not held.holders:
            self._pool.allocator.free_pages(held.pages)
            del self._held[held.key]

    def forget(self) -> None:
        """The model may have been edited: later requests share no pages with those that run."""
        for held in list(self._held.values()):
            del self._held[held.key]
            held.key = object()
            self._held[held.key] = held

    def sent(self) -> None:
        """The step was launched that computes the pages of the requests admitted for it."""
        for held in self._new:
            held.computed = True
        self._new.clear()

    def swap_out(self, request: Request) -> HostKV:
        """A copy of the request's cross keys and values on the host. Raises RuntimeError or MemoryError without memory."""
        return self._pool.kv.swap_out(self._slots(request))

    def swap_in(self, request: Request, host: HostKV) -> None:
        """Write a copy of `swap_out` to the request's pages, unless they have it."""
        if not request.cross.computed:
            self._pool.kv.swap_in(self._slots(request), host)
            request.cross.computed = True

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Every page is free, or held by running requests. Raises AssertionError otherwise."""
        self._pool.allocator.check_integrity([page for held in self._held.values() for page in held.pages])
        holders = [request.cross for request in running]
        assert None not in holders, "a request runs without cross pages"
        assert all(holders.count(held) == held.holders for held in self._held.values()), "cross pages leaked"

    def _num_pages(self, request: Request) -> int:
        assert request.encoder is not None
        return -(-request.encoder.length // self._pool.allocator.page_size)

    def _slots(self, request: Request) -> np.ndarray:
        assert request.encoder is not None
        return self._pool.allocator.slots_of(request.cross.pages, 0, request.encoder.length)


def _key(request: Request) -> Any:
    assert request.encoder is not None
    if request.private_encoder:
        return request.request_id
    return request.encoder.content, request.cache_salt, request.cache_owner
