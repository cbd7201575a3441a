"""`StructuredOutputs`: the form that a request's text has, with vLLM's names."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...utils.arguments import check_names, shown
from .json_schema import unsupported_in_tag, unsupported_part

MAX_CHARACTERS = 1 << 17
"""Most characters of a schema, a pattern, a grammar or a tag, and of all choices."""
MAX_CHOICES = 4096
MAX_DEPTH = 64
"""Most levels of lists and objects in each other. A schema's compile time grows with the cube of its depth."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of `StructuredOutputs` that say a form."""
_ELSEWHERE = {
    "backend": "the grammars are xgrammar's",
    "whitespace_pattern": "use disable_any_whitespace=True, or regex",
    "disable_fallback": "there is no other backend",
    "disable_additional_properties": "properties that the schema does not name are generated only where it allows them",
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A form of the text: exactly one of the first six fields. xgrammar compiles it for the model's tokenizer.

    Raises:
        TypeError: another name.
        ValueError: none or several forms, one of a wrong type, or one beyond its size.
    """

    json: Any = None
    """A JSON schema: a dict, its text, or a pydantic model. Kept as text."""
    regex: str | None = None
    """A pattern of the whole text."""
    choice: list[str] | tuple[str, ...] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A grammar in EBNF, with the rule `root`."""
    json_object: bool | None = None
    """True: a JSON object."""
    structural_tag: Any = None
    """xgrammar's structural tag: a dict or its text. Kept as text."""
    disable_any_whitespace: bool = False
    """JSON is written without optional white space."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise ValueError(f"StructuredOutputs: expected exactly one of {', '.join(KINDS)}; got {what}")
        (kind,) = given
        if kind == "json":
            object.__setattr__(self, "json", self._schema(self.json))
        elif kind == "structural_tag":
            object.__setattr__(self, "structural_tag", self._object("structural_tag", self.structural_tag))
            if why := unsupported_in_tag(json_module.loads(self.structural_tag or "")):
                raise ValueError(f"StructuredOutputs(structural_tag=...): {why}")
        elif kind == "choice":
            self._check_choice()
        elif kind == "json_object":
            self._check("json_object", self.json_object is True, "True")
        else:
            value = getattr(self, kind)
            self._check(kind, isinstance(value, str) and bool(value), "a text")
            self._check_size(kind, len(value))
        self._check("disable_any_whitespace", isinstance(self.disable_any_whitespace, bool), "True or False")

    @classmethod
    def of(cls, given: Any) -> StructuredOutputs | None:
        """Structured outputs from a mapping of their fields, as they come over the wire.
        Raises TypeError, ValueError: an invalid type or value."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"structured_outputs={shown(given)}: expected StructuredOutputs, its fields, or None")
        check_names("StructuredOutputs", given, [field.name for field in fields(cls)], _ELSEWHERE)
        return cls(**given)

    @property
    def kind(self) -> str:
        """The name of the form."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """All that the form says, as text: it tells forms of a kind apart."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json_module.dumps(value)

    def _schema(self, given: Any) -> str:
        if isinstance(given, type) and callable(make := getattr(given, "model_json_schema", None)):
            given = make()
        text = self._object("json", given, also=bool)
        if why := unsupported_part(json_module.loads(text)):
            raise ValueError(f"StructuredOutputs(json=...): {why}")
        return text

    def _object(self, name: str, given: Any, also: type = dict) -> str:
        """A JSON object, or its text, as text."""
        value = given
        if isinstance(given, str):
            self._check_size(name, len(given))
            try:
                value = json_module.loads(given)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"StructuredOutputs({name}=...): it is not JSON: {error}") from None
        self._check(name, isinstance(value, dict | also), "a JSON object")
        self._check_size(name, _least_characters(value))
        if not _shallow(value, MAX_DEPTH):
            raise ValueError(f"StructuredOutputs({name}=...): it is nested too deeply; at most {MAX_DEPTH} levels")
        try:
            text = json_module.dumps(value, allow_nan=False, ensure_ascii=False)
            text.encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"StructuredOutputs({name}=...): it cannot be written as JSON: {error}") from None
        self._check_size(name, len(text))
        return text

    def _check_choice(self) -> None:
        choice = self.choice
        if isinstance(choice, list | tuple) and len(choice) > MAX_CHOICES:
            raise ValueError(f"StructuredOutputs(choice=...): {len(choice)} entries; at most {MAX_CHOICES}")
        texts = isinstance(choice, list | tuple) and all(isinstance(text, str) for text in choice)
        self._check("choice", texts and bool(choice), "a list of texts")
        self._check_size("choice", sum(map(len, choice or ())))

    def _check_size(self, name: str, characters: int) -> None:
        if characters > MAX_CHARACTERS:
            raise ValueError(f"StructuredOutputs({name}=...): {characters} characters; at most {MAX_CHARACTERS}")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"StructuredOutputs({name}={shown(getattr(self, name))}): expected {expected}")


def _least_characters(value: Any) -> int:
    """Lower bound of the length of a value's JSON. Stops counting above `MAX_CHARACTERS`."""
    count, left = 0, [value]
    while left and count <= MAX_CHARACTERS:
        value = left.pop()
        count += len(value) if isinstance(value, str) else 1
        if isinstance(value, dict | list):
            count += len(value)
            if count <= MAX_CHARACTERS:
                left += (*value, *value.values()) if isinstance(value, dict) else value
    return count


def _shallow(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    return levels > 0 and all(
        _shallow(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )
