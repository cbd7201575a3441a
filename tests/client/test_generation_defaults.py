"""Defaults of generations: transformers' in traces, vLLM's in calls, and generation_config.json in both."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.generation_defaults import GenerationDefaults, Lengths
from pymllm_interp.utils.arguments import PromptError

PENALISED = {"repetition_penalty": 1.8, "max_new_tokens": 9}
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def with_file(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Values of a generation_config.json -> the folder of a model that has them."""

    def make(**values: Any) -> Path:
        folder = tmp_path_factory.mktemp("with_file")
        shutil.copytree(model_folder("llama"), folder, dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps(values))
        return folder

    return make


@pytest.fixture(scope="module")
def penalised(with_file: Callable[..., Path]) -> Iterator[tuple[LM, PreTrainedModel]]:
    """A model with a file, here and in transformers."""
    folder = with_file(**PENALISED)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with LM(folder, dtype="float32", device="cpu") as lm:
        yield lm, oracle


def traced(lm: LM, prompt: list[int], **kwargs: Any) -> list[int]:
    with lm.generate(prompt, **kwargs) as tracer:
        out = tracer.result.save()
    return out[0].tolist()


def by_transformers(model: PreTrainedModel, prompt: list[int], **kwargs: Any) -> list[int]:
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    return generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **kwargs)[0].tolist()


def said_by_us(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("pymllm_interp")]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
@pytest.mark.parametrize("length", [1, 19, 40, 120])
def test_a_traced_generation_without_a_length_is_as_long_as_transformers(length: int, lm_of, oracle) -> None:
    """20 new tokens, and fewer where the context ends (128 positions)."""
    prompt = [i % 90 for i in range(length)]
    found = traced(lm_of("llama"), prompt)
    assert len(found) == min(length + 20, 128)
    assert found == by_transformers(oracle("llama"), prompt)


def test_a_traced_generation_follows_the_models_file_as_transformers_does(penalised) -> None:
    lm, model = penalised
    found = traced(lm, PROMPT)
    assert found == by_transformers(model, PROMPT) and len(found) == len(PROMPT) + 9
    assert found != traced(lm, PROMPT, repetition_penalty=1.0), "the file's penalty makes no difference"
    assert traced(lm, PROMPT, max_new_tokens=4) == by_transformers(model, PROMPT, max_new_tokens=4)
    unpenalised = by_transformers(model, PROMPT, repetition_penalty=1.0)
    assert traced(lm, PROMPT, repetition_penalty=1.0) == unpenalised


def test_a_traced_generation_with_its_own_eos_ends_there_as_in_transformers(with_file) -> None:
    varied = {"max_new_tokens": 12, "repetition_penalty": 1.8}
    model = AutoModelForCausalLM.from_pretrained(with_file(**varied), dtype=torch.float32).eval()
    tokens = by_transformers(model, PROMPT)[len(PROMPT) :]
    first, later = tokens[1], next(token for token in tokens[2:] if token not in tokens[:2])
    folder = with_file(**varied, eos_token_id=first)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LM(folder, dtype="float32", device="cpu") as lm:
        assert traced(lm, PROMPT) == by_transformers(model, PROMPT)
        assert traced(lm, PROMPT, eos_token_id=later) == by_transformers(model, PROMPT, eos_token_id=later)


def test_calls_follow_the_models_file_as_vllm_does(penalised) -> None:
    """The file's values where the caller gives no SamplingParams, and none of them where the caller does."""
    lm, _ = penalised
    assert lm.default_sampling_params == SamplingParams(repetition_penalty=1.8, max_tokens=9)
    wanted = SamplingParams(repetition_penalty=1.8, max_tokens=9, seed=3)
    with_defaults, explicit = lm.generate([PROMPT]), lm.generate([PROMPT], SamplingParams(max_tokens=5))
    assert len(with_defaults[0].token_ids) == 9 and len(explicit[0].token_ids) == 5
    handle = lm.submit(PROMPT)
    assert handle.requests[0].params == lm.default_sampling_params and handle.result().finish_reason == "length"
    assert wanted.penalised and not lm.submit(PROMPT, SamplingParams(max_tokens=5)).requests[0].params.penalised


