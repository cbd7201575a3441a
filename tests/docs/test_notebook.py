"""The notebook of examples/ runs from top to bottom, each cell twice, as in a session in which a cell is run again."""

from __future__ import annotations

import json
import linecache
from typing import Any

import pytest
from helpers_paths import ROOT

NOTEBOOK = ROOT / "examples" / "first_day.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a cell as IPython does: its source stands in the linecache, where a trace looks for the text of its block."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)


@pytest.mark.usefixtures("one_demo")
def test_every_cell_runs_twice(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: list[list[str]] = []
    try:
        for index, cell in enumerate(CELLS):
            if cell["cell_type"] == "code":
                printed.append([])
                for again in range(2):
                    run_cell("".join(cell["source"]), f"<cell {index}.{again}>", namespace)
                    printed[-1].append(capsys.readouterr().out)
    finally:
        if "lm" in namespace:
            namespace["lm"].shutdown()
    assert all(first == second for first, second in printed)
    _, _, lens, steering, patching, _ = (first for first, _ in printed)
    assert "layer 29  ' Paris'" in lens
    plain, steered, receipt = steering.splitlines()
    assert "sea" in steered and "sea" not in plain and "resid_post.15" in receipt
    assert namespace["gaps"][0] > 1 and namespace["gaps"][-1] < -1 and len(patching.splitlines()) == 30


def test_the_notebook_is_committed_without_outputs() -> None:
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
