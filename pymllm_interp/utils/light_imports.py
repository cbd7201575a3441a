"""Imports of transformers without parts that an engine does not call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import transformers.utils

_USER = "transformers.generation.candidate_generator"
_ACTIVATIONS = "transformers.activations"
_VALIDATORS = "transformers.utils.type_validators"


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


class _Activations(Mapping[str, Any]):
    """transformers' activation functions by name, imported when one is asked for."""

    def _all(self) -> Mapping[str, Any]:
        return importlib.import_module(_ACTIVATIONS).ACT2FN

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def import_validators() -> None:
    """Import transformers' validators of configurations without its activation functions.

    Llama's configuration takes one of them. The functions import transformers' loading of models and torch's compiler: a
    third of the CPU time of an engine's start.
    """
    if _VALIDATORS in sys.modules or _ACTIVATIONS in sys.modules:
        return
    stand_in: Any = ModuleType(_ACTIVATIONS)
    stand_in.ACT2FN = _Activations()
    sys.modules[_ACTIVATIONS] = stand_in
    try:
        importlib.import_module(_VALIDATORS)
    except ImportError:  # of another version
        return
    finally:
        del sys.modules[_ACTIVATIONS]
