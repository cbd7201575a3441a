"""A request's interventions, made ready for the forward pass.

`Declared.of` binds what a caller asked for to the model and the prompt, and checks it against the limits, before the request is
scheduled. On CUDA its ops become rows of device tables (`DeviceTables`), which a captured graph reads; on a CPU they are
functions on the request's rows (`host_edits`), as those at the logits are everywhere (`logit_edits`). `layers/edits.py` has the
sites and the order in which they act.
"""

from __future__ import annotations

import bisect
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from ..core.upload import upload
from ..layers import edits, table_edits
from ..layers import host_edits as host
from ..layers.host_edits import HostEdits, Rows
from ..layers.table_edits import EditTables
from .capture import Activations, Captures, Group
from .intervention import (
    Ablate,
    Bound,
    Capture,
    Clamp,
    Intervention,
    Patch,
    Scale,
    Steer,
    Window,
    act,
    at_logits,
    bind,
    gated,
    ordinals_of,
    vectors_of,
)
from .receipt import Applied, Captured
from .site import ModelInfo, Site

STREAM_KINDS = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm")
KINDS = (*STREAM_KINDS, *edits.INNER, edits.LOGITS)
"""Kinds of sites that interventions can act at."""
CONVERTED = {torch.float16: table_edits.FLOAT16, torch.bfloat16: table_edits.BFLOAT16}
NORMS = {"none": table_edits.NO_NORM, "preserve": table_edits.PRESERVE, "match": table_edits.MATCH}


def site_index(site: Site, num_layers: int) -> int:
    """The site's number in layers/edits.py.

    Raises:
        ValueError: a kind that no op can act at.
    """
    if site.kind not in KINDS:
        raise ValueError(
            f"{site}: interventions act at {', '.join(KINDS)}; a trace (`with lm.generate(...)`) can edit the others"
        )
    layer = site.layer or 0
    if site.kind not in STREAM_KINDS:
        return edits.inner_site(num_layers, layer, site.kind)
    match site.kind:
        case "embed" | "resid_pre":
            return edits.stream_site(2 * layer)
        case "attn_out":
            return edits.added_site(2 * layer + 1)
        case "resid_mid":
            return edits.stream_site(2 * layer + 1)
        case "mlp_out":
            return edits.added_site(2 * layer + 2)
        case "resid_post":
            return edits.stream_site(2 * layer + 2)
        case _:
            return edits.final_norm_site(num_layers)


@dataclass(frozen=True)
class Limits:
    """What tables and results hold; the names are those of the settings."""

    max_interventions_per_site: int
    max_intervention_vectors: int
    max_capture_bytes: int
    inner_sites: frozenset[str] = frozenset(edits.INNER)
    """Kinds that passes have kernels for."""

    def check(self, site: Site) -> None:
        """Raise ValueError where passes have no kernels for the site."""
        if site.kind in edits.INNER and site.kind not in self.inner_sites:
            raise ValueError(
                f"{site}: on CUDA the passes of this engine have no kernels for {site.kind!r}; build it with "
                f"LM(..., inner_sites={tuple(sorted({*self.inner_sites, site.kind}))})"
            )


def _captures(
    specs: Sequence[Capture], model: ModelInfo, prompt_len: int, limits: Limits, longest: int, logits_from: int
) -> Captures | None:
    if not specs:
        return None

    def bounds() -> Iterator[tuple[int, Bound, tuple[int, ...]]]:
        for spec in specs:
            found = bind(spec, model, prompt_len)
            limits.check(found[0].site)
            shape = model.shape(found[0].site.kind)  # a spec's sites are of one kind
            for bound in found:
                if bound.site.kind == edits.LOGITS:
                    bound = at_logits(bound, logits_from)
                yield site_index(bound.site, model.num_hidden_layers), bound, shape

    captures = Captures(bounds(), model.dtype, prompt_len, longest, model.num_hidden_layers)
    if captures.num_bytes > limits.max_capture_bytes:
        raise ValueError(
            f"the captures of a request of {longest} positions may take {captures.num_bytes / 2**20:.0f} MiB; a request's results "
            f"hold {limits.max_capture_bytes / 2**20:.0f} (max_capture_bytes): raise it, or capture fewer sites or positions"
        )
    return captures


