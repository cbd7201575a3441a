"""What the engine does beside passes, on transformers' own classes: prefix reuse, preemption, knockouts, last positions."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from family_configs import SETTINGS, VOCAB, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams, Scale, Steer
from pymllm_interp.interventions import Knockout

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
FAMILIES = "gpt2", "gemma2", "qwen2_moe", "gptj", "bloom", "mpt", "gpt_oss", "llama4_text", "deepseek_v2", "phi3"
SIZES: dict[str, Any] = {"kv_cache_tokens": 512, "page_size": 4, "max_num_tokens": 16, "max_running_requests": 4}


def load(config: Any, **options: Any) -> LM:
    given = {"load_format": "dummy", "impl": "transformers", "device": "cpu", "dtype": "float32", **SIZES, **options}
    return LM(hf_config=config, **given)


def oracle_of(lm: LM, config: Any) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    oracle = AutoModelForCausalLM.from_config(config, dtype=lm.runner.dtype).eval()
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    return oracle


def greedily(oracle: Any, ids: list[int], new: int) -> list[int]:
    found = list(ids)
    for _ in range(new):
        with torch.no_grad():
            found.append(int(oracle(input_ids=torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
    return found[len(ids) :]


def random_prompt(size: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_goes_on_from_pages_of_others(family):
    config = tiny_config(family)
    lm = load(config)
    oracle, shared = oracle_of(lm, config), random_prompt(21, 1)
    lm.generate([shared], GREEDY)
    prompts = [shared + random_prompt(n, n) for n in (3, 7)]
    outs = lm.generate(prompts, GREEDY)
    assert all(out.num_cached_tokens == 20 for out in outs)
    assert [out.token_ids for out in outs] == [greedily(oracle, prompt, 8) for prompt in prompts]
    lm.shutdown()


@pytest.mark.thin(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_end_as_they_would_alone(family):
    config = tiny_config(family)
    lm = load(config, kv_cache_tokens=48, enable_prefix_caching=False, max_model_len=40)
    oracle, prompts = oracle_of(lm, config), [random_prompt(12, n) for n in range(4)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    outs = lm.generate(prompts, params)
    assert lm.engine.scheduler.num_preempted > 0
    assert [out.token_ids for out in outs] == [greedily(oracle, prompt, 16) for prompt in prompts]
    lm.shutdown()


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_experts_in_half_precision_are_as_close_as_transformers(family):
    """To float32, on average: a token that rounding sends to another expert is far off, with either."""
    config = tiny_config(family)
    lm = load(config, dtype="bfloat16")
    half, prompts = oracle_of(lm, config), [random_prompt(n, n) for n in (5, 1, 19, 30, 11)]
    exact, errors = copy.deepcopy(half).float(), []
    for ids, out in zip(prompts, lm.generate(prompts, GREEDY, capture=["logits"]), strict=True):
        whole = torch.tensor([ids + out.token_ids[:-1]])
        with torch.no_grad():
            theirs, expected = (
                model(input_ids=whole, use_cache=False).logits[0, -8:].float() for model in (half, exact)
            )
        errors.append([x.sub(expected).abs().mean() for x in (out.activations["logits"][-8:].float(), theirs)])
        assert torch.cosine_similarity(out.activations["logits"][-8:].float(), expected).mean() > 0.99
    ours, theirs = torch.tensor(errors).mean(0).tolist()
    assert ours < 2 * theirs
    lm.shutdown()


def test_steps_over_the_keys_of_all_requests_are_bounded():
    lm = load(tiny_config("bloom"), max_running_requests=100, max_num_tokens=4096, kv_cache_tokens=4096)
    assert (lm.runner.max_running_requests, lm.runner.max_num_tokens) == (32, 512)
    prompts = [random_prompt(n % 9 + 1, n) for n in range(40)]
    outs = lm.generate(prompts, GREEDY)
    oracle = oracle_of(lm, tiny_config("bloom"))
    assert [outs[i].token_ids for i in (0, 39)] == [greedily(oracle, prompts[i], 8) for i in (0, 39)]
    lm.shutdown()


# -- knockouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "gemma2", "gptj"])
def test_a_knockout_beside_plain_requests_is_a_mask_in_transformers(family):
    """Also where attention has sinks, and runs request by request."""
    config = tiny_config(family)
    lm = load(config)
    oracle, prompts = oracle_of(lm, config), [random_prompt(n, n) for n in (6, 7, 4)]
    plain = lm.generate(prompts, GREEDY)
    cut = Knockout("*", from_=-1, to=[2, 3])
    outs = lm.generate(
        prompts, SamplingParams(max_tokens=1, temperature=0.0), interventions=[None, [cut], None], capture=["logits"]
    )
    assert [outs[i].token_ids[0] for i in (0, 2)] == [plain[i].token_ids[0] for i in (0, 2)]
    mask = torch.zeros(1, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min)
    mask[..., -1, 2:4] = torch.finfo(torch.float32).min
    with torch.no_grad():  # of 7 tokens: shorter than chunks; windows are 5
        masks = {kind: mask + window(kind) for kind in ("full_attention", "sliding_attention", "chunked_attention")}
        given = masks if hasattr(oracle.config, "layer_types") and oracle.config.layer_types else mask
        expected = oracle(input_ids=torch.tensor([prompts[1]]), attention_mask=given, use_cache=False).logits[0, -1:]
    torch.testing.assert_close(outs[1].activations["logits"], expected, rtol=1e-4, atol=1e-4)
    lm.shutdown()


def window(kind: str) -> torch.Tensor:
    back = torch.arange(7)[:, None] - torch.arange(7)
    hidden = back >= 5 if kind == "sliding_attention" else torch.zeros(7, 7, dtype=torch.bool)
    return torch.zeros(7, 7).masked_fill(hidden, torch.finfo(torch.float32).min / 2)


@pytest.mark.parametrize("family", ["falcon", "bloom", "diffllama"])
def test_knockouts_that_cannot_be_are_refused_by_name(family):
    config = tiny_config(family) if family in SETTINGS else AutoConfig.for_model(family, **SMALL_DIFF)
    lm = load(config)
    with pytest.raises(ValueError, match=f"{family} models .* edges cannot be cut"):
        lm.generate([[5, 6, 7]], GREEDY, interventions=Knockout(0, from_=-1, to=0))
    lm.shutdown()


SMALL_DIFF: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


# -- positions, the stream, and memory --------------------------------------------------------------


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta-xl", "opt"])
def test_the_last_positions_can_be_generated(family):
    """RoBERTa and its kin count positions from behind the padding token's id: their table ends sooner."""
    sizes = {
        "max_position_embeddings": 18,
        "pad_token_id": 1,
        "is_decoder": True,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
    }
    config = AutoConfig.for_model(family, **{**SMALL_DIFF, **sizes})
    lm = load(config)
    longest = 18 if family == "opt" else 16
    assert lm.model_spec.context_len == longest
    (out,) = lm.generate(
        [random_prompt(9, 0)], SamplingParams(max_tokens=longest - 9, temperature=0.0, ignore_eos=True)
    )
    assert len(out.token_ids) == longest - 9
    assert out.token_ids == greedily(oracle_of(lm, config), random_prompt(9, 0), longest - 9)
    lm.shutdown()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "olmo2", "bloom", "glm4"])
