"""Decisions: one form, at most 150 words, and each number that anything names leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers_paths import ROOT

FOLDER = ROOT / "docs" / "decisions"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
FORM = re.compile(
    r"# (\d+)\. \S.*\n\n\*\*Context\.\*\* \S.*\n\n\*\*Choice\.\*\* \S.*\n\n\*\*Cost\.\*\* \S.*", re.DOTALL
)
WORDS, AT_MOST = 150, 42
"""Words of a decision, and decisions: one more is a merge with another, or a line of the history."""
NAMED = re.compile(r"\b[Dd]ecisions?[ ,\[(]+(?:docs/decisions, )?(\d+)|docs/decisions, (\d+)|decisions/0*(\d+)-")


def numbers_of_history() -> set[int]:
    return {int(number) for number in re.findall(r"^\| (\d+) \|", (FOLDER / "history.md").read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_has_title_context_choice_and_cost_in_few_words(page: Path) -> None:
    text = page.read_text().strip()
    found = FORM.fullmatch(text)
    assert found is not None and len(text.split("\n\n")) == 4, "title, Context, Choice and Cost, a paragraph each"
    assert page.name.startswith(f"{int(found[1]):04}-")
    assert len(re.findall(r"\S*\w\S*", text)) <= WORDS


def test_the_index_and_the_history_have_each_number_once() -> None:
    index = (FOLDER / "README.md").read_text()
    titles = {page.read_text().splitlines()[0].removeprefix("# "): page.name for page in PAGES}
    assert [f"[{title}]({name})" for title, name in titles.items()] == re.findall(r"\[\d+\. .*\]\(\d.*\)", index)
    kept = {int(page.name[:4]) for page in PAGES}
    assert 0 < len(kept) <= AT_MOST
    assert not kept & numbers_of_history()


def test_each_decision_that_is_named_is_a_page_or_a_line_of_the_history() -> None:
    known = {int(page.name[:4]) for page in PAGES} | numbers_of_history()
    sources = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    sources += [
        path
        for folder in ("docs", "pymllm_interp", "tests", "tools", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".md", ".py")
    ]
    named = {
        (int(next(filter(None, found))), path.name) for path in sources for found in NAMED.findall(path.read_text())
    }
    assert len(named) > 10 and not {(number, name) for number, name in named if number not in known}
