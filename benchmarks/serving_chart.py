"""Draws docs/images/serving.svg: real traffic on our engine beside vLLM, from the records in benchmarks/results.

Usage: python benchmarks/serving_chart.py [docs/images/serving.svg]

`python benchmarks/suite.py serving` writes the records, `*serving*.json`. The peer's numbers come from the same record.
Only a model without such a record has the peer's numbers of the aims beside its config.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chart import BAR, GAP, LEFT, OURS, PEER, TOP, WIDTH, text

BENCHMARKS = Path(__file__).parent
PICTURE = BENCHMARKS.parent / "docs" / "images" / "serving.svg"
COLOURS = (OURS, "#60a5fa", "#0f766e")
"""Of our engines, one for each policy."""
QUANTITIES = (
    ("tokens_per_s", "", "new tokens a second, longer is better"),
    ("step_ms", "", "ms a step, shorter is better"),
    ("ttft_ms", "p50", "ms to the first token, median, shorter is better"),
    ("ttft_ms", "p99", "ms to the first token, 99th percentile"),
    ("itl_ms", "p50", "ms between tokens, median"),
    ("itl_ms", "p99", "ms between tokens, 99th percentile"),
)
"""(quantity of a row, its percentile, title)"""


class Bars(NamedTuple):
    """A workload's bars: a value of each engine; None where it has none."""

    workload: str
    values: list[float | None]


class Panel(NamedTuple):
    """The workloads with one quantity."""

    title: str
    rows: list[Bars]


class Chart(NamedTuple):
    """A record."""

    title: str
    engines: list[str]
    """Policies of ours, then the peer."""
    panels: list[Panel]


def read_chart(record: dict[str, Any], aims: dict[str, Any]) -> Chart:
    """The plain workloads of a record. Throughput is drawn of those at once, latencies of the others."""
    rows = [row for row in record["rows"] if row["variant"] is None]
    policies = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] is not None))
    measured = {(row["workload"], row["policy"]): row for row in rows}
    before = aims.get("serving", {}).get("peer", {})
    peers = [row["engine"] for row in rows if row["policy"] is None]
    peer = peers[0] if peers else aims.get("peer", "")
    panels = []
    for quantity, percentile, title in QUANTITIES:
        bars = []
        for workload in dict.fromkeys(row["workload"] for row in rows):
            asked = {"tokens_per_s": ("mix", "shared-prefix"), "step_ms": ("long",)}
            if workload.startswith("poisson") if percentile else workload in asked[quantity]:
                found = [measured.get((workload, policy)) for policy in policies]
                other = measured.get((workload, None)) if peers else before.get(workload)
                bars.append(Bars(workload, [_value(row, quantity, percentile) for row in (*found, other)]))
        if bars:
            panels.append(Panel(title, bars))
    machine = record["machine"]
    return Chart(
        f"{record['model']}, {record['dtype']}, {machine.get('gpu') or machine['cpu']}",
        [*(f"pymllm-interp, {policy}" for policy in policies), peer],
        panels,
    )


def _value(row: dict[str, Any] | None, quantity: str, percentile: str) -> float | None:
    found = (row or {}).get(quantity)
    return found.get(percentile) if isinstance(found, dict) else found


def draw(charts: Sequence[Chart]) -> str:
    """The charts as SVG, one under the other. Each panel has its own scale, which begins at 0."""
    parts: list[str] = []
    y = 14
    for chart in charts:
        parts.append(text(0, y, chart.title, 'font-weight="bold" fill="#111"'))
        colours = [*COLOURS[: len(chart.engines) - 1], PEER]
        for i, (engine, colour) in enumerate(zip(chart.engines, colours, strict=True)):
            parts.append(text(200 * i, y + 18, engine, f'fill="{colour}" font-weight="bold"'))
        y += TOP - 14
        for panel in chart.panels:
            parts.append(text(0, y - 8, panel.title, 'fill="#111"'))
            longest = max(value for bars in panel.rows for value in bars.values if value is not None)
            for bars in panel.rows:
                parts.append(text(LEFT - 8, y + BAR + 4, bars.workload, 'text-anchor="end" fill="#555"'))
                for value, colour in zip(bars.values, colours, strict=True):
                    if value is not None:
                        parts += bar(y, value, WIDTH * value / longest, colour)
                        y += BAR
                y += GAP
            y += 2 * GAP
        y += 2 * GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 70} {y}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def bar(y: float, value: float, length: float, colour: str) -> list[str]:
    shown = f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    box = f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{colour}"/>'
    return [box, text(round(LEFT + length + 5, 1), y + BAR - 3, shown, 'fill="#333" font-size="11"')]


def read_charts(benchmarks: Path) -> list[Chart]:
    """A chart for each record in the results. If a model has a record with a peer's rows, its other records are left out."""
    charts = []
    records = [json.loads(path.read_text()) for path in sorted((benchmarks / "results").glob("*serving*.json"))]
    beside = {record["model"] for record in records if _has_peer(record)}
    for record in records:
        if record["model"] in beside and not _has_peer(record):
            continue
        aims = benchmarks / "configs" / record["model"] / "aims.json"
        charts.append(read_chart(record, json.loads(aims.read_text()) if aims.is_file() else {}))
    return charts


def _has_peer(record: dict[str, Any]) -> bool:
    return any(row["policy"] is None for row in record["rows"])


def main() -> int:
    """Returns the exit status: 0, or 2 with a line on standard error where there is no record."""
    charts = read_charts(BENCHMARKS)
    if not charts:
        print("serving_chart.py: no *serving*.json in benchmarks/results", file=sys.stderr)
        return 2
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE).write_text(draw(charts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
