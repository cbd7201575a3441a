"""Captured states for another process of this machine: `share_states` here, `open_handle` there. No state passes a socket.

    handle = share_states(out.activations)       # of Capture(..., device="engine")
    send(handle.info)                            # JSON
    ...
    states = open_handle(info)["resid_post.12"]  # in the other process
    ...
    handle.release()                             # here, later

States on a GPU are shared by CUDA IPC, those on a CPU by shared memory. A handle is opened once: a file of its positions and tokens
is its ticket, which the opener removes. So `release` knows whether a process holds the states.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from ...hooks.captures.activations import Activations
from ...hooks.captures.by_site import SitePiece
from ...models.weights.loading import WeightsError
from ...wire.weights import FOLDER, SEGMENT, SentWeights, received

MAX_HANDLES = 1024
"""Handles of a process that are not released: each holds its states."""
INDEX = ("positions", "token_ids")


class HandleError(ValueError):
    """A handle of states cannot be made or opened: its message says why."""


class StatesHandle:
    """States that one other process may open. They stay as long as the handle is not released.

    Attributes:
        info: description for `open_handle`, as JSON.
    """

    _open = 0
    _lock = threading.RLock()  # a collected handle is released wherever its collection falls

    def __init__(self, activations: Activations) -> None:
        num_layers, pieces, order, error = activations.as_pieces()
        if error is not None:
            raise error
        if not pieces:
            raise HandleError("nothing was captured")
        with self._lock:
            if StatesHandle._open >= MAX_HANDLES:
                raise HandleError(f"{MAX_HANDLES} handles of states are open: handle.release() ends one")
            StatesHandle._open += 1
        opened = list[SentWeights]()
        try:
            rows = SentWeights((str(i), piece.rows) for i, piece in enumerate(pieces))
            index = SentWeights(
                (f"{name}.{i}", getattr(piece, name)) for i, piece in enumerate(pieces) for name in INDEX
            )
            for sent in (rows, index):
                sent.__enter__()
                opened.append(sent)
        except BaseException:
            for sent in opened:
                sent.take_back()
                sent.__exit__(None, None, None)
            _count_less()
            raise
        self._end = weakref.finalize(self, _release, rows, index)
        self.info: dict[str, Any] = {
            "pid": os.getpid(), "started": _started(os.getpid()), "num_layers": num_layers, "order": list(order),
            "sites": [list(piece.sites) for piece in pieces], "rows": rows.info, "index": index.info,
        }  # fmt: skip

    def release(self) -> None:
        """Let go of the states. Those that another process has opened stay until it drops them. A second call does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def share_states(activations: Activations) -> StatesHandle:
    """A handle of a request's captured states. Nothing is copied on a GPU.
    Raises HandleError: nothing was captured, or 1,024 handles are open."""
    return StatesHandle(activations)


def open_handle(info: Mapping[str, Any], device: str | None = None) -> Activations:
    """The states of a handle of another process. On a GPU they are its memory, which is held until they are dropped here.

    Args:
        info: `StatesHandle.info`.
        device: device of states on a GPU: the one that they are on, by its name in this process. None: the current one.

    Raises:
        HandleError: the process has ended, the handle was released or opened before, or it is damaged.
    """
    try:
        own = device or (f"cuda:{torch.cuda.current_device()}" if "ipc_handles" in info["rows"] else "cpu")
        _check_alive(info)
        index = dict(received(info["index"], "cpu"))
        if not _claim(info["index"]):
            raise HandleError("these states were released, or opened before: a handle is opened once")
        rows = dict(received(info["rows"], own))
        _claim(info["rows"])
        pieces = [
            SitePiece(tuple(sites), rows[str(i)], index[f"positions.{i}"], index[f"token_ids.{i}"], {})
            for i, sites in enumerate(info["sites"])
        ]
        found = Activations(int(info["num_layers"]), pieces, tuple(info["order"]))
        if len(found) != sum(len(piece.sites) for piece in pieces):
            raise HandleError("this is no handle of states: its sites are not in order")
        return found
    except WeightsError as error:
        released = "; it was released, or opened before" if "its process may have ended" in str(error) else ""
        raise HandleError(f"{error}{released}") from error
    except HandleError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise HandleError(f"this is no handle of states: {error!r}") from error


def _claim(info: Mapping[str, Any]) -> bool:
    """Remove a segment. Returns whether it was there."""
    name = info.get("segment")
    if not isinstance(name, str) or SEGMENT.fullmatch(name) is None:
        return False
    try:
        (FOLDER / name).unlink()
    except OSError:
        return False
    return True


def _check_alive(info: Mapping[str, Any]) -> None:
    """Raise HandleError if the process has ended. Its files are removed."""
    process = info["pid"]
    if type(process) is int and process > 0 and _started(process) == info["started"]:
        return
    for part in ("index", "rows"):
        _claim(info[part])
    raise HandleError(f"process {str(process)[:20]}, which has these states, has ended")


def _started(process: int) -> int:
    """Start of a process, in ticks of the system; 0: it has ended. Numbers of processes are used again."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _count_less() -> None:
    with StatesHandle._lock:
        StatesHandle._open -= 1


def _release(rows: SentWeights, index: SentWeights) -> None:
    if _claim(index.info):
        rows.take_back()
    for sent in (rows, index):
        sent.__exit__(None, None, None)
    _count_less()
