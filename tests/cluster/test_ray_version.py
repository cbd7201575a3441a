"""What a user without Ray, without a cluster, or with another version of Ray is told. Needs no Ray."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from pymllm_interp import LM
from pymllm_interp.cli import main
from pymllm_interp.harvest.on_ray.ray_version import load_ray


def test_a_missing_ray_is_told_with_its_extra_and_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r'ray>=2\.60,<2\.61: pip install -e "\.\[ray\]"'
    with pytest.raises(ImportError, match=message):
        LM.connect("ray:demo")
    assert main(["cluster", "demo"]) == 2
    assert 'pip install -e ".[ray]"' in capsys.readouterr().err


@pytest.mark.parametrize("version", ["2.59.9", "2.61.0", "3.0.0"])
def test_another_version_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__=version))
    with pytest.raises(ImportError, match=rf"ray {version} is installed, which is not tested; .*ray>=2\.60,<2\.61"):
        load_ray()


def test_a_word_after_the_model_is_refused_before_ray_is_asked(capsys: pytest.CaptureFixture[str]):
    assert main(["cluster", "demo", "3"]) == 2
    assert "'3' after the model 'demo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "a/b"], "the cluster's name 'a/b'"),
        (["--name", ""], "the cluster's name ''"),
        (["--name", "ü" * 70], "expected up to 64 letters"),
        (["--replicas", "0"], "--replicas 0: expected 1 to 1024"),
        (["--fronts", "-1"], "--fronts -1: expected 1 to 1024"),
        (["--replica-cpus", "-1"], "--replica-cpus -1.0"),
        (["--replica-gpus", "nan"], "--replica-gpus nan"),
        (["--port", "65535", "--fronts", "2"], "the last port would be above 65535"),
        (["scale", "0"], "expected the number of replicas, 1 to 1024"),
        (["scale", "-1"], "expected the number of replicas, 1 to 1024"),
        (["scale", "two"], "expected the number of replicas, 1 to 1024"),
        (["scale", "²"], "expected the number of replicas, 1 to 1024"),
        (["scale", "1" * 5000], "expected the number of replicas, 1 to 1024"),
        (["scale"], "expected the number of replicas, 1 to 1024"),
        (["drain"], "expected the name of a replica"),
    ],
)
def test_options_that_cannot_be_are_refused_before_ray_is_asked(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["cluster", *(["demo"] if options[0].startswith("--") else []), *options]) == 2
    assert message in capsys.readouterr().err


def test_an_address_without_a_name_is_refused():
    for name in ("", "a b", "../x", "@host:1"):
        with pytest.raises(ValueError, match="the cluster's name"):
            LM.connect(f"ray:{name}")


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
@pytest.mark.parametrize("where", ["127.0.0.1:1", "127.0.0.1:99999", "no.such.host.invalid:6379", "nonsense"])
def test_an_address_where_no_ray_cluster_is_is_told_soon(where: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConnectionError, match=r"no Ray cluster answers at .* RAY_AUTH_MODE=token is needed"):
        LM.connect(f"ray:demo@{where}")
