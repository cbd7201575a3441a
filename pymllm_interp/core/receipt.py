"""Receipts: applied interventions, captures, and execution of a request's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import groupby
from typing import Any

from ..utils.tables import Shown, Table


class _Brief:
    """A dataclass with a repr of the fields that differ from their defaults."""

    def __repr__(self) -> str:
        shown = []
        for spec in fields(self):  # pyright: ignore[reportArgumentType]
            value = _folded(getattr(self, spec.name))
            unset = spec.default if spec.default_factory is MISSING else spec.default_factory()
            if spec.repr and value != unset:
                shown.append(f"{spec.name}={dict(value) if isinstance(value, Counter) else value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(repr=False, frozen=True)
class Applied(_Brief):
    """Counts of an intervention at one site. Rows computed again, after the request was preempted, count once.

    Requests with equal counts may share it.
    """

    intervention: str
    site: str
    prompt_rows: int = 0
    """Rows of the prompt that it acted on; with a gate, rows that the gate was evaluated on."""
    generated_rows: int = 0
    """Rows of generated tokens, likewise."""
    gate_fires: int | None = None
    """Rows on which the gate fired. Rows computed again count again, and so may a row that was launched before the request's
    end was known. None without a gate."""
    missing: int = 0
    """Positions that the prompt does not have, left out by `missing="skip"`."""
    monitor: str = ""
    """Name of the monitor that it waited for."""


@dataclass(repr=False, frozen=True)
class Captured(_Brief):
    """Number of rows captured at one site, before any reduction. Each position counts once.

    Requests with equal counts share it.
    """

    site: str
    prompt_rows: int = 0
    generated_rows: int = 0
    missing: int = 0
    """Positions that the prompt does not have, left out by `missing="skip"`."""
    cut: int = 0
    """Active features that `Features(top_k=...)` left out, over all rows."""


@dataclass(repr=False, slots=True)
class Receipt(_Brief, Shown):
    """Record of one request: execution of its steps, applied interventions, captures, and its trace. The repr shows set fields."""

    steps: Counter[str] = field(default_factory=Counter)
    """Number of steps by execution mode.

    "plain": fused, without modules. "replay": fused, as a CUDA graph. "modules": module by module, with hooks. "segments": with
    hooks, and CUDA graphs between them. "split": as "modules", for the hooked requests only."""
    eager_parts: Counter[str] = field(default_factory=Counter)
    """Number of "segments" steps in which an attention or an MLP ran without a graph because of this request. Keys are the
    locations inside of it that the request's trace waited for."""
    interventions: list[Applied] = field(default_factory=list)
    """Applied interventions in order of site, then of effect, without no-ops."""
    captures: list[Captured] = field(default_factory=list)
    """Captures in order of site."""
    engine: str = field(default="", repr=False)
    """Versions, device, attention backend and dtype. Set for requests with interventions or captures, as are `model` and `spec`."""
    model: str = field(default="", repr=False)
    """Hash of weights, dtype and config (models/weights/model_state.py)."""
    spec: str = field(default="", repr=False)
    """Hash of the interventions and captures, vectors included."""
    batch_invariant: bool = False
    """Whether its bits are independent of other requests (docs/batch-invariance.md)."""
    kernels: str = field(default="", repr=False)
    """Hash of the kernels in batch-invariant mode; "" in the default mode."""
    reads: int = 0
    """Number of values served to the trace."""
    edits: int = 0
    """Number of values that the trace assigned or changed in place."""
    lowered: bool = False
    """The trace's block ran after the request, over captured states, and not in its forward passes."""
    not_lowered: str = ""
    """Reason that the trace ran in the forward passes instead of being lowered."""
    nan_edits: int = 0
    """Number of edits that held NaN."""
    flat_logits: int = 0
    """Number of generated tokens with logits that were all equal, or that had NaN or an infinity as the largest."""
    preemptions: int = 0
    """Number of times that the request was preempted."""
    num_cached_tokens: int = 0
    """Number of prompt tokens with KV in the prefix cache."""
    not_reused: str = ""
    """Number of further tokens in the prefix cache, and the reason that they were recomputed."""
    drafted: int = 0
    """Number of draft tokens that were computed."""
    accepted: int = 0
    """Number of them that became tokens of the request."""
    masked_argmax: int = 0
    """Number of generated tokens at which a constraint forbade the likeliest one."""
    weights: list[list[int]] = field(default_factory=list)
    """[version, tokens]: number of generated tokens made with each version of the weights, in order. Empty: `update_weights` did
    not change them while the request ran, and all are of `model`."""
    replica: str = ""
    """Name of the replica that served the request, in a cluster."""

    @property
    def warnings(self) -> list[str]:
        """User-facing warnings about NaN edits and flat logits."""
        found = [f"{self.nan_edits} edit{'s' if self.nan_edits > 1 else ''} held NaN"] if self.nan_edits else []
        if self.flat_logits:
            tokens = "1 token has" if self.flat_logits == 1 else f"{self.flat_logits} tokens have"
            found.append(f"{tokens} logits that are NaN, infinite or all equal: an edit is out of the model's range")
        return found

    def made_with(self, version: int, num_tokens: int) -> None:
        """Note the version of the weights that made the tokens since the last note.

        Args:
            num_tokens: generated tokens so far.
        """
        self.weights.append([version, num_tokens - sum(count for _, count in self.weights)])

    def table(self) -> Table:
        """Steps, interventions, captures, and each further field that is set."""
        counts: list[tuple[str, str, Any]] = [("steps", mode, count) for mode, count in self.steps.items()]
        counts += [("eager part", part, count) for part, count in self.eager_parts.items()]
        counts += [(applied.intervention, applied.site, _rows_of(applied)) for applied in _folded(self.interventions)]
        counts += [("weights", f"version {version}", f"{tokens} tokens") for version, tokens in self.weights]
        counts += [("captured", captured.site, _rows_of(captured)) for captured in _folded(self.captures)]
        for name in (
            "reads",
            "edits",
            "nan_edits",
            "flat_logits",
            "preemptions",
            "num_cached_tokens",
            "not_reused",
            "drafted",
            "accepted",
            "masked_argmax",
        ):
            if value := getattr(self, name):
                counts.append((name, "", value))
        return Table("receipt", ("what", "where", "count"), counts)


