"""All ops and reductions by name in JSON: the registry, once every file that may register one is imported."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from . import captures, interventions, monitors
from .captures import reductions as reductions_folder
from .registry import OPS, REDUCTIONS
from .spec import Spec


def ops() -> Mapping[str, type[Spec]]:
    """Name in JSON -> class of interventions."""
    _import_files()
    return OPS


def reductions() -> Mapping[str, type[Spec]]:
    """Name in JSON -> class of reductions."""
    _import_files()
    return REDUCTIONS


@cache
def _import_files() -> None:
    for folder in (interventions, captures, monitors, reductions_folder):
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            import_module(module.name)
