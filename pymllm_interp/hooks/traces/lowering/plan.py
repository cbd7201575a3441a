"""`BlockPlan`: the reads of a lowered block as captures, and its edits as declared ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple

import torch

from ....core.families import EXPERTS, LOGITS, Family, LayerPath
from ....core.receipt import layer_ranges
from ...captures.spec import Capture
from ...interventions.op import Op
from ...interventions.specs import Patch, Scale, Steer
from ...positions import Generated, Positions, windows_of
from .site_rows import SitePlaces

LAST = -1


class SiteLocation(NamedTuple):
    """A location of the model that is a site.

    Attributes:
        site: canonical name.
        order: rank in a forward pass.
        end: "input" or "output".
        in_tuple: the module returns ``(value, None)``.
    """

    site: str
    order: int
    end: str
    in_tuple: bool = False


def points_of(root: str, family: Family, num_layers: int, softcap: float | None) -> dict[str, SiteLocation]:
    """Location -> site, for each location with the whole value of a site.

    Args:
        root: path of the model's envoy.
        softcap: Soft cap applied after the LM head, or None.
    """
    found: dict[str, SiteLocation] = {}
    before, inside, after = [], [], []
    for kind, (module, end) in family.points.items():
        normed = kind == "mlp_in" and "resid_mid" not in family.points
        in_tuple = (
            isinstance(module, LayerPath) or kind in ("router", EXPERTS) or (kind == "mlp_out" and family.mlp_in_tuple)
        )
        if not (in_tuple or family.is_slice(kind) or normed or (softcap and kind == LOGITS)):
            group = inside if "{}" in module else after if before or inside else before
            group.append((kind, module, end))
    attention = f"{family.layers}.{{}}.{family.attention}"
    for kind, module, end in before:
        found[f"{root}.{module}.{end}"] = SiteLocation(kind, len(found), end)
    for layer in range(num_layers):
        for kind, module, end in inside:
            in_tuple = end == "output" and module == attention
            found[f"{root}.{module.format(layer)}.{end}"] = SiteLocation(f"{kind}.{layer}", len(found), end, in_tuple)
    for kind, module, end in after:
        found[f"{root}.{module}.{end}"] = SiteLocation(kind, len(found), end)
    found[f"{root}.logits"] = SiteLocation(LOGITS, len(found), "")
    found[f"{root}.samples"] = SiteLocation("", len(found), "")
    found["result"] = SiteLocation("", len(found), "")
    return found


def same_state(site: str) -> str:
    """The site before a layer's input, with the same tensor of the pass; "" for other sites."""
    kind, _, layer = site.partition(".")
    if kind != "resid_pre":
        return ""
    return f"resid_post.{int(layer) - 1}" if layer != "0" else "embed"


@dataclass
class Need:
    """The positions that a block reads of one site.

    Attributes:
        rows: rows of the prompt, negative ones from its end; None for all of them.
        start, stop: generated positions; `start` None for none, `stop` None for no end.
        whole: whether its values are used in another way than row by row, so that blocks can see strides.
    """

    rows: set[int] | None = field(default_factory=set)
    start: int | None = None
    stop: int | None = 0
    whole: bool = False

    def add_rows(self, row: int | None) -> None:
        """Read a row of the prompt; None reads all."""
        if row is None:
            self.rows = None
        elif self.rows is not None:
            self.rows.add(row)

    def add_generated(self, start: int, stop: int | None) -> None:
        """Read the generated positions from `start` on."""
        if stop is None or start < stop:
            self.start = start if self.start is None else min(start, self.start)
            self.stop = None if stop is None or self.stop is None else max(stop, self.stop)

    @property
    def positions(self) -> Positions:
        """Positions of a capture that has at least these."""
        if self.start is None:
            return "prompt" if self.rows is None else tuple(sorted(self.rows))
        if self.rows is None or self.rows - {LAST}:
            return "all"
        return Generated(-1 if self.rows else self.start, self.stop)


class Edit(NamedTuple):
    """An edit of a site.

    Attributes:
        operator: "+", "-", "*" or "=".
        operand: a number, or a tensor [width].
        positions: positions of the edit.
    """

    site: str
    operator: str
    operand: Any
    positions: Positions

    def op(self) -> Op:
        """The declared op that does the same."""
        number = not isinstance(self.operand, torch.Tensor)
        if self.operator == "*":
            return Scale(self.site, float(self.operand), positions=self.positions)
        if self.operator == "=":
            return Patch(self.site, self.operand, positions=self.positions)
        assert not number
        return Steer(self.site, self.operand, scale=1.0 if self.operator == "+" else -1.0, positions=self.positions)


