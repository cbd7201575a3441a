"""Decode passes with hooks as CUDA graphs: from one hook to the next.

A pass in which a block waits for a module goes module by module, so that the block's Python runs where it stands in the
model. But what lies between two blocks needs no Python: there the pass hands over a *stretch*, some layers or a part of
one, and here it is replayed::

    layers 0..12       a graph
    layers.12.output   the blocks that wait there, each with its own rows
    layers 13..31      another
    norm, lm_head, and whatever else somebody may wait at: kernel by kernel

A stretch runs kernel by kernel when it is first met at a batch size, which also warms its kernels up; the second time it is
captured, and from then on replayed, until `max_segments` others were used since.

GraphSegments pass their tensors on in *registers*, one piece of memory for each name, at one address for all graphs. What a
stretch returns is a copy: no block ever holds what a graph will overwrite.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from ..core.forward_batch import ForwardBatch, Registers
from ..runner import cuda_graph_runner

if TYPE_CHECKING:
    from .cuda_graph_runner import CudaGraphRunner

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    """A captured stretch."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class _Recording:
    """A captured stretch, and the names and shapes of what it leaves in the registers."""

    graph: Replayable
    outputs: dict[str, torch.Size]


class Segments:
    """The captured stretches of decode passes, by batch size; see the module.

    Args:
        graph_runner: whose input buffers, plans and memory pool the stretches share.
        capacity: stretches that are kept at most, the least recently used one goes first.

    Attributes:
        num_captured, num_evicted: stretches so far.
        broken: a capture failed; what is captured is replayed, the rest runs kernel by kernel.
    """

    def __init__(self, graph_runner: CudaGraphRunner, capacity: int) -> None:
        self.graph_runner, self.capacity = graph_runner, capacity
        self.num_captured = self.num_evicted = 0
        self.broken = False
        self._recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()  # None: met once
        self._registers: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, tuple[torch.Tensor, int]] = {}
        self._batch: ForwardBatch | None = None

    def __len__(self) -> int:
        """GraphSegments that are captured now."""
        return sum(recording is not None for recording in self._recordings.values())

    def stats(self) -> dict[str, int]:
        """GraphSegments captured so far, kept now, and evicted; and whether (1) a capture failed, so that none is made any more."""
        return {
            "captured": self.num_captured, "kept": len(self), "evicted": self.num_evicted, "broken": int(self.broken)
        }  # fmt: skip

    def begin(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """The pass that runs instead of `forward_batch`: padded, over the input buffers of the graphs, and planned.

        Its token ids and positions are copies, which blocks may keep.
        """
        padded = self.graph_runner.prepare(forward_batch)
        assert padded.positions is not None
        ids, positions = padded.input_ids.clone(), padded.positions.clone()
        self._batch = replace(padded, input_ids=ids, positions=positions, segments=self)
        self._forget_plan()
        return self._batch

    def run(self, key: Hashable, stretch: Callable[..., Registers], inputs: Registers) -> Registers:
        """``stretch(**inputs)``, from its graph where it has one; what it returns is fresh memory."""
        assert self._batch is not None, "begin() comes first"
        # Where no request declared anything, the kernels are those without tables.
        known = self._batch.batch_size, self._batch.site_ops is None, key
        static = {name: self._load(name, value) for name, value in inputs.items()}
        if known not in self._recordings:
            # Over the registers: kernels are compiled for what they read, and no capture may do that.
            outputs = stretch(**static)
            for name, value in outputs.items():
                self._view(name, value.shape, like=value)
            self._make_room()
            self._recordings[known] = None  # met: it ran, its kernels are compiled, and what it makes has registers
            return outputs
        self._recordings.move_to_end(known)
        recording = self._recordings[known]
        if recording is None and not self.broken:
            recording = self._recordings[known] = self._record(lambda: stretch(**static))
        if recording is None:
            return stretch(**static)
        recording.graph.replay()
        for name in recording.outputs:
            self._loaded.pop(name, None)
        return {name: self._view(name, shape).clone() for name, shape in recording.outputs.items()}

    def end(self) -> None:
        """The pass is over: let its tensors go."""
        self._loaded.clear()
        self._batch = None

    def shutdown(self) -> None:
        """Release the graphs and the registers."""
        self._recordings.clear()
        self._registers.clear()
        self.end()

    # -- registers -------------------------------------------------------------------

    def _load(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Put `value` into its register, unless this pass has done so and it is what it was."""
        static = self._view(name, value.shape, like=value)
        loaded = self._loaded.get(name)
        if loaded is None or loaded[0] is not value or loaded[1] != value._version:
            static.copy_(value)
            self._loaded[name] = value, value._version
        return static

    def _view(self, name: str, shape: torch.Size, like: torch.Tensor | None = None) -> torch.Tensor:
        """The register's rows of this pass, in `shape`; made on first sight."""
        assert self._batch is not None
        rows = self._batch.batch_size
        if name not in self._registers:
            assert like is not None
            width = shape.numel() // rows
            self._registers[name] = torch.zeros(self.graph_runner.max_bs, width, dtype=like.dtype, device=like.device)
        return self._registers[name][:rows].view(shape)

    # -- captures --------------------------------------------------------------------

    def _record(self, stretch: Callable[[], Registers]) -> _Recording | None:
        """Capture the stretch. None: that failed, and nothing is captured any more; later ones run kernel by kernel."""
        shapes: dict[str, torch.Size] = {}

        def run() -> None:
            for name, value in stretch().items():
                self._view(name, value.shape).copy_(value)
                shapes[name] = value.shape

        self._forget_plan()
        try:
            with _without_gc():
                graph = cuda_graph_runner.capture(run, cuda_graph_runner.get_global_graph_memory_pool())
        except RuntimeError as error:
            self.broken = True
            cuda_graph_runner.set_global_graph_memory_pool(None)  # it may be broken, too; captured graphs keep theirs
            logger.warning(
                "a stretch between hooks could not be captured; they run kernel by kernel from now on: %s", error
            )
            return None
        finally:
            self._forget_plan()
        self.num_captured += 1
        return _Recording(graph, shapes)

    def _make_room(self) -> None:
        while len(self._recordings) >= self.capacity:
            _, recording = self._recordings.popitem(last=False)
            self.num_evicted += recording is not None

    def _forget_plan(self) -> None:
        """What one stretch computes for all its layers lives in its own memory: the next makes it anew."""
        assert self._batch is not None
        self.graph_runner.attn_backend.forget_plan(self._batch)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Keep the garbage collector from freeing device memory in the middle of a capture, without the time of a collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
