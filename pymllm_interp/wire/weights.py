"""New weights from another process of this machine: handles as JSON, never pickles.

Tensors on a CPU are in one segment of shared memory, which the engine copies. Tensors on a GPU have CUDA IPC handles::

    with SentWeights(trainer.named_parameters()) as sent:
        post(sent.info)                         # {"names": ..., "dtype_names": ..., "shapes": ..., "segment": ...}
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import math
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import torch
from torch import Tensor

from ..models.weights.loading import WeightsError, check_readable
from ..utils.upload import flat_bytes

FOLDER = Path("/dev/shm")
SEGMENT = re.compile(r"pymllm-interp-weights-[0-9a-f]{32}")
MAX_TENSORS = 1 << 17
COUNTER = re.compile(rb"/torch_[0-9_]{1,64}")
MAX_COUNTERS = 10_000  # CUDA_IPC_REF_COUNTER_FILE_SIZE
ALIGNED = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.int32,
                  torch.int64, torch.int8)
}  # fmt: skip
HANDLE = (
    "device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
    "ref_counter_offset", "event_handle", "event_sync_required",
)  # fmt: skip
"""Fields of torch's description of shared CUDA memory, in its order, behind the tensor's."""


class SentWeights:
    """Named tensors that another process may read while the ``with`` block runs. They are all on a CPU, or all on one GPU.

    Attributes:
        info: vLLM's `update_info`, as JSON.
    """

    def __init__(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        named = [(name, tensor.detach()) for name, tensor in dict(weights).items()]
        for each in named:
            check_readable(*each)
        self._kept = [tensor.contiguous() for _, tensor in named]
        self.info: dict[str, Any] = {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self._kept],
            "shapes": [list(tensor.shape) for tensor in self._kept],
        }
        kinds = {tensor.device for tensor in self._kept}
        if len(kinds) > 1:
            raise WeightsError(f"the weights are on {len(kinds)} devices; send them from one")
        self._on_cuda = kinds != {torch.device("cpu")}
        self._path = FOLDER / f"pymllm-interp-weights-{uuid4().hex}"

    @property
    def backend(self) -> str:
        """Kind of the handles: "ipc" or "shared_memory"."""
        return "ipc" if self._on_cuda else "shared_memory"

    def __enter__(self) -> Self:
        if self._on_cuda:
            self.info["ipc_handles"] = [_cuda_handle(tensor) for tensor in self._kept]
            return self
        try:
            self.info |= {"segment": self._path.name, "offsets": self._write()}
        except BaseException:
            self._path.unlink(missing_ok=True)  # the folder is full, and no `__exit__` follows
            raise
        return self

    def _write(self) -> list[int]:
        """Write the tensors to the segment. Returns their offsets."""
        offsets, end = list[int](), 0
        with open(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            for tensor in self._kept:
                offsets.append(end)
                file.seek(end)
                file.write(flat_bytes(tensor).numpy().data)
                end = -(-(end + tensor.nbytes) // ALIGNED) * ALIGNED
            file.truncate(end)
        return offsets

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)
        self._kept.clear()

    def take_back(self) -> None:
        """End handles that no process has opened."""
        for handles in self.info.get("ipc_handles", ()):
            _give_back(handles)


def _cuda_handle(tensor: Tensor) -> dict[str, dict[str, Any]]:
    from torch.multiprocessing.reductions import reduce_tensor

    args: Any = reduce_tensor(tensor)[1]
    fields = dict(zip(HANDLE, args[6:], strict=True))
    found = {name: base64.b64encode(v).decode() if isinstance(v, bytes) else v for name, v in fields.items()}
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return {uuid: found | {"offset": args[3], "stride": list(args[2])}}


def received(info: Mapping[str, Any], device: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a `SentWeights.info` from another process.
    Raises WeightsError: an invalid description, handles of another GPU or of a process that has ended, or pickled handles."""
    handles = info.get("ipc_handles")
    left = deque(handles[:MAX_TENSORS] if isinstance(handles, list) else ())
    try:
        yield from _received(info, left, device)
    finally:
        for one in left:
            _give_back(one)