def test_ops_between_attention_and_mlp_write_no_other_state(family):
    """`resid_mid` is edited where the stream is: what was read before keeps its value, and so do gradients."""
    lm = load(tiny_config(family))
    prompt, family_row = random_prompt(6, 0), lm.model_spec.family
    point = family_row.points["attn_out"].module.format(0)
    reads = []
    for ops in (None, [Scale("resid_mid.0", 3.0)]):
        with lm.trace(prompt, interventions=ops):
            out = lm.get(point).output
            reads.append((out if isinstance(out, torch.Tensor) else out[0]).save())
    assert torch.equal(*reads)
    captured = lm.generate(
        [prompt], GREEDY, interventions=Scale("resid_mid.0", 3.0), capture=["attn_out.0", "resid_pre.0", "resid_mid.0"]
    )
    found = captured[0].activations
    torch.testing.assert_close(
        found["resid_mid.0"], 3 * (found["resid_pre.0"] + found["attn_out.0"]), rtol=1e-4, atol=1e-4
    )
    lm.shutdown()


@pytest.mark.parametrize("family", ["llama", "gptj", "falcon", "phi3"])
def test_a_model_that_was_shut_down_is_freed(family):
    lm = load(tiny_config(family))
    lm.generate([[5, 6, 7]], GREEDY, interventions=Steer("resid_post.0", torch.ones(32)))
    weights = weakref.ref(next(lm.runner.get_model().parameters()))
    lm.shutdown()
    del lm
    gc.collect()
    assert weights() is None
