"""Every module of every native family against transformers, and requests beside one another, on each device.

What runs on CUDA runs on a CPU too, with the same bodies: there the backends are torch's and nothing is captured.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB, held, random_model
from helpers_devices import DEVICES, ways
from helpers_idle import left_behind
from helpers_runner import random_ids
from helpers_waits import WAIT, until
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from pymllm_interp import LM, SamplingParams
from pymllm_interp.attention import FlashInferAttnBackend
from pymllm_interp.client.calls.lm_arguments import with_tuning

PROMPT = random_ids(33, seed=3)
HALF: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 384, "intermediate_size": 320, "num_hidden_layers": 3, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.03,
}  # fmt: skip
HALF_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    # heads of the sizes that FlashInfer has kernels for; 9 over 3 is no power of two
    "llama-9-over-3": lambda: LlamaConfig(**{**HALF, "hidden_size": 576}, num_attention_heads=9, num_key_value_heads=3),
    "qwen3-4-over-1": lambda: Qwen3Config(**HALF, num_attention_heads=4, num_key_value_heads=1, head_dim=128),
    "gpt2-heads-of-64": lambda: GPT2Config(**{**HALF, "intermediate_size": None}, n_head=6),
    "gpt_neox-heads-of-64": lambda: GPTNeoXConfig(**HALF, num_attention_heads=6),
    "gemma2-heads-of-256": lambda: Gemma2Config(
        **HALF, num_attention_heads=4, num_key_value_heads=2, head_dim=256, sliding_window=16, attn_logit_softcapping=20.0
    ),
    "gemma3-heads-of-256": lambda: Gemma3TextConfig(
        **HALF, num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def half_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def folder(family: str) -> Path:
        made = tmp_path_factory.mktemp(family)
        random_model(HALF_CONFIGS[family]()).save_pretrained(made)
        return made

    return folder


@pytest.fixture(scope="module")
def half_lm(half_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    made: dict[tuple, LM] = {}

    def load(family: str, dtype: str, device: str, **options: Any) -> LM:
        key = (family, dtype, device, *options.items())
        if key not in made:
            size = {"kv_cache_tokens": 4096, "max_running_requests": 8, "capture_ring_bytes": 64 << 20, **options}
            made[key] = LM(half_folder(family), **with_tuning(dtype=dtype, device=device, **size))
        return made[key]

    yield load
    for lm in made.values():
        lm.shutdown()


# -- every module -----------------------------------------------------------------------------------


def tensor_of(output: Any) -> torch.Tensor:
    """The hidden state in what a module returns: attention modules, models and RoPE return several things."""
    if isinstance(output, torch.Tensor):
        return output
    return output[0]


@torch.no_grad()
def modules_of(model: Any, ids: list[int], new_tokens: int) -> list[list[tuple[str, torch.Tensor]]]:
    """For each pass of a greedy generation of transformers' model: (module path, output), in the order of their returns.

    Gemma 3's rotation is left out: the order of its two calls is that of a set.
    """
    twice = "model.rotary_emb" if model.config.model_type == "gemma3_text" else ""
    passes: list[list[tuple[str, torch.Tensor]]] = []

    def note(path: str, output: Any) -> None:
        passes[-1].append((path, tensor_of(output).clone()))

    handles = [
        module.register_forward_hook(lambda _module, _args, output, path=path: note(path, output))
        for path, module in model.named_modules()
        if path not in ("", twice)
        and not isinstance(module, torch.nn.ModuleList)
        and not path.endswith(".mlp.experts.act_fn")  # one call for each expert
    ]
    cache, tokens = None, ids
    for _ in range(new_tokens):
        passes.append([])
        out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache, tokens = out.past_key_values, [int(out.logits[0, -1].argmax())]
    for handle in handles:
        handle.remove()
    return passes


def wanted_of(output: torch.Tensor, path: str, actual: torch.Tensor) -> torch.Tensor:
    """What a trace should see of a module's output in transformers."""
    if path == "lm_head":
        return output[:, -1:]  # the head runs on the row that is sampled from
    # Norms of heads get the tokens first in all families, unlike Gemma 3's in transformers.
    return output if output.shape == actual.shape or output.dim() < 4 else output.transpose(1, 2)


