"""Traces of prompts with images: in the passes, lowered, and over several prompts. transformers' modules are the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_declared import lms
from helpers_images import continued, prompt_of, reference
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.interventions import Generated

Folders = Callable[[str], Path]
Oracle = Callable[[str], PreTrainedModel]
CLOSE = {"rtol": 1e-4, "atol": 5e-4}
FAMILIES: list[Any] = [
    "gemma3",
    "qwen3_vl",
    *[pytest.param(one, marks=pytest.mark.slow) for one in ("qwen2_5_vl", "smolvlm")],
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lm(family: str, vision_folder: Folders) -> Iterator[LM]:
    with LM(
        vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024, max_num_tokens=64
    ) as found:
        yield found


@pytest.fixture(scope="module", params=["off", "auto"])
def either(request: pytest.FixtureRequest, family: str, vision_folder: Folders) -> Iterator[LM]:
    """Blocks in the passes, and behind them where they can be."""
    with LM(
        vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024, max_num_tokens=64,
        lower_traces=request.param,
    ) as found:  # fmt: skip
        yield found


def layers_of(lm: LM) -> Any:
    return lm.get(lm.model_spec.family.layers)


def prompts_of(family: str) -> list[RenderedPrompt]:
    return [
        prompt_of(family, [1, 2, 3], 1, [4, 5]),
        prompt_of(family, [6], 2, [7, 8], 0, [9]),
        prompt_of(family, [5, 6, 7, 8]),
    ]


def of_modules(model: PreTrainedModel, family: str, prompt: RenderedPrompt, paths: list[str]) -> dict[str, Any]:
    """transformers' outputs of some modules for a prompt."""
    found: dict[str, Any] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, out, path=path: found.update({path: out[0] if isinstance(out, tuple) else out})
        )
        for path in paths
    ]
    reference(family, model, prompt)
    for handle in handles:
        handle.remove()
    return found


def test_modules_of_the_decoder_show_the_states_of_transformers(family: str, either: LM, vision_oracle: Oracle) -> None:
    path, layers, model = either.model_spec.family.layers, layers_of(either), vision_oracle(family)
    names = [f"{path}.{name}" for name in ("0.input_layernorm", "0.self_attn", "1.mlp", "1", "2")]
    for prompt in prompts_of(family):
        wanted = of_modules(model, family, prompt, [*names, "lm_head"])
        with either.trace(prompt):
            normed = layers[0].input_layernorm.output.save()
            attended = layers[0].self_attn.output[0].save()
            inside = layers[1].mlp.output.save()
            state = layers[1].output.save()
            last = layers[2].output[0, -1].save()
            logits = either.lm_head.output.save()
        for own, name in zip((normed, attended, inside, state), names, strict=False):
            torch.testing.assert_close(own.reshape(wanted[name].shape), wanted[name], **CLOSE)
        torch.testing.assert_close(last, wanted[names[-1]][0, -1], **CLOSE)
        torch.testing.assert_close(logits, wanted["lm_head"], **CLOSE)


def test_edits_at_image_rows_are_hooks_on_transformers(family: str, either: LM, vision_oracle: Oracle) -> None:
    """Rows of an image in a block are its positions; other prompts of the engine are not edited."""
    prompt, model, layers = prompts_of(family)[0], vision_oracle(family), layers_of(either)
    first, last = int(prompt.images[0].positions[0]), int(prompt.images[0].positions[-1]) + 1
    vector = torch.linspace(-2, 2, either.hidden_size)

    def edit(module: Any, args: Any, out: Any) -> Any:
        state = (out[0] if isinstance(out, tuple) else out).clone()
        state[:, first:last] += vector
        return (state, *out[1:]) if isinstance(out, tuple) else state

    handle = model.get_submodule(f"{either.model_spec.family.layers}.1").register_forward_hook(edit)
    wanted = reference(family, model, prompt).logits
    handle.remove()
    with either.trace(prompt):
        layers[1].output[:, first:last] += vector
        logits = either.lm_head.output.save()
    torch.testing.assert_close(logits, wanted, **CLOSE)
    (declared,) = either.forward([prompt], interventions=[Steer("resid_post.1", vector, positions=range(first, last))])
    torch.testing.assert_close(declared.logits, logits[0], **CLOSE)
    (plain,) = either.forward([prompt])
    assert not torch.allclose(plain.logits, logits[0], atol=1e-2)


