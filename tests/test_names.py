"""Public names: what the package and `LM` show, and old names that work for one more version."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

import pymllm_interp


def test_dir_of_the_package_is_its_public_names() -> None:
    import pymllm_interp.lm  # a submodule that was imported is no public name

    assert pymllm_interp.__all__ == [
        "LM", "SAE", "Ablate", "Activations", "Capture", "Clamp", "Gate", "Patch", "RequestOutput", "SamplingParams", "Scale",
        "Steer",
    ]  # fmt: skip
    assert set(dir(pymllm_interp)) == {*pymllm_interp.__all__, "__version__"}
    assert all(hasattr(pymllm_interp, name) for name in dir(pymllm_interp))


@pytest.mark.parametrize("name", sorted(pymllm_interp._MOVED))
def test_a_name_that_moved_works_and_names_its_home_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = f"pymllm_interp.{pymllm_interp._MOVED[name]}"
    monkeypatch.delitem(vars(pymllm_interp), name, raising=False)
    with pytest.warns(
        DeprecationWarning, match=rf"0\.2 removes pymllm_interp\.{name}: use from {home} import {name}$"
    ) as found:
        exec(f"from pymllm_interp import {name}")
    assert len(found) == 1 and found[0].filename == "<string>"  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(pymllm_interp, name) is getattr(import_module(home), name)
    monkeypatch.delitem(vars(pymllm_interp), name)


@pytest.mark.parametrize("home", ["pymllm_interp", "pymllm_interp.harvest", "pymllm_interp.runner"])
def test_a_wrong_name_is_told_the_closest_one(home: str) -> None:
    module = import_module(home)
    with pytest.raises(AttributeError, match=f"no attribute '{module.__all__[0]}e'; did you mean {module.__all__[0]}?"):
        getattr(module, module.__all__[0] + "e")
    with pytest.raises(AttributeError, match=f"no attribute 'zzzz'; it has .*{module.__all__[-1]}"):
        module.zzzz  # noqa: B018


def test_the_homes_wait_for_torch_and_hooks() -> None:
    """The plain runner loads no hooks, and readers of a harvest choose torch's threads before its import."""
    script = (
        "import sys, pymllm_interp.harvest, pymllm_interp.runner; assert 'torch' not in sys.modules\n"
        "from pymllm_interp.runner import ModelRunner; assert not [n for n in sys.modules if n.startswith('pymllm_interp.hooks')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
