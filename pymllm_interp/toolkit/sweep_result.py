"""`PatchSweep`: the values of a patch sweep, cell by cell or as a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from rich.table import Table
from rich.text import Text

from ..plots import Plot, sweep_heatmap
from .heatmap import html_table

LISTED = 12
"""Cells that the table lists."""


class SweepCell(NamedTuple):
    """Place of a patched run, and its metric."""

    layer: int
    position: int
    head: int | None
    """Index of the patched head; None if whole states are patched."""
    value: float
    """The metric."""


class PatchSweep:
    """The metric of each patched run: `lm.patch_sweep` returns it.

    Iteration yields each `SweepCell` as soon as it is computed. With ``stream=True`` that runs the cells; the tensors wait for
    those that are left.

    Attributes:
        site: kind of the site.
        layers, positions: values of the axes.
        heads: values of the third axis; None if whole states are patched.
        base, source: the metric of the two runs, unpatched.
        how: "wavefront", or "requests" with the reason.
        tokens, source_tokens: tokens of both prompts, as text if there is a tokenizer.
    """

    def __init__(
        self,
        site: str,
        layers: Sequence[int],
        positions: Sequence[int],
        heads: Sequence[int] | None,
        baselines: tuple[float, float],
        tokens: tuple[list[str], list[str]],
        how: str,
        cells: Iterator[tuple[tuple[int, ...], float]],
    ) -> None:
        self.site, self.layers, self.positions = site, list(layers), list(positions)
        self.heads = None if heads is None else list(heads)
        self.base, self.source = baselines
        self.tokens, self.source_tokens = tokens
        self.how = how
        shape = [len(self.layers), len(self.positions)] + ([] if heads is None else [len(heads)])
        self._values = torch.full(shape, float("nan"))
        self._pending, self._known = cells, list[SweepCell]()
        self._noise = 0.0

    def __len__(self) -> int:
        """Number of cells."""
        return self._values.numel()

    def __iter__(self) -> Iterator[SweepCell]:
        """The cells as they come; those that are known already come first."""
        index = 0
        while index < len(self._known) or self._advance():
            while index < len(self._known):
                yield self._known[index]
                index += 1

    @property
    def done(self) -> bool:
        """Whether all cells are computed."""
        return len(self._known) == len(self)

    def finish(self) -> PatchSweep:
        """Run the cells that are left.

        Raises:
            RuntimeError: the sweep failed before.
        """
        while self._advance():
            pass
        if not self.done:
            raise RuntimeError(f"the sweep ended with an error after {len(self._known)} of {len(self)} cells")
        return self

    def _advance(self) -> bool:
        """Take the next value of the sweep; False at its end."""
        for place, value in self._pending:
            if not place:  # a cell of the noise floor
                self._noise = max(self._noise, abs(value - self.base))
                continue
            self._values[place] = value
            layer, position, *head = place
            self._known.append(
                SweepCell(
                    self.layers[layer],
                    self.positions[position],
                    self.heads[head[0]] if self.heads is not None else None,
                    value,
                )
            )
            return True
        return False

    @property
    def values(self) -> torch.Tensor:
        """The metric of each cell: [layers, positions], or [layers, positions, heads]; float32, on the CPU."""
        return self.finish()._values

    @property
    def noise_floor(self) -> float:
        """The largest deviation from `base` of cells that are patched with the base run's own states, one in each layer.

        Differences below it are rounding.
        """
        return self.finish()._noise

    @property
    def effects(self) -> torch.Tensor:
        """Effects of the patches, ``values - base``."""
        return self.values - self.base

    @property
    def normalized(self) -> torch.Tensor:
        """``(values - base) / (source - base)``: 0 is the base run, 1 the source run.

        Raises:
            ValueError: both runs have the same metric.
        """
        gap = self.source - self.base
        if abs(gap) <= self.noise_floor:
            raise ValueError(
                f"the metric is {self.base:.4g} for the base and {self.source:.4g} for the source: equal up to rounding. Choose "
                "prompts, or a metric, that differ; `effects` are the plain differences"
            )
        return self.effects / gap

    def top(self, k: int = LISTED) -> list[SweepCell]:
        """The `k` cells with the largest effect, up or down, the largest first."""
        self.finish()
        return sorted(self._known, key=lambda cell: -abs(cell.value - self.base))[:k]

    # -- shown -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = f"base {self.base:.4g}, source {self.source:.4g}, {self.how}"
        return f"PatchSweep({self.site}, {list(self._values.shape)}, {state})"

    def __rich__(self) -> Table:
        table = Table(
            title=f"{self.site}: base {self.base:.4g}, source {self.source:.4g}",
            caption=f"largest of {len(self)} effects; noise floor {self.noise_floor:.2g}; {self.how}",
        )
        columns = ["layer", "position", "token"] + (["head"] if self.heads else []) + ["value", "effect"]
        for column in columns:
            table.add_column(column, justify="left" if column == "token" else "right")
        for cell in self.top():
            head = [str(cell.head)] if self.heads else []
            token = Text(repr(self.tokens[cell.position]))  # which may look like rich's markup
            table.add_row(
                str(cell.layer), str(cell.position), token, *head, f"{cell.value:.4g}", f"{cell.value - self.base:+.4g}"
            )
        return table

    def _flat(self) -> tuple[torch.Tensor, str]:
        """The effects [layers, positions], and how heads were combined, as text."""
        effects = self.effects
        if self.heads is None:
            return effects, ""
        largest = effects.abs().argmax(-1, keepdim=True)
        return effects.gather(-1, largest).squeeze(-1), ", the largest of the heads"

    def _heatmap(self) -> tuple[str, list[int], list[str], torch.Tensor]:
        """Title, layers, tokens, and the effects [layers, positions]."""
        effects, of_heads = self._flat()
        tokens = [f"{self.tokens[position]} {position}" for position in self.positions]
        return f"{self!r}: effect of each patch{of_heads}", self.layers, tokens, effects

    def _repr_html_(self) -> str:
        return html_table(*self._heatmap())

    def plot(self) -> Plot:
        """A heatmap of the effects; with heads, of the largest effect among them. `Plot.figure` is plotly's.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        title, layers, tokens, effects = self._heatmap()
        return sweep_heatmap(effects, tokens, layers=layers, title=title)
