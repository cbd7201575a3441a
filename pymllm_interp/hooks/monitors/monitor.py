"""`Monitor`: a declared read that scores each position of a request, and may act on the score.

    Monitor("resid_post.12", probe, threshold=0.9, then="stop")

The device multiplies the state with the probe's directions, behind the interventions at its site. The products leave the
device with the step's tokens, so no step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor

from ...core.model_spec import HEAD_SITES, LOGITS, OF_PASSES, ModelSpec, site_index
from ...kernels import edit_codes as codes
from ...kernels.edit_codes import MAX_SCORES, OpWords
from ...utils.arguments import PromptError, is_whole, shown
from ..by_name import ByName
from ..image_words import Images
from ..interventions.op import Missing, Op, ReadOp, row_dots
from ..positions import Positions, Window
from ..registry import op
from ..site import Site
from ..spec import PlacedSpec
from .probe import FeatureProbe, Probe, ProbeSource, probe_of

MAX_MONITORS = 64
"""Most monitors of a request."""
MAX_NAME = 128
"""Most characters of a monitor's name."""
Then = Annotated[Any, "then"]
"""Action of a monitor that fires: see `Monitor`."""


@op
@dataclass(frozen=True, eq=False)
class Monitor(PlacedSpec):
    """Score the state at each position, and act where the score is above a threshold. The state itself does not change.

    The score of a position is known in the step that computes it, which also samples the next token.

    Args:
        site: One site before the head.
        probe: A vector [width] or its name in `lm.vectors`, a `Probe`, or a `FeatureProbe`. A torch.nn.Linear, a
            torch.nn.Sequential with one hidden layer, and models and pipelines of scikit-learn become a `Probe`.
        threshold: The monitor fires where the reduced score is above it, or NaN.
        then: Action. "record": keep the scores. "stop": end the request with finish_reason "monitor"; its last token is the
            one at which the monitor fired. An intervention, or a list of them: they act at the generated positions after the
            one that fired. A function of a `MonitorFire`: called on a thread of its own; in the local API only.
        name: Name of the scores in results. None: the site.
        reduce: Value that is compared with the threshold: "token": the score; "mean", "max": over the positions so far; "ewma":
            ``decay * before + (1 - decay) * score``.
        decay: Weight of earlier scores in "ewma", from 0 to 1.
        patience: Number of positions in a row that must be above the threshold.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: a site without interventions, a probe of another width, or a threshold that is not finite. So are several
            sites, logits, and ops with gates or with a vector for each position.
    """

    site: Site | str
    probe: ProbeSource = field(repr=False)
    threshold: float = 0.0
    then: Then = "record"
    name: str | None = None  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    reduce: Literal["token", "mean", "max", "ewma"] = "token"
    decay: float = 0.9
    patience: int = 1
    positions: Positions = "all"
    missing: Missing = "error"

    def __post_init__(self) -> None:
        self._check_name()
        self._set("probe", self._probe())
        super().__post_init__()
        self._set_then()
        self._check("decay", 0 <= self.decay < 1, "from 0 to 1, without 1")
        self._check("patience", is_whole(self.patience) and self.patience >= 1, "a whole number from 1 on")

    def _check_name(self) -> None:
        if self.name is None:
            self._set("name", str(self.site))
        elif not (isinstance(self.name, str) and 0 < len(self.name) <= MAX_NAME):
            raise ValueError(
                f"Monitor: name={shown(self.name)}; expected a string of 1 to {MAX_NAME} characters, or None"
            )

    def _probe(self) -> Probe | FeatureProbe:
        given = self.probe
        if isinstance(given, Tensor) and given.ndim == 2 and str(self.site).partition(".")[0] in HEAD_SITES:
            given = given.flatten()
        return probe_of(given, f"Monitor({str(self.site)!r})")

    def _set_place(self) -> None:
        super()._set_place()
        site = str(self.site)
        kind = site.partition(".")[0]
        if any(c in site for c in "*{"):
            raise ValueError(f"{self.name}: a monitor has one site; make one for each")
        if kind in (LOGITS, *OF_PASSES):
            raise ValueError(
                f"{self.name}: a monitor reads hidden states, and {kind} is captured: Capture({self.site!r})"
            )

    def _set_then(self) -> None:
        then = self.then
        if isinstance(then, Op):
            then = (then,)
        elif isinstance(then, list):
            then = tuple(then)
        if isinstance(then, str) and then.startswith("lora:"):
            raise ValueError(
                f"{self.name}: then={shown(then)}: a request keeps its LoRA adapter; start another request with it"
            )
        acts = isinstance(then, tuple) and bool(then) and all(isinstance(one, Op) for one in then)
        if not (acts or then in ("record", "stop") or callable(then)):
            expected = "'record', 'stop', an intervention or a list of them, or a function"
            raise ValueError(f"{self.name}: then={shown(self.then)}; expected {expected}")
        self._set("then", then)
        for acting in self.ops:
            if acting.when is not None:
                raise ValueError(
                    f"{self.name}: then: {acting.name} has a gate; the monitor decides, so leave out when="
                )

    @property
    def ops(self) -> tuple[Op, ...]:
        """Interventions that act once it has fired."""
        return self.then if isinstance(self.then, tuple) else ()

    def with_ops(self, change: Callable[[Op], Sequence[Op]]) -> Self:
        """A copy with other specs in place of each of `ops`; itself without any."""
        made = tuple(found for acting in self.ops for found in change(acting))
        return self if made == self.ops else replace(self, then=made)

    def located(self, images: Images, prompt_len: int) -> Self:
        return super().located(images, prompt_len).with_ops(lambda op: [op.located(images, prompt_len)])

    def _hash_of(self, name: str, value: Any) -> Any:
        if name == "then":
            return tuple(acting.fingerprint for acting in self.ops) if self.ops else value
        return super()._hash_of(name, value)


