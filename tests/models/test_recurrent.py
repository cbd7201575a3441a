"""Models with recurrent states, native or by their classes: equal to transformers in chunks, batches, slots and preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import write_adapter
from helpers_classes import (
    GREEDY,
    TOLERANCE,
    check_chunks,
    check_preempted,
    check_samples,
    greedily,
    load,
    oracle_of,
    random_prompt,
    state_gradient,
)
from recurrent_configs import RECURRENT
from registry_configs import registry_config

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.handle import RequestError
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.interventions import Knockout
from pymllm_interp.layers import delta
from pymllm_interp.mem_cache.state_pool import StateLayout, StatePool, slot_bytes
from pymllm_interp.models.adapters.peft_config import AdapterError
from pymllm_interp.models.transformers.structure import config_spec
from pymllm_interp.models.transformers.transformers_model import load_transformers_model
from pymllm_interp.runner.model_runner import ModelRunner

NATIVE = "qwen3_5_text", "qwen3_next"
PILOTS = *NATIVE, "qwen3_5_moe_text", "nemotron_h", "mamba", "zaya", "minimax", "rwkv"
"""One of each kind: native, delta rule, state-space with and without attention, two states in an attention, caches of their own."""


@pytest.mark.parametrize("name", PILOTS)
def test_chunks_of_any_size_are_transformers(name: str) -> None:
    check_chunks(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECURRENT if name not in PILOTS])
def test_chunks_of_any_size_are_transformers_in_every_family(name: str) -> None:
    check_chunks(name)


@pytest.mark.few("name", "qwen3_5_text", "nemotron_h", "zaya", "rwkv")
@pytest.mark.parametrize("name", PILOTS)
def test_preempted_requests_end_as_they_would_alone(name: str) -> None:
    check_preempted(name)


def test_a_traced_request_takes_its_states_to_the_host_and_back() -> None:
    lm = load("qwen3_next", kv_cache_tokens=48, max_model_len=40, lower_traces="off")
    oracle, prompts = oracle_of(lm, "qwen3_next"), [random_prompt(12, n) for n in range(4)]
    with lm.generate(max_new_tokens=16, ignore_eos=True) as tracer:
        found = dict().save()
        for i in range(4):
            with tracer.invoke(prompts[i]):
                for step in tracer.iter[0:16]:
                    found[i, step] = lm.lm_head.output[0, -1].argmax(-1)
    assert lm.engine.scheduler.num_swapped > 0
    for i, prompt in enumerate(prompts):
        assert [int(found[i, step]) for step in range(16)] == greedily(oracle, prompt, 16)
    lm.shutdown()


@pytest.mark.parametrize("name", ["qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in PILOTS[2:4])])
def test_many_requests_through_three_slots_leave_nothing_behind(name: str) -> None:
    """All memory of states is NaN at first, and again after each fifth of the requests."""
    lm = load(name, max_running_requests=3, max_num_tokens=32)
    oracle, prompts = oracle_of(lm, name), [random_prompt(1 + n % 9, n) for n in range(10)]
    expected = [greedily(oracle, prompt, 2) for prompt in prompts]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for _ in range(5):
        for state in lm.runner.gdn_pool.states:
            state.fill_(float("nan"))
        outs = lm.generate(prompts * 4, params)
        assert [out.token_ids for out in outs] == expected * 4
    lm.engine.call(lm.engine.scheduler.check_integrity)
    lm.shutdown()


def fail_once(monkeypatch: pytest.MonkeyPatch, lm: LM) -> None:
    """Have a pass with a prompt run out of memory in the second layer with states."""
    pool: Any = lm.runner.gdn_pool
    if lm.runner.get_model().fuses_ops:
        failed: list[None] = []

        def fail_mix(*args: Any) -> torch.Tensor:
            states, batch = args[-2:]
            if batch.forward_mode.is_extend() and states.conv is pool.states[2] and not failed:
                failed.append(None)
                raise torch.OutOfMemoryError("once")
            return delta.mix(*args)

        for module in lm.runner.get_model().modules():
            if hasattr(module, "_mix"):
                monkeypatch.setattr(module, "_mix", fail_mix)
        return
    written: list[Any] = [0]
    write = pool.write

    def fail(index: int, *args: Any) -> None:
        written.append(index)
        if written[-2:] == [1, 0] and "out" not in written:  # the second call of the first module in one pass
            written.append("out")
            raise torch.OutOfMemoryError("once")
        write(index, *args)

    monkeypatch.setattr(pool, "write", fail)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_failed_pass_updates_no_state_twice(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's step runs out of memory behind the first state of a request that decodes beside it, which starts over."""
    lm = load("qwen3_next", impl=impl)
    oracle, prompts = oracle_of(lm, "qwen3_next"), [random_prompt(n, n) for n in (5, 9)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    pieces = lm.stream(prompts[0], params)
    tokens = list(next(pieces).token_ids)
    fail_once(monkeypatch, lm)
    with pytest.raises(RequestError, match="ran out of memory"):
        lm.submit(prompts[1], params).result()
    for piece in pieces:
        tokens += piece.token_ids
    assert tokens == greedily(oracle, prompts[0], 40)
    lm.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["mamba", "zamba", "recurrent_gemma", "nemotron_h", "qwen3_next", "minimax"])
