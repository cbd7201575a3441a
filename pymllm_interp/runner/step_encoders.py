"""`StepEncoders`: the encoders that a step runs, and the cross keys and values that its requests attend to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.model_spec import OF_ENCODER
from ..core.pass_parts import CrossRows, EncoderInput, PassEncoder
from ..core.step import NewRequest
from ..mem_cache.cross_pool import CrossPool
from .input_batch import InputBatch

SiteOpsOf = Callable[[str, str, range | None], Any]


class StepEncoders:
    """Encoder inputs of requests that enter the table, until the pass that runs them.

    Args:
        pool: pool of their cross keys and values.

    Attributes:
        site_ops_of: (request id, key in `ModelSpec.parts`, images or None for all) -> declared ops and captures of the part's
            pass.
    """

    def __init__(self, pool: CrossPool) -> None:
        self._pool = pool
        self._waiting: dict[str, tuple[EncoderInput, int, torch.Tensor]] = {}
        self.site_ops_of: SiteOpsOf = no_part_ops

    def enter(self, request: NewRequest) -> None:
        """Give an entering request its pages. Its encoder runs in its first pass, unless they are computed."""
        run = request.encoder
        assert run is not None, "requests to an encoder-decoder model have an encoder input"
        slots = self._pool.enter(request.row, run.pages, run.input.length)
        self._waiting.pop(request.request_id, None)
        if not run.computed:
            self._waiting[request.request_id] = run.input, run.pages[0], slots

    def drop(self, request_id: str) -> None:
        """Forget the input of a request that left the table."""
        self._waiting.pop(request_id, None)

    def rows_of(self, batch: InputBatch, rows: torch.Tensor) -> CrossRows:
        """The part of a step's pass.

        Args:
            rows: [requests] int64, rows of the table on the device.
        """
        encoders: dict[int, PassEncoder] = {}
        for index, entry in enumerate(batch.entries):
            if (waiting := self._waiting.pop(entry.request_id, None)) is not None:
                given, page, slots = waiting  # requests with equal inputs share the pages
                encoders.setdefault(
                    page, PassEncoder(index, given, slots, self.site_ops_of(entry.request_id, OF_ENCODER, None))
                )
        return CrossRows(self._pool, rows, self._pool.lens[batch.idx_mapping_np].tolist(), list(encoders.values()))


def no_part_ops(request_id: str, part: str, images: range | None) -> None:
    """The ops of a runner without hooks."""
