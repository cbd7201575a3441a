"""Requests with images: states, tokens and KV, beside text requests. The oracle is transformers' own model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_declared import lms
from helpers_devices import DEVICES
from helpers_images import PICTURES, continued, prompt_of, random_prompt, reference
from helpers_vllm import save_image_model
from transformers import AutoConfig, PreTrainedModel

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.client.handle import RequestError
from pymllm_interp.client.images.parts import ImageSources
from pymllm_interp.client.images.reader import ImageReader
from pymllm_interp.config import EngineTuning
from pymllm_interp.core.image_input import ImageInput
from pymllm_interp.interventions import Knockout
from pymllm_interp.utils.arguments import PromptError

Folders = Callable[[str], Path]
Oracle = Callable[[str], PreTrainedModel]
FAMILIES = list(PICTURES)
GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DEVICES)
def lm(request: pytest.FixtureRequest, family: str, vision_folder: Folders) -> Iterator[LM]:
    with LM(vision_folder(family), device=request.param, dtype="float32", page_size=4, kv_cache_tokens=1024) as found:
        yield found


def assert_near(found: torch.Tensor, wanted: torch.Tensor, atol: float = 2e-4) -> None:
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-4, atol=atol)


def assert_rounded(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Values are equal but for rounding: 128 units in the last place of the largest one, as sums differ in their order."""
    assert_near(found, wanted, 2**-16 * float(wanted.abs().max()))


def some_prompts(family: str) -> list[RenderedPrompt]:
    """Text; an image before, behind and between text; several of one size and of others; one token behind an image."""
    text = [5, 6, 7, 8, 9, 10, 11]
    parts: list[tuple] = [(text,), (1, text), (text, 0, [3]), (text, 2, text, 1, text, 4, [1, 2]), (0, [1], 0, [2])]
    return [prompt_of(family, *own) for own in parts]


def test_states_and_logits_are_those_of_transformers(family: str, lm: LM, vision_oracle: Oracle) -> None:
    model, prompts = vision_oracle(family), some_prompts(family)
    outs = lm.forward(prompts, capture=["embed", "resid_post.*", "final_norm"])
    for out, prompt in zip(outs, prompts, strict=True):
        wanted = reference(family, model, prompt, output_hidden_states=True)
        states = wanted.hidden_states
        assert_near(out.logits, wanted.logits[0])
        assert_rounded(out.activations["embed"], states[0][0])
        assert_near(out.activations["final_norm"], states[-1][0])
        for layer in range(lm.num_layers - 1):
            assert_near(out.activations[f"resid_post.{layer}"], states[layer + 1][0])


def test_traces_see_merged_embeddings_and_the_states_of_the_fused_pass(
    family: str, lm: LM, vision_oracle: Oracle
) -> None:
    prompt = some_prompts(family)[3]
    wanted = reference(family, vision_oracle(family), prompt, output_hidden_states=True)
    path = lm.model_spec.family.layers.removesuffix(".layers").split(".")[-1]
    with lm.trace(prompt):
        text = getattr(lm.model, path)
        embedded = text.embed_tokens.output.save()
        inside = getattr(text.layers[1], lm.model_spec.family.mlp_out or "mlp").output.save()
        state = text.layers[1].output.save()
        logits = lm.lm_head.output.save()
    (out,) = lm.forward([prompt], capture=["mlp_out.1", "resid_post.1"])
    assert_rounded(embedded, wanted.hidden_states[0])
    assert_near(state, wanted.hidden_states[2])
    for seen, kept in ((state, out.activations["resid_post.1"]), (logits, out.logits)):
        assert_near(seen[0], kept)
        assert seen.is_cuda or torch.equal(seen[0], kept), "the fused pass of a CPU has the same bits"
    assert_near(inside[0], out.activations["mlp_out.1"], 1e-4)


