"""Requests that schemathesis makes of the OpenAPI document: no answer is a 500, and errors have OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_server import KEYS, Server
from hypothesis import HealthCheck, given, settings

from pymllm_interp.wire.gate_words import TRACE_PATH

schemathesis = pytest.importorskip(
    "schemathesis", reason="fuzzes by the OpenAPI document; an environment of tests only has it"
)


def fuzz(server: Server, examples: int) -> int:
    """So many requests of each operation that fit the document, and as many that do not. Returns how many were sent."""
    document, sent = schemathesis.openapi.from_url(f"{server.url}/openapi.json"), 0

    def check(case: Any) -> None:
        nonlocal sent
        sent += 1
        response = case.call(base_url=server.url, headers={"Authorization": f"Bearer {KEYS['declared']}"}, timeout=600)
        refused = 501 if case.path.startswith("/v1/audio/") else 503  # the model takes text
        assert response.status_code < 500 or response.status_code in (503, refused), (
            case.as_curl_command(),
            response.text,
        )
        if response.status_code >= 400 and case.path.startswith("/v1"):
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}, response.text

    for found in document.get_all_operations():
        operation = found.ok()
        if operation.path == TRACE_PATH:
            continue  # its payload is code, which a fuzzer should not write
        for mode in schemathesis.GenerationMode if operation.body else [schemathesis.GenerationMode.POSITIVE]:
            quiet = settings(
                max_examples=examples,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                derandomize=True,
            )
            quiet(given(operation.as_strategy(generation_mode=mode))(check))()
    return sent


def test_no_request_of_the_document_breaks_the_server(server: Server) -> None:
    assert fuzz(server, examples=2) > 30
    server.wait_until_idle()


@pytest.mark.slow
def test_ten_thousand_requests_of_the_document_break_nothing(server: Server) -> None:
    assert fuzz(server, examples=700) > 10_000
    server.wait_until_idle()
