"""The number of ways to do one thing may only fall (tools/ways.py)."""

from __future__ import annotations

import subprocess
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
    """In a process of its own: the profiler sees all that runs on the engine's thread."""
    out = subprocess.run(
        [sys.executable, str(TOOLS / "ways.py"), "--measure"],
        capture_output=True, text=True, check=True, cwd=TOOLS.parent, env=None,
    ).stdout  # fmt: skip
    for row in MEASURED:
        (line,) = [line for line in out.splitlines() if line.startswith(row)]
        found = int(line.removeprefix(row).split()[0].replace(",", ""))
        assert found <= ways.AT_MOST[row], f"{row}: {found}, at most {ways.AT_MOST[row]}\n{out}"
