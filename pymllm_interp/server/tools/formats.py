"""The formats of tool calls and reasoning that a server knows, by vLLM's names: their parsers and their grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from ...core.structured.structured_outputs import StructuredOutputs
from ...utils.arguments import PromptError
from .calls import HarmonyParts, HermesCalls, LlamaCalls, MistralCalls
from .parts import TextParser

MAX_WHITESPACE = 32
"""White space in a row, between the parts of JSON."""


class Function(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""


class ToolFormat(NamedTuple):
    """Syntax of a model's tool calls.

    Attributes:
        call: (beginning, end) of a call of this function; its arguments stand between them.
        around: texts before the first call, between calls, and after the last.
        special: whether its marks are special tokens, which the text must keep.
    """

    parser: Callable[[Collection[str]], TextParser]
    call: Callable[[str], tuple[str, str]]
    around: tuple[str, str, str] = ("", "\n", "")
    special: bool = False

    def grammar(self, functions: Sequence[Function], several: bool) -> dict[str, Any]:
        """A structural tag's format: calls of these functions, one at least.

        Args:
            several: more than one call may come.
        """
        tags = []
        for function in functions:
            begin, end = self.call(function.name)
            content = _json(function.parameters)
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
        before, between, behind = self.around
        calls = {
            "type": "tags_with_separator", "tags": tags, "separator": between, "at_least_one": True,
            "stop_after_first": not several,
        }  # fmt: skip
        parts = [_const(before), calls, _const(behind)] if before else [calls]
        return {"type": "sequence", "elements": parts} if before else calls


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _json(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _json_call(before: str, field: str, behind: str) -> Callable[[str], tuple[str, str]]:
    return lambda name: (f'{before}{{"name": {json.dumps(name)}, "{field}": ', f"}}{behind}")


def _harmony_call(name: str) -> tuple[str, str]:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""


TOOL_FORMATS = {
    "hermes": ToolFormat(lambda names: HermesCalls(), _json_call("<tool_call>\n", "arguments", "\n</tool_call>")),
    "llama3_json": ToolFormat(LlamaCalls, _json_call("", "parameters", ""), ("", "; ", ""), special=True),
    "mistral": ToolFormat(
        lambda names: MistralCalls(), _json_call("", "arguments", ""), ("[TOOL_CALLS][", ", ", "]"), special=True
    ),
    "openai": ToolFormat(
        lambda names: HarmonyParts(), _harmony_call, ("", "<|end|><|start|>assistant", ""), special=True
    ),
}
"""--tool-call-parser. Hermes' is Qwen's, too; `openai` is gpt-oss'."""
REASONING = ("qwen3", "deepseek_r1", "openai_gptoss")
"""--reasoning-parser. With `deepseek_r1` each text begins inside of its reasoning."""


def behind_reasoning(
    form: dict[str, Any], reasoning: str | None, inside: bool, answer: bool = False
) -> StructuredOutputs:
    """A structured output after the reasoning, which is free text.

    Args:
        form: a structural tag's format.
        inside: the text begins inside of its reasoning.
        answer: the form is of an answer, and not of tool calls.
    """
    if reasoning is None:
        return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})
    if reasoning == "openai_gptoss":
        tag = {"begin": "<|channel|>analysis<|message|>", "end": "<|end|><|start|>assistant"}
    else:
        tag = {"begin": "" if inside else "<think>", "end": ["</think>\n\n", "</think>"]}
    thoughts: dict[str, Any] = {"type": "tag", "content": {"type": "any_text"}, **tag}
    first = thoughts if inside else {"type": "optional", "content": thoughts}
    final = [_const("<|channel|>final<|message|>")] if answer and reasoning == "openai_gptoss" else []
    sequence = {"type": "sequence", "elements": [first, *final, form]}
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": sequence})


def tag_of(form: StructuredOutputs) -> dict[str, Any]:
    """A form as a structural tag's format."""
    if form.kind in ("json", "json_object"):
        return _json(json.loads(form.json or '{"type": "object"}'))
    if form.kind == "regex":
        return {"type": "regex", "pattern": form.regex}
    if form.kind == "grammar":
        return {"type": "grammar", "grammar": form.grammar}
    if form.kind == "choice":
        return {"type": "or", "elements": [_const(text) for text in form.choice or ()]}
    tag = json.loads(form.structural_tag)
    if "format" not in tag:
        raise PromptError("structural_tag: the field `format` is expected")
    return tag["format"]
