"""Decode passes as CUDA graphs: captured once for a set of batch sizes, replayed with new inputs.

A replay launches a whole pass at once; an eager pass launches some hundred kernels one by one::

    runner = CudaGraphRunner(model_runner)     # captures all sizes
    if runner.can_run(forward_batch):
        logits_output = runner.replay(forward_batch)
    else:
        logits_output = model_runner.forward(forward_batch)

With `lazily` only the largest size is captured, and `capture_size` captures another one later. Until then `replay` runs its pass
kernel by kernel over the same padded rows: the bits are the same.

A batch is padded to the next captured size. Padded rows belong to the dummy row and slot of the pools, so they read and write
no request's memory. `replay` returns fresh memory: the next replay does not change it.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from traceback import clear_frames
from typing import Any

import torch

from ...core.forward_batch import ForwardBatch, ForwardMode
from ...core.pass_parts import AdapterRows
from ...core.step import LogitsProcessorOutput
from ...layers.edits.table import TableOps
from ..input_batch import PAD_SEQ_LEN
from ..parts import RunnerParts
from . import graph_capture
from .graph_capture import (
    freeze_gc,
    get_global_graph_memory_pool,
    is_capture_mode,
    model_capture_mode,
    set_global_graph_memory_pool,
)

__all__ = [
    "CudaGraphRunner",
    "freeze_gc",
    "get_global_graph_memory_pool",
    "is_capture_mode",
    "model_capture_mode",
    "set_global_graph_memory_pool",
]

logger = logging.getLogger(__name__)


class CudaGraphRunner:
    """Captures the fused decode pass for each size of `capture_bs`, and replays it.

    Args:
        model_runner: initialised: model, pools and attention backend are there.
        sizes: batch sizes to capture; None is `capture_batch_sizes` up to `max_decode_rows`.
        declares: capture the declared ops, too.
        adapted: capture the rows' adapters, too: the same passes without adapters. Their pool and output buffers serve these graphs
            as well.
        pool: the memory pool of the graphs; None: the global one, if it exists, else a new one.
        lazily: capture the largest size and compiled ones only.

    Attributes:
        graphs, output_buffers: graphs and output buffers by batch size. A buffer holds logits and hidden states of the last
            replay.
        capture_bs, sizes, max_bs: the sizes (twice), and the largest of them.
        enable_torch_compile, torch_compile_max_bs, compile_bs: sizes to compile before they are captured.
        seq_len_fill_value: the length of a padded row.
        buffers: the runner's input buffers, which captured passes read.
        memory_usage: device memory of the graphs, in bytes.

    Raises:
        RuntimeError: the runner is not initialised, or a capture failed (with what to change).
    """

    def __init__(
        self,
        model_runner: RunnerParts,
        sizes: list[int] | None = None,
        *,
        declares: bool = True,
        adapted: CudaGraphRunner | None = None,
        pool: tuple | None = None,
        lazily: bool = False,
    ) -> None:
        parts = ("model", "req_to_token_pool", "token_to_kv_pool", "attn_backend")
        missing = [name for name in parts if getattr(model_runner, name) is None]
        if missing:
            raise RuntimeError(
                f"CudaGraphRunner needs an initialised ModelRunner, but {', '.join(missing)} is None: call initialize() first"
            )
        self.model_runner, self._declares, self._adapted = model_runner, declares, adapted
        self.device = model_runner.device
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.output_buffers: dict[int, LogitsProcessorOutput] = {}
        self.capture_bs = self.sizes = sizes or graph_capture.capture_batch_sizes(model_runner.max_decode_rows)
        self.max_bs = self.capture_bs[-1]
        server_config = model_runner.server_config
        self.enable_torch_compile = server_config.enable_torch_compile
        self.torch_compile_max_bs = server_config.torch_compile_max_bs
        self.compile_bs = [
            bs
            for bs in self.capture_bs
            if self.enable_torch_compile and adapted is None and bs <= self.torch_compile_max_bs
        ]
        self.seq_len_fill_value = PAD_SEQ_LEN
        self.buffers = model_runner.input_buffers
        self.memory_usage = 0
        # By default no engine shares it with another one: that one's graphs may be replayed before this engine has read its logits.
        self.pool = pool or (graph_capture.memory_pool(self.device) if adapted is None else adapted.pool)
        self._batches: dict[int, ForwardBatch] = {}
        self.capture(lazily)

    @property
    def attn_backend(self) -> Any:
        """Attention backend of the runner."""
        return self.model_runner.attn_backend

    @property
    def missing(self) -> list[int]:
        """Sizes without a graph, so far."""
        return [bs for bs in self._batches if bs not in self.graphs]

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        """Whether a graph serves the batch."""
        bs = forward_batch.batch_size
        return self.fits(forward_batch) and (bs == 0 or self.padded_size(bs) in self.graphs)

    def fits(self, forward_batch: ForwardBatch) -> bool:
        """Whether `replay` serves the batch, from a graph or kernel by kernel.

        It has to be a decode or idle batch of a captured size, without gradients (`fresh_kv_only`). All rows have logits.
        Declared ops, if any, have to be in the tables that graphs read.
        """
        bs = forward_batch.batch_size
        if not forward_batch.forward_mode.is_decode_or_idle() or bs > self.max_bs:
            return False
        if (
            forward_batch.fresh_kv_only
            or forward_batch.logits_indices is not None
            or not isinstance(forward_batch.site_ops, TableOps | None)
        ):
            return False
        if bs == 0 or forward_batch.forward_mode.is_idle():
            return bool(self.graphs)
        padded = self.padded_size(bs)
        return (
            padded in self._batches
            and forward_batch.attn_backend is self.attn_backend
            and self.attn_backend.can_replay(forward_batch, padded)
        )

    def padded_size(self, bs: int) -> int:
        """The captured size that a batch of `bs` is padded to."""
        return self.capture_bs[bisect_left(self.capture_bs, bs)]

    @torch.no_grad()
    def capture(self, lazily: bool = False) -> None:
        """Capture every size, largest first: smaller graphs reuse its memory. `lazily`: leave most of them to `capture_size`."""
        started, free = time.perf_counter(), free_memory(self.device)
        bs, no_gc = self.max_bs, graph_capture.without_gc if lazily else graph_capture.freeze_gc
        self.buffers.clear()
        try:
            self.attn_backend.init_cuda_graph_state(self.max_bs)
            for bs in self.capture_bs:
                self._batches[bs] = self._batch(bs)
            with no_gc(), model_capture_mode(self.model_runner):
                for bs in [
                    bs for bs in reversed(self.capture_bs) if not lazily or bs in (self.max_bs, *self.compile_bs)
                ]:
                    before = free_memory(self.device)
                    self._capture_one(bs)
                    logger.debug("graph of %d rows: %.1f MiB", bs, (before - free_memory(self.device)) / 2**20)
        except Exception as error:  # also errors of Triton's compiler, which are not RuntimeErrors
            self.shutdown()
            clear_frames(error.__traceback__)  # the frames hold the model, and the caller may keep the error
            if isinstance(error, RuntimeError):
                raise RuntimeError(
                    f"capturing the CUDA graph of a decode pass of {bs} rows failed: {error}\n"
                    "What helps: (1) memory: a lower gpu_memory_utilization, or fewer kv_cache_tokens; (2) fewer and smaller "
                    f"graphs: a lower max_running_requests (now {self.model_runner.max_running_requests}), or "
                    "enable_torch_compile=False; (3) no graphs: disable_cuda_graph=True"
                ) from error
            raise
        self.memory_usage = max(0, free - free_memory(self.device))
        logger.info(
            "captured %d decode graphs (up to %d rows) in %.1f s, %.0f MiB",
            len(self.graphs), self.max_bs, time.perf_counter() - started, self.memory_usage / 2**20,
        )  # fmt: skip

    @torch.no_grad()
    def capture_size(self, bs: int) -> None:
        """Capture a size that is `missing`, between two steps. Raises RuntimeError: it failed; all other sizes are as before."""
        free = free_memory(self.device)
        self.buffers.clear()
        with graph_capture.without_gc(), model_capture_mode(self.model_runner):
            self._capture_one(bs, warm_ups=1)
        self.memory_usage += max(0, free - free_memory(self.device))

    def _capture_one(self, bs: int, warm_ups: int = graph_capture.WARM_UPS) -> None:
        if self._adapted is not None and bs in self._adapted.missing:
            self._adapted.capture_size(bs)  # they share their outputs
        batch, forward = self._batches[bs], self._forward(bs)

        def plan() -> None:
            self.attn_backend.init_forward_metadata_capture_cuda_graph(batch)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            return self._placed(bs, *self._run(batch, forward))

        self.graphs[bs], outputs = graph_capture.record(plan, run, self.pool, warm_ups)
        self.output_buffers[bs] = LogitsProcessorOutput(*outputs)

    @staticmethod
    def _run(batch: ForwardBatch, forward: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states of the pass over the input buffers."""
        assert batch.positions is not None
        batch.hidden_states = None
        logits = forward(batch.input_ids.unsqueeze(0), batch.positions.unsqueeze(0), batch)[0]
        assert batch.hidden_states is not None, "the model sets it"
        return logits, batch.hidden_states

    def _placed(self, bs: int, logits: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states of a captured pass, in the output buffers of the passes without adapters."""
        if self._adapted is None:
            return logits, hidden
        shared = self._adapted.output_buffers[bs]
        assert shared.hidden_states is not None
        return shared.next_token_logits.copy_(logits), shared.hidden_states.copy_(hidden)

    def _batch(self, bs: int) -> ForwardBatch:
        """A planned decode batch of `bs` rows over the input buffers."""
        runner, buffers, adapters = self.model_runner, self.buffers, None
        if self._adapted is not None:
            assert runner.adapters is not None
            adapters = AdapterRows(tiles=buffers.adapter_memory(bs), version=runner.adapters.version)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=bs,
            input_ids=buffers.input_ids[:bs],
            req_pool_indices=buffers.rows[:bs],
            seq_lens=buffers.seq_lens[:bs],
            out_cache_loc=buffers.out_cache_loc[:bs],
            seq_lens_sum=bs * self.seq_len_fill_value,
            seq_lens_cpu=buffers.seq_lens_cpu[:bs],
            positions=buffers.positions[:bs],
            mrope_positions=buffers.rope_positions(bs),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            attn_backend=runner.attn_backend,
            state_pool=runner.gdn_pool,
            site_ops=runner.captured_site_ops(bs) if self._declares else None,
            adapters=adapters,
            return_hidden_states=True,
        )
        self.attn_backend.init_forward_metadata_capture_cuda_graph(batch)
        return batch

    def _forward(self, bs: int) -> Callable[..., torch.Tensor]:
        """The model's fused pass, compiled for the sizes of `compile_bs`."""
        model = self.model_runner.get_model()
        if bs not in self.compile_bs:
            return model.forward_fused
        # The compiler must not trace into the kernels of the attention backend.
        if "forward" not in vars(self.attn_backend):
            self.attn_backend.forward = torch.compiler.disable(self.attn_backend.forward)
        compiled = torch.compile(model.forward_fused, dynamic=False)

        def forward(*args: Any) -> torch.Tensor:
            with torch._dynamo.config.patch(recompile_limit=4 * len(self.capture_bs)):
                return compiled(*args)

        return forward

    def serves(self, bs: int, longest: int) -> bool:
        """Whether the pass captured for `bs` rows supports lengths up to `longest`."""
        batch = self._batches[bs]
        assert batch.seq_lens_cpu is not None
        batch.seq_lens_cpu.fill_(longest)
        return self.attn_backend.can_replay(batch, bs)

    def run_inside(self, bs: int) -> LogitsProcessorOutput:
        """Run the pass of `bs` rows over the input buffers kernel by kernel. A graph may capture several."""
        batch = self._batches[bs]
        self.attn_backend.forget_plan(batch)
        try:
            return LogitsProcessorOutput(*self._run(batch, self._forward(bs)))
        finally:
            self.attn_backend.forget_plan(batch)

    def prepare(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """Copy the batch into the input buffers, padded, and plan its attention. Returns the batch of the graph."""
        bs = self.padded_size(forward_batch.batch_size)
        self.buffers.populate(forward_batch, bs)
        self.attn_backend.init_forward_metadata_replay_cuda_graph(self._batches[bs])
        return self._batches[bs]

    @torch.no_grad()
    def replay(self, forward_batch: ForwardBatch, in_place: bool = False) -> LogitsProcessorOutput:
        """Replay the graph of the batch's padded size, or run its pass if it is `missing`. `fits` must hold for the batch.

        Args:
            in_place: return the graph's own logits, which the next replay overwrites.

        Returns:
            logits [batch, vocab] and, with `return_hidden_states`, hidden states [batch, hidden], in fresh memory.
        """
        n = forward_batch.batch_size
        if n == 0:
            runner = self.model_runner
            empty = torch.empty(0, runner.model_spec.num_logits, dtype=runner.dtype, device=self.device)
            return LogitsProcessorOutput(empty)
        bs = self.prepare(forward_batch).batch_size
        if (graph := self.graphs.get(bs)) is None:
            outputs = self.run_inside(bs)
        else:
            graph.replay()
            outputs = self.output_buffers[bs]
        logits, hidden_states = outputs.next_token_logits[:n], None
        if forward_batch.return_hidden_states:
            assert outputs.hidden_states is not None
            hidden_states = forward_batch.hidden_states = outputs.hidden_states[:n].clone()
        return LogitsProcessorOutput(logits if in_place else logits.clone(), hidden_states)

    def shutdown(self) -> None:
        """Release the graphs and their memory. A second call does nothing."""
        self.graphs.clear()
        self.output_buffers.clear()
        self._batches.clear()
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def free_memory(device: str) -> int:
    """Free bytes of the device; 0 off CUDA."""
    return torch.cuda.mem_get_info()[0] if device.startswith("cuda") else 0