def test_modules_that_ignore_their_state_are_found_in_each_dtype(name: str, dtype: str) -> None:
    config = registry_config(name)
    model = load_transformers_model(config, config_spec(config, getattr(torch, dtype)), "cpu", None, 0)
    found = {module.part_module.by_token for module in model.modules() if hasattr(module, "part_module")}  # pyright: ignore
    assert found == {name in ("mamba", "zamba", "recurrent_gemma")}


def test_samples_of_one_prompt_are_samples_of_it_alone() -> None:
    check_samples("nemotron_h")


def test_a_steered_request_leaves_others_as_they_are() -> None:
    lm = load("qwen3_next")
    oracle, prompts = oracle_of(lm, "qwen3_next"), [random_prompt(n, n) for n in (20, 7)]
    steer = Steer("resid_post.0", torch.ones(32) * 4)
    layer = oracle.get_submodule("model.layers.0")
    plain = [greedily(oracle, prompt, 6) for prompt in prompts]
    handle = layer.register_forward_hook(lambda module, args, output: output + 4)
    steered = greedily(oracle, prompts[0], 6)
    handle.remove()
    handles = [
        lm.submit(prompts[0], GREEDY, interventions=[steer]), lm.submit(prompts[0], GREEDY), lm.submit(prompts[1], GREEDY)
    ]  # fmt: skip
    assert [handle.result().token_ids for handle in handles] == [steered, *plain]
    assert steered != plain[0]
    lm.shutdown()


@pytest.mark.parametrize("name", [*NATIVE, "nemotron_h", "lfm2", "kimi_linear"])
def test_ops_at_the_mixers_of_all_layers_are_hooks_of_transformers(name: str) -> None:
    """Of layers with states, and of layers with attention, which return tuples."""
    lm = load(name)
    oracle, prompt, point = oracle_of(lm, name), random_prompt(20, 4), lm.model_spec.family.points["attn_out"]
    plain = greedily(oracle, prompt, 6)

    def edit(module: Any, args: Any, output: Any) -> Any:
        return (output[0] + 3, *output[1:]) if isinstance(output, tuple) else output + 3

    for layer in range(lm.model_spec.num_hidden_layers):
        handle = oracle.get_submodule(point.module.format(layer)).register_forward_hook(edit)
        expected = greedily(oracle, prompt, 6)
        handle.remove()
        steer = Steer(f"attn_out.{layer}", torch.full((32,), 3.0))
        handles = [lm.submit(prompt, GREEDY, interventions=[steer]), lm.submit(prompt, GREEDY)]
        assert [handle.result().token_ids for handle in handles] == [expected, plain] and expected != plain
    lm.shutdown()


def test_gradients_of_a_prompt_are_those_of_transformers() -> None:
    lm = load("nemotron_h", max_num_tokens=64)
    oracle, prompt = oracle_of(lm, "nemotron_h"), random_prompt(9, 1)
    with lm.trace(prompt):
        hidden = lm.get("model.layers.0").output
        with lm.lm_head.output[0, -1].square().sum().backward():
            found = hidden.grad.save()
    torch.testing.assert_close(found, state_gradient(oracle, prompt), **TOLERANCE)
    lm.shutdown()


def test_r08_v50_the_pool_of_states_is_there_between_initialize_and_shutdown() -> None:
    """R8, V50."""
    config = ModelConfig(model="dummy", load_format="dummy", hf_config=registry_config("qwen3_next"), dtype="float32")
    runner = ModelRunner(
        ServerConfig(device="cpu", kv_cache_tokens=64, max_running_requests=2, max_model_len=32), config
    )
    assert runner.gdn_pool is None
    runner.initialize()
    pool = runner.gdn_pool
    assert isinstance(pool, StatePool) and pool.size == 2 and pool.nbytes > 0
    assert runner.get_model().spec.has_states and runner.num_kv_layers == 1
    runner.shutdown()
    assert runner.gdn_pool is None and pool.nbytes == 0