def traced_modules(lm: LM, ids: list[int], expected: list[list[tuple[str, torch.Tensor]]]) -> list[list[torch.Tensor]]:
    """The outputs of the same modules in the same passes, read by one trace."""
    with lm.generate(ids, max_new_tokens=len(expected)) as tracer:
        seen = list().save()
        for step in tracer.iter[:]:
            seen.append([tensor_of(lm.get(f"{path}.output")).clone() for path, _ in expected[step]])
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CONFIGS)
def test_float32_equals_transformers_on_the_cpu_at_every_module_of_prefill_and_decode(family, device, lm_of, oracle):
    lm = lm_of(family, device=device, kv_cache_tokens=4096)
    expected = modules_of(oracle(family), PROMPT, 3)
    layers, least = CONFIGS[family]().num_hidden_layers, 10 if family.startswith("gpt") else 13
    assert all(len(modules) == len(expected[0]) >= least * layers + 4 for modules in expected)
    for step, (outputs, modules) in enumerate(zip(traced_modules(lm, PROMPT, expected), expected, strict=True)):
        for actual, (path, wanted) in zip(outputs, modules, strict=True):
            wanted = wanted_of(wanted, path, actual)
            assert actual.dtype is torch.float32
            torch.testing.assert_close(
                actual.cpu(), wanted, atol=1e-4, rtol=1e-4, msg=lambda text, at=f"pass {step}, {path}": f"{at}: {text}"
            )


@pytest.mark.thin(9)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", HALF_CONFIGS)
def test_half_precision_points_where_transformers_does_at_every_module(family, dtype, device, half_lm, half_folder):
    """transformers has the same rounded weights, and computes in float32."""
    lm = half_lm(family, dtype, device)
    assert isinstance(lm.runner.attn_backend, FlashInferAttnBackend) == (device == "cuda")
    model = AutoModelForCausalLM.from_pretrained(
        half_folder(family), dtype=lm.runner.dtype, attn_implementation="eager"
    )
    expected = modules_of(model.float().eval(), PROMPT, 2)
    for step, (outputs, modules) in enumerate(zip(traced_modules(lm, PROMPT, expected), expected, strict=True)):
        for actual, (path, wanted) in zip(outputs, modules, strict=True):
            wanted = wanted_of(wanted, path, actual)
            assert actual.shape == wanted.shape and actual.dtype is lm.runner.dtype, path
            worst = torch.cosine_similarity(actual.cpu().float(), wanted, dim=-1).min().item()
            assert worst >= 0.999, f"pass {step}, {path}: cosine {worst:.5f}"


# -- requests beside one another -----------------------------------------------------------------------


def together(lm: LM, prompts: list[list[int]], params: SamplingParams, *traces: Callable[[], None]) -> list[Any]:
    """The outputs of plain requests that are queued in one moment with these traces."""
    threads = [threading.Thread(target=trace, daemon=True) for trace in traces]
    with held(lm):
        handles = [lm.submit(prompt, params) for prompt in prompts]
        before = len(lm.engine._inbox)
        for thread in threads:
            thread.start()
        until(lambda: len(lm.engine._inbox) == before + len(threads))
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "a trace hangs"
    return [handle.result(WAIT) for handle in handles]


