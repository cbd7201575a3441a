"""Images that cannot be read are refused by name, before anything is scheduled."""

from __future__ import annotations

import contextlib
import random
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_vision import encoded, picture, placed, reference_processor, save_vision_model
from helpers_waits import until
from PIL import Image
from test_image_prompts import Model

from pymllm_interp.client.images import sources
from pymllm_interp.client.images.reader import ImageReader, ProcessedImage, ProcessedImages
from pymllm_interp.client.prompt_batch import prompts_of, split
from pymllm_interp.client.prompts import checked, only_tokens
from pymllm_interp.utils.arguments import PromptError

PICTURE = picture()
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SVG = b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen2_5_vl", save_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen")))


def with_image(image: Any, text: str = f"see {PLACE}") -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": image}}


def bomb() -> bytes:
    """A PNG file of one pixel, whose header says 40,000 x 40,000."""
    file = bytearray(encoded(Image.new("1", (1, 1))))
    file[16:24] = struct.pack(">2I", 40_000, 40_000)
    file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
    return bytes(file)


def tiff() -> bytes:
    return encoded(PICTURE, "TIFF")


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "truncated": (lambda: encoded(PICTURE)[:-30], "image 0 of the prompt is a broken PNG file: OSError"),
    "bomb": (bomb, "has more than 67108864 pixels, the most that are read"),
    "large": (lambda: encoded(Image.new("1", (10_000, 8_000))), "has 10000 x 8000 pixels; at least 1, and at most 67108864"),
    "svg": (lambda: SVG, "is SVG: PNG, JPEG, WebP and GIF"),
    "tiff": (tiff, "is TIFF: PNG"),
    "bmp": (lambda: encoded(PICTURE, "BMP"), "is BMP: PNG"),
    "empty": (lambda: b"", "is no image file of a known format"),
    "text": (lambda: b"hello", "is no image file of a known format"),
    "web": (lambda: "https://example.com/a.png", "is an address"),
    "no file": (lambda: "/nowhere/a.png", "is no readable file"),
    "no base64": (lambda: "data:image/png;base64,%%%", "its data URL is not base64"),
    "plain data": (lambda: "data:image/png,abc", "expected a data URL"),
    "data of svg": (lambda: "data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", "is SVG"),
    "floats": (lambda: np.zeros((8, 8, 3)), r"is an array of float64 \[8, 8, 3\]: expected"),
    "grey": (lambda: torch.zeros(8, 8, dtype=torch.uint8), r"is an array of uint8 \[8, 8\]"),
    "number": (lambda: 3, "is a int: expected a Pillow image"),
    "none": (lambda: [None], "is a NoneType: expected a Pillow image"),
    "long": (lambda: picture(1000, 3), r"the image processor refuses it \(1000 x 3\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_unreadable_images_are_refused_by_name(model: Model, case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(PromptError, match=message):
        model.read(with_image(make()))
    assert model.read(with_image(PICTURE)).images, "the next one is read"


def test_numbers_of_images_and_places_must_agree(model: Model) -> None:
    for prompt, message in (
        (with_image([PICTURE] * 2), "the prompt has 2 images, and 1 places for them"),
        (with_image(PICTURE, "no place"), "1 images, and 0 places"),
        (with_image([PICTURE] * 9, PLACE * 9), "has 9 images; at most 8"),
        (f"see {PLACE}", "the prompt has 1 image tokens .* and no image"),
        (model.tokenizer(PLACE)["input_ids"], "the prompt has 1 image tokens .* and no image"),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": PICTURE}}, "1 images, and 0 places"),
        ({"prompt": PLACE, "multi_modal_data": {"video": [PICTURE]}}, "multi_modal_data has 'video'"),
        ({"prompt": PLACE, "multi_modal_data": PICTURE}, "multi_modal_data has Image"),
        ({"prompt": PLACE, "multi_modal_data": {"image": PICTURE}, "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0: a part of type 'image' has 0 images"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}]}],
            "detail='low': images have the resolution of the model's processor",
        ),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            model.read(prompt)


def test_a_text_model_takes_no_images(model: Model) -> None:
    facts: Any = SimpleNamespace(images=None, limits=model.facts.limits, name="m", architecture="LlamaForCausalLM")
    with pytest.raises(PromptError, match=r"the prompt has images, and m \(LlamaForCausalLM\) takes text only"):
        checked(model.tokenizer, with_image(PICTURE), facts, "the prompt")
    outputs = dict(reference_processor("qwen2_5_vl", model.folder)(text=[PLACE], images=[PICTURE], return_tensors="pt"))
    with pytest.raises(PromptError, match="takes text only"):
        checked(model.tokenizer, split(outputs, "it").prompts[0], facts, "the prompt")
    with pytest.raises(PromptError, match="the prompt has images, which this call does not take"):
        only_tokens(model.read(with_image(PICTURE)), "the prompt")


