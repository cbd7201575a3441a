"""Building a model without memory for the weights of its linear layers: they may come quantised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_unallocated: ContextVar[bool] = ContextVar("unallocated", default=False)


@contextmanager
def unallocated_weights() -> Iterator[None]:
    """Linear layers that are made within this block have their weights on torch's device "meta"."""
    token = _unallocated.set(True)
    try:
        yield
    finally:
        _unallocated.reset(token)


def weight_device(device: str) -> str:
    """Device on which a linear layer allocates its weight."""
    return "meta" if _unallocated.get() else device