@dataclass(frozen=True, eq=False)
class ScoreRead(ReadOp):
    """Dot products of the state at a site with directions of one or several monitors. It changes no state.

    Args:
        directions: [n, width] float32.
        slot: first of the n rows of `TokenRows.scores` that it writes.
    """

    site: Site | str
    directions: Tensor = field(repr=False)
    slot: int
    positions: Positions = "all"

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The directions."""
        return (self.directions,)

    def dots(self, state: Tensor) -> Tensor:
        """[n, rows] float32, of states [rows, width]. A row's bits do not depend on the other rows."""
        state = state.detach().float()
        return torch.stack([row_dots(state, direction)[:, 0] for direction in self.directions.to(state.device)])

    def words(self) -> OpWords:
        """Table words of SCORE."""
        return OpWords(codes.SCORE, rank=len(self.directions), b=float(self.slot))


class BoundMonitor(NamedTuple):
    """A monitor in one model, for a prompt of one length."""

    name: str
    spec: Monitor
    windows: tuple[Window, ...]
    slot: int
    """First of its dot products in `TokenRows.scores`."""
    num_dots: int
    """Number of its dot products."""
    flag: int | None
    """Slot of the flag that its ops look at; None without ops."""


class ScoredSite(NamedTuple):
    """Monitors of a request at one site and the same positions."""

    site: Site
    windows: tuple[Window, ...]
    read: ScoreRead


def bind_monitors(
    specs: Sequence[Monitor],
    places: Sequence[tuple[Site, tuple[Window, ...]]],
    flags: Sequence[int | None],
    model: ModelSpec,
) -> tuple[tuple[BoundMonitor, ...], list[ScoredSite]]:
    """The monitors of a request with their places among its dot products, and the reads that compute these.

    Args:
        places: site and positions of each.
        flags: slot of each one's flag, or None.

    Raises:
        ValueError: more than `MAX_MONITORS`, more dot products than are held, or two with one name.
    """
    if len(specs) > MAX_MONITORS:
        raise ValueError(f"a request has {len(specs)} monitors; at most {MAX_MONITORS}")
    if len({spec.name for spec in specs}) < len(specs):
        names = [cast(str, spec.name) for spec in specs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"two monitors are named {twice!r}: give them names, Monitor(..., name='...')")
    groups: dict[tuple[int, tuple[Window, ...]], list[int]] = {}
    for i, (site, windows) in enumerate(places):
        groups.setdefault((site_index(site, model.num_hidden_layers), windows), []).append(i)
    bound: dict[int, BoundMonitor] = {}
    reads: list[ScoredSite] = []
    slot = 0
    for (_, windows), members in groups.items():
        first, directions = slot, []
        for i in members:
            own: Tensor = cast(Any, specs[i].probe).directions
            bound[i] = BoundMonitor(str(specs[i].name), specs[i], windows, slot, len(own), flags[i])
            directions.append(own)
            slot += len(own)
        if slot > MAX_SCORES:
            raise ValueError(
                f"the probes of the request's monitors have {slot} directions or more; at most {MAX_SCORES} are held (a hidden "
                "layer has one for each unit, a softmax one for each class)"
            )
        read = ScoreRead(str(places[members[0]][0]), torch.cat(directions), first)
        reads.append(ScoredSite(places[members[0]][0], windows, read))
    return tuple(bound[i] for i in range(len(specs))), reads


class MonitorRegistry(ByName[Monitor]):
    """Monitors by name.

    lm.monitors["toxic"] = Monitor("resid_post.12", probe, threshold=0.9, then="stop")
    lm.generate(prompts, monitors=["toxic"])
    """

    kind, attribute, example = "monitor", "monitors", "Monitor(site, probe, ...)"

    def __setitem__(self, name: str, monitor: Monitor) -> None:
        """Keep a monitor; its results have this name. Raises ValueError for anything else."""
        if not isinstance(monitor, Monitor):
            raise ValueError(f"lm.monitors[{shown(name)}] = {shown(monitor)}; expected {self.example}")
        self._keep(name, replace(monitor, name=name))

    def resolved(self, given: Any) -> Any:
        """A call's `monitors`, with monitors in place of names. Raises PromptError: an unknown name."""
        if isinstance(given, str):
            raise PromptError(f"monitors={shown(given)}: expected a list of monitors or names")
        if not isinstance(given, list | tuple):
            return given
        try:
            return [
                self[entry]
                if isinstance(entry, str)
                else self.resolved(entry)
                if isinstance(entry, list | tuple)
                else entry
                for entry in given
            ]
        except KeyError as error:
            raise PromptError(error.args[0]) from None
