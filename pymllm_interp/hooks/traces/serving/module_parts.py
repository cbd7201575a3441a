"""Blocks inside a module that runs several times in a pass, for a request each. Modules with recurrent states do.

In each call the module has the rows of one request, in transformers' shape. So only this request's blocks are served inside of the
call, with whole values. Inside of calls for several requests no block is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..blocks.trace import RequestTrace
from .points import Point, Points
from .rows import BatchRows, RowSpan
from .visits import PassVisits, is_inside


class PassServer(Protocol):
    """The part of `EngineInterleaver` that this reads and sets."""

    thread: int | None
    traces: list[RequestTrace]
    points: Points
    visits: PassVisits


def rows_inside(interleaver: PassServer, path: str) -> list[tuple[int, int]]:
    """(first row, number of rows) of each request with a block that waits inside the module. Blocks that see several fail.

    Args:
        path: module path, including the root's.
    """
    found: dict[RequestTrace, None] = {}
    for point in _points_inside(interleaver, path):
        found |= dict.fromkeys(point.waiting(interleaver.visits.of(point)))
    spans = []
    for trace in found:
        if isinstance(trace.rows, BatchRows):
            trace.fail(
                ValueError(
                    f"a block for several prompts waits inside {path}, which runs prompt by prompt: read or edit its input or "
                    "its output, or give each prompt an invoke of its own"
                )
            )
        elif trace.rows is not None:
            spans.append((trace.rows.start, trace.rows.size))
    return spans


@contextmanager
def serve_part(
    interleaver: PassServer, path: str, span: tuple[int, int] | None, num_rows: int | None = None
) -> Iterator[None]:
    """Serve one call of the module.

    Args:
        span: entry of `rows_inside`; None: the call is for other requests.
        num_rows: rows of the call's values; None: as many as the request's.
    """
    visits, place = interleaver.visits, interleaver.points.at(f"{path}.output")
    for name in [name for name in visits.counts if is_inside(path, name)]:
        del visits.counts[name]  # each call is the first of its pass
    visits.unfuse_part(place.layer, place.below)
    try:
        with _call(interleaver, path, span, num_rows):
            yield
    finally:
        if place.layer is not None:  # its locations have passed
            visits.fuse_part(place.layer, place.below, "")


@contextmanager
def _call(interleaver: PassServer, path: str, span: tuple[int, int] | None, num_rows: int | None) -> Iterator[None]:
    if span is None:
        thread, interleaver.thread = interleaver.thread, None
        try:
            yield
        finally:
            interleaver.thread = thread
        return
    own = [trace for trace in interleaver.traces if _is_at(trace, span)]
    hidden = [_hide_others(point, own) for point in _points_inside(interleaver, path)]
    rows = [trace.rows for trace in own]
    rows_now = span[1] if num_rows is None else num_rows
    for trace in own:
        trace.rows = RowSpan(0, rows_now, rows_now, 0, 0, 0)
    try:
        yield
    finally:
        for trace, before in zip(own, rows, strict=True):
            trace.rows = before
        for point, parked, caches, skips in hidden:
            point.parked += parked
            point.caches += caches
            point.skips += skips


def _points_inside(interleaver: PassServer, path: str) -> list[Point]:
    return [point for name, point in interleaver.points.opened.items() if is_inside(path, name)]


def _is_at(trace: RequestTrace, span: tuple[int, int]) -> bool:
    rows = trace.rows
    return isinstance(rows, RowSpan) and (rows.start, rows.size) == span


def _hide_others(point: Point, own: list[RequestTrace]) -> tuple[Point, list[Any], list[Any], list[Any]]:
    """Remove and return what waits at the point for other traces than `own`."""
    parked = [block for block in point.parked if block.trace not in own]
    caches = [entry for entry in point.caches if entry[0].trace not in own]
    skips = [entry for entry in point.skips if entry[0].trace not in own]
    point.parked = [block for block in point.parked if block.trace in own]
    point.caches = [entry for entry in point.caches if entry[0].trace in own]
    point.skips = [entry for entry in point.skips if entry[0].trace in own]
    return point, parked, caches, skips
