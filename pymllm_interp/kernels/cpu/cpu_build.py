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

from ...utils.files.cache_folder import default_cache_dir

FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
ISAS = ("avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets of matrix products, ascending. Each includes those before it."""
ISA_VARIABLE = "PYMLLM_INTERP_MAX_CPU_ISA"
"""The environment variable that names the last of `ISAS` to use: a processor with fewer instructions is imitated. Default: all."""
COMPILERS = ("g++", "clang++", "c++")
COMPILE_SECONDS = 120


class BuildError(ImportError):
    """The kernels cannot be compiled here."""


def max_isa() -> str:
    """The last of `ISAS` that may be used. Raises ValueError: `ISA_VARIABLE` names none of them."""
    isa = os.environ.get(ISA_VARIABLE) or ISAS[-1]
    if isa not in ISAS:
        raise ValueError(f"{ISA_VARIABLE} is {isa!r}, not one of {', '.join(ISAS)}")
    return isa


def load_library(source: Path, isa: str) -> ctypes.CDLL:
    """Compile `source`, with the headers beside it, or find the library that was compiled before.

    The compiler is the one that the environment variable CXX names, else the first of `COMPILERS`. With "avx2" as `isa` all kernels
    are compiled without AVX-512. The others of `ISAS` have one library.

    Raises:
        BuildError: no compiler, or one that fails.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise BuildError(f"none of the compilers {', '.join(COMPILERS)} is installed")
    # torch's own OpenMP: a second one would have separate threads.
    openmp = [str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]]
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    flags = (*FLAGS, "-mno-avx512f") if isa == "avx2" else FLAGS
    key = (texts, compiler, flags, processor(), torch.__version__)
    name = f"{source.stem}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.so"
    library = default_cache_dir() / name
    if not library.exists():
        _compile([compiler, *flags, str(source), "-Wl,--as-needed", *openmp], library)
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


def processor() -> str:
    """Description of the processor, on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
