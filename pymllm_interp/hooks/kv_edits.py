"""`KVEdits`: the effects of a request's interventions on its KV, page by page.

An intervention changes the KV of a position if it acts before the last layer's keys and values. All later positions attend to
it, so their KV changes too. The prefix cache knows that from the pages before (mem_cache/radix_cache.py). So a page's
namespace names only the effects within that page. Interventions that give equal namespaces, such as equal vectors at equal
positions, share KV.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..core.model_spec import INNER_SITES, final_norm_site, inner_site, input_add, residual_site
from .interventions.gates import Flag
from .interventions.knockout import BoundKnockout
from .interventions.op import Op
from .interventions.patch_kv import KVPatch
from .positions import Window

KEYS_AND_VALUES = ("k", "v")


class ActingOp(Protocol):
    """An op, and the positions where it acts (`declared.PlacedOp`)."""

    @property
    def spec(self) -> Op: ...

    @property
    def windows(self) -> tuple[Window, ...]: ...

    @property
    def flag(self) -> Flag | None: ...


class _Edit(NamedTuple):
    """An op at a site, at the positions of one of its windows."""

    site: int
    op: Op
    window: Window
    ordinal: int | None
    """Rank of the window's first position among the op's; None if the op does not depend on it."""
    decided: int | None = None
    """Position up to which the outcome of a gate is decided; None: tokens and edits up to a position decide."""
    monitor: str = ""
    """Fingerprint of the monitor that the op waits for; "" for none."""

    def within(self, start: int, stop: int) -> Hashable:
        """Hashable effect at the positions from `start` to `stop`, or None."""
        where = _relative(self.window, start, stop)
        if where is None:
            return None
        ordinal = None if self.ordinal is None else self.ordinal + self.window.among(0, start)
        # Prompts of other lengths decide otherwise for the positions after them.
        decided = None if self.decided is None or self.decided >= stop else self.decided
        return self.site, self.op.effect, where, ordinal, decided, self.monitor

    def same_until(self, start: int, stop: int) -> int | None:
        """The end of the positions that it treats like `start` to `stop`, all or none. None: to the end of the sequence."""
        window = self.window
        if window.start >= stop:
            return window.start
        if window.stop is not None and window.stop <= start:
            return None
        if self.decided is not None and self.decided >= stop:
            return min(self.decided, self._same_window(start, stop) or self.decided)
        return self._same_window(start, stop)

    def _same_window(self, start: int, stop: int) -> int | None:
        """`same_until` of the window, without the gate."""
        window = self.window
        if window.start <= start and window.step == 1 and self.ordinal is None:
            if window.stop is None or window.stop >= stop:
                return window.stop
        return stop


class KVEdits:
    """Interventions of one request that change its KV. Their effects are hashed when the request is first scheduled.

    Args:
        ops: site -> ops, in the order in which they act.
        knockouts: cut edges of attention.
        states: (layer, op) of each recurrent state that is replaced behind the prompt.
        patches: K and V that are replaced. Until then all positions of a span are computed, so its pages go together.

    Attributes:
        first_position: the first position with KV that interventions change; None: no position.
    """

    def __init__(
        self,
        ops: Mapping[int, Iterable[ActingOp]],
        knockouts: Sequence[BoundKnockout],
        num_layers: int,
        states: Sequence[tuple[int, Op]] = (),
        prompt_len: int = 0,
        patches: Sequence[KVPatch] = (),
    ) -> None:
        self._edits = [
            edit
            for site, acting in sorted(ops.items())
            if changes_kv(site, num_layers)
            for op in acting
            for edit in _edits_of(site, op)
        ]
        # A page that ends with the prompt may have a snapshot with the replaced state.
        end = Window(prompt_len - 1, prompt_len)
        self._edits += [_Edit(-1 - layer, op, end, None) for layer, op in states]
        self._knockouts = [k for k in knockouts if k.layers[0] < num_layers - 1 and k.keys]  # layers ascend
        self._patches = [(*patch.span, ("kv", patch.layer, patch.heads, patch.key)) for patch in patches]
        starts = [first for first, _, _ in self._patches] + [edit.window.start for edit in self._edits]
        for knockout in self._knockouts:
            starts += [first for q in knockout.queries if (first := _first_cut(knockout, q)) is not None]
        self.first_position = min(starts, default=None)

    def namespaces(self, page_size: int, num_positions: int) -> list[tuple[int, Hashable]]:
        """(page, namespace from that page on) for a sequence of `num_positions`, ascending; see `RadixKey`."""
        found: list[tuple[int, Hashable]] = []
        if self.first_position is None:
            return found
        page, last = self.first_position // page_size, -(-num_positions // page_size)
        while page < last:
            start = page * page_size
            namespace = self._namespace(start, start + page_size)
            if not found or found[-1][1] != namespace:
                found.append((page, namespace))
            page = self._next_change(start, start + page_size, page_size, last)
        return found

    def _namespace(self, start: int, stop: int) -> Hashable:
        edits = [what for edit in self._edits if (what := edit.within(start, stop)) is not None]
        edits += [key for first, end, key in self._patches if first < stop and start < end]
        for knockout in self._knockouts:
            queries = [_relative(q, start, stop) for q in knockout.queries if q.among(start, stop)]
            keys = [(k.start, k.step, k.among(0, stop)) for k in knockout.keys if k.among(0, stop)]
            if queries and keys:
                heads = None if knockout.heads is None else tuple(sorted(knockout.heads))
                edits.append(("knockout", knockout.layers, heads, tuple(queries), tuple(keys)))
        return tuple(edits) or None

    def _next_change(self, start: int, stop: int, page_size: int, last: int) -> int:
        """The next page with a namespace that may differ from the positions `start` to `stop`."""
        if self._knockouts:
            return stop // page_size
        ends = [end for span in self._patches for end in span[:2] if end > start]
        ends += [end for edit in self._edits if (end := edit.same_until(start, stop)) is not None]
        return max(min(ends) // page_size, stop // page_size) if ends else last


def changes_kv(site: int, num_layers: int) -> bool:
    """Whether the KV of some layer is computed from the state at a site."""
    if site < final_norm_site(num_layers):
        return site <= residual_site(input_add(num_layers - 1))
    if site < inner_site(num_layers, 0, INNER_SITES[0]) or site >= inner_site(num_layers, num_layers, INNER_SITES[0]):
        return False  # the final norm, or the logits
    layer, kind = divmod(site - inner_site(num_layers, 0, INNER_SITES[0]), len(INNER_SITES))
    return layer < num_layers - 1 or INNER_SITES[kind] in KEYS_AND_VALUES


def _edits_of(site: int, op: ActingOp) -> Iterator[_Edit]:
    words, ordinal = op.spec.words(), 0
    ordered = words is None or words.row_per_position
    for window in op.windows:
        decided, monitor = (None, "") if op.flag is None else (op.flag.prompt_len, op.flag.monitor)
        yield _Edit(site, op.spec, window, ordinal if ordered else None, decided, monitor)
        ordinal += window.size or 0


def _relative(window: Window, start: int, stop: int) -> Hashable:
    """The window's positions from `start` to `stop`, counted from `start`: (first, count, step); None for none."""
    count = window.among(start, stop)
    if not count:
        return None
    first = window.start + window.among(0, start) * window.step - start
    return first, count, window.step if count > 1 else 1


def _first_cut(knockout: BoundKnockout, queries: Window) -> int | None:
    """The first of these queries that has one of the knocked-out keys at or before it; None for none."""
    first_key = min(window.start for window in knockout.keys)
    first = queries.start + queries.among(0, first_key) * queries.step
    return first if queries.among(first, first + 1) else None
