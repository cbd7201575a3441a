"""Bodies of requests as JSON: parsed within limits, off the event loop. Large lists are checked up to their first error.

A parser builds an object for each value, and pydantic an error for each wrong one. Both are bounded before they are built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi.routing import APIRoute
from pydantic import GetCoreSchemaHandler, PlainValidator, TypeAdapter, WithJsonSchema
from pydantic_core import CoreSchema, core_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..settings import ServeLimits
from .errors import ApiError

MAX_MARKS = {b"{": 1 << 16, b"[": 1 << 16, b'"': 1 << 20, b",": 1 << 22}
"""Characters that begin or part the values of JSON -> most of them in a body. Those in texts count, too."""
MAX_DEPTH = 128
"""Most levels of lists and objects in each other."""
_MARK = re.compile(rb'"(?:[^"\\\\]|\\\\.)*+"|[\[\]{}]', re.DOTALL)
SMALL = 1 << 16
"""Bytes of a body that is parsed on the event loop."""
PART = 1 << 20


def parse(body: bytes) -> Any:
    """A body's JSON.

    Raises:
        HTTPException: too many values, or nested too deeply.
        json.JSONDecodeError: invalid JSON.
    """
    for mark, most in MAX_MARKS.items() if len(body) > SMALL else ():
        # In parts, so that other threads run between them.
        found = sum(body.count(mark, start, start + PART) for start in range(0, len(body), PART))
        if found > most:
            raise HTTPException(400, f"the body has {found} times {mark.decode()}; at most {most}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise HTTPException(400, f"the body is nested too deeply; at most {MAX_DEPTH} levels")
    try:
        return msgspec.json.decode(body)
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error


def _depth(body: bytes) -> int:
    """Nesting depth of lists and objects. Limited here because the limit of Python's parser differs by version."""
    depth = most = 0
    for found in _MARK.finditer(body):
        mark = body[found.start()]
        if mark != 0x22:  # a string
            depth += 1 if mark in b"[{" else -1
            most = max(most, depth)
    return most


class JsonRequest(Request):
    """A request with JSON that is read by `parse`."""

    async def json(self) -> Any:
        """The parsed body."""
        body = await self.body()
        if len(body) <= SMALL:
            return parse(body)
        return await self.state.threads.run(self.state.client.name, parse, body)


class JsonRoute(APIRoute):
    """A route that passes a `JsonRequest` to its handler."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def checked(*kinds: Any, description: str | None = None) -> Any:
    """The type of a field that is one of these, checked up to its first error. Its schema is that of their union."""
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union |= kind

    def check(value: Any) -> Any:
        errors = []
        for kind in kinds:
            try:
                return msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                errors.append(str(error))
        meant = _meant(value, kinds)
        error = max(errors, key=len) if meant is None else errors[meant]
        raise ValueError(f"expected {' or '.join(map(_shown, kinds))}; {error}")

    schema = TypeAdapter(union).json_schema() | ({} if description is None else {"description": description})
    return Annotated[Any, PlainValidator(check), WithJsonSchema(schema)]


def _shown(kind: Any) -> str:
    return kind.__name__ if type(kind) is type else str(kind)


def _meant(value: Any, kinds: tuple[Any, ...]) -> int | None:
    """The number of the kind that takes a list's first item, if there is one."""
    for i, kind in enumerate(kinds):
        try:
            msgspec.convert(value[:1] if isinstance(value, list) else value, kind)
            return i
        except msgspec.ValidationError:
            pass
    return None


@dataclass(frozen=True)
class at_most:
    """Annotation of a list or an object: longer ones are refused before their items are looked at. A list is checked up to its
    first wrong item: each further one would be an error.
    """

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's own way to make the checks of a field."""
        schema = handler(source)
        inner: Any = schema["schema"] if schema["type"] == "nullable" else schema
        if inner["type"] == "list":
            inner["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.count:
            raise ValueError(f"{len(value)} entries; at most {self.count}")
        return value


@dataclass(eq=False)
class Upload:
    """A vector that is being received, and the bytes that are reserved for it."""

    owner: str
    name: str
    size: int = 0


class Uploads:
    """Reserves names and bytes for vectors before their bodies are read.

    Args:
        limits: limits of each owner's vectors.
        held: the vectors of an owner that were received, by name.
    """

    def __init__(self, limits: ServeLimits, held: Callable[[str], Mapping[str, Any]]) -> None:
        self._limits, self._held = limits, held
        self._running: set[Upload] = set()

    @contextmanager
    def reserved(self, owner: str, name: str) -> Iterator[Upload]:
        """Reserve a vector's name, until the vector is stored or was refused.
        Raises ApiError: the owner has as many vectors as it may."""
        running = {upload.name for upload in self._running if upload.owner == owner}
        others = (running | set(self._held(owner))) - {name}
        if len(others) >= self._limits.max_vectors:
            raise ApiError(429, f"{owner!r} has {len(others)} vectors, as many as it may (max_vectors): DELETE some")
        self._running.add(upload := Upload(owner, name))
        try:
            yield upload
        finally:
            self._running.discard(upload)

    async def body(self, upload: Upload, request: Request) -> bytes:
        """Read the body. Its announced size is reserved first; unannounced bytes as they come.
        Raises ApiError: the owner's vectors would be larger than they may."""
        length = request.headers.get("content-length", "")
        self._reserve(upload, int(length) if length.isdecimal() else 0)
        found = bytearray()
        async for part in request.stream():
            found += part
            self._reserve(upload, len(found))
        return bytes(found)

    def _reserve(self, upload: Upload, size: int) -> None:
        held = sum(len(vector.body) for name, vector in self._held(upload.owner).items() if name != upload.name)
        held += sum(other.size for other in self._running if other.owner == upload.owner and other is not upload)
        if held + size > self._limits.max_vector_bytes:
            raise ApiError(
                413, f"{upload.owner!r} has vectors of {held} bytes, with those on their way; with {size} more they exceed "
                f"{self._limits.max_vector_bytes} (max_vector_bytes)",
            )  # fmt: skip
        upload.size = max(upload.size, size)
