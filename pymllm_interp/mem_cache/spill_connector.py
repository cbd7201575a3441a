"""`SpillConnector` keeps the KV of evicted pages in host memory and in a folder, by `page_keys`.

A key depends on the model and its weights, and on the tokens and namespaces of all pages so far. Namespaces are of interventions,
adapters, images and salts. KV of others is not found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .kv_pool import HostKV, KVPool

TENSOR = "kv"
MOST_WAITING = 256 << 20
"""Most bytes that wait for their files, beyond the limit of host memory."""


class _PageRun:
    """KV of consecutive pages.

    Attributes:
        kv: [layers, 2, tokens, kv_heads, head_dim], or None: only in the file.
        file: its file, or None.
        waits: it is yet to be written.
        beyond: it waits, and is held for its file only.
    """

    def __init__(self, keys: Sequence[bytes], size: int, kv: torch.Tensor | None, file: Path | None) -> None:
        self.keys, self.size, self.kv, self.file = list(keys), size, kv, file
        self.waits = self.beyond = False


class SpillConnector:
    """Evicted KV in host memory, and in files behind it. Missing and damaged KV is computed again.

    Args:
        pool: the KV pool.
        root: () -> identity of the model as it is now.
        host_bytes: most bytes of KV in host memory.
        folder: folder of the files; None: host memory only.
        disk_bytes: most bytes of the files.

    Attributes:
        counts: pages saved and restored, and files that were refused or could not be written.

    Raises:
        ValueError: others may write to the folder.
    """

    def __init__(
        self, pool: KVPool, root: Callable[[], str], host_bytes: int, folder: Path | None, disk_bytes: int
    ) -> None:
        self._pool, self._root, self._host_bytes, self._folder, self._disk_bytes = (
            pool,
            root,
            host_bytes,
            folder,
            disk_bytes,
        )
        self._runs: OrderedDict[int, _PageRun] = OrderedDict()  # the least recently used first
        self._places: dict[bytes, tuple[_PageRun, int]] = {}
        self._lock, self._waiting, self._disabled = threading.Lock(), list[_PageRun](), False
        self._writer, self._beyond = ThreadPoolExecutor(1, "kv-spill"), 0
        self.counts = {"saved": 0, "restored": 0, "corrupt": 0, "unwritten": 0}
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
                raise ValueError(
                    f"kv_spill_folder: others may write to {folder}, and so decide what models read: chown, chmod go-w"
                )
            for file in sorted(folder.glob("*.safetensors"), key=_written_at):
                self._find(file)

    # -- around passes -----------------------------------------------------------------------

    def pre_forward(self, step: Any) -> None:
        """Do nothing: KV is moved when pages are evicted and given, in the order of the device's work."""

    def post_forward(self, step: Any) -> None:
        """Begin to write the pages that the step has evicted, beside its pass."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if waiting:
            self._writer.submit(self._write, waiting)

    no_forward = post_forward

    def set_disabled(self, disabled: bool) -> None:
        self._disabled = disabled

    def close(self) -> None:
        """Write the waiting files, and forget the rest."""
        self.post_forward(None)
        self._writer.shutdown(wait=True)
        self._runs.clear()
        self._places.clear()

    # -- saving and restoring -------------------------------------------------------------------

    @property
    def root(self) -> bytes:
        """Identity of the model and of the form of its KV."""
        pool = self._pool
        scales = [pool.scales(layer) for layer in range(pool.num_layers)]
        form = self._root(), pool.num_layers, pool.num_kv_heads, pool.head_dim, pool.page_size, str(pool.dtype), scales
        return hashlib.sha256(repr(form).encode()).digest()

    def save(self, keys: Sequence[bytes], slots: np.ndarray) -> None:
        """Copy the KV of consecutive pages, unless it is known."""
        with self._lock:
            known = self._disabled or not keys or all(key in self._places for key in keys)
        if known:
            return
        kv = self._pool.swap_out(slots).kv
        run = _PageRun(keys, kv.nbytes, kv, None)
        self.counts["saved"] += len(keys)
        with self._lock:
            self._add(run)
            if self._folder is not None:
                run.waits = True
                self._waiting.append(run)
            self._bound_host()

    def restore(self, keys: Sequence[bytes]) -> HostKV | None:
        """The KV of the first of these pages, as many as are known; None for none."""
        parts, at, size = list[torch.Tensor](), 0, self._pool.page_size
        while at < len(keys) and not self._disabled:
            with self._lock:
                run, place = self._places.get(keys[at], (None, 0))
                if run is not None and id(run) in self._runs:
                    self._runs.move_to_end(id(run))
            kv = None if run is None else self._kv_of(run)
            if run is None or kv is None:
                break
            count = 1
            while at + count < len(keys) and run.keys[place + count : place + count + 1] == [keys[at + count]]:
                count += 1
            parts.append(kv[:, :, place * size : (place + count) * size])
            at += count
        if not parts:
            return None
        self.counts["restored"] += at
        return HostKV(parts[0] if len(parts) == 1 else torch.cat(parts, 2))

    def _add(self, run: _PageRun) -> None:
        self._runs[id(run)] = run
        self._places.update((key, (run, place)) for place, key in enumerate(run.keys))

    def _forget(self, run: _PageRun) -> None:
        self._runs.pop(id(run), None)
        for key in run.keys:
            if self._places.get(key, (None, 0))[0] is run:
                del self._places[key]

    def _bound_host(self) -> None:
        """Let go of the oldest KV in host memory. What waits for its file beyond that is bounded, too."""
        held = sum(run.size for run in self._runs.values() if run.kv is not None)
        for run in list(self._runs.values()):
            if held <= self._host_bytes:
                return
            if run.kv is not None:
                held -= run.size
                if run.file is None:
                    self._forget(run)
                    if run.waits and self._beyond + run.size > MOST_WAITING:
                        run.kv = None  # the folder is slower than evictions
                        self.counts["unwritten"] += 1
                    elif run.waits:
                        run.beyond = True
                        self._beyond += run.size
                else:
                    run.kv = None

    # -- files ---------------------------------------------------------------------------------

    def _write(self, runs: Sequence[_PageRun]) -> None:
        """Write runs to files. A file that cannot be written is left out: the folder is full, or gone."""
        for run in runs:
            file = None if run.kv is None else self._file_of(run, run.kv)
            with self._lock:
                self._beyond -= run.size if run.beyond else 0
                run.waits = run.beyond = False
                if file is not None:
                    run.file = file
                    self._add(run)
                    self._bound_host()

    def _file_of(self, run: _PageRun, kv: torch.Tensor) -> Path | None:
        """Write a run to a new file; None if that fails."""
        assert self._folder is not None
        file = self._folder / f"{uuid.uuid4().hex}.safetensors"
        part = file.with_suffix(".part")
        try:
            words = {"keys": json.dumps([key.hex() for key in run.keys]), "crc": str(_crc(kv))}
            self._make_room(run.size)
            save_file({TENSOR: kv.contiguous()}, part, words)
            os.replace(part, file)
        except (OSError, SafetensorError, RuntimeError, MemoryError):
            self.counts["unwritten"] += 1
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return None
        return file

    def _make_room(self, size: int) -> None:
        """Delete the oldest files."""
        if size > self._disk_bytes:
            raise OSError(f"a file of {size} bytes, and the folder holds {self._disk_bytes}")
        with self._lock:
            written = [run for run in self._runs.values() if run.file is not None]
            total = sum(run.size for run in written)
            for run in written:
                if total + size <= self._disk_bytes:
                    return
                assert run.file is not None
                run.file.unlink(missing_ok=True)
                run.file, total = None, total - run.size
                if run.kv is None:
                    self._forget(run)

    def _find(self, file: Path) -> None:
        """Take up a file of an earlier process."""
        try:
            if not stat.S_ISREG(file.lstat().st_mode):
                raise ValueError("a link, or no file")
            with safe_open(file, "pt") as found:
                keys = [bytes.fromhex(key) for key in json.loads((found.metadata() or {})["keys"])]
            self._add(_PageRun(keys, file.stat().st_size, None, file))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            self.counts["corrupt"] += 1

    def _kv_of(self, run: _PageRun) -> torch.Tensor | None:
        """The run's KV; None for a file that is gone, or not whole."""
        kv, file, pool = run.kv, run.file, self._pool
        if kv is not None or file is None:
            return kv
        try:
            with safe_open(file, "pt") as found:
                crc = int((found.metadata() or {})["crc"])
            kv = load_file(file)[TENSOR]
            shape = (pool.num_layers, 2, len(run.keys) * pool.page_size, pool.num_kv_heads, pool.head_dim)
            if tuple(kv.shape) != shape or kv.dtype is not pool.dtype or _crc(kv) != crc:
                raise ValueError("other KV than its header says")
        except (OSError, SafetensorError, KeyError, ValueError):
            self.counts["corrupt"] += 1
            with self._lock:
                self._forget(run)
            return None
        return kv


def _written_at(file: Path) -> float:
    try:
        return file.lstat().st_mtime
    except OSError:  # another process has deleted it
        return 0.0


def _crc(kv: torch.Tensor) -> int:
    return zlib.crc32(kv.contiguous().view(torch.uint8).numpy().data)
