"""Prompts with images over vLLM, against our own engine: the same calls, positions and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_images import prompt_of
from helpers_server import serving
from helpers_vision import encoded, picture, placed
from helpers_vllm import (
    WIDTH,
    assert_close,
    assert_close_tensor,
    needs_vllm,
    own_lm,
    prompt,
    save_image_model,
    since,
    two_ranks,
    vector,
    vllm_lm,
)
from transformers import AutoImageProcessor

from pymllm_interp import LM, Ablate, Capture, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.interventions import Knockout, Monitor
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.vllm_engine import llm_arguments
from pymllm_interp.vllm_engine.refusals import VllmRefusalError, refuse_config

pytestmark = [needs_vllm, since("0.31", "its LLaVA imports a class that transformers has no more")]
FAMILIES = ("llava", "qwen3_vl", "qwen2_5_vl")
OTHERS = ("internvl", "mistral3", "smolvlm", "idefics3", "llava_onevision")
OPTIONS: dict[str, Any] = {"max_num_tokens": 24, "inner_sites": ("z",), "limit_mm_per_prompt": {"image": 3}}
MANY_RUNS: dict[str, Any] = {"max_interventions_per_site": 16}
"""Settings for images with other tokens between their placeholders."""
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
Engines = tuple[str, LM, LM]


@pytest.fixture(scope="module", params=[*FAMILIES[:2], pytest.param(FAMILIES[2], marks=pytest.mark.slow)])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A family, its LM over vLLM with prompts in chunks, and our own engine over the same weights."""
    folder = save_image_model(request.param, tmp_path_factory.mktemp(request.param))
    with vllm_lm(folder, **OPTIONS) as lm, own_lm(folder) as oracle:
        yield request.param, lm, oracle


def assert_equal(lm: LM, oracle: LM, prompts: list[Any], **options: Any) -> list[Any]:
    """Equal results of both engines. Returns vLLM's."""
    found, wanted = (model.generate(prompts, GREEDY, **options) for model in (lm, oracle))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
        assert list(one.monitors) == list(other.monitors)
        for name, monitor in other.monitors.items():
            assert one.monitors[name].positions.tolist() == monitor.positions.tolist()
            torch.testing.assert_close(one.monitors[name].scores, monitor.scores, rtol=1e-3, atol=1e-3)
    return found


def test_words_for_images_select_our_engines_positions(engines: Engines) -> None:
    """Images of several sizes beside text, in chunks that cut them: ops, captures and monitors."""
    family, lm, oracle = engines
    prompts = [
        prompt_of(family, [5, 6, 7], 0, [8, 9]), prompt(30, 1), prompt_of(family, 1, [4], 2, [9, 9, 9, 3]),
        prompt_of(family, prompt(29, 2), 3, [2]), prompt(6, 5), prompt_of(family, 2),
    ]  # fmt: skip
    ops: list[Any] = [
        [Steer("resid_post.1", vector(1), 2.0, positions="image"), Scale("mlp_out.0", 0.5, positions=["image[0]", -1])],
        None,
        [Steer("resid_mid.1", vector(2), positions="image[1]"), Ablate("attn_out.0", vector(3), positions="text")],
        [Scale("z.1", 0.0, heads=[1], positions="image"), Patch("resid_pre.1", vector(4, 1, WIDTH), positions=[-1])],
        [Steer("resid_post.0", vector(5), positions=["image", 0], missing="skip")],
        [Steer("embed", vector(6), 0.5, positions=["text"], when=Gate(vector(7), 0.0))],
    ]
    captures: list[Any] = [
        [Capture("resid_post.*", positions="image"), "embed", "logits"],
        None,
        [Capture("resid_post.*", positions=["image[1]", 0]), "z.1", "attn_in.2"],
        [Capture("mlp_out.*", positions="text", reduce="mean"), Capture("resid_mid.2", reduce="last")],
        ["resid_post.2"],
        ["attn_out.*", Capture("final_norm", positions="image")],
    ]
    monitors: list[Any] = [[Monitor("resid_post.1", vector(8), 0.0, positions="image")], *[None] * 5]
    for specs in (None, ops, None, ops):  # behind cached KV of the same images, too
        assert_equal(lm, oracle, prompts, interventions=specs, monitors=monitors)
    found = assert_equal(lm, oracle, prompts, interventions=ops, capture=captures, monitors=monitors)
    assert len(found[0].activations["resid_post.1"]) == len(prompts[0].images[0].positions)  # pyright: ignore


