"""`ActivationStore`: captured states that are too large for a response, until they are fetched."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..wire.messages import CapturedStates
from .cards import Cards
from .http.errors import ApiError
from .settings import ServeLimits

FILE_NAME = re.compile(r"pymllm-interp-\d+-\d+-\d+\.safetensors")
"""Names of the engine process's files (`outbox.Outbox`). Other files of the folder are the operator's."""


@dataclass
class Stored:
    """A file in the store, and its owner."""

    path: Path
    size: int
    owner: str
    expires: float
    """`time.time()`."""


class ActivationStore:
    """Files written by the engine process, until they are deleted or expire.

    Args:
        folder: folder of the files.
        limits: bytes of all files and of one owner's, and how long they are kept.
        shared: other servers of a cluster have the folder, too. Each counts its own files, and finds all.
    """

    def __init__(
        self, folder: Path, limits: ServeLimits, now: Callable[[], float] = time.time, shared: bool = False
    ) -> None:  # fmt: skip
        self._folder, self._limits, self._now, self._shared = folder, limits, now, shared
        self._cards = Cards(folder if shared else None, "card")
        self._stored: dict[str, Stored] = {}
        self._lock: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(stored.size for stored in self._stored.values())

    def open(self) -> None:
        """Take the folder for this server, or cluster, only. Delete files of an earlier one.

        Raises:
            OSError: another server has it.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise OSError(
                f"{self._folder} is the store of another server that runs: give each one its own (--store)"
            ) from error
        except OSError:  # the file system has no locks
            pass
        self._clean(self._limits.store_seconds if self._shared else 0.0)

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _clean(self, seconds: float) -> None:
        """Delete old files that no client knows of: their request, server or engine process ended first."""
        kept = {stored.path.name for stored in self._stored.values()}
        for path in self._folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                old = self._now() - path.stat().st_mtime >= seconds
                if old and FILE_NAME.fullmatch(path.name) and path.name not in kept:
                    path.unlink()

    def bytes_of(self, owner: str) -> int:
        """Bytes of an owner's files."""
        return sum(stored.size for stored in self._stored.values() if stored.owner == owner)

    @property
    def num_files(self) -> int:
        """Number of stored files."""
        return len(self._stored)

    def adopt(self, name: str, captured: CapturedStates, owner: str) -> Stored:
        """Keep a file of the engine process under a name.

        Raises:
            ApiError: the store is full; the file is deleted.
        """
        assert captured.file is not None
        path = self._folder / captured.file
        self.sweep()
        limits = self._limits
        for taken, most, whose, limit in (
            (self.bytes_of(owner), limits.max_store_bytes_per_key, f"{owner!r}'s", "max_store_bytes_per_key"),
            (self.num_bytes, limits.max_store_bytes, "the store's", "max_store_bytes"),
        ):
            if taken + captured.size > most:
                path.unlink(missing_ok=True)
                raise ApiError(
                    429,
                    f"the captured states take {captured.size} bytes, and {taken} of {whose} {most} ({limit}) are taken: fetch "
                    "and DELETE what waits, or capture less",
                    code="store_full",
                )
        self._stored[name] = stored = Stored(path, captured.size, owner, self._now() + self._limits.store_seconds)
        self._cards.put(name, vars(stored) | {"path": path.name}, stored.expires)
        return stored

    def find(self, name: str, owner: str) -> Stored:
        """A file of an owner.

        Raises:
            ApiError: an unknown or expired file, or another owner's.
        """
        self.sweep()
        stored = self._stored.get(name) or self._of_others(name)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"no activations of {name!r}: they are kept for {self._limits.store_seconds:g} s, for the key that asked",
            )
        return stored

    def drop(self, name: str) -> None:
        """Delete a file."""
        stored = self._stored.pop(name, None) or self._of_others(name)
        if stored is not None:
            stored.path.unlink(missing_ok=True)
        self._cards.drop(name)

    def _of_others(self, name: str) -> Stored | None:
        card = self._cards.get(name)
        return None if card is None else Stored(**card | {"path": self._folder / card["path"]})

    def sweep(self) -> None:
        """Delete expired files."""
        now = self._now()
        for name, stored in list(self._stored.items()):
            if stored.expires <= now or (self._shared and not stored.path.exists()):  # another server deleted it
                self.drop(name)

    def sweep_folder(self) -> None:
        """`sweep`, and delete old files that no client knows of."""
        self.sweep()
        self._clean(self._limits.store_seconds)
        self._cards.sweep()

    def forget(self, captured: CapturedStates | None) -> None:
        """Delete a file that no client can request."""
        if captured is not None and captured.file is not None:
            (self._folder / captured.file).unlink(missing_ok=True)

    def link(self, name: str, stored: Stored) -> dict[str, Any]:
        """URL of the file, and its time of expiry."""
        return {"url": f"/v1/interp/activations/{name}", "expires_at": int(stored.expires)}
