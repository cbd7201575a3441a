"""Waits for what an engine does, and its state at rest."""

from __future__ import annotations

import time
from collections.abc import Callable

from pymllm_interp import LM

WAIT = 600
"""Seconds after which a test that would hang fails instead."""


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end, "this never came to hold"
        time.sleep(0)


def assert_idle(lm: LM) -> None:
    """Nothing runs, and every page and row is free."""

    def check() -> None:
        scheduler = lm.engine.scheduler
        assert not scheduler.has_work() and not lm.engine.ends.subscribers and lm.engine._in_flight is None
        scheduler.check_integrity()
        assert scheduler.kv.num_available_pages == scheduler.kv.allocator.num_pages
        assert scheduler.kv.rows.available_size() == scheduler.kv.rows.size

    lm.engine.call(check)