def test_patterns_are_the_attention_of_transformers(family: str, lm: LM, vision_oracle: Oracle) -> None:
    """By declared captures, and by transformers' eager attention in the pass; within an image of Gemma 3 in both directions."""
    for prompt in some_prompts(family)[1:4]:
        wanted = reference(family, vision_oracle(family), prompt, output_attentions=True).attentions
        (out,) = lm.forward([prompt], capture=["pattern.*"])
        for layer, weights in enumerate(wanted):
            assert_near(out.activations[f"pattern.{layer}"].transpose(0, 1), weights[0], 1e-4)
        with lm.trace(prompt, output_attentions=True):
            attentions = lm.output.attentions.save()
        for own, weights in zip(attentions, wanted, strict=True):
            assert_near(own, weights, 1e-4)


def test_a_knockout_cuts_edges_between_image_and_text(family: str, lm: LM) -> None:
    """The last token does not see the image at some layers; all other rows are as before."""
    prompt = prompt_of(family, [1, 2, 3], 1, [4, 5, 6])
    last, image = len(prompt.token_ids) - 1, prompt.images[0].positions.tolist()
    for layers in ([0, 1, 2], [1]):
        cut = Knockout(layers, from_=[last], to=image)
        (out,) = lm.forward([prompt], interventions=[cut], capture=["pattern.*", "resid_post.*"])
        (plain,) = lm.forward([prompt], capture=["pattern.*", "resid_post.*"])
        for layer in range(3):
            pattern, as_before = (each.activations[f"pattern.{layer}"] for each in (out, plain))
            hidden = pattern[last][..., image]
            assert bool((hidden == 0).all()) == (layer in layers)
            assert_near(pattern[:last], as_before[:last], 1e-6)
        assert not torch.allclose(
            out.activations["resid_post.1"][last], plain.activations["resid_post.1"][last], atol=1e-4
        )


# -- beside each other -------------------------------------------------------------------------


def check_crowd(family: str, lm: LM, model: PreTrainedModel, seeds: range) -> None:
    """Text and images, some of them twice, at once: each is what transformers makes of it."""
    chance, runs = random.Random(seeds.start), list[tuple[RenderedPrompt, int]]()
    for seed in seeds:
        runs += [(random_prompt(family, seed), chance.randrange(1, 7))] * chance.randrange(1, 3)
    chance.shuffle(runs)
    wanted = [continued(family, model, prompt, count) for prompt, count in runs]
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda run: lm.generate([run[0]], replace(GREEDY, max_tokens=run[1]))[0].token_ids, runs)
        )
    for run, own, tokens in zip(runs, found, wanted, strict=True):
        assert own == tokens, run


WAYS = [
    pytest.param(family, "functions", marks=[] if family in ("qwen3_vl", "llava") else GPU or pytest.mark.slow)
    for family in FAMILIES
] + [
    pytest.param(
        family, way, marks=GPU or ([] if way == "graphs" and family in ("qwen2_5_vl", "gemma3") else pytest.mark.slow)
    )
    for family in FAMILIES
    for way in ("tables", "graphs")
]
"""Families and modes: on a CPU two by functions, and two with captured passes."""


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_requests_of_a_small_pool_do_not_see_each_other(
    family: str, vision_folder: Folders, vision_oracle: Oracle, way: str
) -> None:
    """Chunks of 7 tokens, pages of 4, a pool that three long requests fill, an encoder cache of one image."""
    with lms(way, vision_folder) as load:
        small = {"max_num_tokens": 7, "page_size": 4, "kv_cache_tokens": 192, "max_running_requests": 4}
        lm = load(family, **small, encoder_cache_tokens=4)
        check_crowd(family, lm, vision_oracle(family), range(12 if way == "functions" else 5))
        lm.engine.call(lm.engine.scheduler.check_integrity)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1200, 40))
