"""Structured outputs of requests: bad input, and beside drafts, preemption, traces, other completions and other requests."""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_drafts import Told
from helpers_structured import ending_bias, save_model
from transformers import AutoTokenizer

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.handle import RequestError
from pymllm_interp.engine import constraints
from pymllm_interp.engine.grammars import grammar_constraint, grammars
from pymllm_interp.sampling import ConstraintError, StructuredOutputs
from pymllm_interp.sampling.bitmasks import allows, empty_bitmask
from pymllm_interp.server.response_format import ResponseFormat
from pymllm_interp.utils.arguments import PromptError

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.local
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FORMS = [
    StructuredOutputs(json=PERSON), StructuredOutputs(regex=r"(ab|c\d){2,9}"), StructuredOutputs(choice=["yes", "nono"]),
    StructuredOutputs(grammar='root ::= "a" root "b" | "x"'), StructuredOutputs(json=PERSON, disable_any_whitespace=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def lm_with(folder: Path) -> Iterator[Callable[..., LM]]:
    made: dict[str, LM] = {}

    def load(**options: Any) -> LM:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = LM(str(folder), device="cpu", dtype="float32", **options)
        return made[key]

    yield load
    for lm in made.values():
        lm.shutdown()


def params(lm: LM, form: Any, seed: int = 0, **more: Any) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 80, "logit_bias": ending_bias(lm.tokenizer)} | more
    return SamplingParams(seed=seed, structured_outputs=form, **given)


def text(lm: LM, form: Any, seed: int = 0, **more: Any) -> str:
    return lm.generate(["x"], params(lm, form, seed, **more))[0].text


# -- what is asked for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "expected exactly one of json, regex.*got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json": "{"}, "not JSON"),
        ({"json": 3}, "expected a JSON object"),
        ({"choice": []}, "expected a list of texts"),
        ({"choice": ["a"] * 4097}, "at most 4096"),
        ({"regex": "a" * (1 << 17) + "a"}, "131073 characters; at most 131072"),
        ({"regex": ""}, "expected a text"),
        ({"json": {"items": {}} | {"type": "string", "not": {}}}, "'not' is not supported"),
        ({"json": {"type": "object", "properties": {"a": {"uniqueItems": True}}}}, r"properties.a: 'uniqueItems'"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "'allOf' of several"),
        ({"json": {"anyOf": [{"type": "string"}], "maxLength": 1}}, "'maxLength' beside 'anyOf'"),
        ({"json": {"enum": ["abc"], "maxLength": 1}}, "'maxLength' beside 'enum'"),
        ({"json": {"enum": ["a", 1], "type": "integer"}}, "not of the schema's type"),
        ({"json": {"maxLength": 1}}, "'maxLength' without 'type'"),
        ({"json": {"type": "string", "pattern": "a", "maxLength": 1}}, "'maxLength' beside 'pattern'"),
        ({"json": {"type": "string", "pattern": 'a"'}}, "a quotation mark"),
        ({"json": {"type": "object", "required": ["z"], "properties": {"a": {}}}}, "'z', which 'properties'"),
        ({"json": {"$ref": "http://x/y"}}, "only parts of the schema itself"),
        ({"json": {"type": "object", "required": 5}}, "'required' is not a list of texts"),
        ({"json": {"type": "object", "required": [[1]]}}, "'required' is not a list of texts"),
        ({"json": {"type": 3}}, "'type' is not a text or a list of texts"),
        (
            {"structural_tag": {"format": {"tags": [{"content": {"type": "json_schema", "json_schema": {"not": {}}}}]}}},
            "structural_tag=...\\): its top level: 'not' is not supported",
        ),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_is_an_error_where_it_is_written(fields, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**fields)


def test_a_form_that_is_nested_too_deeply_is_refused_before_it_is_compiled():
    schema: Any = {}
    for _ in range(65):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="nested too deeply; at most 64"):
        StructuredOutputs(json=schema)


def test_two_constraints_are_refused():
    class Spec:
        def make(self, vocab_size: int) -> Any: ...

    with pytest.raises(ValueError, match="two constraints"):
        SamplingParams(structured_outputs=FORMS[0], constraint=Spec())
    with pytest.raises(TypeError, match="use structured_outputs, with regex"):
        SamplingParams(guided_regex="a")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="StructuredOutputs"):
        SamplingParams(structured_outputs={"backend": "x"})


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_a_form_survives_pickle_and_json(form):
    assert pickle.loads(pickle.dumps(form)) == form
    assert (
        SamplingParams(structured_outputs=json.loads(json.dumps(asdict(form)))).structured_outputs == form
        or form.choice
    )


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutputs(regex="(("), "the regex '\\(\\(' cannot be compiled: Regex parsing error"),
        (StructuredOutputs(regex=r"(a)\1"), "Backreference is not supported"),
        (StructuredOutputs(grammar="root ::= root"), "no token can begin a text"),
        (StructuredOutputs(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum greater than maximum"),
        (StructuredOutputs(json={"type": "foo"}), "Unsupported type"),
        (StructuredOutputs(structural_tag={"type": "foo"}), "cannot be compiled"),
    ],
)
def test_what_no_text_fits_is_refused_before_it_is_scheduled(lm_with, form, message):
    lm = lm_with()
    steps = lm.engine.stats()["steps"]
    with pytest.raises(PromptError, match=f"prompt 1: structured_outputs: .*{message}"):
        lm.generate(["x", "y"], [SamplingParams(), SamplingParams(structured_outputs=form)])
    assert lm.engine.stats()["steps"] == steps


