"""Imports of transformers without parts that an engine does not call."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import transformers.utils

_USER = "transformers.generation.candidate_generator"


def import_generation() -> None:
    """Import transformers' generation without scikit-learn, which is imported when it is first called.

    If installed, transformers imports it for one function of assisted generation (candidate_generator.py). With scipy
    and pandas behind it, that is a third of the CPU time of an engine's start.
    """
    installed = getattr(transformers.utils, "is_sklearn_available", None)
    if installed is None or _USER in sys.modules or "sklearn" in sys.modules or not installed():
        return
    transformers.utils.is_sklearn_available = lambda: False
    try:
        user = importlib.import_module(_USER)
    except ModuleNotFoundError:  # of another version
        return
    finally:
        transformers.utils.is_sklearn_available = installed
    user.is_sklearn_available, user.roc_curve = installed, _roc_curve  # pyright: ignore[reportAttributeAccessIssue]


def _roc_curve(*args: Any, **kwargs: Any) -> Any:
    from sklearn.metrics import roc_curve  # pyright: ignore[reportMissingImports]

    return roc_curve(*args, **kwargs)
