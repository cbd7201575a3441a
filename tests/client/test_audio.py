"""Audio of requests: features are those of transformers, rates are converted, and what cannot be read is refused by name."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_tokenizer
from helpers_encoder_decoder import GENERATION, POSITIONS, RATE, audio, features_of, greedy, saved, wav
from transformers import GenerationConfig, PreTrainedModel, WhisperFeatureExtractor

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.inputs.sound import resampled, samples_of
from pymllm_interp.client.inputs.speech import SpeechTokens
from pymllm_interp.utils.arguments import PromptError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Both = tuple[LM, PreTrainedModel]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("whisper")
    model = saved("whisper", folder)
    model.generation_config = GenerationConfig(**GENERATION)
    model.generation_config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with LM(str(folder), dtype="float32", device="cpu", kv_cache_tokens=256, cross_cache_tokens=64) as lm:
        yield lm, model


def prompt_of(given: Any, **more: Any) -> dict[str, Any]:
    return {"multi_modal_data": {"audio": given}, **more}


def test_decoders_begin_as_the_generation_config_says(both: Both) -> None:
    lm, model = both
    samples = audio(1, 5000)
    wanted = greedy(model, prompt_of((samples, RATE)), [2, 20, 22, 24], 8)
    for prompt in (
        prompt_of((samples, RATE)), prompt_of(samples), prompt_of([(samples, RATE)]), prompt_of((torch.tensor(samples), RATE)),
        prompt_of((samples, RATE), prompt=""), prompt_of((samples, RATE), prompt_token_ids=[2, 20, 22, 24]),
        prompt_of((samples, RATE), prompt="w2 w20 w22 w24"), {"input_features": features_of(samples)},
        {"encoder_prompt": prompt_of((samples, RATE)), "decoder_prompt": "w2 w20 w22 w24"},
        {"encoder_prompt": {"input_features": features_of(samples)[0]}}, prompt_of(wav(samples, width=4)),
    ):  # fmt: skip
        assert lm.generate(prompt, GREEDY)[0].token_ids == wanted
    out = lm.generate(prompt_of((samples, RATE), prompt_token_ids=[2, 21, 23]), GREEDY)[0]
    assert out.token_ids == greedy(model, prompt_of((samples, RATE)), [2, 21, 23], 8)


def test_generate_with_a_language_is_that_of_transformers(both: Both) -> None:
    lm, model = both
    samples, tokens = audio(2, 6400), lm.backend.facts.audio.tokens
    made: Any = model.generate(  # pyright: ignore[reportCallIssue]
        features_of(samples), language="de", task="translate", max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    start = tokens.ids("de", "translate")
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
    out = lm.generate(prompt_of((samples, RATE), prompt_token_ids=start), params)[0]
    assert out.token_ids == made[0].tolist()[-8:]


def test_suppressed_tokens_are_those_of_transformers(both: Both, tmp_path: Path) -> None:
    """`suppress_tokens` at each token, `begin_suppress_tokens` at the first one: beside others, and with bad words."""
    lm, model = both
    sounds = [prompt_of((audio(seed, 6000), RATE)) for seed in range(5)]
    free = [out.token_ids for out in lm.generate(sounds, GREEDY)]
    first = sorted({ids[0] for ids in free})
    later = sorted({token for ids in free for token in ids[2:5]} - {*first})[:3]
    model.save_pretrained(tmp_path)
    config = GenerationConfig(**{**GENERATION, "suppress_tokens": later, "begin_suppress_tokens": first})
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    before = model.generation_config
    with LM(str(tmp_path), dtype="float32", device="cpu", kv_cache_tokens=256, cross_cache_tokens=64) as other:
        assert list(map(list, other.backend.facts.audio.tokens.banned)) == [[t] for t in later] + [
            [-1, t] for t in first
        ]
        found = [out.token_ids for out in other.generate(sounds, GREEDY)]
        (worded,) = other.generate(sounds[:1], replace(GREEDY, bad_words=[f"w{found[0][0]}"]))
        wanted = list[list[int]]()
        for sound in sounds:
            made: Any = model.generate(  # pyright: ignore[reportCallIssue]
                features_of(sound["multi_modal_data"]["audio"][0]), generation_config=config, language="en", task="transcribe",
                max_new_tokens=8, min_new_tokens=8, do_sample=False,
            )  # fmt: skip
            wanted.append(made[0].tolist()[-8:])
    model.generation_config = before
    assert found == wanted and found != free and worded.token_ids[0] not in (found[0][0], *first)


@pytest.mark.parametrize(("form", "kind"), [("FLAC", "PCM_16"), ("OGG", "VORBIS")])
def test_files_of_soundfile_are_read(both: Both, form: str, kind: str) -> None:
    """Files that need the extra `audio`: what the library writes is read again, at another rate and of two channels, too."""
    library = pytest.importorskip("soundfile")
    samples, rate = audio(7, 3000), 8000
    for channels in (1, 2):
        body = io.BytesIO()
        library.write(body, np.stack([samples] * channels, 1), rate, format=form, subtype=kind)
        found, its = samples_of(body.getvalue(), "it", 30)
        assert its == rate and len(found) == len(samples) and found.dtype == np.float32
        error = np.abs(found - samples).max()
        assert error < (0.2 if kind == "VORBIS" else 1e-4), error
    (out,) = both[0].generate(prompt_of(body.getvalue()), GREEDY)
    assert out.token_ids == both[0].generate(prompt_of((found, rate)), GREEDY)[0].token_ids
    for broken in (body.getvalue()[:60], b"fLaC" + body.getvalue()[4:400][::-1]):
        with pytest.raises(PromptError, match=r"audio file|samples|WAV"):
            samples_of(broken, "it", 30)


def test_traces_read_features_of_transformers_processor(both: Both) -> None:
    lm, model = both
    features = torch.cat([features_of(audio(seed, 4000)) for seed in (3, 4)])
    with lm.trace(input_features=features[:1]):
        state = lm.model.encoder.layers[2].output.save()
        normed = lm.model.encoder.layer_norm.output.save()
    with torch.no_grad():
        wanted: Any = model.model.encoder(features[:1])[0]  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(normed, wanted, rtol=1e-4, atol=1e-4)
    assert state.shape == (1, POSITIONS, 36)
    outs = lm.generate({"input_features": features}, GREEDY)
    assert [out.token_ids for out in outs] == [
        lm.generate({"input_features": each}, GREEDY)[0].token_ids for each in features
    ]


def test_audio_of_equal_samples_is_encoded_once_and_shares_no_kv_with_other(both: Both) -> None:
    lm, model = both
    prompts = [prompt_of((audio(seed, 3000), RATE), prompt_token_ids=[2, *range(30, 62)]) for seed in (5, 6, 5)]
    outs = [lm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert outs[0].token_ids == outs[2].token_ids == greedy(model, prompts[0], [2, *range(30, 62)], 8)
    assert outs[1].token_ids == greedy(model, prompts[1], [2, *range(30, 62)], 8)
    assert outs[0].num_cached_tokens == outs[1].num_cached_tokens == 0 < outs[2].num_cached_tokens


def test_the_extractors_file_is_followed(tmp_path: Path) -> None:
    saved("whisper", tmp_path)
    extractor = WhisperFeatureExtractor(feature_size=8, hop_length=320, sampling_rate=RATE)
    extractor.save_pretrained(tmp_path)
    with LM(str(tmp_path), dtype="float32", device="cpu", kv_cache_tokens=64, cross_cache_tokens=64) as lm:
        assert lm.backend.facts.audio.seconds == 30
        with pytest.raises(PromptError, match=r"input_features \[8, 1500\]"):  # the model has fewer positions
            lm.generate(prompt_of((audio(1, 100), RATE)), GREEDY)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", "no audio"),
        ([5, 6], "no audio"),
        (prompt_of((audio(1, 6401), RATE)), "at a time"),
        (prompt_of((audio(1, 3201), 8000)), "at a time"),
        (prompt_of((audio(1, 100), 0)), "resample"),
        (prompt_of((audio(1, 100), float("nan"))), "resample"),
        (prompt_of((audio(1, 100), 10**400)), "resample"),
        (prompt_of((audio(1, 100), 44_101)), "resample"),
        (prompt_of((audio(1, 100), "16000")), "sampling rate"),
        (prompt_of((audio(1, 100), True)), "sampling rate"),
        (prompt_of((np.zeros(0, np.float32), RATE)), "one channel"),
        (prompt_of((np.zeros((2, 50), np.float32), RATE)), "one channel"),
        (prompt_of((np.zeros(50, np.int16), RATE)), "floats from -1 to 1"),
        (prompt_of((np.array([0.0, np.nan]), RATE)), "NaN"),
        (prompt_of((["a"], RATE)), "of floats|one channel"),
        (prompt_of([(audio(1, 9), RATE), (audio(1, 9), RATE)]), "audio"),
        ({"multi_modal_data": {"audio": (audio(1, 9), RATE), "image": 1}}, "one audio"),
        (prompt_of(None), "audio"),
        (prompt_of(b"RIFF"), "WAV"),
        ({"input_features": torch.zeros(8, 39)}, "expected"),
        ({"input_features": torch.zeros(8, 40, dtype=torch.int64)}, "floats"),
        ({"input_features": torch.full((8, 40), torch.inf)}, "NaN or infinity"),
        ({"input_features": "x"}, "input_features|audio"),
        (prompt_of((audio(1, 9), RATE), prompt_token_ids=[97]), "vocabulary"),
        (prompt_of((audio(1, 9), RATE), more=1, prompt="w1"), "not supported"),
    ],
)
def test_audio_that_cannot_be_read_is_refused_by_name(both: Both, prompt: Any, message: str) -> None:
    lm, _ = both
    with pytest.raises(PromptError, match=message):
        lm.generate([prompt], GREEDY)
    assert lm.generate(prompt_of((audio(1, 9), RATE)), GREEDY)[0].token_ids


def test_models_of_text_refuse_audio(lm_of: Any) -> None:
    with pytest.raises(PromptError, match="audio"):
        lm_of("llama").generate(prompt_of((audio(1, 9), RATE), prompt="w1"), GREEDY)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_files_are_read(width: int, channels: int) -> None:
    samples = np.stack([audio(seed, 401) for seed in range(channels)], 1)
    found, rate = samples_of(wav(samples, 44_100, width), "the file", 1.0)
    assert rate == 44_100 and found.dtype == np.float32
    np.testing.assert_allclose(found, samples.mean(1), atol=2.0 ** (2 - 8 * width) + 1e-6)


def test_damaged_files_are_refused() -> None:
    good, rng = wav(audio(1, 300)), np.random.default_rng(7)
    for length in range(0, len(good), 7):
        _read(good[:length])
    for _ in range(500):
        file = bytearray(good)
        for place in rng.integers(0, 60, rng.integers(1, 6)):
            file[place] = rng.integers(0, 256)
        _read(bytes(file))
    huge = bytearray(good)
    huge[4:8] = huge[40:44] = b"\xff\xff\xff\x7f"  # sizes that the file does not have
    _read(bytes(huge))
    with pytest.raises(PromptError, match=r"at most 0\.01 s"):
        samples_of(good, "the file", 0.01)
    slow = good[:24] + (999).to_bytes(4, "little") + good[28:]
    with pytest.raises(PromptError, match="at 999 a second"):
        samples_of(slow, "the file", 30.0)
    with pytest.raises(PromptError, match="of 999 samples a second"):
        resampled(np.zeros(9, np.float32), 999, RATE, "the audio")
    some, many = (
        good[:4] + b"\xff\xff\xff\x7f" + good[8:36] + b"junk\0\0\0\0" * count + good[36:] for count in (60, 3_000_000)
    )
    assert samples_of(some, "the file", 30.0)[0].tolist() == samples_of(good, "the file", 30.0)[0].tolist()
    started = time.thread_time()
    with pytest.raises(PromptError, match="more than 64 chunks"):
        samples_of(many, "the file", 30.0)
    assert time.thread_time() - started < 1


def _read(file: bytes) -> None:
    try:
        found, rate = samples_of(file, "the file", 30.0)
    except PromptError:
        return
    assert len(found) and rate > 0 and np.isfinite(found).all()


class Unpacked:
    """soundfile's view of a compressed file: frames of eight channels, of which the first is 1 and the others 0."""

    channels, samplerate, frames = 8, 48_000, 5000

    def __init__(self, file: Any) -> None: ...
    def __enter__(self) -> Unpacked:
        return self

    def __exit__(self, *error: object) -> None: ...

    def blocks(self, size: int, dtype: str, always_2d: bool) -> Iterator[np.ndarray]:
        for start in range(0, self.frames, size):
            yield np.eye(8, dtype=dtype)[np.zeros(min(size, self.frames - start), int)]


