"""Declared ops at the logits, which no captured graph computes."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

import torch

from ...core.model_spec import LOGITS, inner_site
from ...core.upload import upload
from ..declared import Fires, Op
from ..positions import ordinals_of
from .device_tables import DeviceTables
from .host_ops import Share, _acted
from .reference import vectors_of
from .specs import Intervention


class _LogitRows(NamedTuple):
    """What an op does to consecutive rows of the logits, of one request or of several that have the same spec."""

    first: int
    ordinals: torch.Tensor
    """[rows], on the device."""
    spec: Intervention
    vectors: list[torch.Tensor]
    fires: Fires
    key: tuple[int, int]

    @property
    def stop(self) -> int:
        return self.first + len(self.ordinals)


class LogitOps:
    """The ops at the logits of a step whose other ops are in tables: functions, in the order in which they act."""

    def __init__(self, ops: list[_LogitRows]) -> None:
        self._ops = ops

    def rows_from(self, start: int, stop: int) -> LogitOps:
        """Those of the logit rows from `start` to `stop`, counted from `start`."""
        cut = [
            op._replace(
                first=max(op.first, start) - start, ordinals=op.ordinals[max(0, start - op.first) : stop - op.first]
            )
            for op in self._ops
            if op.first < stop and start < op.stop
        ]
        return LogitOps(cut)

    def at(self, value: torch.Tensor) -> torch.Tensor:
        """Logits [1, rows, vocab] after the ops, in fresh memory."""
        value = value.clone()
        for op in self._ops:
            rows = value[0, op.first : op.stop]
            rows.copy_(_acted(op.spec, rows, op.ordinals, op.vectors, op.fires, op.key))
        return value


def logit_ops(requests: Iterable[Share], num_layers: int, tables: DeviceTables) -> LogitOps | None:
    """The ops at the logits of a step; None where no request has any in it.

    The host waits for none of it: what the ops are computed with is in the tables' pool while the request lives, and where they
    act goes to the device in one piece. Requests next to each other that have the same spec, as a list for all prompts makes them,
    are one function, unless fires are to be counted for each.
    """
    site = inner_site(num_layers, 0, LOGITS)
    # A request's ops in their order; in which order requests come does not matter.
    wanted = [(i, share, op) for share in requests for i, op in enumerate(share.declared.ops.get(site, ()))]
    found: list[tuple[int, Share, Op]] = []
    parts: list[torch.Tensor] = []
    for i, share, op in sorted(wanted, key=itemgetter(0)):
        ordinals = ordinals_of(op.windows, share.positions[len(share.positions) - share.logit_rows :])
        if (ordinals >= 0).any():
            found.append((i, share, op))
            parts.append(ordinals)
    if not found:
        return None
    (ordinals,) = upload(tables.device, torch.cat(parts))
    ops: list[_LogitRows] = []
    end = 0
    for i, share, op in found:
        start, end = end, end + share.logit_rows
        last = ops[-1] if ops else None
        if last is not None and op.spec is last.spec and op.spec.when is None and last.stop == share.logit_start:
            ops[-1] = last._replace(ordinals=ordinals[start - len(last.ordinals) : end])
            continue
        vectors = [tables.pool_view(share.declared, vector) for vector in vectors_of(op.spec)]
        ops.append(
            _LogitRows(share.logit_start, ordinals[start:end], op.spec, vectors, share.declared.fires, (site, i))
        )
    return LogitOps(ops)
