"""A meeting point for the blocks of one trace."""

from __future__ import annotations

from .interleaver import Block
from .nnsight_compat import Barrier, Mediator


class EngineBarrier(Barrier):
    """Every block that holds the barrier calls it; the last to arrive lets the others go.

    nnsight's, but that the blocks it lets go are filed by the interleaver where they wait next.
    """

    def __call__(self) -> None:
        """Wait until `n` blocks have arrived."""
        block = Mediator.current("tracer.barrier()")
        assert isinstance(block, Block)
        self._waiting.append(block)
        if len(self._waiting) < self.n:
            Mediator.barrier()
            return
        waiting, self._waiting = self._waiting[:-1], []
        for other in waiting:
            assert isinstance(other, Block)
            other.trace.interleaver.release(other)
