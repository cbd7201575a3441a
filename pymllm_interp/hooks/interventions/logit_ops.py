"""Declared ops at the logits of steps with device tables: captured graphs end before the logits, so these are functions."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

import torch

from ...core.model_spec import LOGITS, inner_site
from ...utils.upload import upload
from ..declared import PlacedOp
from .device_tables import DeviceTables
from .fires import Fires
from .host_ops import RequestRows, counted
from .op import Op


class _LogitRows(NamedTuple):
    """An op on consecutive rows of the logits, of one request or of several that share the spec."""

    first: int
    ordinals: torch.Tensor
    """[rows], on the device."""
    spec: Op
    vectors: list[torch.Tensor]
    fires: Fires
    key: tuple[int, int]

    @property
    def stop(self) -> int:
        return self.first + len(self.ordinals)


class LogitOps:
    """The ops at the logits of a step, in the order in which they act."""

    def __init__(self, ops: list[_LogitRows]) -> None:
        self._ops = ops

    def rows_from(self, start: int, stop: int) -> LogitOps:
        """The ops on the logit rows from `start` to `stop`, with rows counted from `start`."""
        cut = [
            op._replace(
                first=max(op.first, start) - start, ordinals=op.ordinals[max(0, start - op.first) : stop - op.first]
            )
            for op in self._ops
            if op.first < stop and start < op.stop
        ]
        return LogitOps(cut)

    def at(self, value: torch.Tensor) -> torch.Tensor:
        """Logits [1, rows, vocab] after the ops, in new memory."""
        value = value.clone()
        for op in self._ops:
            rows = value[0, op.first : op.stop]
            rows.copy_(counted(op.spec, rows, op.ordinals, op.vectors, op.fires, op.key))
        return value


def logit_ops(requests: Iterable[RequestRows], num_layers: int, tables: DeviceTables) -> LogitOps | None:
    """The ops at the logits of a step; None if the step has no such ops.

    Nothing waits for the device: vectors are in the tables' pool, and ordinals are uploaded in one copy. Adjacent requests
    with the same spec share one function, unless a gate counts fires for each.
    """
    site = inner_site(num_layers, 0, LOGITS)
    # A request's ops keep their order; the order of requests does not matter.
    wanted = [(i, rows, op) for rows in requests for i, op in enumerate(rows.declared.ops.get(site, ()))]
    found: list[tuple[int, RequestRows, PlacedOp]] = []
    parts: list[torch.Tensor] = []
    for i, rows, op in sorted(wanted, key=itemgetter(0)):
        ordinals = rows.ordinals(op.windows, of_logits=True)
        if (ordinals >= 0).any():
            found.append((i, rows, op))
            parts.append(ordinals)
    if not found:
        return None
    (ordinals,) = upload(tables.device, torch.cat(parts))
    ops: list[_LogitRows] = []
    end = 0
    for i, rows, op in found:
        start, end = end, end + rows.logit_rows
        last = ops[-1] if ops else None
        if last is not None and op.spec is last.spec and op.spec.when is None and last.stop == rows.logit_start:
            ops[-1] = last._replace(ordinals=ordinals[start - len(last.ordinals) : end])
            continue
        vectors = [tables.pool_view(rows.declared, vector) for vector in op.spec.vectors]
        ops.append(_LogitRows(rows.logit_start, ordinals[start:end], op.spec, vectors, rows.declared.fires, (site, i)))
    return LogitOps(ops)
