"""Tiny models of transformers' registry, and what transformers makes of their prompts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from helpers_families import points_of, states_of
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
