"""Results of the suite "serving" as a Markdown table: throughput and latencies, with aims, a peer's numbers, and ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

THROUGHPUT = "tokens_per_s"
COLUMNS = {
    THROUGHPUT: "new tokens a second",
    "step_ms": "a step",
    "ttft_ms": "first token: p50 / p90 / p99",
    "itl_ms": "between tokens",
    "e2e_ms": "whole request",
}
"""Measured quantities; times are in ms."""
PERCENTILES = ("p50", "p90", "p99")
Cell = Callable[[str, float, str], str]
"""(quantity, value, its percentile or "") -> text."""


def serving_lines(record: dict[str, Any], aims: dict[str, Any], conditions: str) -> list[str]:
    """The lines of a record, with the aims of plain workloads under each of our rows.

    Args:
        aims: of the model; "serving" has "aim" and "peer", each workload -> quantity -> a number, or its percentiles.
        conditions: the machine, and a link to the record.
    """
    asked, settings = aims.get("serving", {}), record["settings"]
    weights = "Random" if record["load_format"] == "dummy" else "Real"
    scale = "" if settings["scale"] == 1 else f" {settings['scale']:g} of the requests or of the duration."
    lines = [
        f"### {record['model']}: serving", "", f"{conditions}\n{weights} weights, {record['dtype']}, greedy.{scale}", "",
        "| ms where nothing else is said | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]  # fmt: skip
    for row in sorted(record["rows"], key=_order(record["rows"])):
        workload, variant = row["workload"], row["variant"]
        server = row["engine"] if row["policy"] is None else row["policy"]
        lines.append(_line(", ".join(filter(None, (workload, variant, server))), row, _number))
        if variant is not None:
            lines.append(_line("... against plain", row["against_plain"], lambda _, value, __: f"x {value:.2f}"))
        if "against_alone" in row:
            lines.append(
                _line("... against no long prompts", row["against_alone"], lambda _, value, __: f"x {value:.2f}")
            )
        if variant is None and row["policy"] is not None:
            if workload in asked.get("aim", {}):
                lines.append(_line("... aim", asked["aim"][workload], _met(row)))
            if workload in asked.get("peer", {}):
                lines.append(_line(f"... {aims['peer']}, measured before", asked["peer"][workload], _number))
    return lines


def _order(rows: list[dict[str, Any]]) -> Callable[[dict[str, Any]], tuple[int, bool]]:
    """By workload and variant as they were first measured, peers last."""
    places = {key: i for i, key in enumerate(dict.fromkeys((row["workload"], row["variant"]) for row in rows))}
    return lambda row: (places[row["workload"], row["variant"]], row["policy"] is None)


def _line(title: str, values: Mapping[str, Any], cell: Cell) -> str:
    cells = [title]
    for quantity in COLUMNS:
        found = values.get(quantity)
        if isinstance(found, Mapping):
            texts = [cell(quantity, found[p], p) if p in found else "-" for p in PERCENTILES]
            cells.append(" / ".join(texts))
        else:
            cells.append("-" if found is None else cell(quantity, found, ""))
    return "| " + " | ".join(cells) + " |"


def _number(quantity: str, value: float, _: str) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if quantity == THROUGHPUT or value >= 1000 else f"{value:.3g}"


def _met(row: Mapping[str, Any]) -> Cell:
    """Aims, marked: throughput is to be reached, times are not to be exceeded."""

    def cell(quantity: str, aim: float, percentile: str) -> str:
        value = row[quantity][percentile] if percentile else row[quantity]
        met = value >= aim if quantity == THROUGHPUT else value <= aim
        return f"{_number(quantity, aim, '')} {'met' if met else '**missed**'}"

    return cell