def test_a_grammar_that_takes_too_long_is_refused(lm_with, monkeypatch):
    """Its compiler cannot be stopped, and holds up neither the engine nor other grammars."""
    lm, release, compiled = lm_with(), threading.Event(), grammars._compiled
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.2)

    def slow(compiler: Any, spec: StructuredOutputs) -> Any:
        if spec.regex == "slow":
            release.wait()
        return compiled(compiler, spec)

    monkeypatch.setattr(grammars, "_compiled", slow)
    try:
        for _ in range(2):
            with pytest.raises(PromptError, match=r"not compiled in 0.2 s"):
                text(lm, StructuredOutputs(regex="slow"))
        monkeypatch.setattr(grammars, "COMPILE_SECONDS", 60)
        assert text(lm, StructuredOutputs(regex="quick")) == "quick"
    finally:
        release.set()
    lm.backend.factory.grammars.start(StructuredOutputs(regex="slow")).result()
    assert text(lm, StructuredOutputs(regex="slow")) == "slow"


def test_a_strangers_pattern_that_never_compiles_is_stopped(folder, monkeypatch):
    """Its process ends, and the next one compiles what comes after it."""
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 1.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = grammars.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    found.guarded = True
    process = found._slots.get()  # so that all of them take the other one
    try:
        with pytest.raises(grammars.GrammarError, match="too long, or too much memory; make it simpler"):
            found.compiled(StructuredOutputs(regex="a?" * 9000))
        with pytest.raises(grammars.GrammarError, match="cannot be compiled: "):
            found.compiled(StructuredOutputs(regex="(("))
        assert found.compiled(StructuredOutputs(regex="ab")).name == "regex"
    finally:
        found._slots.put(process)
        found.close()


