"""Decode passes as CUDA graphs: captured once for a set of batch sizes, replayed with new inputs.

A replay launches a whole pass at once, where an eager pass launches some hundred kernels one by one::

    runner = CudaGraphRunner(model_runner)     # captures all sizes
    if runner.can_run(forward_batch):
        logits_output = runner.replay(forward_batch)
    else:
        logits_output = model_runner.forward(forward_batch)

A batch is padded to the next captured size. Padded rows belong to the dummy row and slot of the pools, so they read and write
nobody's memory. What `replay` returns is fresh memory: the next replay does not change it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from traceback import clear_frames
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from ..core.forward_batch import ForwardBatch, ForwardMode
from ..core.output import LogitsProcessorOutput
from ..layers.edits.table import TableOps
from .input_batch import InputBuffers

if TYPE_CHECKING:
    from .model_runner import ModelRunner

logger = logging.getLogger(__name__)

WARM_UPS = 2

_captures = threading.RLock()
"""Engines of one process share the stream and the memory of their captures: one at a time."""
_memory_pool: tuple | None = None
_capturing = False
_pool_users: WeakSet[CudaGraphRunner] = WeakSet()


def get_global_graph_memory_pool() -> tuple | None:
    """The memory pool that all graphs of the process share; None before the first capture."""
    return _memory_pool


def set_global_graph_memory_pool(pool: tuple | None) -> None:
    """Set the memory pool that later captures use; None makes them start a new one."""
    global _memory_pool
    _memory_pool = pool


def is_capture_mode() -> bool:
    """Whether graphs are being captured right now."""
    return _capturing


@contextmanager
def model_capture_mode() -> Iterator[None]:
    """Within the block `is_capture_mode` is True, however it ends; blocks nest."""
    global _capturing
    before, _capturing = _capturing, True
    try:
        yield
    finally:
        _capturing = before


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Keep the garbage collector from freeing device memory in the middle of a capture."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def capture_batch_sizes(max_bs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, 12, by 8 up to 256, by 16 up to 512, by 32 beyond, and `max_bs`, where they end."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, max_bs + 1, 32)]
    return sorted({size for size in sizes if size < max_bs} | {max_bs})


class _InputBuffers:
    """The memory that captured passes read their inputs from, a row for each request: the runner's own input buffers.

    Rows of padding hold the dummy row, the dummy slot, and a sequence of one token.
    """

    def __init__(self, shared: InputBuffers, max_bs: int, seq_len_fill_value: int) -> None:
        self.seq_len_fill_value = seq_len_fill_value
        self.input_ids = shared.input_ids[:max_bs]
        self.positions = shared.positions[:max_bs]
        self.req_pool_indices = shared.rows[:max_bs]
        self.op_rows = shared.op_rows[:max_bs]
        self.blocks = shared.blocks[:, :max_bs]
        self.out_cache_loc = shared.out_cache_loc[:max_bs]
        self.seq_lens = shared.seq_lens[:max_bs]
        self.seq_lens_cpu = torch.full((max_bs,), seq_len_fill_value, dtype=torch.int32)

    def populate(self, forward_batch: ForwardBatch, bs: int) -> None:
        """Copy the batch's rows in, and make those behind them up to `bs` padding; a step's rows are there already."""
        n, lens_cpu = forward_batch.batch_size, forward_batch.seq_lens_cpu
        assert forward_batch.positions is not None
        fills = [(self.seq_lens_cpu, forward_batch.seq_lens if lens_cpu is None else lens_cpu, self.seq_len_fill_value)]
        if forward_batch.padded_size < bs:
            fills += [
                (self.input_ids, forward_batch.input_ids, 0),
                (self.positions, forward_batch.positions, 0),
                (self.req_pool_indices, forward_batch.req_pool_indices, 0),
                (self.op_rows, self._edited_rows(forward_batch), -1),
                *self._block_fills(forward_batch),
                (self.out_cache_loc, forward_batch.out_cache_loc, 0),
                (self.seq_lens, forward_batch.seq_lens, self.seq_len_fill_value),
            ]
        for buffer, rows, padding in fills:
            buffer[:n].copy_(rows, non_blocking=rows.device == buffer.device)
            buffer[n:bs].fill_(padding)

    @staticmethod
    def _edited_rows(forward_batch: ForwardBatch) -> torch.Tensor:
        edits = forward_batch.site_ops
        return torch.full_like(forward_batch.req_pool_indices, -1) if edits is None else edits.token_rows.owners

    def _block_fills(self, forward_batch: ForwardBatch) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Blocks matter to rows whose request declared something."""
        edits = forward_batch.site_ops
        return (
            []
            if edits is None
            else [(own, given, 0) for own, given in zip(self.blocks, edits.token_rows.records, strict=True)]
        )

    def batch(self, bs: int, model_runner: ModelRunner) -> ForwardBatch:
        """A decode batch of `bs` rows over the buffers."""
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=bs,
            input_ids=self.input_ids[:bs],
            req_pool_indices=self.req_pool_indices[:bs],
            seq_lens=self.seq_lens[:bs],
            out_cache_loc=self.out_cache_loc[:bs],
            seq_lens_sum=bs * self.seq_len_fill_value,
            seq_lens_cpu=self.seq_lens_cpu[:bs],
            positions=self.positions[:bs],
            req_to_token_pool=model_runner.req_to_token_pool,
            token_to_kv_pool=model_runner.token_to_kv_pool,
            attn_backend=model_runner.attn_backend,
            site_ops=model_runner.captured_site_ops(bs),
        )


@cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """The stream of all captures: the matrix libraries keep a workspace for each stream that they have seen.

    Of high priority, since torch deals the same few streams of a priority out again and again: nobody else may get this one,
    on another thread, while it captures.
    """
    return torch.cuda.Stream(device_index, priority=-1)


def record(plan: Callable[[], None], run: Callable[[], torch.Tensor], pool: Any) -> tuple[Any, torch.Tensor]:
    """Warm `run` up and capture it. `plan` comes before each run and stays outside of the graph.

    Returns:
        the graph, and what `run` returned: every replay writes it anew.
    """
    stream = _capture_stream(torch.cuda.current_device())
    outputs: list[torch.Tensor] = []
    with _captures:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                plan()
                run()
            plan()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is free is free for the graph
        graph = capture(lambda: outputs.append(run()), pool)
    return graph, outputs[0]


def capture(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of the kernels that `run` launches; none of them runs. Captures go to a stream of their own."""
    current = torch.cuda.current_stream()
    stream = _capture_stream(current.device_index)
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        with _captures, torch.cuda.stream(stream):
            # Another engine of this process may be at work on its own thread.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    except BaseException:
        _forget_capture(current, pool)
        raise
    current.wait_stream(stream)
    return graph


def _forget_capture(current: torch.cuda.Stream, pool: Any) -> None:
    """What torch leaves of a capture that failed: its stream as the current one, allocations that go to its pool, and a
    default generator that waits for the capture to end."""
    torch.cuda.set_stream(current)
    generator = torch.cuda.default_generators[current.device_index]
    fresh = torch.Generator(current.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh)
    with contextlib.suppress(RuntimeError):  # it may have got as far as to end them itself
        torch._C._cuda_endAllocateToPool(current.device_index, pool)


class CudaGraphRunner:
    """Captures the fused decode pass for each size of `capture_bs`, and replays it.

    Args:
        model_runner: initialised: model, pools and attention backend are there.
        sizes: batch sizes to capture; None is `capture_batch_sizes` up to `max_running_requests`.

    Attributes:
        graphs, output_buffers: by batch size; the logits in a buffer are those of the last replay.
        capture_bs, max_bs: the sizes, and the largest of them: `max_running_requests`.
        enable_torch_compile, torch_compile_max_bs, compile_bs: sizes whose pass is compiled before it is captured.
        seq_len_fill_value: the length of a padded row.
        buffers: what captured passes read.
        memory_usage: device memory that the captures took, in bytes.

    Raises:
        RuntimeError: the runner is not initialised, or a capture failed (with what to change).
    """

    def __init__(self, model_runner: ModelRunner, sizes: list[int] | None = None) -> None:
        parts = ("model", "req_to_token_pool", "token_to_kv_pool", "attn_backend")
        missing = [name for name in parts if getattr(model_runner, name) is None]
        if missing:
            raise RuntimeError(
                f"CudaGraphRunner needs an initialised ModelRunner, but {', '.join(missing)} is None: call initialize() first"
            )
        self.model_runner = model_runner
        self.device = model_runner.device
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.output_buffers: dict[int, LogitsProcessorOutput] = {}
        self.capture_bs = sizes or capture_batch_sizes(model_runner.max_running_requests)
        self.max_bs = self.capture_bs[-1]
        server_config = model_runner.server_config
        self.enable_torch_compile = server_config.enable_torch_compile
        self.torch_compile_max_bs = server_config.torch_compile_max_bs
        self.compile_bs = [
            bs for bs in self.capture_bs if self.enable_torch_compile and bs <= self.torch_compile_max_bs
        ]
        self.seq_len_fill_value = 1
        self.buffers = _InputBuffers(model_runner.input_buffers, self.max_bs, self.seq_len_fill_value)
        self.memory_usage = 0
        self._batches: dict[int, ForwardBatch] = {}
        self.capture()

    @property
    def attn_backend(self) -> Any:
        """The owner's attention backend."""
        return self.model_runner.attn_backend

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        """Whether `replay` serves the batch: a decode or idle one within the captured sizes, without gradients (`fresh_kv_only`),
        that asks for its rows' logits and nothing else, and whose declared ops, if any, are in the tables that graphs read."""
        bs = forward_batch.batch_size
        if not forward_batch.forward_mode.is_decode_or_idle() or bs > self.max_bs:
            return False
        if (
            forward_batch.fresh_kv_only
            or forward_batch.return_hidden_states
            or forward_batch.logits_indices is not None
            or not isinstance(forward_batch.site_ops, TableOps | None)
        ):
            return False
        if bs == 0 or forward_batch.forward_mode.is_idle():
            return bool(self.graphs)
        padded = self.padded_size(bs)
        return (
            padded in self.graphs
            and forward_batch.attn_backend is self.attn_backend
            and self.attn_backend.can_replay(forward_batch, padded)
        )

    def padded_size(self, bs: int) -> int:
        """The captured size that a batch of `bs` is padded to."""
        return self.capture_bs[bisect_left(self.capture_bs, bs)]

    @torch.no_grad()
    def capture(self) -> None:
        """Capture every size, largest first: the smaller ones then live in its memory."""
        started, free = time.perf_counter(), _free_memory(self.device)
        if get_global_graph_memory_pool() is None and self.device.startswith("cuda"):
            set_global_graph_memory_pool(torch.cuda.graph_pool_handle())
        _pool_users.add(self)
        bs = self.max_bs
        try:
            self.attn_backend.init_cuda_graph_state(self.max_bs)
            with freeze_gc(), model_capture_mode():
                for bs in reversed(self.capture_bs):
                    before = _free_memory(self.device)
                    self._capture_one(bs)
                    logger.debug("graph of %d rows: %.1f MiB", bs, (before - _free_memory(self.device)) / 2**20)
        except Exception as error:  # of Triton's compiler, too, which are no RuntimeErrors
            self.shutdown()
            set_global_graph_memory_pool(None)  # it may be broken: other graphs keep theirs, later captures start anew
            clear_frames(error.__traceback__)  # they hold the model, and whoever keeps the error would
            if isinstance(error, RuntimeError):
                raise RuntimeError(
                    f"capturing the CUDA graph of a decode pass of {bs} rows failed: {error}\n"
                    "What helps: (1) memory: a lower gpu_memory_utilization, or fewer kv_cache_tokens; (2) fewer and smaller "
                    f"graphs: a lower max_running_requests (now {self.max_bs}), or enable_torch_compile=False; (3) no graphs: "
                    "disable_cuda_graph=True"
                ) from error
            raise
        self.memory_usage = max(0, free - _free_memory(self.device))
        logger.info(
            "captured %d decode graphs (up to %d rows) in %.1f s, %.0f MiB",
            len(self.graphs), self.max_bs, time.perf_counter() - started, self.memory_usage / 2**20,
        )  # fmt: skip

    def _capture_one(self, bs: int) -> None:
        batch = self.buffers.batch(bs, self.model_runner)
        forward = self._forward(bs)
        assert batch.positions is not None
        input_ids, positions = batch.input_ids.unsqueeze(0), batch.positions.unsqueeze(0)
        self.graphs[bs], logits = record(
            lambda: self.attn_backend.init_forward_metadata_capture_cuda_graph(batch),
            lambda: forward(input_ids, positions, batch)[0],
            get_global_graph_memory_pool(),
        )
        self._batches[bs], self.output_buffers[bs] = batch, LogitsProcessorOutput(logits)

    def _forward(self, bs: int) -> Callable[..., torch.Tensor]:
        """The model's fused pass, compiled for the sizes of `compile_bs`."""
        model: Any = self.model_runner.get_model()
        if bs not in self.compile_bs:
            return model.forward_fused
        # Kernels of the attention backend are not to be looked into.
        if "forward" not in vars(self.attn_backend):
            self.attn_backend.forward = torch.compiler.disable(self.attn_backend.forward)
        compiled = torch.compile(model.forward_fused, dynamic=False)

        def forward(*args: Any) -> torch.Tensor:
            with torch._dynamo.config.patch(recompile_limit=4 * len(self.capture_bs)):
                return compiled(*args)

        return forward

    def prepare(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """Lay the batch out where the graph of its padded size reads it, and plan it. Returns that graph's own batch."""
        bs = self.padded_size(forward_batch.batch_size)
        self.buffers.populate(forward_batch, bs)
        self.attn_backend.init_forward_metadata_replay_cuda_graph(self._batches[bs])
        return self._batches[bs]

    @torch.no_grad()
    def replay(self, forward_batch: ForwardBatch, in_place: bool = False) -> LogitsProcessorOutput:
        """Run the batch from the graph of its padded size. `can_run` must hold for it.

        Args:
            in_place: return the graph's own output, which the next replay overwrites.

        Returns:
            the logits of the batch's own rows, [batch, vocab], in fresh memory.
        """
        n = forward_batch.batch_size
        if n == 0:
            runner = self.model_runner
            return LogitsProcessorOutput(torch.empty(0, runner.vocab_size, dtype=runner.dtype, device=self.device))
        bs = self.prepare(forward_batch).batch_size
        self.graphs[bs].replay()
        logits = self.output_buffers[bs].next_token_logits[:n]
        return LogitsProcessorOutput(logits if in_place else logits.clone())

    def shutdown(self) -> None:
        """Release the graphs and their memory. A second call does nothing."""
        self.graphs.clear()
        self.output_buffers.clear()
        self._batches.clear()
        _pool_users.discard(self)
        if not _pool_users:  # a pool without graphs is gone, and no capture may name it again
            set_global_graph_memory_pool(None)
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _free_memory(device: str) -> int:
    """Free bytes of the device; 0 off CUDA."""
    return torch.cuda.mem_get_info()[0] if device.startswith("cuda") else 0
