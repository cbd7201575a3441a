"""`state.i`: recurrent states, captured behind asked positions and patched at the prompt's end. Equal to transformers' cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_classes import GREEDY, TOLERANCE, greedily, load, oracle_of, random_prompt

from pymllm_interp import Capture, SamplingParams

FAMILIES = "qwen3_next", "nemotron_h", "mamba"
"""Native; with attention by its class; without attention, its later chunks token by token."""
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_text", "bamba", "zamba", "kimi_linear", "minimax")]


def states_behind(oracle: Any, ids: list[int]) -> dict[int, torch.Tensor]:
    """The recurrent states of transformers' cache behind these tokens, by layer."""
    output = oracle(input_ids=torch.tensor([ids]), use_cache=True)
    cache = output.get("past_key_values", output.get("cache_params"))
    found: dict[int, torch.Tensor] = {}
    for layer, own in enumerate(cache.layers):
        state = getattr(own, "recurrent_states", {}).get(0)
        if hasattr(cache, "linear_cache"):  # MiniMax's
            state = cache.get_linear_cache(layer) if layer < len(cache.linear_cache) else None
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
            torch.testing.assert_close(state[row], expected, **TOLERANCE)
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
