"""Several prompts in one block on a CUDA device, with graphs and segments. float32 on the CPU is the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model
from helpers_gpu import CONFIGS
from helpers_runner import random_ids

from pymllm_interp import LM, SamplingParams, Scale
from pymllm_interp.client.calls.lm_arguments import with_tuning

pytestmark = pytest.mark.gpu

PROMPTS = [random_ids(n, seed=n) for n in (17, 5, 1, 16)]
EQUAL = [random_ids(9, seed=n) for n in range(3)]
LISTS = {"ragged": PROMPTS, "equal": EQUAL}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LM, LM]]:
    """An LM on the device in bfloat16, and one on the CPU in float32."""
    folder = tmp_path_factory.mktemp("gpu-batches")
    random_model(CONFIGS[request.param]()).save_pretrained(folder)
    options: dict[str, Any] = {"kv_cache_tokens": 2048, "max_running_requests": 8}
    with LM(Path(folder), **with_tuning(dtype="bfloat16", device="cuda", capture_ring_bytes=64 << 20, **options)) as lm:
        with LM(Path(folder), dtype="float32", device="cpu", **options) as oracle:
            yield lm, oracle


def assert_similar(ours: Any, theirs: Any) -> None:
    """Rounded to bfloat16."""
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape and mine.isfinite().all()
        assert torch.cosine_similarity(mine.detach().cpu().float().flatten(), other.flatten(), dim=0) > 0.995


def one_pass(lm: LM, prompts: list[list[int]]) -> list[torch.Tensor]:
    with lm.trace(prompts):
        lm.model.layers[0].mlp.output[:, -1] *= 2
        lm.model.layers[0].output = lm.model.layers[0].output * 1.5
        state = lm.model.layers[-1].output.save()
        logits = lm.lm_head.output.save()
    return [state, logits]


def generated(lm: LM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Tokens are forced, so that both models go the same way."""
    with lm.generate(prompts, max_new_tokens=6, ignore_eos=True) as tracer:
        states = list().save()
        for step in tracer.iter[:]:
            states.append(lm.model.layers[0].output)
            lm.model.layers[0].output[:, -1] *= 1.5
            states.append(lm.logits)
            lm.samples = torch.full_like(lm.samples, 5 + step)
    return states


def whole_batch(lm: LM, prompts: list[list[int]]) -> list[torch.Tensor]:
    with lm.trace() as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                lm.model.layers[0].output[:, -1] *= 2
        with tracer.invoke():
            state = lm.model.layers[0].output.save()
            lm.model.layers[-1].output[0, -1] = 1.0
            logits = lm.lm_head.output[:, -1].save()
    return [state, logits]


def gradients(lm: LM, prompts: list[list[int]]) -> list[torch.Tensor]:
    with lm.trace(prompts):
        state = lm.model.layers[0].output
        loss = lm.lm_head.output[:, -1].float().logsumexp(-1).sum()
        with loss.backward():
            gradient = state.grad.save()
    return [gradient]


@pytest.mark.parametrize("which", LISTS)
@pytest.mark.parametrize("script", [one_pass, generated, whole_batch, gradients], ids=lambda script: script.__name__)
def test_a_batch_of_prompts_on_the_device(pair: tuple[LM, LM], script: Callable[..., Any], which: str) -> None:
    lm, oracle = pair
    prompts, plain = LISTS[which], SamplingParams(temperature=0, max_tokens=40)
    (alone,) = lm.generate([[3, 4, 5]], plain)
    beside = lm.submit([3, 4, 5], plain)
    found = script(lm, prompts)
    assert beside.result().token_ids[:1] == alone.token_ids[:1]
    assert_similar(found, script(oracle, prompts))


def test_a_generation_of_several_prompts_runs_in_graph_segments(pair: tuple[LM, LM]) -> None:
    lm, _ = pair
    with lm.generate(EQUAL, max_new_tokens=12, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[0].output[:, -1] *= 1.5
    assert sum(n for how, n in tracer.receipt.steps.items() if "segments" in str(how).lower()) >= 8, (
        tracer.receipt.steps
    )


def test_hooks_of_transformer_lens_on_the_device(pair: tuple[LM, LM]) -> None:
    lm, oracle = pair

    def hook(value: torch.Tensor, hook: Any) -> torch.Tensor:
        return value * 0.5

    prompt = PROMPTS[0]
    for site in ("blocks.0.hook_resid_mid", "blocks.0.attn.hook_z", "blocks.1.hook_mlp_out"):
        ours, theirs = (model.run_with_hooks(prompt, fwd_hooks=[(site, hook)]) for model in (lm, oracle))
        assert_similar([ours], [theirs])
    (scaled,) = lm.forward([prompt], interventions=[Scale("mlp_out.1", 0.5)])
    assert_similar([scaled.logits], [theirs[0]])
    logits, cache = lm.run_with_cache(prompt)
    expected, cached = oracle.run_with_cache(prompt)
    assert_similar([logits, cache["resid_post", 1]], [expected, cached["resid_post", 1]])


def test_async_traces_on_the_device(pair: tuple[LM, LM]) -> None:
    lm, oracle = pair

    async def one(model: LM, prompt: list[int]) -> torch.Tensor:
        async with model.trace(prompt):
            state = model.model.layers[0].output.save()
        return state

    async def all_of(model: LM) -> list[torch.Tensor]:
        return await asyncio.gather(*(one(model, prompt) for prompt in PROMPTS))

    assert_similar(asyncio.run(all_of(lm)), asyncio.run(all_of(oracle)))


def test_saved_parts_of_a_graph_stay_on_the_device(pair: tuple[LM, LM]) -> None:
    lm, oracle = pair
    found = []
    for model in (lm, oracle):
        with model.trace(PROMPTS[0]):
            state = model.model.layers[0].output.save()
            state.retain_grad()
            loss = model.lm_head.output[0, -1].float().logsumexp(0).save()
        loss.backward()
        assert state.device == model.device
        found.append([state.grad])
    assert_similar(*found)
