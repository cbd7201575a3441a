"""Compiles the CPU's kernels for this processor, once: the library is kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from ...utils.cache_folder import default_cache_dir

FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
COMPILERS = ("g++", "clang++", "c++")
COMPILE_SECONDS = 120


class BuildError(ImportError):
    """The kernels cannot be compiled here."""


def load_library(source: Path) -> ctypes.CDLL:
    """Compile `source`, or find the library that was compiled before.

    The compiler is the one that the environment variable CXX names, else the first of `COMPILERS`.

    Raises:
        BuildError: no compiler, or one that fails.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise BuildError(f"none of the compilers {', '.join(COMPILERS)} is installed")
    # torch's own OpenMP: a second one would have threads of its own.
    openmp = [str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]]
    key = (source.read_text(), compiler, FLAGS, _processor(), torch.__version__)
    name = f"{source.stem}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.so"
    library = default_cache_dir() / name
    if not library.exists():
        _compile([compiler, *FLAGS, str(source), "-Wl,--as-needed", *openmp], library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error


def _compile(command: list[str], library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, timeout=COMPILE_SECONDS)
            made.replace(library)  # at once: other processes may compile it, too
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.decode(errors='replace').strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the kernels cannot be compiled: {error}") from error


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
