"""Models with recurrent states on each device: tokens of transformers, with and without CUDA graphs, beside traces and ops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers_devices import DEVICES, ways
from registry_configs import registry_config
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from pymllm_interp import LM, SamplingParams, Steer

FAMILIES = "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "nemotron_h", "mamba", "kimi_linear"
EAGER = {"nemotron_h", "kimi_linear", "qwen3_5_moe_text"}
"""Their code in transformers copies tensors of the CPU in each pass, which no CUDA graph takes."""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def random_prompt(size: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.few("graphs", True)  # a CPU has none
@pytest.mark.few("name", "qwen3_5_text", "mamba", "kimi_linear")  # there models/test_recurrent.py has all
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_generates_the_tokens_of_transformers(device: str, name: str, graphs: bool) -> None:
    config = registry_config(name)
    lm = LM(
        hf_config=config, load_format="dummy", device=device, dtype="float32", kv_cache_tokens=1024, max_num_tokens=32,
        max_running_requests=5, max_model_len=128, lower_traces="off", disable_cuda_graph=not graphs,
    )  # fmt: skip
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    oracle: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    oracle.generation_config.eos_token_id = None

    def greedily(ids: list[int]) -> list[int]:
        tokens = torch.tensor([ids], device=device)
        mask = torch.ones_like(tokens)
        found = oracle.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        return found[0, len(ids) :].tolist()

    prompts = [random_prompt(n, n) for n in (40, 1, 7, 19, 3, 12)]
    plain = [greedily(ids) for ids in prompts]
    assert [out.token_ids for out in lm.generate(prompts, GREEDY)] == plain
    layer = oracle.get_submodule(f"{lm.model_spec.family.layers}.0")
    handle = layer.register_forward_hook(lambda module, args, output: output + 2)
    steered = greedily(prompts[0])
    handle.remove()
    steer = Steer("resid_post.0", torch.full((32,), 2.0))
    handles = [lm.submit(prompts[0], GREEDY, interventions=[steer]), lm.submit(prompts[3], GREEDY)]
    path = lm.model_spec.family.points["attn_out"].module.format(0)
    with lm.generate(prompts[2], max_new_tokens=8, ignore_eos=True) as tracer:
        states = list().save()
        for _ in tracer.iter[0:8]:
            states.append(lm.get(path).output.clone())
        tokens = tracer.result.save()
    assert [handle.result().token_ids for handle in handles] == [steered, plain[3]]
    assert tokens[0, 7:].tolist() == plain[2] and len(states) == 8
    if device == "cuda":
        assert (ways(lm)["replay"] > 0) == (graphs and name not in EAGER)
    lm.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_heads_of_qwen3_5s_size_are_transformers_in_bfloat16(graphs: bool) -> None:
    """Prompts around the size of a chunk, in chunks and beside decoding requests, by fla-core where it is installed."""
    config = Qwen3_5TextConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    lm = LM(
        hf_config=config, load_format="dummy", impl="native", device="cuda", dtype="bfloat16", kv_cache_tokens=8192,
        max_num_tokens=160, max_running_requests=8, max_model_len=512, disable_cuda_graph=not graphs,
    )  # fmt: skip
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    oracle: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to("cuda")
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    prompts = [
        torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (400, 1, 63, 64, 65)
    ]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    states: list[torch.Tensor] = []
    handle = oracle.model.layers[-1].register_forward_hook(lambda module, args, output: states.append(output))
    for ids, out in zip(prompts, lm.generate(prompts, params, capture=["resid_post.3"]), strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([ids + out.token_ids[:-1]], device="cuda"), use_cache=False).logits[0]
        expected, found = states.pop()[0].cpu(), out.activations["resid_post.3"].float().cpu()
        assert float((found - expected).abs().max() / expected.abs().max()) < 4e-2
        best = logits[len(ids) - 1 :]
        chosen = best.gather(1, torch.tensor(out.token_ids, device="cuda")[:, None])[:, 0]
        assert float((best.max(-1).values - chosen).max() / best.abs().max()) < 4e-2
    handle.remove()
    assert (ways(lm)["replay"] > 0) == graphs
    lm.shutdown()
