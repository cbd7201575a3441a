"""The engines of this process: their ends when an `LM` is deleted, at a fork, and at exit.

An engine's thread holds the engine, the weights and the KV pool. So deleting the last reference to its `LM` does not end it:
`Engine.release` does, when its last request has ended. Handles and streams that outlive their `LM` are served to their end.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
import weakref

from ..engine.engine import Engine
from .handle import EngineClosedError

_open: weakref.WeakSet[Engine] = weakref.WeakSet()
_process = os.getpid()
EXIT_SECONDS = 30.0
"""Seconds that a process waits for its engines at exit."""


def track(engine: Engine) -> None:
    """Shut the engine down when the process exits, and close it in forked children."""
    _open.add(engine)


def release_with(owner: object, engine: Engine) -> None:
    """Release the engine when `owner` is deleted: no `LM` is left then that could submit a request.

    The finalizer does not hold the engine: a caller's drafter, which the engine holds, may hold `owner`.
    """
    weakref.finalize(owner, _release, weakref.ref(engine)).atexit = False


def _release(engine: weakref.ref[Engine]) -> None:
    if (running := engine()) is not None:
        running.release()


def wait_for_released() -> None:
    """Wait for the end of idle engines without an `LM`: a new one then finds their memory free."""
    if _open:
        gc.collect()  # an LM with persistent edits is in a cycle: its edits refer to their caller's variables
    for engine in list(_open):
        engine.wait_if_released()


@atexit.register
def _shutdown_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for engine in list(_open):
        try:
            engine.shutdown(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            print(f"pymllm-interp: {error}; the process ends without it", file=sys.stderr)


def _after_fork() -> None:
    global _process
    parent, _process = _process, os.getpid()
    message = (
        f"process {_process} is a fork of process {parent}, where this LM's engine runs: a fork has no copy of its thread. "
        "Make an LM in the child; on CUDA, start the child with multiprocessing.get_context('spawn')"
    )
    for engine in list(_open):
        engine.after_fork(EngineClosedError(message))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
