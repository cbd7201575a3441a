"""`ActivationStore`: captured states that are too large for a response, until they are fetched."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ApiError
from .messages import Captured
from .settings import ServeLimits


@dataclass
class Stored:
    """A file in the store, and whose it is."""

    path: Path
    size: int
    owner: str
    expires: float
    """`time.time()`."""


class ActivationStore:
    """Files that the engine process wrote, until they are deleted or too old.

    Args:
        folder: of the files.
        limits: bytes of all files, and how long they are kept.
    """

    def __init__(self, folder: Path, limits: ServeLimits, now: Callable[[], float] = time.time) -> None:
        self._folder, self._limits, self._now = folder, limits, now
        self._stored: dict[str, Stored] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(stored.size for stored in self._stored.values())

    @property
    def num_files(self) -> int:
        """Files that wait."""
        return len(self._stored)

    def adopt(self, name: str, captured: Captured, owner: str) -> Stored:
        """Keep a file of the engine process under a name.

        Raises:
            ApiError: the store is full; the file is deleted.
        """
        assert captured.file is not None
        path = self._folder / captured.file
        self.sweep()
        if self.num_bytes + captured.size > self._limits.max_store_bytes:
            path.unlink(missing_ok=True)
            raise ApiError(
                429,
                f"the captured states take {captured.size} bytes, and {self.num_bytes} of the store's "
                f"{self._limits.max_store_bytes} (max_store_bytes) are taken: fetch and DELETE what waits, or capture less",
                code="store_full",
            )
        self._stored[name] = stored = Stored(path, captured.size, owner, self._now() + self._limits.store_seconds)
        return stored

    def find(self, name: str, owner: str) -> Stored:
        """A file of an owner.

        Raises:
            ApiError: there is none, any more or of this owner.
        """
        self.sweep()
        stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"no activations of {name!r}: they are kept for {self._limits.store_seconds:g} s, for the key that asked",
            )
        return stored

    def drop(self, name: str) -> None:
        """Delete a file."""
        stored = self._stored.pop(name, None)
        if stored is not None:
            stored.path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete what is too old."""
        now = self._now()
        for name in [name for name, stored in self._stored.items() if stored.expires <= now]:
            self.drop(name)

    def forget(self, captured: Captured | None) -> None:
        """Delete a file that nobody will ask for."""
        if captured is not None and captured.file is not None:
            (self._folder / captured.file).unlink(missing_ok=True)

    def link(self, name: str, stored: Stored) -> dict[str, Any]:
        """Where a client finds the file."""
        return {"url": f"/v1/interp/activations/{name}", "expires_at": int(stored.expires)}
