"""Inside the attention of transformers' own classes, and gradients: equal to an nnsight script over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import tiny_tokenizer
from family_configs import VOCAB, tiny_config
from nnsight.modeling.transformers import TransformersModel
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FAMILIES = (
    "gpt2",
    "gpt_neox",
    "gemma2",
    "phi3",
    "olmo2",
    "qwen2_moe",
    "deepseek_v2",
    "gptj",
    "falcon",
    "bloom",
    "gpt_oss",
)
PROMPT = [5, 17, 3, 80, 44, 9, 61]
EAGER = {"attn_implementation": "eager"}
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-4}


class Pair(NamedTuple):
    lm: LM
    theirs: Any
    attention: str
    """Path of the first layer's attention."""
    latent: bool
    """Its cache holds latents, which the pool does not."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config = tiny_config(request.param)
    config._attn_implementation = "eager"
    lm = LM(
        hf_config=config, load_format="dummy", impl="transformers", device="cpu", dtype="float32", kv_cache_tokens=512,
        page_size=4, max_num_tokens=64, max_running_requests=4,
    )  # fmt: skip
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    family = lm.model_spec.family
    path, latent = f"{family.layers}.0.{family.attention}", "deepseek" in request.param
    yield Pair(lm, TransformersModel(oracle, tokenizer=tiny_tokenizer()), path, latent)
    lm.shutdown()


def both(pair: Pair, script: Callable[..., Any], *args: Any) -> dict[str, torch.Tensor]:
    ours, theirs = script(pair.lm, *args), script(pair.theirs, *args)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")
    return ours


def options_of(model: Any) -> dict[str, Any]:
    return {"ignore_eos": True, **EAGER} if isinstance(model, LM) else {"eos_token_id": None, "pad_token_id": 0}


def first(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else value[0]


def weights_of(model: Any, path: str) -> dict[str, torch.Tensor]:
    with model.trace(PROMPT, output_attentions=True) as tracer:
        found = dict().save()
        output = model.get(path).output
        found["output"], found["weights"] = output[0], output[1]
        found["all"] = tracer.result.attentions[-1]
    return dict(found)


def test_attention_weights_are_transformers(pair: Pair) -> None:
    both(pair, weights_of, pair.attention)


def operations(model: Any, path: str, projection: str, inside: bool) -> dict[str, torch.Tensor]:
    source = model.get(path).source
    interfaces = [name for name in source.names if inside and "attention_interface" in name]
    with model.trace(PROMPT, **(EAGER if isinstance(model, LM) else {})):
        found = dict().save()
        if interfaces:
            inner = getattr(model.get(path).source, interfaces[-1]).source
            found["softmax"] = getattr(inner, next(name for name in inner.names if "softmax" in name)).output
        found["projected"] = getattr(model.get(path).source, f"self_{projection}_0").output
    return dict(found)


def test_operations_of_an_attention_are_transformers(pair: Pair) -> None:
    found = both(pair, operations, pair.attention, pair.lm.model_spec.family.o_proj, not pair.latent)
    if "softmax" in found:
        assert found["softmax"].shape[-2] == len(PROMPT)


def test_a_generation_with_edited_weights_is_transformers(pair: Pair) -> None:
    """Without the first key, renormalised; in the prompt's pass and in each step."""
    path = pair.attention

    def script(model: Any, path: str) -> dict[str, torch.Tensor]:
        with model.generate(PROMPT, max_new_tokens=4, **options_of(model)) as tracer:
            found = dict().save()
            for step in tracer.iter[0:4]:
                weights = model.get(path).output[1]
                found[f"weights {step}"] = weights.clone()
                model.get(path).output[0][:] *= 1.5
            found["tokens"] = tracer.result
        return dict(found)

    both(pair, script, path)


def gradients(model: Any, path: str) -> dict[str, torch.Tensor]:
    with model.trace(PROMPT):
        found = dict().save()
        h = first(model.get(path.rpartition(".")[0]).output)
        if not isinstance(model, LM):  # ours begins the graph at the embedding
            h.requires_grad_(True)
        logits = model.output.logits
        with logits[0, -1].square().sum().backward():
            found["grad"] = h.grad
    return dict(found)


def test_gradients_are_transformers(pair: Pair) -> None:
    both(pair, gradients, pair.attention)


def test_a_request_with_its_own_attention_beside_plain_ones(pair: Pair) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [torch.randint(3, VOCAB, (n,)).tolist() for n in (9, 3)]
    alone = [out.token_ids for out in pair.lm.generate(prompts, greedy)]
    expected = weights_of(pair.lm, pair.attention)
    handles = [pair.lm.submit(prompt, greedy) for prompt in prompts]
    beside = weights_of(pair.lm, pair.attention)
    assert [handle.result().token_ids for handle in handles] == alone
    assert all(torch.equal(beside[name], expected[name]) for name in expected)


def test_weights_of_a_batch_are_nobodys(pair: Pair) -> None:
    """They would show the other requests; without being asked for there are none."""
    with pair.lm.trace(PROMPT):
        output = pair.lm.get(pair.attention).output.save()
    assert output[1] is None


@pytest.mark.parametrize(
    "family",
    ["olmo2", "mixtral", "olmoe", "gpt_oss", "phi", "opt", "gpt_bigcode", "llama", "gemma3_text", "gpt_oss-native"],
)
def test_gradients_of_each_layer_are_transformers(family: str) -> None:
    """Of classes of transformers and of native gpt-oss, with ``loss.backward()``, ``grad=True`` and `lm.attribute`, and no more."""
    family, _, native = family.partition("-")
    config, impl = tiny_config(family), native or "transformers"
    options: dict[str, Any] = {"load_format": "dummy", "impl": impl, "device": "cpu", "dtype": "float32"}
    with LM(hf_config=config, kv_cache_tokens=256, **options) as lm:
        oracle: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        oracle.requires_grad_(False).load_state_dict(lm.runner.get_model().state_dict())
        layers, states = [f"{lm.model_spec.family.layers}.{i}" for i in range(lm.model_spec.num_hidden_layers)], []
        embedding = oracle.get_input_embeddings()
        handles = [embedding.register_forward_hook(lambda module, args, out: out.clone().requires_grad_().clone())]

        def keep(module: Any, args: Any, out: Any) -> None:
            first(out).retain_grad()
            states.append(first(out))

        handles += [oracle.get_submodule(path).register_forward_hook(keep) for path in layers]
        with torch.enable_grad():
            oracle(torch.tensor([PROMPT]), use_cache=False).logits[0, -1].square().sum().backward()
        for handle in handles:
            handle.remove()
        with lm.trace(PROMPT):
            found = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            hidden = [first(lm.get(path).output) for path in layers]
            with lm.output.logits[0, -1].square().sum().backward():
                found.extend(h.grad for h in reversed(hidden))
        for ours, theirs in zip(reversed(found), states, strict=True):
            assert theirs.grad is not None and theirs.grad.abs().max() > 0
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-3, atol=1e-4 * theirs.grad.abs().max().item())
        with lm.trace(PROMPT, grad=True):
            asked = [first(lm.get(layers[0]).output).requires_grad].save()  # pyright: ignore
        assert asked == [True]
        scores = lm.attribute(PROMPT, [*PROMPT[:-1], 7], metric=(4, 11), sites="resid_post.*")
        assert all(scores[f"resid_post.{i}"].abs().max() > 0 for i in range(len(layers)))
