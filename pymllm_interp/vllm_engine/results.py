"""Results of requests on their way from rank 0 to the client: a pickle, and its tensors.

On one host the client maps the rank's results (`worker.egress.result_arena`), and reads captured states from the ring's copies.
Other tensors are in one block. Between hosts the block of all tensors follows the message.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import mmap
import os
import pickle
import socket
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..hooks.captures.activations import Activations
from ..hooks.captures.streamed import StreamedRows
from ..utils.upload import flat_bytes

ALIGNMENT = 64
SCORES = ""
"""Name of a step's scores among the outcomes of requests."""


class Placed(NamedTuple):
    """Location of a tensor in the message's block."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class SentScores(NamedTuple):
    """Dot products of the monitors in a step, on their way to the client.

    Attributes:
        parts: (request id, first position, first column, stop) of each request.
        values: [slots, tokens] float32, on the host once `copied` has happened.
        copied: CUDA event, or None.
    """

    parts: list[tuple[str, int, int, int]]
    values: torch.Tensor
    copied: Any


class AskedRows(NamedTuple):
    """Positions of a running request, for which the client asks for captured rows (`Capture(stream=True)`).

    Attributes:
        token_ids: tokens of the positions from `start` on.
    """

    request_id: str
    start: int
    token_ids: list[int]

    @property
    def key(self) -> str:
        """Name of the answer among the outcomes of requests; their ids have no space."""
        return f"{self.request_id} rows"


class Shared(NamedTuple):
    """Location of a tensor in the rank's results."""

    start: int
    """Start of the client's block, in bytes."""
    size: int
    """Size of the block, in bytes."""
    offset: int
    """Offset of the tensor from the start of the block, in bytes."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Arena(Protocol):
    """Results that the client maps (`worker.egress.result_arena.ResultArena`)."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor."""
        ...

    def given(self, tensor: torch.Tensor) -> Shared | None:
        """Location of a tensor. Its block then belongs to the client. None if it is not in the arena."""
        ...


def host_name() -> str:
    """Identifier of the host: its name, and the boot's id if readable."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


def pid_space() -> str:
    """Identifier of the namespace that numbers of processes are of; "" if it is not readable. Containers of a host have several."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def send_at_once(connection: Connection) -> None:
    """Have a TCP connection send small messages at once (TCP_NODELAY).

    Else a second message waits until the first one is acknowledged, which systems delay by 40 ms.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TensorBlock:
    """Tensors on their way out, and where each is placed.

    Args:
        arena: arena of the rank, if the client maps it.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.size = 0
        self._arena = arena

    def dumped(self, value: Any) -> bytes:
        """A pickle of a value, with references to its tensors."""
        buffer = io.BytesIO()
        _ResultsPickler(buffer, self).dump(value)
        return buffer.getvalue()

    def place(self, tensor: torch.Tensor) -> Placed | Shared:
        """Add a tensor."""
        if self._arena is not None and (found := self._arena.given(tensor)) is not None:
            return found
        tensor = tensor.detach().cpu().contiguous()
        placed = Placed(self.size, str(tensor.dtype)[6:], tuple(tensor.shape))
        self.tensors.append(tensor)
        self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return placed

    def sent(self) -> Shared | bytes:
        """The block, after `dumped`: in the arena, or its bytes."""
        if self._arena is not None:
            memory = self._arena.empty((self.size,), torch.uint8)
            self._written(memory)
            if (found := self._arena.given(memory)) is not None:
                return found
        else:
            memory = torch.zeros(self.size, dtype=torch.uint8)
            self._written(memory)
        return memory.numpy().tobytes()

    def _written(self, into: torch.Tensor) -> None:
        offset, memory = 0, into.numpy()  # torch takes longer for a few bytes
        for tensor in self.tensors:
            flat = flat_bytes(tensor).numpy()
            memory[offset : offset + len(flat)] = flat
            offset += -(-len(flat) // ALIGNMENT) * ALIGNMENT


class _ResultsPickler(pickle.Pickler):
    """A pickler that is asked about tensors and results only: `persistent_id` would be called for each name and number."""

    def __init__(self, buffer: io.BytesIO, block: TensorBlock) -> None:
        super().__init__(buffer, protocol=5)
        own: dict[type, Callable[[Any], Any]] = {
            torch.Tensor: lambda tensor: (tensor_at, (block.place(tensor),)),
            Activations: lambda found: (Activations, found.as_pieces()),  # a separate pickle would copy each site
            StreamedRows: lambda rows: (list, (rows.sent(),)),  # copies: their memory is the result's
        }
        self.dispatch_table = copyreg.dispatch_table | own


def tensor_at(place: Placed | Shared) -> torch.Tensor:
    """The tensor at a place of a message. `read_block` stands for it there."""
    raise RuntimeError(f"{place} is part of a message that `read_block` reads")


class _ResultsUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, find: Callable[[Placed | Shared], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        return self._find if (module, name) == (__name__, tensor_at.__name__) else super().find_class(module, name)


class SharedResults:
    """The client's mapping of a rank's results.

    Args:
        told: name and size of the file; None if the rank is on another host.
        wake: has `freed` called soon. Called by finalizers.

    Attributes:
        mapped: whether results come that way.
    """

    def __init__(self, told: tuple[str, int] | None, wake: Callable[[], None]) -> None:
        self._freed: deque[int] = deque()
        self._wake = wake
        self._mapping: mmap.mmap | None = None
        if told is not None:
            with contextlib.suppress(OSError), open(told[0], "r+b") as file:
                self._mapping = mmap.mmap(file.fileno(), told[1])

    @property
    def mapped(self) -> bool:
        return self._mapping is not None

    def block(self, start: int, size: int) -> torch.Tensor:
        """[size] uint8, the client's until its last view is gone."""
        assert self._mapping is not None, "the rank was told that nothing is mapped"
        memory = np.frombuffer(self._mapping, np.uint8, size, start)
        weakref.finalize(memory, self._free, start).atexit = False
        return torch.from_numpy(memory)

    def freed(self) -> list[int]:
        """Starts of blocks that lost their last view, once each."""
        found: list[int] = []
        while self._freed:
            found.append(self._freed.popleft())
        return found

    def _free(self, start: int) -> None:
        self._freed.append(start)
        with contextlib.suppress(Exception):  # the loop has ended
            self._wake()


def read_block(pickled: bytes, sent: Shared | bytes | None, shared: SharedResults | None = None) -> Any:
    """The value of a pickle.

    Args:
        sent: result of `TensorBlock.sent`; None without tensors.
        shared: the mapping, if the rank has one.
    """
    blocks: dict[int, torch.Tensor] = {}
    if isinstance(sent, Shared):
        assert shared is not None, "only a mapped arena is written to"
        memory = shared.block(sent.start, sent.size)
    else:
        memory = torch.frombuffer(bytearray(sent), dtype=torch.uint8) if sent else torch.empty(0, dtype=torch.uint8)

    def find(place: Placed | Shared) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, place.dtype)
        if isinstance(place, Placed):
            count = kind.itemsize
            for length in place.shape:
                count *= length
            return memory[place.offset : place.offset + count].view(kind).reshape(place.shape)
        assert shared is not None, "only a mapped arena is written to"
        if place.start not in blocks:
            blocks[place.start] = shared.block(place.start, place.size)
        whole = blocks[place.start].view(kind)
        return whole.as_strided(place.shape, place.stride, place.offset // kind.itemsize)

    return _ResultsUnpickler(pickled, find).load()
