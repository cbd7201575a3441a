"""`RequestGate`: the checks of every request before a route sees it. Keys, rights and sizes are checked before a body is read."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...utils.log_lines import request_id as current_request
from ...wire.gate_words import GUARDED, TRACE_PATH, TRACE_TYPE
from .errors import ApiError
from .origins import check_origin, is_local
from .state import ServerState, denied
from .trust import Client, Trust

access_log = logging.getLogger("pymllm_interp.access")
BODY_SECONDS, BODY_RATE = 60.0, 1 << 13
"""Seconds for the next part of a body, and the lowest rate of the whole in bytes a second. The rate has as many seconds more."""
PART = 1 << 18
"""Bytes of an answer that are sent at a time. A client that does not read them gets no further ones, and holds no copy."""
MAX_RANGES = 16
"""Most ranges of a Range header. Starlette before 0.49 takes the square of their number."""
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Routes that read forms."""
SINGLE = (b"host", b"origin", b"authorization", b"content-type", b"content-length", b"range")
"""Headers that a request has once at most."""
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class RequestGate:
    """ASGI middleware: request ids, keys, rights, sizes, drain, a log line and a count for each request."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, count and serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._state.spans is not None:
            self._state.spans.arrived(headers)
        given = headers.get("x-request-id", "")
        request_id = uuid.uuid4().hex
        given = given if _REQUEST_ID.fullmatch(given) else ""
        current_request.set(request_id)
        record = _RequestRecord(self._state, _route_path(scope), request_id, given, send)
        scope.setdefault("state", {}).update(
            request_id=request_id, record=record, started=record.started, threads=self._state.threads
        )  # fmt: skip
        try:
            body = self._checked(scope, headers, receive, record)
            await self._app(scope, body, record.send)
        except ApiError as error:
            if record.status:  # too late: the response has begun
                raise
            await error.response()(scope, receive, record.send)
        except BodyError as error:
            if not record.status:
                await error.error.response()(scope, receive, record.send)
        finally:
            record.log(scope)

    def _checked(self, scope: Scope, headers: dict[str, str], receive: Receive, record: _RequestRecord) -> Receive:
        path, state = _route_path(scope), self._state
        _check_single(scope["headers"])
        _check_ranges(headers.get("range", ""))
        _check_encoding(headers.get("content-encoding", ""))
        keys = state.settings.keys
        if keys.anybody:
            check_origin(scope["method"], headers, state.settings.allowed_origins)
        if path.startswith(GUARDED):
            local = is_local(headers, (scope.get("client") or ("", 0))[0])
            client = keys.client(headers.get("authorization"), local)
            if client is None:
                raise ApiError(
                    401, "a key is needed: Authorization: Bearer KEY" if "authorization" not in headers else "the key is not known",
                    code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
            scope["state"]["client"], record.client = client, client.name
            if path == TRACE_PATH:
                self._check_trace(client, headers)
            elif scope["method"] == "POST" and not (path in FORMS and _is_form(headers)):
                _check_json(headers)
            if state.draining and scope["method"] == "POST":
                raise ApiError(503, "the server is ending", code="draining", headers={"Retry-After": "10"})
        limit = state.limits.max_trace_bytes if path == TRACE_PATH else state.limits.max_body_bytes
        name = "max_trace_bytes" if path == TRACE_PATH else "max_body_bytes"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit, name)
        return _Body(receive, limit, name)

    def _check_trace(self, client: Client, headers: dict[str, str]) -> None:
        if client.trust < Trust.CODE:
            raise denied(client, Trust.CODE)
        if headers.get("content-type") != TRACE_TYPE:
            raise ApiError(415, f"a trace has the content type {TRACE_TYPE}")


def _route_path(scope: Scope) -> str:
    """The path that the router looks at: a proxy may have left the root path before it."""
    path, root = scope["path"], scope.get("root_path", "")
    rest = path[len(root) :]
    return rest if root and path.startswith(root) and rest[:1] in ("", "/") else path


class BodyError(BaseException):
    """A body that is not received to its end. Not an Exception: the framework would make a 400 of it.

    Attributes:
        error: the answer.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error)
        self.error = error


