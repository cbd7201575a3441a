"""`Demands`: the scheduler's view of the interventions and captures of a request."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from .captures.layout import CaptureProgress
from .captures.rows import CapturedRows
from .kv_edits import KVEdits
from .positions import Window


class Demands:
    """The scheduler's view of a `Declared`, which the worker owns. They share nothing that changes but `rows`.

    Args:
        captures: sizes in the ring, and the scheduler's own progress; None without captures.
        patterns: [longest] bool, positions with captured attention patterns; None: no position.
        gated: positions at which a gate is counted, or decides.
        vectors: id of a tensor -> its first row in `VectorPool`.
        held: keys of these rows.
        why_undrafted: see `BoundHooks.why_undrafted`.
        states: [longest] bool, positions behind which a recurrent state is read or written; None: no position.
        depth: see `BoundHooks`.
        kv_spans: (first position, end) of each replacement of K and V.
        rows: the captured rows, while a worker in this process has them; None without captures.
    """

    def __init__(
        self,
        kv_edits: KVEdits,
        captures: CaptureProgress | None,
        patterns: np.ndarray | None,
        gated: Sequence[Window],
        vectors: dict[int, int],
        held: list[tuple[bytes, int]],
        why_undrafted: str = "",
        states: np.ndarray | None = None,
        depth: int | None = None,
        kv_spans: Sequence[tuple[int, int]] = (),
        rows: weakref.ref[CapturedRows] | None = None,
    ) -> None:
        self.kv_edits, self.captures, self.depth, self.rows = kv_edits, captures, depth, rows
        self.vectors, self.held, self.why_undrafted = vectors, held, why_undrafted
        self._patterns, self._states, self._gated, self._kv_spans = patterns, states, gated, kv_spans

    def state_stop(self, start: int) -> int | None:
        """Latest end of a chunk from position `start` on, by recurrent states and replaced K and V; None: any."""
        stops = [stop for _, stop in self._kv_spans if stop > start]
        own = None if self._states is None else self._states[start:]
        if own is not None and own.any():
            stops.append(start + int(own.argmax()) + 1)
        return min(stops, default=None)

    def settled(self, computed: int) -> int | None:
        """Positions with final K and V, of a request with `computed` ones; None: all of these."""
        return min([first for first, stop in self._kv_spans if computed < stop], default=None)

    def whole_pages(self, pages: int, page_size: int) -> int:
        """Number of cached pages that a request can start with, of `pages`: they end inside of no span.

        Positions of a span are computed before its K and V are replaced.
        """
        spans = self._kv_spans
        while (inside := next((first for first, stop in spans if first < pages * page_size < stop), None)) is not None:
            pages = inside // page_size
        return pages

    def first_observed(self, start: int) -> tuple[int | None, str]:
        """The first position from `start` on that must be computed to be captured or counted, and why; (None, "") for none.

        The receipt counts the rows on which a gate fired, and a gate with scope="prompt" reads all of the prompt.
        """
        firsts = [] if self.captures is None else [self.captures.first_position(start)]
        for wanted in (self._patterns, self._states):
            if wanted is not None and (own := wanted[start:]).any():
                firsts.append(start + int(own.argmax()))
        captured = min([first for first in firsts if first is not None], default=None)
        gated = [w.start + w.among(0, start) * w.step for w in self._gated if w.stop is None or w.stop > start]
        if gated and (captured is None or min(gated) < captured):
            return min(gated), "a gate is counted"
        return captured, "" if captured is None else "captured"