def test_a_mask_of_a_grammar_leaves_out_what_may_not_come_at_all(folder):
    """Made by itself, in a step with few grammars, and with others: special tokens that xgrammar would take as text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = grammars.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    try:
        compiled = found.compiled(StructuredOutputs(regex="(a|b)+"))
        a, b = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
        for forbidden in ([], [a]):
            allowed = compiled.allowed.clone()
            for token in forbidden:
                allowed.view(torch.uint8).numpy()[token // 8] &= 255 ^ (1 << token % 8)
            constraint = grammar_constraint.GrammarConstraint(
                compiled.compiled, allowed, allowed, compiled.end_ids, "regex"
            )
            row = empty_bitmask(1, len(tokenizer))[0]
            constraint.mask(row)
            assert (allows(row, a), allows(row, b)) == (not forbidden, True)
            row = empty_bitmask(1, len(tokenizer))[0]  # as xgrammar's threads may write it, which know no such tokens
            constraints.RequestConstraint(constraint).made_together(row, 0.0)
            assert (allows(row, a), allows(row, b)) == (not forbidden, True)
    finally:
        found.close()


def test_grammars_are_compiled_once_and_the_oldest_are_forgotten(lm_with, monkeypatch):
    lm, made, compiled = lm_with(), [], grammars._compiled
    monkeypatch.setattr(
        grammars, "_compiled", lambda compiler, spec: made.append(spec.text) or compiled(compiler, spec)
    )
    for _ in range(2):
        assert text(lm, StructuredOutputs(regex="once"), n=3) == "once"
    assert made == ["once"]
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 1)
    for pattern in ("once", "twice", "once"):
        assert text(lm, StructuredOutputs(regex=pattern)) == pattern
    assert made == ["once", "twice", "once"]
    monkeypatch.setattr(grammars, "MAX_GRAMMAR_BYTES", 10)
    with pytest.raises(PromptError, match="make it simpler"):
        text(lm, StructuredOutputs(regex="[a-z]{3}"))
    monkeypatch.setattr(grammars, "MAX_WAITING", 0)
    with pytest.raises(PromptError, match="try again later"):
        text(lm, StructuredOutputs(regex="[a-z]{4}"))


def test_a_missing_xgrammar_is_named(folder, monkeypatch):
    import sys

    with LM(str(folder), device="cpu") as lm:
        monkeypatch.setitem(sys.modules, "xgrammar", None)
        with pytest.raises(PromptError, match=r'pip install -e "\.\[structured\]"'):
            text(lm, FORMS[0])


# -- what requests give ------------------------------------------------------------------


def check(form: StructuredOutputs, found: str) -> None:
    if form.json is not None:
        value = json.loads(found)
        assert value.keys() == {"name", "age"} and len(value["name"]) <= 8 and isinstance(value["age"], int)
    elif form.choice is not None:
        assert found in form.choice
    else:
        assert re.fullmatch(form.regex or "a*xb*", found) and (form.regex or found.count("a") == found.count("b"))


@pytest.mark.parametrize(
    ("ahead", "threads"), [(False, 1), (True, 1), (True, 3)], ids=["in turn", "ahead", "masks together"]
)
def test_completions_in_a_small_pool_beside_plain_requests(lm_with, ahead, threads, monkeypatch):
    """n, preemption and prefix reuse: the texts are those of the request alone, in a roomy pool."""
    counts, made_together = [], constraints.RequestConstraint.made_together
    monkeypatch.setattr(constraints, "num_threads", lambda: threads)
    monkeypatch.setattr(
        constraints.RequestConstraint,
        "made_together",
        lambda own, row, seconds: (counts.append(1), made_together(own, row, seconds))[1],
    )
    options = {"async_scheduling": ahead, "max_model_len": 120}
    lm, roomy = lm_with(kv_cache_tokens=288, **options), lm_with(kv_cache_tokens=8192, **options)
    asked = [params(lm, form, seed, n=2) for seed, form in enumerate(FORMS)]
    alone = [[one.text for one in roomy.generate(["a prompt of some length"], one)[0].outputs] for one in asked]
    before = lm.engine.scheduler.num_preempted
    plain = [lm.submit("a prompt of some length", SamplingParams(temperature=0, max_tokens=90)) for _ in range(6)]
    found = lm.generate(["a prompt of some length"] * len(asked), asked)
    assert [[one.text for one in own.outputs] for own in found] == alone
    assert len({handle.result().text for handle in plain}) == 1
    assert lm.engine.scheduler.num_preempted > before
    ended = [
        (form, one)
        for form, own in zip(FORMS, found, strict=True)
        for one in own.outputs
        if one.finish_reason == "stop"
    ]
    assert len(ended) >= 6
    for form, one in ended:
        check(form, one.text)
    assert bool(counts) is (threads == 3)


def test_a_matcher_that_fails_among_others_ends_its_own_request(lm_with, monkeypatch):
    """xgrammar's call for all masks fails: they are made one by one."""
    lm, calls = lm_with(), []

    class Broken:
        def batch_fill_next_token_bitmask(self, matchers: Any, bits: torch.Tensor, rows: Any) -> None:
            calls.append(1)
            bits[rows[0]] = 0  # a part of it was written
            raise RuntimeError("a matcher died")

    expected, _ = text(lm, FORMS[0], 7), text(lm, FORMS[2])  # compiled: that makes a mask
    mask = grammar_constraint.GrammarConstraint.mask

    def masking(self: Any, row: torch.Tensor) -> None:
        if self.name.endswith("(choice)"):
            raise RuntimeError("a matcher died")
        mask(self, row)

    monkeypatch.setattr(constraints, "num_threads", lambda: 3)
    monkeypatch.setattr(constraints, "_batch_matcher", Broken)
    monkeypatch.setattr(grammar_constraint.GrammarConstraint, "mask", masking)
    beside = [lm.submit("x", params(lm, FORMS[0], 7)) for _ in range(6)]
    with pytest.raises(RequestError, match=r"constraint structured_outputs .choice. raised .*a matcher died"):
        text(lm, FORMS[2])
    assert {handle.result().text for handle in beside} == {expected} and calls


def test_one_slow_mask_among_others_does_not_make_them_slow(lm_with):
    lm = lm_with()
    own = constraints.RequestConstraint(lm.backend.factory.grammars.compiled(FORMS[1]).constraint())
    row = constraints.empty_bitmask(1, lm.model_spec.vocab_size)[0]
    assert own.matcher() is not None
    own.made_together(row, 5.0)
    assert own.matcher() is None and own.seconds <= constraints.SLOW_SECONDS, "timed by itself, and takes no turns"
    for _ in range(9):
        own.mask(row[None])
    assert own.matcher() is not None


