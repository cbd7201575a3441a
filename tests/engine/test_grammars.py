"""Random schemas and patterns, and random logits: each text that ends is of its form, whatever pushes other tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import jsonschema
import pytest
import torch
from helpers_structured import dumped, ending_bias, random_pattern, random_schema, save_model

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.sampling import StructuredOutputs

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.local


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    lm = LM(str(save_model(tmp_path_factory.mktemp("bytes"))), device="cpu", dtype="float32", max_running_requests=32)
    yield lm
    lm.shutdown()


def pushed(lm: LM) -> Steer:
    """Pushes the first special token and the letter z, at each position."""
    ids = lm.tokenizer.get_vocab()
    direction = torch.zeros(lm.model_spec.vocab_size)
    direction[[ids["z"], ids["<|im_start|>"]]] = 60.0
    return Steer("logits", direction, positions="generated")


def texts_of(lm: LM, forms: list[StructuredOutputs], seed: int) -> list[tuple[str, str]]:
    """(text, how it ended) of each form: half of the requests are pushed to forbidden tokens."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed + i,
            max_tokens=160,
            structured_outputs=form,
            logit_bias=ending_bias(lm.tokenizer),
        )
        for i, form in enumerate(forms)
    ]
    ops = [[pushed(lm)] if i % 2 else [] for i in range(len(forms))]
    found = lm.generate(["x"] * len(forms), params, interventions=ops)
    return [(one.text, one.finish_reason) for one in found]


def check_schemas(lm: LM, count: int, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    ended = 0
    for schema, (text, reason) in zip(
        schemas, texts_of(lm, [StructuredOutputs(json=schema) for schema in schemas], seed), strict=True
    ):
        if reason == "stop":
            ended += 1
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            except ValueError as error:
                raise AssertionError(f"{dumped(schema)}: {text!r}") from error
    assert ended > count / 2, ended


def check_patterns(lm: LM, count: int, seed: int) -> None:
    rng = random.Random(seed)
    patterns = [random_pattern(rng) for _ in range(count)]
    found = texts_of(lm, [StructuredOutputs(regex=pattern) for pattern in patterns], seed)
    ended = 0
    for pattern, (text, reason) in zip(patterns, found, strict=True):
        if reason == "stop":
            ended += 1
            # White space of ECMA-262, which JSON schemas name, has U+FEFF too.
            assert re.fullmatch(pattern.replace(r"\s", r"[\s\ufeff]"), text, re.DOTALL), (pattern, text)
    assert ended > count / 2, ended


def test_texts_of_random_schemas_are_valid(lm):
    check_schemas(lm, 40, seed=1)


def test_texts_of_random_patterns_match(lm):
    check_patterns(lm, 24, seed=2)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("pattern", ["[^a-z]?.+", "a*.?e.*", r"\d[^a-z]{1,3}.*[^a-z]+"])
def test_a_text_that_is_not_complete_does_not_end(lm, pattern, requests):
    """xgrammar 0.2.9 lets these end at once. From four requests on, their masks are made together."""
    ends = SamplingParams(
        temperature=0,
        max_tokens=60,
        structured_outputs=StructuredOutputs(regex=pattern),
        logit_bias={lm.tokenizer.eos_token_id: 100.0},
    )
    for one in lm.generate(["x"] * requests, ends):
        assert one.finish_reason == "stop" and re.fullmatch(pattern, one.text, re.DOTALL), one.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 13))
def test_texts_of_many_random_schemas_and_patterns(lm, seed):
    check_schemas(lm, 60, seed)
    check_patterns(lm, 40, seed)
