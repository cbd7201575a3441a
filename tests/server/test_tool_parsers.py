"""Tool calls and reasoning in texts, cut into pieces in all ways; and the grammars that texts with calls come from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers_structured import ending_bias, save_model
from pydantic import TypeAdapter

from pymllm_interp import LM, SamplingParams
from pymllm_interp.sampling import StructuredOutputs
from pymllm_interp.server.settings import ServeSettings
from pymllm_interp.server.tools import calls
from pymllm_interp.server.tools.calls import HarmonyParts, HermesCalls, LlamaCalls, MistralCalls
from pymllm_interp.server.tools.formats import REASONING, TOOL_FORMATS
from pymllm_interp.server.tools.messages import MessageParser, ThinkParts
from pymllm_interp.server.tools.parts import Part, TextParser
from pymllm_interp.server.tools.request import NamedTool, Tool, ToolPlan

HARMONY = "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant"
CASES: list[tuple[Callable[[], TextParser], str, list[tuple[str, str]]]] = [
    (
        HermesCalls,
        'hi <tool_call>\n{"name": "f", "arguments": {"a": "}\\"", "b": [1]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call> bye',
        [("content", "hi "), ("call", "f"), ("arguments", '{"a": "}\\"", "b": [1]}'), ("call", "g"), ("arguments", "{}"),
         ("content", " bye")],
    ),
    (HermesCalls, 'x <tool_call> {"y": 1}</tool_call> <to', [("content", 'x <tool_call> {"y": 1}</tool_call> <to')]),
    (HermesCalls, '<tool_call>{"name": "f", "arg', [("content", '<tool_call>{"name": "f", "arg')]),
    (HermesCalls, "<tool_call>no json", [("content", "<tool_call>no json")]),
    (HermesCalls, '<tool_call>{"name": "f", "arguments": {"a', [("call", "f"), ("arguments", '{"a')]),
    (HermesCalls, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [("call", "f"), ("arguments", "{}")]),
    *(
        (HermesCalls, f"<tool_call>{text}</tool_call> b", [("content", f"<tool_call>{text}</tool_call> b")])
        for text in (
            '{"name": "f\\q", "arguments": {}}', '{"name": "f\n", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}',
            '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
        )
    ),
    (
        lambda: LlamaCalls(["f", "g"]),
        ' <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        [("call", "f"), ("arguments", '{"x": 1}'), ("call", "g"), ("arguments", "{}")],
    ),
    (lambda: LlamaCalls(["f"]), '{"name": "h", "parameters": {}} a', [("content", '{"name": "h", "parameters": {}} a')]),
    (lambda: LlamaCalls(["f"]), '{"a": 1}', [("content", '{"a": 1}')]),
    (lambda: LlamaCalls(["f"]), "Hello {", [("content", "Hello {")]),
    (lambda: LlamaCalls(["f"]), "  <|py", [("content", "  <|py")]),
    (
        MistralCalls,
        'ok[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("content", "ok"), ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}")],
    ),
    (
        MistralCalls,
        '[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g{"b": 1}',
        [("call", "f"), ("arguments", '{"a": {}}'), ("call", "g"), ("arguments", '{"b": 1}')],
    ),
    (MistralCalls, "plain [TOOL", [("content", "plain [TOOL")]),
    *(
        (MistralCalls, f"a {text} b", [("content", f"a {text} b")])
        for text in (
            "[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_CALLS][]", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] hello world",
            "[TOOL_CALLS] hello world {1}", '[TOOL_CALLS][{"x": 1}, {"y": 2}]', '[TOOL_CALLS][{"name": "f", "argu',
            '[TOOL_CALLS] [{"name": "\\ud800", "arguments": {}}]', "[TOOL_CALLS]{}",
        )
    ),
    (
        MistralCalls,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"x": 1}] z',
        [("call", "f"), ("arguments", "{}"), ("content", ', {"x": 1}] z')],
    ),
    (
        MistralCalls,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, 3] [TOOL_CALLS] g {}',
        [("call", "f"), ("arguments", "{}"), ("content", ", 3] "), ("call", "g"), ("arguments", "{}")],
    ),
    (
        HarmonyParts,
        HARMONY + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        [("reasoning", "hmm"), ("call", "f"), ("arguments", '{"a":1}')],
    ),
    (HarmonyParts, HARMONY + "<|channel|>final<|message|>Hello", [("reasoning", "hmm"), ("content", "Hello")]),
    (HarmonyParts, "plain", [("content", "plain")]),
    (HarmonyParts, "so " + HARMONY + "<|channel|>fin", [("content", "so "), ("reasoning", "hmm")]),
    (
        HarmonyParts,
        HARMONY + "<|channel|>commentary to=functions.f <|constrain|>json",
        [("reasoning", "hmm"), ("content", "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json")],
    ),
    (lambda: ThinkParts(False), "<think>\na</think>\n\nb </think>", [("reasoning", "\na"), ("content", "b </think>")]),
    (lambda: ThinkParts(True), "a</think>b", [("reasoning", "a"), ("content", "b")]),
    (lambda: ThinkParts(False), "ab", [("content", "ab")]),
    (lambda: ThinkParts(False), "<thi", [("content", "<thi")]),
    (lambda: ThinkParts(True), "abc</th", [("reasoning", "abc</th")]),
]  # fmt: skip


def joined(parts: list[Part]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in parts:
        if found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


def pieces_of(text: str, seed: int) -> list[str]:
    rng, found = random.Random(seed), []
    while text:
        count = rng.randrange(1, 7)
        found.append(text[:count])
        text = text[count:]
    return found


@pytest.mark.parametrize(
    ("make", "text", "expected"), CASES, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_parts_do_not_depend_on_how_a_text_is_cut(make, text, expected):
    for seed in range(30):
        parser, found = make(), list[Part]()
        for piece in pieces_of(text, seed) if seed else [text]:
            found += parser.push(piece)
        assert joined(found + parser.end()) == expected


def test_arguments_leave_before_they_are_complete():
    parser = HermesCalls()
    assert joined(parser.push('<tool_call>{"name": "f", "arguments": {"city": "Par')) == [
        ("call", "f"), ("arguments", '{"city": "Par'),
    ]  # fmt: skip


def test_a_message_has_reasoning_content_and_calls():
    text = '<think>first</think>\nthen <tool_call>{"name": "f", "arguments": {}}</tool_call>' * 1
    message = MessageParser("hermes", ["f"], "qwen3", False, True).message(text)
    assert (message["reasoning"], message["content"]) == ("first", "then ")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    two = text + '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert len(MessageParser("hermes", ["f"], None, False, several=False).message(two)["tool_calls"]) == 1
    assert (
        len(MessageParser("mistral", ["f"], None, False, True).message("[TOOL_CALLS]f{}")["tool_calls"][0]["id"]) == 9
    )


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    pytest.importorskip("xgrammar")
    lm = LM(str(save_model(tmp_path_factory.mktemp("bytes"))), device="cpu", dtype="float32")
    yield lm
    lm.shutdown()


@pytest.mark.local
@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("tool_format", "reasoning"),
    [(one, other) for one in TOOL_FORMATS for other in (None, *REASONING) if (one == "openai") >= (other == "openai_gptoss")
     and (one != "openai" or other in (None, "openai_gptoss"))],
)  # fmt: skip
def test_what_a_grammar_of_calls_gives_its_parser_reads(lm, tool_format, reasoning):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    described = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("add", "sub")]
    tools = TypeAdapter(list[Tool]).validate_python(described)
    plan = ToolPlan(tools, "required", True, tool_format, reasoning)
    # A model that closes its reasoning at once, where it must begin inside of it.
    bias = ending_bias(lm.tokenizer) | ({lm.tokenizer.get_vocab()["<"]: 12.0} if plan.inside else {})
    ended, most = 0, 60 if plan.inside else 300
    for seed in range(4):
        if ended == 2:
            break
        params = SamplingParams(
            max_tokens=most,
            seed=seed,
            structured_outputs=plan.form(None),
            logit_bias=bias,
            skip_special_tokens=False,
        )
        (found,) = lm.generate(["x"], params)
        if found.finish_reason == "stop":
            ended += 1
            message = plan.parser(None).message(found.text)
            assert message["content"] is None or not message["content"].strip()
            for call in message["tool_calls"]:
                assert call["function"]["name"] in ("add", "sub") and json.loads(
                    call["function"]["arguments"]
                ).keys() == {"n"}
    assert ended or plan.inside


@pytest.mark.local
def test_a_named_function_is_called_once(lm):
    """As in vLLM, whatever parallel_tool_calls says."""
    function = {"name": "add", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    tools = TypeAdapter(list[Tool]).validate_python([{"type": "function", "function": function}])
    named = NamedTool.model_validate({"type": "function", "function": {"name": "add"}})
    bias = ending_bias(lm.tokenizer) | {lm.tokenizer.eos_token_id: 0.0}
    for choice, counts in (("required", {2}), (named, {1})):
        plan = ToolPlan(tools, choice, True, "llama3_json", None)
        most = len(lm.tokenizer('{"name": "add", "parameters": {}}; ')["input_ids"]) * 2
        form, more = plan.form(None), {lm.tokenizer.get_vocab()[";"]: 90.0}
        params = SamplingParams(max_tokens=most, temperature=0, structured_outputs=form, logit_bias=bias | more)
        (found,) = lm.generate(["x"], params)
        assert {found.text.count('"name"')} == counts, found.text
    twice = "; ".join(['{"name": "add", "parameters": {}}'] * 2)
    assert len(plan.parser(None).message(twice)["tool_calls"]) == 1


def test_formats_of_gpt_oss_go_together():
    common = {"model": {"model": "demo"}, "server": {}, "name": "demo"}
    for wrong in (("hermes", "openai_gptoss"), ("openai", "qwen3"), ("nothing", None)):
        with pytest.raises(ValueError, match="parser="):
            ServeSettings(**common, tool_call_parser=wrong[0], reasoning_parser=wrong[1])
    for right in (("openai", "openai_gptoss"), ("openai", None), ("hermes", "qwen3"), (None, "deepseek_r1")):
        ServeSettings(**common, tool_call_parser=right[0], reasoning_parser=right[1])


@pytest.mark.local
@pytest.mark.parametrize("reasoning", ["qwen3", "openai_gptoss"])
def test_a_form_is_that_of_the_answer_behind_the_reasoning(lm, reasoning):
    plan = ToolPlan(None, None, True, None, reasoning)
    for asked in (
        StructuredOutputs(json={"enum": [1, 2]}),
        StructuredOutputs(choice=["1", "2"]),
        StructuredOutputs(regex="[12]"),
    ):
        params = SamplingParams(max_tokens=300, seed=1, structured_outputs=plan.form(asked), skip_special_tokens=False)
        texts = [lm.generate(["x"], params)[0].text for _ in range(2)]
        assert {plan.parser("x <think>\n").message(text)["content"] for text in texts} <= {"1", "2"}


def test_a_name_without_an_end_takes_no_time_for_each_piece() -> None:
    """The pieces are looked at once. (Each looked at all before it: 400 million characters.)"""
    parser, seen = HermesCalls(), 0
    pattern = calls._HEAD

    class Counting:
        def match(self, text: str) -> Any:
            nonlocal seen
            seen += len(text)
            return pattern.match(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_HEAD", Counting())
        parser.push('<tool_call>{"name": "')
        for _ in range(20_000):
            parser.push("a")
    assert seen < 100_000
