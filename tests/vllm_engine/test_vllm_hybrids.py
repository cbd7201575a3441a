"""Models of vLLM with recurrent states, against our own engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB
from helpers_vllm import (
    assert_close,
    assert_close_logprobs,
    is_since,
    needs_vllm,
    own_lm,
    prompt,
    save_config,
    two_ranks,
    vllm_lm,
)
from helpers_vllm import vector as vector_of
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2MoeConfig,
    Mamba2Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from pymllm_interp import LM, Ablate, Capture, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.captures import Project
from pymllm_interp.core.families import STREAM_SITES
from pymllm_interp.interventions import Generated, Monitor
from pymllm_interp.vllm_engine.settings import served_spec

pytestmark = needs_vllm
WIDTH = 128
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.2}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, **NO_IDS,
}  # fmt: skip
SSM: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_expand": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
GRANITE: dict[str, Any] = {
    **COMMON, **SSM, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64, "position_embedding_type": "rope",
    "attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 2.0,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "falcon_h1": lambda: FalconH1Config(
        **COMMON, **{**SSM, "mamba_n_groups": 2}, head_dim=32, mamba_d_ssm=256, embedding_multiplier=2.0,
        mlp_multipliers=[0.7, 0.4], key_multiplier=0.5, attention_out_multiplier=0.8, ssm_out_multiplier=0.6,
    ),
    "nemotron_h": lambda: NemotronHConfig(  # squares its MLP's activations: with larger weights the last digits grow
        **{**COMMON, "initializer_range": 0.1}, head_dim=32, layer_types=["mamba", "mlp", "attention", "mamba"],
        ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=32, n_groups=2, chunk_size=16,
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **COMMON, layer_types=["conv", "full_attention"] * 2, moe_intermediate_size=64, num_dense_layers=1, num_experts=4,
        **EXPERTS,
    ),
    "granite": lambda: GraniteMoeHybridConfig(**GRANITE, num_local_experts=0),
    "granite with experts": lambda: GraniteMoeHybridConfig(**GRANITE, num_local_experts=4, **EXPERTS),
    "mamba2": lambda: Mamba2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, num_heads=8, head_dim=32, state_size=16, n_groups=1, chunk_size=16,
        num_hidden_layers=4, **NO_IDS,
    ),
}  # fmt: skip
CACHING = ("lfm2_moe",)
"""Families with prefixes: vLLM's kernel of Mamba-2 has none on a CPU."""
NEURONS = ("falcon_h1",)
"""Families with the MLP's neurons in all layers."""
PROMPTS = [prompt(length, length) for length in (30, 45, 1, 52, 17, 33)]
PARAMS = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=1)


def vector(seed: int, *shape: int) -> torch.Tensor:
    return vector_of(seed, *(shape or (WIDTH,)))


def declared(kinds: set[str]) -> tuple[list[Any], list[Any]]:
    """For each prompt interventions and captures, at sites that the family has."""
    delta = next((kind for kind in ("attn_out", "mlp_out", "resid_mid") if kind in kinds), "")
    first = "embed" if "embed" in kinds else "resid_pre.0"
    middle = "resid_mid" if "resid_mid" in kinds else "resid_pre"
    ops = [
        [Steer("resid_post.1", vector(1), 2.0), Scale(f"{delta}.2", 0.5, positions=slice(3, None, 2))],
        None,
        [Patch("resid_pre.1", vector(2, 1, WIDTH), positions=[0]), Steer("final_norm", vector(3))],
        [Ablate(f"{middle}.1", vector(4, 2, WIDTH)), Steer(first, vector(5), 0.3), Scale(f"{delta}.3", 0.2, positions="generated")],
        [Steer("resid_post.2", vector(6), when=Gate(vector(7), 0.0, site="resid_post.0"))],
        [Steer("resid_pre.3", vector(8), positions=Generated(1, 5, 2))],
    ]  # fmt: skip
    order = ("embed", "resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post")
    sites = [kind if kind == "embed" else f"{kind}.*" for kind in order if kind in kinds] + ["final_norm", "logits"]
    captures = [
        sites,
        [Capture("resid_post.*", reduce="mean"), Capture(f"{delta}.1", positions=[0, -1])],
        sites,
        sites,
        [Capture("resid_pre.*", reduce=Project(vector(9, 3, WIDTH)))],
        None,
    ]
    return ops, captures


CASES = [(family, 1) for family in CONFIGS] + [("lfm2_moe", 2), ("falcon_h1", 2), ("nemotron_h", 2)]


