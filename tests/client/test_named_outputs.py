"""`output_hidden_states`, `output_attentions` and `return_routed_experts`: transformers' tuples, and vLLM's ids of experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers_embeds import mixed
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams
from pymllm_interp.captures import Lens

IDS = [[5, 17, 3, 80, 11, 2, 9], [40], list(range(1, 20))]
BOTH = {"output_hidden_states": True, "output_attentions": True}


def assert_close(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_forward_pass_has_transformers_tuples(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], family: str
) -> None:
    lm, model = lm_of(family), oracle(family)
    prompt, whole = mixed(model, 9, 1)
    outs = lm.forward([*IDS, prompt], **BOTH)
    for out, given in zip(
        outs, [*({"input_ids": torch.tensor([ids])} for ids in IDS), {"inputs_embeds": whole}], strict=True
    ):
        with torch.no_grad():
            wanted = model(**given, **BOTH)
        assert out.hidden_states is not None and out.attentions is not None
        assert_close(out.hidden_states, wanted.hidden_states)
        assert_close(out.attentions, wanted.attentions)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_generation_has_transformers_tuples_by_step(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], family: str
) -> None:
    lm, model = lm_of(family), oracle(family)
    outs = lm.generate(IDS, SamplingParams(temperature=0, max_tokens=4), **BOTH)
    for out, ids in zip(outs, IDS, strict=True):
        wanted = model.generate(
            torch.tensor([ids]), max_new_tokens=4, do_sample=False, return_dict_in_generate=True, pad_token_id=0, **BOTH
        )  # fmt: skip
        assert out.token_ids == wanted.sequences[0, len(ids) :].tolist()
        assert out.hidden_states is not None and out.attentions is not None
        assert len(out.hidden_states) == len(out.attentions) == 4
        for step in range(4):
            assert_close(out.hidden_states[step], wanted.hidden_states[step])
            assert_close(out.attentions[step], wanted.attentions[step])


def test_routed_experts_are_those_that_the_routers_choose(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm, model = lm_of("gpt_oss"), oracle("gpt_oss")
    (out,) = lm.generate([IDS[0]], SamplingParams(temperature=0, max_tokens=3), return_routed_experts=True)
    chosen: list[torch.Tensor] = []
    handles = [
        layer.mlp.router.register_forward_hook(lambda module, args, output: chosen.append(output[-1]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([IDS[0] + out.token_ids[:-1]]))
    for handle in handles:
        handle.remove()
    found = out.routed_experts
    assert found is not None and found.dtype == torch.int32 and found.shape == (len(IDS[0]) + 2, 3, 3)
    for layer, ids in enumerate(chosen):
        assert torch.equal(found[:, layer].sort(-1).values, ids.view(-1, 3).to(torch.int32).sort(-1).values)


def test_what_was_not_asked_for_is_none_and_what_a_model_lacks_is_refused(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    params = SamplingParams(temperature=0, max_tokens=2)
    (out,) = lm.generate([IDS[0]], params, capture=["resid_pre.1", "final_norm"], output_attentions=False)
    assert out.hidden_states is None and out.attentions is None and out.routed_experts is None
    (out,) = lm.generate([IDS[0]], params)
    assert out.hidden_states is None and out.attentions is None and out.routed_experts is None
    with pytest.raises(ValueError, match="experts"):
        lm.generate([IDS[0]], params, return_routed_experts=True)


def test_generate_with_lens_is_a_capture(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    params = SamplingParams(temperature=0, max_tokens=3)
    for lens in (None, Lens(top_k=2, tokens=[7])):
        (found,) = lm.generate_with_lens([IDS[0]], params, lens=lens)
        (wanted,) = lm.generate([IDS[0]], params, capture=[Capture("resid_post.*", reduce=lens or Lens())])
        assert found.token_ids == wanted.token_ids and list(found.activations) == list(wanted.activations)
        for site in wanted.activations:
            assert torch.equal(found.activations[site], wanted.activations[site])
            assert torch.equal(found.activations.indexes[site], wanted.activations.indexes[site])
    with pytest.raises(TypeError, match="lens= says what it reads"):
        lm.generate_with_lens([IDS[0]], params, capture=["resid_post.0"])
