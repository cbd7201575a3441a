"""`KVConnector`: moves KV out of the pool and back, around the passes of a step. `NO_CONNECTOR` moves none."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future
from numbers import Integral
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

    def reset(self) -> Future[None] | None:
        """Forget the KV of the model as it is now. Returns a future of the work that is left, or None."""
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

    def reset(self) -> None: ...

    def close(self) -> None: ...


NO_CONNECTOR = NoConnector()


def page_keys(key: bytes, edges: Iterable[tuple[Hashable, bytes]]) -> Iterator[bytes]:
    """The key of each page of a sequence. Ends at a namespace that has no value outside of this process.

    Args:
        key: key of the page before the first one. Before a sequence it is the identity of the model and of its KV's form.
        edges: (namespace, tokens as bytes) of each page.
    """
    last: Any = edges  # no namespace
    text: bytes | None = b""
    for namespace, tokens in edges:
        if namespace is not last:  # many pages have one
            last, text = namespace, _value_of(namespace)
        if text is None:
            return
        key = hashlib.sha256(b"|".join((key, str(len(text)).encode(), text, tokens))).digest()
        yield key


def _value_of(namespace: Any) -> bytes | None:
    """Bytes that equal namespaces have in all processes, and others do not. None: it holds another object."""
    kind = type(namespace).__name__.encode()
    if isinstance(namespace, tuple | range):
        parts = [_value_of(part) for part in namespace]
        found = None if None in parts else b"".join(part for part in parts if part is not None)
    elif isinstance(namespace, bytes):
        found = namespace
    elif namespace is None or isinstance(namespace, str | float):
        found = str(namespace).encode("utf-8", "surrogatepass")
        found = None if ADDRESS.encode() in found else found
    elif isinstance(namespace, Integral):
        kind, found = b"int", str(int(namespace)).encode()
    else:
        found = None
    return None if found is None else b"%b %d:%b" % (kind, len(found), found)
