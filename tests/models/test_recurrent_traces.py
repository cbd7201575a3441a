"""Traces of models with recurrent states, beside requests of all kinds. Transformers' modules run prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import tiny_tokenizer
from nnsight.modeling.transformers import TransformersModel
from registry_configs import registry_config
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MODULES = {
    "qwen3_5_text": ("model.layers.0.linear_attn", "in_proj_b"),
    "qwen3_next": ("model.layers.0.linear_attn", "in_proj_ba"),
    "nemotron_h": ("model.layers.0.mixer", "in_proj"),
    "mamba": ("backbone.layers.0.mixer", "x_proj"),
    "lfm2": ("model.layers.0.conv", "in_proj"),
}
"""Model type -> a module with a state, and a module inside of it."""
PROMPTS = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 9, 3)]
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-4}


class Pair(NamedTuple):
    lm: LM
    theirs: Any
    path: str
    inner: str


@pytest.fixture(scope="module", params=MODULES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config = registry_config(request.param)
    lm = LM(
        hf_config=config, load_format="dummy", device="cpu", dtype="float32", kv_cache_tokens=512, page_size=4,
        max_num_tokens=64, max_running_requests=4, max_model_len=64, lower_traces="off",
    )  # fmt: skip
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    yield Pair(lm, TransformersModel(oracle, tokenizer=tiny_tokenizer()), *MODULES[request.param])
    lm.shutdown()


def options_of(model: Any) -> dict[str, Any]:
    return {"ignore_eos": True} if isinstance(model, LM) else {"eos_token_id": None, "pad_token_id": 0}


def generated(model: Any, prompt: list[int], path: str, edits: bool) -> list[torch.Tensor]:
    """What a module's output is in each of three steps, and the logits; with each output doubled if `edits`."""
    with model.generate(prompt, max_new_tokens=3, **options_of(model)) as tracer:
        found = list().save()
        for _ in tracer.iter[0:3]:
            output = model.get(path).output
            found.append(output.clone())
            if edits:
                model.get(path).output = output * 2
            found.append(model.lm_head.output[:, -1])
    return found


@pytest.mark.parametrize("edits", [False, True], ids=["read", "edited"])
@pytest.mark.parametrize("inside", [False, True], ids=["at the module", "inside"])
def test_a_generation_is_transformers(pair: Pair, inside: bool, edits: bool) -> None:
    path = f"{pair.path}.{pair.inner}" if inside else pair.path
    ours, theirs = (generated(model, PROMPTS[0], path, edits) for model in (pair.lm, pair.theirs))
    assert len(ours) == len(theirs) == 6
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("inside", [False, True], ids=["at the module", "inside"])
def test_traces_beside_others_see_and_edit_their_own_rows_only(pair: Pair, inside: bool) -> None:
    path = f"{pair.path}.{pair.inner}" if inside else pair.path
    alone = [generated(pair.lm, prompt, path, edits=i == 1) for i, prompt in enumerate(PROMPTS)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    expected = pair.lm.generate([PROMPTS[2]], params)[0].token_ids
    handle = pair.lm.submit(PROMPTS[2], params)
    with pair.lm.generate(max_new_tokens=3, ignore_eos=True) as tracer:
        found = dict().save()
        for i in range(3):
            with tracer.invoke(PROMPTS[i]):
                for step in tracer.iter[0:3]:
                    output = pair.lm.get(path).output
                    found[i, 2 * step] = output.clone()
                    if i == 1:
                        pair.lm.get(path).output = output * 2
                    found[i, 2 * step + 1] = pair.lm.lm_head.output[:, -1]
    for (i, step), value in found.items():
        torch.testing.assert_close(value, alone[i][step], **TOLERANCE, msg=lambda m, at=(i, step): f"{at}: {m}")
    assert len(found) == 18 and handle.result().token_ids == expected


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "nemotron_h", "zaya"])
def test_weights_of_the_layers_with_attention_are_transformers(name: str) -> None:
    config = registry_config(name)
    config._attn_implementation = "eager"
    lm = LM(hf_config=config, load_format="dummy", device="cpu", dtype="float32", kv_cache_tokens=512, max_model_len=64)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    with lm.trace(PROMPTS[2], output_attentions=True, output_hidden_states=True) as tracer:
        found = tracer.result.save()
    expected = oracle(
        input_ids=torch.tensor([PROMPTS[2]]), output_attentions=True, output_hidden_states=True, use_cache=False
    )
    assert len(found.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    lm.shutdown()


def test_a_block_of_several_prompts_sees_inside_of_native_modules_only(pair: Pair) -> None:
    lm, path = pair.lm, pair.path
    with lm.generate(max_new_tokens=2, ignore_eos=True) as tracer:
        for prompt in PROMPTS[:2]:
            with tracer.invoke(prompt):
                pass
        with tracer.invoke():
            whole = lm.get(path).output.save()
    assert whole.shape[:2] == (2, 5)
    if lm.runner.get_model().fuses_ops:  # all prompts are one call
        with lm.generate(max_new_tokens=2, ignore_eos=True) as tracer:
            for prompt in PROMPTS[:2]:
                with tracer.invoke(prompt):
                    pass
            with tracer.invoke():
                inside = lm.get(f"{path}.{pair.inner}").output.save()
        assert inside.shape[:2] == (2, 5)
        return
    with pytest.raises(ValueError, match=r"waits inside model\..*runs prompt by prompt"):
        with lm.generate(max_new_tokens=2, ignore_eos=True) as tracer:
            for prompt in PROMPTS[:2]:
                with tracer.invoke(prompt):
                    pass
            with tracer.invoke():
                lm.get(f"{path}.{pair.inner}").output.save()
