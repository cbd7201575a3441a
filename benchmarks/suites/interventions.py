"""What declared interventions and captures cost a decode step: the suite "interventions".

Every request of the batch has them, and all requests decode in the measured steps (`steady_ms`). The cost of unused tables is
measured on graphs. The same pass is captured with and without tables, and the graphs are replayed in turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pymllm_interp import LM
from pymllm_interp.bench.common import greedy, random_prompts, timed
from pymllm_interp.bench.suites import BenchSettings, DescribeGraphs, Model, facts, replay_ms
from pymllm_interp.hooks.captures.spec import Capture
from pymllm_interp.hooks.interventions.op import Gate, Op
from pymllm_interp.hooks.interventions.projections import Ablate, Clamp
from pymllm_interp.hooks.interventions.specs import Steer
from pymllm_interp.runner.graphs.cuda_graph_runner import CudaGraphRunner
from pymllm_interp.runner.interp_model_runner import InterpModelRunner

from .common import PAIRS, against_plain, summary

PROMPT_TOKENS, NEW_TOKENS = 32, 65
CAPTURED_PROMPTS = 12
"""Prompts of the captured prefill. With 8B shapes their results fit in the pool of result memory (`capture_kept_bytes`)."""
HARVESTED = 8
"""Documents of the harvest, each as long as a prompt of the captured prefill."""
CAPTURED = "all resid_post captured to the host"
TABLES_PRESENT = "tables present, nobody hooked"
"""The graph of a plain step, with tables against without. The plain steps of the other cases have tables."""

Specs = Callable[[int], list[Op]]
"""Request i's interventions."""


def interventions_suite(model: Model) -> Iterator[dict[str, Any]]:
    """Ratios to plain steps, by case and batch size. Yields the growing record."""
    settings = model.settings
    with model.load() as lm:
        found: dict[str, Any] = facts(lm) | short_lengths(settings) | {"pairs": PAIRS, "rows": []}
        measures = {case: partial(measure, specs=specs) for case, specs in cases(lm).items()}
        for case, measured in {**measures, CAPTURED: measure_captured}.items():
            for batch in settings.batches:
                found["rows"].append({"case": case, "batch": batch, **measured(lm, batch, settings)})
                yield found
        found["captured_prefill"] = measure_captured_prefill(lm, settings)
        found["harvest"] = measure_harvest(lm, settings)
        found["execution"] = lm.engine.stats()["execution"]
        yield found
        length = sum(short_lengths(settings).values())
        for batch in settings.batches if lm.backend.run(DescribeGraphs())["graphs"] else ():
            found["rows"].append({"case": TABLES_PRESENT, "batch": batch, **tables(lm, batch, length)})
            yield found


def short_lengths(settings: BenchSettings) -> dict[str, int]:
    """Tokens of the measured requests, at most as many as the settings have."""
    return {
        "prompt_tokens": min(PROMPT_TOKENS, settings.prompt_tokens), "new_tokens": min(NEW_TOKENS, settings.new_tokens),
    }  # fmt: skip


def cases(lm: LM) -> dict[str, Specs]:
    """The cases. Interventions are weak: their cost does not depend on their strength."""
    width, depth = lm.hidden_size, lm.num_layers
    middle = depth // 2

    def vector(seed: int, *rows: int) -> torch.Tensor:
        return torch.randn(*rows, width, generator=torch.Generator().manual_seed(seed))

    shared, probe, basis = vector(0), vector(1), vector(2, 4)
    site = f"resid_post.{middle}"
    several: list[Op] = [
        Ablate(f"resid_post.{middle - 1}", basis),
        Clamp(f"mlp_out.{middle}", probe, low=-1.0, high=1.0),
        Steer(f"attn_out.{middle}", shared, scale=1e-3, when=Gate(probe, 0.0)),
        Steer(f"resid_mid.{middle + 1}", shared, scale=1e-3, norm="preserve"),
    ]
    kinds = ("attn_out.*", "mlp_out.*", "resid_post.*")
    return {
        "one site steered, one vector": lambda i: [Steer(site, shared, scale=1e-3)],
        "one site steered, a vector each": lambda i: [Steer(site, vector(100 + i), scale=1e-3)],
        "all layers steered, a vector each": lambda i: [Steer(kind, vector(100 + i), scale=1e-3) for kind in kinds],
        "Ablate rank 4, Clamp, gated and norm-preserving Steer": lambda i: several,
    }


def measure(lm: LM, batch: int, settings: BenchSettings, specs: Specs) -> dict[str, Any]:
    """Steps of requests with `specs` against plain ones. Work that is done once for each request is excluded."""
    return _against_plain(lm, batch, settings, [{"interventions": specs(i)} for i in range(batch)])


