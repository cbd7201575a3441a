"""The script that runs nnsight's own tests over LM: its port, its two runs, its verdicts, and the committed table."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers_paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
RECORD = BENCHMARKS / "results" / "nnsight-suite.json"

TESTS = """
import pytest
import torch
from nnsight.modeling.transformers import TransformersModel


@pytest.fixture(scope="module")
def tiny():
    return TransformersModel("hf-internal-testing/tiny-random-LlamaForCausalLM", task="text-generation", dispatch=True)


def test_reads(tiny):
    with tiny.trace("hello world"):
        out = tiny.model.layers[0].output.save()
    assert out.ndim == 3


def test_is_of_nnsight(tiny):
    assert type(tiny).__name__ == "TransformersModel"


def test_without_a_model():
    assert torch.ones(1).item() == 1
"""


@pytest.fixture(scope="module")
def suite() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        yield importlib.import_module("nnsight_suite")


@pytest.mark.slow
def test_a_ported_file_runs_with_both_models_and_shows_where_they_differ(suite: ModuleType, tmp_path: Path) -> None:
    suite.write_ported({"test_tiny.py": TESTS}, tmp_path)
    control = suite.run_tests(tmp_path, "nnsight", None, [])
    assert {test.partition("::")[2]: result["model"] for test, result in control.items()} == {
        "test_reads": True,
        "test_is_of_nnsight": True,
        "test_without_a_model": False,
    }
    ours = suite.run_tests(tmp_path, "LM", [test for test in control if control[test]["model"]], [])
    table = {test.partition("::")[2]: suite.judge(test, control[test], ours.get(test)) for test in control}
    assert {test: row["verdict"] for test, row in table.items()} == {
        "test_reads": suite.PASSES,
        "test_is_of_nnsight": suite.FAILS,
        "test_without_a_model": suite.NO_MODEL,
    }
    assert "AssertionError" in table["test_is_of_nnsight"]["reason"] and table["test_is_of_nnsight"]["where"]


def test_a_port_says_the_same_of_the_demo_models_modules(suite: ModuleType) -> None:
    theirs = 'out = gpt2.transformer.h[0].attn.c_proj.output\nassert out.shape[-1] == 768\ncache["model.transformer.h.0.mlp"]\n'
    assert suite.rules.port("test_any.py", theirs) == (
        'out = gpt2.model.layers[0].self_attn.o_proj.output\nassert out.shape[-1] == 576\ncache["model.model.layers.0.mlp"]\n'
    )


def test_rules_that_no_longer_fit_are_noticed(suite: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"test_modeling.py has no .*: the rules are for nnsight 0.8.1"):
        suite.rules.port("test_modeling.py", "import pytest\n")


@pytest.mark.parametrize(
    ("control", "ours", "verdict"),
    [
        ("passed", "passed", "passes"),
        ("passed", "failed", "fails"),
        ("failed", "failed", "not applicable"),
        ("passed", "skipped", "not applicable"),
        ("passed", None, "no model"),
        ("skipped", None, "not applicable"),
    ],
)
def test_verdicts(suite: ModuleType, control: str, ours: str | None, verdict: str) -> None:
    results: list[Any] = [outcome and {"outcome": outcome, "reason": "why"} for outcome in (control, ours)]
    assert suite.judge("test_any.py::test_some", *results)["verdict"] == verdict


def test_a_known_difference_is_named_only_where_the_test_fails(suite: ModuleType) -> None:
    test = "test_batching.py::TestTraceBatching::test_each_invoke_sees_its_own_rows"
    passed, failed = {"outcome": "passed"}, {"outcome": "failed", "reason": "AssertionError: 3 == 6"}
    assert suite.judge(test, passed, failed)["verdict"] == suite.DIFFERS
    assert suite.judge(test, passed, passed)["verdict"] == suite.PASSES


def test_the_committed_table_is_that_of_the_record_and_nothing_in_it_fails(suite: ModuleType) -> None:
    record = json.loads(RECORD.read_text())
    assert RECORD.with_suffix(".md").read_text() == suite.markdown(record["tests"], record["files_left_out"])
    verdicts = [row["verdict"] for row in record["tests"].values()]
    assert suite.FAILS not in verdicts and verdicts.count(suite.PASSES) > 200
