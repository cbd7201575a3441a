"""Passes with prompts and hooks as piecewise CUDA graphs, from one hook to the next.

Each layer in which no block waits is a graph segment. Its attention runs between two graphs, as in a pass without hooks
(prefill_graphs.py)::

    layers 0..12       norm, q k v, rope, write K and V | attention | o, norm, MLP       each
    layers.12.output   the blocks that wait there, each with its own rows
    layers 13..31      as the layers before

In a decode pass, a segment is all layers between two blocks (segments.py). Prompts have many sizes. A place is met once or twice at
most of them, but each layer is met in every pass.

Only passes of captured sizes run so. They are padded, as the same passes without hooks are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...attention.attention_backend import RadixAttention
from ...core.forward_batch import ForwardBatch
from . import graph_capture
from .prefill_graphs import PrefillGraphs
from .segments import Segments

FOR_EACH_DECODE_SEGMENT = 4
"""Segments to keep for each one of decode passes. These are smaller, and there is one for each layer and size."""

Attend = Callable[[RadixAttention], None]


class _PassAttention:
    """The attention backend of a pass in segments: a break between two captured graphs, elsewhere the engine's.

    The batch that it is called with has all rows, as graphs do. The engine's backend gets the step's own.

    Attributes:
        batch: batch of the current step.
        between: called with each layer of a segment that is captured.
    """

    def __init__(self, graphs: PrefillGraphs) -> None:
        self.graphs = graphs
        self.batch: ForwardBatch | None = None
        self.between: Attend | None = None
        self._attend: Attend | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        assert self.batch is not None and self.batch.attn_backend is not None
        self.batch.attn_backend.init_forward_metadata(self.batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        if self.between is not None:
            self.between(layer)
            return self.graphs.outputs[: len(q)].flatten(1)
        assert self.batch is not None
        return layer(q, k, v, self.batch) if save_kv_cache else layer.of_written(q, self.batch)

    def attend(self, layer: RadixAttention) -> None:
        """Compute attention between two graphs of a replay."""
        if self._attend is None:
            assert self.batch is not None
            self._attend = self.graphs.attend(self.batch)
        self._attend(layer)

    def end(self) -> None:
        """Forget the pass."""
        self.batch = self._attend = None


class PromptSegments(Segments):
    """The graph segments of passes with prompts.

    Args:
        graphs: the segments share its sizes, its buffers of attention and its memory pool.
        capacity: capacity of the segments of decode passes.
    """

    by_layer = True

    def __init__(self, graphs: PrefillGraphs, capacity: int) -> None:
        super().__init__(graphs.model_runner, graphs.sizes[-1], capacity * FOR_EACH_DECODE_SEGMENT)
        self.graphs, self._attention = graphs, _PassAttention(graphs)

    def begin(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """The batch to run in place of `forward_batch`, which is laid out with its padding.

        Its token ids and positions are copies, which blocks may keep.
        """
        self._attention.batch = forward_batch
        assert forward_batch.positions is not None
        self._batch = replace(
            forward_batch, input_ids=forward_batch.input_ids.clone(), positions=forward_batch.positions.clone(), segments=self,
            query_buffer=self.graphs.queries[: forward_batch.num_tokens], attn_backend=self._attention, extend_num_tokens=None,
        )  # fmt: skip
        return self._batch

    def end(self) -> None:
        self._attention.end()
        super().end()

    def _capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        attention = self._attention

        def captured(between: Attend) -> None:
            attention.between = between
            try:
                run()
            finally:
                attention.between = None

        # Not warmed up: it would write K and V of layers without attention before. The segment has run once already.
        pieces: Any = graph_capture.record_pieces(captured, self.graphs.pool, warm_ups=0)
        return lambda: pieces.replay(attention.attend)