Fires = dict[tuple[int, int], int | torch.Tensor]
"""(site, place among its ops) -> how often an op's gate let it act; where functions count, a tensor on their device."""


class Op(NamedTuple):
    """An intervention at one site, at the positions of its windows."""

    spec: Intervention
    site: Site
    windows: tuple[Window, ...]


@dataclass
class Declared:
    """The interventions and captures of one request.

    Attributes:
        ops: by site, in the order in which they act.
        captures: None where nothing is captured.
        logits_from: the first position that has logits.
        vectors: rows of the pool that it holds, until `VectorPool.release`.
    """

    ops: dict[int, list[Op]]
    captures: Captures | None
    prompt_len: int
    logits_from: int = 0
    vectors: dict[int, int] = field(default_factory=dict)
    """id of a tensor -> its first row."""
    held: list[bytes] = field(default_factory=list)
    fires: Fires = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        specs: Sequence[Intervention],
        model: ModelInfo,
        prompt_len: int,
        limits: Limits,
        captures: Sequence[Capture] = (),
        longest: int = 0,
        logits_from: int = 0,
    ) -> Declared:
        """What `specs` and `captures` come to for a prompt of that length, in a request of at most `longest` positions, which has
        logits at those from `logits_from` on.

        Raises:
            ValueError: what `bind` refuses, a site that no op can act at, too many ops at one, a site that is captured twice, or
                captures that may take more memory than a request's results are allowed.
        """
        placed: list[tuple[int, bool, Op]] = []
        for spec in specs:
            for bound in bind(spec, model, prompt_len):
                assert isinstance(bound.spec, Intervention)
                # resid_pre.i is the state that resid_post.i-1 left, and comes after it; so does resid_pre.0 after embed.
                later = bound.site.kind == "resid_pre"
                limits.check(bound.site)
                site = site_index(bound.site, model.num_hidden_layers)
                placed.append((site, later, Op(bound.spec, bound.site, bound.windows)))
        ops: dict[int, list[Op]] = {}
        for site, _, op in sorted(placed, key=lambda entry: entry[:2]):  # stable: the order given
            if not op.spec.identity:
                ops.setdefault(site, []).append(op)
        for found in ops.values():
            count = sum(len(op.windows) for op in found)
            if count > limits.max_interventions_per_site:
                raise ValueError(
                    f"{found[0].site} has {count} interventions, counting each run of evenly spaced positions; at most "
                    f"{limits.max_interventions_per_site} are held (max_interventions_per_site): raise it, or use fewer runs"
                )
        captured = _captures(captures, model, prompt_len, limits, longest, logits_from)
        return cls(ops, captured, prompt_len, logits_from)

    @property
    def edits_logits(self) -> bool:
        """Whether an op acts at the logits."""
        return any(found[0].site.kind == edits.LOGITS for found in self.ops.values())

    def activations(self, token_ids: list[int]) -> Activations | None:
        """What was captured of a request that computed the positions of `token_ids`; None where nothing was asked for."""
        return None if self.captures is None else self.captures.activations(token_ids)

    def captured(self, num_positions: int) -> list[Captured]:
        """How many rows were captured, of a request whose first `num_positions` were computed."""
        if self.captures is None or self.captures.error is not None:
            return []
        return [Captured(*counted) for counted in self.captures.counts(num_positions)]

    def applied(self, num_positions: int) -> list[Applied]:
        """What became of each op, of a request whose first `num_positions` were computed."""

        def rows(op: Op, first: int, stop: int) -> int:
            return sum([window.among(first, min(stop, num_positions)) for window in op.windows])

        return [
            Applied(
                intervention=type(op.spec).__name__,
                site=str(op.site),
                prompt_rows=rows(op, self.logits_from if op.site.kind == edits.LOGITS else 0, self.prompt_len),
                generated_rows=rows(op, self.prompt_len, num_positions),
                gate_fires=None if op.spec.when is None else int(self.fires.get((site, i), 0)),
            )
            for site, found in sorted(self.ops.items())
            for i, op in enumerate(found)
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The vectors that the tables hold for it."""
        for op in self:
            yield from vectors_of(op.spec)
        for group in () if self.captures is None else self.captures.groups:
            if group.probes is not None:
                yield group.probes

    def __iter__(self) -> Iterator[Op]:
        return (op for found in self.ops.values() for op in found)


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


def host_edits(requests: Iterable[Share], num_layers: int) -> HostEdits | None:
    """The ops and captures of a step as functions; None where no request has any in it. Captures of the logits come later, by
    `Group.take`: a trace may change those behind the head."""
    logits = edits.inner_site(num_layers, 0, edits.LOGITS)
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
    return HostEdits(by_site, taps, num_layers)


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


class LogitEdits:
    """The ops at the logits of a step whose other ops are in tables: functions, in the order in which they act."""

    def __init__(self, ops: list[_LogitRows]) -> None:
        self._ops = ops

    def rows_from(self, start: int, stop: int) -> LogitEdits:
        """Those of the logit rows from `start` to `stop`, counted from `start`."""
        cut = [
            op._replace(
                first=max(op.first, start) - start, ordinals=op.ordinals[max(0, start - op.first) : stop - op.first]
            )
            for op in self._ops
            if op.first < stop and start < op.stop
        ]
        return LogitEdits(cut)

    def at(self, value: torch.Tensor) -> torch.Tensor:
        """Logits [1, rows, vocab] after the ops, in fresh memory."""
        value = value.clone()
        for op in self._ops:
            rows = value[0, op.first : op.stop]
            rows.copy_(_acted(op.spec, rows, op.ordinals, op.vectors, op.fires, op.key))
        return value


def logit_edits(requests: Iterable[Share], num_layers: int, tables: DeviceTables) -> LogitEdits | None:
    """The ops at the logits of a step; None where no request has any in it.

    The host waits for none of it: what the ops are computed with is in the tables' pool while the request lives, and where they
    act goes to the device in one piece. Requests next to each other that have the same spec, as a list for all prompts makes them,
    are one function, unless fires are to be counted for each.
    """
    site = edits.inner_site(num_layers, 0, edits.LOGITS)
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
    return LogitEdits(ops)


def _taking(group: Group, column: int, ordinals: torch.Tensor) -> Callable[[torch.Tensor], None]:
    return lambda rows: group.take(column, rows, ordinals)


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


# -- device tables -----------------------------------------------------------------------------------


class VectorPool:
    """Rows of a device matrix for the vectors of live requests; equal vectors share rows, counted by reference.

    Any thread may take and give back; what is new is staged until `take_staged`.

    Args:
        capacity: rows.
        width: of a row. A wider vector takes several, the last one filled up with zeros.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity, self.width = capacity, width
        self._free: list[tuple[int, int]] = [(0, capacity)]  # (first, count), ascending
        self._held: dict[bytes, list[int]] = {}  # content -> [first, count, references]
        self._staged: list[tuple[int, torch.Tensor]] = []
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Rows that are taken."""
        return self.capacity - sum(count for _, count in self._free)

    def acquire(self, declared: Declared) -> None:
        """Take rows for all vectors of a request, or none.

        Raises:
            ValueError: not as many are free in one piece.
        """
        with self._lock:
            try:
                for tensor in declared.tensors():
                    if id(tensor) not in declared.vectors:
                        key, first = self._take(tensor)
                        declared.vectors[id(tensor)] = first
                        declared.held.append(key)
            except ValueError:
                self._release(declared)
                raise

    def release(self, declared: Declared) -> None:
        """Give back what a request holds. A second call does nothing."""
        with self._lock:
            self._release(declared)

    def take_staged(self) -> list[tuple[int, torch.Tensor]]:
        """(first row, vectors [n, width]) that were taken since the last call."""
        with self._lock:
            staged, self._staged = self._staged, []
        return staged

    def _take(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        rows = torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % self.width)).reshape(-1, self.width)
        # Of the rows as they lie there: the same numbers in another shape take another number of them.
        key = hashlib.blake2b(rows.numpy().tobytes(), digest_size=16).digest()
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = [self._allocate(len(rows)), len(rows), 0]
            self._staged.append((held[0], rows))
        held[2] += 1
        return key, held[0]

    def _allocate(self, count: int) -> int:
        for i, (first, room) in enumerate(self._free):
            if room >= count:
                self._free[i : i + 1] = [(first + count, room - count)] if room > count else []
                return first
        raise ValueError(
            f"the pool of intervention vectors has {self.used} of {self.capacity} rows in use and no {count} in one piece "
            "(max_intervention_vectors): raise it, or submit fewer requests with distinct vectors at once"
        )

    def _release(self, declared: Declared) -> None:
        for key in declared.held:
            held = self._held[key]
            held[2] -= 1
            if held[2] == 0:
                del self._held[key]
                self._give_back(held[0], held[1])
        declared.held.clear()
        declared.vectors.clear()

    def _give_back(self, first: int, count: int) -> None:
        i = bisect.bisect(self._free, (first, count))
        self._free.insert(i, (first, count))
        for j in (i, i - 1):  # join with what follows, then with what is before
            if 0 <= j < len(self._free) - 1 and sum(self._free[j]) == self._free[j + 1][0]:
                self._free[j : j + 2] = [(self._free[j][0], self._free[j][1] + self._free[j + 1][1])]


class DeviceTables:
    """The tables that kernels read, and which row of the request table has what in them.

    Rows are staged, and written together before a step.

    Args:
        edited: [rows] int32 on the device: 1 is written for rows that have ops or captures, so that kernels need not look for
            them elsewhere.
        ring: [elements], where captured states go.
    """

    def __init__(self, edited: torch.Tensor, model: ModelInfo, limits: Limits, ring: torch.Tensor) -> None:
        rows, device = len(edited), edited.device
        self.tables = EditTables.empty(
            rows, model.num_hidden_layers, limits.max_interventions_per_site, limits.max_intervention_vectors,
            model.hidden_size, ring, limits.inner_sites,
            all(model.width(kind) % table_edits.ALIGNED == 0 for kind in ("resid_post", *limits.inner_sites)),
        )  # fmt: skip
        self.pool = VectorPool(limits.max_intervention_vectors, model.hidden_size)
        self.device, self._edited = device, edited
        self._in_use: set[int] = set()
        self._staged: dict[int, Declared | None] = {}

    def set_row(self, row: int, declared: Declared | None) -> None:
        """Give the row to a request: with these ops and captures, or with none."""
        if declared is not None or row in self._in_use:
            self._staged[row] = declared

    def pool_view(self, declared: Declared, tensor: torch.Tensor) -> torch.Tensor:
        """One of the vectors that a request holds, on the device, in its shape: where they are, not a copy."""
        first, width = declared.vectors[id(tensor)], tensor.shape[-1]
        count, span = tensor.numel() // width, -(-width // self.pool.width)
        rows = self.tables.vectors[first : first + count * span].view(count, -1)[:, :width]
        return rows if tensor.ndim == 2 else rows[0]

    def read_fires(self, row: int, declared: Declared) -> None:
        """Add what the gates of the request in `row` counted to its own counts. Waits for the device where it has gates."""
        sites = self.tables.fires.shape[1]
        in_tables = {site: found for site, found in declared.ops.items() if site < sites}
        if all(op.spec.when is None for found in in_tables.values() for op in found):
            return
        counted = self.tables.fires[row].cpu()
        for site, found in in_tables.items():
            first = 0
            for i, op in enumerate(found):
                entries = len(op.windows)
                fires = int(counted[site, first : first + entries].sum())
                declared.fires[site, i] = declared.fires.get((site, i), 0) + fires
                first += entries

    def apply_staged_writes(self) -> None:
        """Write new vectors and rows to the device; nothing waits for it."""
        for first, vectors in self.pool.take_staged():
            (on_device,) = upload(self.device, vectors)
            self.tables.vectors[first : first + len(vectors)] = on_device
        if not self._staged:
            return
        _, sites, depth = self.tables.fires.shape
        rows = np.array(list(self._staged), dtype=np.int64)
        marks = np.zeros(len(rows), dtype=np.int32)
        ops = np.zeros((len(rows), sites, depth, table_edits.WORDS), dtype=np.int32)
        captures = np.full((len(rows), sites, table_edits.CAPTURE_WORDS), -1, dtype=np.int32)
        places: list[tuple[int, int, int]] = []
        whole: list[list[int]] = []
        real: list[list[float]] = []
        for i, (row, declared) in enumerate(self._staged.items()):
            if declared is None:
                self._in_use.discard(row)
                continue
            self._in_use.add(row)
            for site, offset in () if declared.captures is None else declared.captures.offsets.items():
                if site < sites:
                    captures[i, site, :3], marks[i] = (offset, *_way(declared, site)), 1
            for site, found in declared.ops.items():
                entries = (
                    [entry for op in found for entry in _entries(op, declared, self.pool.width)] if site < sites else []
                )
                for k, (words, numbers) in enumerate(entries):
                    words[0] += table_edits.MORE * (k + 1 < len(entries))
                    places.append((i, site, k))
                    whole.append(words)
                    real.append(numbers)
                    marks[i] = 1
        self._staged.clear()
        if places:
            at = tuple(np.array(places).T)
            words = np.array(whole, dtype=np.int32), np.array(real, dtype=np.float32).view(np.int32)
            ops[(*at, slice(sum(part.shape[1] for part in words)))] = np.concatenate(words, axis=1)
        index, *values = upload(self.device, rows, marks, ops, captures)
        for table, value in zip((self._edited, self.tables.ops, self.tables.captures), values, strict=True):
            table.index_copy_(0, index, value)
        self.tables.fires.index_fill_(0, index, 0)


def _way(declared: Declared, site: int) -> tuple[int, int]:
    """The table's words for how a request captures a site: `capture_word`, and the first vector."""
    assert declared.captures is not None
    group, _ = declared.captures.by_site[site]
    if group.probes is not None:
        return table_edits.capture_word(len(group.probes), table_edits.WHOLE), declared.vectors[id(group.probes)]
    code = table_edits.WHOLE if group.converted is None else CONVERTED[group.converted]
    return table_edits.capture_word(0, code), 0


def _entries(op: Op, declared: Declared, width: int) -> Iterator[tuple[list[int], list[float]]]:
    """The table's words for an op, for each of its windows: whole numbers, and those behind them. `width` is that of the pool's
    rows."""
    spec = op.spec
    vectors = [declared.vectors[id(tensor)] for tensor in vectors_of(spec)]
    probe, threshold = (-1, 0.0) if spec.when is None else (vectors.pop(), spec.when.threshold)
    first, rank, norm, low, high, before = vectors[0] if vectors else 0, 1, 0, 0.0, 0.0, 0
    match spec:
        case Steer():
            code, low, norm = table_edits.ADD, spec.scale, NORMS[spec.norm]
        case Ablate():
            code, rank = table_edits.PROJECT_OUT, len(spec.basis)
        case Clamp():
            code = table_edits.CLAMP
            low = -np.inf if spec.low is None else spec.low
            high = np.inf if spec.high is None else spec.high
        case Scale():
            code, low, rank = table_edits.SCALE, spec.factor, 0
        case Patch():
            code, rank = table_edits.PATCH, spec.values.ndim  # 2: a row for each position
    for window in op.windows:
        stop = table_edits.NO_END if window.stop is None else window.stop
        kind = table_edits.kind_word(code, rank, norm)
        yield [kind, first + before, window.start, stop, window.step, probe], [low, high, threshold]
        if isinstance(spec, Patch) and spec.values.ndim == 2:
            before += (window.size or 0) * -(-spec.values.shape[-1] // width)
