"""Models of vLLM with layers that add to the stream themselves, against our own engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCAB
from helpers_vllm import FAMILIES, assert_close, needs_vllm, own_lm, prompt, save_config, vector, vllm_lm
from transformers import FalconConfig, GPTJConfig, OPTConfig, PretrainedConfig, StableLmConfig

from pymllm_interp import Ablate, Capture, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.interventions import Knockout

pytestmark = needs_vllm
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.2}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    **NO_IDS,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": FAMILIES["gpt2"],
    "opt": lambda: OPTConfig(**COMMON, ffn_dim=128, max_position_embeddings=512, word_embed_proj_dim=96, dropout=0.0),
    "gptj": lambda: GPTJConfig(
        vocab_size=VOCAB, n_embd=96, n_layer=3, n_head=3, n_inner=128, rotary_dim=16, n_positions=512, **NO_IDS
    ),
    "falcon": lambda: FalconConfig(**COMMON, new_decoder_architecture=True, num_kv_heads=3, bias=False, parallel_attn=True),
    "stablelm": lambda: StableLmConfig(**COMMON, intermediate_size=128, num_key_value_heads=3, max_position_embeddings=512),
}  # fmt: skip
PROMPTS = [prompt(30, 1), prompt(9, 2), prompt(17, 3), prompt(1, 4)]
INNER = ("q", "k", "v", "z", "mlp_act")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "gpt2" else pytest.mark.slow) for one in CONFIGS]
)
def test_all_sites_of_such_layers_are_our_engines(family: str, tmp_path: Path) -> None:
    folder = save_config(CONFIGS[family](), tmp_path / family)
    inner = INNER if family in ("gpt2", "gptj", "stablelm") else ()
    with own_lm(folder) as oracle, vllm_lm(folder, max_num_tokens=24, inner_sites=inner) as lm:
        kinds = ["resid_pre", "attn_in", *inner, "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post"]
        points = oracle.backend.facts.spec.family.points
        sites = [f"{kind}.*" for kind in kinds if kind in points] + ["final_norm", "logits"]
        middle = "resid_mid.1" if "resid_mid" in points else "resid_post.0"
        ops: list[Any] = [
            [Steer("resid_post.1", vector(1), 2.0), Scale("attn_out.2", 0.5, positions="generated")],
            None,
            [Ablate(middle, vector(3, 2, 96)), Steer("attn_out.0", vector(4), positions=slice(3, None, 2))],
            [Patch("resid_pre.0", vector(5, 1, 96), positions=[0]), Steer("final_norm", vector(6))],
        ]
        if inner:
            ops[1] = [
                Scale("z.1", 0.0, heads=[1]),
                Steer("mlp_act.2", vector(7, oracle.backend.facts.spec.width("mlp_act"))),
                Steer("q.1", vector(8)),
            ]
        ops[0].append(Steer("resid_pre.2", vector(9), when=Gate(vector(10), 0.0, site="resid_post.0")))
        captures = [
            sites,
            sites,
            [Capture("resid_post.*", reduce="mean"), Capture("attn_out.1", positions=[0, -1])],
            sites,
        ]
        for specs in (ops, None):
            found, wanted = (
                model.generate(PROMPTS, PARAMS, interventions=specs, capture=captures) for model in (lm, oracle)
            )
            for one, other in zip(found, wanted, strict=True):
                assert_close(one, other)
        with pytest.raises(ValueError, match="no edge of attention is cut in this model"):
            lm.generate(PROMPTS[:1], PARAMS, interventions=[Knockout(1, from_=[-1], to=[0])])
        assert "pattern.*" not in lm.sites and not lm.capabilities["cuts_edges"]
        if family in ("gpt2", "opt"):
            with pytest.raises(ValueError, match="embed"):
                lm.generate(PROMPTS[:1], PARAMS, capture=["embed"])
