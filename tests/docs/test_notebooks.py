"""The notebooks of examples/notebooks run from top to bottom, each cell twice, as in a session in which a cell is run again.

They run in this process, since eight kernels would each import torch; one runs in a kernel, too.
"""

from __future__ import annotations

import ast
import asyncio
import json
import linecache
import re
import tomllib
from importlib.util import find_spec
from inspect import CO_COROUTINE
from typing import Any

import pytest
from helpers_paths import ROOT

pytestmark = pytest.mark.usefixtures("demo_tokenizer")
FOLDER = ROOT / "examples" / "notebooks"
NEEDS = {
    "activation_patching": ["plotly"], "attribution": ["plotly"], "circuits": ["plotly"],
    "evaluation": ["inspect_ai", "ipywidgets", "lm_eval"],
    "image_patches": ["plotly"],
    "logit_lens": ["plotly"], "sae_features": ["plotly"], "steering": [], "transformer_lens_names": ["plotly", "transformer_lens"],
}  # fmt: skip
"""Notebook -> packages of extras that it imports."""


def cells_of(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Run a cell as IPython does, and return the value of its last line.

    Its source stands in the linecache, where a trace looks for the text of its block. A cell may await.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree, last = ast.parse(source, name), None
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # pyright: ignore[reportAttributeAccessIssue]
    value = None
    for part, mode in ((tree, "exec"), (last, "eval")):
        if part is not None:
            code = compile(part, name, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(code, namespace)
            if code.co_flags & CO_COROUTINE:
                value = asyncio.run(value)
    return value


IN_A_KERNEL = ("ipywidgets",)
"""Packages that a notebook needs in a kernel only."""


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_every_cell_runs_twice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [package for package in NEEDS[name] if find_spec(package) is None and package not in IN_A_KERNEL]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for index, cell in enumerate(cells_of(name)):
            if cell["cell_type"] == "code":
                source, seen = "".join(cell["source"]), []
                for again in range(2):
                    value = run_cell(source, f"<{name} {index}.{again}>", namespace)
                    html = value._repr_html_() if hasattr(value, "_repr_html_") else ""
                    seen.append((capsys.readouterr().out, len(html) > 0))
                assert seen[0] == seen[1], source
    finally:
        if "lm" in namespace:
            namespace["lm"].shutdown()


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_the_install_line_has_what_the_notebook_needs(name: str) -> None:
    (extras,) = re.findall(r"pip install -e \"\.\[([\w,]+)\]\"", "".join(cells_of(name)[0]["source"]))
    known = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {re.split(r"[<>=;]", line)[0].replace("-", "_") for extra in extras.split(",") for line in known[extra]}
    assert {*NEEDS[name], "gguf"} <= brought


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.parametrize("name", ["logit_lens", "evaluation"])
def test_a_notebook_runs_in_a_kernel(name: str) -> None:
    missing = [package for package in NEEDS[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    pytest.importorskip("ipykernel", reason='ipykernel is not installed: pip install -e ".[notebook]"')
    nbclient = pytest.importorskip("nbclient", reason='nbclient is not installed: pip install -e ".[notebook]"')
    import nbformat

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    if name == "logit_lens":
        pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
        assert pages and sum("plotly.js v" in page for page in pages) == 1


def test_there_are_no_others_and_they_are_committed_without_outputs() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == NEEDS.keys()
    for name in NEEDS:
        for cell in cells_of(name):
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [] and cell["execution_count"] is None