def assert_near(outs: list[Any], expected: list[Any], tolerance: float) -> None:
    """The same tokens, with log probabilities within the tolerance; where two tokens are as close, either may be drawn, and what
    follows is another text."""
    for out, wanted in zip(outs, expected, strict=True):
        assert out.outputs[0].error is None and len(out.token_ids) == len(wanted.token_ids)
        for i, (ours, theirs) in enumerate(zip(out.token_ids, wanted.token_ids, strict=True)):
            mine, other = out.logprobs[i], wanted.logprobs[i]
            assert ours in other, f"token {i}: {ours} is not among {list(other)}"
            gap = abs(mine[ours].logprob - other[ours].logprob)
            assert gap <= tolerance, f"token {i}: {gap:.4f} apart"
            if ours != theirs:
                margin = other[theirs].logprob - other[ours].logprob
                assert margin <= tolerance, f"token {i}: {ours} in place of {theirs}, {margin:.4f} more likely"
                break


@pytest.mark.few("family", "llama", "llama-9-over-3")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("qwen3", "float32"), ("gpt_neox", "float32"), ("llama-9-over-3", "bfloat16"),
     ("gpt2-heads-of-64", "bfloat16"), ("gemma2-heads-of-256", "bfloat16")],
)  # fmt: skip
def test_plain_requests_keep_their_tokens_beside_hooked_ones(family, dtype, device, lm_of, half_lm):
    """In float32 the tokens are the same. In bfloat16 the sums of another batch shape have other last bits."""
    options: dict[str, Any] = {"device": device, "kv_cache_tokens": 2048, "max_running_requests": 8}
    lm = lm_of(family, **options) if dtype == "float32" else half_lm(family, dtype, device)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5)
    prompts = [random_ids(n, seed=n) for n in (5, 17, 1, 33)]
    expected = lm.generate(prompts, params)
    before, receipts, row = ways(lm), [], lm.model_spec.family
    layer, projection = f"{row.layers}.0", row.points["q"].module.format(1)

    def zeroes() -> None:
        with lm.generate(PROMPT, max_new_tokens=20) as tracer:
            for _ in tracer.iter[:]:
                lm.get(layer).output[:] = 0
        receipts.append(tracer.receipt.steps)

    def scales() -> None:
        with lm.generate(PROMPT[:7], max_new_tokens=12) as tracer:
            for _ in tracer.iter[:]:
                lm.get(projection).output = lm.get(projection).output * -3
        receipts.append(tracer.receipt.steps)

    outs = together(lm, prompts, params, zeroes, scales)
    assert sorted(sum(steps.values()) for steps in receipts) == [12, 20]
    assert (ways(lm) - before)["replay" if device == "cuda" else "plain"] >= 3, "the last steps are plain ones"
    if dtype == "float32":
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert_near(outs, expected, 1e-4 if dtype == "float32" else 0.05)


@pytest.mark.thin(9)
@pytest.mark.few("family", "llama", "llama-9-over-3")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["split", "segments", "eager"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama-9-over-3", "bfloat16"), ("qwen3-4-over-1", "float16"),
     ("gpt_neox-heads-of-64", "float16"), ("gemma3-heads-of-256", "bfloat16")],
)  # fmt: skip
def test_saves_beside_others_are_those_of_the_request_alone(family, dtype, how, device, lm_of, half_lm):
    """However its steps run. It is told its tokens: where two are as close, either may be drawn."""
    options: dict[str, Any] = {"kv_cache_tokens": 2048, "max_running_requests": 8, "hook_execution": how}
    if dtype == "float32":
        lm = lm_of(family, device=device, **options)
    else:
        lm = half_lm(family, dtype, device, **options)
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [random_ids(n, seed=n) for n in (5, 17, 1, 33)]
    found: list[list[torch.Tensor]] = []
    row = lm.model_spec.family

    def saves() -> None:
        with lm.generate(PROMPT, max_new_tokens=20, logit_bias={7: 1e4}) as tracer:
            seen = list().save()
            for step in tracer.iter[:]:
                layers = [0, 1] if step % 3 else [1]
                for layer in layers:
                    seen.append(lm.get(row.points["z"].module.format(layer)).input[:, -1])
                    seen.append(lm.get(f"{row.layers}.{layer}").output[:, -1])
                seen.append(lm.logits.clone())
        found.append(seen)

    saves()
    before = ways(lm)
    together(lm, prompts, params, saves)
    ran = ways(lm) - before
    captured = how != "eager" and device == "cuda"
    assert ran["split"] >= 19 if how == "split" else ran["segments" if captured else "modules"] >= 19, ran
    alone, beside = found
    assert len(alone) == len(beside) == 20 + 2 * (2 * 13 + 7)
    for i, (one, other) in enumerate(zip(alone, beside, strict=True)):
        if dtype == "float32":
            torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)
        else:
            worst = torch.cosine_similarity(other.float(), one.float(), dim=-1).min().item()
            assert worst >= 0.999, f"save {i}: cosine {worst:.5f}"


