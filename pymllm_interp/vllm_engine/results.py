"""Results of requests on their way from rank 0 to the client: a pickle, with its tensors in one block.

On one host the block is a file in shared memory. The client maps and unlinks it, and its tensors are views of it. Between hosts the
block follows the message.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .payloads import LEAST_BYTES, loaded

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
PREFIX = "pymllm-interp-"


class Placed(NamedTuple):
    """Where a tensor is in the block."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


def host_name() -> str:
    """What tells hosts apart: a name, and where it is readable the boot's id."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


class TensorBlock:
    """Tensors on their way out, and where each is placed."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.size = 0

    def dumped(self, value: Any) -> bytes:
        """A pickle of a value, with references to its tensors in this block."""
        import io
        import pickle

        block = self

        class ResultsPickler(pickle.Pickler):
            def persistent_id(self, obj: Any) -> Placed | None:
                if type(obj) is not torch.Tensor or obj.nbytes < LEAST_BYTES:
                    return None
                return block.place(obj)

        buffer = io.BytesIO()
        ResultsPickler(buffer, protocol=5).dump(value)
        return buffer.getvalue()

    def place(self, tensor: torch.Tensor) -> Placed:
        """Add a tensor."""
        tensor = tensor.detach().cpu().contiguous()
        placed = Placed(self.size, str(tensor.dtype)[6:], tuple(tensor.shape))
        self.tensors.append(tensor)
        self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return placed

    def written(self, into: torch.Tensor) -> None:
        """Copy all tensors into `into` [size] uint8."""
        offset = 0
        for tensor in self.tensors:
            flat = tensor.reshape(-1).view(torch.uint8)
            into[offset : offset + len(flat)].copy_(flat)
            offset += -(-len(flat) // ALIGNMENT) * ALIGNMENT

    def to_file(self) -> str:
        """Write the block to a file in shared memory that only this user can read. Returns its name."""
        name = str(SHARED_MEMORY / f"{PREFIX}{secrets.token_hex(12)}")
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        os.truncate(name, self.size)
        self.written(torch.from_file(name, shared=True, size=self.size, dtype=torch.uint8))
        return name

    def to_bytes(self) -> bytes:
        """The block's bytes."""
        found = torch.zeros(self.size, dtype=torch.uint8)
        self.written(found)
        return found.numpy().tobytes()


def read_block(pickled: bytes, file: str | None, data: bytes | None) -> Any:
    """The value of a pickle and its block.

    Args:
        file: in shared memory, which is unlinked here.
        data: the bytes, where there is no file.
    """
    if file is not None:
        size = os.stat(file).st_size
        memory = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
        os.unlink(file)
    else:
        memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def find(placed: Sequence[Any]) -> torch.Tensor:
        offset, dtype, shape = placed
        kind: torch.dtype = getattr(torch, dtype)
        count = kind.itemsize
        for length in shape:
            count *= length
        return memory[offset : offset + count].view(kind).reshape(tuple(shape))

    return loaded(pickled, find)
