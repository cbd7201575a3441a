"""Prefill and mixed passes of few token rows as piecewise CUDA graphs: all but attention is replayed.

An 8B model launches some 320 kernels in such a pass, which takes the host longer than the device. Here it launches a graph and
one or two attention kernels for each layer. Attention is not captured, because its plan depends on the batch's lengths::

    embedding, norm, q k v, rope, write K and V      a graph
    attention                                        eagerly, from the query buffer to the output buffer
    o, norm, MLP, norm, q k v, rope, write K and V   a graph
    ...
    o, norm, MLP, final norm                         a graph
    head                                             eagerly, on the rows whose logits are wanted

A pass is padded to the next captured number of rows. An eager pass in its place is padded as well: the bits of a matrix product
depend on its shape.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from traceback import clear_frames
from typing import Any

import torch

from ...attention.attention_backend import RadixAttention
from ...core.forward_batch import ForwardBatch, ForwardMode
from ...core.pass_parts import EmbeddedMask, EmbeddedRows
from ...core.step import LogitsProcessorOutput
from ...layers.edits.table import TableOps
from ..parts import RunnerParts
from . import graph_capture
from .cuda_graph_runner import free_memory
from .graph_capture import Pieces, model_capture_mode

logger = logging.getLogger(__name__)


class _BufferAttention:
    """The attention of a pass that is captured: a break between two graphs.

    Args:
        attend: called with each layer.
        out: [tokens, heads, head_dim] memory of the attention's output.
    """

    by_row = False

    def __init__(self, attend: Callable[[RadixAttention], None], out: torch.Tensor) -> None:
        self._attend, self._out = attend, out

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: the pass itself is planned."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        self._attend(layer)
        return self._out.flatten(1)


class PrefillGraphs:
    """Captures the fused pass up to its head for each number of rows in `sizes`, and replays it.

    Args:
        model_runner: initialised: model, pools and attention backend are there.
        sizes: numbers of token rows, ascending.
        lazily: capture the largest size only; `capture_size` captures the others.

    Attributes:
        queries, outputs: [largest size, heads, head_dim] of attention, which runs between two graphs.
        embedded: vectors in place of embeddings, of the first graph.
        pool: the memory pool of the graphs.
        memory_usage: device memory of the graphs and buffers, in bytes.
    """

    def __init__(self, model_runner: RunnerParts, sizes: list[int], lazily: bool = False) -> None:
        self.model_runner, self.sizes = model_runner, sizes
        layer = model_runner.get_model().attention_layers()[0]
        shape = sizes[-1], layer.num_heads, layer.head_dim
        self.queries = torch.zeros(shape, dtype=model_runner.dtype, device=model_runner.device)
        self.outputs = torch.zeros_like(self.queries)
        width = model_runner.model_spec.embedding_size
        self.embedded = EmbeddedMask(
            self.queries.new_zeros(sizes[-1], dtype=torch.bool), self.queries.new_zeros(sizes[-1], width)
        )
        self._pieces: dict[int, Pieces[torch.Tensor]] = {}
        # By default separate: tensors live from one graph to the next, and another engine may replay its graphs in between.
        self.pool = graph_capture.memory_pool(model_runner.device)
        self.memory_usage = 0
        self._capture(lazily)

    @property
    def missing(self) -> list[int]:
        """Sizes without graphs, so far."""
        return [size for size in self.sizes if size not in self._pieces]

    def padded_size(self, tokens: int) -> int | None:
        """The captured size that a pass of `tokens` rows is padded to; None for a larger pass."""
        return self.sizes[bisect_left(self.sizes, tokens)] if tokens <= self.sizes[-1] else None

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether `replay` serves the batch."""
        return batch.padded_size in self._pieces and self.fits(batch)

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether graphs of its size serve the batch, if they are captured.

        It has to be laid out with its padding. Gradients (`fresh_kv_only`), cut edges, adapters and DeepStack states are not
        captured.
        Declared ops, if any, have to be in the tables that graphs read.
        """
        return (
            batch.forward_mode.is_extend()
            and batch.num_tokens == batch.padded_size == self.padded_size(batch.num_tokens)
            and not batch.fresh_kv_only
            and batch.attention_cuts is None
            and batch.adapters is None
            and batch.deepstack is None
            and isinstance(batch.site_ops, TableOps | None)
        )

    @torch.no_grad()
    def replay(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the pass. `can_run` must hold for the batch. The logits [logit rows, vocab] are in fresh memory.

        A pass of some layers ends with the graph in which the next one begins. That one's q, k and v are computed too.
        """
        backend, model = self.model_runner.attn_backend, self.model_runner.get_model()
        assert backend is not None
        backend.init_forward_metadata(batch)
        embedded, pieces = batch.input_embeds, self._pieces[batch.padded_size]
        if isinstance(embedded, EmbeddedRows):
            self.embedded.write(embedded)
        try:
            h = pieces.replay(self._between(batch), batch.depth)
        finally:
            if embedded is not None:
                self.embedded.clear()
        if batch.depth is not None:
            return LogitsProcessorOutput(model.no_logits(h)[0])
        logits = model.head_fused(h, batch)[0]
        hidden_states = None
        if batch.return_hidden_states:
            assert batch.hidden_states is not None, "the model sets it"
            hidden_states = batch.hidden_states = batch.hidden_states.clone()
        return LogitsProcessorOutput(logits, hidden_states)

    def _between(self, batch: ForwardBatch) -> Callable[[RadixAttention], None]:
        attend, meanwhile = self.attend(batch), batch.meanwhile
        if meanwhile is None:
            return attend

        def attend_meanwhile(layer: RadixAttention) -> None:
            attend(layer)
            meanwhile()

        return attend_meanwhile

    def attend(self, batch: ForwardBatch) -> Callable[[RadixAttention], None]:
        """Function that computes the attention of each layer of a planned pass, from `queries` to `outputs`."""
        requests, backend = batch.num_request_tokens, self.model_runner.attn_backend
        assert backend is not None
        return backend.attend_in_place(self.queries[:requests], self.outputs[:requests], batch)

    def shutdown(self) -> None:
        """Release the graphs and the buffers. A second call does nothing."""
        self._pieces.clear()
        self.queries = self.outputs = torch.empty(0)
        self.embedded = EmbeddedMask(self.queries, self.queries)

    @torch.no_grad()
    def capture_size(self, size: int) -> None:
        """Capture a size that is `missing`, between two steps. Raises RuntimeError: it failed; all other sizes are as before."""
        free = free_memory(self.model_runner.device)
        self.model_runner.input_buffers.clear()
        with graph_capture.without_gc(), model_capture_mode(self.model_runner):
            self._pieces[size] = graph_capture.record_pieces(self._pass(size), self.pool, warm_ups=1)
        self.memory_usage += max(0, free - free_memory(self.model_runner.device))

    @torch.no_grad()
    def _capture(self, lazily: bool) -> None:
        """Capture every size, or the largest one, largest first: smaller graphs reuse its memory."""
        started, free = time.perf_counter(), free_memory(self.model_runner.device)
        size, no_gc = self.sizes[-1], graph_capture.without_gc if lazily else graph_capture.freeze_gc
        try:
            with no_gc(), model_capture_mode(self.model_runner):
                for size in self.sizes[-1:] if lazily else reversed(self.sizes):
                    self._pieces[size] = graph_capture.record_pieces(self._pass(size), self.pool)
            self._warm_attention_up()
        except Exception as error:  # also errors of Triton's compiler, which are not RuntimeErrors
            self.shutdown()
            clear_frames(error.__traceback__)  # the frames hold the model, and the caller may keep the error
            if isinstance(error, RuntimeError):
                raise RuntimeError(
                    f"capturing the CUDA graphs of a prefill of {size} rows failed: {error}\n"
                    "What helps: (1) memory: a lower gpu_memory_utilization, or fewer kv_cache_tokens; (2) fewer graphs: a lower "
                    f"prefill_graph_tokens (now {self.sizes[-1]}; 0: none); (3) no graphs at all: disable_cuda_graph=True"
                ) from error
            raise
        self.memory_usage = max(0, free - free_memory(self.model_runner.device))
        logger.info(
            "captured prefill graphs of %d sizes (up to %d rows) in %.1f s, %.0f MiB",
            len(self._pieces), self.sizes[-1], time.perf_counter() - started, self.memory_usage / 2**20,
        )  # fmt: skip

    def _warm_attention_up(self) -> None:
        """Compile and load the kernels that no graph holds, with a mixed pass over the dummy row."""
        runner, sizes = self.model_runner, [1, 3]
        device, backend = runner.device, runner.attn_backend
        assert backend is not None
        lens = torch.tensor(sizes, dtype=torch.int32, device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.MIXED,
            batch_size=2,
            input_ids=torch.zeros(4, dtype=torch.int64, device=device),
            req_pool_indices=torch.zeros(2, dtype=torch.int64, device=device),
            seq_lens=lens,
            out_cache_loc=torch.zeros(4, dtype=torch.int64, device=device),
            seq_lens_sum=4,
            seq_lens_cpu=lens.cpu(),
            extend_num_tokens=4,
            extend_seq_lens_cpu=sizes,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            attn_backend=backend,
        )
        backend.init_forward_metadata(batch)
        attend = backend.attend_in_place(self.queries[:4], self.outputs[:4], batch)
        for layer in {replace(layer, layer_id=0) for layer in runner.get_model().attention_layers()}:
            attend(layer)

    def _pass(self, size: int) -> Callable[[Callable[[RadixAttention], None]], torch.Tensor]:
        """The fused pass of `size` rows up to its head, with the function that computes attention as argument."""
        runner, buffers = self.model_runner, self.model_runner.input_buffers
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=buffers.input_ids[:size],
            req_pool_indices=buffers.rows[:1],
            seq_lens=buffers.seq_lens[:1],
            out_cache_loc=buffers.out_cache_loc[:size],
            seq_lens_sum=size,
            positions=buffers.positions[:size],
            mrope_positions=buffers.rope_positions(size),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            site_ops=runner.captured_site_ops(size),
            query_buffer=self.queries[:size],
            input_embeds=self.embedded.first_rows(size),
        )
        input_ids, positions = batch.input_ids.unsqueeze(0), buffers.positions[:size].unsqueeze(0)

        def run(attend: Callable[[RadixAttention], None]) -> torch.Tensor:
            batch.attn_backend = _BufferAttention(attend, self.outputs[:size])
            return runner.get_model().decoder_fused(input_ids, positions, batch)

        return run
