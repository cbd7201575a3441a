"""The engine on a CUDA device: FlashInfer, CUDA graphs, and traced requests beside replayed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model
from helpers_devices import ways
from helpers_gpu import CONFIGS
from helpers_runner import random_ids

from pymllm_interp import LM, Gate, SamplingParams, Steer
from pymllm_interp.attention import FlashInferAttnBackend, TorchAttnBackend
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.runner import ModelRunner
from pymllm_interp.runner.async_output import AsyncOutput, output_copy_stream

pytestmark = pytest.mark.gpu

PROMPTS = [random_ids(n, seed=n) for n in (5, 1, 17, 33, 16)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family, config in CONFIGS.items():
        made[family] = tmp_path_factory.mktemp(f"gpu-{family}")
        random_model(config()).save_pretrained(made[family])
    return made


@pytest.fixture(scope="module")
def gpu_lm(folders: dict[str, Path]) -> Iterator[Callable[..., LM]]:
    made: dict[tuple, LM] = {}

    def load(family: str, dtype: str = "bfloat16", device: str = "cuda", **options: Any) -> LM:
        key = (family, dtype, device, *options.items())
        if key not in made:
            size = {
                "kv_cache_tokens": 4096,
                "max_running_requests": 8,
                "capture_ring_bytes": 64 << 20,
                "lower_traces": "off",
                **options,
            }
            made[key] = LM(folders[family], **with_tuning(dtype=dtype, device=device, **size))
        return made[key]

    yield load
    for lm in made.values():
        lm.shutdown()


@pytest.mark.parametrize("family", CONFIGS)
def test_half_precision_takes_flashinfer_and_plain_decode_replays(gpu_lm, family):
    lm = gpu_lm(family)
    assert isinstance(lm.runner.attn_backend, FlashInferAttnBackend)
    before = ways(lm)
    outs = lm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    assert [len(out.token_ids) for out in outs] == [8] * 5 and {out.finish_reason for out in outs} == {"length"}
    ran = ways(lm) - before
    assert ran["replay"] == 8 and not ran["modules"], dict(lm.runner.partition.counts)


def test_a_gate_does_not_count_the_step_behind_the_last_token(gpu_lm):
    lm = gpu_lm("llama")
    probe = torch.zeros(lm.backend.facts.spec.hidden_size)
    op = Steer("resid_post.0", probe, when=Gate(probe, -1.0))
    lengths = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = [out.token_ids for out in lm.generate(PROMPTS, lengths)]
    stops = [SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[each[6]]) for each in tokens]
    outs = lm.generate(PROMPTS, stops, interventions=[op])
    for prompt, out in zip(PROMPTS, outs, strict=True):
        applied = out.receipt.interventions[0]
        assert out.finish_reason == "stop" and applied.prompt_rows == len(prompt)
        assert (
            applied.gate_fires == applied.prompt_rows + applied.generated_rows == len(prompt) + len(out.token_ids) - 1
        )


def test_what_comes_behind_a_step_does_not_wait_for_its_tokens_to_leave(gpu_lm, monkeypatch):
    """V5, V47: they leave on a stream of their own, which is held up here."""
    lm, params = gpu_lm("llama"), SamplingParams(temperature=0, max_tokens=8)
    expected = [out.token_ids for out in lm.generate(PROMPTS, params)]
    runner = type(lm.runner)
    sample, on_their_way = runner.sample_tokens_async, []

    def held_up(self: ModelRunner) -> AsyncOutput | None:
        with torch.cuda.stream(output_copy_stream(torch.device("cuda", torch.cuda.current_device()))):
            torch.cuda._sleep(10**8)  # cycles: some 50 ms
        sampled = sample(self)
        assert sampled is not None
        behind = torch.cuda.Event()
        behind.record()
        behind.synchronize()
        assert sampled._copied is not None
        on_their_way.append(not sampled._copied.query())
        return sampled

    monkeypatch.setattr(runner, "sample_tokens_async", held_up)
    assert [out.token_ids for out in lm.generate(PROMPTS, params)] == expected
    assert len(on_their_way) >= 8 and all(on_their_way)


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_runs_with_graphs_equal_those_without(gpu_lm, family):
    """Logits of bf16 differ in their last bits between batch shapes, so tokens may part where two are close: each token's own
    log probability is compared up to there."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    graphs = gpu_lm(family).generate(PROMPTS, params)
    eager = gpu_lm(family, disable_cuda_graph=True).generate(PROMPTS, params)
    assert gpu_lm(family, disable_cuda_graph=True).runner.graph_runner is None
    for with_graphs, without in zip(graphs, eager, strict=True):
        for i, (a, b) in enumerate(zip(with_graphs.token_ids, without.token_ids, strict=True)):
            ours, theirs = with_graphs.logprobs[i], without.logprobs[i]
            if a != b:
                gap = abs(theirs[a].logprob - theirs[b].logprob) if a in theirs else 1.0
                assert gap < 0.05, f"token {i}: {a} with graphs, {b} without, {gap:.3f} apart"
                break
            assert abs(ours[a].logprob - theirs[b].logprob) < 0.05, (
                f"token {i}: {ours[a]} with graphs, {theirs[b]} without"
            )


