"""`ResponseStore`: responses that clients may continue, fetch and delete."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..http.errors import ApiError
from ..settings import ServeLimits

OVERHEAD = 1024
"""Bytes that a response counts beyond its JSON."""


@dataclass(frozen=True)
class Kept:
    """A response as JSON, and the messages of its conversation as JSON, its own included."""

    response: bytes
    messages: bytes
    expires: float

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return len(self.response) + len(self.messages) + OVERHEAD


class ResponseStore:
    """Responses of all keys, in memory. Each key has its own, and sees no other's.

    Where a limit is reached, the oldest responses of the key are forgotten. Where all keys together hold too much,
    the key that holds most loses its oldest.

    Args:
        limits: count and bytes of a key's, bytes of all, and how long they are kept.
    """

    def __init__(self, limits: ServeLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._now = limits, now
        self._kept: dict[str, OrderedDict[str, Kept]] = {}
        self._bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses."""
        return sum(self._bytes.values())

    @property
    def num_responses(self) -> int:
        """Responses of all keys."""
        return sum(map(len, self._kept.values()))

    def keep(self, owner: str, name: str, response: bytes, messages: bytes) -> bool:
        """Keep a response. False: it is larger than what is kept of a key, or of all."""
        self.sweep()
        limits = self._limits
        kept = Kept(response, messages, self._now() + limits.response_seconds)
        if kept.size > min(limits.max_response_bytes_per_key, limits.max_response_bytes):
            return False
        while owner in self._kept and (
            len(self._kept[owner]) >= limits.max_responses
            or self._bytes[owner] + kept.size > limits.max_response_bytes_per_key
        ):
            self._drop_oldest(owner)
        while self.num_bytes + kept.size > limits.max_response_bytes:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))
        self._kept.setdefault(owner, OrderedDict())[name] = kept
        self._bytes[owner] = self._bytes.get(owner, 0) + kept.size
        return True

    def find(self, owner: str, name: str, param: str | None = None) -> Kept:
        """A response of an owner.

        Args:
            param: field of the request that names it.

        Raises:
            ApiError: no such response, any more or of this owner.
        """
        self.sweep()
        kept = self._kept.get(owner, {}).get(name)
        if kept is None:
            limits = self._limits
            raise ApiError(
                404, f"there is no response {name[:80]!r} of this key: of those without store=false the last "
                f"{limits.max_responses} are kept, for {limits.response_seconds:g} s, within "
                f"{limits.max_response_bytes_per_key} bytes", param, "not_found",
            )  # fmt: skip
        return kept

    def drop(self, owner: str, name: str) -> None:
        """Forget a response of an owner.

        Raises:
            ApiError: there is no such response.
        """
        self.find(owner, name)
        self._drop(owner, name)

    def sweep(self) -> None:
        """Forget what is too old."""
        now = self._now()
        for owner in list(self._kept):
            while owner in self._kept and next(iter(self._kept[owner].values())).expires <= now:
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        self._drop(owner, next(iter(self._kept[owner])))

    def _drop(self, owner: str, name: str) -> None:
        self._bytes[owner] -= self._kept[owner].pop(name).size
        if not self._kept[owner]:
            del self._kept[owner], self._bytes[owner]
