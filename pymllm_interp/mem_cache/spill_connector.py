"""`SpillConnector` keeps the KV of evicted pages in host memory and in a folder, by `page_keys`.

A key depends on the model and its weights, and on the tokens and namespaces of all pages so far. Namespaces are of interventions,
adapters, images and salts. KV of others is not found.

The engine's thread only launches copies between the pool and one allocation of host memory, pinned on CUDA. Checksums and files are
the work of other threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..utils.out_of_memory import within_memory
from .memory_pool import KVPool
from .spill_files import SpillFiles, StoredPage

MOST_WAITING = 256 << 20
"""Bytes of host memory for pages on their way to and from files, beside the limit of host memory."""
READERS = min(8, os.cpu_count() or 1)
AT_ONCE = 4 * READERS
"""Pages that are read while those before them are copied to the device."""


@dataclass
class _NewFile:
    """Pages on their way to a file.

    Attributes:
        copied: event of their copies from the device; None on a CPU.
    """

    root: str
    keys: list[bytes]
    slots: list[int]
    copied: torch.cuda.Event | None


class SpillConnector:
    """Evicted KV in host memory, and in files behind it. Missing and damaged KV is computed again.

    Args:
        root: () -> identity of the model as it is now.
        host_bytes: most bytes of KV in host memory.
        folder: folder of the files; None: host memory only.
        disk_bytes: most bytes of the files.

    Raises:
        ValueError: others may write to the folder.
    """

    def __init__(
        self, pool: KVPool, root: Callable[[], str], host_bytes: int, folder: Path | None, disk_bytes: int
    ) -> None:
        self._pool, self._root_of, self._root = pool, root, ("", b"")
        self._files = None if folder is None else SpillFiles(folder, disk_bytes, pool)
        self._most_kept = host_bytes // pool.page_bytes
        beside = 0 if folder is None else max(MOST_WAITING // pool.page_bytes, 1)
        shape = (self._most_kept + beside, *pool.page_shape)
        self._is_pinned = pool.device.type == "cuda"
        self._memory = within_memory(
            lambda: torch.empty(shape, dtype=pool.dtype, pin_memory=self._is_pinned),
            f"{shape[0]} pages of {pool.page_bytes} bytes do not fit in host memory; what helps: a lower kv_spill_bytes",
        )
        self._rows = self._memory.flatten(1).view(torch.uint8).numpy()  # [slots, page_bytes]
        self._free, self._num_used = list[int](), 0  # slots that were used before, and their number
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._waiting: set[int] = set()  # slots that the writer reads
        self._new: list[_NewFile] = []
        self._copied: torch.cuda.Event | None = None  # all copies so far
        self._lock, self._disabled = threading.Lock(), False
        self._writer = ThreadPoolExecutor(1, "kv-spill")
        self._readers = ThreadPoolExecutor(READERS, "kv-read")
        self._counts = {"saved": 0, "restored": 0, "unwritten": 0}

    @property
    def counts(self) -> dict[str, int]:
        """Pages saved and restored, files that could not be written, and files and pages that were refused."""
        return self._counts | {"corrupt": 0 if self._files is None else self._files.num_corrupt}

    # -- around passes -----------------------------------------------------------------------

    def pre_forward(self, step: Any) -> None:
        """Do nothing: KV is moved when pages are evicted and given, in the order of the device's work."""

    def post_forward(self, step: Any) -> None:
        """Begin to write the pages that the step has evicted, beside its pass."""
        new, self._new = self._new, []
        if new:
            self._writer.submit(self._write, new)

    no_forward = post_forward

    def set_disabled(self, disabled: bool) -> None:
        self._disabled = disabled

    def reset(self) -> Future[None] | None:
        """Forget all KV in host memory, and delete the files of the model as it is now."""
        self.post_forward(None)
        with self._lock:
            self._free += [slot for slot in self._slots.values() if slot not in self._waiting]
            self._slots.clear()
        return None if self._files is None else self._writer.submit(self._files.clear, self.root.hex())

    def close(self) -> None:
        """Write the waiting files, and forget the rest."""
        self.post_forward(None)
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._slots.clear()
        self._disabled = True

    # -- saving and restoring -------------------------------------------------------------------

    @property
    def root(self) -> bytes:
        """Identity of the model and of the form of its KV."""
        own, pool = self._root_of(), self._pool
        if own != self._root[0]:
            scales = [pool.scales(layer) for layer in range(pool.num_layers)]
            form = own, pool.page_shape, str(pool.dtype), scales
            self._root = own, hashlib.sha256(repr(form).encode()).digest()
        return self._root[1]

    def save(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Copy the KV of pages that are not known. The copy comes before later work of the device."""
        with self._lock:
            new = [] if self._disabled else [i for i, key in enumerate(keys) if not self._knows(key)]
            slots = self._take(len(new))
        if len(slots) < len(new):
            self._counts["unwritten"] += 1  # the folder is slower than evictions
        new = new[: len(slots)]
        if not new:
            return
        try:
            self._pool.pages_out([pages[i] for i in new], self._memory, slots)
        except torch.OutOfMemoryError:  # of the pages gathered on the device: an eviction needs none of it
            self._counts["unwritten"] += 1
            with self._lock:
                self._free += slots
            return
        finally:
            self._note_copies()
        self._counts["saved"] += len(new)
        own = [keys[i] for i in new]
        with self._lock:
            self._slots |= dict(zip(own, slots, strict=True))
            if self._files is not None:
                self._waiting.update(slots)
                self._new.append(_NewFile(self.root.hex(), own, slots, self._copied))

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        """The first of these keys, as many as are known."""
        found: list[bytes] = []
        with self._lock:
            for key in keys:
                if self._disabled or not self._knows(key):
                    break
                if key in self._slots:
                    self._slots.move_to_end(key)  # evictions until they are restored take others
                found.append(key)
        return found

    def restore(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Copy the KV of known pages to pages of the pool. Returns their number: it ends at one that cannot be read."""
        done = 0
        while done < len(keys):
            slots = self._in_memory(keys[done : done + AT_ONCE])
            if not slots:
                break
            try:
                self._pool.pages_in(pages[done : done + len(slots)], self._memory, slots)
                done += len(slots)
            except torch.OutOfMemoryError:  # the rest is computed
                break
            finally:
                self._note_copies()
                with self._lock:
                    self._bound()
        self._counts["restored"] += done
        return done

    def _in_memory(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of the first of these pages, as many as there are. Pages in files are read."""
        slots: list[int] = []
        reads: list[tuple[bytes, int, StoredPage]] = []
        with self._lock:
            for key in keys:  # they are not taken for others meanwhile
                if key in self._slots:
                    self._slots.move_to_end(key)
            for key in keys:
                slot, stored = self._slots.get(key), None if self._files is None else self._files.get(key)
                if slot is None and stored is not None:
                    (slot,) = self._take(1, keys) or (None,)
                    if slot is not None:
                        reads.append((key, slot, stored))
                if slot is None:
                    break
                slots.append(slot)
        if not reads or self._files is None:
            return slots
        if self._copied is not None:
            self._copied.synchronize()  # from slots that are written now
        rows, files = self._rows, self._files
        whole = list(self._readers.map(lambda read: files.read(read[2], rows[read[1]]), reads))
        with self._lock:
            for (key, slot, _), ok in zip(reads, whole, strict=True):
                if ok:
                    self._slots[key] = slot
                else:
                    files.forget(key)
                    self._free.append(slot)
        bad = [slot for (_, slot, _), ok in zip(reads, whole, strict=True) if not ok]
        return slots[: slots.index(bad[0])] if bad else slots

    def _note_copies(self) -> None:
        if self._is_pinned:
            self._copied = copied = torch.cuda.Event()
            copied.record()

    # -- host memory, with the lock ----------------------------------------------------------------

    def _knows(self, key: bytes) -> bool:
        return key in self._slots or (self._files is not None and self._files.get(key) is not None)

    def _take(self, count: int, keep: Sequence[bytes] = ()) -> list[int]:
        """Slots for pages, as many as there are: unused ones, and slots of the least recently used pages.

        Args:
            keep: keys of pages that stay.
        """
        found = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(found) :]
        fresh = min(count - len(found), len(self._memory) - self._num_used)
        found += range(self._num_used, self._num_used + fresh)
        self._num_used += fresh
        if len(found) < count:
            old = (key for key, slot in self._slots.items() if slot not in self._waiting and key not in keep)
            found += [self._slots.pop(key) for key, _ in list(zip(old, range(count - len(found)), strict=False))]
        return sorted(found)

    def _bound(self) -> None:
        """Let go of the least recently used pages beyond the limit of host memory, unless they wait for a file."""
        over = len(self._slots) - len(self._waiting) - self._most_kept
        if over > 0:
            old = (key for key, slot in self._slots.items() if slot not in self._waiting)
            self._free += [self._slots.pop(key) for key, _ in list(zip(old, range(over), strict=False))]

    # -- the writer's thread ---------------------------------------------------------------------

    def _write(self, new: Sequence[_NewFile]) -> None:
        """Write pages to files. A file that cannot be written is left out: the folder is full, or gone."""
        assert self._files is not None
        for each in new:
            try:
                if each.copied is not None:
                    each.copied.synchronize()
                self._files.write(each.root, each.keys, [self._rows[slot] for slot in each.slots])
            except (OSError, RuntimeError, MemoryError):
                self._counts["unwritten"] += 1
            with self._lock:
                self._waiting.difference_update(each.slots)
                for key, slot in zip(each.keys, each.slots, strict=True):
                    if self._slots.get(key) != slot:  # forgotten meanwhile
                        self._free.append(slot)
                self._bound()