def outputs_of(model: Model) -> dict[str, torch.Tensor]:
    return dict(reference_processor(model.family, model.folder)(text=[PLACE], images=[PICTURE], return_tensors="pt"))


def nan(outputs: dict[str, torch.Tensor]) -> None:
    outputs["pixel_values"][3, 2] = torch.nan


OUTPUTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nan": (nan, "pixel_values holds NaN or infinity"),
    "float64": (lambda out: out.update(pixel_values=out["pixel_values"].double()), "float64: expected float32"),
    "bytes": (lambda out: out.update(pixel_values=out["pixel_values"].to(torch.uint8)), "uint8: expected float32"),
    "words": (lambda out: out.update(pixel_values="abc"), "pixel_values is no array of numbers"),
    "shape": (lambda out: out.update(pixel_values=out["pixel_values"][:, :5]), r"is \[48, 5\]: expected \[patches, 96\]"),
    "fewer": (lambda out: out.update(pixel_values=out["pixel_values"][:40]), "has 40 patches, and image_grid_thw 48"),
    "grid": (lambda out: out.update(image_grid_thw=torch.tensor([[1, 3, 16]])), "and multiples of 2"),
    "huge": (lambda out: out.update(image_grid_thw=torch.tensor([[1, 2**62, 4]])), "and multiples of 2"),
    "frames": (lambda out: out.update(image_grid_thw=torch.tensor([[2, 4, 6]])), "expected 1"),
    "flat grid": (lambda out: out.update(image_grid_thw=torch.tensor([1, 6, 8])), r"is \[3\]: expected \[images, 3\]"),
    "float grid": (lambda out: out.update(image_grid_thw=torch.tensor([[1.0, 6, 8]])), "expected whole numbers"),
    "no grid": (lambda out: out.pop("image_grid_thw"), "expected pixel_values and image_grid_thw, got pixel_values"),
    "placeholders": (lambda out: out.update(input_ids=out["input_ids"][:, 3:]), "placeholders do not fit the images"),
    "text": (lambda out: out.update(input_ids=torch.tensor([[1, 2]])), "placeholders of 0 images, and 1 images"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_that_do_not_fit_are_refused_by_name(model: Model, case: str) -> None:
    change, message = OUTPUTS[case]
    outputs = outputs_of(model)
    outputs.pop("attention_mask")
    change(outputs)
    with pytest.raises(PromptError, match=message):
        model.read(outputs)


def test_outputs_of_another_models_processor_are_refused(model: Model, tmp_path: Path) -> None:
    found = {
        family: save_vision_model(family, tmp_path / family)
        for family in ("llava", "gemma3", "smolvlm", "llava_onevision")
    }
    models = {family: Model(family, folder) for family, folder in found.items()} | {"qwen2_5_vl": model}
    for family, own in models.items():
        text, images = placed(family, "a", PICTURE)
        outputs = dict(own.reference(text=[text], images=[images], return_tensors="pt"))
        for other in [one for one in models.values() if one is not own]:
            if {own.family, other.family} == {"llava", "gemma3"}:  # of one size here: the placeholders differ
                continue
            with pytest.raises(PromptError, match="no outputs of this model's processor"):
                other.read(outputs)


def test_random_bytes_are_refused_and_the_reader_lives(model: Model) -> None:
    chance, files = random.Random(0), [encoded(PICTURE, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    read = 0
    for _ in range(300):
        body = bytearray(chance.choice(files))
        if chance.random() < 0.3:
            body = bytearray(chance.randbytes(chance.randrange(200)))
        for _ in range(chance.choice((1, 3, 40))):
            if body:
                body[chance.randrange(len(body))] = chance.randrange(256)
        body = body[: chance.randrange(len(body) + 1)] if chance.random() < 0.3 else body
        try:
            read += len(model.read(with_image(bytes(body))).images)
        except PromptError as error:
            assert str(error).startswith("image 0 of the prompt")
    assert 0 < read < 300, "some are images all the same"


def test_missing_libraries_and_files_are_named(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader(model.config, model.tokenizer, tmp_path, 8, 0)
    model.facts.images, file = reader, encoded(PICTURE)
    try:
        with pytest.raises(PromptError, match=r"put its preprocessor_config.json into"):
            model.read(with_image(PICTURE))
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(
            ModuleNotFoundError, match=r'an image in a prompt needs pillow: pip install -e ".\[images\]"'
        ):
            model.read(with_image(file))
        assert model.read("text alone").token_ids
    finally:
        model.facts.images = model.images


def test_equal_images_are_read_once_within_the_budget(model: Model) -> None:
    reader = ImageReader(model.config, model.tokenizer, model.folder, 8, 1 << 24)
    model.facts.images = reader
    try:
        first = model.read(with_image([PICTURE, encoded(PICTURE)], PLACE * 2))
        again = model.read(with_image(PICTURE, f"again {PLACE}"))
        assert (reader.cache.hits, reader.cache.misses) == (1, 2), "a file and its pixels have different digests"
        assert len({image.content for image in (*first.images, *again.images)}) == 1
        assert first.images[0].features is again.images[0].features
        assert reader.cache.num_bytes == 2 * sum(t.nbytes for t in again.images[0].features.values())
        reader.cache.clear()
        assert reader.cache.num_bytes == 0
    finally:
        model.facts.images = model.images


def test_the_cache_forgets_the_least_recently_used() -> None:
    made: list[bytes] = []

    def make(key: bytes) -> ProcessedImage:
        made.append(key)
        return ProcessedImage({"pixel_values": torch.zeros(25)}, key, 1, "")

    cache = ProcessedImages(250)
    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        assert cache.get(key, lambda key=key: make(key)).content == key
    assert made == [b"a", b"b", b"c", b"b"] and cache.num_bytes == 200

    def fail() -> ProcessedImage:
        raise PromptError("broken")

    for _ in range(2):
        with pytest.raises(PromptError, match="broken"):
            cache.get(b"x", fail)
    entered, leave, outcomes, hits = threading.Event(), threading.Event(), list[Any](), cache.hits

    def interrupted() -> ProcessedImage:
        entered.set()
        leave.wait(10)
        raise SystemExit("of the thread that reads")

    def first() -> None:
        with contextlib.suppress(SystemExit):
            cache.get(b"y", interrupted)

    threads = [
        threading.Thread(target=first),
        threading.Thread(target=lambda: outcomes.append(cache.get(b"y", lambda: make(b"y")))),
    ]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    until(lambda: cache.hits > hits)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert [image.content for image in outcomes] == [b"y"], "an error of one reader is not another's"
    none = ProcessedImages(0)
    assert none.get(b"a", lambda: make(b"a")).content == b"a" and none.num_bytes == 0


def test_images_of_a_trace_are_a_keyword(model: Model) -> None:
    text, expected = f"see {PLACE}", model.read(with_image(PICTURE))
    for args, kwargs in (
        ((text,), {"images": PICTURE}), ((text,), {"images": [PICTURE]}), ((text,), {"images": [[PICTURE]]}),
        ((), {"text": text, "images": [PICTURE]}), (([text],), {"images": [[PICTURE]]}), (([text],), {"images": [PICTURE]}),
    ):  # fmt: skip
        batch, rest = prompts_of(args, kwargs, "the prompt")
        (prompt,) = batch.prompts
        found = checked(model.tokenizer, prompt, model.facts, "the prompt")
        assert found.token_ids == expected.token_ids and found.images[0].content == expected.images[0].content
        assert not rest
    with pytest.raises(PromptError, match="2 texts, and images for 1"):
        prompts_of(([text, text],), {"images": [PICTURE]}, "the prompt")
    with pytest.raises(PromptError, match="images and 0 texts"):
        prompts_of((), {"images": [PICTURE]}, "the prompt")


def test_pictures_of_all_kinds_are_one_image(model: Model, tmp_path: Path) -> None:
    array = np.asarray(PICTURE)
    (tmp_path / "a.png").write_bytes(encoded(PICTURE))
    frames = BytesIO()
    PICTURE.save(frames, "WEBP", lossless=True, save_all=True, append_images=[picture(seed=4)])
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    turned = encoded(PICTURE.rotate(180), exif=exif)
    expected = model.read(with_image(PICTURE)).images[0].content
    for given in (
        encoded(PICTURE), array, array.transpose(2, 0, 1), torch.from_numpy(array.copy()), tmp_path / "a.png",
        str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", frames.getvalue(), turned, PICTURE.convert("RGBA"),
        encoded(PICTURE.convert("RGBA")), memoryview(encoded(PICTURE)),
    ):  # fmt: skip
        assert model.read(with_image(given)).images[0].content == expected
    assert sources.encoded(PICTURE, "it")[:4] == b"\x89PNG"