def test_kv_is_shared_by_the_images_content(engines: Engines) -> None:
    family, lm, oracle = engines
    first, last = prompt(30, 11), prompt(40, 12)
    same, other = prompt_of(family, first, 0, last), prompt_of(family, first, 3, last)
    text = prompt(60, 11)
    cached = [assert_equal(lm, oracle, [one])[0].num_cached_tokens for one in (text, same, same, other, other, text)]
    assert cached[1] == cached[3] == 0 and min(cached[2], cached[4]) >= 64 and cached[5] == 32
    steer = [Steer("resid_post.0", vector(1), 2.0, positions="image")]
    cached = [assert_equal(lm, oracle, [same], interventions=steer)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, cached[1]] and cached[1] >= 64
    salted = SamplingParams(temperature=0, max_tokens=1)
    cached = [lm.generate([same], salted, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "b", "a")]
    assert cached[:2] == [0, 0] and cached[2] >= 64


def test_each_form_of_a_prompt_is_our_engines(engines: Engines) -> None:
    family, lm, oracle = engines
    one, two = picture(20, 16), picture(12, 20, seed=3)
    text, images = placed(family, "see ", one, " and ", two, "?")
    alone, (image,) = placed(family, "a ", one, " b")
    data = {"multi_modal_data": {"image": images}}
    ids = lm.tokenizer(text)["input_ids"]
    said = [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "what?"}]}]
    prompts = [{"prompt": text, **data}, {"prompt_token_ids": ids, **data}, "text"]
    found = assert_equal(lm, oracle, prompts, capture=["resid_post.*"])
    assert found[0].token_ids == found[1].token_ids
    features = dict(AutoImageProcessor.from_pretrained(lm.backend.facts.folder)([one], return_tensors="pt"))
    (read,) = lm.generate({"prompt": alone, "multi_modal_data": {"image": image}}, GREEDY)
    given = {"input_ids": torch.tensor([read.prompt_token_ids]), **features}
    assert assert_equal(lm, oracle, [given])[0].token_ids == read.token_ids
    assert_close(*(model.chat(said, GREEDY)[0] for model in (lm, oracle)))
    streamed = [piece for model in (lm, oracle) for piece in model.stream(prompts[0], GREEDY)]
    assert [token for piece in streamed for token in piece.token_ids] == 2 * found[0].token_ids
    states = []
    for model in (lm, oracle):
        with model.trace(alone, images=[image]):
            state = model.model.language_model.layers[1].output.save()
        states.append(state[0] if isinstance(state, tuple) else state)
    assert_close_tensor(*states)


