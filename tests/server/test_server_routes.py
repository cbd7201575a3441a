"""Routes of vLLM, OpenAI and others that are not served: each answer says what serves instead."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from helpers_paths import ROOT

from pymllm_interp.server.routes.refused_routes import ROUTES, unknown_route


@pytest.fixture(scope="module")
def client(server) -> Iterator[httpx.Client]:
    with server.client("declared") as found:
        yield found


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/v2/embed", "/v1/embeddings"),
        ("POST", "/release_kv_cache_memory", r"/sleep\?tags=kv_cache"),
        ("POST", "/reset_prefix_cache", "/v1/interp/reset_prefix_cache"),
        ("POST", "/v1/audio/transcriptions", "take text"),
        ("POST", "/v1/images/generations", "write text"),
        ("POST", "/v1/moderations", "not moderated"),
        ("GET", "/v1/files", "not stored"),
        ("POST", "/v1/batches", "send the requests at once"),
        ("POST", "/v1/responses/compact", "not compacted"),
        ("POST", "/v1/responses/resp_1/cancel", "closing the connection"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages", "previous_response_id"),
        ("POST", "/v1/messages", "/v1/chat/completions"),
        ("POST", "/api/chat", "/v1/chat/completions"),
    ],
)
def test_a_route_that_is_not_served_says_what_serves_instead(
    method: str, path: str, instead: str, client: httpx.Client
) -> None:
    found = client.request(method, path, json={} if method == "POST" else None)
    error = found.json()["error"]
    assert found.status_code == 501 and (error["type"], error["code"]) == ("not_implemented_error", "not_implemented")
    assert error["message"].startswith(f"{path} is not served: ") and re.search(instead, error["message"])


def test_every_refused_route_answers_501_and_hides_no_route_that_is_served(client: httpx.Client) -> None:
    for template in ROUTES:
        path = re.sub(r"\{[^}]*\}", "x", template)
        assert client.request("PUT", path, json={}).status_code == 501, path
    document = client.get("/openapi.json").json()["paths"]
    assert document and not set(document) & set(ROUTES)
    for path, methods in document.items():
        if "get" in methods and "{" not in path:
            assert client.get(path).status_code < 500, path


def test_reasons_name_routes_and_options_that_exist(client: httpx.Client) -> None:
    served = {*client.get("/openapi.json").json()["paths"], "/v1/interp/trace"}
    for template, reason in ROUTES.items():
        assert template.partition("{")[0] not in re.findall(r"/[\w/]+", reason), template
        assert set(re.findall(r"(?<![\w.])/(?:v\d/)?[a-z_/]+(?<!/)", reason)) <= served, reason


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
def test_an_unknown_route_names_the_one_that_was_meant(path: str, meant: str, client: httpx.Client) -> None:
    found = client.post(path, json={})
    assert found.status_code == 404
    assert found.json()["error"]["message"] == f"there is no route {path}: did you mean {meant}?"


def test_a_long_unknown_route_is_cut() -> None:
    message = unknown_route("/" + "x" * 5000, ["/v1/models", "/v1/interp/vectors/{name:path}"])
    assert len(message) < 200 and message.endswith("/docs lists the routes")


def test_the_pages_name_every_route_that_is_served(client: httpx.Client) -> None:
    """By its whole path, or its last part beside others of the same beginning."""
    pages = [ROOT / "docs" / "use" / "serve.md", *sorted((ROOT / "docs" / "reference").glob("*.md"))]
    text = re.sub(r"\{\w+\}", "{}", "".join(page.read_text() for page in pages))
    missing = [
        path
        for path in (re.sub(r"\{\w+\}", "{}", path) for path in client.get("/openapi.json").json()["paths"])
        if not re.search(rf"({re.escape(path)}|[` ]{re.escape(path[path.rindex('/') :])})(?![\w/])", text)
    ]
    assert not missing


def test_the_page_lists_the_kinds_of_routes_that_are_refused() -> None:
    page = (ROOT / "docs" / "use" / "serve.md").read_text()
    for route in ("/v1/batches", "/v1/audio/..."):
        assert f"`{route}`" in page
