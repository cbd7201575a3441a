"""Calls with images, from pictures to tokens: transformers' processor and model make the same of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_devices import DEVICES
from helpers_images import PICTURES
from helpers_vision import encoded, generated, picture, placed, reference_processor
from transformers import PreTrainedModel

from pymllm_interp import LM, SamplingParams
from pymllm_interp.utils.arguments import PromptError

FAMILIES = list(PICTURES)
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def case(
    request: pytest.FixtureRequest,
    device: str,
    vision_folder: Callable[[str], Path],
    vision_oracle: Callable[[str], PreTrainedModel],
) -> Iterator[tuple[str, LM, Any, PreTrainedModel]]:
    family = request.param
    folder = vision_folder(family)
    with LM(folder, device=device, dtype="float32", kv_cache_tokens=2048) as lm:
        yield family, lm, reference_processor(family, folder), vision_oracle(family)


def test_generate_chat_and_stream_are_those_of_transformers(case: Any) -> None:
    family, lm, processor, model = case
    first, second = picture(40, 28), picture(20, 44, seed=3)
    prompts, wanted = list[Any](), list[Any]()
    for parts in (
        ("see ", first, " what?"),
        (first, second, "\nboth"),
        ("x", second),
        (first, "again"),
        ("see ", first, " why?"),
    ):
        text, images = placed(family, *parts)
        inputs = processor(text=[text], images=[images], return_tensors="pt")
        prompts.append({"prompt": text, "multi_modal_data": {"image": images}})
        wanted.append((inputs["input_ids"][0].tolist(), generated(model, dict(inputs), 5)))
    outs = lm.generate([*prompts, "text alone"], GREEDY)
    assert [(out.prompt_token_ids, out.token_ids) for out in outs[:-1]] == wanted
    assert outs[0].prompt == prompts[0]["prompt"]
    (streamed,) = [list(lm.stream(prompts[1], GREEDY))]
    assert [token for piece in streamed for token in piece.token_ids] == wanted[1][1]
    said = [{"role": "user", "content": [{"type": "image", "image": first}, {"type": "text", "text": "what?"}]}]
    text = processor.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[[first]], add_special_tokens=False, return_tensors="pt")
    (chatted,) = lm.chat(said, GREEDY)
    assert (chatted.prompt_token_ids, chatted.token_ids) == (
        inputs["input_ids"][0].tolist(),
        generated(model, dict(inputs), 5),
    )


def test_traces_take_images_as_nnsight_does_and_outputs_of_processors(case: Any) -> None:
    family, lm, processor, model = case
    text, images = placed(family, "a ", picture(), " b")
    inputs = dict(processor(text=[text], images=[images], return_tensors="pt"))
    wanted = model(**inputs, output_hidden_states=True)
    layers = (lm.model.text_model if family in ("smolvlm", "idefics3") else lm.model.language_model).layers
    with lm.trace(text, images=images):
        by_images, logits = layers[1].output.save(), lm.lm_head.output.save()
    with lm.trace(**inputs):
        by_outputs = layers[1].output.save()
    with lm.generate(text=text, images=images[0], max_new_tokens=3) as tracer:
        tokens = tracer.result.save()
    hidden = by_images[0] if isinstance(by_images, tuple) else by_images
    for found, own in ((hidden, wanted.hidden_states[2]), (logits, wanted.logits)):
        torch.testing.assert_close(found.reshape(-1, found.shape[-1]).cpu(), own[0].detach(), rtol=1e-4, atol=2e-4)
    other = by_outputs[0] if isinstance(by_outputs, tuple) else by_outputs
    assert torch.equal(hidden, other)
    assert tokens.reshape(-1)[-3:].tolist() == generated(model, inputs, 3)


def test_bad_images_end_nothing(case: Any) -> None:
    family, lm, _, _ = case
    text, images = placed(family, "a ", picture())
    good = {"prompt": text, "multi_modal_data": {"image": images}}
    (before,) = lm.generate([good], GREEDY)
    for bad in (encoded(images[0])[:-40], b"<svg/>", [images[0]] * 2, [images[0]] * 300):
        with pytest.raises(PromptError, match=r"prompt 1"):
            lm.generate([good, {**good, "multi_modal_data": {"image": bad}}], GREEDY)
    with pytest.raises(PromptError, match="has images, and truncate_prompt_tokens"):
        lm.generate([good], SamplingParams(max_tokens=1, truncate_prompt_tokens=3))
    with pytest.raises(PromptError, match="max_model_len"):
        lm.generate([{"prompt": text * 60, "multi_modal_data": {"image": images * 60}}], GREEDY)
    (after,) = lm.generate([good], GREEDY)
    assert after.token_ids == before.token_ids
    assert lm.engine.stats()["running"] == 0
