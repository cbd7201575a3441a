"""How what a trace saves gets to its caller."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .gc_threshold import give_back, make_room
from .nnsight_compat import apply
from .saves import _PLAIN, _swap, unowned

_Copies = dict[int, tuple[torch.Tensor, int, torch.Tensor]]
"""id -> (the tensor, its version when it was copied, the copy); the tensor, so that its id stays its own"""
_NEVER = None, None, None


class _Cutter:
    """Cuts what has come to pinned memory into tensors with memory of their own, on a thread of its own."""

    ROOM = 256 << 20
    """Bytes that may be on their way at once: pinned memory is the whole machine's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pymllm-interp-saves")
        self._lock = threading.Lock()
        self._under_way = 0

    def take(self, nbytes: int) -> bool:
        """Keep room for a piece; False where there is none."""
        with self._lock:
            if self._under_way + nbytes > self.ROOM:
                return False
            self._under_way += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """The room that was kept for a piece is free."""
        with self._lock:
            self._under_way -= nbytes

    def cut(self, piece: torch.Tensor, arrived: torch.cuda.Event | None) -> Future[Sequence[torch.Tensor]]:
        """Cut a piece for which room was kept, once it has arrived. Its memory is free from then on."""
        return self._thread.submit(self._cut, piece, arrived)

    def _cut(self, piece: torch.Tensor, arrived: torch.cuda.Event | None) -> Sequence[torch.Tensor]:
        try:
            if arrived is not None:
                arrived.synchronize()
            copies: Any = torch.unbind_copy(piece)
            return copies
        finally:
            self.give_back(piece.nbytes)


_cutter = _Cutter()


@dataclass(slots=True)
class _Piece:
    """Memory that tensors of one kind share, which were saved in one pass: they were moved there, or it is the batch's own."""

    memory: StorageWeakRef
    """Lives as long as one of the tensors does; while this refers to it, no other memory has its `cdata`."""
    tensors: list[weakref.ref[torch.Tensor]]
    """Those that a block has dropped meanwhile are not kept for the caller's sake."""
    versions: list[int]
    """Of each tensor, at the end of the pass."""
    copies: Future[Sequence[torch.Tensor]] | None
    """Of each tensor as it was then, and of others; None where they were not sent, or have been taken."""
    rows: Sequence[int]
    """Where each tensor's copy is among them."""


_kind = attrgetter("dtype", "device", "shape")
_shape = attrgetter("dtype", "shape")
_data = attrgetter("data")
_counted = attrgetter("_version")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """What all saves leave a device on. One for each delivery would be more streams than torch has: it deals them out anew."""
    return torch.cuda.Stream(device)


class _Adopted(NamedTuple):
    """Memory of the batch that is going to be a piece, the tensors that were saved in it, and which of its rows they are."""

    memory: torch.Tensor
    saved: list[torch.Tensor]
    rows: list[int]


