"""Positions named by images: "image", "image[i]", "text". They select what the numbers of their positions select."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_declared import lms
from helpers_images import PICTURES, prompt_of

from pymllm_interp import LM, Capture, Patch, SamplingParams, Steer
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.hooks import declarations
from pymllm_interp.hooks.positions import checked_positions, located, missing_of, windows_of
from pymllm_interp.interventions import Gate, Knockout, Monitor
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.specs import capture_of, intervention_of, to_json

Folders = Callable[[str], Path]
FAMILIES = list(PICTURES)
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lm(family: str, vision_folder: Folders) -> Iterator[LM]:
    with LM(
        vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024,
        max_interventions_per_site=32,
    ) as found:  # fmt: skip
        yield found


def numbers(prompt: RenderedPrompt, words: Any) -> list[int]:
    """The positions that words name, one after another."""
    images = [image.positions.tolist() for image in prompt.images]
    of_images = [place for image in images for place in image]
    found: list[int] = []
    for word in words if isinstance(words, list) else [words]:
        if isinstance(word, int):
            found.append(word)
        elif word == "text":
            found += [place for place in range(len(prompt.token_ids)) if place not in of_images]
        else:
            found += of_images if word == "image" else images[int(word[6:-1])]
    return found


WORDS: list[Any] = [
    "image", "image[0]", "image[1]", "image[-1]", "text", ["image[1]", -1], ["text", "image[0]"], ["image[1]", "image[0]"],
    [0, "image"],
]  # fmt: skip


def two_images(family: str) -> RenderedPrompt:
    return prompt_of(family, [1, 2, 3], 1, [4], 2, [5, 6, 7])


@pytest.mark.parametrize("family", FAMILIES)
def test_words_are_the_positions_of_placeholders(family: str) -> None:
    """Of all families, tiles with separators between among them; random words against the placeholders of the prompt."""
    chance = random.Random(family)
    for seed in range(20):
        prompt = prompt_of(family, [1] * chance.randrange(1, 5), seed, [2], *[seed + 1, [3, 4]] * chance.randrange(2))
        images = [image.positions.tolist() for image in prompt.images]
        words = chance.choice(
            ["image", "image[0]", "text", [0, "image"], ["image[-1]", "text"], f"image[{len(images) - 1}]"]
        )
        found = located(words, images, len(prompt.token_ids))
        assert list(found) == numbers(prompt, words)  # pyright: ignore[reportArgumentType]
        inside = {p for w in windows_of(found, len(prompt.token_ids)) for p in range(w.start, w.stop or 0, w.step)}
        assert inside == {place % len(prompt.token_ids) for place in numbers(prompt, words)}


@pytest.mark.parametrize(
    "words",
    ["images", "image[]", "image[1", "Image", "image[1.0]", "image[9999999]", ["image", "all"], ["image", True]],
)
def test_other_words_are_refused(words: Any) -> None:
    with pytest.raises(ValueError, match=r"expected 'all', 'prompt', 'generated', 'image', 'image\[0\]', 'text'"):
        checked_positions(words)


def test_words_name_each_position_once() -> None:
    image = range(1, 2000)
    for word in ("image[0]", "text", "image"):
        with pytest.raises(ValueError, match="twice"):
            located([word] * 100_000, [image], 4000, "skip")
    assert located(["image[1]"] * 100_000, [image], 4000, "skip") == ()


def test_missing_images_count_as_one_position_each() -> None:
    assert located(["image[2]", 1, 9], [[2, 3]], 5, "skip") == (1, 9)
    assert missing_of(located(["image[2]", 1, 9], [[2, 3]], 5, "skip"), 5) == 2
    assert missing_of("image", 5) == 1 and missing_of("text", 5) == 0


@pytest.mark.thin(4)
@pytest.mark.parametrize("words", WORDS, ids=str)
def test_captures_reductions_and_ops_are_those_at_the_numbers(family: str, lm: LM, words: Any) -> None:
    prompt = two_images(family)
    at, vector = numbers(prompt, words), torch.linspace(-2, 2, lm.hidden_size)
    rows = torch.randn(len(at), lm.hidden_size, generator=torch.Generator().manual_seed(1))
    outs = []
    for places in (words, at):
        outs += lm.generate(
            [prompt], GREEDY,
            interventions=[
                Steer("resid_post.0", vector, positions=places), Patch("resid_mid.1", rows, positions=places),
                Steer("mlp_out.1", vector, positions=places, when=Gate(vector, 0.0)),
                Monitor("resid_post.1", vector, 0.0, name="seen", positions=places),
            ],
            capture=[
                Capture("resid_post.*", places), Capture("embed", places, reduce="mean"),
                Capture("mlp_out.2", places, reduce="last"), Capture("q.1", places, heads=[1]),
            ],
        )  # fmt: skip
    own, wanted = outs
    assert own.token_ids == wanted.token_ids
    assert own.activations["resid_post.1"].shape[0] == len(at)
    for site in wanted.activations:
        assert torch.equal(own.activations[site], wanted.activations[site]), site
        assert torch.equal(own.activations.positions[site], wanted.activations.positions[site]), site
    assert torch.equal(own.monitors["seen"].scores, wanted.monitors["seen"].scores)
    assert own.receipt.interventions == wanted.receipt.interventions


def test_patterns_and_knockouts_between_image_and_text(family: str, lm: LM) -> None:
    prompt = two_images(family)
    outs = []
    for from_, to, read in (
        (["text"], "image[0]", "text"),
        (*[numbers(prompt, "text")], numbers(prompt, "image[0]"), numbers(prompt, "text")),
    ):
        outs += lm.forward(
            [prompt],
            interventions=[Knockout([1], from_=from_, to=to)],
            capture=[Capture("pattern.*", read), "resid_post.*"],
        )
    own, wanted = outs
    for site in wanted.activations:
        assert torch.equal(own.activations[site], wanted.activations[site]), site
    behind = own.activations["pattern.1"][-1][..., numbers(prompt, "image[0]")]
    assert bool((behind == 0).all()) and bool((own.activations["pattern.0"][-1] > 0).any())


def test_monitors_act_behind_an_image_of_their_prompt(family: str, lm: LM) -> None:
    prompt, vector = two_images(family), torch.linspace(-2, 2, lm.hidden_size)
    outs = []
    for places in ("image[1]", numbers(prompt, "image[1]")):
        watch = Monitor(
            "resid_post.1", vector, -1e9, then=Steer("resid_post.1", 3 * vector), positions=places, name="m"
        )
        outs += lm.generate([prompt], GREEDY, monitors=[watch])
    assert outs[0].token_ids == outs[1].token_ids != lm.generate([prompt], GREEDY)[0].token_ids


def test_each_prompt_of_a_call_has_its_own_places(family: str, lm: LM) -> None:
    """One spec for prompts whose images lie elsewhere, and for text: "text" is all of that."""
    prompts = [prompt_of(family, [1] * n, seed, [2] * m) for n, seed, m in ((1, 0, 3), (5, 3, 1), (2, 1, 2), (1, 0, 3))]
    text, capture = RenderedPrompt(None, [7, 8, 9]), [Capture("resid_post.1", "image"), Capture("mlp_out.0", "text")]
    with pytest.raises(
        PromptError, match=r"prompt 4: Capture\('resid_post.1'\): positions 'image': the prompt has no images"
    ):
        lm.generate([*prompts, text], GREEDY, capture=capture)
    capture[0] = Capture("resid_post.1", "image", missing="skip")
    outs = lm.generate([*prompts, text], GREEDY, capture=capture)
    for prompt, out in zip(prompts, outs[:-1], strict=True):
        assert out.activations.positions["resid_post.1"].tolist() == numbers(prompt, "image")
        assert out.activations.positions["mlp_out.0"].tolist() == numbers(prompt, "text")
    assert outs[-1].activations["mlp_out.0"].shape[0] == 3 and len(outs[-1].activations["resid_post.1"]) == 0
    assert lm.engine.stats()["running"] == 0


@pytest.mark.parametrize("places", ["image[2]", ["image[0]", "image[-3]"]], ids=str)
def test_an_image_that_a_prompt_lacks_is_refused_before_scheduling(family: str, lm: LM, places: Any) -> None:
    prompt, vector = two_images(family), torch.ones(lm.hidden_size)
    before = lm.engine.stats()["steps"] if "steps" in lm.engine.stats() else None
    bad: list[dict[str, Any]] = [
        {"capture": [Capture("resid_post.0", places)]},
        {"interventions": [Steer("resid_post.0", vector, positions=places)]},
        {"interventions": [Knockout([0], from_=-1, to=places)]},
        {"monitors": [Monitor("resid_post.0", vector, 0.0, positions=places)]},
    ]
    for hooks in bad:
        with pytest.raises(PromptError, match=r"the prompt has 2 images, image\[0\] to image\[1\]; missing='skip'"):
            lm.generate([prompt], GREEDY, **hooks)
        with pytest.raises(PromptError, match="has no images"):
            lm.generate([[1, 2, 3]], GREEDY, **hooks)
    with pytest.raises(PromptError, match="named twice"):
        lm.generate([prompt], GREEDY, capture=[Capture("resid_post.0", ["image", "image[0]"])])
    assert before is None or lm.engine.stats()["steps"] == before


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_json_holds_words(words: Any) -> None:
    steer, cut = Steer("resid_post.0", torch.ones(4), positions=words), Knockout([0], from_=words, to="text")
    for spec in (steer, cut):
        assert intervention_of(to_json(spec)) == spec
    assert capture_of(to_json(Capture("embed", words))) == Capture("embed", words)


@pytest.mark.parametrize("way", ["tables", pytest.param("graphs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_words_in_device_tables_and_graphs(family: str, way: str, vision_folder: Folders) -> None:
    prompt = two_images(family)
    with lms(way, vision_folder) as load:
        lm = load(family, max_num_tokens=16, page_size=4)
        vector = torch.linspace(-2, 2, lm.hidden_size)
        outs = []
        for places in ("image", numbers(prompt, "image")):
            outs += lm.generate(
                [prompt], GREEDY, interventions=[Steer("resid_post.0", vector, positions=places)],
                capture=[Capture("resid_post.1", places)],
            )  # fmt: skip
        assert outs[0].token_ids == outs[1].token_ids
        assert torch.equal(outs[0].activations["resid_post.1"], outs[1].activations["resid_post.1"])
        assert len(outs[0].activations["resid_post.1"]) == len(numbers(prompt, "image"))


def test_words_select_a_bounded_number_of_positions(family: str, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(family, [3, 4], 1, [5, 7])
    count = len(numbers(prompt, "image"))
    monkeypatch.setattr(declarations, "MAX_LISTED", 5 * count - 1)
    steers = [Steer(f"resid_post.{i % 2}", torch.ones(lm.hidden_size), positions="image") for i in range(5)]
    with pytest.raises(PromptError, match="select more than"):
        lm.generate([prompt], GREEDY, interventions=steers)
    watch = Monitor("resid_post.0", torch.ones(lm.hidden_size), 1e9, then=steers[0], positions="image")
    with pytest.raises(PromptError, match="select more than"):
        lm.generate([prompt], GREEDY, interventions=steers[:3], monitors=[watch])
    assert lm.generate([prompt], GREEDY, interventions=steers[:4])[0].token_ids
