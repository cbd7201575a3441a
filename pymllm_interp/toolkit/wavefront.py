"""The suffix wavefront: all cells of a patch sweep in one growing pass over the layers.

A cell (b, p) replaces row p of the residual stream before layer b, and nothing else. Rows before p, and all rows before layer b,
are those of the base run. So the base run leaves each layer's stream and KV, and the cell runs rows p to the last one from layer
b on, in a batch that it joins when the pass gets there::

    layer 0 | base -> streams, KV
    layer 1 | cells (1, p)                                   rows p .. n-1 each
    layer 2 | cells (1, p), cells (2, p)                     keys before p: the base run's
    ...     |
    head    | the last row of each

L layers and n tokens cost (L - b)(n - p) rows a cell, in place of L n.

A patch inside a layer (`z`, `attn_out`, `mlp_out`, ...) changes one row of that layer: a probe computes this row over the base
run's KV, and the cell goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.forward_batch import ForwardBatch
from ..core.model_spec import input_add, site_index
from ..hooks.site import Site
from ..layers.edits.base import residual_sum
from ..layers.edits.host import HostOps
from ..models.decoder import DecoderForCausalLM
from ..runner.interp_model_runner import InterpModelRunner
from .scratch import LayerKV, batch_of

HEAD_ROWS = 256
"""Rows of the head at once: logits are wide."""

Rotations = Any
"""By the `rotary` of layers."""


class StreamCell(NamedTuple):
    """One row of the stream, replaced."""

    boundary: int
    """The layer before which it is replaced; the number of layers: before the final norm."""
    position: int
    row: torch.Tensor
    """[hidden]."""


@dataclass
class Probes:
    """Rows of one layer, each with a patch at a site inside."""

    site: Site
    positions: list[int]
    values: torch.Tensor  # [probes, width]
    channels: torch.Tensor | None  # [probes, width] bool: what is patched; None: all


class Wavefront:
    """A prompt's base run, and cells over it.

    Each layer of each pass is a call of its own on the engine's thread. The engine's steps run in between, so a layer of at most
    `max_rows` token rows is what a step of other requests waits for.

    Args:
        runner: of a native model.
        call: runs a function on the engine's thread (`Engine.call`).
        token_ids: of the prompt.
        max_rows: token rows of a pass at most; a prompt or a cell that is longer has a pass for itself.

    Attributes:
        streams: after `run_base`, the stream [tokens, hidden] before each layer, and before the final norm.
    """

    def __init__(
        self, runner: InterpModelRunner, call: Callable[[Callable[[], Any]], Any], token_ids: list[int], max_rows: int
    ) -> None:
        self.model: Any = runner.get_model()
        self.decoder = getattr(self.model, self.model.decoder_name)
        self.layers = list(getattr(self.decoder, self.decoder.layers_name))
        self.runner, self._engine_call = runner, call
        self.num_tokens, self.max_rows = len(token_ids), max(max_rows, len(token_ids))
        self.token_ids = torch.tensor(token_ids, device=runner.device)
        self.streams: list[torch.Tensor] = []
        self.base_kv: list[torch.Tensor] = []

    @staticmethod
    def serves(runner: InterpModelRunner) -> bool:
        """Whether the model's layers can run one by one: native families."""
        return isinstance(runner.get_model(), DecoderForCausalLM)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(*args)`` on the engine's thread, without gradients."""
        return self._engine_call(partial(torch.no_grad()(function), *args))

    # -- the base run --------------------------------------------------------------------

    def run_base(self, probes: dict[int, Probes]) -> Iterator[tuple[int, torch.Tensor]]:
        """Run the prompt, and the probes of each layer.

        Yields:
            layer and, for its probes, the row [probes, hidden] of the stream behind the layer.
        """
        h = self.call(self._begin)
        for index in range(len(self.layers)):
            h = self.call(self._base_layer, index, h)
            self.streams.append(h[0])
            if (found := probes.get(index)) is not None:
                starts = range(0, len(found.positions), self.max_rows)
                yield index, torch.cat([self.call(self._probe, index, found, start) for start in starts])

    def _begin(self) -> torch.Tensor:
        self.kv = LayerKV(self.runner, self.num_tokens + self.max_rows)
        self.base = batch_of(self.runner, self.kv, self.token_ids, [(0, self.num_tokens)], first_slot=1)
        positions = self.base.positions.unsqueeze(0)  # pyright: ignore[reportOptionalMemberAccess]
        self.base_rotations = self.decoder.rotations(positions, self.base)
        h = self.decoder.embed_fused(self.base.input_ids.unsqueeze(0), positions)
        self.streams.append(h[0])
        return h

    def _base_layer(self, index: int, h: torch.Tensor) -> torch.Tensor:
        h = self._layer(index, h, None, self.base, self.base_rotations)
        self.base_kv.append(self.kv.saved(self.num_tokens))
        return h

    def _layer(
        self, index: int, h: torch.Tensor, site_ops: HostOps | None, batch: ForwardBatch, rotations: Rotations
    ) -> torch.Tensor:
        """One layer, with the sum behind it: [1, rows, hidden] -> the same."""
        layer = self.layers[index]
        batch.site_ops = site_ops
        h, delta = layer.forward_fused(h, None, rotations[layer.rotary], batch)
        return residual_sum(h, delta, site_ops, input_add(index + 1))

    def _probe(self, index: int, probes: Probes, start: int) -> torch.Tensor:
        """A layer's probes from `start` on: a row each, over the base run's KV, which is in place."""
        stop = start + self.max_rows
        positions = probes.positions[start:stop]
        batch, rotations = self._pass([(position, position + 1) for position in positions])
        values = probes.values[start:stop].to(self.token_ids.device, self.runner.dtype)
        channels = None if probes.channels is None else probes.channels[start:stop].to(values.device)

        def patch(rows: torch.Tensor) -> torch.Tensor:
            return values if channels is None else torch.where(channels, values, rows)

        site = site_index(probes.site, len(self.layers))
        site_ops = HostOps({site: [((0, len(positions)), patch)]}, {}, len(self.layers))
        h = self.streams[index][positions].unsqueeze(0)
        return self._layer(index, h, site_ops, batch, rotations)[0]

    def _pass(self, spans: list[tuple[int, int]]) -> tuple[ForwardBatch, Rotations]:
        batch = batch_of(self.runner, self.kv, self.token_ids, spans, first_slot=1 + self.num_tokens)
        return batch, self.decoder.rotations(batch.positions.unsqueeze(0), batch)  # pyright: ignore[reportOptionalMemberAccess]

    # -- the cells ------------------------------------------------------------------------

    def logits(self, cells: Sequence[StreamCell]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The logits of the last position, cell by cell. Comes after `run_base`.

        Yields:
            indexes of cells, and their logits [cells, vocab] in the model's dtype.
        """
        for group in self._groups(cells):
            wave = _Wave(self)
            for index in range(cells[group[0]].boundary, len(self.layers) + 1):
                arriving = [cells[i] for i in group if cells[i].boundary == index]
                self.call(wave.advance, index, arriving)
            for first in range(0, len(group), HEAD_ROWS):
                rows = wave.last[:, first : first + HEAD_ROWS]
                yield group[first : first + HEAD_ROWS], self.call(self.model.head_fused, rows, wave.batch)[0]

    def _groups(self, cells: Sequence[StreamCell]) -> Iterator[list[int]]:
        """Indexes of the cells of each pass. Cells of near layers go together, so that batches are full early."""
        group, rows = [], 0
        for i in sorted(range(len(cells)), key=lambda i: cells[i].boundary):
            size = self.num_tokens - cells[i].position
            if group and rows + size > self.max_rows:
                yield group
                group, rows = [], 0
            group.append(i)
            rows += size
        if group:
            yield group


class _Wave:
    """One pass of cells.

    Attributes:
        last: at the end, the last row of each cell after the final norm, [1, cells, hidden].
    """

    last: torch.Tensor

    def __init__(self, front: Wavefront) -> None:
        self.front = front
        self.h: torch.Tensor | None = None
        self.batch = front.base  # where all cells arrive behind the last layer
        self.spans: list[tuple[int, int]] = []

    def advance(self, index: int, arriving: list[StreamCell]) -> None:
        """Let cells join, and run the layer `index`; behind the last one, the final norm."""
        front = self.front
        if arriving:
            self._join(arriving, front.streams[index])
        if self.h is None:
            return
        if index == len(front.layers):
            ends = torch.tensor([stop - first for first, stop in self.spans]).cumsum(0) - 1
            norm = getattr(front.decoder, front.decoder.norm_name)
            self.last = norm.normalize(self.h[:, ends.to(self.h.device)])
            self.batch.logits_indices = None  # of these rows, all
            return
        if arriving:
            self.batch, self.rotations = front._pass(self.spans)
        front.kv.restore(front.base_kv[index])
        self.h = front._layer(index, self.h, None, self.batch, self.rotations)

    def _join(self, arriving: list[StreamCell], stream: torch.Tensor) -> None:
        """Append the rows of cells: the patched one, and the base run's behind it."""
        spans = [(cell.position, self.front.num_tokens) for cell in arriving]
        rows = stream[torch.cat([torch.arange(*span) for span in spans]).to(stream.device)]
        sizes = torch.tensor([stop - first for first, stop in spans])
        patched = torch.stack([cell.row for cell in arriving]).to(stream.device, stream.dtype)
        rows[(sizes.cumsum(0) - sizes).to(stream.device)] = patched
        h = rows.unsqueeze(0)
        self.h = h if self.h is None else torch.cat([self.h, h], dim=1)
        self.spans += spans