class Delivery:
    """Hands the saves of one ``with`` block to its caller. A tensor is copied once, under however many names it is saved.

    Copies from a GPU go to pinned memory on a stream of their own, so that the engine's work does not wait for them. Of many
    small tensors, those that are alike travel in one piece: most of them at the end of the pass that they were saved in (`keep`),
    the others when the request is over (`expect`, `send`). What the caller gets is cut from it and has memory of its own.

    The block goes on with what it saved, and may edit it: that torch has counted the edit (`Tensor._version`) tells that it must
    be copied again.

    Args:
        device: of what is handed over; None leaves it where it is.

    Attributes:
        seen: see `find_tensors`; of what was saved above several blocks, which fill it together.
        owned: the same, of lists that were handed over, where all that they hold are copies.
        pieces: by the identity of their memory (`UntypedStorage._cdata`).
    """

    MANY = 16
    """Tensors of a kind that are packed, at least: with fewer, a piece takes longer than to copy them by themselves."""
    SMALL = 1 << 20
    """Bytes of a tensor that travels together with others, at most."""
    PIECE = 64 << 20
    """Bytes that travel in one piece, at most."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.seen: dict[int, int] = {}
        self.owned: dict[int, int] = {}
        self.pieces: dict[int, _Piece] = {}
        self._announced: dict[int, Any] = {}
        self._handed: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._copies: _Copies = {}
        self._expected: dict[int, torch.Tensor] = {}
        self._room: int | None = 0
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def make_room(self, count: int) -> None:
        """Tell the garbage collector of so many more tensors, which live until `close`; the engine's thread may come later."""
        with self._lock:
            if self._room is not None:
                self._room += count
                make_room(count)

    def close(self) -> None:
        """All is handed over, or never will be."""
        with self._lock:
            if self._room is not None:
                give_back(self._room)
                self._room = None

    def keep(self, tensors: list[torch.Tensor], cut: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Free what a pass has saved from the batch, most of it by `adopt` and `pack`. Called by the engine's thread.

        Args:
            tensors: they may be there twice, or be nobody else's already.
            cut: see `adopt`.

        Returns:
            those that are the batch's still.
        """
        left = unowned(self.adopt(tensors, cut), self.pieces)
        self.make_room(len(left))
        return self.pack(left)

    def adopt(self, tensors: list[torch.Tensor], cut: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Make memory of the batch a piece as it is, where nearly all of it was saved, row by row; and let it start for the device.

        Args:
            cut: memory of the pass, [rows, ...] each, which from now on only those write to that were served its rows.

        Returns:
            the tensors that are in none.
        """
        if len(tensors) < self.MANY or self.device is None:
            return tensors
        try:
            at = dict(zip(map(torch.Tensor.data_ptr, tensors), tensors, strict=True))
        except RuntimeError:  # one of a layout that has no such thing
            return tensors
        if len(at) < len(tensors) and len(at) < len(set(map(id, tensors))):
            return tensors  # two at one place, of which each is to have memory of its own
        alike: defaultdict[Any, list[_Adopted]] = defaultdict(list)
        for memory in cut:
            count, size = len(memory), memory.nbytes // len(memory)
            if not 0 < size <= self.SMALL or self._is_there(memory):
                continue
            place = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, size)
            rows = [row for row, pointer in enumerate(place) if pointer in at]
            if len(rows) < self.MANY or len(rows) * 4 < count * 3:
                continue
            saved = [at[place[row]] for row in rows]
            some, kinds = saved[0], set(map(_shape, saved))
            if (
                len(kinds) == 1
                and some.dtype == memory.dtype
                and some.nbytes == size
                and all(map(torch.Tensor.is_contiguous, saved))
                and _PLAIN.issuperset(map(type, saved))
            ):
                alike[kinds.pop(), memory.device].append(_Adopted(memory, saved, rows))
                for row in rows:
                    del at[place[row]]
        for group in alike.values():
            count = max(1, self.PIECE // group[0].memory.nbytes)
            for first in range(0, len(group), count):
                self._adopt(group[first : first + count])
        return list(at.values())

    def _adopt(self, group: list[_Adopted]) -> None:
        """`adopt` memory of one kind of rows: it travels together."""
        shape = group[0].saved[0].shape
        copies = self._start(torch.cat([adopted.memory.reshape(-1, *shape) for adopted in group]))
        first = 0
        for memory, saved, rows in group:
            self.make_room(len(saved))
            self._note(memory, saved, copies, [first + row for row in rows])
            first += len(memory)

    def pack(self, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Move what a pass has saved into pieces, in place, and let these start for the device. Called by the engine's thread.

        Returns:
            those that are in none: they are few of their kind, large, or on the device already.
        """
        if len(tensors) < self.MANY or self.device is None:
            return list(tensors)
        left: list[torch.Tensor] = []
        alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            alike[_kind(tensor)].append(tensor)
        for group in alike.values():
            some = group[0]
            if len(group) < self.MANY or some.nbytes > self.SMALL or self._is_there(some):
                left += group
                continue
            count = max(1, self.PIECE // max(1, some.nbytes))
            for first in range(0, len(group), count):
                left += self._pack(group[first : first + count])
        return left

    def _pack(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """`pack` of one piece, of one kind. Returns those that torch refuses to move."""
        assert self.device is not None
        left = []
        with torch.no_grad():
            piece = torch.stack(tensors)
            # `data`, since views count their edits together, and each keeps its base.
            for tensor, cut in zip(tensors, map(_data, piece.unbind()), strict=True):
                try:
                    _swap(tensor, cut)
                except RuntimeError:
                    left.append(tensor)  # the base of other views
        self._note(piece, tensors, self._start(piece), range(len(tensors)))
        return left

    def _start(self, piece: torch.Tensor) -> Future[Sequence[torch.Tensor]] | None:
        """Let a piece start for the device. Returns copies of its rows; None where there is no room."""
        assert self.device is not None
        if not _cutter.take(piece.nbytes):
            return None
        self.make_room(3 * len(piece))  # copies, weak references, and a tuple of both
        try:
            moved, arrived = self._moved(piece, self.device), None
        except BaseException:  # no pinned memory: the room is nobody's then
            _cutter.give_back(piece.nbytes)
            raise
        stream = self._streams.get(piece.device)
        if stream is not None:
            piece.record_stream(stream)  # all that is in it may be dropped before it has been copied
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(stream)
        return _cutter.cut(moved, arrived)

    def _note(
        self,
        piece: torch.Tensor,
        tensors: list[torch.Tensor],
        copies: Future[Sequence[torch.Tensor]] | None,
        rows: Sequence[int],
    ) -> None:
        for gone in [key for key, known in self.pieces.items() if known.memory.expired()]:
            del self.pieces[gone]
        memory, versions = StorageWeakRef(piece.untyped_storage()), _versions(tensors)
        self.pieces[memory.cdata] = _Piece(memory, list(map(weakref.ref, tensors)), versions, copies, rows)

    def receive(self) -> None:
        """Take the copies that have been sent, of what is still as it was."""
        for piece in self.pieces.values():
            if piece.copies is None:
                continue
            copies, piece.copies = piece.copies.result(), None
            for reference, version, row in zip(piece.tensors, piece.versions, piece.rows, strict=True):
                tensor = reference()
                if tensor is not None and tensor._version == version:
                    self._copies[id(tensor)] = tensor, version, copies[row]

    def expect(self, value: Any) -> None:
        """Note the tensors of `value`, which `hand` will be asked for: `send` copies them together."""
        if isinstance(value, torch.Tensor):
            if not value.requires_grad and not self._is_there(value):
                self._expected[id(value)] = value
        elif isinstance(value, (list, tuple, dict)) and id(value) not in self._announced:
            self._announced[id(value)] = value
            for item in value.values() if isinstance(value, dict) else value:
                if id(item) not in self._copies:
                    self.expect(item)

    def send(self) -> None:
        """Copy what is expected, and small."""
        known = self._copies
        alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        for tensor in self._expected.values():
            if not known or self._copy_of(tensor, known) is None:
                alike[tensor.dtype, tensor.device, tensor.shape, tensor.layout].append(tensor)
        self._expected = {}
        for tensors in alike.values():
            some = tensors[0]
            if some.layout is torch.strided and some.nbytes <= self.SMALL:
                count = max(1, self.PIECE // max(1, some.nbytes))
                for first in range(0, len(tensors), count):
                    self._send(tensors[first : first + count])

    def _send(self, tensors: list[torch.Tensor]) -> None:
        assert self.device is not None
        with torch.no_grad():
            stacked = torch.stack(
                tensors
            )  # held until it has been copied: the engine's thread would be given its memory
            piece = self._moved(stacked, self.device)
            self.make_room(len(tensors))
            self.wait()
            copies: Any = torch.unbind_copy(piece)
            known = zip(tensors, map(_version, tensors), copies, strict=True)
            self._copies.update(zip(map(id, tensors), known, strict=True))

    def copies(self, value: Any) -> Any:
        """`value` with its tensors on the device, for one who looks while the block goes on with its own."""
        self.receive()
        known, self._copies = self._copies, {}
        copied = apply(value, lambda tensor: self._copy(tensor, known), torch.Tensor)
        self.wait()
        return copied

    def hand(self, value: Any, detached: bool = False) -> Any:
        """`value` with its tensors on the device; lists and dicts stay the objects that they are. `wait` comes after it.

        Args:
            detached: without their autograd graphs, too.
        """
        if isinstance(value, torch.Tensor):
            if detached and value.requires_grad and not isinstance(value, torch.nn.Parameter):
                value = value.detach()
            return self._copy(value, self._copies)
        if not isinstance(value, (list, dict, tuple)):
            return value
        known = self._handed.get((id(value), detached))
        if known is not None:  # a list that many blocks have filled is gone through once
            return known[1]
        self._handed[id(value), detached] = value, value
        if isinstance(value, list):
            sent = [known for known in map(self._copies.get, map(id, value)) if known is not None]
            if len(sent) == len(value) > 0 and [version for _, version, _ in sent] == _versions(value):
                value[:] = [copied for _, _, copied in sent]
                self.owned[id(value)] = len(value)
            else:
                value[:] = [self.hand(item, detached) for item in value]
        elif isinstance(value, dict):
            for key, item in list(value.items()):
                value[key] = self.hand(item, detached)
        else:
            items = [self.hand(item, detached) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                handed = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
                self._handed[id(value), detached] = value, handed
                return handed
        return value

    def wait(self) -> None:
        """Wait for the copies that are under way."""
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()

    def _is_there(self, tensor: torch.Tensor) -> bool:
        target = self.device
        return target is None or tensor.device == target or (target.index is None and tensor.device.type == target.type)

    def _copy(self, tensor: torch.Tensor, known: _Copies) -> torch.Tensor:
        target = self.device
        if target is None or self._is_there(tensor):
            return tensor
        copied = self._copy_of(tensor, known)
        if copied is None:
            copied = self._moved(tensor.detach(), target)
        self._copies[id(tensor)] = tensor, _version(tensor), copied
        return copied

    @staticmethod
    def _copy_of(tensor: torch.Tensor, known: _Copies) -> torch.Tensor | None:
        _, version, copied = known.get(id(tensor), _NEVER)
        return copied if version == _version(tensor) else None

    def _moved(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        if not tensor.is_cuda or target.type != "cpu" or tensor.layout is not torch.strided:
            return tensor.to(target)
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = _side_stream(tensor.device)
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
        return list(map(_counted, tensors))
    except RuntimeError:  # an inference tensor's
        return list(map(_version, tensors))
