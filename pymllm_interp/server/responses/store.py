"""`ResponseStore`: responses that clients may continue, fetch and delete."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..http.errors import ApiError
from ..settings import ServeLimits
from ..store import Cards

OVERHEAD = 1024
"""Bytes that a response counts beyond its JSON."""


@dataclass(frozen=True)
class Kept:
    """A response as JSON, and the messages of its conversation as JSON, its own included."""

    response: bytes
    messages: bytes
    expires: float
    shared: bool
    """Other servers find it, and may delete it."""

    @property
    def size(self) -> int:
        """Bytes counted against the limits."""
        return len(self.response) + len(self.messages) + OVERHEAD


class ResponseStore:
    """Responses of all keys, in memory. Each key has its own, and sees no other's.

    At a key's limit, its oldest responses are dropped. If all keys together hold too much, the key that holds most loses its
    oldest.

    Args:
        limits: count and bytes of a key's, bytes of all, and how long they are kept.
        folder: folder shared by the servers of a cluster. Each counts its own responses, and finds all.
    """

    def __init__(
        self, limits: ServeLimits, now: Callable[[], float] = time.monotonic, folder: Path | None = None
    ) -> None:  # fmt: skip
        self._limits, self._now, self._cards = limits, now, Cards(folder, "response")
        self._kept: dict[str, OrderedDict[str, Kept]] = {}
        self._bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses."""
        return sum(self._bytes.values())

    @property
    def num_responses(self) -> int:
        """Number of responses of all keys."""
        return sum(map(len, self._kept.values()))

    def keep(self, owner: str, name: str, response: bytes, messages: bytes) -> bool:
        """Keep a response. False: it exceeds the limit of a key, or of all."""
        self.sweep()
        limits = self._limits
        kept = Kept(response, messages, self._now() + limits.response_seconds, False)
        if kept.size > min(limits.max_response_bytes_per_key, limits.max_response_bytes):
            return False
        while owner in self._kept and (
            len(self._kept[owner]) >= limits.max_responses
            or self._bytes[owner] + kept.size > limits.max_response_bytes_per_key
        ):
            self._drop_oldest(owner)
        while self.num_bytes + kept.size > limits.max_response_bytes:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))
        card = {"owner": owner, "response": response.decode(), "messages": messages.decode()}
        shared = self._cards.put(name, card, time.time() + limits.response_seconds)
        self._kept.setdefault(owner, OrderedDict())[name] = replace(kept, shared=shared)
        self._bytes[owner] = self._bytes.get(owner, 0) + kept.size
        return True

    def find(self, owner: str, name: str, param: str | None = None) -> Kept:
        """A response of an owner.

        Args:
            param: field of the request that names it.

        Raises:
            ApiError: an unknown or expired response, or another owner's.
        """
        self.sweep()
        kept = self._kept.get(owner, {}).get(name)
        if kept is None or kept.shared:
            if (found := self._of_others(owner, name)) is None and kept is not None:
                self._drop(owner, name)  # another server deleted it
            kept = found
        if kept is None:
            limits = self._limits
            raise ApiError(
                404, f"there is no response {name[:80]!r} of this key: of those without store=false the last "
                f"{limits.max_responses} are kept, for {limits.response_seconds:g} s, within "
                f"{limits.max_response_bytes_per_key} bytes", param, "not_found",
            )  # fmt: skip
        return kept

    def drop(self, owner: str, name: str) -> None:
        """Forget a response of an owner. Raises ApiError: an unknown response."""
        self.find(owner, name)
        if name in self._kept.get(owner, {}):
            self._drop(owner, name)
        self._cards.drop(name)

    def _of_others(self, owner: str, name: str) -> Kept | None:
        card = self._cards.get(name)
        if card is None or card["owner"] != owner:
            return None
        return Kept(card["response"].encode(), card["messages"].encode(), 0.0, True)

    def sweep_folder(self) -> None:
        """`sweep`, and remove expired files, also of servers that ended."""
        self.sweep()
        self._cards.sweep()

    def sweep(self) -> None:
        """Delete expired responses."""
        now = self._now()
        for owner in list(self._kept):
            while owner in self._kept and next(iter(self._kept[owner].values())).expires <= now:
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        self._drop(owner, next(iter(self._kept[owner])))

    def _drop(self, owner: str, name: str) -> None:
        self._bytes[owner] -= self._kept[owner].pop(name).size
        self._cards.drop(name)
        if not self._kept[owner]:
            del self._kept[owner], self._bytes[owner]
