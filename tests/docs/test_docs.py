"""What README and docs show is true: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import report
from helpers_docs import ROOT, script_of
from helpers_forks import forking

import pymllm_interp
from pymllm_interp import LM, SAE
from pymllm_interp.cli import make_parser
from pymllm_interp.core.families import FAMILIES, MROPE_SECTIONS
from pymllm_interp.models.registry import NATIVE, VISION

pytestmark = pytest.mark.usefixtures("demo_tokenizer")
COMMANDS = ("demo", "generate", "serve", "cluster", "bench", "doctor", "cache")
DOCS = ROOT / "docs"
ALL = [page for page in sorted(DOCS.rglob("*.md")) if page.name != "api.md"]
PAGES = [ROOT / "README.md", *(page for page in ALL if page.parent.name != "decisions")]
LINKING = [*PAGES, *(page for page in ALL if page.parent.name == "decisions")]
LINKING += [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/results/README.md")]


def name_of(page: Path) -> str:
    """Path of the page below the repository, without its suffix."""
    return str(page.relative_to(ROOT).with_suffix(""))


ELSEWHERE = {"serve", "images", "audio"}
"""Pages whose Python needs a server, or a model of another kind. They have tests of their own."""
OF_NIGHTS = {"libraries"}
"""Pages of libraries that have tests of their own (tests/lens, tests/evals), and whose imports take most of ten seconds."""
NEEDS = {"libraries": ("transformer_lens", "nnterp", "lm_eval", "inspect_ai", "plotly"), "vllm": ("vllm",)}
"""Page -> packages of extras that its Python imports."""


def marked(page: Path) -> Any:
    return pytest.param(page, marks=pytest.mark.slow) if page.stem in OF_NIGHTS else page


@pytest.mark.usefixtures("one_demo")
@pytest.mark.parametrize(
    "page", [marked(page) for page in PAGES if script_of(page).strip() and page.stem not in ELSEWHERE], ids=name_of
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    missing = [package for package in NEEDS.get(page.stem, ()) if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -e '.[dev]'")
    script = tmp_path / f"{page.stem}.py"
    script.write_text(script_of(page))
    with forking():
        runpy.run_path(str(script), run_name="__main__")


def test_the_readme_counts_the_native_families() -> None:
    (count,) = re.findall(r"\*\*(\d+) model families have kernels of their own", (ROOT / "README.md").read_text())
    text = FAMILIES.keys() - MROPE_SECTIONS.keys()
    assert int(count) == len(NATIVE) - len(VISION) == len(text)
    rows = (DOCS / "reference" / "models.md").read_text()
    for family in text:
        assert f"| {family} | native |" in rows


def test_each_argument_of_an_lm_and_field_of_an_sae_is_in_the_docs() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    for field in fields(SAE):
        if field.type == "bool":
            assert re.search(rf"\b{field.name}\b", pages), field.name
    for value in ("fp8", "fp8-w8a8"):
        assert f'"{value}"' in (LM.__doc__ or "")
    named = re.findall(r"docs/[\w/-]+\.md", LM.__doc__ or "")
    assert named and all((ROOT / page).exists() for page in named)
    missing = [name for name in inspect.signature(LM).parameters if f"\n        {name}: " not in (LM.__doc__ or "")]
    assert not missing


def test_the_api_page_is_built_and_has_every_public_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_api.py", str(tmp_path / "api.md")])
    runpy.run_path(str(ROOT / "docs" / "make_api.py"), run_name="__main__")
    page = (tmp_path / "api.md").read_text()
    headings = re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)
    assert not set(pymllm_interp.__all__) - set(headings), "docs/make_api.py: SECTIONS lacks them"
    assert inspect.cleandoc(pymllm_interp.Gate.__doc__ or "").splitlines()[0].partition("`")[0] in page
    links = set(re.findall(r"\]\(([\w./-]+\.md)", page))
    assert len(links) > 5
    for name in links:
        assert (DOCS / "reference" / name).exists(), f"the API page links to {name}"


def test_a_page_that_is_wrong_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```\nnot python\n```\n```python\nx = 1\n```\n```python\nassert x == 2\n```\n")
    (tmp_path / "page.py").write_text(script_of(page))
    with pytest.raises(AssertionError) as failure:
        runpy.run_path(str(tmp_path / "page.py"))
    assert failure.traceback[-1].lineno + 1 == 9


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    folders = "core|engine|runner|models|layers|sampling|hooks|harvest|tests|examples|benchmarks"
    for name in re.findall(rf"\b(?:{folders})/[\w/]+\.py\b", page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "pymllm_interp" / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("source", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=name_of)
def test_what_users_are_shown_comes_from_the_package_and_its_homes(source: Path) -> None:
    deeper = re.findall(r"^\s*(?:from|import) (pymllm_interp\.[\w.]+)", source.read_text(), flags=re.MULTILINE)
    homes = {
        f"pymllm_interp.{home}"
        for home in ("captures", "config", "harvest", "interventions", "runner", "sampling", "toolkit", "vllm_engine")
    }
    assert not set(deeper) - homes, f"{source.name} reaches into {deeper}"


def test_commands_that_are_shown_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shown = re.findall(r"(?:^|`|cpu )make (\w+)", text, flags=re.MULTILINE)
    assert {"demo", "test"} <= set(shown) <= targets
    commands = re.findall(r"pymllm-interp ([a-z]+)\b", text)
    assert {"demo", "bench", "doctor"} <= set(commands) <= set(COMMANDS)
    for command in COMMANDS:
        with pytest.raises(SystemExit) as exit_status:
            make_parser().parse_args([command, "--help"])
        assert exit_status.value.code == 0


def test_the_tables_of_the_gpu_are_those_of_the_records():
    page = ROOT / "benchmarks" / "results" / "README.md"
    _, shown, _ = report.split_page(page)
    assert "decode, ms a step" in shown
    assert shown.strip() == report.tables(page, ROOT / "benchmarks").strip(), (
        "the numbers differ: run `python benchmarks/report.py benchmarks/results/README.md`"
    )


def test_the_chart_of_speed_is_that_of_the_records() -> None:
    chart = runpy.run_path(str(ROOT / "benchmarks" / "chart.py"))
    drawn = chart["draw"](*chart["read_groups"](ROOT / "benchmarks"))
    assert drawn == (ROOT / "docs" / "images" / "speed.svg").read_text(), "run `python benchmarks/chart.py`"
    batches, groups = chart["read_groups"](ROOT / "benchmarks")
    slower = [group._replace(ours=[2 * ms for ms in group.ours]) for group in groups]
    assert chart["draw"](batches, slower) != drawn


def test_each_environment_variable_of_ours_is_on_one_page() -> None:
    """docs/reference/settings.md; and the names that the code reads of others."""
    page = (DOCS / "reference" / "settings.md").read_text().partition("## Environment variables")[2]
    code = "".join(path.read_text() for path in (ROOT / "pymllm_interp").rglob("*.py"))
    ours = set(re.findall(r"\"(PYMLLM_INTERP_[A-Z_]+)\"", code))
    others = set(re.findall(r"environ(?:\.get)?[\[(]\"([A-Z][A-Z_]+)\"", code))
    assert len(ours) > 5 and not {name for name in ours | others if f"`{name}`" not in page}
