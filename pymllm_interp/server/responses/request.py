"""`ResponsesRequest`: the body of `/v1/responses`, and the chat request that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, ValidationError, model_validator

from ...utils.arguments import PromptError
from ...wire.strict import Strict
from ..http.body import at_most
from ..http.errors import validation_error
from ..protocol import MAX_MESSAGES, MAX_TOOLS, ChatRequest, SharedRequest
from ..routes.refused_fields import OF_RESPONSES, Refused
from ..tools.request import FunctionTool
from .items import InputItem, messages_of, served_items

LOGPROBS = "message.output_text.logprobs"


class TextFormat(Strict):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    description: str | None = None
    strict: StrictBool | None = Field(None, description="without effect: the text follows the schema in any case")

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        given = (self.name, self.schema_)
        if self.type == "json_schema" and None in given:
            raise ValueError("type 'json_schema' needs name and schema")
        if self.type != "json_schema" and given != (None, None):
            raise ValueError(f"type {self.type!r} has no name and no schema")
        return self

    def response_format(self) -> dict[str, Any]:
        """The same as a chat's `response_format`."""
        fields = self.model_dump(by_alias=True, exclude_unset=True)
        kind = fields.pop("type")
        return {"type": kind, "json_schema": fields} if kind == "json_schema" else {"type": kind}


class TextConfig(Strict):
    """The text of a response."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="of OpenAI's: ask for it in a message")


class FlatTool(FunctionTool):
    """A function that the model may call."""

    type: Literal["function"]


class FlatChoice(Strict):
    """The function that is called."""

    type: Literal["function"]
    name: str = Field(max_length=128)


class ResponsesRequest(SharedRequest):
    """Body of `POST /v1/responses`."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": "What is the capital of France?", "max_output_tokens": 20}}
    )
    REFUSED: ClassVar[Mapping[str, Refused]] = OF_RESPONSES
    input: str | Annotated[list[InputItem], at_most(MAX_MESSAGES), Field(min_length=1)]
    instructions: str | None = Field(
        None, description="a system message before the conversation, of this response alone"
    )
    max_output_tokens: StrictInt | None = Field(None, ge=0)
    text: TextConfig | None = None
    tools: Annotated[list[FlatTool] | None, at_most(MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: StrictBool | None = Field(None, description="false: one tool call at most")
    previous_response_id: str | None = Field(None, max_length=256, description="of this key's: it is continued")
    store: StrictBool | None = Field(None, description="false: the response is not kept, and cannot be continued")
    include: Annotated[list[Literal["message.output_text.logprobs"]] | None, at_most(16)] = None
    top_logprobs: StrictInt | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def read(cls, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Refuse unsupported fields by name."""
        items, tools, include = given.get("input"), given.get("tools"), given.get("include")
        if isinstance(tools, list):
            _check_types("tools", tools[:MAX_TOOLS])
        _check_types("tool_choice", [given.get("tool_choice")])
        for name in include[:16] if isinstance(include, list) else ():
            if name != LOGPROBS:
                raise ValueError(f"include: {str(name)[:80]!r} is not served: {LOGPROBS!r} is")
        if isinstance(items, list) and len(items) <= MAX_MESSAGES:
            given = {**given, "input": served_items(items)}
        return super().read(given)

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        if self.top_logprobs is not None and not self.include:
            raise ValueError(f"top_logprobs needs include=[{LOGPROBS!r}]")
        return self

    def messages(self, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages of the conversation, without the instructions.

        Args:
            before: messages of the continued response.

        Raises:
            PromptError: the output of a call that there is not, or too many messages.
        """
        given = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else messages_of(before, self.input)
        )
        messages = [*before, *given]
        if len(messages) >= MAX_MESSAGES:
            raise PromptError(
                f"input: the conversation has {len(messages)} messages; fewer than {MAX_MESSAGES} are read"
            )
        if not messages:
            raise PromptError("input: it has no message")
        return messages

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatRequest:
        """The chat request with the same meaning. Raises ApiError: a value that it may not have."""
        names = SharedRequest.model_fields.keys() & self.model_fields_set
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields |= {"messages": [*first, *messages], "max_completion_tokens": self.max_output_tokens}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format()
        if self.tools is not None:
            tools = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": tool} for tool in tools]
        if isinstance(self.tool_choice, FlatChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        else:
            fields["tool_choice"] = self.tool_choice
        fields |= {"parallel_tool_calls": self.parallel_tool_calls, "chat_template_kwargs": self.chat_template_kwargs}
        if self.include:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise validation_error(error.errors()) from error

    def echo(self) -> dict[str, Any]:
        """Fields that the response has, too."""
        format_ = None if self.text is None or self.text.format is None else self.text.format
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, FlatChoice) else self.tool_choice
        return {
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens, "max_tool_calls": None,
            "metadata": self.metadata or {}, "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id, "reasoning": {"effort": None, "summary": None},
            "service_tier": "default", "store": self.store is not False,
            "text": {"format": {"type": "text"} if format_ is None else format_.model_dump(by_alias=True, exclude_unset=True)},
            "tool_choice": choice or "auto", "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0, "truncation": "disabled", "background": False,
        }  # fmt: skip


def _check_types(name: str, given: Sequence[Any]) -> None:
    for value in given:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind is not None and kind != "function":
            raise ValueError(
                f"{name}: {str(kind)[:80]!r} is not served: the server runs no tools of its own. Describe a function, which the "
                "client runs"
            )
