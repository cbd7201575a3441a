"""`Knockout`: an intervention that cuts edges of attention.

    Knockout(5, from_=-1, to=[0, 1])  # at layer 5, the prompt's last token does not attend to the first two
    Knockout("*", from_="generated", to="prompt", heads=[3])

Attention knockout (Geva et al. 2023, arXiv 2304.14767): scores of cut edges are minus infinity before the softmax, so the
other weights sum to one. Information that a token reads through earlier tokens, or at other layers, remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...attention.cut_edges import Cut, RequestCuts
from ...attention.patterns import PatternRead
from ...core.limits import MAX_KNOCKOUT_RUNS, MAX_KNOCKOUTS, MAX_NAMED
from ...core.model_spec import ModelSpec
from ...core.unsupported import UnsupportedModelError
from ...utils.arguments import is_whole
from ..monitors.monitor import Monitor
from ..positions import Positions, Window, checked_positions, selected, windows_of
from ..registry import op
from ..spec import PlacedSpec
from .op import Op
from .patch_kv import PatchKV

MAX_QUERY_GROUPS = 1024
"""Groups of equally cut queries that are checked for queries without a key, at most."""


@op
@dataclass(frozen=True, eq=False)
class Knockout(PlacedSpec):
    """Cut edges of attention: queries at the positions `from_` do not attend to keys at the positions `to`.

    Args:
        layer: A layer, a list of layers, or "*". Negative numbers count from the last layer.
        from_: Positions of the queries.
        to: Positions of the keys.
        heads: Query heads; None: all.

    Raises:
        ValueError: invalid layers, positions or heads.
    """

    layer: int | Sequence[int] | Literal["*"]
    from_: Positions
    to: Positions
    heads: int | Sequence[int] | None = None
    places = ("from_", "to")

    def __post_init__(self) -> None:
        if self.layer != "*":
            self._set_numbers("layer", 'a layer, a list of layers, or "*"')
        if self.heads is not None:
            self._set_numbers("heads", "a head, a list of heads, or None")
        for name in self.places:
            try:
                self._set(name, checked_positions(getattr(self, name)))
            except ValueError as error:
                raise ValueError(f"{self.name}: {name}: {error}") from None

    def _set_numbers(self, name: str, expected: str) -> None:
        given: Any = getattr(self, name)
        if (listed := isinstance(given, list | tuple | range)) and len(given) > MAX_NAMED:
            raise ValueError(f"{type(self).__name__}: {name} names {len(given)}; at most {MAX_NAMED}")
        numbers = (given,) if is_whole(given) else tuple(given) if listed else ()
        self._check(name, bool(numbers) and all(map(is_whole, numbers)), expected)
        self._set(name, numbers)

    @property
    def site(self) -> str:
        """Site pattern of its layers."""
        layers: Any = self.layer
        if isinstance(layers, tuple):
            layers = layers[0] if len(layers) == 1 else "{" + ",".join(map(str, layers)) + "}"
        return f"pattern.{layers}"

    @property
    def positions(self) -> Positions:
        """`from_`: the positions at which attention changes."""
        return self.from_


Intervention = Op | Knockout | PatchKV | Monitor
"""Entry of `interventions`."""


@dataclass(frozen=True)
class BoundKnockout:
    """A knockout in one model, for a prompt of one length.

    Attributes:
        windows: the sliding window of each of `layers`; None: the layer attends to all.
        queries, keys: positions.
    """

    spec: Knockout
    layers: tuple[int, ...]
    windows: tuple[int | None, ...]
    heads: frozenset[int] | None
    queries: tuple[Window, ...]
    keys: tuple[Window, ...]

    @classmethod
    def of(cls, spec: Knockout, model: ModelSpec, prompt_len: int) -> BoundKnockout:
        """Bind a knockout.

        Raises:
            ValueError: a layer or head that the model does not have, positions beyond the prompt, or no edge at all.
        """
        layers = _indexes(spec, "layer", model.num_hidden_layers, "layers (num_hidden_layers)")
        heads = _indexes(spec, "heads", model.num_attention_heads, "heads (num_attention_heads)")
        ends: list[tuple[Window, ...]] = []
        for name in spec.places:
            try:
                ends.append(windows_of(getattr(spec, name), prompt_len))
            except ValueError as error:
                raise ValueError(f"{spec.name}: {name}: {error}") from None
        windows = tuple(model.sliding_windows[layer] for layer in layers)
        bound = cls(spec, layers, windows, None if spec.heads is None else frozenset(heads), *ends)
        last = bound.queries[-1].stop
        if last is not None and last <= prompt_len and not bound.edges(0, prompt_len, bound.widest).any():
            raise ValueError(
                f"{spec.name}: no token at from_={spec.from_!r} attends to one at to={spec.to!r}: attention goes back to earlier "
                "positions, within a layer's sliding window"
            )
        return bound

    def edges(self, start: int, stop: int, window: int | None) -> np.ndarray:
        """Positions from `start` to `stop` with a cut edge at layers with this sliding window: [stop - start] bool."""
        last_key = np.maximum.accumulate(np.where(_inside(self.keys, 0, stop), np.arange(stop), -1))[start:]
        first_seen = 0 if window is None else np.maximum(0, np.arange(start, stop) - window + 1)
        return (last_key >= first_seen) & _inside(self.queries, start, stop)

    @property
    def widest(self) -> int | None:
        """The longest sliding window of its layers."""
        return None if None in self.windows else max(window for window in self.windows if window is not None)

    def rows(self, layer: int, prompt_len: int, num_positions: int) -> tuple[int, int]:
        """(rows of the prompt, rows of generated tokens) with a cut edge at a layer, among the first `num_positions`."""
        edges = self.edges(0, num_positions, self.windows[self.layers.index(layer)])
        return int(edges[:prompt_len].sum()), int(edges[prompt_len:].sum())

    def cut(self, start: int, stop: int) -> Cut | None:
        """The edges that it cuts in a pass over the positions from `start` to `stop`; None for none."""
        queries = self.edges(start, stop, self.widest)
        return Cut(frozenset(self.layers), self.heads, queries, _inside(self.keys, 0, stop)) if queries.any() else None


def bind_knockouts(specs: Iterable[Knockout], model: ModelSpec, prompt_len: int, longest: int) -> list[BoundKnockout]:
    """The knockouts of a request.

    Args:
        longest: most positions that the request may reach.

    Raises:
        ValueError: `BoundKnockout.of` refuses one, or they leave a query no key to attend to.
        UnsupportedModelError: the model's edges cannot be cut.
    """
    specs = list(specs)
    if specs and model.has_states:
        raise UnsupportedModelError(
            f"{specs[0].name}: {model.family.name} models have layers with recurrent states, which have no edges of attention"
        )
    if specs and not model.cuts_edges:
        raise UnsupportedModelError(
            f"{specs[0].name}: {model.family.name} models compute attention in their own modules, whose edges cannot be cut"
        )
    if len(specs) > MAX_KNOCKOUTS:
        raise ValueError(f"interventions has {len(specs)} knockouts; a request takes at most {MAX_KNOCKOUTS}")
    bound, runs = list[BoundKnockout](), 0
    for spec in specs:
        bound.append(found := BoundKnockout.of(spec, model, prompt_len))
        runs += len(found.queries) + len(found.keys)
        if runs > MAX_KNOCKOUT_RUNS:
            raise ValueError(
                f"{spec.name}: the knockouts of a request have at most {MAX_KNOCKOUT_RUNS} runs of evenly spaced positions, "
                "in from_ and to: use fewer runs"
            )
    room = MAX_QUERY_GROUPS
    for (together, window), layer in _together(bound, model).items():
        position, used = _left_with_nothing(together, window, longest, room)
        room -= used
        if position is not None:
            raise ValueError(
                f"{together[0].spec.name}: position {position} would attend to nothing at layer {layer}, so its attention has no "
                "value: leave it a key, for example itself"
            )
    return bound


def request_cuts(
    index: int,
    first_row: int,
    start: int,
    num_rows: int,
    knockouts: Iterable[BoundKnockout],
    reads: Mapping[int, PatternRead],
) -> RequestCuts | None:
    """The edges that a request cuts and the patterns that it captures in a pass; None for none.

    Args:
        index: index of the request in the batch.
        first_row: first row in the flat batch.
        start: position of that row.
        reads: layer -> the rows for which attention patterns are captured.
    """
    cuts = [cut for knockout in knockouts if (cut := knockout.cut(start, start + num_rows)) is not None]
    return RequestCuts(index, first_row, start, num_rows, cuts, reads) if cuts or reads else None


def _together(
    bound: Sequence[BoundKnockout], model: ModelSpec
) -> dict[tuple[tuple[BoundKnockout, ...], int | None], int]:
    """(knockouts that act together at a head, sliding window) -> the first such layer."""
    by_layer: dict[int, list[int]] = {}
    for i, knockout in enumerate(bound):
        for layer in knockout.layers:
            by_layer.setdefault(layer, []).append(i)
    found: dict[tuple[tuple[int, ...], int | None], int] = {}
    done: set[tuple[tuple[int, ...], int | None]] = set()
    for layer, numbers in sorted(by_layer.items()):
        alike = tuple(numbers), model.sliding_windows[layer]
        if alike in done:
            continue
        done.add(alike)
        heads = {head for i in numbers for head in bound[i].heads or ()}
        for head in (-1, *sorted(heads)):  # -1: one that no knockout names
            acting = tuple(i for i in numbers if (own := bound[i].heads) is None or head in own)
            found.setdefault((acting, alike[1]), layer)
    return {(tuple(bound[i] for i in acting), window): layer for (acting, window), layer in found.items()}


def _left_with_nothing(
    knockouts: Sequence[BoundKnockout], window: int | None, longest: int, room: int
) -> tuple[int | None, int]:
    """The first position that has all of its keys cut, or None. Each position is a key of itself.

    Queries that the same knockouts act on are looked at together.

    Args:
        room: most groups of such queries.

    Returns:
        The position, and how many groups were looked at.

    Raises:
        ValueError: more groups than that.
    """
    if not knockouts:
        return None, 0
    positions = np.arange(longest)
    ends = [(_inside(k.queries, 0, longest), _inside(k.keys, 0, longest)) for k in knockouts]
    cut_from_itself, cut_from_any = np.zeros((2, longest), dtype=bool)
    for queries, keys in ends:
        cut_from_itself |= queries & keys
        cut_from_any |= keys
    never_cut = np.maximum.accumulate(np.where(cut_from_any, -1, positions))
    none_seen = never_cut < (0 if window is None else np.maximum(0, positions - window + 1))
    suspects = positions[cut_from_itself & none_seen]
    acting = np.packbits([queries[suspects] for queries, _ in ends], axis=0).T
    kinds, kind_of = np.unique(acting, axis=0, return_inverse=True)
    if len(kinds) > room:
        raise ValueError(
            f"{knockouts[0].spec.name}: the knockouts of a request overlap in more than {MAX_QUERY_GROUPS} different ways: use "
            "fewer, or make their from_ alike"
        )
    found: list[int] = []
    for kind, bits in enumerate(kinds):
        own = suspects[kind_of.reshape(-1) == kind]
        cut = np.zeros(longest, dtype=bool)
        for acts, (_, keys) in zip(np.unpackbits(bits, count=len(ends)), ends, strict=True):
            if acts:
                cut |= keys
        first_seen = 0 if window is None else np.maximum(0, own - window + 1)
        lost = own[np.maximum.accumulate(np.where(cut, -1, positions))[own] < first_seen]
        found += [int(position) for position in lost[:1]]
    return min(found, default=None), len(kinds)


def _inside(windows: tuple[Window, ...], start: int, stop: int) -> np.ndarray:
    """Positions from `start` to `stop` that are in the windows: [stop - start] bool."""
    return selected(windows, stop)[start:]


def _indexes(spec: Knockout, name: str, count: int, of: str) -> tuple[int, ...]:
    given: Any = getattr(spec, name)
    if given is None or given == "*":
        return tuple(range(count))
    lowest = -count if name == "layer" else 0
    wrong = [index for index in given if not lowest <= index < count]
    if wrong:
        raise ValueError(f"{spec.name}: {name}={wrong[0]}; the model has {count} {of}, counted from 0")
    return tuple(sorted({index % count for index in given}))
