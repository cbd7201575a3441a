"""`Uploads`: counts vectors on their way to the server like stored ones, so that concurrent uploads stay within the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..settings import ServeLimits
from .errors import ApiError


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

        Raises:
            ApiError: the owner has as many vectors as it may.
        """
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

        Raises:
            ApiError: the owner's vectors would be larger than they may.
        """
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
