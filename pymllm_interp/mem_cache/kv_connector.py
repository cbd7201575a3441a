"""`KVConnector`: moves KV out of the pool and back, around the passes of a step. `NO_CONNECTOR` moves none."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Protocol

ADDRESS = " at 0x"
"""Part of the text of an object without a value: its namespace means nothing to another process."""


class KVConnector(Protocol):
    """Object that a runner calls around its passes, with the step (`core.step.SchedulerOutput`)."""

    def pre_forward(self, step: Any) -> None:
        """A pass begins."""
        ...

    def post_forward(self, step: Any) -> None:
        """The pass was launched."""
        ...

    def no_forward(self, step: Any) -> None:
        """A step has no pass."""
        ...

    def set_disabled(self, disabled: bool) -> None:
        """Switch it off and on again, as for passes of a warm-up."""
        ...

    def close(self) -> None:
        """End its work."""
        ...


class NoConnector:
    """A connector that moves nothing."""

    def pre_forward(self, step: Any) -> None: ...

    def post_forward(self, step: Any) -> None: ...

    def no_forward(self, step: Any) -> None: ...

    def set_disabled(self, disabled: bool) -> None: ...

    def close(self) -> None: ...


NO_CONNECTOR = NoConnector()


def page_keys(root: bytes, edges: Iterable[tuple[Hashable, bytes]]) -> Iterator[bytes]:
    """The key of each page of a sequence. Ends at a namespace that has no text of its own.

    Args:
        root: identity of the model and of the form of its KV.
        edges: (namespace, tokens as bytes) of each page, from the first one on.
    """
    key = root
    for namespace, tokens in edges:
        text = repr(namespace)
        if ADDRESS in text:
            return
        key = hashlib.sha256(b"|".join((key, str(len(text)).encode(), text.encode(), tokens))).digest()
        yield key
