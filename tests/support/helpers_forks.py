"""Python processes of tests that are forked from one that has imported the package: torch and transformers take seconds of CPU.

What a command line names runs as in a new interpreter, from its `__main__` on, and is a child of the process that started it. Only
the imports are done. Tests of the start itself, and of what is imported, start the real command.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "test-forks"
"""Name of a process that forks others, in /proc/PID/comm."""
PYTHON = sys.executable
"""The interpreter whose processes are forked. A test may name another one for its engines, by `sys.executable` of its server."""
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
IMPORTS = (
    "pymllm_interp.lm", "pymllm_interp.server.process.engine_process", "pymllm_interp.server.serve",
    "pymllm_interp.server.engines.replicas_door", "pymllm_interp.server.engines.process_door", "pymllm_interp.models.registry",
    "transformers.models.llama.modeling_llama", "uvicorn", "httptools",
)  # fmt: skip
LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)
SECONDS = 60.0
"""Longest wait for a fork: one that fails has no answer."""
FRONTS = ("serve", "replicated_server.py")
_fork_exec: Callable[..., int] = subprocess._fork_exec  # pyright: ignore


def prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent() -> None:
    """End this process when the one that forked it ends, however that ends."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def children_of(pid: int) -> list[int]:
    """The children of a process, without one that forks its engines."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if _name(child) != NAME]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Forks:
    """This process's end of the socket to one that forks."""

    def __init__(self, ours: socket.socket) -> None:
        self.socket, self._lock = ours, threading.Lock()
        ours.settimeout(SECONDS)

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """The process id of a new child, which has `files` under the numbers that the request names."""
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # the child's first parent ends at once: this process takes its place
            try:
                socket.send_fds(self.socket, [json.dumps(request).encode()], files)
                return int(self.socket.recv(32))
            except OSError:
                self.socket.close()  # a late answer would be the next one's
                raise
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)

    def fork_exec(self, args: Sequence[Any], *more: Any) -> int:
        """`subprocess._fork_exec`, for an interpreter like this one; others are started as ever."""
        _, _, kept, cwd, env, stdin, _, _, stdout, _, stderr, _, told, _, new_session = more[:15]
        line = [os.fsdecode(arg) for arg in args]
        if line[0] != PYTHON:
            return _fork_exec(args, *more)
        lines = (
            [f"{name}={value}" for name, value in os.environ.items()] if env is None else [os.fsdecode(x) for x in env]
        )
        passed = [file for file in kept if file != told]
        request = {
            "line": line, "cwd": os.fsdecode(cwd or os.getcwd()), "session": new_session,
            "environment": dict(one.split("=", 1) for one in lines), "files": [0, 1, 2, *passed],
            "limits": [(limit, resource.getrlimit(limit)) for limit in LIMITS],
        }  # fmt: skip
        streams = [given if given >= 0 else ours for ours, given in enumerate((stdin, stdout, stderr))]
        return self.fork(request, [*streams, *passed])


def serve(ours: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request, until the other end closes. Returns in the forked process, with its request and files."""
    prctl(PR_SET_NAME, NAME.encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(ours, 1 << 20, 16)
        if not message:
            os._exit(0)
        wait, go = os.pipe()
        if not (between := os.fork()):
            if os.fork():
                os._exit(0)
            os.close(go)
            os.read(wait, 1)  # until the one between is gone, and its parent is who asked
            os.close(wait)
            prctl(PR_SET_NAME, b"python")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ours.send(str(os.getpid()).encode())
            ours.close()
            return json.loads(message), files
        os.waitpid(between, 0)
        for file in (wait, go, *files):
            os.close(file)


def become(ours: socket.socket) -> None:
    """Fork processes; in each, run what its command line names."""
    request, files = serve(ours)
    while any(end in arg for arg in request["line"][1:4] for end in FRONTS):
        front, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():  # a server, which starts engines when it has threads: its own forks them
            own.close()
            subprocess._fork_exec = Forks(front).fork_exec  # pyright: ignore
            break
        front.close()
        for file in files:
            os.close(file)
        request, files = serve(own)
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 200) for file in files]  # one's number may be another's place
    for file in files:
        os.close(file)
    for file, place in zip(apart, request["files"], strict=True):
        os.dup2(file, place)
        os.close(file)
    if request["session"]:
        os.setsid()
    for limit, value in request["limits"]:
        resource.setrlimit(limit, value)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # another's TMPDIR
    run(request["line"])


def run(line: list[str]) -> None:
    """What `python ...` runs."""
    sys.orig_argv = list(line)
    _, *rest = line
    if rest[:2] == ["-X", "faulthandler"]:
        faulthandler.enable()
        del rest[:2]
    kind, *arguments = rest
    main = sys.modules["__main__"].__dict__
    if kind == "-m":
        sys.argv, sys.path[0] = arguments, os.getcwd()
        runpy._run_module_as_main(arguments[0])  # pyright: ignore
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        exec(compile(arguments[0], "<string>", "exec"), main)
    else:
        sys.argv, sys.path[0] = rest, str(Path(kind).resolve().parent)
        main["__file__"] = kind
        exec(compile(Path(kind).read_text(), kind, "exec"), main)


_ours: list[Forks] = []
"""The process that forks for this one, once there is one."""


def fork_from_here() -> None:
    """Fork the process that forks for this one: its imports are done (tests/support/lanes.py)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not (pid := os.fork()):
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        become(theirs)
        sys.exit()  # a process that was forked, at the end of what it ran
    theirs.close()
    atexit.register(lambda: (os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)))
    _ours.append(Forks(ours))


def forks() -> Forks:
    """The process that forks for this one."""
    if _ours:
        return _ours[0]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import helpers_forks; helpers_forks.start({theirs.fileno()})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    theirs.close()
    atexit.register(lambda: (process.kill(), process.wait()))  # a leftover child may have `ours` open
    _ours.append(Forks(ours))
    return _ours[0]


def import_all() -> None:
    """What engines and servers import."""
    from pymllm_interp.utils.light_imports import import_generation, import_validators

    import_validators()
    import_generation()
    for name in IMPORTS:
        __import__(name)


def start(file: int) -> None:
    """The main function of the process that forks."""
    gc.disable()  # imports make half a million objects, none of them garbage
    import_all()
    gc.freeze()
    gc.enable()
    become(socket.socket(fileno=file))


@contextmanager
def forking() -> Iterator[None]:
    """Python processes that the body starts are forked; not where there is a CUDA device, whose state a fork cannot use."""
    import torch

    before = subprocess._fork_exec  # pyright: ignore
    if sys.platform == "linux" and not torch.cuda.device_count():
        subprocess._fork_exec = forks().fork_exec  # pyright: ignore
    try:
        yield
    finally:
        subprocess._fork_exec = before  # pyright: ignore
