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


def test_nothing_imports_them_before_they_are_used() -> None:
    code = (
        "import sys, pymllm_interp.plots, pymllm_interp.lens, pymllm_interp.evals; "
        "heavy = {'plotly', 'transformer_lens', 'nnterp', 'lm_eval', 'inspect_ai', 'datasets'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_an_lm_is_imported_without_the_models_of_transformers() -> None:
    """They, and what they import, take longer than all else. A native model without a tokenizer needs none of them."""
    code = (
        "import sys; from pymllm_interp import LM; "
        "heavy = {'transformers.modeling_utils', 'transformers.core_model_loading', 'torch._dynamo', 'sympy', 'sklearn'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


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
        ("pymllm_interp.lens", "Bridge, StandardizedLM"),
        ("pymllm_interp.evals", "EngineAPI, HarnessLM"),
    ):
        with pytest.raises(AttributeError, match=names):
            importlib.import_module(module).Bride  # noqa: B018
