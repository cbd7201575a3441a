"""`RingAdmission`: the scheduler's view of the capture ring. It reserves ring space for the tokens of the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ....core.request import Request
from ..layout import CaptureProgress
from .ring_allocator import RingAllocator

Fit = Callable[[Request, int], int]
PROMPTS_SHARE = 4
"""Prompts reserve at most 1 / PROMPTS_SHARE of the ring in one step.

One part of the ring is then written, while others are copied to the host or to results.
"""


class RingAdmission:
    """Reserves ring space while the scheduler picks a step's requests.

    Space is reserved first come, first served: after a request is refused, no other request gets space in that step.

    Args:
        size_bytes: bytes of the ring (`capture_ring_bytes`).
        itemsize: bytes of an element.
        when_full: "block": a refused request waits for a later step; "fail": its captures are lost (`capture_when_full`).

    Attributes:
        refused: whether a request was refused since `begin`.
        lost: request id -> why its captures are lost, until the worker was told.
    """

    def __init__(self, allocator: RingAllocator, size_bytes: int, itemsize: int, when_full: str) -> None:
        self.refused = False
        self.lost: dict[str, str] = {}
        self._allocator = allocator
        self._size_bytes, self._itemsize, self._when_full = size_bytes, itemsize, when_full
        self._free = 0  # elements that are not reserved in this step
        self._of_prompts = 0  # elements that prompts reserved in this step

    @property
    def waits(self) -> bool:
        """Whether a request was refused and ring space will be freed."""
        return self.refused and self._allocator.in_use

    def concerns(self, request: Request) -> bool:
        """Whether the request captures states that leave through the ring."""
        return ring_captures(request) is not None

    def begin(self) -> None:
        """Start a step: nothing is reserved."""
        self._free, self.refused = self._allocator.largest_free, False
        self._of_prompts = 0

    def take(
        self, wanted: Sequence[tuple[Request, int]], whole: bool = True, fit: Fit = lambda _, tokens: tokens
    ) -> int:
        """Reserve space for the next tokens of requests that must run in the same step.

        Args:
            wanted: (request, number of tokens) of each request.
            whole: reserve space for all tokens or none. Otherwise `wanted` is one request. It reserves space for as many tokens as
                the prompts' share of the ring holds. If no prompt has reserved any yet, it reserves at least one.
            fit: tokens of a part that splits nothing. It may return more than were asked, if the first cannot be by itself.

        Returns:
            Tokens of the first request that may be computed; 0 if it was refused.
        """
        if not whole:
            return self._take_part(*wanted[0], fit)
        needed = sum([_reserved_size(request, tokens) for request, tokens in wanted])
        if needed <= self._free:
            self._free -= needed
            return wanted[0][1]
        return self._refuse(wanted)

    def take_rows(self, requests: Sequence[Request]) -> bool:
        """Reserve space for the next token of each request, if there is room for all. False: `take` decides one by one."""
        needed = 0
        for request in requests:
            captures = ring_captures(request)
            if captures is not None:
                needed += captures.reserved_size(request.kv_len, 1)
        if needed > self._free:
            return False
        self._free -= needed
        return True

    def take_drafts(self, request: Request, count: int) -> bool:
        """Reserve space for `count` positions after the next one, which is reserved separately. False: no room is left. Never
        waits."""
        needed = _reserved_size(request, 1 + count) - _reserved_size(request, 1)
        if needed > self._free:
            return False
        self._free -= needed
        return True

    def fits(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """Whether `take` would not refuse `tokens` tokens of each request."""
        return self._when_full == "fail" or sum(map(_reserved_size, requests, tokens)) <= self._free

    def check(self, wanted: Sequence[tuple[CaptureProgress, Sequence[tuple[int, int]]]], what: str) -> None:
        """Check that an empty ring can hold the requests' captures of one step.

        Args:
            wanted: captures of each request of the step, and (first, number) of tokens that one step must compute.
            what: description of the requests, for the message.

        Raises:
            ValueError: the ring is too small.
        """
        sizes = [
            max(captures.layout.max_reserved_size, *(captures.reserved_size(*span) for span in spans), 0)
            for captures, spans in wanted
        ]
        needed = sum(sizes) * self._itemsize
        if needed > self._size_bytes:
            raise ValueError(
                f"the captures of {what} take {needed} bytes in one step, and the ring that they leave the device through has "
                f"{self._size_bytes} (capture_ring_bytes): raise it, or capture fewer sites"
            )

    def forget_lost(self, request_ids: Iterable[str]) -> None:
        """The worker was told that the captures of these requests are lost, or they have ended."""
        for request_id in request_ids:
            self.lost.pop(request_id, None)

    def _take_part(self, request: Request, tokens: int, fit: Fit) -> int:
        captures = ring_captures(request)
        sizes = 0 if captures is None else captures.reserved_sizes(request.kv_len, tokens)
        ends = np.cumsum(np.broadcast_to(sizes, tokens))
        first, share = int(ends[fit(request, 1) - 1]), self._allocator.size // PROMPTS_SHARE
        limit = min(self._free, max(share - self._of_prompts, 0) if self._of_prompts else max(share, first))
        count = int(np.searchsorted(ends, limit, side="right"))
        if 0 < count < tokens:
            count = fitting if (fitting := fit(request, count)) <= count else 0
        if count:
            self._free -= int(ends[count - 1])
            self._of_prompts += int(ends[count - 1])
            return count
        if first > self._free:
            return self._refuse([(request, tokens)])
        self._of_prompts = self._allocator.size  # first come, first served: its turn is in the next step
        return 0

    def _refuse(self, wanted: Sequence[tuple[Request, int]]) -> int:
        if self._when_full == "fail":
            for request, _ in wanted:
                self._lose(request)
            return wanted[0][1]
        self.refused, self._free = True, 0
        return 0

    def _lose(self, request: Request) -> None:
        captures = request.declared and request.declared.captures
        if captures is not None and captures.error is None:
            why = (
                f"request {request.request_id} lost its captures: a step found no room in the ring that they leave the device "
                f"through, which has {self._size_bytes} bytes (capture_ring_bytes: raise it, or set capture_when_full='block')"
            )
            captures.lose(why)
            self.lost[request.request_id] = why
            request.warnings.append(why)


def ring_captures(request: Request) -> CaptureProgress | None:
    """The sizes of the captures of a request that use the ring; None for none. A pass with gradients does not use it."""
    return None if request.declared is None or request.differentiable else request.declared.captures


def _reserved_size(request: Request, count: int) -> int:
    """Ring elements for the next `count` positions of a request."""
    captures = ring_captures(request)
    return 0 if captures is None else captures.reserved_size(request.kv_len, count)
