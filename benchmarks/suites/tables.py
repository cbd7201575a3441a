"""Results of all suites as Markdown tables: numbers, aims, peers, and profiles of steps that missed an aim."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pymllm_interp.bench.tables import NumbersByBatch, Report, conditions, machine_line

from .interventions import TABLES_PRESENT
from .profile import longest, profile_lines
from .serving.tables import serving_lines
from .speculative import speculative_lines
from .startup import startup_lines

WITHIN = 0.05
"""Aim: how much slower the default may be than the better of the ways that it picks from."""


def read_aims(config: Path) -> dict[str, Any]:
    """The `aims.json` of a config folder; empty without such a file."""
    path = config / "aims.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def render(
    record: dict[str, Any], aims: dict[str, Any], source: str = "", earlier: dict[str, Any] | None = None
) -> str:
    """The tables of one record, with the conditions of the measurement.

    Args:
        aims: see `read_aims`.
        source: a link to the file.
        earlier: a record of the suite "profile" of the same model, for steps that missed an aim.
    """
    suite, machine = record["suite"], f"{machine_line(record)} {source}".strip()
    if suite == "memory":
        lines = _memory(record, machine)
    elif suite == "serving":
        lines = serving_lines(record, aims, machine)
    elif suite == "startup":
        lines = startup_lines(record, machine)
    elif suite == "profile":
        lines = profile_lines(record, f"{conditions(record)} {source}".strip())
    elif suite == "speculative":
        lines = speculative_lines(record, aims, f"{conditions(record)} {source}".strip())
    elif suite in ("interventions", "traces", "toolkit"):
        lines = _against_plain(record, aims, source)
    else:
        lines = AimedReport(record, aims, earlier).lines(source)
    return "\n".join(lines).rstrip("\n") + "\n"


class AimedReport(Report):
    """A report with aims, peers, and the profiles of the steps that missed an aim."""

    def __init__(self, record: dict[str, Any], aims: dict[str, Any], earlier: dict[str, Any] | None) -> None:
        super().__init__(record)
        self.aims, self.earlier = aims, earlier
        self.misses: dict[str, str] = {}
        """Key of the profile of the step -> what was missed."""

    def lines(self, source: str = "") -> list[str]:
        """The tables, and where the time of what was missed goes."""
        return super().lines(source) + self._explained()

    def beside(self, name: str, values: NumbersByBatch, step: str) -> list[str]:
        """Rows with the aims and the peer's numbers, if there are any."""
        asked, rows = self.aims.get(name, {}), []
        slower, form = ("at most", "{:.2f}") if name.endswith("_ms") else ("at least", "{:,.0f}")
        if "aim" in asked:
            aims = dict(zip(self.aims["batches"], asked["aim"], strict=True))
            cells = {
                n: self._aim(aims[n], value, form, slower, f"{step} {n}", f"{step} at bs {n}")
                for n, value in values.items()
                if n in aims
            }
            rows.append(self.cells(f"... aim, {slower}", cells))
        if "peer" in asked:
            peer = dict(zip(self.aims["batches"], asked["peer"], strict=True))
            rows.append(self.row(f"... {self.aims['peer']}", peer, "{:.3f}" if slower == "at most" else form))
        if "limit" in asked:
            limit = dict(zip(self.aims["batches"], asked["limit"], strict=True))
            rows.append(self.row("... limit, by the memory's bandwidth", limit, form))
        return rows

    def beside_prefill(self, rate: float) -> str:
        """The aim and the peer's speed, in parentheses."""
        asked, beside = self.aims.get("prefill_tokens_per_s", {}), []
        if "aim" in asked:
            beside.append(f"aim {self._aim(asked['aim'], rate, '{:,.0f}', 'at least', 'prefill', 'prefill')}")
        if "peer" in asked:
            beside.append(f"{self.aims['peer']} {asked['peer']:,.0f}")
        return f" ({'; '.join(beside)})" if beside else ""

    def over_better(self, batch: int, over: float) -> str:
        """With the aim."""
        met = over <= WITHIN
        if not met:
            self.misses[f"auto {batch}"] = f"the default's step at bs {batch}"
        return f"{over:+.1%} (aim {WITHIN:+.0%}, {'met' if met else '**missed**'})"

    def _aim(self, aim: float, value: float, form: str, bound: str, profile: str, what: str) -> str:
        met = value <= aim if bound == "at most" else value >= aim
        if not met:
            self.misses[profile] = what
        return f"{form.format(aim)}, {'met' if met else '**missed**'}"

    def _explained(self) -> list[str]:
        lines, unexplained = [], []
        for key, what in self.misses.items():
            for record, when in ((self.record, ""), (self.earlier, "in a run of {}, ")):
                if record is not None and key in record.get("profile", {}):
                    lines.append(
                        f"- {what}: {when.format(record['machine']['commit'])}{longest(record['profile'][key])}"
                    )
                    break
            else:
                unexplained.append(what)
        if unexplained:
            lines.append(f"- Not profiled (`--profile`): {', '.join(unexplained)}.")
        return ["Missed, and where the time of a step goes:", "", *lines] if lines else []


