"""`/openapi.json` is a valid OpenAPI document: generators of clients read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.openapi.models import OpenAPI
from helpers_server import Server
from jsonschema import Draft202012Validator

METHODS = ("get", "put", "post", "delete", "patch", "head", "options")


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return httpx.get(f"{server.url}/openapi.json", timeout=600).raise_for_status().json()


def parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """All objects below a part of the document, itself included."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts_of(child)


def test_operations_have_ids_of_their_own(document: dict[str, Any]):
    ids = [path[method]["operationId"] for path in document["paths"].values() for method in METHODS if method in path]
    assert len(ids) > 25 and not {name: count for name, count in Counter(ids).items() if count > 1}


def test_the_document_follows_openapis_schema(document: dict[str, Any]):
    """Objects and fields are those of OpenAPI 3.1, and each schema is one of JSON Schema 2020-12, which it refers to."""
    assert document["openapi"].startswith("3.1.")
    assert OpenAPI.model_validate(document).model_dump(by_alias=True, exclude_none=True)["info"] == document["info"]
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert name
    for path in document["paths"].values():
        for part in parts_of(path):
            if "schema" in part:
                Draft202012Validator.check_schema(part["schema"])


def test_references_lead_somewhere(document: dict[str, Any]):
    references = [part["$ref"] for part in parts_of(document) if isinstance(part.get("$ref"), str)]
    assert references
    for reference in references:
        found: Any = document
        for step in reference.removeprefix("#/").split("/"):
            assert step in found, reference
            found = found[step]


def test_parameters_of_a_path_are_declared(document: dict[str, Any]):
    for path, operations in document["paths"].items():
        named = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        for method in METHODS:
            if method in operations:
                declared = [one["name"] for one in operations[method].get("parameters", ()) if one["in"] == "path"]
                assert sorted(declared) == sorted(named), (path, method)
