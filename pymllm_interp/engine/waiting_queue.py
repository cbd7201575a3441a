"""`WaitingQueue`: requests that wait to be admitted. `ExclusiveTurns`: requests that wait for steps of their own.

`DepthGroups`: prompts that run through equally many layers meet in a step.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.request import Request

LOOKAHEAD = 64
"""Requests at the head of the queue that "lpm" orders."""
MAX_OVERTAKEN = 64
"""Requests that may overtake one, at most. Then it is tried first."""
PASS_TOKENS = 256
"""Tokens up to which a pass takes about as long as it takes to read the weights."""


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


class DepthGroups:
    """Prompts that meet in a step: those that run through as many layers as the earliest one (`Request.depth`).

    A pass runs to the deepest of its rows. Shallower rows get a separate pass where the layers that are saved outweigh it. So
    they do beside requests that decode. The earliest prompt takes part in each step of prompts, so that no prompt starves.

    Attributes:
        num_early: live requests with passes that end early.
        early: whether requests that decode are better left out of the step of the earliest prompt.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers, self.num_early, self.early = num_layers, 0, False
        self._by_layers: dict[int, list[Request]] = {}
        self._first = self._budget = 0

    def begin(
        self, begun: Iterable[Request], waiting: Iterable[Request], head: Sequence[Request] | None, budget: int
    ) -> None:
        """Count the prompts that the next step can choose from.

        Args:
            begun: running requests with prompts that are not complete.
            head: the first of them, with its gang; None: it cannot be admitted now, so none may overtake it.
            budget: upper bound of a step's tokens.
        """
        begun, self._by_layers, self._budget = list(begun), {}, budget
        for request in [*begun, *waiting] if head else begun:
            self._by_layers.setdefault(self._layers(request), []).append(request)
        first = min([*begun, *(head or ())], key=_place, default=None)
        self._first = self.num_layers if first is None else self._layers(first)
        self.early = self._apart(self._first, self.num_layers)

    def left_out(self, decodes: bool) -> set[Request]:
        """The prompts that sit out a step with, or without, requests that decode. `begin` counts them anew for the next step."""
        own = self.num_layers if decodes else self._first
        found = {request for layers, group in self._by_layers.items() if self._apart(layers, own) for request in group}
        self._by_layers = {}  # ended requests, and their results, must not stay
        return found

    def _layers(self, request: Request) -> int:
        return request.depth or self.num_layers

    def _apart(self, ones: int, others: int) -> bool:
        shallow, deep = min(ones, others), max(ones, others)
        tokens = sum(request.num_tokens_left for request in self._by_layers.get(shallow, ()))
        return min(tokens, self._budget) * (deep - shallow) > PASS_TOKENS * shallow
