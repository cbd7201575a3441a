"""Declared ops and captures as functions on rows: for passes on a CPU, and for passes with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

import torch

from ...core.events import OpError
from ...core.model_spec import LOGITS, inner_site
from ...layers.edits.host import Added, HostOps, RowCapture, RowFunction, RowRange
from ...utils.out_of_memory import is_out_of_memory
from ...utils.upload import upload
from ..bound_hooks import PlacedOp
from ..declared import Declared
from ..monitors.monitor import ScoreRead
from ..positions import Window, ordinal_of, ordinals_of
from .device_tables import DeviceTables
from .gates import GateRead, PassFlags
from .op import Op, act, gated
from .sae_op import SAERead

Count = Callable[[torch.Tensor], None]
"""Takes the rows [rows] bool on which a gate fires."""


class RequestRows(NamedTuple):
    """The rows of a request in a pass."""

    declared: Declared
    start: int
    """First token row."""
    positions: range
    """Position of each token row."""
    logit_start: int
    """First row of the logits."""
    logit_rows: int
    """Number of rows of the logits; the rows are for the last positions."""
    request_id: str = ""
    """Request that an op's error is of; "" for passes of one request."""

    def ordinals(self, windows: tuple[Window, ...], of_logits: bool = False) -> torch.Tensor:
        """[rows] or [logit rows], from `ordinals_of`."""
        rows = self.positions[len(self.positions) - self.logit_rows :] if of_logits else self.positions
        return ordinals_of(windows, torch.arange(rows.start, rows.stop))


def host_ops(requests: Iterable[RequestRows], num_layers: int, scores: torch.Tensor | None = None) -> HostOps | None:
    """The ops and captures of a step as functions; None if the step has no ops and captures.

    Captures of the logits are left out: a trace may change the logits after the pass.

    Args:
        scores: [slots, rows] float32, which reads of monitors write; needed where a request has monitors.
    """
    logits = inner_site(num_layers, 0, LOGITS)
    acting: dict[
        int, list[tuple[float, RowRange, RowFunction]]
    ] = {}  # site -> (rank among its request's ops, rows, op)
    captures: dict[int, list[RowCapture]] = {}
    for request in requests:
        declared, rows = request.declared, (request.start, len(request.positions))
        first, stop = request.positions.start, request.positions.stop
        for kept in () if declared.captures is None else declared.captures.groups:
            group = kept.group
            if group.rows_before(stop) > group.rows_before(first):
                for column, site in enumerate(group.sites):
                    if site != logits:
                        captures.setdefault(site, []).append(RowCapture(*rows, first, kept, column))
        chosen: dict[tuple[bool, tuple[Window, ...]], _Selected] = {}  # an op at many sites has the same windows
        flags = None
        found_by: dict[SAERead, torch.Tensor] = {}
        reads: dict[SAERead, None] = {}  # in the order of their ops
        for site, found in declared.hooks.ops.items():
            for i, op in enumerate(found):
                key = site == logits, op.windows
                selected = chosen.get(key) or chosen.setdefault(key, _Selected.of(request, *key))
                if selected.any:
                    if op.flag is not None and flags is None:
                        positions = torch.arange(request.positions.start, request.positions.stop)
                        flags = PassFlags(positions, declared.first_fired)
                    if op.read is not None:
                        reads[op.read] = None
                    at = (request.logit_start, request.logit_rows) if site == logits else rows
                    count = partial(declared.fires.add, (site, i), stop - at[1])
                    function = _row_function(op, selected, flags, count, found_by, request.request_id)
                    if isinstance(op.spec, ScoreRead):
                        assert scores is not None
                        function = _scorer(op.spec, scores[:, rows[0] : sum(rows)])
                    acting.setdefault(site, []).append((i, at, function))
        for read in reads:
            acting.setdefault(read.site, []).append((read.rank, rows, partial(_read, read, found_by)))
    if not acting and not captures:
        return None
    by_site = {site: [(at, op) for _, at, op in sorted(ops, key=itemgetter(0))] for site, ops in acting.items()}
    return HostOps(by_site, captures, num_layers)


class _Selected(NamedTuple):
    """The rows of a request that an op's positions select."""

    ordinals: torch.Tensor
    """[rows] from `ordinals_of`."""
    rows: torch.Tensor
    """[rows] bool."""
    any: bool
    all: bool

    @classmethod
    def of(cls, request: RequestRows, of_logits: bool, windows: tuple[Window, ...]) -> _Selected:
        if len(request.positions) == 1 and (not of_logits or request.logit_rows == 1):
            return _of_one_row(ordinal_of(windows, request.positions.start))
        ordinals = request.ordinals(windows, of_logits)
        rows = ordinals >= 0
        return cls(ordinals, rows, bool(rows.any()), bool(rows.all()))


@lru_cache(maxsize=4096)
def _of_one_row(ordinal: int) -> _Selected:
    """The selection of one row; most steps have many of them. Its tensors are not to be changed."""
    return _Selected(torch.tensor([ordinal]), torch.tensor([ordinal >= 0]), ordinal >= 0, ordinal >= 0)


