"""The number of ways to do one thing may only fall (tools/ways.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

import ways  # noqa: E402  # pyright: ignore[reportMissingImports]

MEASURED = ("host files that a plain request enters", "files of hooks/ among them")


def test_each_way_of_the_table_is_in_the_code() -> None:
    gone = [place for concept in ways.WAYS for place in concept.ways if not ways.stands(place)]
    assert not gone, f"take them out of WAYS, and lower AT_MOST: {gone}"
    assert not ways.stands("lm.py:NoSuchClass") and not ways.stands("nowhere.py")


@pytest.mark.parametrize("row", [row for row in ways.AT_MOST if row not in MEASURED])
def test_a_number_is_what_the_table_says(row: str) -> None:
    """A number that falls is lowered in AT_MOST, so that it cannot rise again."""
    assert ways.counts()[row] == ways.AT_MOST[row]


def test_a_plain_request_enters_few_files() -> None:
    files = ways.entered_files()
    found = dict(zip(MEASURED, (len(files), sum(file.startswith("hooks/") for file in files)), strict=True))
    assert len(files) > 20 and not {row: count for row, count in found.items() if count > ways.AT_MOST[row]}, files
