"""What happened to a request: nothing that was asked for is dropped without a word here."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, dataclass, field, fields


class _Brief:
    """A dataclass that shows those fields only that have come to something."""

    def __repr__(self) -> str:
        shown = []
        for spec in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, spec.name)
            unset = spec.default if spec.default_factory is MISSING else spec.default_factory()
            if spec.repr and value != unset:
                shown.append(f"{spec.name}={dict(value) if isinstance(value, Counter) else value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(repr=False)
class Applied(_Brief):
    """What became of an intervention at one site. Rows that were computed twice, after the request gave way, count once."""

    intervention: str
    site: str
    prompt_rows: int = 0
    """Rows of the prompt that it acted on; with a gate, that the gate was asked for."""
    generated_rows: int = 0
    """The same of generated tokens."""
    gate_fires: int | None = None
    """Rows at which the gate let it act, those computed twice counted twice; None without a gate."""


@dataclass(repr=False)
class Captured(_Brief):
    """How many rows were captured at one site, before any reduction. A position counts once."""

    site: str
    prompt_rows: int = 0
    generated_rows: int = 0


@dataclass(repr=False)
class Receipt(_Brief):
    """How a request's steps ran, what was applied, and what its trace did. Printed, it shows what is not empty."""

    steps: Counter[str] = field(default_factory=Counter)
    """Steps by how they ran: "plain" (no module was called), "replay" (the same, as a CUDA graph), "modules" (module by
    module, hooks served), "segments" (the same, what lies between hooks as CUDA graphs), "split" (as "modules", for the hooked
    requests by themselves)."""
    eager_parts: Counter[str] = field(default_factory=Counter)
    """Steps of "segments" in which an attention or an MLP went kernel by kernel for this request, by the location inside of it that
    the request waited for."""
    interventions: list[Applied] = field(default_factory=list)
    """By site, in the order in which they act; those that change nothing are left out."""
    captures: list[Captured] = field(default_factory=list)
    """By site."""
    engine: str = field(default="", repr=False)
    """Versions, device, attention backend and dtype; set where something was declared, as the next two are."""
    model: str = field(default="", repr=False)
    """A hash of weights, dtype and config (models/fingerprint.py)."""
    spec: str = field(default="", repr=False)
    """A hash of the interventions and captures, vectors included."""
    reads: int = 0
    """Values served to the trace."""
    edits: int = 0
    """Values that the trace assigned, or wrote to in place before it went on."""
    nan_edits: int = 0
    """Those of them that held NaN."""
    preemptions: int = 0
    """Times that the request gave way and came back."""

    @property
    def warnings(self) -> list[str]:
        """Sentences for the user."""
        if self.nan_edits:
            return [f"{self.nan_edits} edit{'s' if self.nan_edits > 1 else ''} held NaN"]
        return []
