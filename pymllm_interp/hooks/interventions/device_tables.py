"""`DeviceTables`: the declared ops and captures of live requests, in tables that kernels read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.model_spec import ModelSpec
from ...core.step import VectorRow
from ...kernels import edit_codes as codes
from ...kernels.edit_codes import OpTables
from ...utils.upload import upload
from ..bind import DeclaredLimits
from ..bound_hooks import PlacedOp
from ..declared import Declared
from .gates import GateRead
from .sae_op import SAEOp
from .vector_pool import num_rows


class _Words(NamedTuple):
    """Nonzero words of a row, and their indexes among the entries of a table."""

    op_places: np.ndarray  # [n] int64
    op_words: np.ndarray  # [n, WORDS] int32
    capture_places: np.ndarray  # [m] int64
    capture_words: np.ndarray  # [m, CAPTURE_WORDS] int32

    @classmethod
    def none(cls) -> _Words:
        return cls(
            np.zeros(0, np.int64), np.zeros((0, codes.WORDS), np.int32),
            np.zeros(0, np.int64), np.zeros((0, codes.CAPTURE_WORDS), np.int32),
        )  # fmt: skip

    def at_row(self, row: int, tables: OpTables) -> _Words:
        """The same for another row of the tables."""
        sites, depth = tables.fires.shape[1:3]
        return self._replace(
            op_places=self.op_places + row * sites * depth, capture_places=self.capture_places + row * sites
        )


CONVERTED = {torch.float16: codes.FLOAT16, torch.bfloat16: codes.BFLOAT16}


class DeviceTables:
    """Writes the ops and captures of requests to `OpTables`. Writes are staged, and applied together before a step.

    Args:
        edited: [rows] int32 on the device; set to 1 for rows with ops or captures.
        model: spec with the layers and widths that size the tables.
        limits: further sizes of the tables.
        ring: [elements] on the device, the memory that kernels write captured states to.

    `limits.encoders` has the SAEs that passes encode.
    """

    def __init__(self, edited: torch.Tensor, model: ModelSpec, limits: DeclaredLimits, ring: torch.Tensor) -> None:
        rows, device = len(edited), edited.device
        self.tables = OpTables.empty(
            rows, model.num_hidden_layers, limits.max_interventions_per_site, limits.max_intervention_vectors,
            model.hidden_size, ring, limits.inner_sites,
            all(model.width(kind) % codes.ALIGNED == 0 for kind in ("resid_post", *limits.inner_sites)), model.head_dim,
            {} if limits.encoders is None else limits.encoders.by_site,
            frozenset() if limits.encoders is None else limits.encoders.sites,
        )  # fmt: skip
        self.device, self._edited, self._limits = device, edited, limits
        self._width = model.hidden_size
        self._in_use: set[int] = set()
        self._staged: dict[int, Declared | None] = {}
        self._staged_fires: list[tuple[int, int]] = []  # index in `first_fired`, position
        self._vectors: dict[int, tuple[Any, int]] = {}  # first row -> key of the vector there, and its rows
        self._first_row: dict[int, int] = {}  # row -> first row of the vector that was last written there
        self._staged_vectors: dict[int, torch.Tensor] = {}

    def set_row(self, row: int, declared: Declared | None, vector_rows: Sequence[VectorRow] = ()) -> None:
        """Stage the ops and captures of the request that gets this row; None for a request without.

        Args:
            vector_rows: rows of each of `BoundHooks.tensors`. Vectors that are present are not written again.
        """
        if declared is not None:
            self._stage_vectors(declared, vector_rows)
        if declared is not None or row in self._in_use:
            self._staged[row] = declared

    def _stage_vectors(self, declared: Declared, vector_rows: Sequence[VectorRow]) -> None:
        tensors = declared.hooks.tensors
        declared.vectors = {id(tensor): first for tensor, (first, _) in zip(tensors, vector_rows, strict=True)}
        for tensor, (first, key) in zip(tensors, vector_rows, strict=True):
            placed = key, num_rows(tensor, self._width)
            if self._vectors.get(first) == placed:
                continue
            own = range(first, first + placed[1])
            for row in own:
                self._vectors.pop(self._first_row.get(row, row), None)
            self._first_row |= dict.fromkeys(own, first)
            self._vectors[first] = placed
            short = -tensor.shape[-1] % self._width
            rows = (torch.nn.functional.pad(tensor, (0, short)) if short else tensor).reshape(-1, self._width)
            self._staged_vectors |= dict(zip(own, rows, strict=True))

    def _write_vectors(self) -> None:
        if self._staged_vectors:
            vectors = torch.stack(list(self._staged_vectors.values())).float().cpu()
            index, on_device = upload(self.device, np.array(list(self._staged_vectors)), vectors)
            self.tables.vectors.index_copy_(0, index, on_device)
            self._staged_vectors.clear()

    def pool_view(self, declared: Declared, tensor: torch.Tensor) -> torch.Tensor:
        """A view of one of a request's vectors in the pool, on the device, in the vector's shape."""
        first, width = declared.vectors[id(tensor)], tensor.shape[-1]
        count = tensor.numel() // width
        rows = self.tables.vectors[first : first + num_rows(tensor, self._width)].view(count, -1)[:, :width]
        return rows if tensor.ndim == 2 else rows[0]

    def set_fired(self, row: int, slot: int, position: int) -> None:
        """Stage the first position at which ops behind a monitor's flag act. A row that is staged reads it from its request."""
        if row not in self._staged:
            self._staged_fires.append((row * codes.MAX_GATES + slot, position))

    def read_gates(self, row: int, declared: Declared) -> None:
        """Add the fires that kernels counted in `row` to ``declared.fires``, and keep the decisions of the request's prompt.

        Waits for the device if there are gates.
        """
        sites = self.tables.fires.shape[1]
        in_tables = {site: found for site, found in declared.hooks.ops.items() if site < sites}
        if all(op.spec.when is None for found in in_tables.values() for op in found):
            return
        if any(op.flag is not None and op.flag.prompt_len is not None for op in declared.hooks):
            declared.first_fired = dict(enumerate(self.tables.first_fired[row].cpu()))
        counted = self.tables.fires[row].cpu()
        for site, found in in_tables.items():
            first = 0
            for i, op in enumerate(found):
                entries = len(op.windows)
                for fires, last, _ in counted[site, first : first + entries].tolist():
                    declared.fires.add_counted((site, i), fires, last)
                first += entries

    def apply_staged_writes(self) -> None:
        """Upload staged vectors and rows, without waiting for the device."""
        self._write_vectors()
        if self._staged_fires:
            places, positions = np.array(self._staged_fires, dtype=np.int64).T
            self._staged_fires.clear()
            index, first = upload(self.device, np.ascontiguousarray(places), positions.astype(np.int32))
            self.tables.first_fired.view(-1).index_copy_(0, index, first)
        if not self._staged:
            return
        rows = np.array(list(self._staged), dtype=np.int64)
        marks = np.zeros(len(rows), dtype=np.int32)
        since = np.zeros(len(rows), dtype=np.int32)
        first_fired = np.full((len(rows), codes.MAX_GATES), codes.NO_END, np.int32)
        wanted = np.full((len(rows), codes.FEATURE_COLUMNS if self._limits.encoders else 0), -1, dtype=np.int64)
        written: list[_Words] = []
        for i, (row, declared) in enumerate(self._staged.items()):
            if declared is None:
                self._in_use.discard(row)
                continue
            self._in_use.add(row)
            since[i] = declared.fires.since
            for slot, position in declared.first_fired.items():  # decisions from before a preemption
                first_fired[i, slot] = int(position)
            for column, entry in (entry for read in declared.hooks.reads for entry in read.wanted()):
                wanted[i, column] = entry
            found = self._words_of(declared)
            marks[i] = bool(len(found.op_places) or len(found.capture_places))
            written.append(found.at_row(row, self.tables))
        self._staged.clear()
        found = _Words(*map(np.concatenate, zip(*written, strict=True))) if written else _Words.none()
        index, marks, since, first_fired, wanted, *words = upload(
            self.device, rows, marks, since, first_fired, wanted, *found
        )
        self._edited.index_copy_(0, index, marks)
        self.tables.first_fired.index_copy_(0, index, first_fired)
        self.tables.fires.index_fill_(0, index, 0)
        self.tables.fires[..., 2].index_add_(0, index, since[:, None, None].expand(-1, *self.tables.fires.shape[1:3]))
        if self.tables.wanted is not None:
            self.tables.wanted.index_copy_(0, index, wanted)
        for table, empty, places, values in zip(
            (self.tables.ops, self.tables.captures), (0, -1), words[::2], words[1::2], strict=True
        ):
            table.index_fill_(0, index, empty)
            if len(places):
                table.view(-1, table.shape[-1]).index_copy_(0, places, values)

    def _words_of(self, declared: Declared) -> _Words:
        """Table words of a request, as if it had the first row. Cached for requests with the same hooks and vectors."""
        key = "words", self.tables.fires.shape[1:], *declared.vectors.values()
        if key not in declared.hooks.shared:
            declared.hooks.shared[key] = self._made_words(declared)
        return declared.hooks.shared[key]

    def _made_words(self, declared: Declared) -> _Words:
        sites, depth = self.tables.fires.shape[1:3]
        op_places: list[int] = []
        op_words: list[np.ndarray] = []
        for site, found in declared.hooks.ops.items():
            entries = [entry for op in found for entry in self._entries(op, declared, site)] if site < sites else []
            for k, (words, numbers, of_heads) in enumerate(entries):
                words[0] += codes.MORE * (k + 1 < len(entries))
                op_places.append(site * depth + k)
                parts = np.array(words), np.array(numbers, dtype=np.float32).view(np.int32), np.array(of_heads)
                op_words.append(np.concatenate(parts, dtype=np.int32))
        captured = [
            (site, (offset, *_capture_words(declared, site), -1))
            for site, offset in (() if declared.captures is None else declared.captures.layout.offsets.items())
            if site < sites
        ]
        found = _Words.none()
        if op_places:
            found = found._replace(op_places=np.array(op_places, dtype=np.int64), op_words=np.stack(op_words))
        if captured:
            places, words = zip(*captured, strict=True)
            found = found._replace(
                capture_places=np.array(places, dtype=np.int64), capture_words=np.array(words, dtype=np.int32)
            )
        return found

    def _entries(
        self, op: PlacedOp, declared: Declared, site: int
    ) -> Iterator[tuple[list[int], list[float], list[int]]]:
        """The words of an op at a site, an entry for each window: integers, floats, then heads."""
        spec = op.spec
        words = spec.words()
        assert words is not None, f"{spec.name} has no kernel"  # `BoundHooks.of` refuses it
        rows = [declared.vectors[id(tensor)] for tensor in spec.vectors]
        probe, threshold = (rows[-1], spec.when.threshold) if spec.tests_rows else (-1, 0.0)
        if op.flag is not None:
            probe = codes.flag_word(op.flag.slot, op.flag.prompt_len is not None)
        if isinstance(spec, GateRead):
            threshold = spec.threshold
        a = words.a
        if isinstance(spec, SAEOp) and op.read is not None:
            a = float(op.read.column + (spec.columns.start or 0 if spec.reads is None else 1))
        first = rows[0] if spec.operands else 0
        per_position = -(-spec.operands[0].shape[-1] // self._width) if words.row_per_position else 0
        kind, values = codes.kind_word(words), [a, words.b, threshold]
        heads = codes.head_words(spec.heads)
        for window in op.windows:
            stop = codes.NO_END if window.stop is None else window.stop
            yield [kind, first, window.start, stop, window.step, probe], values, heads
            first += (window.size or 0) * per_position


def _capture_words(declared: Declared, site: int) -> tuple[int, int]:
    """`capture_word` of a request's capture at a site, and the row of its first vector."""
    assert declared.captures is not None
    group, _ = declared.captures.layout.by_site[site]
    if group.probes is not None:
        return codes.capture_word(len(group.probes), codes.WHOLE), declared.vectors[id(group.probes)]
    code = codes.WHOLE if group.converted is None else CONVERTED[group.converted]
    return codes.capture_word(0, code), 0