def test_a_hooked_decode_step_runs_in_segments_and_the_others_replay(gpu_lm):
    lm = gpu_lm("llama")
    prompt = PROMPTS[2]
    before = ways(lm)
    with lm.generate(prompt, max_new_tokens=6) as tracer:
        first = lm.model.layers[1].output.save()
        logits = list().save()
        for _ in tracer.iter[:]:
            logits.append(lm.lm_head.output[0, -1])
    assert len(logits) == 6 and first.shape == (1, 17, 384)
    assert tracer.receipt.steps == {"segments": 6}
    with lm.generate(prompt, max_new_tokens=6) as tracer:
        h = lm.model.layers[1].output.save()
    assert tracer.receipt.steps == {"segments": 1, "replay": 5}
    assert torch.equal(h, first), "the same pass in the same batch shape"
    assert (ways(lm) - before)["replay"] == 5


@pytest.mark.parametrize("family", CONFIGS)
def test_float32_takes_torch_and_its_tokens_equal_the_cpus_and_replay(gpu_lm, family):
    lm, params = gpu_lm(family, "float32"), SamplingParams(temperature=0, max_tokens=10)
    assert isinstance(lm.runner.attn_backend, TorchAttnBackend)
    before = ways(lm)
    tokens = [out.token_ids for out in lm.generate(PROMPTS, params)]
    assert (ways(lm) - before)["replay"] == 10
    assert tokens == [out.token_ids for out in gpu_lm(family, "float32", "cpu").generate(PROMPTS, params)]


def test_seeded_samples_of_chunked_prompts_are_drawn_again(gpu_lm):
    """Chunked prefill, mixed steps, and more requests than fit one step."""
    lm = gpu_lm("llama", max_num_tokens=48)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=6)
    prompts = [random_ids(n, seed=n) for n in (100, 3, 64, 7, 130, 1, 20, 33, 16, 5)]
    first, again = ([out.token_ids for out in lm.generate(prompts, params)] for _ in range(2))
    assert [len(tokens) for tokens in first] == [6] * 10 and first == again
    lm.engine.call(lm.engine.scheduler.check_integrity)


def test_gradients_flow_on_the_device(gpu_lm):
    lm = gpu_lm("llama")
    with lm.trace(PROMPTS[0]):
        h = lm.model.layers[0].output
        loss = lm.lm_head.output[0, -1].float().logsumexp(-1)
        with loss.backward():
            grad = h.grad.save()
    assert grad.shape == (1, 5, 384) and grad.isfinite().all() and grad.abs().sum() > 0
