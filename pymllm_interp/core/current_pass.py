"""The forward pass that runs on this thread.

Modules have the signatures of their transformers classes, which take no `ForwardBatch`. Modules that need one look it up::

    with current_pass(batch):
        logits = model(...)          # a module inside: `batch = current_batch()`

Two kinds of calls do not see the pass, and get a plain module. These are calls on other threads, and a hook's own calls of modules
(`HookQuery.is_own_call`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from .forward_batch import ForwardBatch, SiteOps


class _CurrentPass(threading.local):
    # Not a context variable: hooks run in greenlets, each of which would have its own.
    batch: ForwardBatch | None = None


_current = _CurrentPass()


class current_pass:
    """Make `batch` the thread's current pass within the block. Raises RuntimeError: a pass runs on this thread already."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch

    def __enter__(self) -> None:
        if _current.batch is not None:
            raise RuntimeError("a forward pass runs on this thread already: passes cannot be nested")
        _current.batch = self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.batch = None


@contextmanager
def inner_pass(batch: ForwardBatch) -> Iterator[None]:
    """Make `batch` the thread's current pass within the block, inside another pass: an encoder's, in front of a decoder's."""
    outer, _current.batch = _current.batch, batch
    try:
        yield
    finally:
        _current.batch = outer


def current_batch() -> ForwardBatch | None:
    """The batch of the pass that calls the module; None for any other call."""
    batch = _current.batch
    if batch is None or (batch.hook_query is not None and batch.hook_query.is_own_call()):
        return None
    return batch


def current_site_ops() -> SiteOps | None:
    """The declared ops of the pass that calls the module; None for any other call, and for passes without ops."""
    batch = _current.batch
    if batch is None or batch.site_ops is None:
        return None
    return None if batch.hook_query is not None and batch.hook_query.is_own_call() else batch.site_ops
