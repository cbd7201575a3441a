"""InternVL, Mistral 3 and Aya Vision: towers of transformers without sites, in front of native language models and one by its
class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers_devices import DEVICES
from helpers_vision import CLASSES, generated, picture, placed, reference_processor, save_vision_model, vision_config
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.client.remote.remote_backend import tree_of
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.interventions import Knockout
from pymllm_interp.models.registry import check_supported
from pymllm_interp.utils.arguments import PromptError

GREEDY = SamplingParams(temperature=0, max_tokens=5)
FIRST, SECOND, THIRD = picture(40, 28), picture(20, 44, seed=3), picture(16, 16, seed=4)
PARTS: list[tuple[Any, ...]] = [
    ("see ", FIRST, " what?"), (FIRST, SECOND, "\nboth"), ("x", SECOND), (THIRD, "again", THIRD), ("text alone",),
]  # fmt: skip


class Case(NamedTuple):
    """A family's engine, and transformers' processor and model."""

    family: str
    lm: LM
    processor: Any
    model: PreTrainedModel

    def inputs(self, *parts: Any) -> dict[str, torch.Tensor]:
        """transformers' arguments."""
        text, images = placed(self.family, *parts)
        found = self.processor(text=text, images=images or None, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "pixel_values", "image_sizes") if name in found}

    def prompt(self, *parts: Any) -> Any:
        """The prompt of a caller."""
        text, images = placed(self.family, *parts)
        return {"prompt": text, "multi_modal_data": {"image": images}} if images else text


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=CLASSES)
def case(
    request: pytest.FixtureRequest,
    device: str,
    vision_folder: Callable[[str], Path],
    vision_oracle: Callable[[str], PreTrainedModel],
) -> Iterator[Case]:
    family = request.param
    folder = vision_folder(family)
    size = {"page_size": 4, "kv_cache_tokens": 2048, "max_interventions_per_site": 8}  # rows of an image are runs
    with LM(folder, device=device, dtype="float32", **size) as lm:
        yield Case(family, lm, reference_processor(family, folder), vision_oracle(family))


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-4, atol=2e-4)


def test_tokens_states_and_logits_are_those_of_transformers(case: Case) -> None:
    prompts = [case.prompt(*parts) for parts in PARTS]
    outs = case.lm.forward(
        prompts, capture=["embed", "resid_post.*", Capture("mlp_out.1", positions="image", missing="skip")]
    )
    made = case.lm.generate([*prompts, *prompts], GREEDY)
    for i, (parts, out) in enumerate(zip(PARTS, outs, strict=True)):
        inputs = case.inputs(*parts)
        assert out.prompt_token_ids == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            wanted = case.model(**inputs, use_cache=False, output_hidden_states=True)
        near(out.logits, wanted.logits[0])
        near(out.activations["embed"], wanted.hidden_states[0][0])
        for layer in range(2):
            near(out.activations[f"resid_post.{layer}"], wanted.hidden_states[layer + 1][0])
        pads = (inputs["input_ids"][0] == case.model.config.image_token_id).nonzero().flatten()
        assert out.activations.positions["mlp_out.1"].equal(pads)
        tokens = generated(case.model, inputs, 5)
        assert made[i].token_ids == made[i + len(PARTS)].token_ids == tokens


def test_hooks_act_at_image_tokens_and_blocks_in_the_tower(case: Case) -> None:
    prompt, lm = case.prompt("a ", FIRST, " b ", SECOND, " c"), case.lm
    vector = torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(1))
    steer = Steer("resid_post.0", vector, scale=8, positions="image[1]")
    plain, steered, cut = lm.forward(
        [prompt] * 3, interventions=[[], [steer], [Knockout("*", from_="text", to="image")]], capture=["resid_post.0"]
    )
    rows = (steered.activations["resid_post.0"] - plain.activations["resid_post.0"]).norm(dim=-1) > 1
    pads = torch.tensor([token == case.model.config.image_token_id for token in plain.prompt_token_ids])
    assert 0 < rows.sum() < pads.sum()
    assert not rows[~pads].any() and rows.any() and not torch.allclose(plain.logits[-1], cut.logits[-1], atol=1e-3)
    near(plain.logits, lm.forward([prompt])[0].logits)
    with lm.trace(prompt):
        projected = lm.model.multi_modal_projector.output.save()
        logits = lm.lm_head.output.save()
    near(logits[0], plain.logits)
    with lm.trace(prompt):
        lm.model.multi_modal_projector.output[:] = 0
        blind = lm.lm_head.output.save()
    embeds = lm.forward([prompt], capture=["embed"])[0].activations["embed"]
    near(projected.reshape(-1, lm.hidden_size), embeds[pads])
    assert not torch.allclose(blind[0, -1].cpu(), plain.logits[-1].cpu(), atol=1e-3)
    near(lm.forward([prompt])[0].logits, plain.logits)


