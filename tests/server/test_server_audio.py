"""Audio over HTTP: OpenAI's transcriptions and translations, in parts, with hooks, and `LM.connect`."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import tiny_tokenizer
from helpers_encoder_decoder import GENERATION, RATE, audio, features_of, greedy, saved, states_of, wav
from helpers_served import served
from helpers_server import KEYS, Server
from openai import OpenAI
from safetensors.torch import save
from transformers import GenerationConfig, PreTrainedModel

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.server.audio.routes import cuts, form_of
from pymllm_interp.server.http.errors import ApiError

START = [2, 20, 22, 24]
SAMPLES = audio(1, 6000)


class Served(Server):
    """A server of Whisper, which transformers has too."""

    model: PreTrainedModel
    heard: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("whisper")
    model = saved("whisper", folder)
    features = features_of(as_prompt(SAMPLES)["multi_modal_data"]["audio"][0])
    with torch.no_grad():
        first: Any = model(input_features=features, decoder_input_ids=torch.tensor([[2]])).logits[0, -1]
    heard = 30 + int(first[30:].argmax())  # likelier than English
    GenerationConfig(**with_language(heard)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    options = ["--option", "cross_cache_tokens=100", "--max-audio-bytes", "60000", "--allow-code-from", "code"]
    with served(folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
        found.model, found.heard = model, heard  # pyright: ignore[reportAttributeAccessIssue]
        yield found  # pyright: ignore[reportReturnType]


def with_language(token: int) -> dict[str, Any]:
    """Values of a generation config with one more language."""
    return GENERATION | {"lang_to_id": GENERATION["lang_to_id"] | {"<|it|>": token}}


def as_prompt(samples: np.ndarray) -> dict[str, Any]:
    """Samples as the files of `wav` have them."""
    return {"multi_modal_data": {"audio": ((samples * 32767).round().astype(np.float32) / 32768, RATE)}}


def send(server: Server, file: Any = None, route: str = "transcriptions", key: str = "declared", **fields: Any) -> Any:
    data = {"max_tokens": "6", "ignore_eos": "true", **fields}
    given = wav(SAMPLES) if file is None else file
    with server.client(key) as client:
        return client.post(f"/v1/audio/{route}", files={"file": ("a.wav", given, "audio/wav")}, data=data)


def text_of(ids: list[int]) -> str:
    return tiny_tokenizer().decode(ids, skip_special_tokens=True).strip()


def test_openai_clients_transcribe_and_translate(server: Served) -> None:
    api = OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["plain"], max_retries=0)
    name, more = api.models.list().data[0].id, {"ignore_eos": True, "max_tokens": 6}
    how: dict[str, Any] = {"file": ("a.wav", wav(SAMPLES)), "model": name, "extra_body": more}
    english = text_of(greedy(server.model, as_prompt(SAMPLES), START, 6))
    german = text_of(greedy(server.model, as_prompt(SAMPLES), [2, 21, 22, 24], 6))
    assert api.audio.transcriptions.create(**how).text == english
    assert api.audio.transcriptions.create(**how, language="de").text == german
    assert api.audio.transcriptions.create(**how, response_format="text") == english + "\n"
    verbose = api.audio.transcriptions.create(**how, response_format="verbose_json", language="de", temperature=0)
    assert (verbose.text, verbose.language, float(verbose.duration)) == (german, "de", len(SAMPLES) / RATE)
    assert not verbose.segments
    translated = api.audio.translations.create(**how)
    assert translated.text == text_of(greedy(server.model, as_prompt(SAMPLES), [2, 20, 23, 24], 6))
    before = api.audio.transcriptions.create(**how, prompt="w7 w8 w9")
    assert before.text == text_of(greedy(server.model, as_prompt(SAMPLES), [25, 7, 8, 9, *START], 6))


def test_a_language_is_detected_as_in_transformers(server: Served) -> None:
    model: Any = server.model
    config, seen = GenerationConfig(**with_language(server.heard)), set[str]()
    for samples in (SAMPLES, *(audio(seed, 6000) for seed in range(4))):
        features = features_of(as_prompt(samples)["multi_modal_data"]["audio"][0])
        (token,) = model.detect_language(input_features=features, generation_config=config).tolist()
        code = {20: "en", 21: "de", server.heard: "it"}[token]
        seen.add(code)
        given = {"response_format": "verbose_json"}
        found, named = (send(server, wav(samples), language=own, **given).json() for own in ("auto", code))
        assert found["language"] == code and found["text"] == named["text"]
    assert "it" in seen, "not the default alone"
    late = send(server, language="auto", timeout="0.000001")
    assert late.status_code == 408 and "the language was not detected: timeout" in late.text
    hooked = send(server, language="auto", capture='["encoder.resid_post.1"]').json()
    assert hooked["choices"][0]["activations"]["sites"]["encoder.resid_post.1"]


def test_long_audio_is_read_in_parts(server: Served) -> None:
    samples = audio(2, 20_000)
    heard = as_prompt(samples)["multi_modal_data"]["audio"][0]
    parts = cuts(heard, 6400, 1600, 400)
    assert len(parts) == 4 and parts[0][0] == 0 and parts[-1][1] == len(samples)
    found = send(server, wav(samples)).json()
    texts = [
        greedy(server.model, {"multi_modal_data": {"audio": (heard[start:stop], RATE)}}, START, 6)
        for start, stop in parts
    ]
    assert found["text"] == "".join(tiny_tokenizer().decode(ids, skip_special_tokens=True) for ids in texts).strip()
    assert found["usage"] == {"type": "duration", "seconds": 2}
    server.wait_until_idle()


def test_parts_end_in_quiet_places() -> None:
    samples = np.ones(10_000, np.float32)
    samples[5600:5700] = 0
    parts = cuts(samples, 6000, 1000, 100)
    assert parts[0] == (0, 5650) and [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
    for length in (1, 6000, 6001, 12_345):
        found = cuts(np.random.default_rng(3).standard_normal(length), 6000, 1000, 100)
        assert found[-1][1] == length and all(0 < stop - start <= 6000 for start, stop in found)


def test_hooks_act_on_the_encoder(server: Served) -> None:
    vector = torch.randn(36, generator=torch.Generator().manual_seed(3))
    ops = [{"op": "steer", "site": "encoder.resid_post.0", "vector": vector.tolist(), "scale": 4.0, "positions": [3]}]
    fields = {"interventions": json.dumps(ops), "capture": '["encoder.resid_post.1"]'}
    assert send(server, key="plain", **fields).status_code == 403
    found = send(server, **fields).json()

    def edited(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        state[0, 3] += 4 * vector
        return state

    edits = {"encoder.resid_post.0": edited}
    states, _ = states_of("whisper", server.model, as_prompt(SAMPLES), START, edits)
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        op = Steer("encoder.resid_post.0", vector, scale=4, positions=[3])
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (out,) = lm.generate(as_prompt(SAMPLES), params, interventions=[op], capture=["encoder.resid_post.1"])
        wanted = states["encoder.resid_post.1"]
        torch.testing.assert_close(out.activations["encoder.resid_post.1"], wanted, rtol=1e-4, atol=1e-4)
        features = features_of(as_prompt(SAMPLES)["multi_modal_data"]["audio"][0])
        (plain,) = lm.generate({"input_features": features}, params)
        assert plain.token_ids == greedy(server.model, as_prompt(SAMPLES), START, 6)
    assert found["choices"][0]["activations"]["sites"]["encoder.resid_post.1"]


def test_features_that_a_client_computes_are_for_keys_that_may_declare(server: Served) -> None:
    """They are any numbers, as outputs of an image processor. Samples of audio are for every key."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    wanted = greedy(server.model, as_prompt(SAMPLES), START, 6)
    features = features_of(as_prompt(SAMPLES)["multi_modal_data"]["audio"][0])
    with LM.connect(server.url, api_key=KEYS["plain"]) as lm:
        assert lm.generate(as_prompt(SAMPLES), params)[0].token_ids == wanted
        with pytest.raises(PermissionError, match="declared"):
            lm.generate({"input_features": features}, params)
    disguised = save({"input_features": features.contiguous()})
    size = int.from_bytes(disguised[:8], "little")
    header = disguised[8 : 8 + size].replace(b"input_features", rb"input\u005ffeatures")
    bodies = [disguised, len(header).to_bytes(8, "little") + header + disguised[8 + size :], b"", b"\xff" * 64]
    with server.client("plain") as client:
        for body in bodies:
            given = {"prompts": [START], "params": [{}], "encoders": [base64.b64encode(body).decode()]}
            assert client.post("/v1/interp/generate", json=given).status_code == 403


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": "true"}, "stream"), ({"response_format": "srt"}, "srt|served"), ({"response_format": "xml"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamps"), ({"include[]": "logprobs"}, "include"), ({"n": "2"}, "n is"),
        ({"language": "fr"}, "the model knows"), ({"temperature": "hot"}, "temperature"), ({"unknown": "1"}, "unknown"),
        ({"interventions": "[" * 200}, "interventions|nested"), ({"capture": '["nowhere.1"]'}, "nowhere"),
        ({"truncate_prompt_tokens": "1"}, "encoder-decoder"), ({"prompt": "w1 " * 5000}, "characters"),
        ({"max_tokens": "1000"}, "max_model_len"), ({"model": "another"}, "another"),
    ],
)  # fmt: skip
def test_fields_that_are_not_served_are_refused_by_name(server: Served, fields: dict[str, str], message: str) -> None:
    answer = send(server, **fields)
    assert 400 <= answer.status_code < 500 and re.search(message, answer.text), answer.text


