"""`WaitingQueue`: requests that wait to be admitted. `ExclusiveTurns`: requests that wait for steps of their own."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator

from ..core.request import Request

LOOKAHEAD = 64
"""Requests at the head of the queue that "lpm" orders."""
MAX_OVERTAKEN = 64
"""Requests that may overtake one, at most. Then it is tried first."""


class WaitingQueue:
    """Waiting requests by priority, then by arrival.

    Args:
        policy: "fcfs", or "lpm": among the first requests with equal priority, the longest prefix in the prefix cache comes first.
            No request is overtaken more than `MAX_OVERTAKEN` times.
        num_cached_tokens: number of a request's tokens in the prefix cache.
    """

    def __init__(self, policy: str, num_cached_tokens: Callable[[Request], int]) -> None:
        self._policy, self._num_cached_tokens = policy, num_cached_tokens
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Take in a request; one that was preempted gets its place back."""
        insort(self._requests, request, key=_place)

    def remove(self, request: Request) -> None:
        """Remove a request that ended."""
        self._requests.remove(request)

    def admit(self, request: Request) -> None:
        """Forget a request that is admitted, and count for each earlier one that it was overtaken."""
        if self._policy == "lpm":
            for earlier in self._requests:
                if earlier is request:
                    break
                earlier.num_overtaken += 1
        self._requests.remove(request)
        if request.admitted_at is None:  # else it was preempted since
            request.admitted_at = time.monotonic()

    def in_order(self) -> list[Request]:
        """The requests in the order in which they are tried."""
        found = list(self._requests)
        if self._policy == "fcfs" or len(found) < 2:
            return found
        head = [request for request in found[:LOOKAHEAD] if request.priority == found[0].priority]
        ranked = sorted(head, key=lambda r: (r.num_overtaken < MAX_OVERTAKEN, -self._num_cached_tokens(r)))
        return ranked + found[len(head) :]


def _place(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


class ExclusiveTurns:
    """Turns of the requests that run in exclusive steps: with gradients, or with transformers' own attention or outputs.

    Their steps alternate with the steps of all other requests.

    Attributes:
        requests: live requests that run in exclusive steps, in the order of their turns.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._others_next = False

    def add(self, request: Request) -> None:
        """Add a request, if it runs in exclusive steps."""
        if request.exclusive:
            self.requests.append(request)

    def finish(self, request: Request) -> None:
        """Remove a request that ended."""
        if request.exclusive:
            self.requests.remove(request)

    def next(self, others: bool) -> list[Request]:
        """The request that has the next step, with its gang. Empty: it is the others' turn, or no such request generates.

        Args:
            others: whether other requests exist.
        """
        request = next((r for r in self.requests if r.is_decoding), None)
        if request is None or (self._others_next and others):
            self._others_next = False
            return []
        self._others_next = True
        turn = [r for r in self.requests if r is request or (request.gang and r in request.gang)]
        self.requests = [r for r in self.requests if r not in turn] + turn
        return turn
