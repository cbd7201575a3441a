"""`EngineBarrier`: a point where blocks of one trace wait for each other."""

from __future__ import annotations

from ..blocks.trace import Block
from ..nnsight_compat import Barrier, Mediator


class EngineBarrier(Barrier):
    """A point that `n` blocks of a trace wait for. The last to arrive resumes the others.

    Unlike nnsight's, it files the resumed blocks at their next locations.
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
            other.interleaver.blocks.release(other)
