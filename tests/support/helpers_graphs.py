"""Decode passes "captured" on a CPU: a graph is the function that it was captured from, and a replay calls it again.

What is not CUDA's own is then as on a GPU: padded batches, inputs in place, segments between blocks, what is forgotten when.
A function that would not do as a graph, because it reads what changed since, is caught by neither; the GPU suite does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pymllm_interp import LM
from pymllm_interp.attention.torch_backend import TorchAttnBackend
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.runner.graphs import graph_capture
from pymllm_interp.runner.graphs.captured_passes import CapturedPasses
from pymllm_interp.runner.stages.declared_stage import DeclaredStage


class EagerGraph:
    """Stands for a `torch.cuda.CUDAGraph`. Where the capture ran the function already, the first replay has nothing to do."""

    def __init__(self, run: Callable[[], None], has_run: bool = False) -> None:
        self._run, self._has_run = run, has_run

    def replay(self) -> None:
        if not self._has_run:
            self._run()
        self._has_run = False


def capture(run: Callable[[], None], pool: Any) -> EagerGraph:
    run()
    return EagerGraph(run, has_run=True)


def record(
    plan: Callable[[], None], run: Callable[[], tuple[torch.Tensor, ...]], pool: Any, warm_ups: int = 1
) -> tuple[EagerGraph, tuple[torch.Tensor, ...]]:
    plan()
    run()  # a warm-up: a second one computes the same
    plan()
    outputs = run()

    def again() -> None:
        for output, value in zip(outputs, run(), strict=True):
            output.copy_(value)

    return EagerGraph(again), outputs


class EagerPieces:
    """Stands for `graph_capture.Pieces`: a replay calls the function that would have been captured."""

    def __init__(self, run: Callable[[Callable[[Any], None]], torch.Tensor]) -> None:
        self._run = run

    def replay(self, between: Callable[[Any], None], num_calls: int | None = None) -> torch.Tensor:
        calls = 0

        def counted(argument: Any) -> None:
            nonlocal calls
            if calls == num_calls:
                raise StopAsyncIteration
            calls += 1
            between(argument)

        with suppress(StopAsyncIteration):
            return self._run(counted)
        return torch.empty(0)


def use_eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runners on a CPU capture their decode passes, as they do on CUDA."""
    why_none = CapturedPasses.why_none

    def why_not(graphs: CapturedPasses) -> str | None:
        runner = graphs._runner
        device, runner.device = runner.device, "cuda"
        try:
            return why_none(graphs)
        finally:
            runner.device = device

    monkeypatch.setattr(CapturedPasses, "why_none", why_not)
    use_eager_captures(monkeypatch)


def use_eager_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a `CudaGraphRunner` that is made on a CPU work."""
    # A graph computes its plan anew; a function finds the last one.
    monkeypatch.setattr(TorchAttnBackend, "init_forward_metadata_replay_cuda_graph", TorchAttnBackend.forget_plan)
    # There is no device memory to be freed in the midst of a capture, and to look through all objects twice takes long.
    monkeypatch.setattr(graph_capture, "freeze_gc", nullcontext)
    monkeypatch.setattr(graph_capture, "capture", capture)
    monkeypatch.setattr(graph_capture, "record", record)
    monkeypatch.setattr(graph_capture, "record_pieces", lambda run, pool, **options: EagerPieces(run))


@contextmanager
def captured_lms(model_folder: Callable[[str], Path], **defaults: Any) -> Iterator[Callable[..., LM]]:
    """(device, family, tables, **options) -> an LM in float32 whose passes are captured; made once for equal arguments.

    `tables`: declared ops are read from tables, as on CUDA.
    """
    made: dict[tuple, LM] = {}

    def load(device: str, family: str = "llama", *, tables: bool = False, **options: Any) -> LM:
        key = (device, family, tables, *sorted(options.items()))
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                if tables:
                    patch.setattr(DeclaredStage, "has_tables", True)
                made[key] = LM(
                    model_folder(family), **with_tuning(device=device, **{"dtype": "float32", **defaults, **options})
                )
        return made[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            use_eager_graphs(monkeypatch)
        yield load
        for lm in made.values():
            lm.shutdown()
