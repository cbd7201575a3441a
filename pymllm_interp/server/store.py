"""`ActivationStore`: captured states that are too large for a response, until they are fetched."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..wire.failures import failure_of
from ..wire.messages import CapturedStates, Finished
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

    def __init__(self, folder: Path, limits: ServeLimits, shared: bool = False) -> None:
        self._folder, self._limits, self._shared = folder, limits, shared
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
                old = time.time() - path.stat().st_mtime >= seconds
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
        """Keep a file of the engine process under a name. Raises ApiError: the store is full; the file is deleted."""
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
        self._stored[name] = stored = Stored(path, captured.size, owner, time.time() + self._limits.store_seconds)
        self._cards.put(name, vars(stored) | {"path": path.name}, stored.expires)
        return stored

    def find(self, name: str, owner: str) -> Stored:
        """A file of an owner. Raises ApiError: an unknown or expired file, or another owner's."""
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
        now = time.time()
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


def stored_states(message: Finished, store: Path) -> None:
    """Replace a message's captured states by a file. If it cannot be written, the message becomes a failure."""
    states = message.captured
    assert states is not None and states.data is not None
    path = store / f"pymllm-interp-{os.getpid()}-{message.call}-{message.request}.safetensors"
    try:
        path.write_bytes(states.data)
        message.captured = CapturedStates(states.size, states.sites, file=path.name)
    except OSError as error:
        path.unlink(missing_ok=True)
        message.failure = failure_of(OSError(f"the captured states could not be stored: {error}"))
        message.captured = None


NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")
"""Pattern of valid names: clients choose the names that they request."""
WRITING_SECONDS = 60.0
"""Seconds after which an incomplete file is considered abandoned."""


class Cards:
    """JSON files in a folder, kept until they expire.

    Args:
        folder: folder shared by the fronts; None: nothing is stored.
        kind: the files' names begin with it.
    """

    def __init__(self, folder: Path | None, kind: str) -> None:
        self._folder, self._kind = folder, f"pymllm-interp-{kind}-"

    def _path(self, name: str) -> Path | None:
        return None if self._folder is None or not NAME.fullmatch(name) else self._folder / f"{self._kind}{name}.json"

    def put(self, name: str, card: Mapping[str, Any], expires: float) -> bool:
        """Keep a card until `expires` (`time.time()`). Returns whether it was written: else the other fronts do not find it."""
        path = self._path(name)
        if path is None:
            return False
        own = path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):
            try:
                own.write_text(json.dumps(card))
                os.utime(own, (expires, expires))
                own.replace(path)
                return True
            finally:
                own.unlink(missing_ok=True)
        return False

    def get(self, name: str) -> dict[str, Any] | None:
        """A card, if its time is not over."""
        path = self._path(name)
        try:
            return None if path is None or path.stat().st_mtime <= time.time() else json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None

    def drop(self, name: str) -> None:
        """Delete a card."""
        if (path := self._path(name)) is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove expired cards, also of fronts that ended."""
        if self._folder is None:
            return
        now = time.time()
        for path in self._folder.glob(f"{self._kind}*"):
            with contextlib.suppress(OSError):
                late = now if path.suffix == ".json" else now - WRITING_SECONDS
                if path.stat().st_mtime <= late:
                    path.unlink()
