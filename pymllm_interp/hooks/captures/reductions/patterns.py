"""Captures of attention patterns: ``Capture("pattern.5", heads=[3], positions=[-1])``.

A pattern is the weights of a position's attention over the keys, after the softmax. Attention kernels never have it as a whole. At
these layers it is computed again, for the captured positions only. The result is [positions, heads, keys]. `keys` are all positions
of the request, with 0 for those that a position does not attend to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from ....attention.patterns import PatternRead
from ....core.model_spec import PATTERN, ModelSpec
from ....core.unsupported import UnsupportedModelError
from ...heads import heads_in
from ...positions import missing_of, selected, windows_of
from ...site import expand
from ..layer_rows import LayerCaptures, LayerRows
from ..spec import Capture


class _LayerPatterns(LayerRows):
    """The rows [heads, keys up to some position at or after it] of a layer, by position.

    Attributes:
        heads: query heads; None: all.
        beyond: later keys of a row that may have weights (`ModelSpec.image_span`).
    """

    def __init__(
        self, wanted: np.ndarray, heads: tuple[int, ...] | None, num_heads: int, dtype: torch.dtype, missing: int, stream: bool,
        beyond: int,
    ) -> None:  # fmt: skip
        self.beyond = beyond
        self.heads, self.num_heads = heads, num_heads if heads is None else len(heads)
        super().__init__(wanted, (self.num_heads, len(wanted)), dtype, missing, stream)

    def is_like(self, other: LayerRows) -> bool:
        """Whether both want the same rows, heads and dtype."""
        return isinstance(other, _LayerPatterns) and self.heads == other.heads and super().is_like(other)

    def keep(self, positions: Sequence[int], weights: torch.Tensor) -> None:
        """Keep the rows [heads, rows, keys] of these positions."""
        rows = weights.detach().to(self.dtype).cpu().unbind(1)
        for position, row in zip(positions, rows, strict=True):
            self.rows[position] = row[:, : position + 1 + self.beyond].clone()

    def result(self, at: Sequence[int], num_positions: int) -> torch.Tensor:
        """Patterns [positions, heads, keys]."""
        padded = torch.zeros(len(at), self.num_heads, num_positions, dtype=self.dtype)
        for row, position in zip(padded, at, strict=True):
            own = self.rows[position][:, :num_positions]
            row[:, : own.shape[1]] = own
        return padded


class PatternCaptures(LayerCaptures[_LayerPatterns]):
    """The patterns that one request captures.

    Args:
        specs: captures at `pattern` sites.
        longest: upper bound of the request's positions.

    Raises:
        ValueError: a layer or head that the model lacks, a layer in two ways, later positions, or a reduction.
        UnsupportedModelError: the model's patterns cannot be computed again.
    """

    def __init__(self, specs: Iterable[Capture], model: ModelSpec, prompt_len: int, longest: int) -> None:
        super().__init__(PATTERN, model.num_hidden_layers, prompt_len)
        for spec in specs:
            if model.has_states:
                raise UnsupportedModelError(
                    f"{spec.name}: {model.family.name} models have layers with recurrent states, which have no patterns; in their "
                    "other layers `with lm.trace(prompt, output_attentions=True)` has them in the attention's output"
                )
            if not model.cuts_edges:
                raise UnsupportedModelError(
                    f"{spec.name}: {model.family.name} models compute attention in their own modules, whose patterns are not "
                    "captured; `with lm.trace(prompt, output_attentions=True) as tracer:` has them in tracer.result.attentions"
                )
            if spec.reduce is not None:
                raise ValueError(
                    f"{spec.name}: reduce={spec.reduce!r}; patterns are not reduced: name fewer positions or heads"
                )
            try:
                sites = expand(spec.site, model.num_hidden_layers, model.family)
                heads = None if spec.heads is None else heads_in(spec.heads, model, PATTERN)  # pyright: ignore[reportArgumentType]
                windows = windows_of(spec.positions, prompt_len, spec.missing)
            except ValueError as error:
                raise ValueError(f"{spec.name}: {error}") from None
            wanted = selected(windows, longest)
            dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else model.dtype
            for site in sites:
                missing, beyond = missing_of(spec.positions, prompt_len), model.image_span
                layer = _LayerPatterns(wanted, heads, model.num_attention_heads, dtype, missing, spec.stream, beyond)
                if not self.layers.setdefault(site.layer or 0, layer).is_like(layer):
                    raise ValueError(
                        f"{site} is captured twice, in two ways: name it once, with all positions and heads that you want"
                    )

    def reads(self, start: int, num_rows: int) -> dict[int, PatternRead]:
        """layer -> `PatternRead` of a pass over `num_rows` positions from `start` on. Earlier positions are omitted."""
        return dict(self._reads(start, num_rows))

    def _reads(self, start: int, num_rows: int) -> Iterator[tuple[int, PatternRead]]:
        for number, layer in self.layers.items():
            rows = np.flatnonzero(layer.wanted[start : start + num_rows])
            rows = rows[[start + row not in layer.rows for row in rows.tolist()]]
            if len(rows):
                positions = (start + rows).tolist()

                def keep(
                    weights: torch.Tensor, layer: _LayerPatterns = layer, positions: list[int] = positions
                ) -> None:
                    layer.keep(positions, weights)

                yield number, PatternRead(rows, layer.heads, keep)