def _received(info: Mapping[str, Any], left: deque[Any], device: str) -> Iterator[tuple[str, Tensor]]:
    """`received`; `left` are the handles, which leave it when they are open."""
    if "ipc_handles_pickled" in info:
        raise WeightsError(
            "ipc_handles_pickled: pickles run code, and are not read; send ipc_handles as JSON (wire/weights.py)"
        )
    names, dtypes, shapes = (_list(info, name) for name in ("names", "dtype_names", "shapes"))
    where = _list(info, "ipc_handles" if "ipc_handles" in info else "offsets")
    if len({len(names), len(dtypes), len(shapes), len(where)}) > 1:
        raise WeightsError("names, dtype_names, shapes, and offsets or ipc_handles are lists of one length")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES or not _is_sizes(shape):
            raise WeightsError(
                f"{str(name)[:200]}: {str(dtype)[:40]} {str(shape)[:80]} is no tensor; dtypes: {', '.join(DTYPES)}"
            )
    if "ipc_handles" in info:
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            yield name, _of_cuda_handle(name, DTYPES[dtype], shape, left, device)
        return
    segment = info.get("segment")
    if not isinstance(segment, str) or SEGMENT.fullmatch(segment) is None:
        raise WeightsError("segment: expected the name of a segment of SentWeights")
    try:
        file = open(os.open(FOLDER / segment, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError as error:
        raise WeightsError(f"segment {segment}: {error.strerror}; its process may have ended") from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise WeightsError(f"segment {segment} is no segment of memory")
        for name, dtype, shape, offset in zip(names, dtypes, shapes, where, strict=True):
            yield name, _read(file, status.st_size, name, DTYPES[dtype], shape, offset)


def _read(file: Any, size: int, name: str, dtype: torch.dtype, shape: list[int], offset: Any) -> Tensor:
    """A private copy: the sender may change or cut the segment at any time."""
    count = math.prod(shape) * dtype.itemsize
    if not isinstance(offset, int) or not 0 <= offset <= size - count:
        raise WeightsError(f"{name}: {count} bytes at {offset} are not in the segment of {size}")
    found = torch.empty(count, dtype=torch.uint8)
    file.seek(offset)
    if file.readinto(found.numpy().data) != count:
        raise WeightsError(f"{name}: the segment ends early")
    return found.view(dtype).view(shape)


def _give_back(handles: Any) -> None:
    """End handles that no process opens: torch counts an opener for each, and keeps the sender's memory for it."""
    for given in handles.values() if isinstance(handles, dict) else ():
        with contextlib.suppress(
            WeightsError, RuntimeError, TypeError, LookupError
        ):  # no handle, or of an ended process
            _check_counter("", given)
            counter = base64.b64decode(given["ref_counter_handle"]), given["ref_counter_offset"]
            torch.UntypedStorage._release_ipc_counter(*counter)


def _of_cuda_handle(name: str, dtype: torch.dtype, shape: list[int], left: deque[Any], device: str) -> Tensor:
    """The tensor of the first handle of `left`. An open one leaves it: torch ends that one with its storage."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    if not device.startswith("cuda"):
        raise WeightsError(f"{name}: a CUDA IPC handle, and the model is on {device}")
    own = torch.device(device)
    uuid = str(torch.cuda.get_device_properties(own).uuid)
    given = left[0].get(uuid) if isinstance(left[0], dict) else None
    if not isinstance(given, dict) or not {*HANDLE, "offset", "stride"} <= given.keys():
        raise WeightsError(f"{name}: ipc_handles has no handle of this GPU, {uuid}")
    fields, stride, offset = [given[field] for field in HANDLE], given["stride"], given["offset"]
    if not _is_sizes(stride) or len(stride) != len(shape) or not isinstance(offset, int):
        raise WeightsError(f"{name}: its stride or offset is no tensor's")
    _check_counter(name, given)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if not 0 <= offset <= last or (last + 1) * dtype.itemsize > int(fields[2]):
        raise WeightsError(f"{name}: it is not in its storage of {fields[2]} bytes")
    try:
        fields = [base64.b64decode(f) if isinstance(f, str) else f for f in fields]
        fields[0] = torch.cuda.current_device() if own.index is None else own.index
        storage = torch.storage.TypedStorage
        found = rebuild_cuda_tensor(Tensor, torch.Size(shape), tuple(stride), offset, storage, dtype, *fields)
        left.popleft()
        if found.numel() and found.data_ptr() + (last - offset + 1) * dtype.itemsize > _end_of_memory(found):
            raise WeightsError(f"{name}: its memory ends before its storage of {fields[2]} bytes")  # the sender's word
        return found
    except (RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{name}: its CUDA IPC handle cannot be opened, its process may have ended: {error}"
        ) from error


def _end_of_memory(tensor: Tensor) -> int:
    """Address behind the device memory that a tensor is in, as the driver knows it. Raises RuntimeError: it knows none."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(tensor.data_ptr())
    if (code := driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)) != 0:
        raise RuntimeError(f"cuMemGetAddressRange failed with {code}")
    return base.value + size.value


def _check_counter(name: str, given: Mapping[str, Any]) -> None:
    """Torch opens the counter's memory by its name, and writes to it at the offset, without a check of either.
    Raises WeightsError: they are not as torch makes them."""
    handle, place, start = (
        given[field] for field in ("ref_counter_handle", "ref_counter_offset", "storage_offset_bytes")
    )
    try:
        known = COUNTER.fullmatch(base64.b64decode(handle, validate=True)) is not None
    except (TypeError, ValueError):
        known = False
    if not known or type(place) is not int or not 0 <= place < MAX_COUNTERS or type(start) is not int or start < 0:
        raise WeightsError(f"{name}: the counter or offset of its CUDA IPC handle is not of torch's making")


def _list(info: Mapping[str, Any], name: str) -> list[Any]:
    found = info.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TENSORS:
        raise WeightsError(f"{name}: expected a list of 1 to {MAX_TENSORS} values")
    return found


def _is_sizes(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) <= 8 and all(type(size) is int and 0 <= size < 1 << 40 for size in value)
    )
