"""The hooks of a request on their way from the client to all ranks. Their tensors travel once.

`RequestHooks` are pickled for processes of one engine. Large tensors are left out of the pickle, under a key made of their
content. A rank reads a payload only with the key that its own client gave it (`Sealer`). It never unpickles `extra_args` of
another client of a vLLM server.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..utils.upload import flat_bytes

LEAST_BYTES = 1024
"""Smaller tensors stay in the payload."""
TensorKey = bytes
PackedTensor = tuple[TensorKey, str, tuple[int, ...], bytes]
"""(key, dtype, shape, bytes in row order)."""


class Sealer:
    """Signs payloads, and checks them.

    Args:
        key: secret of a client and its ranks.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sealed(self, data: bytes) -> bytes:
        """`data` with its signature in front."""
        return hmac.digest(self._key, data, "sha256") + data

    def opened(self, sealed: bytes) -> bytes:
        """The data. Raises PermissionError where another key signed it."""
        signature, data = sealed[:32], sealed[32:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, data, "sha256")):
            raise PermissionError("a request's hooks were not signed by this engine's client")
        return data


class TensorKeys:
    """Keys of tensors by content. A tensor that has not changed is hashed once."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> TensorKey:
        """The key of a tensor's dtype, shape and numbers."""
        version = version_of(tensor)
        known = self._known.get(tensor)
        if known is not None and known[0] == version >= 0:
            return known[1]
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
        self._known[tensor] = version, digest.digest()
        return digest.digest()


def version_of(tensor: torch.Tensor) -> int:
    """Another number after each change in place; -1 where torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's numbers, in row order."""
    return flat_bytes(tensor.detach().cpu()).numpy().tobytes()


def packed_tensor(key: TensorKey, tensor: torch.Tensor) -> PackedTensor:
    """A tensor as plain values."""
    return key, str(tensor.dtype)[6:], tuple(tensor.shape), bytes_of(tensor)


def unpacked_tensor(packed: PackedTensor) -> torch.Tensor:
    """The tensor of plain values, in separate memory."""
    _, dtype, shape, data = packed
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


class HookedOnWire(NamedTuple):
    """A request with hooks, as ranks receive it. It is pickled as a plain tuple.

    Attributes:
        specs: pickled interventions and captures (`dumped`).
        vector_rows: see `RequestHooks`.
        trace: fields of a `TraceOnWire`; None without blocks.
    """

    request_id: str
    prompt_len: int
    max_tokens: int
    logits_from: int
    vector_rows: Any
    specs: bytes
    trace: tuple[Any, ...] | None = None


class _HooksPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, keys: TensorKeys, tensors: dict[TensorKey, torch.Tensor]) -> None:
        super().__init__(buffer, protocol=5)
        self._keys, self._tensors = keys, tensors

    def persistent_id(self, obj: Any) -> TensorKey | None:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.nbytes < LEAST_BYTES:
            return None
        key = self._keys.of(obj)
        self._tensors[key] = obj
        return key


def dumped(value: Any, keys: TensorKeys, tensors: dict[TensorKey, torch.Tensor]) -> bytes:
    """A pickle without large tensors, which are added to `tensors`."""
    buffer = io.BytesIO()
    _HooksPickler(buffer, keys, tensors).dump(value)
    return buffer.getvalue()


def loaded(data: bytes, tensors: Mapping[TensorKey, torch.Tensor]) -> Any:
    """The value of `dumped`. Raises KeyError: one of its tensors is not here."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = tensors.__getitem__
    return unpickler.load()