def test_drafts_change_no_text_and_no_receipt(lm_with, folder):
    lm, drafter = lm_with(), Told("right", "partly", "wrong", "random")
    asked = [params(lm, form, seed) for form in FORMS for seed in range(3)]
    alone = [lm.generate(["abcd"], one)[0] for one in asked]
    drafter.tell(alone)
    with LM(str(folder), device="cpu", dtype="float32", speculative=drafter) as drafted:
        for one, expected in zip(asked, alone, strict=True):
            (found,) = drafted.generate(["abcd"], one)
            assert found.text == expected.text
            assert found.outputs[0].receipt.masked_argmax == expected.outputs[0].receipt.masked_argmax > 0
        counts = drafted.engine.stats()["speculation"]
    assert counts["accepted"] > 50 and counts["drafted"] > counts["accepted"], counts


def test_the_grammar_wins_over_a_steered_token_and_the_receipt_counts_it(lm_with):
    lm = lm_with()
    direction = torch.zeros(lm.model_spec.vocab_size)
    direction[lm.tokenizer.get_vocab()["z"]] = 1e4
    push = Steer("logits", direction)
    (found,) = lm.generate(["x"], params(lm, FORMS[2], temperature=0), interventions=[push])
    assert found.text in ("yes", "nono")
    receipt = found.outputs[0].receipt
    assert receipt.masked_argmax == len(found.token_ids), "z is forbidden at each token"
    z = StructuredOutputs(regex="z{5}")
    (found,) = lm.generate(["x"], params(lm, z, temperature=0, logit_bias=None), interventions=[push])
    assert found.text == "zzzzz" and found.outputs[0].receipt.masked_argmax == 1, "the end only"


def test_structures_behind_triggers_are_held(lm_with):
    """The older form of a structural tag: OpenAI's clients of vLLM send it as `response_format`."""
    given = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
    form = ResponseFormat(type="structural_tag", structures=[given], triggers=["<f>"]).form()
    compiled = lm_with().backend.factory.grammars.compiled(StructuredOutputs(**form))
    for fits, said in ((True, "hi <f>-12</f> and <f>3</f>"), (False, "hi <f>x"), (False, "<f>1</g>")):
        assert compiled.constraint()._matcher.accept_string(said) == fits, said


def test_special_tokens_come_only_where_the_grammar_names_them(lm_with):
    lm = lm_with()
    ids = lm.tokenizer.get_vocab()
    push = {ids["<|im_start|>"]: 90.0, ids["[TOOL_CALLS]"]: 90.0}
    (found,) = lm.generate(["x"], params(lm, StructuredOutputs(regex=".{6}"), logit_bias=push))
    assert len(found.text) == 6 and not set(found.token_ids) & push.keys()
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "[TOOL_CALLS]ab"}}
    (found,) = lm.generate(["x"], params(lm, StructuredOutputs(structural_tag=tag), logit_bias=push))
    assert found.token_ids[0] == ids["[TOOL_CALLS]"]


def test_past_its_end_a_request_with_ignore_eos_repeats_the_end(lm_with):
    lm = lm_with()
    (found,) = lm.generate(["x"], params(lm, StructuredOutputs(choice=["ab"]), ignore_eos=True, max_tokens=8))
    assert found.text == "ab" and set(found.token_ids[2:]) == {lm.tokenizer.eos_token_id} and len(found.token_ids) == 8


def test_a_samples_edit_outside_of_the_grammar_ends_its_own_request(lm_with):
    lm = lm_with()
    beside = lm.submit("x", params(lm, FORMS[0], 5))
    with (
        pytest.raises(ConstraintError, match=r"structured_outputs .regex. forbids token"),
        lm.generate("x", max_tokens=8, temperature=0, structured_outputs=StructuredOutputs(regex="[ab]{9}")) as tracer,
    ):
        for step in tracer.iter[:]:
            if step == 2:
                lm.samples[:] = lm.tokenizer.get_vocab()["z"]
    assert beside.result().text == text(lm, FORMS[0], 5)


def test_a_matcher_that_takes_too_long_ends_its_own_request(lm_with, monkeypatch):
    lm = lm_with()
    expected = text(lm, FORMS[0], 7)
    calls = []

    def slow(self: Any, started: float) -> None:
        if self.name.endswith("(regex)"):
            calls.append(1)
            if len(calls) > 5:
                raise ConstraintError("a token took 3 s")

    monkeypatch.setattr(grammar_constraint.GrammarConstraint, "_check_time", slow)
    for threads in (1, 3):
        calls.clear()
        monkeypatch.setattr(constraints, "num_threads", lambda threads=threads: threads)
        beside = [lm.submit("x", params(lm, FORMS[0], 7)) for _ in range(6)]
        with pytest.raises(Exception, match="a token took 3 s"):
            text(lm, StructuredOutputs(regex="[ab]{9}"))
        assert {handle.result().text for handle in beside} == {expected}
    monkeypatch.undo()
    monkeypatch.setattr(grammar_constraint, "MASK_SECONDS", -1)
    with pytest.raises(PromptError, match="write a simpler grammar"):
        text(lm, StructuredOutputs(regex="[ab]{8}"))
