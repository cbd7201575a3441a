"""`Attribution`: the result of `lm.attribute`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from einops import reduce
from rich.table import Table
from rich.text import Text

from ..hooks.site import Site
from ..plots import Plot, sweep_heatmap
from .heatmap import html_table

LISTED = 12
"""Entries that the table lists."""


class Completeness(NamedTuple):
    """Integrated gradients add up to the effect of patching the whole site, up to the error of the steps."""

    attributed: float
    """The sum of the site's attributions."""
    difference: float
    """The metric with the clean states at all positions of the site, less the corrupted run's."""

    @property
    def error(self) -> float:
        """Difference ``attributed - difference``."""
        return self.attributed - self.difference


class Attributed(NamedTuple):
    """One attribution, with its site and position."""

    site: str
    position: int
    place: tuple[int, ...]
    """Head, neuron, or both; () for a position."""
    value: float


class Attribution(Mapping[str, torch.Tensor]):
    """The attributions of each site: estimates of the change of the metric by patching it from the clean run.

    By site's name, float32 on the CPU: [positions], at `q`, `k`, `v` and `z` [positions, heads]. With ``neurons=True`` they have
    the state's shape, [positions, width] or [positions, heads, head_dim].

    Attributes:
        clean, corrupted: the metric of the two runs.
        steps: gradients that were averaged; 1: attribution patching.
        completeness: sum of attributions and its exact value by site, with several steps.
        tokens: tokens of the corrupted prompt, as text if there is a tokenizer.
    """

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        clean: float,
        corrupted: float,
        steps: int,
        completeness: Mapping[str, Completeness],
        tokens: Sequence[str],
        neurons: bool,
    ) -> None:
        self._values, self.clean, self.corrupted, self.steps = dict(values), clean, corrupted, steps
        self.completeness, self.tokens, self._neurons = dict(completeness), list(tokens), neurons

    def __getitem__(self, site: str | Site) -> torch.Tensor:
        name = str(site)
        found = self._values.get(name)
        if found is None:
            found = self._values.get(str(Site.parse(name)))
        if found is None:
            raise KeyError(f"no attributions of {name!r}; there are {', '.join(self._values)}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def stacked(self, kind: str) -> torch.Tensor:
        """The attributions of a kind of site, [layers, positions, ...], in the order of the layers."""
        found = [values for name, values in self._values.items() if name.partition(".")[0] == kind]
        if not found:
            raise KeyError(f"no attributions of {kind!r}; there are {', '.join(self._values)}")
        return torch.stack(found)

    def top(self, k: int = LISTED) -> list[Attributed]:
        """The `k` largest entries, up or down, the largest first."""
        names = list(self._values)
        flat = torch.cat([self._values[name].flatten() for name in names])
        starts = torch.tensor([0, *(self._values[name].numel() for name in names)]).cumsum(0)
        entries = []
        for place in flat.abs().topk(min(k, len(flat))).indices.tolist():
            which = int((starts <= place).sum()) - 1
            values = self._values[names[which]]
            position, *index = torch.unravel_index(place - starts[which], values.shape)
            entries.append(Attributed(names[which], int(position), tuple(map(int, index)), flat[place].item()))
        return entries

    # -- shown -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        how = "attribution patching" if self.steps == 1 else f"integrated gradients, {self.steps} steps"
        return f"Attribution({len(self)} sites, clean {self.clean:.4g}, corrupted {self.corrupted:.4g}, {how})"

    def __rich__(self) -> Table:
        table = Table(title=repr(self), caption=self._caption())
        for column in ("site", "position", "token", "head" if not self._neurons else "index", "attribution"):
            table.add_column(column, justify="left" if column in ("site", "token") else "right")
        for entry in self.top():
            index = ", ".join(map(str, entry.place))
            token = Text(repr(self.tokens[entry.position]))  # which may look like rich's markup
            table.add_row(entry.site, str(entry.position), token, index, f"{entry.value:+.4g}")
        return table

    def _caption(self) -> str:
        if not self.completeness:
            return "the largest; first-order estimates"
        worst = max(self.completeness.values(), key=lambda found: abs(found.error))
        return f"the largest; sums differ from the patched sites' effects by {abs(worst.error):.2g} at most"

    def _by_position(self) -> torch.Tensor:
        """[sites, positions]: the sum over heads and neurons."""
        return torch.stack([reduce(values, "tokens ... -> tokens", "sum") for values in self._values.values()])

    def _repr_html_(self) -> str:
        return html_table(f"{self!r}; {self._caption()}", list(self._values), self.tokens, self._by_position())

    def plot(self) -> Plot:
        """A heatmap of sites and positions. `Plot.figure` is plotly's.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        return sweep_heatmap(self._by_position(), self.tokens, layers=list(self), title=repr(self), rows="site")
