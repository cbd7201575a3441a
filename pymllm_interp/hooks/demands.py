"""`Demands`: what the interventions and captures of a request ask of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .captures.record_sizes import RecordSizes
from .kv_edits import KVEdits
from .positions import Window


class Demands:
    """The scheduler's view of a `Declared`, which the worker owns. They share nothing that changes.

    Args:
        kv_edits: what changes the KV.
        captures: sizes in the ring, and the scheduler's own progress; None without captures.
        patterns: [longest] bool, positions with captured attention patterns; None: no position.
        gated: positions where a gate is counted, or decides.
        vectors: id of a tensor -> its first row in `VectorPool`.
        held: keys of these rows.
        why_undrafted: see `Declared.why_undrafted`.
        states: [longest] bool, positions behind which a recurrent state is read or written; None: no position.
    """

    def __init__(
        self,
        kv_edits: KVEdits,
        captures: RecordSizes | None,
        patterns: np.ndarray | None,
        gated: Sequence[Window],
        vectors: dict[int, int],
        held: list[tuple[bytes, int]],
        why_undrafted: str = "",
        states: np.ndarray | None = None,
    ) -> None:
        self.kv_edits, self.captures = kv_edits, captures
        self.vectors, self.held, self.why_undrafted = vectors, held, why_undrafted
        self._patterns, self._states, self._gated = patterns, states, gated

    def state_stop(self, start: int) -> int | None:
        """Where a chunk from position `start` on ends at the latest, so that a recurrent state is reached; None: anywhere."""
        own = None if self._states is None else self._states[start:]
        return start + int(own.argmax()) + 1 if own is not None and own.any() else None

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
