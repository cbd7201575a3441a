"""Passes with hooks as piecewise CUDA graphs: from one hook to the next.

A pass with a block that waits for a module runs module by module. So the block's Python runs at its place in the model. The layers
between two blocks need no Python. The pass hands them over as a *graph segment*, some layers or a part of one. The segment is
replayed::

    layers 0..12       a graph segment
    layers.12.output   the blocks that wait there, each with its own rows
    layers 13..31      another graph segment
    norm, lm_head and other places where a block may wait: eagerly

A segment runs eagerly the first time at a number of rows, which warms its kernels up. The second time it is captured, and then
it is replayed. The least recently used segment is evicted when there are more than `max_segments`.

In a decode pass, a segment is one graph (`DecodeSegments`). Passes with prompts: prompt_segments.py.

Segments pass their tensors on in *registers*: one buffer for each name, at one address for all graphs. A segment returns
copies, so no block ever holds memory that a graph will overwrite.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...core.forward_batch import ForwardBatch, Registers
from ..parts import RunnerParts
from . import graph_capture
from .cuda_graph_runner import CudaGraphRunner

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    """Captured graph of a segment."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Recording:
    """A captured segment, and the names and shapes of its outputs in the registers."""

    replay: Callable[[], Any]
    outputs: dict[str, torch.Size]


class Segments(ABC):
    """The graph segments of passes, by number of rows; see the module.

    Args:
        owner: the runner that captures.
        max_rows: maximum number of rows of a pass.
        capacity: segments to keep at most, with segments that were met once.

    Attributes:
        num_captured, num_evicted: segments so far.
        broken: a capture failed. Captured segments are replayed, all others run eagerly.
    """

    by_layer = False

    def __init__(self, owner: RunnerParts, max_rows: int, capacity: int) -> None:
        self.owner, self.max_rows, self.capacity = owner, max_rows, capacity
        self.num_captured = self.num_evicted = 0
        self.broken = False
        self._recordings: OrderedDict[Hashable, Recording | None] = OrderedDict()  # None: met once
        self._registers: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, tuple[torch.Tensor, int]] = {}
        self._batch: ForwardBatch | None = None

    def __len__(self) -> int:
        """Segments that are captured now."""
        return sum(recording is not None for recording in self._recordings.values())

    def stats(self) -> dict[str, int]:
        """Segments captured so far, kept now and evicted; `broken` is 1 after a failed capture."""
        return {
            "captured": self.num_captured, "kept": len(self), "evicted": self.num_evicted, "broken": int(self.broken)
        }  # fmt: skip

    @abstractmethod
    def begin(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """The batch to run in place of `forward_batch`: its segments are these."""

    @abstractmethod
    def _capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        """Capture `run`. Returns the function that replays it. Raises RuntimeError: the capture failed."""

    def run(
        self, key: Hashable, segment: Callable[..., Registers], inputs: Registers, chained: bool = False
    ) -> Registers:
        """``segment(**inputs)``, replayed if it was captured. The results are in fresh memory, or in registers if `chained`."""
        batch = self._batch
        assert batch is not None, "begin() comes first"
        # Without declared requests the kernels are the ones without tables.
        adapters = batch.adapters
        known = batch.num_tokens, batch.site_ops is None, adapters and adapters.version, key
        static = {name: self._load(name, value) for name, value in inputs.items()}
        if known not in self._recordings:
            # Over the registers: kernels are compiled for the memory that they read, and a capture may not compile.
            outputs = segment(**static)
            for name, value in outputs.items():
                self._view(name, value.shape, like=value)
            while len(self._recordings) >= self.capacity:
                _, evicted = self._recordings.popitem(last=False)
                self.num_evicted += evicted is not None
            self._recordings[known] = None  # it ran: its kernels are compiled, and its outputs have registers
            return outputs
        self._recordings.move_to_end(known)
        recording = self._recordings[known]
        if recording is None and not self.broken:
            recording = self._recordings[known] = self._record(lambda: segment(**static))
        if recording is None:
            return segment(**static)
        recording.replay()
        outputs = {name: self._view(name, shape) for name, shape in recording.outputs.items()}
        for name, value in outputs.items():
            self._loaded[name] = value, value._version  # the next segment finds a chained one in its register
        return outputs if chained else {name: value.clone() for name, value in outputs.items()}

    def end(self) -> None:
        """The pass is over: release its tensors."""
        self._loaded.clear()
        self._batch = None

    def shutdown(self) -> None:
        """Release the graphs and the registers."""
        self._recordings.clear()
        self._registers.clear()
        self.end()

    # -- registers -------------------------------------------------------------------

    def _load(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Copy `value` into its register, unless this pass has done so and `value` has not changed since."""
        static = self._view(name, value.shape, like=value)
        loaded = self._loaded.get(name)
        if loaded is None or loaded[0] is not value or loaded[1] != value._version:
            static.copy_(value)
            self._loaded[name] = value, value._version
        return static

    def _view(self, name: str, shape: torch.Size, like: torch.Tensor | None = None) -> torch.Tensor:
        """The register's rows of this pass, in `shape`. The register is created on first use."""
        assert self._batch is not None
        rows = self._batch.num_tokens
        if name not in self._registers:
            assert like is not None
            width = shape.numel() // rows
            self._registers[name] = torch.zeros(self.max_rows, width, dtype=like.dtype, device=like.device)
        return self._registers[name][:rows].view(shape)

    # -- captures --------------------------------------------------------------------

    def _record(self, segment: Callable[[], Registers]) -> Recording | None:
        """Capture the segment. None: the capture failed, and no further segment is captured."""
        shapes: dict[str, torch.Size] = {}

        def run() -> None:
            for name, value in segment().items():
                self._view(name, value.shape).copy_(value)
                shapes[name] = value.shape

        try:
            with graph_capture.without_gc(), graph_capture.model_capture_mode(self.owner):
                replay = self._capture(run)
        except RuntimeError as error:
            self.broken = True
            logger.warning(
                "a graph segment between hooks could not be captured; segments run eagerly from now on: %s", error
            )
            return None
        self.num_captured += 1
        return Recording(replay, shapes)


class DecodeSegments(Segments):
    """The graph segments of decode passes.

    Args:
        graph_runner: the segments share its input buffers, plans and memory pool.
        capacity: segments to keep at most.
    """

    def __init__(self, graph_runner: CudaGraphRunner, capacity: int) -> None:
        super().__init__(graph_runner.model_runner, graph_runner.max_bs, capacity)
        self.graph_runner = graph_runner

    def begin(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """The batch to run in place of `forward_batch`: padded, over the input buffers of the graphs, and planned.

        Its token ids and positions are copies, which blocks may keep.
        """
        padded = self.graph_runner.prepare(forward_batch)
        assert padded.positions is not None
        ids, positions = padded.input_ids.clone(), padded.positions.clone()
        self._batch = replace(
            padded, input_ids=ids, positions=positions, segments=self,
            return_hidden_states=forward_batch.return_hidden_states, hidden_states=None,
        )  # fmt: skip
        self._forget_plan()
        return self._batch

    def _capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        self._forget_plan()
        try:
            graph: Replayable = graph_capture.capture(run, self.graph_runner.pool)
        finally:
            self._forget_plan()
        return graph.replay

    def _forget_plan(self) -> None:
        """Drop the values that one segment computed for all its layers: they live in that segment's memory."""
        assert self._batch is not None
        self.graph_runner.attn_backend.forget_plan(self._batch)
