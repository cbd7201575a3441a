"""Draws docs/images/speed.svg: our decode steps beside the peers', from the records in benchmarks/results.

Usage: python benchmarks/chart.py [docs/images/speed.svg]

Plain steps of both engines come from one lease, h200-serving-vllm.json. Traced steps come from the suite "traces" of the 8B shape.
nnsight's numbers, in benchmarks/configs/llama8b/aims.json, were measured separately. Lowered blocks, and the same blocks in the
passes, are one run of an earlier script, whose cases the suite "traces" has today.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).parent
PICTURE = BENCHMARKS.parent / "docs" / "images" / "speed.svg"
OURS, PEER = "#2563eb", "#b6bdc9"
LEFT, WIDTH, BAR, GAP, TOP = 130, 470, 13, 10, 66
"""Of the bars: where they start, the longest, thickness, distance of groups, and where the first is; SVG units."""
LEAST, MOST = 2.0, 400.0
"""ms at the ends of the logarithmic axis."""


class Group(NamedTuple):
    """Bars of one kind of request: ms a decode step, one value for each batch size."""

    title: str
    peer: str
    ours: Sequence[float]
    peers: Sequence[float]


def read_groups(benchmarks: Path) -> tuple[list[int], list[Group]]:
    """(batch sizes, groups) from the records."""
    aims = json.loads((benchmarks / "configs" / "llama8b" / "aims.json").read_text())
    lease = json.loads((benchmarks / "results" / "h200-serving-vllm.json").read_text())
    traces = json.loads((benchmarks / "results" / "gpu-traces-llama8b.json").read_text())["rows"]
    batches = aims["batches"]

    def traced(case: str) -> list[float]:
        by_batch = {row["batch"]: row["ms"] for row in traces if row["case"] == case}
        return [by_batch[batch] for batch in batches]

    ours, peer = lease["engines"]
    groups = [Group("plain requests", f"{peer} in one lease", lease["decode"]["ms"][ours], lease["decode"]["ms"][peer])]
    for case in ("every request reads one layer", "every request reads 8 layers"):
        other = f"{aims['traced_peer']}, measured separately"
        groups.append(Group(case, other, traced(case), aims["traces"][case]["peer"]))
    rows = json.loads((benchmarks / "results" / "h200-lowered-c8516a9.json").read_text())["rows"]
    modes = {(row["mode"], row["batch"]): row["ms"] for row in rows if row["what"] == "saves eight layers"}
    lowered, inside = ([modes[mode, batch] for batch in batches] for mode in ("auto", "off"))
    groups.append(Group("every request saves 8 layers, lowered", "the same blocks in the passes", lowered, inside))
    return batches, groups


def draw(batches: Sequence[int], groups: Sequence[Group]) -> str:
    """The chart as SVG: for each group and batch size our bar, and the peer's under it."""
    parts, y = [], TOP
    for group in groups:
        parts.append(text(0, y - 8, f"{group.title}, beside {group.peer}", 'font-weight="bold" fill="#111"'))
        for batch, ours, peer in zip(batches, group.ours, group.peers, strict=True):
            parts.append(text(LEFT - 8, y + BAR + 4, f"batch {batch}", 'text-anchor="end" fill="#555"'))
            parts += bar(y, ours, OURS) + bar(y + BAR, peer, PEER)
            y += 2 * BAR + GAP
        y += 3 * GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 70} {y}" font-family="sans-serif" font-size="12">'
    legend = text(0, 14, "ms a decode step, 8B shape, bf16, one H200; logarithmic, shorter is better", 'fill="#555"')
    names = text(0, 32, "pymllm-interp", f'fill="{OURS}" font-weight="bold"') + text(
        100, 32, "the peer", 'fill="#7a8394"'
    )
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, background, legend, names, *parts, "</svg>\n"])


def bar(y: float, ms: float, colour: str) -> list[str]:
    length = WIDTH * math.log(ms / LEAST) / math.log(MOST / LEAST)
    value = f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"
    box = f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{colour}"/>'
    return [box, text(round(LEFT + length + 5, 1), y + BAR - 3, value, 'fill="#333" font-size="11"')]


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def main() -> None:
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    picture.write_text(draw(*read_groups(BENCHMARKS)))


if __name__ == "__main__":
    main()
