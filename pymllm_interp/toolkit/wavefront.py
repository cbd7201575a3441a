"""The suffix wavefront: all cells of a patch sweep in one growing pass over the layers.

A cell is the prompt's run with one state patched, at a layer and a position p. Earlier layers, and rows before p, equal the base
run. So the base run leaves each layer's stream and KV. The cell runs rows p to the last one from its layer on. It joins the batch
when the pass gets there::

    layer 0 | base -> streams, KV
    layer 1 | cells at layer 1                               rows p .. n-1 each
    layer 2 | cells at layers 1 and 2                        keys before p: the base run's
    ...     |
    head    | the last row of each

L layers and n tokens cost (L - layer)(n - p) rows a cell, in place of L n.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from ..core.forward_batch import ForwardBatch
from ..core.model_spec import input_add, site_index
from ..hooks.site import Site
from ..layers.edits.base import residual_sum
from ..layers.edits.host import HostOps
from ..models.native.attention import Attention
from ..models.native.decoder import DecoderForCausalLM
from ..runner.interp_model_runner import InterpModelRunner, RunnerCommand
from .scratch import LayerKV, batch_of, last_rows_of

HEAD_ROWS = 256
"""Rows of the head at once: logits are wide."""
STREAM = ("resid_pre", "resid_post")
"""Kinds of sites that are the stream between layers: their cells join with the patched row."""


class WaveCell(NamedTuple):
    """Place of a patched run."""

    site: Site
    position: int
    value: torch.Tensor
    """[width], or [rows, width] for as many positions from `position` on."""
    channels: torch.Tensor | None = None
    """[width] bool: patched channels; None: all."""

    @property
    def boundary(self) -> int:
        """The layer before which the cell joins; the number of layers: before the final norm."""
        return (self.site.layer or 0) + (self.site.kind == "resid_post")


class Wavefront:
    """Base run of a prompt, and cells over it, as messages to the worker.

    Each layer of each pass is a separate message. The engine's steps run in between. So steps of other requests wait for a
    layer of at most `max_rows` token rows.

    Args:
        run: has the worker run a command, and returns its answer (`Engine.run`).
        post: the same without waiting (`Engine.post`).
        token_ids: token ids of the prompt.
        num_layers: number of layers of the model.
        max_rows: token rows of a pass at most; a longer prompt or cell runs in a separate pass.
    """

    def __init__(
        self,
        run: Callable[[RunnerCommand], Any],
        post: Callable[[RunnerCommand], None],
        token_ids: list[int],
        num_layers: int,
        max_rows: int,
    ) -> None:
        self.token_ids, self.num_layers = token_ids, num_layers
        self.max_rows = max(max_rows, len(token_ids))
        self._run, self._post = run, post

    @staticmethod
    def why_not(lm: Any) -> str:
        """Reason that the layers of an `LM`'s model cannot run one by one, or ""."""
        if not isinstance(lm._module, DecoderForCausalLM):
            return "the model runs by its class in transformers"
        return "the model has recurrent states" if lm.model_spec.has_states else ""

    def logits(self, cells: Sequence[WaveCell]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The logits of the last position, cell by cell.

        Yields:
            indexes of cells, and their logits [cells, vocab] in the model's dtype.
        """
        for group, key in self._waves(cells, every_row=False):
            for first in range(0, len(group), HEAD_ROWS):
                yield group[first : first + HEAD_ROWS], self._run(WaveLogits(key, first, first + HEAD_ROWS))

    def row_logits(self, cells: Sequence[WaveCell]) -> Iterator[tuple[int, torch.Tensor]]:
        """The logits of all positions, cell by cell.

        Yields:
            index of a cell, and its logits [tokens, vocab] in the model's dtype. Cells of lower layers come first.
        """
        base: Any = None
        for group, key in self._waves(cells, every_row=True):
            base = self._run(BaseLogits(key)) if base is None else base
            first = 0
            for i in group:
                start = cells[i].position
                stop = first + len(self.token_ids) - start
                yield i, torch.cat([base[:start], self._run(WaveLogits(key, first, stop))])
                first = stop

    def _waves(self, cells: Sequence[WaveCell], every_row: bool) -> Iterator[tuple[list[int], str]]:
        """Indexes of the cells of each pass, when it has run, and the sweep's key on the worker."""
        key = uuid4().hex
        try:
            self._run(BeginSweep(key, self.token_ids, self.max_rows))
            for index in range(self.num_layers):
                self._run(BaseLayer(key, index))
            for group in self._groups(cells):
                self._run(BeginWave(key, every_row))
                for index in range(cells[group[0]].boundary, self.num_layers + 1):
                    self._run(AdvanceCells(key, index, [cells[i] for i in group if cells[i].boundary == index]))
                yield group, key
        finally:
            self._post(EndSweep(key))

    def _groups(self, cells: Sequence[WaveCell]) -> Iterator[list[int]]:
        """Indexes of the cells of each pass. Cells of near layers go together, so that batches are full early."""
        group, rows = [], 0
        for i in sorted(range(len(cells)), key=lambda i: cells[i].boundary):
            size = len(self.token_ids) - cells[i].position
            if group and rows + size > self.max_rows:
                yield group
                group, rows = [], 0
            group.append(i)
            rows += size
        if group:
            yield group


@dataclass(frozen=True)
class BeginSweep:
    """Embed the prompt of a new sweep.

    Attributes:
        key: key of the sweep in the worker (`InterpModelRunner.kept`).
        token_ids: token ids of the prompt.
        max_rows: token rows of a pass of cells at most.
    """

    key: str
    token_ids: list[int]
    max_rows: int

    def run(self, runner: InterpModelRunner) -> None:
        """Embed the prompt and keep a `SweepRun`."""
        runner.kept[self.key] = SweepRun(runner, self.token_ids, self.max_rows)


@dataclass(frozen=True)
class BaseLayer:
    """Run the next layer of the base run."""

    key: str
    index: int

    def run(self, runner: InterpModelRunner) -> None:
        """Keep its stream and KV."""
        runner.kept[self.key].base_layer(self.index)


@dataclass(frozen=True)
class BeginWave:
    """Begin a pass of cells.

    Attributes:
        every_row: the head reads all rows of each cell, in place of the last one.
    """

    key: str
    every_row: bool

    def run(self, runner: InterpModelRunner) -> None:
        """Keep the pass of a new wave."""
        sweep: SweepRun = runner.kept[self.key]
        sweep.wave = _Wave(sweep, self.every_row)


@dataclass(frozen=True)
class AdvanceCells:
    """Let cells join the pass, and run its next layer; behind the last one, the final norm."""

    key: str
    index: int
    arriving: list[WaveCell]

    def run(self, runner: InterpModelRunner) -> None:
        """Keep the cells' rows."""
        runner.kept[self.key].wave.advance(self.index, self.arriving)


@dataclass(frozen=True)
class WaveLogits:
    """Compute the logits of the rows `first` to `stop` of `_Wave.last`, of a pass that has run."""

    key: str
    first: int
    stop: int

    def run(self, runner: InterpModelRunner) -> torch.Tensor:
        """Logits [rows, vocab] of the cells."""
        sweep: SweepRun = runner.kept[self.key]
        wave = sweep.wave
        return sweep.model.head_fused(wave.last[:, self.first : self.stop], wave.batch)[0]


@dataclass(frozen=True)
class BaseLogits:
    """Compute the logits of the base run."""

    key: str

    def run(self, runner: InterpModelRunner) -> torch.Tensor:
        """Logits [tokens, vocab] of the base run."""
        sweep: SweepRun = runner.kept[self.key]
        normed = getattr(sweep.decoder, sweep.decoder.norm_name).normalize(sweep.streams[-1].unsqueeze(0))
        return sweep.model.head_fused(normed, sweep.wave.batch)[0]


@dataclass(frozen=True)
class EndSweep:
    """Forget a sweep."""

    key: str

    def run(self, runner: InterpModelRunner) -> None:
        """Free the memory of the sweep."""
        runner.kept.pop(self.key, None)


class SweepRun:
    """A sweep on the worker: a prompt's base run, and the pass of cells that is under way.

    Args:
        runner: runner of a native model.

    Attributes:
        streams: the base run's stream [tokens, hidden] before each layer, and before the final norm.
        wave: the pass of cells.
    """

    wave: _Wave

    def __init__(self, runner: InterpModelRunner, token_ids: list[int], max_rows: int) -> None:
        self.model: Any = runner.get_model()
        self.decoder = getattr(self.model, self.model.decoder_name)
        self.layers = list(getattr(self.decoder, self.decoder.layers_name))
        self.worker: InterpModelRunner = weakref.proxy(runner)  # which holds this object
        self.num_tokens = len(token_ids)
        self.token_ids = torch.tensor(token_ids, device=runner.device)
        self._base_kv: list[torch.Tensor] = []
        self.kv = LayerKV(runner, self.num_tokens + max_rows)
        self.base, self.base_rotations = self.planned([(0, self.num_tokens)], first_slot=1)
        positions: Any = self.base.positions
        self.streams = [
            self.decoder.embed_fused(self.base.input_ids.unsqueeze(0), positions.unsqueeze(0), self.base)[0]
        ]

    def base_layer(self, index: int) -> None:
        """Run a layer of the base run."""
        h = self.run_layer(index, self.streams[index].unsqueeze(0), self.base, self.base_rotations)
        self.streams.append(h[0])
        self._base_kv.append(self.kv.saved(self.num_tokens))

    # -- parts of passes -------------------------------------------------------------------------

    def planned(self, spans: list[tuple[int, int]], first_slot: int) -> tuple[ForwardBatch, Any]:
        """The pass of `batch_of`, and its rotations."""
        batch = batch_of(self.worker, self.kv, self.token_ids, spans, first_slot)
        return batch, self.rotations_of(batch)

    def rotations_of(self, batch: ForwardBatch) -> Any:
        """The rotation of each `rotary` of the layers."""
        positions: Any = batch.positions
        return self.decoder.rotations(positions.unsqueeze(0), batch)

    def run_layer(
        self, index: int, h: torch.Tensor, batch: ForwardBatch, rotations: Any, site_ops: HostOps | None = None
    ) -> torch.Tensor:
        """One layer, with the sum behind it: [1, rows, hidden] -> the same."""
        layer = self.layers[index]
        batch.site_ops = site_ops
        h, delta = layer.forward_fused(h, None, rotations[layer.rotary], batch)
        h = residual_sum(h, delta, site_ops, input_add(index + 1))
        batch.site_ops = None
        return h

    def restore_kv(self, index: int) -> None:
        """Put the base run's KV of a layer in place."""
        self.kv.restore(self._base_kv[index])


class _Wave:
    """One pass of cells.

    Attributes:
        last: the last row of each cell after the final norm, [1, cells, hidden]; with `every_row`, all rows.
    """

    last: torch.Tensor

    def __init__(self, front: SweepRun, every_row: bool) -> None:
        self.front, self.batch, self.every_row = front, front.base, every_row
        self.h: torch.Tensor | None = None
        self.spans: list[tuple[int, int]] = []

    def advance(self, index: int, arriving: list[WaveCell]) -> None:
        """Let cells join, and run the layer `index`; behind the last one, the final norm."""
        front, ops = self.front, None
        if arriving:
            ops = self._join(arriving, front.streams[index])
        assert self.h is not None, "a pass starts at its first cell"
        if index == len(front.layers):
            h = self.h
            if not self.every_row:
                ends = torch.tensor([stop - first for first, stop in self.spans]).cumsum(0) - 1
                h = h[:, ends.to(h.device)]
            norm = getattr(front.decoder, front.decoder.norm_name)
            self.last = norm.normalize(h)
            self.batch.logits_indices = None  # of these rows, all
            return
        if arriving:
            self.batch, self.rotations = front.planned(self.spans, first_slot=1 + front.num_tokens)
        front.restore_kv(index)
        if index == len(front.layers) - 1 and ops is None and not self.every_row:
            self._run_last(index, self.h)
        else:
            self.h = front.run_layer(index, self.h, self.batch, self.rotations, ops)

    def _run_last(self, index: int, h: torch.Tensor) -> None:
        """The last layer: keys and values of all rows, and the rest only for each cell's last row."""
        front, layer, family = self.front, self.front.layers[index], self.front.model.spec.family
        normed = getattr(layer, family.attention_norm).normalize(h)
        attention: Attention = getattr(layer, family.attention)
        attention.write_kv(normed, *self.rotations[layer.rotary], batch=self.batch)
        self.batch, rows = last_rows_of(front.worker, front.kv, self.batch)
        self.h = front.run_layer(index, h[:, rows], self.batch, front.rotations_of(self.batch))
        self.spans = [(stop - 1, stop) for _, stop in self.spans]

    def _join(self, arriving: list[WaveCell], stream: torch.Tensor) -> HostOps | None:
        """Append the rows of cells, from the base run's stream before their layer. Returns the patches inside of the layer."""
        front = self.front
        before = 0 if self.h is None else self.h.shape[1]
        spans = [(cell.position, front.num_tokens) for cell in arriving]
        rows = stream[torch.cat([torch.arange(*span) for span in spans]).to(stream.device)]
        sizes = torch.tensor([stop - first for first, stop in spans])
        firsts = (sizes.cumsum(0) - sizes).to(stream.device)
        ops: dict[int, Any] = {}
        for site in {cell.site for cell in arriving}:
            own = [i for i, cell in enumerate(arriving) if cell.site == site]
            patch = _patch([arriving[i] for i in own], firsts[own], stream.dtype)
            if site.kind in STREAM:
                rows = patch(rows)
            else:
                ops[site_index(site, len(front.layers))] = [((before, len(rows)), patch)]
        h = rows.unsqueeze(0)
        self.h = h if self.h is None else torch.cat([self.h, h], dim=1)
        self.spans += spans
        return HostOps(ops, {}, len(front.layers)) if ops else None


def _patch(cells: list[WaveCell], firsts: torch.Tensor, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that patches the first rows of each cell in [rows, width].

    Args:
        firsts: [cells], the first row of each.
    """
    values = [torch.atleast_2d(cell.value) for cell in cells]
    sizes = [len(value) for value in values]
    new_rows = torch.cat(values).to(firsts.device, dtype)
    offsets = torch.cat([torch.arange(size) for size in sizes]).to(firsts.device)
    at = firsts.repeat_interleave(torch.tensor(sizes, device=firsts.device)) + offsets
    masks = [
        cell.channels.expand(size, -1) for cell, size in zip(cells, sizes, strict=True) if cell.channels is not None
    ]
    channels = torch.cat(masks).to(firsts.device) if masks else None

    def patch(rows: torch.Tensor) -> torch.Tensor:
        new = new_rows if channels is None else torch.where(channels, new_rows, rows[at])
        return rows.index_copy(0, at, new)

    return patch