def test_crowds(family: str, vision_folder: Folders, vision_oracle: Oracle, start: int) -> None:
    with LM(
        vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=256, max_num_tokens=11,
        max_running_requests=6, tuning=EngineTuning(encoder_cache_tokens=8),
    ) as lm:  # fmt: skip
        check_crowd(family, lm, vision_oracle(family), range(start, start + 40))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_requests_decode_beside_others_as_alone(family: str, device: str, tmp_path: Path) -> None:
    """With heads that compiled kernels take: these read a row of cosines behind the other."""
    prompts = [prompt_of(family, [5, 6, 7], 0, [8]), prompt_of(family, [9] * 30), prompt_of(family, [1], 0, [4, 2], 1)]
    params = replace(GREEDY, ignore_eos=True, logprobs=1)
    with LM(save_image_model(family, tmp_path / family), device=device, dtype="float32", kv_cache_tokens=1024) as lm:
        alone, together = [lm.generate([prompt], params)[0] for prompt in prompts], lm.generate(prompts, params)
    for found, wanted in zip(together, alone, strict=True):
        assert found.token_ids == wanted.token_ids
        chosen = [
            torch.tensor([next(iter(step.values())).logprob for step in out.logprobs or ()]) for out in (found, wanted)
        ]
        assert_near(*chosen)


@pytest.mark.few("family", "gemma3", "qwen2_5_vl", "qwen3_vl")
def test_a_preempted_request_has_its_images_again(family: str, vision_folder: Folders, vision_oracle: Oracle) -> None:
    prompts = [prompt_of(family, [seed + 1], seed, [1, 2, 3]) for seed in (0, 3, 4)]
    room = max(len(prompt.token_ids) for prompt in prompts) + 24
    with LM(vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=2 * room) as lm:
        outs = lm.generate(prompts, replace(GREEDY, max_tokens=20))
        assert lm.engine.stats()["preempted"] > 0
    assert [out.token_ids for out in outs] == [continued(family, vision_oracle(family), p, 20) for p in prompts]


# -- the prefix cache and the encoder cache -------------------------------------------------------


@pytest.mark.few("family", "gemma3", "qwen2_5_vl", "qwen3_vl")
def test_equal_images_share_kv_and_others_never(family: str, lm: LM, vision_oracle: Oracle) -> None:
    """Images 0 and 3 have the same placeholder ids."""
    one, other = (
        prompt_of(family, [1, 2, 3, 4, 5], 0, [6, 7, 8, 9]),
        prompt_of(family, [1, 2, 3, 4, 5], 3, [6, 7, 8, 9]),
    )
    assert one.token_ids == other.token_ids and one.images[0].content != other.images[0].content
    cached = list[int]()
    for prompt in (one, other, one, other):
        (out,) = lm.generate([prompt], GREEDY)
        assert out.token_ids == continued(family, vision_oracle(family), prompt, 5)
        cached.append(out.num_cached_tokens)
    most = (len(one.token_ids) - 1) // 4 * 4
    assert cached == [0, 4, most, most]


@pytest.mark.few("family", "gemma3", "qwen3_vl")
def test_the_tower_runs_once_an_image(family: str, lm: LM) -> None:
    """16 requests at once over one image, with other texts before it: nothing of it is in the prefix cache."""
    vision = lm.runner.step_inputs.vision
    assert vision is not None
    prompts = [prompt_of(family, [i + 1, i + 2], 0, [i + 1]) for i in range(16)]
    lm.generate(prompts, GREEDY)
    assert vision.cache.num_computed == 1
    lm.generate([prompt_of(family, [77], seed, [78]) for seed in (0, 3, 1)], GREEDY)
    assert vision.cache.num_computed == 3 and vision.cache.stats()["images"] == 3


def test_cached_and_fresh_states_have_equal_bits(family: str, lm: LM) -> None:
    prompt, fresh = (
        prompt_of(family, [1, 2], 0, [4], 1, [5]),
        SamplingParams(max_tokens=0, skip_reading_prefix_cache=True),
    )
    states = []
    for again in (False, False, True):
        if again:
            lm.runner.reset_encoder_cache()
        (out,) = lm.generate([prompt], fresh, capture=["embed", "final_norm"])
        states.append(out.activations)
    for site in ("embed", "final_norm"):
        assert torch.equal(states[0][site], states[1][site]) and torch.equal(states[0][site], states[2][site])


