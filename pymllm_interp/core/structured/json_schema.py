"""Keywords of JSON schemas that xgrammar leaves out: a text could then differ from its schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "example",
        "deprecated", "readOnly", "writeOnly", "discriminator", "strict", "contentEncoding", "contentMediaType",
    )
)  # fmt: skip
"""Keywords that allow and forbid nothing."""
_REFUSED = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "propertyNames", "patternProperties", "$dynamicRef", "$recursiveRef", "unevaluatedProperties",
    "unevaluatedItems",
)  # fmt: skip
_UNIONS = ("anyOf", "oneOf", "allOf", "$ref")
_INFERRED = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
"""Keyword -> the type of a schema that has it and no type."""
_NEGATED = re.compile(r"\[\^(?:\\.|[^\]\\])*\]")
_ESCAPED = re.compile(r'"|\\\\|\\x22|\\x5c|\\u0022|\\u005c', re.IGNORECASE)
_IN_STRINGS = r"[^\x00-\x1f\"\\]"
"""A character that JSON strings have as it is."""
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip


SCHEMAS_OF_TAGS = ("json_schema", "schema")
"""Fields of structural tags with a schema."""


def unsupported_part(schema: Any, where: str = "") -> str | None:
    """First part of a schema that grammars do not support, with its path; None if all of it is supported.

    Args:
        where: path of the schema in the one that was given, for the message.
    """
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"{where or 'it'} is not a schema: an object is expected"
    if why := _why_shape(schema) or _why(schema):
        return f"{where or 'its top level'}: {why}"
    for path, part in _parts(schema):
        if why := unsupported_part(part, f"{where}.{path}" if where else path):
            return why
    return None


def with_plain_strings(schema: Any) -> Any:
    """The schema with a pattern in place of strings' lengths: xgrammar would let control characters into such strings."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = with_plain_strings(found[key])
    for key in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(parts := found.get(key), list):
            found[key] = [with_plain_strings(part) for part in parts]
    for key in ("properties", "$defs", "definitions"):
        if isinstance(parts := found.get(key), dict):
            found[key] = {name: with_plain_strings(part) for name, part in parts.items()}
    low, high = found.get("minLength", 0), found.get("maxLength", "")
    if found.get("type") != "string" or not {"minLength", "maxLength"} & found.keys() or (high != "" and low > high):
        return found
    rest = {name: value for name, value in found.items() if name not in ("minLength", "maxLength")}
    return rest | {"type": "string", "pattern": f"^{_IN_STRINGS}{{{low},{high}}}$"}


def with_plain_tags(tag: Any) -> Any:
    """A structural tag with `with_plain_strings` of its schemas."""
    if isinstance(tag, list):
        return [with_plain_tags(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        name: with_plain_strings(value) if name in SCHEMAS_OF_TAGS else with_plain_tags(value)
        for name, value in tag.items()
    }


def unsupported_in_tag(tag: Any) -> str | None:
    """`unsupported_part` of the first such schema in a structural tag, such as the parameters of a tool."""
    named = tag.items() if isinstance(tag, dict) else [("", part) for part in tag] if isinstance(tag, list) else ()
    for name, part in named:
        found = unsupported_part(part) if name in SCHEMAS_OF_TAGS else unsupported_in_tag(part)
        if found is not None:
            return found
    return None


def _why_shape(schema: dict[str, Any]) -> str | None:
    """Error about a keyword with a value of the wrong type, or None."""
    texts = {"required": "a list of texts", "type": "a text or a list of texts"}
    for key, expected in texts.items():
        value = schema.get(key, [])
        values = [value] if key == "type" and isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
            return f"{key!r} is not {expected}"
    return None


def _why(schema: dict[str, Any]) -> str | None:
    keys = schema.keys() - ANNOTATIONS
    if refused := [key for key in _REFUSED if key in keys]:
        return f"{refused[0]!r} is not supported in structured outputs"
    if schema.get("uniqueItems"):
        return "'uniqueItems' is not supported in structured outputs"
    if isinstance(reference := schema.get("$ref"), str) and not (reference == "#" or reference.startswith("#/")):
        return f"$ref {reference[:80]!r}: only parts of the schema itself, '#/...', are supported"
    if "allOf" in keys and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        return "'allOf' of several schemas is not supported: write one schema"
    if unions := [key for key in _UNIONS if key in keys]:
        beside = sorted(keys - {unions[0]})
        return f"{beside[0]!r} beside {unions[0]!r} is not supported: write it into each option" if beside else None
    if "enum" in keys or "const" in keys:
        return _why_values(schema, keys)
    return _why_typed(schema, keys)


def _why_values(schema: dict[str, Any], keys: set[str]) -> str | None:
    name = "enum" if "enum" in keys else "const"
    if beside := sorted(keys - {name, "type"}):
        return f"{beside[0]!r} beside {name!r} is not supported: leave values out that it forbids"
    kinds = _types_of(schema)
    values = schema[name] if name == "enum" else [schema[name]]
    if kinds and isinstance(values, list) and not all(_is_any(value, kinds) for value in values):
        return f"a value of {name!r} is not of the schema's type"
    return None


def _why_typed(schema: dict[str, Any], keys: set[str]) -> str | None:
    kinds = _types_of(schema) or [kind for key, kind in _INFERRED.items() if key in keys]
    if not kinds:
        return f"{min(keys)!r} without 'type' is not supported: give the type" if keys else None
    if "pattern" in keys and (beside := keys & {"minLength", "maxLength", "format"}):
        return f"{min(beside)!r} beside 'pattern' is not supported: write the pattern for it"
    if "format" in keys and (beside := keys & {"minLength", "maxLength"}):
        return f"{min(beside)!r} beside 'format' is not supported: use 'pattern'"
    if len(kinds) > 1 and (beside := keys & {"minLength", "maxLength"}):
        return f"{min(beside)!r} beside several types is not supported: use 'anyOf'"
    if isinstance(pattern := schema.get("pattern"), str) and _ESCAPED.search(_NEGATED.sub("", pattern)):
        return "a 'pattern' with a quotation mark or a backslash, which JSON writes as two characters, is not supported"
    properties = schema.get("properties")
    known = properties.keys() if isinstance(properties, dict) else ()
    missing = [name for name in schema.get("required") or () if name not in known]
    if missing and "object" in kinds:
        return f"'required' names {str(missing[0])[:80]!r}, which 'properties' does not have"
    return None


def _types_of(schema: dict[str, Any]) -> list[Any]:
    kinds = schema.get("type")
    return kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]


def _is_any(value: Any, kinds: list[Any]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return True
    return any(isinstance(kind, str) and isinstance(value, _TYPES.get(kind, ())) for kind in kinds)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, with their paths."""
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield key, schema[key]
    for key in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            yield from ((f"{key}[{i}]", part) for i, part in enumerate(parts))
    for key in ("properties", "$defs", "definitions"):
        if isinstance(parts := schema.get(key), dict):
            yield from ((f"{key}.{name}", part) for name, part in parts.items())
