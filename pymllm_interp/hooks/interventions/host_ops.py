"""Declared ops as functions on the rows of their requests: what a CPU runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import NamedTuple

import torch

from ...core.model_spec import LOGITS, inner_site
from ...layers.edits import host
from ...layers.edits.host import HostOps, Rows
from ..captures.group import Group
from ..declared import Declared, Fires
from ..positions import Window, ordinals_of
from .reference import act, gated, vectors_of
from .specs import Intervention, Steer


class Share(NamedTuple):
    """A request's share of a pass."""

    declared: Declared
    start: int
    """Its first token row."""
    positions: torch.Tensor
    """[rows], of the input tokens."""
    logit_start: int
    """Its first row of the logits."""
    logit_rows: int
    """Those of its last positions, so many."""


def host_ops(requests: Iterable[Share], num_layers: int) -> HostOps | None:
    """The ops and captures of a step as functions; None where no request has any in it. Captures of the logits come later, by
    `Group.take`: a trace may change those behind the head."""
    logits = inner_site(num_layers, 0, LOGITS)
    acting: dict[int, list[tuple[int, Rows, host.Op]]] = {}  # site -> (place among its request's ops there, rows, op)
    taps: dict[int, list[tuple[Rows, Callable[[torch.Tensor], None]]]] = {}
    for declared, start, positions, logit_start, logit_rows in requests:
        rows = start, len(positions)
        for group in () if declared.captures is None else declared.captures.groups:
            ordinals = torch.from_numpy(group.ordinals)[positions]
            if (ordinals >= 0).any():
                for column, site in enumerate(group.sites):
                    if site != logits:
                        taps.setdefault(site, []).append((rows, _taking(group, column, ordinals)))
        of_windows = cache(partial(_Touched.of, positions=positions))  # an op at many sites has the same
        of_logits = cache(partial(_Touched.of, positions=positions[len(positions) - logit_rows :]))
        for site, found in declared.ops.items():
            for i, op in enumerate(found):
                touched = of_logits(op.windows) if site == logits else of_windows(op.windows)
                if touched.any:
                    function = _function(op.spec, touched, declared.fires, (site, i))
                    at = (logit_start, logit_rows) if site == logits else rows
                    acting.setdefault(site, []).append((i, at, function))
    if not acting and not taps:
        return None
    by_site = {site: [(at, op) for _, at, op in sorted(ops, key=itemgetter(0))] for site, ops in acting.items()}
    return HostOps(by_site, taps, num_layers)


class _Touched(NamedTuple):
    """Where an op acts among a request's rows."""

    ordinals: torch.Tensor
    """[rows] of `ordinals_of`."""
    rows: torch.Tensor
    """[rows] bool."""
    any: bool
    all: bool

    @classmethod
    def of(cls, windows: tuple[Window, ...], positions: torch.Tensor) -> _Touched:
        """The rows have `positions`."""
        ordinals = ordinals_of(windows, positions)
        rows = ordinals >= 0
        return cls(ordinals, rows, bool(rows.any()), bool(rows.all()))


def _taking(group: Group, column: int, ordinals: torch.Tensor) -> Callable[[torch.Tensor], None]:
    return lambda rows: group.capture(column, rows, ordinals)


def _function(spec: Intervention, touched: _Touched, fires: Fires, key: tuple[int, int]) -> host.Op:
    """What a spec does to a request's rows."""
    if isinstance(spec, Steer) and spec.norm == "none" and spec.when is None:
        return host.Added(spec.scaled, touched.rows, touched.all)

    def run(rows: torch.Tensor) -> torch.Tensor:
        vectors = [vector.to(rows.device) for vector in vectors_of(spec)]
        return _acted(spec, rows, touched.ordinals.to(rows.device), vectors, fires, key)

    return run


def _acted(
    spec: Intervention,
    rows: torch.Tensor,
    ordinals: torch.Tensor,
    vectors: Sequence[torch.Tensor],
    fires: Fires,
    key: tuple[int, int],
) -> torch.Tensor:
    """`intervention.apply`, with what it is computed with, and its gate's fires counted: nobody waits for the device."""
    touched = gated(spec, rows, ordinals, vectors)
    if spec.when is not None:
        fires[key] = fires.get(key, 0) + (touched >= 0).sum()
    return act(spec, rows, touched, vectors)