def test_outputs_of_processors_are_prompts(case: Case) -> None:
    for parts in PARTS[:4]:
        inputs = case.inputs(*parts)
        (out,) = case.lm.generate(inputs, GREEDY)
        assert out.token_ids == case.lm.generate([case.prompt(*parts)], GREEDY)[0].token_ids
    inputs = case.inputs(*PARTS[1])
    for change in ({"pixel_values": inputs["pixel_values"][:-1]}, {"pixel_values": inputs["pixel_values"][..., :-1]}):
        with pytest.raises(PromptError, match="no outputs of this model's processor"):
            case.lm.generate({**inputs, **change}, GREEDY)


def test_what_is_not_served_is_refused_by_name(case: Case) -> None:
    prompt = case.prompt("a ", FIRST)
    for site in ("vision.resid_post.0", "vision.out"):
        with pytest.raises(ValueError, match="vision"):
            case.lm.generate([prompt], GREEDY, capture=[site])
    with pytest.raises(PromptError, match="2 images, and 1 places"):
        case.lm.generate([{**prompt, "multi_modal_data": {"image": [FIRST, SECOND]}}], GREEDY)
    tower = case.lm.runner.get_model().tower
    one = tower.profile_run(1)
    assert one >= 4 and tower.profile_run(3 * one) == 3 * one
    assert case.lm.generate([prompt], GREEDY)[0].token_ids


def test_clients_have_the_modules_of_the_model(case: Case) -> None:
    """`LM.connect` builds them of the config."""
    tree = tree_of(case.model.config, case.lm.backend.facts.impl, torch.float32)
    own = dict(case.lm.backend.module.named_modules())
    assert {name: type(module).__name__ for name, module in tree.named_modules() if name} == {
        name: type(module).__name__ for name, module in own.items() if name
    }


@pytest.mark.parametrize(
    "text", ["olmo2", pytest.param("cohere2", marks=pytest.mark.slow), pytest.param("phi3", marks=pytest.mark.slow)]
)
def test_llava_over_a_language_model_by_its_class(text: str, tmp_path: Path) -> None:
    """In chunks of a small pool, beside text, with hooks, traces, embeddings and logits of prompts."""
    folder = save_vision_model("llava", tmp_path, model_type=text)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    size = {"page_size": 4, "kv_cache_tokens": 96, "max_num_tokens": 24}
    tree_of(model.config, "transformers", torch.float32)  # of `LM.connect`
    with LM(folder, device="cpu", dtype="float32", **size) as lm:
        case = Case("llava", lm, reference_processor("llava", folder), model)
        prompts, wanted = [case.prompt(*parts) for parts in PARTS], list[Any]()
        handles = [lm.submit(prompt, GREEDY) for prompt in [*prompts, *prompts]]
        for parts in PARTS:
            with torch.no_grad():
                wanted.append(model(**case.inputs(*parts), use_cache=False, output_hidden_states=True))
        for handle, parts in zip(handles, [*PARTS, *PARTS], strict=True):
            assert handle.result().token_ids == generated(model, case.inputs(*parts), 5)
        (out,) = lm.generate(
            prompts[0], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), capture=["logits"]
        )
        near(out.activations["logits"], wanted[0].logits[0])
        near(lm.encode(["text alone"], normalize=False)[0].data, wanted[4].hidden_states[-1][0, -1])
        with lm.trace(prompts[1]):
            lm.model.multi_modal_projector.output[:] = 0
            state = lm.model.language_model.layers[1].output.save()
        assert state.shape[-1] == lm.hidden_size
        vector = torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(2))
        steer = Steer("resid_post.1", vector, positions="image")
        (hooked,) = lm.forward([prompts[0]], interventions=[steer], capture=["resid_post.1"])
        pads = torch.tensor([token == model.config.image_token_id for token in hooked.prompt_token_ids])
        moved = hooked.activations["resid_post.1"] - wanted[0].hidden_states[2][0]
        near(moved, torch.where(pads[:, None], vector, 0.0))
        with pytest.raises(ValueError, match="site of a vision tower"):
            lm.generate(prompts[0], GREEDY, capture=["vision.out"])


@pytest.mark.parametrize(
    ("family", "text"), [("llava_onevision", "olmo2"), ("qwen2_5_vl", "olmo2"), ("llava", "unknown")]
)
def test_other_language_models_behind_other_towers_are_refused_by_name(family: str, text: str) -> None:
    config = vision_config(family)
    if text == "unknown":
        config.text_config.model_type = "unknown"
    else:
        config.text_config = AutoConfig.for_model(text)
    with pytest.raises(UnsupportedModelError, match=f"multimodal model over '{text}'"):
        check_supported(config)
