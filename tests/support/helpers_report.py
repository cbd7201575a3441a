"""benchmarks/report.py, which is a script and no part of the package, as a module."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from helpers_paths import ROOT


def load_report() -> ModuleType:
    """The script as a module of its own."""
    path = ROOT / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("report", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = load_report()