@pytest.mark.parametrize(
    ("family", "ranks"),
    [pytest.param(*one, marks=() if one == ("falcon_h1", 1) else pytest.mark.slow) for one in CASES],
)
def test_all_sites_of_models_with_states_are_our_engines(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, with too little memory for all at once, beside and behind requests whose states have no numbers."""
    folder = save_config(CONFIGS[family](), tmp_path / family)
    kinds = set(served_spec(CONFIGS[family](), torch.float32).family.points)
    ops, captures = declared(kinds)
    options: dict[str, Any] = {
        "max_num_tokens": 40,
        "kv_cache_tokens": 512,
        "enable_prefix_caching": family in CACHING,
        "tensor_parallel_size": ranks,
    }
    if family in NEURONS:
        options["inner_sites"] = ("mlp_act",)
        captures[0].append("mlp_act.*")
        ops[4].append(Steer("mlp_act.2", vector(11), positions=slice(0, None, 3)))
    two_ranks(monkeypatch, options)
    with own_lm(folder) as oracle, vllm_lm(folder, **options) as lm:
        assert ("embed" in lm.sites) == ("embed" in oracle.sites)
        for specs, kept in ((ops, captures), (None, captures), (ops, None)):
            assert_same(lm, oracle, PARAMS, interventions=specs, capture=kept)
        long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
        assert_same(lm, oracle, long, interventions=ops)
        assert_same(lm, oracle, PARAMS, monitors=[Monitor("resid_post.2", vector(10), 0.0)])
        wanted = oracle.generate(PROMPTS, PARAMS)
        broken: Any = [[Scale("resid_post.*", 1e20)], None] * 3
        for _ in range(2):
            found = lm.generate(PROMPTS, PARAMS, interventions=broken, capture=[["resid_post.3"], None] * 3)
            assert found[0].activations["resid_post.3"].isnan().any()
            for i in (1, 3, 5):
                assert_close(found[i], wanted[i])
            for one, other in zip(lm.generate(PROMPTS, PARAMS), wanted, strict=True):
                assert_close(one, other)


def assert_same(lm: LM, oracle: LM, params: SamplingParams, **declared: Any) -> None:
    found, wanted = (model.generate(PROMPTS, params, **declared) for model in (lm, oracle))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
        assert one.monitors.keys() == other.monitors.keys()
        for name, own in other.monitors.items():
            assert one.monitors[name].positions.tolist() == own.positions.tolist()
            torch.testing.assert_close(one.monitors[name].scores, own.scores, rtol=1e-3, atol=1e-3)


RULES: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_next": lambda **fields: Qwen3NextConfig(
        **fields, num_experts=2, **EXPERTS, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", RULES)
def test_states_behind_delta_rules_are_our_engines(family: str, tmp_path: Path) -> None:
    """vLLM's kernel for CPUs has bfloat16 only. Its states are as near to those in float32 as our engine's in bfloat16 are."""
    config = RULES[family](
        **{**COMMON, "num_key_value_heads": 4}, head_dim=32, layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
    )  # fmt: skip
    folder = save_config(config, tmp_path / family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    ops, captures = declared(set(STREAM_SITES) | {"attn_in", "mlp_in"})
    none = SamplingParams(max_tokens=0)
    prompts = [*PROMPTS[:5], prompt(100, 7)]
    half: dict[str, Any] = {"dtype": "bfloat16", "max_num_tokens": 40, "kv_cache_tokens": 512}
    if not is_since("0.32"):  # later versions set it themselves
        half["mamba_ssm_cache_dtype"] = "float32"
    with own_lm(folder) as exact, own_lm(folder, dtype="bfloat16") as own, vllm_lm(folder, **half) as lm:
        for specs in (ops, None):
            wanted, near, found = (
                model.generate(prompts, none, interventions=specs, capture=captures) for model in (exact, own, lm)
            )
            for i, out in enumerate(wanted):
                for site in out.activations:
                    rows, own_rows, theirs = (one[i].activations[site].float() for one in (wanted, near, found))
                    noise, off = (float((other - rows).norm() / rows.norm()) for other in (own_rows, theirs))
                    assert off < 2 * noise + 0.01, (i, site, off, noise)
                if specs is ops and specs[i] is not None:
                    counts, theirs = (
                        [replace(applied, gate_fires=None) for applied in one[i].receipt.interventions]
                        for one in (near, found)
                    )
                    assert counts == theirs
        lm.reset_prefix_cache()
        first, again = (lm.generate(prompts[5:], PARAMS)[0] for _ in range(2))
        assert not first.num_cached_tokens and again.num_cached_tokens > 0
        assert first.token_ids == again.token_ids
        assert_close_logprobs(again.outputs[0].logprobs, first.outputs[0].logprobs, 0.05)
