"""Each list and each object of each route's schema, full of wrong items: what such a body costs is counted, not timed."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from helpers_app import App, app_over, counted
from helpers_schemas import Places, bodies_of
from starlette.requests import Request

from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.request_sizes import CallSizes
from pymllm_interp.wire.schema import components
from pymllm_interp.wire.specs import capture_of, intervention_of, monitor_of

CALLS = 12_000
"""Function calls on the event loop that such a body may take; most take about 3,000."""
ERRORS = 200
"""Errors that pydantic may make of it: an object of 160 unknown fields has so many."""

ENGINES = ("Intervention", "MonitorSpec", "CaptureSpec")
"""Components that the engine process reads; the HTTP process passes them on."""


@pytest.fixture(scope="module")
def app(served_folder: Path) -> Iterator[App]:
    with app_over(served_folder, max_concurrent=4) as found:
        yield found


def with_bodies(app: App) -> dict[str, Any]:
    """The schemas of the bodies in JSON, by path."""
    paths = app.app.openapi()["paths"].items()
    found = {
        path: methods["post"]["requestBody"]["content"]
        for path, methods in paths
        if "requestBody" in methods.get("post", ())
    }
    others = {path for path, content in found.items() if "application/json" not in content}
    assert others == {"/v1/audio/transcriptions", "/v1/audio/translations"}, "forms: test_server_audio.py"
    return {path: content["application/json"]["schema"] for path, content in found.items() if path not in others}


def test_every_route_with_a_body_has_the_one_reader(app: App) -> None:
    paths = with_bodies(app)
    assert paths.keys() >= {"/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/interp/generate"}
    for path in paths:
        answer = app.runner.run(app.post(path, b"[" * 100_000))
        assert answer.status_code == 400 and "the body has 100000 times [" in answer.text, path


@pytest.mark.parametrize(
    ("size", "share"), [(3 << 15, 2), *(pytest.param(3 << s, 1, marks=pytest.mark.slow) for s in (15, 19))]
)
def test_wrong_items_are_refused_at_the_first_one(app: App, size: int, share: int) -> None:
    """A field that is added to a request is tested as soon as the OpenAPI document has it. Routes have most fields in common: of
    the kinds of items, each place on a route has a `share`."""
    counts: list[int] = []
    answer = app.app.exception_handlers[RequestValidationError]

    async def counting(request: Request, error: RequestValidationError) -> Any:
        counts.append(len(error.errors()))
        return await answer(request, error)  # pyright: ignore[reportGeneralTypeIssues]

    app.app.exception_handlers[RequestValidationError] = counting
    app.app.middleware_stack = None
    places, failed, tried = Places(app.app.openapi(), ENGINES), [], 0
    for path, schema in with_bodies(app).items():
        for what, body in bodies_of(places, schema, size):
            if zlib.crc32(f"{path} {what}".encode()) % share:
                continue
            counts.clear()
            answered = app.counted(path, json.dumps(body, separators=(",", ":")).encode())
            tried += 1
            if app.calls > CALLS or sum(counts) > ERRORS or answered.status_code >= 500 or not _short(answered):
                failed.append((path, what, answered.status_code, app.calls, sum(counts), len(answered.text)))
        app.app.exception_handlers[RequestValidationError] = answer
    assert tried > 300 and not failed, failed


def _short(answered: httpx.Response) -> bool:
    """Whether an error is short. An answer is as long as it has to be: these are texts of as many tokens."""
    return answered.status_code < 300 or len(answered.text) < 4000


def test_wrong_items_of_specs_are_refused_at_the_first_one() -> None:
    """The engine process reads these."""
    schemas = {"components": {"schemas": components()}}
    places, failed, tried = Places(schemas), [], 0
    for field, name, read in (
        ("interventions", "Intervention", intervention_of), ("monitors", "MonitorSpec", monitor_of),
        ("capture", "CaptureSpec", capture_of),
    ):  # fmt: skip
        for what, body in bodies_of(places, schemas["components"]["schemas"][name], 1 << 17):
            with counted() as calls, contextlib.suppress(PromptError):
                CallSizes(1, 128).check([[body]], field)
                read(body, f"{field}[0]")
            tried += 1
            if calls.count > CALLS:
                failed.append((name, what, calls.count))
    assert tried > 300 and not failed, failed
