"""Steps before the first request: kernels that no CUDA graph holds are compiled and loaded.

Otherwise the first requests wait for the compiler. On an H200, the first 512 requests of a new engine took two seconds longer.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.pass_parts import EncoderInput
from ..core.request import Request
from ..core.sampling_params import SamplingParams
from ..runner.interp_model_runner import InterpModelRunner
from .cross_pages import CrossPages
from .kv_manager import KVManager
from .scheduler import Scheduler

NEW_TOKENS = 2
SHORT = 3
"""Tokens of a short prompt."""
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
SAMPLED = SamplingParams(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    logprobs=1, max_tokens=NEW_TOKENS,
)  # fmt: skip


def warm_up(runner: InterpModelRunner) -> None:
    """Generate a few tokens, greedy and sampled. Some prompts run as a graph, and one is too long for it.

    The runner has no requests yet, and has none afterwards. Neither its prefix cache nor its counters know of these.
    """
    rows, allocator, kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool_allocator, runner.token_to_kv_pool
    assert rows is not None and allocator is not None and kv_pool is not None, "call initialize() first"
    cross, blank, num_layers = runner.cross_pool, runner.get_model().blank_input, runner.model_spec.num_hidden_layers
    kv = KVManager(rows, allocator, kv_pool, cross=None if cross is None else CrossPages(cross))
    scheduler = Scheduler(runner.server_config, runner.max_num_tokens, num_layers, kv)
    most = min(runner.max_num_tokens, runner.max_total_num_tokens, runner.context_len) - NEW_TOKENS
    if most < 2 * SHORT or runner.max_running_requests < 2:
        return
    runner.kv_connector.set_disabled(True)
    for params in (GREEDY, SAMPLED):
        long = min(runner.server_config.prefill_graph_tokens + 1, most - SHORT)
        for lengths in ([long], [SHORT, SHORT]):
            scheduler.add(_request(i, length, params, blank) for i, length in enumerate(lengths))
            while scheduler.has_work():
                _step(runner, scheduler)
    _step(runner, scheduler)  # the last requests are dropped
    if runner.drafter is not None:
        prompts = [Request(f"warm-up-{i}", [0] * SHORT, GREEDY, SHORT, seed=0) for i in range(2)]
        runner.drafter.propose(prompts, NEW_TOKENS)
    if runner.device.startswith("cuda"):
        torch.cuda.synchronize()
    runner.kv_connector.set_disabled(False)
    runner.partition.counts.clear()
    runner.forward_pass_id = 0


def _request(index: int, length: int, params: SamplingParams, encoder: EncoderInput | None) -> Request:
    logprobs: list[Any] | None = [] if params.logprobs else None
    return Request(f"warm-up-{index}", [0] * length, params, NEW_TOKENS, seed=0, logprobs=logprobs, encoder=encoder)


def _step(runner: InterpModelRunner, scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    if runner.execute_model(step) is None:
        output = runner.sample_tokens()
        assert output is not None
        scheduler.launched(step)
        scheduler.update(step, output)
