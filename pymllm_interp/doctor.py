"""`pymllm-interp doctor`: found and missing parts of this machine, and the commands that install them. For bug reports, too."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__
from .config import ModelConfig
from .models.registry import architecture_of, check_supported, described
from .models.weights.source import find_demo_gguf, resolve_model
from .utils.extras import install_command
from .utils.files.cache_folder import default_cache_dir

COMPILERS = {"g++": "compiles the CPU kernels; without it torch's are used", "gcc": "lets Triton compile on a GPU"}
TOOLS = ("dev", "test")
"""Extras for the work on this package."""


def run_doctor(model: str | None = None, engine: str = "own") -> int:
    """Print the table.

    Args:
        model: a folder, a file or a hub id; the report says how its config would run.
        engine: "own", or "vllm".

    Returns:
        0 if the demo and the model can run, else 1.
    """
    table = Table("", "", title="pymllm-interp doctor", show_header=False, title_justify="left")
    table.columns[1].overflow = "fold"
    rows, ok = _package_rows()
    demo, demo_ok = _demo_row()
    served, served_ok = _model_row(model) if model is not None and engine == "own" else ((), True)
    if engine == "vllm":
        served, served_ok = _vllm_rows(model)
    for name, value in [*_machine_rows(), *rows, demo, _cache_row(), *served]:
        table.add_row(name, value)
    Console().print(table)
    return 0 if ok and demo_ok and served_ok else 1


def cpu_model() -> str:
    """The processor's name, as well as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _machine_rows() -> list[tuple[str, str]]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("processor", f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} used by torch"),
        ("CUDA", ", ".join(gpus) if gpus else "none (models run on the CPU)"),
        *((name, shutil.which(name) or f"[yellow]missing[/] ({what})") for name, what in COMPILERS.items()),
    ]


def _package_rows() -> tuple[list[tuple[str, str]], bool]:
    """The packages that pyproject.toml declares: all required ones, and the missing ones of each extra."""
    needed, extras = declared()
    rows, ok = [("pymllm-interp", __version__)], True
    for requirement in needed:
        found, right = _found(requirement)
        ok = ok and right
        rows.append((requirement.name, found if right else f"[red]{found}[/]; run: pip install '{requirement}'"))
    for extra, requirements in extras.items():
        states = [(one.name, *_found(one)) for one in requirements]
        lacking = [f"{name} {found}" for name, found, right in states if not right]
        shown = ", ".join(f"{name} {found}" for name, found, _ in states)
        if lacking:
            shown = f"[yellow]{', '.join(lacking)}[/]; run: {escape(install_command(extra))}"
        rows.append((escape(f"[{extra}]"), shown))
    return rows, ok


def declared() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Requirements of the installed package, and of its extras; extras in `TOOLS` are left out."""
    try:
        own = distribution("pymllm-interp")
    except PackageNotFoundError:  # imported from a folder: nothing is declared
        return [], {}
    found = [Requirement(text) for text in own.requires or ()]
    extras = {
        extra: [one for one in found if one.marker and one.marker.evaluate({"extra": extra}) and _extra_in(one)]
        for extra in own.metadata.get_all("Provides-Extra") or ()
        if extra not in TOOLS
    }
    return [one for one in found if not _extra_in(one)], extras


def _extra_in(requirement: Requirement) -> bool:
    return "extra ==" in str(requirement.marker or "")


def _found(requirement: Requirement) -> tuple[str, bool]:
    """A package's version, and whether it is the wanted one."""
    version = installed_version(requirement.name)
    if version is None:
        return "missing", False
    right = requirement.specifier.contains(version, prereleases=True)
    return version if right else f"{version} (expected {requirement.specifier})", right


def _demo_row() -> tuple[tuple[str, str], bool]:
    try:
        return ("demo model", str(find_demo_gguf())), installed_version("gguf") is not None
    except FileNotFoundError as error:
        return ("demo model", f"[red]missing[/]: {error}"), False


def _model_row(model: str) -> tuple[tuple[tuple[str, str]], bool]:
    try:
        source = resolve_model(ModelConfig(model=model, load_format="dummy"))
        how, ok = described(source.hf_config), True
    except (OSError, ValueError) as error:
        how, ok = f"[red]refused[/]: {escape(str(error))}", False
    return ((model, how),), ok


def _vllm_rows(model: str | None) -> tuple[tuple[tuple[str, str], ...], bool]:
    """vLLM's version, and whether hooks are served in a model of its."""
    from .vllm_engine.architectures import check_architecture
    from .vllm_engine.versions import installed_version as vllm_version

    rows: list[tuple[str, str]] = []
    try:
        rows.append(("vllm", f"{vllm_version()}, a version that was tested"))
        if model is not None:
            config = resolve_model(ModelConfig(model=model, load_format="dummy")).hf_config
            check_supported(config)
            layers = ", ".join(sorted(check_architecture(config)))
            rows.append((model, f"vLLM: {architecture_of(config)}, with hooks at the norms of {layers}"))
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        rows.append((model or "vllm", f"[red]refused[/]: {escape(str(error))}"))
        return tuple(rows), False
    return tuple(rows), True


def _cache_row() -> tuple[str, str]:
    cache = default_cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return "cache", f"{cache} ({shutil.disk_usage(existing).free / 1e9:.1f} GB free)"


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
