"""Captures of CUDA graphs while an engine serves: after a wake, and after a start with `lazy_graphs`.

A capture takes some 50 ms, in which no step runs. A pass without its graph takes a few milliseconds longer. So an idle engine
captures all of them. A busy one captures those that are asked for often, with many steps between two captures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...runner.graphs.captured_passes import CapturedPasses

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.02
"""Time that an engine is idle before it captures: the next request of a client may be on its way."""
LEAST_ASKED = 8
"""Passes that ran without a graph before a busy engine captures it."""
STEPS_BETWEEN = 32
"""Least number of steps of a busy engine between two captures."""


class LateCaptures:
    """Captures the missing graphs of a runner, on the engine's thread.

    Args:
        graphs: graphs of the runner.
        read_tokens: reads and sends the tokens of the step in flight, so that they do not wait for a capture.
    """

    def __init__(self, graphs: CapturedPasses, read_tokens: Callable[[], object]) -> None:
        self._graphs, self._read_tokens, self._next_step = graphs, read_tokens, 0

    def turn(self, num_steps: int, idle: bool) -> None:
        """Capture one graph, if it is time for one.

        Args:
            num_steps: number of the engine's steps so far.
            idle: nothing came for `IDLE_SECONDS`.
        """
        if idle or (num_steps >= self._next_step and self._graphs.most_asked >= LEAST_ASKED):
            self.capture()
            self._next_step = num_steps + STEPS_BETWEEN

    def capture(self) -> None:
        """Capture a missing graph. An error is logged once: passes of its size then run eagerly, and others are captured."""
        self._read_tokens()
        try:
            if self._graphs.num_missing:
                self._graphs.capture_next()
        except Exception:  # also errors of Triton's compiler
            logger.warning(
                "a CUDA graph could not be captured, and these passes run eagerly from now on: %s",
                [*self._graphs.failures.values()][-1],
            )