def _against_plain(record: dict[str, Any], aims: dict[str, Any], source: str) -> list[str]:
    """The table of the suites "interventions", "traces" and "toolkit": steps against plain ones."""
    batches = sorted({row["batch"] for row in record["rows"]})
    cells = {(row["case"], row["batch"]): row for row in record["rows"]}
    asked = aims.get(record["suite"], {})
    with_tables = {row["batch"]: row["ratio"] for row in record["rows"] if row["case"] == TABLES_PRESENT}
    lines = [
        f"### {record['model']}: {record['suite']}", "", f"{conditions(record)} {source}".strip(), "",
        "| ms a step, against plain (lowest to highest of the pairs) | " + " | ".join(f"bs {n}" for n in batches) + " |",
        "|---" * (len(batches) + 1) + "|",
    ]  # fmt: skip
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        found = {n: cells[case, n] for n in batches if (case, n) in cells}

        def line(name: str, texts: Mapping[int, str]) -> str:
            return f"| {name} | " + " | ".join(texts.get(n, "-") for n in batches) + " |"

        texts = {
            n: f"{r['ms']:.3f}, x {r['ratio']:.3f} ({r['lowest']:.3f} to {r['highest']:.3f})" for n, r in found.items()
        }
        lines.append(line(case, texts))
        wanted = asked.get(case, {})
        for name, form in (("ratio", "x {:.3f}"), ("ms", "{:.1f} ms")):
            if name in wanted:
                limits = dict(zip(aims["batches"], wanted[name], strict=True))
                lines.append(
                    line("... aim, at most", {n: _met(form, limits.get(n), r[name]) for n, r in found.items()})
                )
        if with_tables and case != TABLES_PRESENT:
            texts = {n: f"x {r['ratio'] * with_tables[n]:.3f}" for n, r in found.items()}
            lines.append(line("... against a graph without tables", texts))
        if "peer" in wanted:
            peers = dict(zip(aims["batches"], wanted["peer"], strict=True))
            lines.append(line(f"... {aims['traced_peer']}", {n: f"{ms:.2f}" for n, ms in peers.items()}))
    rates = {row["batch"]: row["gb_per_s"] for row in record["rows"] if "gb_per_s" in row}
    if rates:
        prefill, least = record["captured_prefill"], aims.get("captures", {})
        speeds = ", ".join(f"bs {batch} {rate:.2f}" for batch, rate in rates.items())
        lines += [
            "",
            f"Captured states that arrive, GB a second: {speeds}{_reached('{:.1f}', least.get('gb_per_s'), max(rates.values()))}; "
            f"in the prefill of {prefill['prompts']} prompts of {prefill['prompt_tokens']:,} tokens {prefill['gb_per_s']:.2f}"
            f"{_reached('{:.0f}', least.get('prefill_gb_per_s'), prefill['gb_per_s'])}, at {prefill['of_plain']:.0%} of its speed "
            f"without{_reached('{:.0%}', least.get('prefill_of_plain'), prefill['of_plain'])}.",
        ]
    if "harvest" in record:
        harvest = record["harvest"]
        wanted = aims.get("captures", {}).get("harvest_gb_per_s")
        wanted = None if wanted is None else min(wanted, harvest["disk_gb_per_s"])
        lines += [
            "",
            f"A harvest of {harvest['bytes'] / 1e9:.1f} GB to the local disk: {harvest['gb_per_s']:.2f} GB a second"
            f"{_reached('{:.2f}', wanted, harvest['gb_per_s'])}, until all is on it; a file of that size, written and synced: "
            f"{harvest['disk_gb_per_s']:.2f}.",
        ]
    if "lens" in record:
        lens, aim = record["lens"], asked.get("lens_ms")
        met = "" if aim is None else f" (aim, at most: {_met('{:.1f}', aim, lens['ms'])})"
        lines += [
            "",
            f"The lens of {lens['rows']} positions of a prompt at one layer takes {lens['ms']:.1f} ms{met}, until it is with the "
            f"caller; with the prompt {lens['with_prompt_ms']:.1f} ms.",
        ]
    for name in ("sweep", "sweep, in the passes"):
        if (sweep := record.get(name)) is None:
            continue
        where = "" if name == "sweep" else ", in the passes,"
        text = (
            f"One trace{where} of {sweep['invokes']:,} invokes ({sweep['prompt_tokens']} tokens each, one new one) that each save "
            f"a layer: {sweep['traced_s']:.2f} s, plain generation of the same {sweep['plain_s']:.2f} s, x {sweep['ratio']:.2f} "
            f"({sweep['lowest']:.2f} to {sweep['highest']:.2f})"
        )
        aim = asked.get(name)
        lines += ["", text + (f"; aim, at most: {_met('x {:.2f}', aim, sweep['ratio'])}." if aim else ".")]
    return lines


def _memory(record: dict[str, Any], machine: str) -> list[str]:
    """The table of the suite "memory"."""
    columns = {
        "objects": "objects of Python",
        "resident_mb": "resident, MB",
        "device_mb": "of the device, MB",
        "reserved_mb": "of it reserved, MB",
        "free_kv_tokens": "free KV slots",
    }
    shown = [name for name in columns if name in record["rows"][0]]
    return [
        f"### {record['model']}: memory", "", machine, "",
        "| requests | " + " | ".join(columns[name] for name in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
        *(
            f"| {row['requests']:,} | " + " | ".join(f"{row[name]:,.0f}" for name in shown) + " |"
            for row in record["rows"]
        ),
    ]  # fmt: skip


def _met(form: str, limit: float | None, value: float) -> str:
    if limit is None:
        return "-"
    return f"{form.format(limit)}, {'met' if value <= limit else '**missed**'}"


def _reached(form: str, limit: float | None, value: float) -> str:
    """A lower bound as an aim, in parentheses; empty without one."""
    return "" if limit is None else f" (aim {form.format(limit)}, {'met' if value >= limit else '**missed**'})"