def measure_captured(lm: LM, batch: int, settings: BenchSettings) -> dict[str, Any]:
    """Steps that capture the states after each layer, against plain ones; and the captured GB a second."""
    capture = [Capture("resid_post.*", positions="generated")]
    found = _against_plain(lm, batch, settings, [{"capture": capture}] * batch)
    return found | {"gb_per_s": batch * _bytes_a_row(lm) / found["ms"] / 1e6}


def _against_plain(lm: LM, batch: int, settings: BenchSettings, declared: Sequence[dict[str, Any]]) -> dict[str, Any]:
    lengths = short_lengths(settings)
    return against_plain(lm, random_prompts(lm, batch, lengths["prompt_tokens"]), declared, lengths["new_tokens"])


def measure_captured_prefill(lm: LM, settings: BenchSettings) -> dict[str, float]:
    """Prefill that captures the states after each layer: its share of the plain speed, and GB a second."""
    prompts = random_prompts(lm, CAPTURED_PROMPTS, settings.prefill_tokens)

    def seconds(**given: Any) -> float:
        return timed(lambda: lm.generate(prompts, greedy(1), **given) and None)

    seconds(capture=["resid_post.*"])
    pairs = [(seconds(), seconds(capture=["resid_post.*"])) for _ in range(PAIRS)]
    size = sum(map(len, prompts)) * _bytes_a_row(lm)
    return {
        "prompts": CAPTURED_PROMPTS,
        "prompt_tokens": settings.prefill_tokens,
        "of_plain": statistics.median(plain / captured for plain, captured in pairs),
        "gb_per_s": size / statistics.median(captured for _, captured in pairs) / 1e9,
    }


def measure_harvest(lm: LM, settings: BenchSettings) -> dict[str, float]:
    """GB a second of a harvest of the states after each layer, and of plain writes to the disk. Both times end when all bytes are
    synced.
    """
    documents = random_prompts(lm, HARVESTED, settings.prefill_tokens)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = lm.harvest(documents, capture=["resid_post.*"], out=Path(folder) / "harvest", progress=False)
        piece = os.urandom(min(result.new_bytes, 1 << 28))
        pieces = result.new_bytes // len(piece)

        def write() -> None:
            with open(Path(folder) / "plain", "wb") as file:
                for _ in range(pieces):
                    file.write(piece)
                os.fsync(file.fileno())

        disk = pieces * len(piece) / timed(write) / 1e9
    return {"bytes": result.new_bytes, "gb_per_s": result.gb_per_second, "disk_gb_per_s": disk}


def _bytes_a_row(lm: LM) -> int:
    """Bytes of the states after each layer, for one position."""
    return lm.num_layers * lm.hidden_size * lm.dtype.itemsize


def tables(lm: LM, batch: int, length: int, replays: int = 20) -> dict[str, Any]:
    """A decode pass of `batch` rows of so many positions, captured with tables, and twice without.

    "control" is the ratio of the two graphs without tables, which differ only in the place of their memory. The engine's own
    graphs cannot be used afterwards: the attention backend plans for the graphs that were captured last.
    """
    found = lm.backend.run(ReplayTables(batch, length, replays))
    control = statistics.median(second / first for first, _, second in found)
    return summary([((first + second) / 2, with_tables) for first, with_tables, second in found]) | {"control": control}


@dataclass(frozen=True)
class ReplayTables:
    """Capture a decode pass without tables, with them, and without them again, and replay the graphs in turns."""

    batch: int
    length: int
    replays: int

    def run(self, runner: InterpModelRunner) -> list[list[float]]:
        """Milliseconds of the three graphs, in each of `PAIRS` turns."""
        assert runner.graph_runner is not None
        size, captured = runner.graph_runner.padded_size(self.batch), runner.captured_site_ops
        made, kept = [], []
        for edits in (lambda bs: None, captured, lambda bs: None):
            runner.captured_site_ops = edits  # type: ignore[method-assign]
            try:
                made.append(CudaGraphRunner(runner, [size]))
            finally:
                runner.captured_site_ops = captured  # type: ignore[method-assign]
            kept.append(dict(vars(runner.attn_backend).get("_graphs", {})))  # buffers of this graph
        runner.input_buffers.seq_lens.fill_(self.length)
        graphs = [graph_runner.graphs[size] for graph_runner in made]
        found = [[replay_ms(graph, self.replays) for graph in graphs] for _ in range(PAIRS + 1)][1:]
        for graph_runner in made:
            graph_runner.shutdown()
        kept.clear()
        return found