def _row_function(
    op: PlacedOp, selected: _Selected, flags: PassFlags | None, count: Count, found_by: Mapping[SAERead, torch.Tensor],
    request_id: str,
) -> RowFunction:  # fmt: skip
    spec, flag = op.spec, op.flag
    if isinstance(spec, GateRead):
        assert flag is not None and flags is not None
        return flags.reader(spec, flag)
    if spec.when is None and flag is None and spec.addend is not None:
        return Added(spec.addend, selected.rows, selected.all)

    def run(rows: torch.Tensor) -> torch.Tensor:
        vectors, ordinals = [vector.to(rows.device) for vector in spec.vectors], selected.ordinals.to(rows.device)
        if op.read is not None:
            vectors.insert(len(spec.operands), found_by[op.read][-len(rows) :].to(rows.device))
        if flag is not None and flags is not None:
            ordinals = torch.where(flags.on(flag, len(rows), rows.device), ordinals, -1)
        try:
            return counted(spec, rows, ordinals, vectors, count)
        except BaseException as error:  # an op may be code of callers
            if not request_id or is_out_of_memory(error):
                raise
            raise _error_of(spec, request_id, error) from error

    return run


def _error_of(spec: Op, request_id: str, error: BaseException) -> OpError:
    found = OpError(f"{spec.name} raised {type(error).__name__}: {error}")
    found.request_ids = (request_id,)
    return found


def _scorer(read: ScoreRead, scores: torch.Tensor) -> RowFunction:
    """The function that writes dot products of rows to their columns `scores` [slots, rows], and returns the rows."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        dots = read.dots(rows)
        scores[read.slot : read.slot + len(dots)] = dots
        return rows

    return run


def _read(read: SAERead, found_by: dict[SAERead, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Keep the result of a read of rows [rows, width], and return the rows."""
    found_by[read] = read.of(rows)
    return rows


def counted(
    spec: Op,
    rows: torch.Tensor,
    ordinals: torch.Tensor,
    vectors: Sequence[torch.Tensor],
    count: Count,
) -> torch.Tensor:
    """`op.apply` on given vectors. `count` gets the rows on which the gate fires. Does not wait for the device.

    `ordinals` are -1 if a gate at an earlier site prevents the op.
    """
    ordinals = gated(spec, rows, ordinals, vectors)
    if spec.when is not None:
        count(ordinals >= 0)
    return act(spec, rows, ordinals, vectors)


class _SharedRows(NamedTuple):
    """An op on consecutive rows, of one request or of several that share the spec.

    Attributes:
        ordinals: [rows] on the device of the rows.
        vectors: the spec's vectors, on the device of the rows.
        note: gets the rows [rows] bool on which its gate fires.
    """

    spec: Op
    ordinals: torch.Tensor
    vectors: list[torch.Tensor]
    note: Count

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return counted(self.spec, rows, self.ordinals, self.vectors, self.note)

    def part(self, start: int, stop: int) -> _SharedRows:
        """The op on some of its rows."""
        return self._replace(ordinals=self.ordinals[start:stop])


def logit_ops(requests: Iterable[RequestRows], num_layers: int, tables: DeviceTables) -> HostOps | None:
    """The ops at the logits of a step with device tables: captured graphs end before the logits. None without such ops.

    Nothing waits for the device: vectors are in the tables' pool, and ordinals are uploaded in one copy. Adjacent requests
    with the same spec share one function, unless a gate counts fires for each.
    """
    site = inner_site(num_layers, 0, LOGITS)
    # A request's ops keep their order; the order of requests does not matter.
    wanted = [(i, rows, op) for rows in requests for i, op in enumerate(rows.declared.hooks.ops.get(site, ()))]
    acting = [(i, rows, op, rows.ordinals(op.windows, of_logits=True)) for i, rows, op in wanted]
    acting = sorted((found for found in acting if (found[3] >= 0).any()), key=itemgetter(0))
    if not acting:
        return None
    (ordinals,) = upload(tables.device, torch.cat([found[3] for found in acting]))
    ops: list[tuple[RowRange, _SharedRows]] = []
    end = 0
    for i, rows, op, _ in acting:
        start, end = end, end + rows.logit_rows
        if ops and op.spec.when is None:
            (first, size), last = ops[-1]
            if op.spec is last.spec and first + size == rows.logit_start:
                size += rows.logit_rows
                ops[-1] = (first, size), last._replace(ordinals=ordinals[end - size : end])
                continue
        vectors = [tables.pool_view(rows.declared, vector) for vector in op.spec.vectors]
        count = partial(rows.declared.fires.add, (site, i), rows.positions.stop - rows.logit_rows)
        shared = _SharedRows(op.spec, ordinals[start:end], vectors, count)
        ops.append(((rows.logit_start, rows.logit_rows), shared))
    return HostOps({site: list[tuple[RowRange, RowFunction]](ops)}, {}, num_layers)