def test_a_slot_holds_what_was_written_and_no_state_of_another_shape() -> None:
    layouts = [StateLayout("conv", (3, 4), torch.float32), StateLayout("recurrent", (2, 5), torch.float32)]
    pool = StatePool(layouts, 2, torch.bfloat16, "cpu")
    assert pool.nbytes == 3 * slot_bytes(layouts, torch.bfloat16) == 3 * (12 * 4 + 10 * 2)
    slots, values = torch.tensor([2, 0]), torch.randn(2, 2, 5)
    pool.write(1, slots, values)
    torch.testing.assert_close(pool.read(1, slots), values.bfloat16().float())
    assert not pool.states[1][1].any()
    host = pool.swap_out(2)
    pool.swap_in(1, host)
    assert torch.equal(pool.states[1][1], pool.states[1][2]) and host.nbytes == 12 * 4 + 10 * 2
    with pytest.raises(ValueError, match=r"a state of shape \(5, 2\), but the slots have \(2, 5\)"):
        pool.write(1, slots, values.transpose(1, 2))


def test_states_in_half_precision_take_half_the_memory() -> None:
    pools = []
    for dtype in ("float32", "bfloat16"):
        lm = load("nemotron_h", state_dtype=dtype)
        (out,) = lm.generate([random_prompt(20, 1)], GREEDY)
        assert len(out.token_ids) == 6
        pools.append([state.nbytes for state in lm.runner.gdn_pool.states if state.ndim == 4])
        lm.shutdown()
    assert pools[0] == [2 * size for size in pools[1]] != []


def test_stats_say_why_no_prefix_is_reused() -> None:
    lm = load("qwen3_next", state_cache_bytes=0)
    prompt = random_prompt(30, 2)
    outs = [lm.generate([prompt], GREEDY)[0] for _ in range(2)]
    stats = lm.engine.stats()
    assert outs[1].num_cached_tokens == 0 and stats["prefix_cache"]["kept_tokens"] == 0
    assert stats["states"]["slots"] == 4 and stats["states"]["bytes"] == lm.runner.gdn_pool.nbytes
    assert stats["states"]["snapshots"]["places"] == 0 and "state_cache_bytes" in stats["prefix_cache"]["off"]
    lm.shutdown()


def test_the_kv_pool_has_the_attention_layers_only() -> None:
    lm = load("qwen3_next")
    assert lm.model_spec.num_hidden_layers == 3 and lm.runner.token_to_kv_pool.num_layers == 1
    lm.shutdown()
    lm = load("mamba")
    assert lm.runner.token_to_kv_pool.num_layers == 0
    lm.shutdown()


def test_requests_without_room_for_their_states_do_not_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load("nemotron_h")
    a_slot = lm.runner.gdn_pool.nbytes // 5
    lm.shutdown()
    monkeypatch.setattr("pymllm_interp.runner.device_memory.pool_room", lambda runner: 8 * a_slot)
    lm = load("nemotron_h")
    assert lm.runner.max_running_requests == lm.runner.gdn_pool.size == 3
    lm.shutdown()


def test_native_families_refuse_what_has_no_edges() -> None:
    lm = load("qwen3_5_text")
    with pytest.raises(ValueError, match=r"Knockout\(.*qwen3_5_text.*recurrent states.*no edges"):
        lm.generate([random_prompt(9, 1)], GREEDY, interventions=[Knockout(layer=0, from_=[3], to=[1])])
    with pytest.raises(ValueError, match=r"qwen3_5_text.*recurrent states.*no patterns"):
        lm.generate([random_prompt(9, 1)], GREEDY, capture=["pattern.0"])
    lm.shutdown()


def test_what_states_do_not_allow_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"speculative=.*qwen3_next.*recurrent states"):
        load("qwen3_next", speculative={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="state_dtype='float16'"):
        load("qwen3_next", state_dtype="float16")
    lm = load("qwen3_next", impl="transformers")
    prompt = random_prompt(9, 1)
    with pytest.raises(ValueError, match=r"Knockout\(.*qwen3_next.*recurrent states.*no edges"):
        lm.generate([prompt], GREEDY, interventions=[Knockout(layer=0, from_=[3], to=[1])])
    with pytest.raises(ValueError, match=r"qwen3_next.*recurrent states.*no patterns"):
        lm.generate([prompt], GREEDY, capture=["pattern.0"])
    with pytest.raises(ValueError, match=r"linear_attn\.source.*recurrent state"):
        lm.get("model.layers.0.linear_attn").source  # noqa: B018
    folder = write_adapter(tmp_path, oracle_of(lm, "qwen3_next"), targets=["in_proj_ba"])
    with pytest.raises(AdapterError, match=r"inside model\.layers\.0\.linear_attn, which has a recurrent state"):
        lm.adapters.load("a", folder)
    lm.shutdown()
