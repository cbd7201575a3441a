"""Capturing CUDA graphs: capture mode, and the capture itself."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from ..parts import RunnerParts

T = TypeVar("T")
WARM_UPS = 2

_captures = threading.RLock()
"""Engines of one process share the stream of their captures, so one captures at a time."""
_current = threading.local()
"""`is_capturing` of the current thread."""


def is_capture_mode() -> bool:
    """Whether the current thread is capturing graphs. For one runner: `ModelRunner.is_capturing`."""
    return getattr(_current, "is_capturing", False)


@contextmanager
def model_capture_mode(owner: RunnerParts | None = None) -> Iterator[None]:
    """Set `is_capture_mode()` on this thread, and `owner.is_capturing`; blocks nest.

    Args:
        owner: the runner that captures. Its hooks and traced passes are refused meanwhile; other runners continue.
    """
    before, owner_before = is_capture_mode(), owner is not None and owner.is_capturing
    _current.is_capturing = True
    if owner is not None:
        owner.is_capturing = True
    try:
        yield
    finally:
        _current.is_capturing = before
        if owner is not None:
            owner.is_capturing = owner_before


_shared_pool: tuple | None = None


def get_global_graph_memory_pool() -> tuple | None:
    """The memory pool that the graphs of all runners made from now on share; None: each runner has its own."""
    return _shared_pool


def set_global_graph_memory_pool(pool: tuple | None) -> None:
    """Let the runners made from now on capture into one memory pool: they take the memory of the largest.

    A replay overwrites results of other graphs in the pool. So this is for engines that never run at the same time; by
    default each runner has a separate pool.

    Args:
        pool: a handle of `torch.cuda.graph_pool_handle()`; None: own pools again.
    """
    global _shared_pool
    _shared_pool = pool


def memory_pool(device: str) -> tuple | None:
    """The pool for a new runner's graphs: the global one, else a new one. None off CUDA."""
    if _shared_pool is not None or not device.startswith("cuda"):
        return _shared_pool
    return torch.cuda.graph_pool_handle()


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Keep the garbage collector from freeing device memory in the middle of a capture. Objects that are frozen stay so."""
    gc.collect()
    if not (kept := gc.get_freeze_count()):  # by a server: it cannot be frozen again without the garbage of the capture
        gc.freeze()
    try:
        with without_gc():
            yield
    finally:
        if not kept:
            gc.unfreeze()
        gc.collect()


@contextmanager
def without_gc() -> Iterator[None]:
    """The same without two collections, which take 0.2 s each: for captures while requests wait."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace for each stream that it has seen.

    It has high priority because torch reuses a few streams for each priority. No other thread may get this one while it captures.
    """
    return torch.cuda.Stream(device_index, priority=-1)


def record(plan: Callable[[], None], run: Callable[[], T], pool: Any, warm_ups: int = WARM_UPS) -> tuple[Any, T]:
    """Warm `run` up and capture it. `plan` is called before each run, outside the graph.
    Returns the graph, and the captured return value of `run`: every replay writes its tensors anew."""
    stream = _capture_stream(torch.cuda.current_device())
    outputs: list[T] = []
    with _captures:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                plan()
                run()
            plan()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # cached memory becomes available to the graph's pool
        graph = capture(lambda: outputs.append(run()), pool)
    return graph, outputs[0]


class Pieces(Generic[T]):
    """A captured function, as the graphs between its calls of `between`.

    Args:
        graphs: one more than `calls`.
        calls: the arguments of the calls, in order.
        output: the captured return value: every replay writes its tensors anew.
    """

    def __init__(self, graphs: list[torch.cuda.CUDAGraph], calls: list[Any], output: T) -> None:
        self.graphs, self.calls, self.output = graphs, calls, output

    def replay(self, between: Callable[[Any], None], num_calls: int | None = None) -> T:
        """Replay the graphs, with `between` called on each of the calls' arguments in its place.

        Args:
            num_calls: number of calls before the end; the output then belongs to an earlier replay. None: all.
        """
        calls = self.calls[:num_calls]
        for graph, argument in zip(self.graphs, calls, strict=False):
            graph.replay()
            between(argument)
        self.graphs[len(calls)].replay()
        return self.output


def record_pieces(run: Callable[[Callable[[Any], None]], T], pool: Any, warm_ups: int = WARM_UPS) -> Pieces[T]:
    """Warm ``run(between)`` up and capture it, without `between` itself. Each call of it ends a graph and begins the next."""
    current = torch.cuda.current_stream()
    stream = _capture_stream(current.device_index)
    stream.wait_stream(current)
    graphs: list[torch.cuda.CUDAGraph] = []
    calls: list[Any] = []

    def begin() -> None:
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=pool, capture_error_mode="thread_local")

    def between(argument: Any) -> None:
        graphs[-1].capture_end()
        calls.append(argument)
        begin()

    try:
        with _captures, torch.cuda.stream(stream):
            for _ in range(warm_ups):
                run(lambda argument: None)
            torch.cuda.synchronize()
            begin()
            try:
                output = run(between)
            finally:
                graphs[-1].capture_end()
    except BaseException:
        _forget_capture(current, pool)
        raise
    current.wait_stream(stream)
    return Pieces(graphs, calls, output)


def capture(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Capture the kernels that `run` launches, without running them, on the stream of captures."""
    current = torch.cuda.current_stream()
    stream = _capture_stream(current.device_index)
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        with _captures, torch.cuda.stream(stream):
            # "thread_local": another engine of this process may launch kernels from its own thread.
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
    """Reset what torch leaves set after a failed capture: the current stream, the allocator's pool, and the default generator. That
    generator would wait for the capture to end."""
    torch.cuda.set_stream(current)
    generator = torch.cuda.default_generators[current.device_index]
    fresh = torch.Generator(current.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh)
    with contextlib.suppress(RuntimeError):  # torch may have ended them itself
        torch._C._cuda_endAllocateToPool(current.device_index, pool)


def capture_batch_sizes(max_bs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, 12, then in steps of 8 to 256. Steps of 16 follow to 512, and of 32 beyond; `max_bs` is
    the last.
    """
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, max_bs + 1, 32)]
    return sorted({size for size in sizes if size < max_bs} | {max_bs})


def capture_token_counts(max_tokens: int) -> list[int]:
    """Rows of prefill and mixed passes to capture: in steps of 16 to 128, of 32 to 256. Steps of 64 follow; `max_tokens` is the
    last.
    """
    sizes = [*range(16, 129, 16), *range(160, 257, 32), *range(320, max_tokens + 1, 64)]
    return sorted({size for size in sizes if size < max_tokens} | {max_tokens})
