"""Wrong values for each list and each object of a JSON schema, as large as a body may be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Put = Callable[[Any], Any]
"""Makes a whole body of a value for one place in it."""
WRONG: tuple[Any, ...] = (None, 1, {"x": 1})
"""Items of lists and objects; each is wrong for most of them."""


class Places:
    """Finds the lists and objects of a schema.

    Args:
        document: OpenAPI's, which the schema's references point into.
        closed: names of its components that are not looked into.
    """

    def __init__(self, document: dict[str, Any], closed: Sequence[str] = ()) -> None:
        self._document, self._closed = document, frozenset(f"#/components/schemas/{name}" for name in closed)

    def of(self, schema: dict[str, Any]) -> Iterator[tuple[str, str, Put]]:
        """(path, "array" or "object", how a body gets a value there)."""
        return self._walk(schema, "", lambda value: value, self._closed)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            found: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema

    def _walk(
        self, schema: dict[str, Any], path: str, put: Put, seen: frozenset[str]
    ) -> Iterator[tuple[str, str, Put]]:
        if schema.get("$ref") in seen:
            return
        seen |= {schema["$ref"]} if "$ref" in schema else set()
        schema = self._resolved(schema)
        for branch in [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]:
            yield from self._walk(branch, path, put, seen)
        kind = schema.get("type")
        if kind == "array":
            yield path, "array", put
            items = schema.get("items") or {}
            yield from self._walk(items, f"{path}[]", lambda value: put([value]), seen)
        if kind == "object":
            yield path, "object", put
            base = self.smallest(schema)
            for name, part in schema.get("properties", {}).items():
                inner = lambda value, name=name: put(base | {name: value})  # noqa: E731
                yield from self._walk(part, f"{path}.{name}", inner, seen)
            if isinstance(values := schema.get("additionalProperties"), dict):
                yield from self._walk(values, f"{path}{{}}", lambda value: put({"x": value}), seen)

    def smallest(self, schema: dict[str, Any]) -> Any:
        """A value that fits a schema, with what it requires only."""
        schema = self._resolved(schema)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self.smallest(schema[name][0])
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        match schema.get("type"):
            case "string":
                return "w1"
            case "integer" | "number":
                return max(1, schema.get("minimum", 1))
            case "boolean":
                return False
            case "array":
                return [self.smallest(schema["items"])] * schema.get("minItems", 0)
            case "object":
                found = {name: self.smallest(schema["properties"][name]) for name in schema.get("required", ())}
                return {"x": 1} if schema.get("minProperties") and not found else found
        return None


def large(kind: str, item: Any, size: int) -> Any:
    """A list or an object of so many bytes of JSON, full of one item."""
    count = size // (len(json.dumps(item)) + (1 if kind == "array" else 9))
    return [item] * count if kind == "array" else {f"{i:05}": item for i in range(count)}


def bodies_of(places: Places, schema: dict[str, Any], size: int) -> Iterator[tuple[str, Any]]:
    """(what is wrong, body): each list and object of the schema, full of wrong items; and lists full of such lists."""
    for path, kind, put in places.of(schema):
        for item in WRONG:
            yield f"{path} of {json.dumps(item)}", put(large(kind, item, size))
        if path.endswith("]") or "[]." in path:
            yield f"{path} many times", _repeated(put(large(kind, 1, size >> 7)), size)


def _repeated(body: Any, size: int) -> Any:
    """A body whose outermost list with one item has it many times."""
    if isinstance(body, list) and len(body) == 1:
        return body * max(1, size // len(json.dumps(body)))
    if isinstance(body, dict):
        return {name: _repeated(value, size) for name, value in body.items()}
    return body
