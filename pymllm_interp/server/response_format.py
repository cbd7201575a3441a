"""The form of a completion as HTTP asks for it: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, model_validator

from ..core.structured.structured_outputs import StructuredOutputs
from ..wire.strict import Strict
from .http.body import at_most

MAX_TAGS = 128
"""Most tags of a structural tag's older form, and most texts that begin one."""


class JsonSchema(Strict):
    """A JSON schema with a name, as OpenAI defines it."""

    name: str = Field(max_length=256)
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    description: str | None = None
    strict: StrictBool | None = Field(None, description="without effect: the text follows the schema in any case")


class ResponseFormat(Strict):
    """OpenAI's `response_format`, and vLLM's structural tags in it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = Field(None, description="of a structural tag")
    structures: Annotated[list[dict[str, Any]] | None, at_most(MAX_TAGS)] = Field(
        None, description="of a structural tag's older form"
    )
    triggers: Annotated[list[str] | None, at_most(MAX_TAGS)] = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type 'json_schema' and the field json_schema go together")
        return self

    def form(self) -> dict[str, Any] | None:
        """Fields of `StructuredOutputs`; None: any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.json_schema is not None:
            schema = self.json_schema.schema_
            return {"json_object": True} if schema is None else {"json": schema}
        if self.format is None:
            tags = [
                {
                    "begin": one.get("begin"),
                    "end": one.get("end"),
                    "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
                }
                for one in self.structures or ()
            ]
            form = {"type": "triggered_tags", "triggers": self.triggers or [], "tags": tags}
            return {"structural_tag": {"type": "structural_tag", "format": form}}
        return {"structural_tag": {"type": "structural_tag", "format": self.format}}


def form_of(
    response_format: ResponseFormat | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutputs | None:
    """The structured output of a request's two fields, or None.
    Raises ValueError, TypeError: both are given, or a form that cannot be."""
    form = None if response_format is None else response_format.form()
    if form is not None and structured_outputs is not None:
        raise ValueError("response_format and structured_outputs are two constraints: give one of them")
    return StructuredOutputs.of(form if structured_outputs is None else structured_outputs)
