"""Writes the tables of the GPU suites' records into a page of the documentation.

Usage: python benchmarks/report.py benchmarks/results/README.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from suites.tables import read_aims, render

BENCHMARKS = Path(__file__).parent
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
"""Markers; `update_page` replaces the text between them."""


def update_page(page: Path, benchmarks: Path = BENCHMARKS) -> None:
    """Write `tables` between the markers of `page`.

    Raises:
        ValueError: the page has no markers.
    """
    before, _, after = split_page(page)
    page.write_text(f"{before}{BEGIN}\n\n{tables(page, benchmarks)}\n{END}{after}")


def split_page(page: Path) -> tuple[str, str, str]:
    """(text before the markers, between them, after them).

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    between, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no {BEGIN} and {END}: the tables go between them")
    return before, between, after


def tables(page: Path, benchmarks: Path) -> str:
    """The tables of all records of the GPU suites, with links relative to `page`.

    Args:
        benchmarks: folder with `configs` and `results`. Records are the `gpu-*.json` in `results` that name a suite;
            `profiles-MODEL.json` are records of the suite "profile".
    """
    results, parts = benchmarks / "results", []
    for path in sorted(results.glob("gpu-*.json")):
        record = json.loads(path.read_text())
        if "suite" in record:
            source = f"[{path.name}]({os.path.relpath(path, page.parent)})"
            profiled = results / f"profiles-{record['model']}.json"
            earlier = json.loads(profiled.read_text()) if profiled.is_file() else None
            parts.append(render(record, read_aims(benchmarks / "configs" / record["model"]), source, earlier))
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with a line on standard error."""
    parser = argparse.ArgumentParser(description="Write the tables of benchmarks/results into a page.")
    parser.add_argument("page", type=Path)
    try:
        update_page(parser.parse_args(argv).page)
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