@pytest.mark.few("family", "llama", "llama-9-over-3")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("mistral", "float32"), ("qwen3-4-over-1", "bfloat16"), ("gpt2-heads-of-64", "bfloat16"),
     ("gemma2-heads-of-256", "bfloat16")],
)  # fmt: skip
def test_chunks_change_nothing(family, dtype, device, lm_of, half_lm):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=0)
    prompts = [random_ids(n, seed=n) for n in (100, 3, 64, 7, 1, 33)]
    runs = []
    for rows in (1024, 24):
        options = {"max_num_tokens": rows, "max_running_requests": 8, "kv_cache_tokens": 2048}
        made = (
            lm_of(family, device=device, **options) if dtype == "float32" else half_lm(family, dtype, device, **options)
        )
        runs.append(made.generate(prompts, params))
    tolerance = 1e-4 if dtype == "float32" else 0.05
    whole, chunked = runs
    if dtype == "float32":
        assert [out.token_ids for out in chunked] == [out.token_ids for out in whole]
    assert_near(chunked, whole, tolerance)
    for prompt, ours, theirs in zip(prompts, chunked, whole, strict=True):
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs) == len(prompt)
        for i, token in enumerate(prompt[1:], start=1):
            gap = abs(ours.prompt_logprobs[i][token].logprob - theirs.prompt_logprobs[i][token].logprob)
            assert gap <= tolerance, f"prompt token {i}: {gap:.5f} apart"


@pytest.mark.parametrize("device", DEVICES)
def test_aborts_and_preemption_under_load_leave_every_slot_free(device, lm_of):
    """And preempted requests have the tokens of an engine with room. Steps run ahead on both devices."""
    options: dict[str, Any] = {"device": device, "max_running_requests": 8, "async_scheduling": True}
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(40)]
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = [out.token_ids for out in lm_of("llama", kv_cache_tokens=2048, **options).generate(prompts, params)]
    lm = lm_of("llama", kv_cache_tokens=160, max_num_tokens=64, **options)
    before, seen = lm.engine.stats(), []

    def trace() -> None:
        with lm.generate(prompts[0], max_new_tokens=20) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[1].output.save()
            seen.append(tracer.result)

    for _ in range(2):
        traces = [threading.Thread(target=trace, daemon=True) for _ in range(3)]
        handles = [lm.submit(prompt, params) for prompt in prompts]
        cancelled = handles[1::3]
        for thread in traces:
            thread.start()
        for handle in cancelled:  # some in the midst of their steps, most before they have had any
            if rng.random() < 0.3:
                until(lambda handle=handle: handle.done or bool(handle.requests[0].output_token_ids))
            handle.cancel()
        for handle, tokens in zip(handles, expected, strict=True):
            out = handle.result(WAIT)
            if out.finish_reason != "abort":
                assert out.token_ids == tokens
            else:
                assert handle in cancelled and out.token_ids == tokens[: len(out.token_ids)]
        for thread in traces:
            thread.join(WAIT)
            assert not thread.is_alive(), "a trace hangs"
    after = lm.engine.stats()
    assert after["preempted"] > before["preempted"] and after["overlapped_steps"] > before["overlapped_steps"]
    assert [ids[0, len(prompts[0]) :].tolist() for ids in seen] == [expected[0][:20]] * 6
    assert left_behind(lm) == {}
