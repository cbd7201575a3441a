"""`Points`: the locations at which blocks wait in the current pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..blocks.trace import Block, RequestTrace
from .visits import Location, PassVisits


class Point(Location):
    """A location and everything that waits there in the current pass.

    Attributes:
        parked: blocks that wait for a visit.
        caches: (block, cache, filter of the cache).
        skips: (block, replacement of its request's rows), for requests that skip the module.
    """

    __slots__ = ("caches", "parked", "skips")

    def __init__(self, name: str, **location: Any) -> None:
        super().__init__(name, **location)
        self.clear()

    def awaited(self, visit: int) -> bool:
        """Whether anything waits for this visit."""
        if self.caches or self.skips:
            return True
        for block in self.parked:  # a generator is slower, and every layer of every pass asks
            if block.target_visit == visit:
                return True
        return False

    def waiting(self, visit: int) -> set[RequestTrace]:
        """The traces that wait for this visit."""
        blocks = [entry[0] for entry in (*self.caches, *self.skips)]
        return {block.trace for block in (*blocks, *(b for b in self.parked if b.target_visit == visit))}

    def take(self, visit: int) -> list[Block]:
        """Remove and return the blocks that wait for this visit."""
        parked, self.parked = self.parked, []
        for block in parked:
            if block.target_visit != visit:
                break
        else:
            return parked  # most often, all of them
        self.parked = [block for block in parked if block.target_visit != visit]
        return [block for block in parked if block.target_visit == visit]

    def leave(self, trace: RequestTrace) -> None:
        """Remove everything that waits here for `trace`."""
        self.parked = [block for block in self.parked if block.trace is not trace]
        self.caches = [entry for entry in self.caches if entry[0].trace is not trace]
        self.skips = [entry for entry in self.skips if entry[0].trace is not trace]

    def clear(self) -> None:
        """Remove everything that waits here."""
        self.parked: list[Block] = []
        self.caches: list[tuple[Block, Any, tuple[str, str]]] = []
        self.skips: list[tuple[Block, Any]] = []


class Points:
    """The points of the current pass: those at which something waits, or has waited.

    Args:
        visits: counts of the current pass.
        locate: a method that makes the point of a location name.

    Attributes:
        opened: the points by location name.
        unread: location name -> (entry of its tuple that the model does not read, location to edit instead).
    """

    def __init__(self, visits: PassVisits, locate: Callable[[str], Point]) -> None:
        self.unread: dict[str, tuple[int, str]] = {}
        self.opened: dict[str, Point] = {}  # a plain dict: every module of a pass looks here
        self._visits = visits
        self._locate = weakref.WeakMethod(locate)  # the method's object holds this one
        self._known: dict[str, Point] = {}
        self._by_layer: dict[int, list[Point]] = {}

    def __len__(self) -> int:
        return len(self.opened)

    def at(self, name: str) -> Point:
        """The point at a location, whether or not anything waits there."""
        point = self._known.get(name)
        if point is None:
            locate = self._locate()
            assert locate is not None
            point = self._known[name] = locate(name)
        return point

    def open(self, name: str) -> Point:
        """The point at a location where something is about to wait."""
        point = self.opened.get(name)
        if point is None:
            point = self.opened[name] = self.at(name)
            if point.layer is not None:
                self._by_layer.setdefault(point.layer, []).append(point)
        return point

    def in_layer(self, layer: int) -> list[Point]:
        """The points of a decoder layer."""
        return self._by_layer.get(layer, [])

    def first_layer(self, first: int, stop: int) -> int:
        """The first layer with points from `first` on, and `stop` at the latest."""
        return min((layer for layer in self._by_layer if first <= layer < stop), default=stop)

    def awaited_in(self, layer: int) -> list[Point]:
        """The points of a decoder layer where something waits for the next visit."""
        return [point for point in self.in_layer(layer) if point.awaited(self._visits.of(point))]

    def park(self, block: Block) -> None:
        """File a block at the location that it waits for, if it waits for one."""
        pending = block.pending
        if pending is not None:
            _, name, iteration, _ = pending
            if name is not None and iteration is not None:
                point = self.opened.get(name) or self.open(name)
                block.target_visit = iteration - block.trace.visits.before_pass(point, self._visits.per_pass)
                point.parked.append(block)

    def unpark(self, block: Block, name: str) -> None:
        """Remove a block from a location, if it is filed there."""
        point = self.opened.get(name)
        if point is not None and block in point.parked:
            point.parked.remove(block)

    def occurrence(self, trace: RequestTrace, name: str) -> int:
        """Number of times that the request's passes have reached a location."""
        return trace.visits.occurrence(self.at(name), self._visits)

    def pass_of(self, trace: RequestTrace) -> int:
        """Number of the pass that the request is in, or that comes next."""
        return trace.visits.passes

    def has_passed(self, block: Block, name: str) -> bool:
        """Whether a location is past in the pass of the step that ``tracer.iter`` pins a block to."""
        point, visits = self.at(name), block.trace.visits
        if not point.in_model or visits.passes != block.pinned_pass:
            return point.in_model and visits.passes > block.pinned_pass
        if visits.skipping and visits.skips(name):
            return True
        last = self._known.get(block.last_location)
        if point.of_module and last is not None and last.in_model and not last.of_module:
            return True  # the step's logits or token: modules without waiting blocks were not counted
        if point.module_output is not None and not self._visits.of(self.at(point.module_output)):
            return False  # an operation may be called several times in its module
        return self._visits.of(point) >= self._visits.per_pass.get(name, 1)

    def key(self, trace: RequestTrace, name: str) -> tuple[int, int]:
        """Key of a location's visit (`VisitCounts.key`)."""
        return trace.visits.key(self.at(name), self._visits)

    def reaches(self, block: Block, name: str) -> bool:
        """Whether `block` waits for the next visit of a location."""
        pending = block.pending
        return (
            pending is not None
            and pending.provider == name
            and pending.iteration == self.occurrence(block.trace, name)
            and block.trace.is_served_at(name)
        )

    def end_pass(self) -> None:
        """Remove everything that waits."""
        for point in self.opened.values():
            point.clear()
        self.opened.clear()
        self._by_layer.clear()