class _Body:
    """Receives a body, up to a limit, and not for ever."""

    def __init__(self, receive: Receive, limit: int, name: str) -> None:
        self._receive, self._limit, self._name = receive, limit, name
        self._size, self._more = 0, True
        self._began = time.monotonic()

    async def __call__(self) -> Message:
        if not self._more:
            return await self._receive()
        left = self._began + BODY_SECONDS + self._size / BODY_RATE - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), min(BODY_SECONDS, max(0.0, left)))
        except TimeoutError:
            raise BodyError(
                ApiError(
                    408, f"no part of the body came for {BODY_SECONDS:g} s, or less than {BODY_RATE} bytes a second"
                )
            ) from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._more = message.get("more_body", False)
            if self._size > self._limit:
                raise BodyError(_too_large(self._limit, self._name))
        return message


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse duplicate headers, of which this process and a proxy could read different ones."""
    names = Counter(name.lower() for name, _ in headers)
    for name in SINGLE:
        if names[name] > 1:
            raise ApiError(400, f"{names[name]} headers {name.decode()}; at most one is expected")


def _check_ranges(header: str) -> None:
    if (found := header.count(",") + 1) > MAX_RANGES:
        raise ApiError(400, f"the header Range has {found} ranges; at most {MAX_RANGES} are expected")


def _check_encoding(header: str) -> None:
    """Bodies are not unpacked: a few bytes could stand for gigabytes, and the limit counts received bytes."""
    if header.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"the body's encoding is {header[:80]!r}: send it as it is, without Content-Encoding")


def _is_form(headers: dict[str, str]) -> bool:
    """Whether a body is a form with files. A page of another site may send one: `check_origin` refuses its origin."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"


def _check_json(headers: dict[str, str]) -> None:
    """A web page of another site can send bodies without a type, or of a form's types, but not JSON. A browser asks first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and (
        kind or headers.get("content-length", "") not in ("", "0") or "transfer-encoding" in headers
    ):
        raise ApiError(415, f"the body's content type is {kind or 'missing'}; expected application/json")


def _too_large(limit: int, name: str) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes ({name})", code="too_large")


class _RequestRecord:
    """One request in progress: its status, and data for logs.

    Args:
        request_id: id made by the server, which names the request's stored data.
        given_id: the client's X-Request-Id, which is sent back and logged, and names nothing here.

    Attributes:
        notes: further fields of its log line.
    """

    def __init__(self, state: ServerState, path: str, request_id: str, given_id: str, send: Send) -> None:
        self._state, self._path, self._send = state, path, send
        self._request_id, self._given_id = request_id, given_id
        self.started, self.status, self.client = time.perf_counter(), 0, ""
        self.notes: dict[str, Any] = {}

    async def send(self, message: Message) -> None:
        """Send a part of the response, its request id in the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", (self._given_id or self._request_id).encode()),
            ]
        body = message.get("body", b"")
        if len(body) <= PART:
            await self._send(message)
            return
        last = max(0, len(body) - 1) // PART * PART
        for start in range(0, last, PART):
            await self._send({**message, "body": body[start : start + PART], "more_body": True})
        await self._send({**message, "body": body[last:]})

    def log(self, scope: Scope) -> None:
        """Count the request, and log it."""
        seconds, metrics = time.perf_counter() - self.started, self._state.metrics
        metrics.answers[getattr(scope.get("route"), "path", "other"), self.status] += 1
        metrics.add("http_request_duration_seconds", seconds)
        entry = {
            "request_id": self._request_id, "client": self.client, "method": scope["method"], "path": self._path,
            "status": self.status, "ms": round(1000 * seconds, 2), **self.notes,
        }  # fmt: skip
        if self._given_id:
            entry["client_request_id"] = self._given_id
        access_log.info(json.dumps(entry), extra={"fields": entry})
