"""The tables of numbers in README and docs are those of benchmarks/results (docs/make_numbers.py)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from helpers_paths import ROOT

NUMBERS: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "make_numbers.py"))


@pytest.mark.parametrize("page", NUMBERS["pages"](), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_those_of_the_records(page: Path) -> None:
    assert page.read_text() == NUMBERS["updated"](page), "run `python docs/make_numbers.py`"


def test_each_table_is_shown_once_or_more_and_each_block_is_closed() -> None:
    text = "\n".join(page.read_text() for page in NUMBERS["pages"]())
    shown = re.findall(r"<!-- numbers: ([\w-]+) -->", text)
    assert set(shown) == set(NUMBERS["TABLES"]) and len(shown) == text.count("<!-- end -->")


def test_a_stale_number_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n<!-- numbers: lora-h100 -->\n| batch 1 | 1 | 9.99 |\n<!-- end -->\nmore\n")
    text = NUMBERS["updated"](page)
    assert "9.99" not in text and NUMBERS["TABLES"]["lora-h100"]() in text
    assert text.startswith("text\n") and text.endswith("<!-- end -->\nmore\n")
    page.write_text(text)
    assert NUMBERS["updated"](page) == text
