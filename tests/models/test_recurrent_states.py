"""`state.i`: recurrent states, captured behind asked positions and patched at the prompt's end. Equal to transformers' cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_classes import GREEDY, TOLERANCE, greedily, load, oracle_of, random_prompt
from helpers_graphs import use_eager_graphs

from pymllm_interp import Capture, Gate, Patch, SamplingParams, Steer
from pymllm_interp.hooks.kv_edits import KVEdits

FAMILIES = "qwen3_next", "nemotron_h", "mamba"
"""Native; with attention by its class; without attention, its later chunks token by token."""
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen3_5_text", "bamba", "zamba", "kimi_linear", "minimax", "rwkv")
]


def states_behind(oracle: Any, ids: list[int]) -> dict[int, torch.Tensor]:
    """The recurrent states of transformers' cache behind these tokens, by layer."""
    output = oracle(input_ids=torch.tensor([ids]), use_cache=True)
    cache = output.get("past_key_values", output.get("cache_params"))
    if "state" in output:  # RWKV's
        return dict(enumerate(torch.stack(output.state[2:], 1)[0].unbind(-1)))
    found: dict[int, torch.Tensor] = {}
    for layer in range(oracle.config.num_hidden_layers):
        if hasattr(cache, "linear_cache"):  # MiniMax's
            state = cache.get_linear_cache(layer) if layer < len(cache.linear_cache) else None
        else:
            state = getattr(cache.layers[layer], "recurrent_states", {}).get(0)
        if isinstance(state, torch.Tensor):
            found[layer] = state[0]
    return found


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_captured_states_are_transformers(name: str) -> None:
    """Of several requests at once, in the prompt and in the generation, behind a reused prefix and without one."""
    lm = load(name)
    oracle, prompts = oracle_of(lm, name), [random_prompt(n, n) for n in (21, 9, 2)]
    lm.generate(prompts, GREEDY)  # so that there is a prefix
    asked = [[3, 7, 12, 20], [0, -1], "all"]
    outs = lm.generate(prompts, GREEDY, capture=[[Capture("state.*", positions=each)] for each in asked])
    for ids, positions, out in zip(prompts, asked, outs, strict=True):
        assert out.token_ids == greedily(oracle, ids, 6)
        tokens = ids + out.token_ids[:-1]
        at = list(range(len(tokens))) if positions == "all" else sorted(p % len(ids) for p in positions)
        layers = states_behind(oracle, tokens)
        assert {f"state.{layer}" for layer in layers} == set(out.activations) and layers
        for row, position in enumerate(at):
            for layer, expected in states_behind(oracle, tokens[: position + 1]).items():
                state = out.activations[f"state.{layer}"]
                assert state.shape[0] == len(at)
                torch.testing.assert_close(state[row], expected, **TOLERANCE)
    lm.engine.call(lm.engine.scheduler.check_integrity)
    lm.shutdown()


