"""Pieces: storages that many saves of one pass share, and that are copied to the caller's device in one call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(slots=True)
class Piece:
    """A storage shared by saves of one pass, one shape and one dtype. It was packed for them, or is the batch's own."""

    memory: StorageWeakRef
    """Alive as long as one of the tensors is. While this reference exists, no other storage has the same `cdata`."""
    tensors: list[weakref.ref[torch.Tensor]]
    """The saves. Tensors that a block drops are freed."""
    versions: list[int]
    """`Tensor._version` of each tensor at the end of the pass."""
    copies: Future[Sequence[torch.Tensor]] | None
    """Copies of the storage's rows on the caller's device; None if none was started, or they were collected."""
    rows: Sequence[int]
    """Index into `copies` for each tensor."""


class PieceCutter:
    """Cuts pieces that arrive in pinned memory into tensors with separate storage, on one thread.

    Pinned memory is shared by the whole machine, so a piece is started only if `reserve` grants it.
    """

    MAX_IN_FLIGHT = 256 << 20
    """Bytes in flight at most."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pymllm-interp-saves")
        self._lock = threading.Lock()
        self._in_flight = 0

    def reserve(self, nbytes: int) -> bool:
        """Reserve pinned memory for a piece. Returns False if too much is in flight."""
        with self._lock:
            if self._in_flight + nbytes > self.MAX_IN_FLIGHT:
                return False
            self._in_flight += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Release what `reserve` granted."""
        with self._lock:
            self._in_flight -= nbytes

    def cut(self, piece: torch.Tensor, arrived: torch.cuda.Event | None) -> Future[Sequence[torch.Tensor]]:
        """Cut a piece into its rows once it has arrived, then release its reservation.

        Args:
            piece: [rows, ...] with a reservation of ``piece.nbytes``.
            arrived: event recorded after the copy; None if the values are there already.
        """
        return self._thread.submit(self._cut, piece, arrived)

    def _cut(self, piece: torch.Tensor, arrived: torch.cuda.Event | None) -> Sequence[torch.Tensor]:
        try:
            if arrived is not None:
                arrived.synchronize()
            copies: Any = torch.unbind_copy(piece)
            return copies
        finally:
            self.release(piece.nbytes)


cutter = PieceCutter()
"""The cutter of all transfers in the process."""


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all saves leave `device`. A stream per transfer would exhaust torch's pool, which reuses streams."""
    return torch.cuda.Stream(device)
