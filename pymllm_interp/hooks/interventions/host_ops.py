"""Declared ops and captures as functions on rows: for passes on a CPU, and for passes with gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import NamedTuple

import torch

from ...core.model_spec import LOGITS, inner_site
from ...layers.edits.host import Added, CaptureSink, HostOps, RowFunction, RowRange
from ..captures.group import Group
from ..declared import Declared, Fires, PlacedOp
from ..positions import Window, ordinals_of
from .gates import GateRead, PassFlags
from .op import Op
from .reference import act, gated


class RequestRows(NamedTuple):
    """The rows of a request in a pass."""

    declared: Declared
    start: int
    """First token row."""
    positions: torch.Tensor
    """[rows], position of each token row."""
    logit_start: int
    """First row of the logits."""
    logit_rows: int
    """Number of rows of the logits; the rows are for the last positions."""


def host_ops(requests: Iterable[RequestRows], num_layers: int) -> HostOps | None:
    """The ops and captures of a step as functions; None if the step has no ops and captures.

    Captures of the logits are left out: a trace may change the logits after the pass.
    """
    logits = inner_site(num_layers, 0, LOGITS)
    acting: dict[int, list[tuple[int, RowRange, RowFunction]]] = {}  # site -> (rank among its request's ops, rows, op)
    sinks: dict[int, list[tuple[RowRange, CaptureSink]]] = {}
    for declared, start, positions, logit_start, logit_rows in requests:
        rows = start, len(positions)
        for group in () if declared.captures is None else declared.captures.groups:
            ordinals = torch.from_numpy(group.ordinals)[positions]
            if (ordinals >= 0).any():
                for column, site in enumerate(group.sites):
                    if site != logits:
                        sinks.setdefault(site, []).append((rows, _capture_sink(group, column, ordinals)))
        of_windows = cache(partial(_Selected.of, positions=positions))  # an op at many sites has the same windows
        flags = PassFlags(positions, declared.first_fired)
        of_logits = cache(partial(_Selected.of, positions=positions[len(positions) - logit_rows :]))
        for site, found in declared.ops.items():
            for i, op in enumerate(found):
                selected = of_logits(op.windows) if site == logits else of_windows(op.windows)
                if selected.any:
                    function = _row_function(op, selected, flags, declared.fires, (site, i))
                    at = (logit_start, logit_rows) if site == logits else rows
                    acting.setdefault(site, []).append((i, at, function))
    if not acting and not sinks:
        return None
    by_site = {site: [(at, op) for _, at, op in sorted(ops, key=itemgetter(0))] for site, ops in acting.items()}
    return HostOps(by_site, sinks, num_layers)


class _Selected(NamedTuple):
    """The rows of a request that an op's positions select."""

    ordinals: torch.Tensor
    """[rows] from `ordinals_of`."""
    rows: torch.Tensor
    """[rows] bool."""
    any: bool
    all: bool

    @classmethod
    def of(cls, windows: tuple[Window, ...], positions: torch.Tensor) -> _Selected:
        ordinals = ordinals_of(windows, positions)
        rows = ordinals >= 0
        return cls(ordinals, rows, bool(rows.any()), bool(rows.all()))


def _capture_sink(group: Group, column: int, ordinals: torch.Tensor) -> CaptureSink:
    return lambda rows: group.capture(column, rows, ordinals)


def _row_function(
    op: PlacedOp, selected: _Selected, flags: PassFlags, fires: Fires, key: tuple[int, int]
) -> RowFunction:
    spec, flag = op.spec, op.flag
    if isinstance(spec, GateRead):
        assert flag is not None
        return flags.reader(spec, flag)
    if spec.when is None and spec.addend is not None:
        return Added(spec.addend, selected.rows, selected.all)

    def run(rows: torch.Tensor) -> torch.Tensor:
        vectors, ordinals = [vector.to(rows.device) for vector in spec.vectors], selected.ordinals.to(rows.device)
        if flag is not None:
            ordinals = torch.where(flags.on(flag, len(rows), rows.device), ordinals, -1)
        return counted(spec, rows, ordinals, vectors, fires, key)

    return run


def counted(
    spec: Op,
    rows: torch.Tensor,
    ordinals: torch.Tensor,
    vectors: Sequence[torch.Tensor],
    fires: Fires,
    key: tuple[int, int],
) -> torch.Tensor:
    """`reference.apply` on given vectors, with the gate's fires added to ``fires[key]``. Does not wait for the device.

    `ordinals` are -1 where a gate at an earlier site does not let the op act.
    """
    ordinals = gated(spec, rows, ordinals, vectors)
    if spec.when is not None:
        fires.add(key, ordinals >= 0)
    return act(spec, rows, ordinals, vectors)