def test_states_of_preempted_requests_are_captured_once() -> None:
    lm = load("qwen3_next", kv_cache_tokens=48, max_model_len=40)
    oracle, prompts = oracle_of(lm, "qwen3_next"), [random_prompt(12, n) for n in range(4)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    outs = lm.generate(prompts, params, capture=[Capture("state.2", positions="generated")])
    assert lm.engine.scheduler.num_preempted > 0
    for ids, out in zip(prompts, outs, strict=True):
        assert out.token_ids == greedily(oracle, ids, 16)
        tokens = ids + out.token_ids[:-1]
        state = out.activations["state.2"]
        assert state.shape[0] == 15
        for row in (0, 7, 14):
            expected = states_behind(oracle, tokens[: len(ids) + row + 1])[2]
            # The fourth prompt is ill-conditioned: by float64, transformers is off by 8e-5, and this engine by 2e-4.
            torch.testing.assert_close(state[row], expected, rtol=1e-4, atol=5e-4)
    lm.shutdown()


def test_states_that_are_not_there_are_refused_by_name() -> None:
    lm, prompt = load("nemotron_h"), random_prompt(9, 1)
    assert lm.sites[-1] == "state.*"
    with pytest.raises(ValueError, match=r"state\.2.*no recurrent state; the layers \[0\] have one"):
        lm.generate([prompt], GREEDY, capture=["state.2"])
    with pytest.raises(ValueError, match=r"captured whole"):
        lm.generate([prompt], GREEDY, capture=[Capture("state.0", reduce="mean")])
    with pytest.raises(ValueError, match=r"state\.0 is captured twice"):
        lm.generate([prompt], GREEDY, capture=["state.0", Capture("state.*", positions=-1)])
    lm.shutdown()
    lm = load("llama")
    with pytest.raises(ValueError, match=r"state\.0.*llama models have no recurrent state"):
        lm.generate([prompt], GREEDY, capture=["state.0"])
    lm.shutdown()


def continued(oracle: Any, ids: list[int], layer: int, state: torch.Tensor, new: int) -> list[int]:
    """What transformers generates where a layer's state is replaced behind the prompt."""
    output = oracle(input_ids=torch.tensor([ids]), use_cache=True)
    cache, tokens = output.past_key_values, [int(output.logits[0, -1].argmax())]
    cache.layers[layer].recurrent_states[0].copy_(state)
    for _ in range(new - 1):
        output = oracle(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize(("name", "size"), [("qwen3_next", 20), ("nemotron_h", 21), ("qwen3_next", 24)])
def test_a_patched_state_is_that_of_transformers_and_serves_no_plain_request(name: str, size: int) -> None:
    """The prompt ends with a page, or behind one; each request is asked twice, in both orders."""
    lm = load(name)
    oracle, ids, params = (
        oracle_of(lm, name),
        random_prompt(size, size),
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0),
    )
    other = lm.generate([random_prompt(15, 3)], GREEDY, capture=[Capture("state.0", positions=-1)])[0].activations[
        "state.0"
    ][-1]
    state = other * 30
    plain, expected = greedily(oracle, ids, 16), continued(oracle, ids, 0, state, 16)
    assert expected != plain and expected[0] == plain[0]
    patch = Patch("state.0", state.flatten(), positions=-1)
    longer = [*ids, *expected, 3, 5, 7, 9]
    for patches in ([patch], [], [patch], []):
        out = lm.submit(ids, params, interventions=patches, capture=[Capture("state.0", positions=-1)]).result()
        assert out.token_ids == (expected if patches else plain)
        behind = state if patches else states_behind(oracle, ids)[0]
        torch.testing.assert_close(out.activations["state.0"][0], behind, **TOLERANCE)
        assert [(a.intervention, a.site, a.prompt_rows) for a in out.receipt.interventions] == [
            ("Patch", "state.0", 1)
        ] * len(patches)
        (after,) = lm.generate([longer], GREEDY)  # which finds the pages of the patched one, if it may
        assert after.token_ids == greedily(oracle, longer, 6)
    lm.engine.call(lm.engine.scheduler.check_integrity)
    lm.shutdown()


def test_patched_requests_that_are_preempted_are_patched_again() -> None:
    lm = load("qwen3_next", kv_cache_tokens=48, max_model_len=40)
    oracle, prompts = oracle_of(lm, "qwen3_next"), [random_prompt(12, n) for n in range(4)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    state = torch.randn(lm.model_spec.states[2].shape) * 5
    patch = Patch("state.2", state.flatten(), positions=-1)
    outs = lm.generate(prompts, params, interventions=[[patch], [], [patch], [patch]])
    assert lm.engine.scheduler.num_preempted > 0
    for i, (ids, out) in enumerate(zip(prompts, outs, strict=True)):
        assert out.token_ids == (greedily(oracle, ids, 16) if i == 1 else continued(oracle, ids, 2, state, 16))
    lm.shutdown()


def test_patches_that_are_none_of_a_state_are_refused_by_name() -> None:
    lm, prompt = load("nemotron_h"), random_prompt(9, 1)
    values = torch.zeros(lm.model_spec.states[0].shape).flatten()
    for patch, message in (
        (Patch("state.0", values), r"at the prompt's end: give positions=-1"),
        (Patch("state.0", values, positions=[3]), r"at the prompt's end: give positions=-1"),
        (Patch("state.0", values[:-1], positions=-1), r"state\.0 is \[4, 16, 8\]"),
        (Patch("state.1", values, positions=-1), r"no recurrent state; the layers \[0\] have one"),
        (Patch("state.0", values, positions=-1, when=Gate(torch.ones(512))), r"without a gate"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.generate([prompt], GREEDY, interventions=[patch])
    with pytest.raises(ValueError, match=r"replaced at the prompt's end by Patch"):
        Steer("state.0", torch.ones(4))
    lm.shutdown()


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_states_behind_replayed_steps_are_those_of_padded_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode passes are replayed. A patch comes before the first of them."""
    use_eager_graphs(monkeypatch)
    lm = load(name, max_running_requests=8)
    oracle, prompts = oracle_of(lm, name), [random_prompt(n, n) for n in (21, 2, 9)]
    state = torch.randn(lm.model_spec.states[0].shape) * 5
    patch, capture = Patch("state.0", state.flatten(), positions=-1), Capture("state.0", positions="generated")
    outs = lm.generate(prompts, GREEDY, interventions=[[], [patch], []], capture=[capture])
    assert "replay" in {way for way, _ in lm.runner.partition.counts}
    for i, (ids, out) in enumerate(zip(prompts, outs, strict=True)):
        assert out.token_ids == (continued(oracle, ids, 0, state, 6) if i == 1 else greedily(oracle, ids, 6))
        if i != 1:
            expected = states_behind(oracle, ids + out.token_ids[:-1])[0]
            torch.testing.assert_close(out.activations["state.0"][-1], expected, **TOLERANCE)
    lm.shutdown()


def test_a_patch_is_part_of_the_page_that_ends_with_the_prompt() -> None:
    """A snapshot may be kept behind that page: it has the replaced state."""
    patches = [Patch("state.0", torch.full((4,), value), positions=-1) for value in (1.0, 1.0, 2.0)]
    first, equal, other = (KVEdits({}, (), 2, [(0, patch)], 20).namespaces(4, 40) for patch in patches)
    assert first[0][0] == 4 and first == equal != other
    assert KVEdits({}, (), 2, [(1, patches[0])], 20).namespaces(4, 40) != first
    assert KVEdits({}, (), 2, [], 20).namespaces(4, 40) == []


def test_a_trace_captures_states_behind_its_prompt_and_later() -> None:
    """Its prompt runs in one pass. Other positions, and passes with gradients, are refused before it runs."""
    lm, prompts = load("qwen3_next", max_num_tokens=64), [random_prompt(9, 1), random_prompt(6, 2)]
    oracle = oracle_of(lm, "qwen3_next")
    with lm.generate(max_new_tokens=3, ignore_eos=True, capture=[Capture("state.0", positions=-1)]) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                pass
        with tracer.invoke():  # whose invokes run together
            lm.lm_head.output.save()
    for prompt, found in zip(prompts, tracer.captures, strict=True):
        torch.testing.assert_close(found["state.0"][0], states_behind(oracle, prompt)[0], **TOLERANCE)
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, r"a trace runs in one pass.*positions=-1"),
        ({"grad": True}, r"no recurrent state"),
    ]
    for options, message in asked:
        with pytest.raises(ValueError, match=message):
            with lm.trace(prompts[0], capture=[Capture("state.0", positions=[3])], **options):
                lm.lm_head.output.save()
    lm.shutdown()
