"""`CompileProcess`: grammars of strangers are compiled in another process first, which can be stopped.

A pattern such as ``a?`` nine thousand times keeps xgrammar's compiler busy for hours, or takes all memory. The process says whether
a grammar compiles within its limits. The engine's process compiles it again then: a compiled grammar is sent slower than made.

`python -m pymllm_interp.engine.grammars.compile_process` is the process. It reads a tokenizer's description, then a call of the
compiler in each line. It answers with null or an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from types import ModuleType
from typing import Any, NamedTuple

MAX_BYTES = 2 << 30
"""Memory that compilations may take, beside the libraries."""
START_SECONDS = 120.0
"""Timeout of a process start, which imports xgrammar."""


class CompilerCall(NamedTuple):
    """A call of xgrammar's GrammarCompiler."""

    method: str
    text: str
    options: dict[str, Any]

    def on(self, compiler: Any) -> Any:
        """The xgrammar CompiledGrammar of the call."""
        return getattr(compiler, self.method)(self.text, **self.options)


class CompileProcess:
    """A process that compiles one grammar at a time. It starts with the first, and again after one that was stopped."""

    def __init__(self) -> None:
        self._process: Any = None

    @property
    def is_running(self) -> bool:
        """Whether the process has started."""
        return self._process is not None

    def check(self, info: Any, call: CompilerCall, seconds: float) -> str | None:
        """Compile a grammar. Returns None, or the error.

        Args:
            info: xgrammar's TokenizerInfo.
            seconds: limit of wall-clock time and of processor time.

        Raises:
            TimeoutError: it takes longer, or more memory than `MAX_BYTES`.
        """
        try:
            if self._process is None:
                self._start(info)
            return json.loads(self._ask(json.dumps([*call, seconds]), seconds))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):  # TimeoutError, a pipe that broke, an answer that was cut off
                raise TimeoutError("it takes too long, or too much memory") from error
            raise

    def _start(self, info: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment,
        )  # fmt: skip
        self._ask(json.dumps(info.serialize_json()), START_SECONDS)

    def _ask(self, line: str, seconds: float) -> bytes:
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return self._process.stdout.readline()

    def close(self) -> None:
        """Kill the process and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()


class _StandIn(ModuleType):
    """Stands for torch or transformers. xgrammar names some of their objects, and its compiler uses none of them."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


def _import_xgrammar() -> Any:
    """Import xgrammar without torch and transformers: with both, the import takes five times as long."""
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # xgrammar's FFI would change torch
    with contextlib.suppress(ImportError):
        import tvm_ffi  # noqa: F401  # pyright: ignore[reportMissingImports]
    for name in ("torch", "transformers"):
        sys.modules[name] = _StandIn(name)
    import xgrammar

    return xgrammar


def main() -> None:
    """Answer until the input ends."""
    import resource  # not everywhere

    xgrammar = _import_xgrammar()
    answers, sys.stdout = sys.stdout, sys.stderr
    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if sys.platform == "linux":
        with open("/proc/self/statm") as pages:
            most = int(pages.read().split()[0]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        method, text, options, seconds = json.loads(line)
        # The limit of processor time ends the process, too, if its parent is gone.
        limit = math.ceil(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            CompilerCall(method, text, options).on(compiler)
            print("null", file=answers, flush=True)
        except Exception as error:
            print(json.dumps(str(error)[:2000]), file=answers, flush=True)


if __name__ == "__main__":
    main()