def test_bad_files_are_refused_and_the_server_lives(server: Served) -> None:
    for file, status in (
        (b"", 400),
        (b"RIFF" + b"\x00" * 50, 400),
        (b"ID3 an mp3", 400),
        (b"x" * 60_001, 413),
        (wav(SAMPLES, 44_101), 400),
    ):
        answer = send(server, file)
        assert answer.status_code == status, answer.text
    with server.client("plain") as client:
        route = "/v1/audio/transcriptions"
        assert client.post(route, json={"file": "a"}).status_code == 400
        assert client.post(route, data={"file": "a"}).status_code == 415
        assert client.post(route, files={"other": b"a"}).status_code == 400
        assert client.post(route, files=[("file", wav(SAMPLES)), ("file", wav(SAMPLES))]).status_code == 400
        assert client.post("/v1/completions", files={"file": b"a"}).status_code == 415
        foreign = client.post(route, files={"file": wav(SAMPLES)}, headers={"Origin": "https://evil.example"})
        assert foreign.status_code == 200  # a key was sent, which no page has
    rng, good = np.random.default_rng(9), wav(SAMPLES[:2000])
    for _ in range(30):
        file = bytearray(good)
        for place in rng.integers(0, 50, rng.integers(1, 6)):
            file[place] = rng.integers(0, 256)
        assert send(server, bytes(file)).status_code in (200, 400)
    assert send(server).status_code == 200