def test_what_is_not_served_is_refused_by_name_and_the_engine_lives(engines: Engines) -> None:
    family, lm, oracle = engines
    text, images = placed(family, "a ", picture())
    good = {"prompt": text, "multi_modal_data": {"image": images}}
    (before,) = assert_equal(lm, oracle, [good])
    for bad, message in (
        (encoded(images[0])[:-40], "image 0"), (images * 2, "2 images, and 1 places"), (images * 4, "at most 3"),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            lm.generate({**good, "multi_modal_data": {"image": bad}}, GREEDY)
    with pytest.raises(PromptError, match="and no image"):
        lm.generate(text, GREEDY)
    assert not [site for site in lm.sites if site.startswith("vision")]
    tower: list[dict[str, Any]] = [
        {"capture": ["vision.out"]}, {"interventions": [Scale("vision.resid_post.0", 0.5)]},
        {"monitors": [Monitor("vision.mlp_out.1", vector(1))]},
        {"monitors": [Monitor("resid_post.1", vector(1), then=[Scale("vision.resid_post.0", 0.5)])]},
    ]  # fmt: skip
    for options in tower:
        with pytest.raises(ValueError, match="engine='vllm' the vision tower has no sites"):
            lm.generate(good, GREEDY, **options)
    with pytest.raises(ValueError, match=r"vision\.out"):
        gate = Gate(vector(1), 0.0, site="vision.out")
        lm.generate(good, GREEDY, interventions=[Steer("resid_post.1", vector(1), when=gate)])
    with pytest.raises(ValueError, match="no edge of attention is cut in this model"):
        lm.generate(good, GREEDY, interventions=[Knockout(1, from_="text", to="image")])
    with pytest.raises(ValueError, match="the prompt has 1 images"):
        lm.generate(good, GREEDY, capture=[Capture("resid_post.1", positions="image[1]")])
    with pytest.raises(VllmRefusalError, match="no block runs in the passes of"):
        with lm.trace(text, images=images):
            lm.model.language_model.layers[1].self_attn.q_proj.output.save()
    assert assert_equal(lm, oracle, [good])[0].token_ids == before.token_ids


def test_settings_without_images_are_refused_before_the_load(tmp_path: Path) -> None:
    """vLLM's cache of processed images, too: those of an attached LM would push out its user's, who then gets no tokens."""
    folder = save_image_model("llava", tmp_path / "llava")
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    for options in (
        {"enable_lora": True}, {"enable_prompt_embeds": True}, {"pipeline_parallel_size": 2}, {"speculative_config": drafts},
    ):  # fmt: skip
        with pytest.raises(VllmRefusalError, match=f"{next(iter(options))}.* for a model with images"):
            vllm_lm(folder, **options)
    other = save_image_model("qwen3_vl", tmp_path / "qwen3_vl")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"mrope_interleaved": true', '"mrope_interleaved": false'))
    with pytest.raises(VllmRefusalError, match="without mrope_interleaved"):
        vllm_lm(other)
    third = save_image_model("llava_onevision", tmp_path / "llava_onevision")
    config = (third / "config.json").read_text()
    assert '"anyres_max_9"' in config
    (third / "config.json").write_text(config.replace('"anyres_max_9"', '"anyres_max_4"'))
    with pytest.raises(VllmRefusalError, match="another vision_aspect_ratio than anyres_max_9"):
        vllm_lm(third)
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    own = {"model": str(folder), "dtype": "float32", "max_model_len": 128, **llm_arguments()}
    refuse_config(EngineArgs(**own).create_engine_config())
    with pytest.raises(VllmRefusalError, match="mm_processor_cache_gb above 0"):
        refuse_config(EngineArgs(**{**own, "mm_processor_cache_gb": 1}).create_engine_config())


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_our_engines(family: str, tmp_path: Path) -> None:
    """Images in chunks that cut them, of several tiles and sizes, beside each other and behind cached KV."""
    folder = save_image_model(family, tmp_path / family)
    one, two, wide = picture(20, 16), picture(12, 20, seed=3), picture(40, 16, seed=4)
    places = [("see ", one, " and ", two, "?"), ("a ", wide), (two, " b ", one, wide), ("text",)]
    texts = [placed(family, *parts) for parts in places]
    prompts = [{"prompt": text, "multi_modal_data": {"image": images}} if images else text for text, images in texts]
    ops: list[Any] = [
        [Steer("resid_post.1", vector(1), 2.0, positions="image[1]")],
        [Ablate("attn_out.0", vector(3), positions="image")],
        [Scale("mlp_out.2", 0.5, positions=["text", "image[0]"])],
        None,
    ]
    captures: list[Any] = [["resid_post.*", "logits"], [Capture("resid_mid.*", positions="image")], ["embed"], None]
    with vllm_lm(folder, **OPTIONS, **MANY_RUNS) as lm, own_lm(folder, **MANY_RUNS) as oracle:
        for specs in (None, ops, None, ops):
            assert_equal(lm, oracle, prompts, interventions=specs)
        assert_equal(lm, oracle, prompts, interventions=ops, capture=captures)
        if family in ("smolvlm", "idefics3"):
            _refuses_what_vllm_reads_otherwise(family, lm)
            assert_equal(lm, oracle, prompts)


def _refuses_what_vllm_reads_otherwise(family: str, lm: LM) -> None:
    masked = prompt_of(family, [5], 1)
    padding = prompt_of(family, [5], 1)
    features = padding.images[0].features  # pyright: ignore[reportAttributeAccessIssue]
    features["pixel_attention_mask"][:] = 1
    features["pixel_values"][0, 1] = 0
    for bad, message in ((masked, "masked pixels"), (padding, "a tile of zeros")):
        with pytest.raises(PromptError, match=message):
            lm.generate([bad], GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_two_ranks_are_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**OPTIONS, "tensor_parallel_size": 2, "inner_sites": (), **MANY_RUNS}
    two_ranks(monkeypatch, options)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = save_image_model(family, tmp_path / family, **sizes)
    one, two = picture(20, 16), picture(12, 20, seed=3)
    places = [placed(family, "see ", one, " and ", two, "."), placed(family, "b ", two, ".")]
    prompts: list[Any] = [prompt(9, 1), *({"prompt": text, "multi_modal_data": {"image": own}} for text, own in places)]
    steer = Steer("resid_post.1", vector(1, 128), 2.0, positions=["image", 0], missing="skip")
    with vllm_lm(folder, **options) as lm, own_lm(folder, **MANY_RUNS) as oracle:
        for ops in (None, [steer]):
            assert_equal(lm, oracle, prompts, interventions=ops, capture=["resid_post.*", "logits"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_client_of_a_server_gets_our_engines_results(family: str, tmp_path: Path) -> None:
    folder = save_image_model(family, tmp_path / family)
    options = [
        "--engine", "vllm", "--dtype", "float32", "--option", "max_model_len=128", "--option", "kv_cache_tokens=2048", "--option",
        "disable_cuda_graph=True", "--option", "gpu_memory_utilization=0.05", "--limit-mm-per-prompt", '{"image": 2}',
    ]  # fmt: skip
    text, images = placed(family, "a ", picture(20, 16), " b")
    ask = {"prompt": text, "multi_modal_data": {"image": images}}
    said = [{"role": "user", "content": [{"type": "image", "image": images[0]}, {"type": "text", "text": "what?"}]}]
    with serving(folder, *options, keys=None) as server, LM.connect(server.url) as lm, own_lm(folder) as oracle:
        assert_equal(lm, oracle, [ask], capture=[Capture("resid_post.*", positions="image")])
        assert_close(*(model.chat(said, GREEDY)[0] for model in (lm, oracle)))
        with pytest.raises(PromptError, match="at most 2"):
            lm.generate({**ask, "multi_modal_data": {"image": images * 3}}, GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_forget_the_towers_states(family: str, tmp_path: Path) -> None:
    first, second = (save_image_model(family, tmp_path / name, seed=i) for i, name in enumerate("ab"))
    ask = prompt_of(family, prompt(30, 1), 0, [8, 9])
    with vllm_lm(first, **OPTIONS) as lm, own_lm(first) as oracle:
        assert_equal(lm, oracle, [ask], capture=["resid_post.*"])
        for model in (lm, oracle):
            model.update_weights(second)
        assert_equal(lm, oracle, [ask])
        assert_equal(lm, oracle, [ask], capture=["resid_post.*"])
