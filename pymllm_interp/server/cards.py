"""`Cards`: small files of a cluster's front about its clients' data. The other fronts of its machine read them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