def test_forms_are_read_and_others_refused() -> None:
    request = httpx.Request(
        "POST", "http://a", files={"file": ("a\r\n.wav", b"\r\n--x\x00\xff")}, data={"a": "ä", "b[]": ["1", "2"]}
    )
    kind, body = request.headers["content-type"], request.read()
    form = form_of(body, kind)
    assert form.fields == {"a": ["ä"], "b": ["1", "2"]} and form.files == {"file": b"\r\n--x\x00\xff"}
    assert form_of(body, kind.replace("boundary", "Boundary")) == form
    many = httpx.Request("POST", "http://a", files=[(str(i), b"") for i in range(65)])
    for wrong, its in ((body, "multipart/form-data"), (body[:-4], kind), (b"", kind), (many.read(), many.headers["content-type"]),
                       (body.replace(b'name="', b'nome="'), kind), (body.replace("ä".encode(), b"\xff\xff"), kind)):  # fmt: skip
        with pytest.raises(ApiError):
            form_of(wrong, its)
    rng = np.random.default_rng(1)
    for _ in range(300):
        changed = bytearray(body)
        for place in rng.integers(0, len(body), 4):
            changed[place] = rng.integers(0, 256)
        try:
            form_of(bytes(changed), kind)
        except ApiError:
            pass


def test_headers_of_a_form_are_searched_once() -> None:
    """The expressions would look from each name to the end of a line, and hold Python's lock for hours."""
    for repeated, count in ((b"content-disposition:", 10_000), (b"content-disposition:a\r\n", 150)):
        with pytest.raises(ApiError, match="no header"):
            started = time.thread_time()
            form_of(b"--x\r\n" + repeated * count + b"\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x")
        assert time.thread_time() - started < 1