def _folded(entries: Any) -> Any:
    """A list of counts, with one entry for layers with equal counts; other values as they are."""
    if not isinstance(entries, list) or not all(isinstance(entry, Applied | Captured) for entry in entries):
        return entries
    alike: dict[Any, list[str]] = {}
    for entry in entries:
        alike.setdefault(replace(entry, site=""), []).append(entry.site)
    return [replace(entry, site=layer_ranges(sites)) for entry, sites in alike.items()]


def _rows_of(entry: Applied | Captured) -> str:
    parts = [f"{entry.prompt_rows} prompt rows", f"{entry.generated_rows} generated rows"]
    fires = getattr(entry, "gate_fires", None)
    if fires is not None:
        parts.append(f"the gate fired on {fires}")
    if entry.missing:
        parts.append(f"{entry.missing} missing")
    return ", ".join(parts)


def layer_ranges(sites: Iterable[str]) -> str:
    """Canonical names for people, with ranges of layers: "resid_post.0-29, logits"."""
    by_kind: dict[str, list[int]] = {}
    for site in sites:
        kind, _, layer = site.rpartition(".")
        if layer.isdigit():
            by_kind.setdefault(kind, []).append(int(layer))
        else:
            by_kind[site] = []
    shown: list[str] = []
    for kind, layers in by_kind.items():
        runs = groupby(enumerate(sorted(layers)), lambda entry: entry[1] - entry[0])
        ends = [(run[0][1], run[-1][1]) for _, entries in runs for run in [list(entries)]]
        shown += [f"{kind}.{first}" if first == last else f"{kind}.{first}-{last}" for first, last in ends] or [kind]
    return ", ".join(shown)
