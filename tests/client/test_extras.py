"""Libraries of the extras are imported when they are used, and missing ones are named with their extra."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

USES = {
    "transformer_lens": ("pymllm_interp.lens", "Bridge", "bridge", "lens"),
    "nnterp": ("pymllm_interp.lens", "StandardizedLM", ".nnterp", "lens"),
    "lm_eval": ("pymllm_interp.evals", "HarnessLM", "harness", "evals"),
    "inspect_ai": ("pymllm_interp.evals", "EngineAPI", "inspect", "evals"),
}
"""Package -> (module that has a name, the name, the file that imports the package, extra)."""


IMPORTS = """
import sys
from pymllm_interp import LM
assert not {"transformers.modeling_utils", "transformers.core_model_loading", "torch._dynamo", "sympy"} & set(sys.modules)

import pymllm_interp.plots, pymllm_interp.lens, pymllm_interp.evals
assert not {"plotly", "transformer_lens", "nnterp", "lm_eval", "inspect_ai", "datasets"} & set(sys.modules)

from transformers import AutoConfig
from pymllm_interp.utils.light_imports import import_generation, import_validators
import_generation()
import_validators()
AutoConfig.for_model("llama", initializer_range=0.5)
assert "sklearn" not in sys.modules and "transformers.generation.candidate_generator" in sys.modules
assert not {"transformers.activations", "transformers.core_model_loading", "torch._dynamo", "sympy"} & set(sys.modules)
"""
LATER = """
from pymllm_interp.utils.light_imports import import_generation, import_validators
import_generation()
import_validators()
from transformers.generation import candidate_generator
from transformers.utils import is_sklearn_available
assert candidate_generator.is_sklearn_available is is_sklearn_available
if is_sklearn_available():
    found = candidate_generator.roc_curve([0, 1, 1, 0], [0.1, 0.9, 0.4, 0.5])
    from sklearn.metrics import roc_curve
    assert all((one == other).all() for one, other in zip(found, roc_curve([0, 1, 1, 0], [0.1, 0.9, 0.4, 0.5])))

from transformers.utils.type_validators import activation_fn_key
activation_fn_key("gelu")
try:
    activation_fn_key("nothing")
except ValueError as error:
    assert "quick_gelu" in str(error)
from transformers.activations import ACT2CLS, ACT2FN
assert ACT2CLS and ACT2FN["silu"](3.0 * __import__("torch").ones(1)) > 2.8
"""


def test_an_import_brings_what_is_needed_and_the_rest_when_it_is_used() -> None:
    """transformers' models and what they import take longer than all else: a native model without a tokenizer needs none.
    An engine starts without scikit-learn, and reads Llama's configuration without models.
    """
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


@pytest.mark.slow
def test_transformers_still_finds_what_was_left_out() -> None:
    subprocess.run([sys.executable, "-c", LATER], check=True)


def test_a_method_of_a_cache_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from pymllm_interp import LM
    from pymllm_interp.client.calls.activation_cache import ActivationCache
    from pymllm_interp.hooks.site import Site

    for loaded in [name for name in sys.modules if name.startswith("pymllm_interp.lens.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    lm = LM.__new__(LM)
    cache = ActivationCache(1, {Site.parse("resid_post.0"): torch.zeros(1, 2, 3)}, lm)
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[lens\]"'):
        cache.accumulated_resid()


@pytest.mark.parametrize("package", USES)
def test_a_missing_library_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, home, extra = USES[package]
    file = importlib.util.resolve_name(f".{home}", module)
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == package or loaded == file]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"{module}.driver", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install -e "\.\[{extra}\]"'):
        getattr(importlib.import_module(module), name)


def test_plots_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from pymllm_interp import plots

    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[plot\]"'):
        plots.attribution_bars([1.0], ["a"])


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    for module, names in (
        ("pymllm_interp.lens", "did you mean Bridge"),
        ("pymllm_interp.evals", "EngineAPI, HarnessLM"),
    ):
        with pytest.raises(AttributeError, match=names):
            importlib.import_module(module).Bride  # noqa: B018