def test_compressed_files_are_unpacked_in_blocks_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(SoundFile=Unpacked, LibsndfileError=RuntimeError)
    monkeypatch.setitem(sys.modules, "soundfile", library)
    monkeypatch.setattr("pymllm_interp.client.inputs.sound.BLOCK", 1 << 10)
    found, rate = samples_of(b"fLaC", "the file", 3600.0)
    assert rate == 48_000 and found.tolist() == [1 / 8] * 5000
    monkeypatch.setattr(Unpacked, "frames", 3600 * 600_000)
    monkeypatch.setattr(Unpacked, "samplerate", 600_000)  # FLAC's silence: a megabyte of 70 GB of samples
    with pytest.raises(PromptError, match="17280000000 samples"):
        samples_of(b"fLaC", "the file", 3600.0)


@pytest.mark.parametrize("rate", [8000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000])
def test_rates_are_converted(rate: int) -> None:
    """A tone below both Nyquist frequencies stays the tone, and the length its seconds."""
    seconds, tone = 0.25, 700.0
    given = np.sin(2 * np.pi * tone * np.arange(int(rate * seconds)) / rate).astype(np.float32)
    found = resampled(given, rate, RATE, "the audio")
    assert len(found) == -(-len(given) * RATE // rate)
    wanted = np.sin(2 * np.pi * tone * np.arange(len(found)) / RATE)
    np.testing.assert_allclose(found[200:-200], wanted[200:-200], atol=5e-3)
    if rate > RATE:  # what the lower rate cannot hold is filtered out
        high = np.sin(2 * np.pi * 0.45 * rate * np.arange(len(given)) / rate).astype(np.float32)
        assert np.abs(resampled(high, rate, RATE, "the audio")[200:-200]).max() < 0.05


def test_tokens_of_a_language_and_a_task() -> None:
    tokens = SpeechTokens.of(2, GENERATION)
    assert tokens.ids() == [2, 20, 22, 24] and tokens.ids("de", "translate") == [2, 21, 23, 24]
    for language, task in (("fr", None), ("", None), (None, "sing")):
        with pytest.raises(PromptError, match="the model knows"):
            tokens.ids(language, task)
    english = SpeechTokens.of(2, {"no_timestamps_token_id": 24, "is_multilingual": False})
    assert english.ids() == english.ids("en", "transcribe") == [2, 24]
    with pytest.raises(PromptError, match="en only"):
        english.ids("de")
