"""Tiny models of transformers' registry, and what transformers makes of their prompts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers_families import points_of, states_of
from helpers_graphs import use_eager_graphs
from registry_configs import registry_config
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lm_arguments import with_tuning

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SIZES: dict[str, Any] = {"kv_cache_tokens": 512, "page_size": 4, "max_num_tokens": 16, "max_running_requests": 4}
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-4}


def load(name: str, **options: Any) -> LM:
    given = {"load_format": "dummy", "device": "cpu", "dtype": "float32", **SIZES, **options}
    return LM(**with_tuning(hf_config=registry_config(name), **given))


def oracle_of(lm: LM, name: str) -> Any:
    config = copy.deepcopy(registry_config(name))
    config._attn_implementation = "eager"
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    return oracle


def greedily(oracle: Any, ids: list[int], new: int) -> list[int]:
    """What transformers generates."""
    oracle.generation_config.eos_token_id = None
    tokens = torch.tensor([ids])
    found = oracle.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return found[0, len(ids) :].tolist()


def random_prompt(size: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_chunks(name: str) -> None:
    """Prompts in chunks of 1 (short ones), 63, 64, 65 tokens and whole: tokens and residual sites of transformers."""
    prompts = [random_prompt(n, n) for n in (70, 1, 5)]
    expected: dict[int, tuple[list[int], dict[str, torch.Tensor]]] = {}  # by the prompt's length: tokens and states
    for rows in (1, 63, 64, 65, 128):
        lm = load(name, max_num_tokens=rows, max_running_requests=None if rows == 1 else 3, max_model_len=128)
        points = points_of(lm.model_spec)
        if not expected:
            oracle = oracle_of(lm, name)
            for ids in prompts:
                tokens = greedily(oracle, ids, 6)
                expected[len(ids)] = tokens, states_of(oracle, points, ids + tokens[:-1])[0]
        chosen = prompts[1:] if rows == 1 else prompts
        outs = lm.generate(chosen, GREEDY, capture=list(points))
        for ids, out in zip(chosen, outs, strict=True):
            tokens, states = expected[len(ids)]
            assert out.token_ids == tokens, rows
            for site, state in states.items():
                scale = float(state.abs().max())
                error = float((out.activations[site].flatten(1) - state).abs().max()) / scale
                assert error < 1e-4, (rows, site)
        lm.shutdown()


def check_preempted(name: str) -> None:
    """Requests that a small pool preempts end with transformers' tokens."""
    lm = load(name, kv_cache_tokens=48, max_model_len=40)
    oracle, prompts = oracle_of(lm, name), [random_prompt(12, n) for n in range(4)]
    outs = lm.generate(prompts, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
    assert lm.engine.scheduler.num_preempted > 0
    assert [out.token_ids for out in outs] == [greedily(oracle, prompt, 16) for prompt in prompts]
    lm.shutdown()


def check_samples(name: str) -> None:
    """Samples of one prompt are samples of it alone."""
    lm, prompt = load(name), random_prompt(21, 3)
    params = [SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True, seed=3, n=n) for n in (1, 3)]
    alone, several = (lm.generate([prompt], each)[0] for each in params)
    assert several.outputs[0].token_ids == alone.token_ids
    assert len({tuple(out.token_ids) for out in several.outputs}) == 3
    lm.shutdown()


def state_gradient(model: Any, prompt: list[int]) -> torch.Tensor:
    """transformers' gradient [1, tokens, hidden] of the first layer's output, from the sum of squares of the last logits."""
    states: list[torch.Tensor] = []
    layer = model.get_submodule("model.layers.0")
    handle = layer.register_forward_hook(lambda module, args, output: states.append(output.requires_grad_()))
    model.requires_grad_(False)
    model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].square().sum().backward()
    handle.remove()
    assert states[0].grad is not None
    return states[0].grad


def check_unwritten(name: str, *batches: tuple[int, ...]) -> None:
    """Batches of prompts of these lengths generate transformers' tokens where all of the pool is NaN before each batch."""
    lm = load(name, enable_prefix_caching=False)
    oracle = oracle_of(lm, name)
    for lens in batches:
        for stored in (*lm.runner.token_to_kv_pool.k_buffer, *lm.runner.token_to_kv_pool.v_buffer):
            stored.fill_(float("nan"))
        prompts = [random_prompt(n, n) for n in lens]
        expected = [greedily(oracle, prompt, 6) for prompt in prompts]
        assert [out.token_ids for out in lm.generate(prompts, GREEDY)] == expected
    lm.shutdown()


def check_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode passes are laid out as for graphs, with rows of padding, which write to slots that nobody reads."""
    use_eager_graphs(monkeypatch)
    monkeypatch.setattr("pymllm_interp.models.transformers.probed.ProbedModel.why_no_graphs", None)
    lm = load(name, max_running_requests=8)
    oracle, prompts = oracle_of(lm, name), [random_prompt(n, n) for n in (21, 2, 9)]
    assert lm.runner.graph_runner.padded_size(3) > 3
    expected = [greedily(oracle, prompt, 6) for prompt in prompts]
    assert [out.token_ids for out in lm.generate(prompts, GREEDY)] == expected
    assert "replay" in {way for way, _ in lm.runner.partition.counts}
    lm.shutdown()