def test_an_edit_of_the_tower_counts_at_once(family: str, vision_folder: Folders) -> None:
    prompt = prompt_of(family, [1, 2, 3, 4, 5], 0, [6])
    with LM(vision_folder(family), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=512) as lm:
        before = lm.forward([prompt])[0].logits
        tower = next(p for n, p in lm.runner.get_model().named_parameters() if "vis" in n and p.dim() > 1)
        with torch.no_grad():
            tower.mul_(1.5)
        after = lm.forward([prompt])[0].logits
        with torch.no_grad():
            tower.div_(1.5)
        again = lm.forward([prompt])[0].logits
    assert not torch.allclose(before, after, atol=1e-4)
    torch.testing.assert_close(before, again, rtol=1e-4, atol=1e-4)


@pytest.mark.few("family", "gemma3", "qwen2_5_vl", "qwen3_vl")
def test_ops_and_images_are_parts_of_one_key(family: str, lm: LM) -> None:
    """Steered and plain requests of one image and of another: each equals itself without the prefix cache."""
    width = lm.hidden_size
    steer = Steer("resid_post.0", vector=torch.linspace(-3, 3, width), positions=[3, 9])
    runs = [(prompt_of(family, [1, 2, 3, 4, 5], seed, [6, 7]), ops) for seed in (0, 3) for ops in ([], [steer])] * 2
    random.Random(1).shuffle(runs)
    for prompt, ops in runs:
        fresh = replace(GREEDY, skip_reading_prefix_cache=True)
        (wanted,) = lm.generate([prompt], fresh, interventions=ops, cache_salt=f"never again {id(ops)}")
        (out,) = lm.generate([prompt], GREEDY, interventions=ops)
        assert out.token_ids == wanted.token_ids


def test_an_image_that_the_tower_cannot_read_ends_its_own_request(family: str, lm: LM, vision_oracle: Oracle) -> None:
    good = [prompt_of(family, [1, 2], seed, [3]) for seed in (0, 1)]
    (image,) = good[0].images
    cut = {name: x[..., :-1] if name == "pixel_values" else x for name, x in image.features.items()}
    few = ImageInput(image.positions[:-1], image.features, b"other")
    bad = [RenderedPrompt(None, good[0].token_ids, None, (own,)) for own in (ImageInput.of(image.positions, cut), few)]
    params = replace(GREEDY, max_tokens=3)
    handles = [lm.submit(prompt, params) for prompt in (bad[0], good[0], bad[1], good[1])]
    for handle in (handles[0], handles[2]):
        with pytest.raises(RequestError, match=r"ImageError: .*(cannot read|placeholders)"):
            handle.result()
    for handle, prompt in ((handles[1], good[0]), (handles[3], good[1])):
        assert handle.result().token_ids == continued(family, vision_oracle(family), prompt, 3)


def test_tokens_between_those_of_an_image_are_refused(family: str, vision_folder: Folders) -> None:
    """Positions of mrope, and attention within an image, are those of a run of tokens."""
    config = AutoConfig.from_pretrained(vision_folder(family))
    reader, features = ImageReader(config, None, None, 4, 1 << 20), PICTURES[family].features(0, 1)
    count = reader.family.tokens(features)
    ids = [1, reader.family.placeholder, 2, *[reader.family.placeholder] * (count - 1), 3]
    prompt = RenderedPrompt(None, ids, None, ImageSources([features]))  # pyright: ignore[reportArgumentType]
    if reader.family.parted:
        assert len(reader.placed(prompt, "the prompt").images) == 1
        return
    with pytest.raises(PromptError, match="the prompt has other tokens between"):
        reader.placed(prompt, "the prompt")
