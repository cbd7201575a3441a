"""Hooks inside the vision tower: captures, ops and blocks see what hooks of transformers' own model see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_images import PICTURES, prompt_of, reference
from torch import Tensor
from transformers import PreTrainedModel

from pymllm_interp import LM, Ablate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.core.model_spec import ModelSpec

Folders = Callable[[str], Path]
Oracle = Callable[[str], PreTrainedModel]
Edits = Mapping[str, Callable[[Tensor], Tensor]]
FAMILIES = list(PICTURES)
GREEDY = SamplingParams(temperature=0, max_tokens=5)
WIDTH = 32


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def lm(family: str, vision_folder: Folders) -> Iterator[LM]:
    with LM(vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024) as found:
        yield found


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_prompt(family: str, first: int = 1) -> RenderedPrompt:
    """Three images of two or three sizes among text."""
    return prompt_of(family, [5, 6, 7], first, [8, 9], 2, [3], 4, [1, 2, 4])


def rows(value: Any) -> Tensor:
    """[rows, width] of a module's value."""
    return (value[0] if isinstance(value, tuple) else value).reshape(-1, value[0].shape[-1])


def tower_spec(model: PreTrainedModel) -> ModelSpec:
    found = ModelSpec.of(model.config, torch.float32).vision
    assert found is not None
    return found


