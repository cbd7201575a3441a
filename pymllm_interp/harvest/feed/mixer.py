"""`RowMixer`: rows of documents become shuffled batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...hooks.captures.egress.device_memory import DeviceMemory
from ...utils.upload import upload


@dataclass(frozen=True, eq=False)
class MixedRows:
    """Rows of all sites, and where they are from.

    Attributes:
        index: [rows, 3] int64 on the CPU: document, position in it, token.
        states: site -> [rows, ...] on the device.
    """

    index: torch.Tensor
    states: Mapping[str, torch.Tensor]


class RowMixer:
    """Rows that wait for their batch: a shuffle buffer, and rows behind it in their order.

    A full buffer gives a batch of random rows, and takes as many new ones in their places. So each row comes once, and batches
    come as evenly as documents do. Without a buffer batches have the order of the documents.

    Args:
        rows: rows of a batch.
        capacity: rows of the buffer; 0 for none.
        memory: memory of the buffer.
        random: source of the order.
    """

    def __init__(self, rows: int, capacity: int, memory: DeviceMemory, random: np.random.Generator) -> None:
        self.random = random
        self._rows, self._capacity, self._memory = rows, capacity, memory
        self._index = torch.zeros((capacity, 3), dtype=torch.int64)
        self._buffers: dict[str, torch.Tensor] = {}
        self._filled = self._num_waiting = 0
        self._waiting: deque[MixedRows] = deque()

    @property
    def held(self) -> torch.Tensor:
        """[rows, 2] int64: document and position of all rows in here. The buffer comes first."""
        return torch.cat([self._index[: self._filled], *(piece.index for piece in self._waiting)])[:, :2]

    def add(self, rows: MixedRows) -> None:
        """Take in rows, behind all others."""
        if len(rows.index):
            for states in rows.states.values():
                _on_this_stream(states)
            self._waiting.append(rows)
            self._num_waiting += len(rows.index)
            self._fill()

    def batches(self, last: bool) -> Iterator[MixedRows]:
        """The batches that can be made.

        Args:
            last: no further rows come: the last batch may be shorter.
        """
        while (self._num_waiting >= self._rows and self._filled == self._capacity) or (last and self._total):
            yield self._shuffled() if self._capacity else self._take(min(self._rows, self._num_waiting))

    @property
    def _total(self) -> int:
        return self._filled + self._num_waiting

    def _fill(self) -> None:
        """Move rows to free places of the buffer."""
        while self._filled < self._capacity and self._num_waiting:
            taken = self._take(min(self._capacity - self._filled, self._num_waiting))
            self._write(np.arange(self._filled, self._filled + len(taken.index)), taken)
            self._filled += len(taken.index)

    def _shuffled(self) -> MixedRows:
        """A batch out of the buffer; waiting rows take the places."""
        places = self.random.choice(self._filled, min(self._rows, self._filled), replace=False)
        found = self._read(places)
        count = min(len(places), self._num_waiting)
        if count:
            self._write(places[:count], self._take(count))
        if len(free := places[count:]):  # the input has ended: rows of the end of the buffer close the gaps
            kept = self._filled - len(free)
            moved = np.setdiff1d(np.arange(kept, self._filled), free)
            if len(moved):
                self._write(np.sort(free)[: len(moved)], self._read(moved))
            self._filled = kept
        return found

    def _take(self, count: int) -> MixedRows:
        """The first `count` waiting rows."""
        taken: list[MixedRows] = []
        self._num_waiting -= count
        while count:
            piece = self._waiting.popleft()
            if len(piece.index) > count:
                self._waiting.appendleft(_part(piece, slice(count, None)))
                piece = _part(piece, slice(count))
            taken.append(piece)
            count -= len(piece.index)
        states = {site: torch.cat([piece.states[site] for piece in taken]) for site in taken[0].states}
        return MixedRows(torch.cat([piece.index for piece in taken]), states)

    def _read(self, places: np.ndarray) -> MixedRows:
        (on_device,) = upload(self._memory.device, places)
        states = {site: buffer.index_select(0, on_device) for site, buffer in self._buffers.items()}
        return MixedRows(self._index[torch.from_numpy(places)], states)

    def _write(self, places: np.ndarray, rows: MixedRows) -> None:
        (on_device,) = upload(self._memory.device, places)
        self._index[torch.from_numpy(places)] = rows.index
        for site, states in rows.states.items():
            if site not in self._buffers:
                shape = self._capacity, *states.shape[1:]
                self._buffers[site] = _on_this_stream(self._memory.empty(shape, states.dtype))
            self._buffers[site].index_copy_(0, on_device, states)


def _part(rows: MixedRows, part: slice) -> MixedRows:
    return MixedRows(rows.index[part], {site: states[part] for site, states in rows.states.items()})


def _on_this_stream(states: torch.Tensor) -> torch.Tensor:
    """The tensor. Its memory is not reused before this stream has done with it, whatever stream made it."""
    if states.is_cuda:
        states.record_stream(torch.cuda.current_stream(states.device))
    return states
