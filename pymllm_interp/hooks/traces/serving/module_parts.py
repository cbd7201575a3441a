"""Blocks inside a module that runs several times in a pass, for a request each.

Encoders, vision towers and modules with recurrent states do.

In each call the module has the rows of one request, in transformers' shape. So only this request's blocks are served inside of the
call, with whole values. Inside of calls for several requests no block is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def rows_inside(interleaver: PassServer, paths: Sequence[str]) -> list[tuple[int, int]]:
    """(first row, number of rows) of each request with a block that waits inside the modules. Blocks that see several fail.

    Args:
        paths: module paths, including the root's. See `is_inside`.
    """
    found: dict[RequestTrace, bool] = {}  # whether a block waits there, and not only a cache
    for point in _points_inside(interleaver, paths):
        for trace in point.waiting(interleaver.visits.of(point)):
            found[trace] = found.get(trace, False) or any(block.trace is trace for block in point.parked)
    spans = []
    for trace, waits in found.items():
        if isinstance(trace.rows, BatchRows):
            if not waits:
                continue
            path = " or ".join(path.rstrip(".") for path in paths)
            trace.fail(
                ValueError(
                    f"a block for several prompts waits inside {path}, which runs prompt by prompt: "
                    + ("" if paths[0].endswith(".") else "read or edit its input or its output, or ")
                    + "give each prompt an invoke of its own"
                )
            )
        elif trace.rows is not None:
            spans.append((trace.rows.start, trace.rows.size))
    return spans


def refuse_inside(interleaver: PassServer, paths: Sequence[str], why: str) -> None:
    """End the traces with a block that waits inside the modules, in a pass without them."""
    for point in _points_inside(interleaver, paths):
        for block in [block for block in point.parked if block.target_visit == 0]:
            block.trace.fail(ValueError(f"request {block.trace.request_id}: `{point.name.partition('.')[2]}`: {why}"))


@contextmanager
def serve_part(
    interleaver: PassServer, paths: Sequence[str], span: tuple[int, int] | None, num_rows: int | None = None
) -> Iterator[None]:
    """Serve one call of the modules.

    Args:
        span: entry of `rows_inside`; None: the call is for other requests.
        num_rows: rows of the call's values; None: as many as the request's.
    """
    visits, place = interleaver.visits, interleaver.points.at(f"{paths[0].rstrip('.')}.output")
    for name in [name for name in visits.counts if any(is_inside(path, name) for path in paths)]:
        del visits.counts[name]  # each call is the first of its pass
    visits.unfuse_part(place.layer, place.below)
    try:
        with _call(interleaver, paths, span, num_rows):
            yield
    finally:
        if place.layer is not None:  # its locations have passed
            visits.fuse_part(place.layer, place.below, "")


@contextmanager
def _call(
    interleaver: PassServer, paths: Sequence[str], span: tuple[int, int] | None, num_rows: int | None
) -> Iterator[None]:
    if span is None:
        thread, interleaver.thread = interleaver.thread, None
        try:
            yield
        finally:
            interleaver.thread = thread
        return
    own = [trace for trace in interleaver.traces if _is_at(trace, span)]
    hidden = [_hide_others(point, own) for point in _points_inside(interleaver, paths)]
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


def _points_inside(interleaver: PassServer, paths: Sequence[str]) -> list[Point]:
    opened = interleaver.points.opened.items()
    return [point for name, point in opened if any(is_inside(path, name) for path in paths)]


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
