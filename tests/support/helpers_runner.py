"""Runners driven by hand: pools, rows and slots without a scheduler."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.forward_batch import ForwardBatch, ForwardMode
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.core.request import Request
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.core.step import LogitsProcessorOutput, ModelRunnerOutput, SchedulerOutput
from pymllm_interp.engine.kv_manager import KVManager
from pymllm_interp.engine.scheduler import Scheduler
from pymllm_interp.runner import ModelRunner
from pymllm_interp.runner.partition import Execution


def make_runner(
    source: Path | PretrainedConfig, cls: type[ModelRunner] = ModelRunner, dtype: str = "float32", **server: Any
) -> ModelRunner:
    """An initialised runner over a folder's weights, or over dummy ones for a config."""
    if isinstance(source, PretrainedConfig):
        model = ModelConfig(model="dummy", load_format="dummy", hf_config=copy.deepcopy(source), dtype=dtype)
    else:
        model = ModelConfig(model=str(source), dtype=dtype)
    runner = cls(ServerConfig(**{"device": "cpu", "kv_cache_tokens": 512, "max_running_requests": 64, **server}), model)
    runner.initialize()
    return runner


class ByHand:
    """Sequences whose passes are asked for one by one: ``hand.extend({0: [5, 6], 1: [7]})``."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.rows: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def batch(self, tokens: dict[int, list[int]], mode: ForwardMode | None = None) -> ForwardBatch:
        """A pass over the next tokens of each sequence, in the order of `tokens`. The pools are written, the pass is not run."""
        table, allocator = self.runner.req_to_token_pool, self.runner.token_to_kv_pool_allocator
        assert table is not None and allocator is not None
        slots: list[int] = []
        for key, new in tokens.items():
            if key not in self.rows:
                row = table.alloc()
                assert row is not None
                self.rows[key], self.pages[key], self.lengths[key] = row, [], 0
            start = self.lengths[key]
            missing = -(-(start + len(new)) // allocator.page_size) - len(self.pages[key])
            self.pages[key] += allocator.alloc_pages(max(missing, 0)) or []
            own = allocator.slots_of(self.pages[key], start, start + len(new))
            table.write(self.rows[key], start, own)
            slots += own.tolist()
            self.lengths[key] += len(new)
        table.apply_staged_writes()
        device = self.runner.device
        ids = torch.tensor([token for new in tokens.values() for token in new], device=device)
        rows = torch.tensor([self.rows[key] for key in tokens], device=device)
        lens = torch.tensor([self.lengths[key] for key in tokens], dtype=torch.int32, device=device)
        sizes = torch.tensor([len(new) for new in tokens.values()], dtype=torch.int32, device=device)
        out_cache_loc = torch.tensor(slots, device=device)
        if mode is ForwardMode.DECODE:
            return self.runner.prepare_forward_batch_decode(ids, rows, lens, out_cache_loc)
        batch = self.runner.prepare_forward_batch_extend(ids, rows, lens, sizes, lens - sizes, out_cache_loc)
        batch.forward_mode = mode or ForwardMode.EXTEND
        return batch

    def extend(
        self, tokens: dict[int, list[int]], execution: Execution = Execution.PLAIN, every_row: bool = False
    ) -> LogitsProcessorOutput:
        """Run such a pass. `every_row`: the head runs on all rows."""
        batch = self.batch(tokens)
        if every_row:
            batch.logits_indices = None
        return self.runner.forward(batch, execution)

    def decode(self, tokens: dict[int, int], execution: Execution = Execution.PLAIN) -> LogitsProcessorOutput:
        """One token for each sequence."""
        return self.runner.forward(self.batch({k: [t] for k, t in tokens.items()}, ForwardMode.DECODE), execution)


class Steps:
    """A runner and a scheduler, stepped by hand on this thread."""

    def __init__(self, runner: ModelRunner) -> None:
        assert runner.req_to_token_pool and runner.token_to_kv_pool_allocator and runner.token_to_kv_pool
        self.runner = runner
        kv = KVManager(runner.req_to_token_pool, runner.token_to_kv_pool_allocator, runner.token_to_kv_pool)
        self.scheduler = Scheduler(runner.server_config, runner.max_num_tokens, runner.model_spec.num_hidden_layers, kv)
        self.count = 0

    def request(self, prompt: list[int], max_tokens: int = 4, request_id: str | None = None, **params: Any) -> Request:
        self.count += 1
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **params})
        return Request(request_id or f"r{self.count}", prompt, sampling, max_tokens, seed=sampling.seed or 0)

    def add(self, prompt: list[int], max_tokens: int = 4, **params: Any) -> Request:
        request = self.request(prompt, max_tokens, **params)
        self.scheduler.add([request])
        return request

    def step(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        schedule = self.scheduler.schedule()
        output = self.runner.execute_model(schedule) or self.runner.sample_tokens()
        assert output is not None
        self.scheduler.launched(schedule)
        self.scheduler.update(schedule, output)
        self.scheduler.check_integrity()
        return schedule, output

    def run(self) -> list[tuple[SchedulerOutput, ModelRunnerOutput]]:
        """Step until no request is left; one step more tells the runner who finished."""
        steps = []
        while self.scheduler.has_work():
            steps.append(self.step())
        steps.append(self.step())
        return steps


def part_of(spec: ModelSpec, kind: str, state: torch.Tensor) -> torch.Tensor:
    """A kind's value in what is at its point, [tokens, ...] -> [tokens, width]: of one projection for q, k and v a slice."""
    if not spec.family.is_slice(kind):
        return state
    (heads, dim), (kv_heads, _) = spec.shape("q"), spec.shape("k")
    if not spec.family.by_head:
        return dict(zip("qkv", state.split([heads * dim, kv_heads * dim, kv_heads * dim], -1), strict=True))[kind]
    groups = state.unflatten(-1, (kv_heads, heads // kv_heads + 2, dim))
    return {
        "q": groups[..., :-2, :].flatten(-3),
        "k": groups[..., -2, :].flatten(-2),
        "v": groups[..., -1, :].flatten(-2),
    }[kind]


def random_ids(count: int, vocab: int = 97, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
