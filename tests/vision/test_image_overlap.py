"""Prompts of a call are submitted as soon as their images are read: the engine runs the first while others are read."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_vision import encoded, picture, placed

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.requests import AHEAD, read_each
from pymllm_interp.client.images.reader import ImageReader
from pymllm_interp.core.image_input import ImageInput
from pymllm_interp.utils.arguments import PromptError

FAMILY = "qwen2_5_vl"
GREEDY = SamplingParams(temperature=0, max_tokens=3)
Read = Callable[[ImageReader, Any, bool, str], Any]


def prompts(count: int) -> list[Any]:
    """Prompts with files of different pictures, and one of text."""
    made: list[Any] = []
    for i in range(count):
        text, _ = placed(FAMILY, "a" * (i % 3), picture(seed=i), f" {i}?")
        made.append({"prompt": text, "multi_modal_data": {"image": encoded(picture(40 + 8 * (i % 4), 28, seed=i))}})
    return [*made, "text alone"]


@pytest.fixture
def lm(vision_folder: Callable[[str], Path]) -> Iterator[LM]:
    with LM(
        vision_folder(FAMILY), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=2048, mm_processor_cache_gb=0
    ) as found:
        yield found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Calls a function with the name of each image before it is read."""
    real = ImageReader._read

    def before(function: Callable[[str], None]) -> None:
        def reading(self: ImageReader, file: Any, alone: bool, what: str) -> Any:
            function(what)
            return real(self, file, alone, what)

        monkeypatch.setattr(ImageReader, "_read", reading)

    return before


def is_idle(lm: LM) -> bool:
    stats = lm.engine.stats()
    return not stats["running"] and not stats["waiting"]


def wait_until_idle(lm: LM) -> None:
    limit = time.monotonic() + 20
    while not is_idle(lm) and time.monotonic() < limit:
        time.sleep(0.01)
    assert is_idle(lm)


def test_the_first_requests_end_while_the_last_image_is_read(lm: LM, read: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    asked = prompts(9)
    alone = [lm.generate([prompt], GREEDY)[0] for prompt in asked]
    lm.engine.reset_prefix_cache()
    lm.runner.reset_encoder_cache()
    cache, ended = lm.runner.step_inputs.vision.cache, list[int]()  # pyright: ignore[reportOptionalMemberAccess]
    before = cache.num_computed

    def wait(what: str) -> None:
        if "prompt 8" in what and not ended:
            limit = time.monotonic() + 20
            while not (cache.num_computed == before + 8 and is_idle(lm)) and time.monotonic() < limit:
                time.sleep(0.01)
            ended.append(cache.num_computed - before)

    read(wait)
    outs = lm.generate(asked, GREEDY)
    assert ended == [8], "all requests before it ran"
    for out, wanted in zip(outs, alone, strict=True):
        assert out.prompt_token_ids == wanted.prompt_token_ids and out.token_ids == wanted.token_ids
    hooked = lm.generate(asked, GREEDY, capture=[["embed"], *[None] * 9], priority=list(range(10)))
    assert [out.token_ids for out in hooked] == [out.token_ids for out in alone]
    assert [out.activations is not None and len(out.activations) for out in hooked] == [1] + [False] * 9


@pytest.mark.parametrize("error", [PromptError, KeyboardInterrupt])
def test_an_image_that_cannot_be_read_ends_the_requests_before_it(lm: LM, read: Any, error: Any) -> None:
    asked, long = prompts(8), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    (wanted,) = lm.generate(asked[:1], GREEDY)
    if error is PromptError:
        for i in (5, 6):
            asked[i]["multi_modal_data"]["image"] = asked[i]["multi_modal_data"]["image"][:-40]
    else:
        seen = threading.Event()

        def interrupt(what: str) -> None:
            if "prompt 5" in what:
                seen.wait(10)
                raise KeyboardInterrupt
            if "prompt 2" in what:
                seen.set()

        read(interrupt)
    with pytest.raises(error, match="image 0 of prompt 5" if error is PromptError else None):
        lm.generate(asked, long)
    wait_until_idle(lm)
    lm.engine.call(lm.engine.scheduler.check_integrity)
    assert lm.generate(asked[:1], GREEDY)[0].token_ids == wanted.token_ids
    with pytest.raises(ValueError, match="prompt 1"):
        lm.generate(asked[:3], GREEDY, capture=[["embed"], ["resid_post.99"], []])
    wait_until_idle(lm)
    assert lm.generate(asked[:1], GREEDY)[0].token_ids == wanted.token_ids


def test_reading_is_a_bounded_number_of_prompts_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begun, lock = list[int](), threading.Lock()

    def one(i: int) -> int:
        with lock:
            begun.append(i)
        return i

    found = list[int]()
    for i in read_each(one, range(40)):
        time.sleep(0.005)  # the engine is slower
        found.append(i)
        assert len(begun) <= i + 2 + AHEAD * 2
    assert found == list(range(40))
    before = threading.active_count()
    for i in read_each(one, range(40)):
        if i == 3:
            break
    gc.collect()
    assert threading.active_count() <= before, "a loop that is left has no threads"


def test_nothing_of_the_images_is_held_afterwards(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[weakref.ref[Any]](), ImageReader._inputs

    def inputs(self: ImageReader, *given: Any) -> tuple[ImageInput, ...]:
        found = real(self, *given)
        made.extend(weakref.ref(image) for image in found)
        return found

    monkeypatch.setattr(ImageReader, "_inputs", inputs)
    outs = lm.generate(prompts(6), GREEDY)
    assert len(made) == 6 and all(out.token_ids for out in outs)
    del outs
    lm.generate(["another"], GREEDY)
    gc.collect()
    assert not [ref for ref in made if ref() is not None]
    assert isinstance(lm.backend.facts.images, ImageReader) and lm.backend.facts.images.cache.num_bytes == 0