def by_hooks(
    family: str, model: PreTrainedModel, prompt: RenderedPrompt, edits: Edits | None = None, **kwargs: Any
) -> tuple[dict[str, Tensor], Any]:
    """The states at every site of transformers' tower by torch's hooks, and the model's output.

    Args:
        edits: site -> function of the rows [rows, width].
    """
    found, edits = dict[str, Tensor](), edits or {}
    spec = tower_spec(model)

    def changed(site: str, value: Tensor) -> Tensor:
        if site in edits:
            value = edits[site](value.reshape(-1, value.shape[-1])).view(value.shape)
        found[site] = value.reshape(-1, value.shape[-1]).clone()
        return value

    def output(site: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, value: Any) -> Any:
            return (changed(site, value[0]), *value[1:]) if isinstance(value, tuple) else changed(site, value)

        return hook

    def given(site: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            if args:
                return (changed(site, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": changed(site, kwargs["hidden_states"])}

        return hook

    with ExitStack() as hooks:
        for kind, (path, end) in spec.family.points.items():
            for layer in range(spec.num_hidden_layers):
                module, site = model.get_submodule(path.format(layer)), f"vision.{kind}.{layer}"
                if end == "output":
                    hooks.callback(module.register_forward_hook(output(site), prepend=True).remove)
                elif kind != "resid_mid":
                    hooks.callback(module.register_forward_pre_hook(given(site), with_kwargs=True).remove)
                else:
                    keep = given(site)
                    hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        inner: Any = model.model
        features = inner.get_image_features

        def with_out(*args: Any, **inputs: Any) -> Any:
            result = features(*args, **inputs)
            result.pooler_output = with_edit("vision.out", result.pooler_output)
            if (levels := getattr(result, "deepstack_features", None)) is not None:
                result.deepstack_features = [with_edit(f"vision.deepstack.{i}", own) for i, own in enumerate(levels)]
            return result

        def with_edit(site: str, parts: Any) -> Any:
            joined = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
            new = edits[site](joined) if site in edits else joined
            found[site] = new.clone()
            pieces = new.split([part.numel() // part.shape[-1] for part in parts])
            shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
            return torch.stack(shaped) if isinstance(parts, Tensor) else type(parts)(shaped)

        inner.get_image_features = with_out
        hooks.callback(delattr, inner, "get_image_features")
        wanted = reference(family, model, prompt, **kwargs)
    return found, wanted


def close(found: Tensor, wanted: Tensor) -> None:
    scale = wanted.abs().max()
    torch.testing.assert_close(found.reshape(wanted.shape) / scale, wanted / scale, rtol=0, atol=2e-5)


def test_captures_are_the_states_of_transformers(family: str, lm: LM, vision_oracle: Oracle) -> None:
    """All sites, of one image and of several, beside a plain request of the same images. Rows are in transformers' order."""
    prompts = [some_prompt(family), prompt_of(family, 0, [4]), prompt_of(family, [7], 2, [4], 0)]
    sites = [site for site in lm.sites if site.startswith("vision.")]
    assert {"vision.resid_post.*", "vision.attn_out.*", "vision.mlp_out.*", "vision.out"} <= {*sites}
    assert ("vision.deepstack.*" in sites) == (family == "qwen3_vl")
    plain = lm.generate(prompts, GREEDY)
    outs = lm.generate([*prompts, prompts[0]], GREEDY, capture=[*[[*sites, "resid_post.1"]] * 3, []])
    for out, before in zip(outs, [*plain, plain[0]], strict=True):
        assert out.token_ids == before.token_ids
    for out, prompt in zip(outs[:3], prompts, strict=True):
        wanted, _ = by_hooks(family, vision_oracle(family), prompt)
        found = out.activations
        assert {site for site in found if site.startswith("vision.")} == {*wanted}
        for site, states in wanted.items():
            close(found[site], states)
            assert found.positions[site].tolist() == list(range(len(states)))
        counts = [image.num_tokens for image in prompt.images]
        assert found.token_ids["vision.out"].bincount().tolist() == counts
        assert found.token_ids["vision.resid_post.0"].unique().tolist() == list(range(len(counts)))
        assert found.token_ids["vision.resid_post.0"].diff().min() >= 0


OPS: dict[str, tuple[Callable[[str, Any], Any], Callable[[Tensor], Tensor]]] = {
    "steer": (lambda site, at: Steer(site, noise(WIDTH), scale=4, positions=at), lambda x: x + 4 * noise(WIDTH)),
    "scale": (lambda site, at: Scale(site, 0.3, positions=at), lambda x: x * 0.3),
    "ablate": (
        lambda site, at: Ablate(site, noise(WIDTH, seed=1), positions=at),
        lambda x: x - (x @ (unit := noise(WIDTH, seed=1) / noise(WIDTH, seed=1).norm()))[:, None] * unit,
    ),
    "patch": (
        lambda site, at: Patch(site, noise(WIDTH, seed=2), positions=at),
        lambda x: noise(WIDTH, seed=2).expand_as(x),
    ),
}


@pytest.mark.thin(6)
@pytest.mark.parametrize("site", ["vision.resid_post.0", "vision.attn_out.1", "vision.mlp_out.1", "vision.out"])
def test_ops_are_edits_of_transformers_modules(family: str, lm: LM, vision_oracle: Oracle, site: str) -> None:
    check_ops(family, lm, vision_oracle(family), site)


def test_ops_at_states_of_deepstack_are_edits_of_them(vision_folder: Folders, vision_oracle: Oracle) -> None:
    family, site = "qwen3_vl", "vision.deepstack.1"
    with LM(vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024) as lm:
        check_ops(family, lm, vision_oracle(family), site)
    with (
        LM(vision_folder("gemma3"), device="cpu", dtype="float32") as lm,
        pytest.raises(ValueError, match="vision tower"),
    ):
        lm.generate([some_prompt("gemma3")], GREEDY, capture=[site])


def check_ops(family: str, lm: LM, model: PreTrainedModel, site: str) -> None:
    """Each op at some rows is an edit of transformers' states there."""
    prompt = some_prompt(family)
    at = [0, 3, 1]
    for name, (op, function) in OPS.items():

        def edit(state: Tensor, function: Callable[[Tensor], Tensor] = function) -> Tensor:
            state = state.clone()
            state[at] = function(state[at])
            return state

        (out,) = lm.forward([prompt], interventions=[op(site, at)], capture=["vision.resid_post.1", "vision.out"])
        wanted, logits = by_hooks(family, model, prompt, {site: edit})
        for read in ("vision.resid_post.1", "vision.out"):
            close(out.activations[read], wanted[read])
        close(out.logits, logits.logits[0])
        (applied,) = out.receipt.interventions
        assert (applied.site, applied.prompt_rows, applied.intervention) == (site, 3, type(op(site, at)).__name__), name


# -- blocks ------------------------------------------------------------------------------------------


def layers_of(lm: LM) -> Any:
    """The tower's list of layers, under transformers' names."""
    found: Any = lm
    assert lm.model_spec.vision is not None
    for name in lm.model_spec.vision.family.layers.split("."):
        found = getattr(found, name)
    return found


def end_of(lm: LM) -> Any:
    """The last module of the tower."""
    model: Any = lm.model
    for name in ("visual", "connector", "multi_modal_projector"):
        if hasattr(model, name):
            return getattr(model, name)
    raise AssertionError


def test_blocks_read_and_edit_modules_of_the_tower(family: str, lm: LM, vision_oracle: Oracle) -> None:
    """Reads of inputs and outputs, an edit in place, one by assignment, and states of the language model behind them."""
    prompt, model = some_prompt(family), vision_oracle(family)
    attention, mlp = (tower_spec(model).family.attention, tower_spec(model).family.mlp)

    def added(state: Tensor) -> Tensor:
        return state + noise(WIDTH)

    def first(state: Tensor) -> Tensor:
        state = state.clone()
        state[3] *= 5
        return state

    path = lm.model_spec.family.layers.removesuffix(".layers").split(".")[-1]
    lm.generate([prompt], GREEDY)  # the cache has its images
    with lm.trace(prompt):
        layers = layers_of(lm)
        given = layers[0].input.save()
        inside = getattr(layers[0], mlp).output.save()
        state = layers[0].output
        layers[0].output = state + noise(WIDTH)
        middle = getattr(layers[1], attention).output.save()
        flat = layers[1].output
        (flat if flat.dim() == 2 else flat[0])[3] *= 5
        after = layers[1].output.save()
        end = end_of(lm).output.save()
        later = getattr(lm.model, path).layers[1].output.save()
        logits = lm.lm_head.output.save()
    wanted, out = by_hooks(
        family, model, prompt, {"vision.resid_post.0": added, "vision.resid_post.1": first}, output_hidden_states=True
    )
    for found, site in (
        (given, "resid_pre.0"), (inside, "mlp_out.0"), (middle, "attn_out.1"), (after, "resid_post.1"),
    ):  # fmt: skip
        close(found[0] if isinstance(found, tuple) else found, wanted[f"vision.{site}"])
    assert isinstance(end, Tensor) != family.startswith("qwen")
    close(later, out.hidden_states[2])
    close(logits, out.logits)
    (before,) = lm.forward([prompt])  # the cache has none of it
    close(before.logits, reference(family, model, prompt).logits[0])