def test_a_trace_follows_a_generation_behind_an_image(family: str, either: LM, vision_oracle: Oracle) -> None:
    prompt, layers = prompts_of(family)[1], layers_of(either)
    wanted = continued(family, vision_oracle(family), prompt, 4)
    with either.generate(prompt, max_new_tokens=4) as tracer:
        states = list().save()
        for _ in tracer.iter[:]:
            states.append(layers[1].output[0, -1])
        tokens = tracer.result.save()
    assert tokens.reshape(-1)[-4:].tolist() == list(wanted)
    (out,) = either.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=4), capture=[Capture("resid_post.1", Generated(-1))]
    )
    torch.testing.assert_close(torch.stack(list(states)), out.activations["resid_post.1"], **CLOSE)


def test_prompts_of_one_trace_have_their_own_images(family: str, lm: LM, vision_oracle: Oracle) -> None:
    """Invokes beside each other, and a list of prompts with one length."""
    prompts, layers = prompts_of(family), layers_of(lm)
    with lm.trace() as tracer:
        found = list().save()
        for prompt in prompts:
            with tracer.invoke(prompt):
                found.append(layers[1].output)
    for own, prompt in zip(found, prompts, strict=True):
        wanted = of_modules(vision_oracle(family), family, prompt, [f"{lm.model_spec.family.layers}.1"])
        torch.testing.assert_close(own.reshape(-1, own.shape[-1]), next(iter(wanted.values()))[0], **CLOSE)
    twins = [prompt_of(family, [1, 2], seed, [3]) for seed in (0, 3)]
    with lm.trace(twins):
        both = lm.lm_head.output.save()
    for own, prompt in zip(both, twins, strict=True):
        torch.testing.assert_close(own, reference(family, vision_oracle(family), prompt).logits[0], **CLOSE)


def test_lowered_blocks_have_the_bits_of_the_passes(family: str, vision_folder: Folders) -> None:
    found = []
    for lower in ("off", "require"):
        with LM(
            vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=512, lower_traces=lower
        ) as lm:
            layers = layers_of(lm)
            for prompt in prompts_of(family):
                with lm.trace(prompt):
                    state, inside = layers[1].output.save(), layers[2].output.save()
                found.append((state, inside))
    for passes, lowered in zip(found[:3], found[3:], strict=True):
        for one, other in zip(passes, lowered, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()


def test_hidden_states_of_an_output_are_those_of_transformers(family: str, lm: LM, vision_oracle: Oracle) -> None:
    """Also of Qwen3-VL, whose DeepStack states are added behind the outputs of its first layers."""
    prompt = prompts_of(family)[1]
    wanted = reference(family, vision_oracle(family), prompt, output_hidden_states=True).hidden_states
    (out,) = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), output_hidden_states=True)
    with lm.trace(prompt, output_hidden_states=True):
        traced = lm.output.hidden_states.save()
    for states in (out.activations.hidden_states, traced):
        assert states is not None and len(states) == len(wanted)
        for layer, (own, theirs) in enumerate(zip(states, wanted, strict=True)):
            torch.testing.assert_close(own, theirs, **CLOSE, msg=lambda text, layer=layer: f"{layer}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tables", "graphs"])
def test_traces_beside_hooks_in_device_tables_and_graphs(
    family: str, way: str, vision_folder: Folders, vision_oracle: Oracle
) -> None:
    with lms(way, vision_folder) as load:
        lm = load(family, page_size=4, max_num_tokens=64, max_interventions_per_site=64)
        layers, vector = layers_of(lm), torch.linspace(-2, 2, lm.hidden_size)
        for prompt in prompts_of(family):
            wanted = continued(family, vision_oracle(family), prompt, 4)
            with lm.generate(prompt, max_new_tokens=4) as tracer:
                states = list().save()
                for _ in tracer.iter[:]:
                    states.append(layers[1].output[0, -1])
                tokens = tracer.result.save()
            assert tokens.reshape(-1)[-4:].tolist() == list(wanted)
            (out,) = lm.generate(
                [prompt], SamplingParams(temperature=0, max_tokens=4), capture=[Capture("resid_post.1", Generated(-1))]
            )
            torch.testing.assert_close(torch.stack(list(states)), out.activations["resid_post.1"], **CLOSE)
            with lm.trace(prompt, interventions=[Steer("resid_post.0", vector, positions="text")]):
                steered = layers[1].output.save()
            (again,) = lm.forward(
                [prompt], interventions=[Steer("resid_post.0", vector, positions="text")], capture=["resid_post.1"]
            )
            torch.testing.assert_close(
                steered.reshape(-1, steered.shape[-1]), again.activations["resid_post.1"], **CLOSE
            )
