"""`SaveTransfer`: how the saves of a ``with`` block reach its caller's device."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ....utils.gc_threshold import lower_threshold, raise_threshold
from ..nnsight_compat import apply
from . import saved as saves
from .save_pieces import Piece, copy_stream, cutter
from .saved import PLAIN, batch_views, find_tensors, give_own_storage

_Copies = dict[int, tuple[torch.Tensor, int, torch.Tensor]]
"""id -> (tensor, its version when it was copied, copy). The tensor is held so that its id is not reused."""
_NEVER = None, None, None

_kind = attrgetter("dtype", "device", "shape")
_shape = attrgetter("dtype", "shape")
_data = attrgetter("data")
_device = attrgetter("device")
_count_of_edits = attrgetter("_version")


class _Adopted(NamedTuple):
    """Memory of the batch that becomes a piece, the tensors that were saved in it, and their rows."""

    memory: torch.Tensor
    saved: list[torch.Tensor]
    rows: list[int]


class SaveTransfer:
    """Copies the saves of one ``with`` block to the caller's device. Each tensor is copied once, whatever its names.

    Copies from a GPU go to pinned memory on a separate stream, overlapped with the engine's work. Small tensors of equal
    shape and dtype are copied together. Most are copied at the end of the pass that saved them (`leave_batch`). The rest is
    copied when the request ends (`queue`, `flush`). The caller's tensors are cut from the copy and have separate storage.

    The block keeps its tensors and may edit them later. A tensor is copied again if torch has counted an edit since
    (`Tensor._version`).

    Args:
        device: device of the caller's saves; None leaves them on their device.

    Attributes:
        seen: see `find_tensors`; for lists saved above several blocks, which these fill together.
        pieces: pieces by storage (`UntypedStorage._cdata`).
    """

    MIN_TENSORS = 16
    """Tensors of a kind below which packing takes longer than single copies."""
    MAX_TENSOR = 1 << 20
    """Bytes above which a tensor is copied separately."""
    MAX_PIECE = 64 << 20
    """Bytes of a piece at most."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.seen: dict[int, int] = {}
        self.pieces: dict[int, Piece] = {}
        self._settled: dict[int, int] = {}
        self._queued_containers: dict[int, Any] = {}
        self._delivered: dict[int, tuple[Any, Any]] = {}
        self._copies: _Copies = {}
        self._queued: dict[int, torch.Tensor] = {}
        self._gc_objects: int | None = 0
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # -- the garbage collector -------------------------------------------------

    def raise_gc_threshold(self, tensors: int) -> None:
        """Raise the collector's threshold for this many more tensors, until `close`. After `close`, do nothing."""
        with self._lock:
            if self._gc_objects is not None:
                self._gc_objects += tensors
                raise_threshold(tensors)

    def close(self) -> None:
        """End the transfer: every save was delivered, or none will be. It lets go of them, before the collector would look."""
        self._delivered, self._queued_containers = {}, {}
        with self._lock:
            if self._gc_objects is not None:
                lower_threshold(self._gc_objects)
                self._gc_objects = None

    # -- at the end of a pass --------------------------------------------------

    def leave_batch(self, tensors: list[torch.Tensor], row_memory: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Move a pass's saves out of the batch by `adopt` and `pack`. Called on the engine's thread.

        Args:
            tensors: saves, perhaps with duplicates, and with tensors that have separate storage.
            row_memory: see `adopt`.

        Returns:
            tensors that are still views of the batch.
        """
        left = batch_views(self.adopt(tensors, row_memory), self.pieces)
        self.raise_gc_threshold(len(left))
        return self.pack(left)

    def adopt(self, tensors: list[torch.Tensor], row_memory: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Make memory of the batch a piece where nearly all of its rows were saved, and start copying it.

        Neither the tensors nor their values are moved.

        Args:
            row_memory: memory of the pass, [rows, ...] each, that only its readers write to from now on.

        Returns:
            tensors that lie in no adopted memory.
        """
        memories = [memory for memory in row_memory if not self._is_on_device(memory)]
        if len(tensors) < self.MIN_TENSORS or not memories:
            return tensors
        try:
            at = dict(zip(map(torch.Tensor.data_ptr, tensors), tensors, strict=True))
        except RuntimeError:  # a layout without a data pointer
            return tensors
        if len(at) < len(tensors) and len(at) < len(set(map(id, tensors))):
            return tensors  # two tensors at one address, which need separate copies
        alike: defaultdict[Any, list[_Adopted]] = defaultdict(list)
        for memory in memories:
            adopted = self._adoptable(memory, at)
            if adopted is not None:
                alike[_shape(adopted.saved[0]), memory.device].append(adopted)
        for group in alike.values():
            count = max(1, self.MAX_PIECE // group[0].memory.nbytes)
            for first in range(0, len(group), count):
                self._adopt(group[first : first + count])
        return list(at.values())

    def _adoptable(self, memory: torch.Tensor, at: dict[int, torch.Tensor]) -> _Adopted | None:
        """The saves in `memory`, if they are three quarters of its rows at least, and all alike. Removes them from `at`.

        Args:
            at: saves by address.
        """
        count, size = len(memory), memory.nbytes // len(memory)
        if not 0 < size <= self.MAX_TENSOR:
            return None
        addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, size)
        rows = [row for row, address in enumerate(addresses) if address in at]
        if len(rows) < self.MIN_TENSORS or len(rows) * 4 < count * 3:
            return None
        saved = [at[addresses[row]] for row in rows]
        first = saved[0]
        if (
            len(set(map(_shape, saved))) > 1
            or first.dtype != memory.dtype
            or first.nbytes != size
            or not all(map(torch.Tensor.is_contiguous, saved))
            or not PLAIN.issuperset(map(type, saved))
        ):
            return None
        for row in rows:
            del at[addresses[row]]
        return _Adopted(memory, saved, rows)

    def _adopt(self, group: list[_Adopted]) -> None:
        """Make memories with rows of one kind pieces, and copy them together."""
        shape = group[0].saved[0].shape
        copies = self._start_copy(torch.cat([adopted.memory.reshape(-1, *shape) for adopted in group]))
        first = 0
        for memory, saved, rows in group:
            self.raise_gc_threshold(len(saved))
            self._add_piece(memory, saved, copies, [first + row for row in rows])
            first += len(memory)

    def pack(self, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Move saves into pieces, in place, and start copying these. Called on the engine's thread.
        Returns tensors that were not moved: few of their kind, large, or on the caller's device already."""
        if len(tensors) < self.MIN_TENSORS or self.device is None:
            return list(tensors)
        left: list[torch.Tensor] = []
        alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            alike[_kind(tensor)].append(tensor)
        for group in alike.values():
            first = group[0]
            if len(group) < self.MIN_TENSORS or first.nbytes > self.MAX_TENSOR or self._is_on_device(first):
                left += group
                continue
            for part in self._parts(group):
                left += self._pack(part)
        return left

    def _pack(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors of one kind into one piece. Returns those that torch refuses to move."""
        left = []
        with torch.no_grad():
            piece = torch.stack(tensors)
            # `data`: views would share one count of edits, and keep their base alive.
            for tensor, row in zip(tensors, map(_data, piece.unbind()), strict=True):
                try:
                    saves.swap_tensor(tensor, row)
                except RuntimeError:
                    left.append(tensor)  # the base of other views
        self._add_piece(piece, tensors, self._start_copy(piece), range(len(tensors)))
        return left

    def _start_copy(self, piece: torch.Tensor) -> Future[Sequence[torch.Tensor]] | None:
        """Start copying a piece to the device. Returns copies of its rows, or None if too much is in flight."""
        if not cutter.reserve(piece.nbytes):
            return None
        self.raise_gc_threshold(3 * len(piece))  # copies, weak references, and a tuple of both
        try:
            moved, arrived = self._moved(piece), None
        except BaseException:  # no pinned memory left
            cutter.release(piece.nbytes)
            raise
        stream = self._streams.get(piece.device)
        if stream is not None:
            piece.record_stream(stream)  # every tensor in it may be dropped before it is copied
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(stream)
        return cutter.cut(moved, arrived)

    def _add_piece(
        self,
        piece: torch.Tensor,
        tensors: list[torch.Tensor],
        copies: Future[Sequence[torch.Tensor]] | None,
        rows: Sequence[int],
    ) -> None:
        for freed in [key for key, known in self.pieces.items() if known.memory.expired()]:
            del self.pieces[freed]
        memory, versions = StorageWeakRef(piece.untyped_storage()), _versions(tensors)
        self.pieces[memory.cdata] = Piece(memory, list(map(weakref.ref, tensors)), versions, copies, rows)

    # -- when the request is over ----------------------------------------------

    def collect(self) -> None:
        """Take the copies of pieces with tensors that have not been edited since."""
        for piece in self.pieces.values():
            if piece.copies is None:
                continue
            copies, piece.copies = piece.copies.result(), None
            for reference, version, row in zip(piece.tensors, piece.versions, piece.rows, strict=True):
                tensor = reference()
                if tensor is not None and tensor._version == version:
                    self._copies[id(tensor)] = tensor, version, copies[row]

    def queue(self, value: Any) -> None:
        """Queue the tensors of `value` for `flush`. `deliver` will be called for the same value."""
        if isinstance(value, torch.Tensor):
            if not value.requires_grad and not self._is_on_device(value):
                self._queued[id(value)] = value
        elif isinstance(value, (list, tuple, dict)) and id(value) not in self._queued_containers:
            self._queued_containers[id(value)] = value
            first = self._settled.get(id(value), 0)
            items = value.values() if isinstance(value, dict) else value[first:] if first else value
            if self._are_on_device(items):
                return
            for item in items:
                if id(item) not in self._copies:
                    self.queue(item)

    def flush(self) -> None:
        """Copy the queued small tensors, together if they are alike."""
        known = self._copies
        alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        for tensor in self._queued.values():
            if not known or self._copy_of(tensor, known) is None:
                alike[tensor.dtype, tensor.device, tensor.shape, tensor.layout].append(tensor)
        self._queued = {}
        for tensors in alike.values():
            if tensors[0].layout is torch.strided and tensors[0].nbytes <= self.MAX_TENSOR:
                for part in self._parts(tensors):
                    self._flush(part)

    def _flush(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            # Held until it has been copied: else the engine's thread could be given its memory.
            stacked = torch.stack(tensors)
            piece = self._moved(stacked)
            self.raise_gc_threshold(len(tensors))
            self.wait()
            copies: Any = torch.unbind_copy(piece)
            known = zip(tensors, map(_version, tensors), copies, strict=True)
            self._copies.update(zip(map(id, tensors), known, strict=True))

    def copies_of(self, value: Any) -> Any:
        """`value` with copies of its tensors on the device. The block keeps its own tensors."""
        self.collect()
        known, self._copies = self._copies, {}
        copied = apply(value, lambda tensor: self._copy(tensor, known), torch.Tensor)
        self.wait()
        return copied

    def deliver(self, value: Any) -> Any:
        """`value` with its tensors on the device; lists and dicts are changed in place. `wait` must follow.

        Tensors of an autograd graph are not copied: a copy would have neither the place in the graph nor `.grad`.
        """
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not isinstance(value, torch.nn.Parameter):
                return value
            return self._copy(value, self._copies)
        if not isinstance(value, (list, dict, tuple)):
            return value
        known = self._delivered.get(id(value))
        if known is not None:  # a list that many blocks have filled is delivered once
            return known[1]
        self._delivered[id(value)] = value, value
        if isinstance(value, list):
            self._deliver_list(value)
        elif isinstance(value, dict):
            for key, item in list(value.items()):
                value[key] = self.deliver(item)
        else:
            items = [self.deliver(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                delivered = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
                self._delivered[id(value)] = value, delivered
                return delivered
        return value

    def settle(self, into: list[torch.Tensor]) -> None:
        """Mark the items of a list as separate. `queue` and `deliver` leave them if they are on the device."""
        self.seen[id(into)] = len(into)
        if not into or self._is_on_device(into[0]):
            self._settled[id(into)] = len(into)

    def _deliver_list(self, value: list[Any]) -> None:
        first = self._settled.get(id(value), 0)
        if self._are_on_device(value[first:] if first else value):
            return
        if first:
            value[first:] = [self.deliver(item) for item in value[first:]]
            return
        copied = [known for known in map(self._copies.get, map(id, value)) if known is not None]
        if len(copied) == len(value) > 0 and [version for _, version, _ in copied] == _versions(value):
            value[:] = [copy for _, _, copy in copied]
            self._settled[id(value)] = len(value)
        else:
            value[:] = [self.deliver(item) for item in value]

    def finish(self, delivered: Iterable[Any]) -> None:
        """Wait for the copies, then give delivered tensors that are still views of the batch separate storage."""
        self.wait()
        found: list[torch.Tensor] = []
        for value in delivered:
            find_tensors(value, found, self._settled)
        give_own_storage(batch_views(found))

    def wait(self) -> None:
        """Wait for the copies in flight."""
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()

    # -- one tensor ------------------------------------------------------------

    def _parts(self, tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
        """Tensors of one kind, in parts of `MAX_PIECE` bytes at most."""
        count = max(1, self.MAX_PIECE // max(1, tensors[0].nbytes))
        return (tensors[first : first + count] for first in range(0, len(tensors), count))

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        target = self.device
        return target is None or tensor.device == target or (target.index is None and tensor.device.type == target.type)

    def _are_on_device(self, values: Collection[Any]) -> bool:
        """Whether all are tensors that need no copy. A long list of them is not searched one by one."""
        if not PLAIN.issuperset(map(type, values)):
            return False
        return all(
            map(self._is_on_device, dict(zip(map(_device, values), values, strict=True)).values())
        )  # one of each device

    def _copy(self, tensor: torch.Tensor, known: _Copies) -> torch.Tensor:
        if self._is_on_device(tensor):
            return tensor
        copied = self._copy_of(tensor, known)
        if copied is None:
            copied = self._moved(tensor.detach())
        self._copies[id(tensor)] = tensor, _version(tensor), copied
        return copied

    @staticmethod
    def _copy_of(tensor: torch.Tensor, known: _Copies) -> torch.Tensor | None:
        _, version, copied = known.get(id(tensor), _NEVER)
        return copied if version == _version(tensor) else None

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the device; one from a GPU to the CPU is in flight until `wait`."""
        target = self.device
        assert target is not None
        if not tensor.is_cuda or target.type != "cpu" or tensor.layout is not torch.strided:
            return tensor.to(target)
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        copied = torch.empty_like(tensor, device=target, pin_memory=True)
        with torch.cuda.stream(stream):
            copied.copy_(tensor, non_blocking=True)
        return copied


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    tensors = list(tensors)
    try:
        return list(map(_count_of_edits, tensors))
    except RuntimeError:  # inference tensors have no count
        return list(map(_version, tensors))
