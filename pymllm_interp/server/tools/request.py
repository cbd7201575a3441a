"""Tools of a chat request, and its requirements of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, StrictBool

from ...core.structured.structured_outputs import StructuredOutputs
from ...utils.arguments import PromptError
from ...wire.strict import Strict
from .formats import TOOL_FORMATS, Function, behind_reasoning, tag_of
from .messages import MessageParser


class FunctionTool(Strict):
    """A function, as OpenAI describes it. Templates may read further fields."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Strict):
    """A tool definition: a function."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    """The name of a function."""

    name: str = Field(max_length=128)


class NamedTool(Strict):
    """OpenAI's choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class ToolPlan:
    """Formats of writing and parsing the messages of one chat request.

    Args:
        tools: tools of the request. `choice` selects those that may be called.
        choice: OpenAI's `tool_choice`.
        several: more than one call may come.

    Raises:
        PromptError: a choice that the tools or the server do not have.
    """

    def __init__(
        self, tools: Sequence[Tool] | None, choice: str | NamedTool | None, several: bool, tool_format: str | None,
        reasoning: str | None,
    ) -> None:  # fmt: skip
        functions = [
            Function(tool.function.name, tool.function.parameters or {"type": "object"}) for tool in tools or ()
        ]
        forced = choice == "required" or isinstance(choice, NamedTool)
        if forced and not functions:
            raise PromptError("tool_choice: the request has no tools")
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
            if not functions:
                raise PromptError(f"tool_choice: there is no tool {choice.function.name!r}")
        if tool_format is None and (forced or not several):
            what = "tool_choice" if forced else "parallel_tool_calls=false"
            raise PromptError(
                f"{what} needs a format of tool calls: the operator names it, serve --tool-call-parser NAME"
            )
        self.reasoning, self.functions = reasoning, functions
        self.several = several and not isinstance(choice, NamedTool)  # which is one call, as in vLLM
        self.tool_format = tool_format if functions and choice != "none" else None
        self._forced, self._formed, self.inside = forced, forced, reasoning == "deepseek_r1"

    @property
    def parses(self) -> bool:
        """Whether the text of a message is split into parts."""
        return self.tool_format is not None or self.reasoning is not None

    @property
    def keeps_special(self) -> bool:
        """Whether the parts are marked by special tokens, which the text keeps then."""
        return self.reasoning is not None or (self.tool_format is not None and TOOL_FORMATS[self.tool_format].special)

    def form(self, asked: StructuredOutputs | None) -> StructuredOutputs | None:
        """The structured output of the text: required calls, or the requested one after the reasoning. Raises PromptError: both."""
        if not self._forced:
            self._formed = asked is not None
            if asked is None or self.reasoning is None:
                return asked
            return behind_reasoning(tag_of(asked), self.reasoning, self.inside, answer=True)
        if asked is not None:
            raise PromptError("tool_choice and a form of the text are two constraints: give one of them")
        assert self.tool_format is not None, "it was checked"
        calls = TOOL_FORMATS[self.tool_format].grammar(self.functions, self.several)
        return behind_reasoning(calls, self.reasoning, self.inside)

    def parser(self, prompt: str | None) -> MessageParser:
        """The parser of one message.

        Args:
            prompt: the text that it follows: a template may open the reasoning.
        """
        opened = (
            (prompt or "").rstrip().endswith("<think>")
        )  # a structured output decides, if there is one, whether reasoning comes
        inside = self.inside or (opened and not self._formed)
        names = [function.name for function in self.functions]
        return MessageParser(self.tool_format, names, self.reasoning, inside, self.several)
