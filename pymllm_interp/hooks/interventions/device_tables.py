"""`DeviceTables`: declared ops and captures as rows of tables that kernels read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ...core.model_spec import ModelSpec
from ...core.upload import upload
from ...layers.edits import codes
from ...layers.edits.codes import OpTables
from ..declared import Declared, Limits, Op
from .reference import vectors_of
from .specs import Ablate, Clamp, Patch, Scale, Steer
from .vector_pool import VectorPool

CONVERTED = {torch.float16: codes.FLOAT16, torch.bfloat16: codes.BFLOAT16}
NORMS = {"none": codes.NO_NORM, "preserve": codes.PRESERVE, "match": codes.MATCH}


class DeviceTables:
    """The tables that kernels read, and which row of the request table has what in them.

    Rows are staged, and written together before a step.

    Args:
        edited: [rows] int32 on the device: 1 is written for rows that have ops or captures, so that kernels need not look for
            them elsewhere.
        ring: [elements], where captured states go.
    """

    def __init__(self, edited: torch.Tensor, model: ModelSpec, limits: Limits, ring: torch.Tensor) -> None:
        rows, device = len(edited), edited.device
        self.tables = OpTables.empty(
            rows, model.num_hidden_layers, limits.max_interventions_per_site, limits.max_intervention_vectors,
            model.hidden_size, ring, limits.inner_sites,
            all(model.width(kind) % codes.ALIGNED == 0 for kind in ("resid_post", *limits.inner_sites)),
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
        ops = np.zeros((len(rows), sites, depth, codes.WORDS), dtype=np.int32)
        captures = np.full((len(rows), sites, codes.CAPTURE_WORDS), -1, dtype=np.int32)
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
                    words[0] += codes.MORE * (k + 1 < len(entries))
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
        return codes.capture_word(len(group.probes), codes.WHOLE), declared.vectors[id(group.probes)]
    code = codes.WHOLE if group.converted is None else CONVERTED[group.converted]
    return codes.capture_word(0, code), 0


def _entries(op: Op, declared: Declared, width: int) -> Iterator[tuple[list[int], list[float]]]:
    """The table's words for an op, for each of its windows: whole numbers, and those behind them. `width` is that of the pool's
    rows."""
    spec = op.spec
    vectors = [declared.vectors[id(tensor)] for tensor in vectors_of(spec)]
    probe, threshold = (-1, 0.0) if spec.when is None else (vectors.pop(), spec.when.threshold)
    first, rank, norm, low, high, before = vectors[0] if vectors else 0, 1, 0, 0.0, 0.0, 0
    match spec:
        case Steer():
            code, low, norm = codes.ADD, spec.scale, NORMS[spec.norm]
        case Ablate():
            code, rank = codes.PROJECT_OUT, len(spec.basis)
        case Clamp():
            code = codes.CLAMP
            low = -np.inf if spec.low is None else spec.low
            high = np.inf if spec.high is None else spec.high
        case Scale():
            code, low, rank = codes.SCALE, spec.factor, 0
        case Patch():
            code, rank = codes.PATCH, spec.values.ndim  # 2: a row for each position
    for window in op.windows:
        stop = codes.NO_END if window.stop is None else window.stop
        kind = codes.kind_word(code, rank, norm)
        yield [kind, first + before, window.start, stop, window.step, probe], [low, high, threshold]
        if isinstance(spec, Patch) and spec.values.ndim == 2:
            before += (window.size or 0) * -(-spec.values.shape[-1] // width)