class Row(NamedTuple):
    """A part of a site's value, which a loop over steps keeps.

    Attributes:
        site: canonical name.
        indexes: integers, slices, None and ``...``, of the value [1, tokens, width].
        methods: called on the part, in this order, without arguments.
        saved: ``.save()`` was called on it.
    """

    site: str
    indexes: tuple[Any, ...] = ()
    methods: tuple[str, ...] = ()
    saved: bool = False

    @property
    def is_last(self) -> bool:
        """Whether it is the last row of a step's tokens."""
        return len(self.indexes) > 1 and self.indexes[1] == LAST and type(self.indexes[0]) in (int, slice)

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole row of a step of one token, if it is not empty."""
        return len(self.indexes) <= 2 and not self.methods and all(type(i) in (int, slice) for i in self.indexes)


class StepLoop(NamedTuple):
    """A loop over steps that does nothing but append parts of values to lists.

    Attributes:
        rows: distinct parts that one step reads.
        appends: (name of a list, index into `rows`), in the order of a step.
        reads: reads of one step.
        unkept: parts that one step reads and does not append.
        start, stop: the steps; `stop` None for no end.
    """

    start: int
    stop: int | None
    rows: tuple[Row, ...]
    appends: tuple[tuple[str, int], ...]
    reads: int
    unkept: tuple[Row, ...] = ()


@dataclass
class BlockPlan:
    """Reads and edits of a block.

    Attributes:
        needs: site -> positions that are read.
        edits: edits in the order of the block.
        code: the block to run after the request, with a read in place of each edit; None: its own code.
        computes: the block computes with its reads, and not only moves them.
        has_vectors: an edit has the values of a tensor from outside, which may change.
        loop: loop of the block over steps, if all of its steps can be taken at once.
        appends: the whole block, if it only appends parts of one step's values to lists.
    """

    needs: dict[str, Need] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    code: CodeType | None = None
    computes: bool = False
    has_vectors: bool = False
    loop: StepLoop | None = None
    appends: StepLoop | None = None
    _places: dict[tuple[str, int], SitePlaces] = field(default_factory=dict, repr=False)

    def places(self, site: str, prompt_len: int) -> SitePlaces:
        """Places of the captured rows of a site, of a prompt of this length."""
        found = self._places.get((site, prompt_len))
        if found is None:
            windows = windows_of(self.needs[site].positions, prompt_len)
            found = self._places[site, prompt_len] = SitePlaces(windows, prompt_len)
        return found

    @property
    def reads_logits(self) -> bool:
        """Logits of the prompt's positions are read."""
        need = self.needs.get(LOGITS)
        return need is not None and (need.rows is None or bool(need.rows))

    @cached_property
    def captures(self) -> list[Capture]:
        """Captures of all that the block reads."""
        return [Capture(site, positions=need.positions) for site, need in self.needs.items()]

    @cached_property
    def interventions(self) -> list[Op]:
        """Declared ops with the effects of the block's edits."""
        return [edit.op() for edit in self.edits]

    def __str__(self) -> str:
        alike: dict[tuple[str, Any], list[str]] = {}
        for edit in self.edits:
            alike.setdefault((f"{edit.op().name}:", edit.positions), []).append(edit.site)
        for site, need in self.needs.items():
            alike.setdefault(("capture", need.positions), []).append(site)
        lines = [f"{what} {layer_ranges(sites)} at {where}" for (what, where), sites in alike.items()]
        if self.loop is not None:
            lists = dict.fromkeys(name for name, _ in self.loop.appends)
            lines.append(f"take the steps of the loop at once: {', '.join(lists) or 'edits only'}")
        return "\n".join(lines) or "no read"


class NotStatic(Exception):
    """The block is not static."""


@dataclass(frozen=True)
class NotLowered:
    """Reason that a block runs in the forward pass.

    Attributes:
        reason: action of the block that prevents lowering.
        line: line of the file; 0 if no line of the block prevents it.
    """

    reason: str
    line: int = 0

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}" if self.line else self.reason


Points = Mapping[str, SiteLocation]


class LoweringModel(NamedTuple):
    """The model that blocks are written against.

    Attributes:
        points: locations that are sites.
        widths: kind of site -> width of its states.
        dtype, device: dtype and device of its states.
    """

    points: Points
    widths: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device


Lowering = BlockPlan | NotLowered
Scope = Mapping[str, Any]