def test_a_length_that_nobody_asked_for_is_cut_to_the_context(with_file) -> None:
    with LM(with_file(max_new_tokens=4000), dtype="float32", device="cpu") as lm:
        (out,) = lm.generate([PROMPT])
        assert len(out.token_ids) == 128 - len(PROMPT)
        assert len(traced(lm, PROMPT)) == 128


def test_none_ignores_the_file_but_for_its_end_of_sequence_ids(with_file, caplog) -> None:
    folder = with_file(**PENALISED, eos_token_id=[3, 4])
    with caplog.at_level(logging.WARNING, logger="pymllm_interp"):
        with LM(folder, dtype="float32", device="cpu", generation_config="none") as lm:
            assert lm.default_sampling_params == SamplingParams()
            assert lm.submit(PROMPT).requests[0].eos_token_ids == {3, 4}
            assert len(traced(lm, PROMPT, ignore_eos=True)) == len(PROMPT) + 20
    assert not said_by_us(caplog)


def test_another_folders_file_is_followed(with_file, model_folder) -> None:
    other = with_file(temperature=0.5, top_p=0.9)
    with LM(model_folder("llama"), dtype="float32", device="cpu", generation_config=other) as lm:
        assert lm.default_sampling_params == SamplingParams(temperature=0.5, top_p=0.9)


@pytest.mark.parametrize(("setting", "hint"), [("nowhere", "expected 'auto', 'none'"), ("vllm", "is 'none' here")])
def test_a_folder_without_the_file_is_refused(setting: str, hint: str, model_folder) -> None:
    with pytest.raises(FileNotFoundError, match=hint):
        LM(model_folder("llama"), device="cpu", generation_config=setting)


def test_what_is_followed_and_what_is_not_is_logged(with_file, oracle, caplog) -> None:
    folder = with_file(temperature=0.6, top_k=7, no_repeat_ngram_size=3, num_beams=1)
    with caplog.at_level(logging.WARNING, logger="pymllm_interp"):
        GenerationDefaults.of("auto", oracle("llama").config, folder)
    followed, ignored = said_by_us(caplog)
    assert "temperature=0.6, top_k=7" in followed and "generation_config='none'" in followed
    assert "not followed: no_repeat_ngram_size=3" in ignored and "num_beams" not in ignored


SAMPLES = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "min_p": 0.1}


@pytest.mark.parametrize(
    ("values", "kwargs", "wanted"),
    [
        ({}, {}, {"temperature": 0.0}),
        ({}, {"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 50}),
        ({}, {"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        (SAMPLES, {}, {"temperature": 0.6, "top_p": 0.9, "min_p": 0.1, "top_k": 50}),
        (SAMPLES, {"top_p": 0.5}, {"temperature": 0.6, "top_p": 0.5, "min_p": 0.1, "top_k": 50}),
        (SAMPLES, {"do_sample": False}, {"temperature": 0.0}),
        (SAMPLES, {"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 0.6, "top_k": 3}, {}, {"temperature": 0.0}),
        ({"temperature": 0.6, "top_k": 3}, {"do_sample": True}, {"temperature": 0.6, "top_k": 3}),
        ({"min_new_tokens": 4}, {}, {"temperature": 0.0, "min_tokens": 4}),
        ({"min_new_tokens": 4}, {"max_new_tokens": 2}, {"temperature": 0.0, "min_tokens": 2, "max_tokens": 2}),
        ({"min_length": 12}, {}, {"temperature": 0.0, "min_tokens": 4}),
    ],
)
def test_a_traced_generations_parameters_are_the_callers_then_the_files_then_transformers(values, kwargs, wanted):
    defaults = GenerationDefaults(values, frozenset())
    params = defaults.of_trace(kwargs, defaults.lengths(len(PROMPT), 100))
    assert params == SamplingParams(**{"max_tokens": 20, **wanted})


def test_lengths_of_the_file_that_count_the_prompt() -> None:
    defaults = GenerationDefaults({"max_length": 30}, frozenset())
    assert defaults.lengths(8, 100) == Lengths(22, 0)
    with pytest.raises(PromptError, match=r"invoke 2 has 30 tokens.* max_length=30"):
        defaults.lengths(30, 100, "invoke 2")
