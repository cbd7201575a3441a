"""What a user without Ray, without a cluster, or with another version of Ray is told. Needs no Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pymllm_interp import LM
from pymllm_interp.cli import main
from pymllm_interp.cluster.ray_version import load_ray


def test_a_missing_ray_is_told_with_its_extra_and_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r"ray>=2\.60,<2\.61: pip install 'pymllm-interp\[ray\]'"
    with pytest.raises(ImportError, match=message):
        LM.connect("ray:demo")
    assert main(["cluster", "demo"]) == 2
    assert "pip install 'pymllm-interp[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["2.59.9", "2.61.0", "3.0.0"])
def test_another_version_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__=version))
    with pytest.raises(ImportError, match=rf"ray {version} is installed, which is not tested; .*ray>=2\.60,<2\.61"):
        load_ray()


def test_a_word_after_the_model_is_refused_before_ray_is_asked(capsys: pytest.CaptureFixture[str]):
    assert main(["cluster", "demo", "3"]) == 2
    assert "'3' after the model 'demo'" in capsys.readouterr().err
