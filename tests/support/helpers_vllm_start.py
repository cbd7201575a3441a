"""Engines of vLLM without three imports of it for each: cores are forked from a server that has imported vLLM once.

On a CPU vLLM spawns its processes, which takes a core ten seconds each. Engines that are started here have other start methods than
users': a server of the command line, the pages of docs, and engines with settings that are read at import start as theirs do.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "vllm_fork"
AT_IMPORT = ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "PYTHONPATH")
"""Variables that vLLM or Triton read when they are imported. After a change of them, processes are spawned."""


class _Environment:
    """The environment of the process that pickles it."""

    def __reduce__(self) -> Any:
        return dict, (dict(os.environ),)


def _run(
    environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_the_client, daemon=True).start()
    target(*args, **kwargs)


def _end_with_the_client() -> None:
    """The client is not the parent here: one that is killed would leave its engine behind."""
    client = multiprocessing.parent_process()
    assert client is not None
    client.join()
    os._exit(1)


class _Core(ForkServerProcess):
    def __init__(self, *, target: Any, args: Any = (), kwargs: Any = None, **named: Any) -> None:
        super().__init__(target=_run, args=(_Environment(), target, args, kwargs or {}), **named)


class _Cores(ForkServerContext):
    Process = _Core  # pyright: ignore[reportAssignmentType]


_begun: dict[str, str | None] = {}


def _environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in AT_IMPORT}


def _context() -> Any:
    if not _begun:
        _begin()
    return _Cores() if _environment() == _begun else multiprocessing.get_context("spawn")


def _begin() -> None:
    from multiprocessing import forkserver

    _begun.update(_environment())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        forkserver.set_forkserver_preload(["vllm_imported"])
        forkserver.ensure_running()


def fork_engines() -> None:
    """From now on this process starts engines of vLLM by forks. A second call does nothing."""
    import vllm.v1.engine.utils as engines  # pyright: ignore[reportMissingImports]

    engines.get_mp_context = _context
