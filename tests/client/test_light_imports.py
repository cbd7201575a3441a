"""An engine starts without scikit-learn, and transformers' assisted generation still finds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pymllm_interp.utils.light_imports import import_generation
import_generation()
assert "sklearn" not in sys.modules and "transformers.generation.candidate_generator" in sys.modules
from transformers.generation import candidate_generator
from transformers.utils import is_sklearn_available
assert candidate_generator.is_sklearn_available is is_sklearn_available and is_sklearn_available()
found = candidate_generator.roc_curve([0, 1, 1, 0], [0.1, 0.9, 0.4, 0.5])
from sklearn.metrics import roc_curve
assert all((one == other).all() for one, other in zip(found, roc_curve([0, 1, 1, 0], [0.1, 0.9, 0.4, 0.5])))
"""


def test_scikit_learn_is_imported_when_it_is_called() -> None:
    pytest.importorskip("sklearn", reason="transformers imports scikit-learn where it is installed")
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
