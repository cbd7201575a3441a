"""Results of the GPU suites as Markdown tables: numbers, aims, peers, and profiles of steps that missed an aim."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .interventions import TABLES_PRESENT
from .serving.serving_tables import serving_lines
from .speculative import speculative_lines

WITHIN = 0.05
"""Aim: how much slower the default may be than the better of the ways that it picks from."""
KERNELS = 6
"""Kernels that are named where an aim was missed."""
NumbersByBatch = Mapping[int, float]
"""By batch size."""


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
        earlier: a record of the same model, for profiles that this one does not have.
    """
    if record["suite"] == "memory":
        lines = _memory(record, source)
    elif record["suite"] == "serving":
        lines = serving_lines(record, aims, f"{machine_line(record)} {source}".strip())
    elif record["suite"] == "speculative":
        lines = speculative_lines(record, aims, f"{_conditions(record)} {source}".strip())
    elif record["suite"] in ("interventions", "traces", "toolkit"):
        lines = _against_plain(record, aims, source)
    else:
        lines = _Report(record, aims, earlier).lines(source)
    return "\n".join(lines).rstrip("\n") + "\n"


class _Report:
    """Lines of Markdown, and the missed aims."""

    def __init__(self, record: dict[str, Any], aims: dict[str, Any], earlier: dict[str, Any] | None) -> None:
        self.record, self.aims, self.earlier = record, aims, earlier
        self.batches = list(record["settings"]["batches"])
        self.misses: dict[str, str] = {}
        """Key of the profile of the step -> what was missed."""

    def lines(self, source: str) -> list[str]:
        record = self.record
        lines = [f"### {record['model']}", "", f"{_conditions(record)} {source}".strip(), ""]
        if "decode" in record:
            lines += self._decode()
        if record["hooks"]:
            lines += self._hooks()
        return lines + self._explained()

    # -- plain serving ---------------------------------------------------------------------

    def _decode(self) -> list[str]:
        record = self.record

        def values(name: str) -> NumbersByBatch:
            return {row["batch"]: row[name] for row in record["decode"]}

        lines = [
            *self._head("plain serving"),
            self._row("decode, ms a step", values("decode_ms"), "{:.3f}"),
            *self._beside("decode_ms", values("decode_ms"), "decode"),
            self._row("of that, the CUDA graph alone", values("graph_ms"), "{:.3f}"),
            self._row("tokens a second, prefill included", values("tokens_per_s"), "{:,.0f}"),
            *self._beside("tokens_per_s", values("tokens_per_s"), "decode"),
            self._row("all first tokens, ms", values("first_token_ms"), "{:.1f}"),
            "",
        ]
        prefill = record["prefill"]
        rate, asked = prefill["tokens_per_s"], self.aims.get("prefill_tokens_per_s", {})
        text = (
            f"Prefill, {prefill['batch']} prompts of {prefill['prompt_tokens']:,} tokens: {rate:,.0f} tokens a second"
        )
        beside = []
        if "aim" in asked:
            beside.append(f"aim {self._aim(asked['aim'], rate, '{:,.0f}', 'at least', 'prefill', 'prefill')}")
        if "peer" in asked:
            beside.append(f"{self.aims['peer']} {asked['peer']:,.0f}")
        start = f"Start-up: {record['start_s']:.1f} s; {record['graphs']} graphs, {record['graphs_mib']:,.0f} MiB."
        return [*lines, text + (f" ({'; '.join(beside)})." if beside else "."), start, ""]

    # -- one reading request --------------------------------------------------------------

    def _hooks(self) -> list[str]:
        found = self.record["hooks"]

        def values(way: str, layers: Callable[[int], bool], name: str = "ms") -> NumbersByBatch:
            return {row["batch"]: row[name] for row in found if row["way"] == way and layers(row["layers"])}

        def ways(row: dict[str, Any]) -> set[str]:
            return {how.partition(":")[0] for how in row["execution"]}

        nobody, one, every = (lambda n: n == 0), (lambda n: n == 1), (lambda n: n > 1)
        plain, auto, eager = values("auto", nobody), values("auto", one), values("eager", one)
        picked = {
            row["batch"]: next((way for way in ("segments", "split") if way in ways(row)), "whole batch")
            for row in found
            if row["way"] == "auto" and row["layers"]
        }
        better = {n: min(ms, values("split", one).get(n, ms)) for n, ms in eager.items()}
        return [
            *self._head("one request of the batch reads a layer at each step: ms a step"),
            self._row("whole batch eager", eager, "{:.3f}"),
            *self._beside("eager_ms", eager, "eager"),
            self._row("the same, and every layer is read", values("eager", every), "{:.3f}"),
            self._row("split", values("split", one), "{:.3f}"),
            self._cells("the default", {n: f"{ms:.3f}, {picked[n]}" for n, ms in auto.items()}),
            self._cells(
                "... against the better of the two",
                {n: self._against_better(n, auto[n], better[n]) for n in auto if n > 1 and n in better},
            ),
            self._row("the default, and every layer is read", values("auto", every), "{:.3f}"),
            self._row("nobody reads", plain, "{:.3f}"),
            self._row("nobody reads, no graphs", values("no graphs", nobody), "{:.3f}"),
            "",
            *self._head("tokens a second of the plain requests, beside"),
            *(
                self._row(name, {n: rate for n, rate in values(way, layers, "plain_tokens_per_s").items() if n > 1}, "{:,.0f}")
                for name, way, layers in (
                    ("one more plain request", "auto", nobody),
                    ("one that reads, the default", "auto", one),
                    ("one that reads, split", "split", one),
                    ("one that reads, whole batch eager", "eager", one),
                )
            ),
            "",
        ]  # fmt: skip

    def _against_better(self, batch: int, ms: float, better: float) -> str:
        over = ms / better - 1
        met = over <= WITHIN
        if not met:
            self.misses[f"auto {batch}"] = f"the default's step at bs {batch}"
        return f"{over:+.1%} (aim {WITHIN:+.0%}, {'met' if met else '**missed**'})"

    # -- cells ---------------------------------------------------------------------------------

    def _head(self, title: str) -> list[str]:
        return [self._cells(title, {n: f"bs {n}" for n in self.batches}), "|---" * (1 + len(self.batches)) + "|"]

    def _row(self, name: str, values: Mapping[int, float | None], form: str) -> str:
        return self._cells(name, {n: form.format(value) for n, value in values.items() if value is not None})

    def _cells(self, name: str, cells: Mapping[int, str]) -> str:
        return "| " + " | ".join([name, *(cells.get(n, "-") for n in self.batches)]) + " |"

    def _beside(self, name: str, values: NumbersByBatch, profile: str) -> list[str]:
        """Rows with the aims and the peer's numbers, if there are any."""
        asked, rows = self.aims.get(name, {}), []
        slower, form = ("at most", "{:.2f}") if name.endswith("_ms") else ("at least", "{:,.0f}")
        if "aim" in asked:
            aims = dict(zip(self.aims["batches"], asked["aim"], strict=True))
            cells = {
                n: self._aim(aims[n], value, form, slower, f"{profile} {n}", f"{profile} at bs {n}")
                for n, value in values.items()
                if n in aims
            }
            rows.append(self._cells(f"... aim, {slower}", cells))
        if "peer" in asked:
            peer = dict(zip(self.aims["batches"], asked["peer"], strict=True))
            rows.append(self._row(f"... {self.aims['peer']}", peer, "{:.3f}" if slower == "at most" else form))
        if "limit" in asked:
            limit = dict(zip(self.aims["batches"], asked["limit"], strict=True))
            rows.append(self._row("... limit, by the memory's bandwidth", limit, form))
        return rows

    def _aim(self, aim: float, value: float, form: str, bound: str, profile: str, what: str) -> str:
        met = value <= aim if bound == "at most" else value >= aim
        if not met:
            self.misses[profile] = what
        return f"{form.format(aim)}, {'met' if met else '**missed**'}"

    def _explained(self) -> list[str]:
        """Profiles of the steps that missed an aim."""
        lines, unexplained = [], []
        for key, what in self.misses.items():
            for record, when in ((self.record, ""), (self.earlier, "in a run of {}, ")):
                if record is not None and key in record["profile"]:
                    lines.append(
                        f"- {what}: {when.format(record['machine']['commit'])}{_longest(record['profile'][key])}"
                    )
                    break
            else:
                unexplained.append(what)
        if unexplained:
            lines.append(f"- Not profiled (`--profile`): {', '.join(unexplained)}.")
        return ["Missed, and where the time of a step goes:", "", *lines] if lines else []


def _longest(step: dict[str, Any]) -> str:
    """The longest kernels of a `StepProfile.result`."""
    kernels = ", ".join(
        f"`{entry['kernel'].replace('|', '/').replace('`', '')[:60]}` {entry['us']:,.0f} us ({entry['launches']:.0f} x)"
        for entry in step["kernels"][:KERNELS]
    )
    return f"{step['us']:,.0f} us a step, {step['busy_us']:,.0f} of them busy: {kernels}."


def _against_plain(record: dict[str, Any], aims: dict[str, Any], source: str) -> list[str]:
    """The table of the suites "interventions", "traces" and "toolkit": steps against plain ones."""
    batches = sorted({row["batch"] for row in record["rows"]})
    cells = {(row["case"], row["batch"]): row for row in record["rows"]}
    asked = aims.get(record["suite"], {})
    with_tables = {row["batch"]: row["ratio"] for row in record["rows"] if row["case"] == TABLES_PRESENT}
    lines = [
        f"### {record['model']}: {record['suite']}", "", f"{_conditions(record)} {source}".strip(), "",
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
    if "sweep" in record:
        sweep = record["sweep"]
        text = (
            f"One trace of {sweep['invokes']:,} invokes ({sweep['prompt_tokens']} tokens each, one new one) that each save a "
            f"layer: {sweep['traced_s']:.2f} s, plain generation of the same {sweep['plain_s']:.2f} s, x {sweep['ratio']:.2f} "
            f"({sweep['lowest']:.2f} to {sweep['highest']:.2f})"
        )
        aim = asked.get("sweep")
        lines += ["", text + (f"; aim, at most: {_met('x {:.2f}', aim, sweep['ratio'])}." if aim else ".")]
    return lines


def _memory(record: dict[str, Any], source: str) -> list[str]:
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
        f"### {record['model']}: memory", "", f"{machine_line(record)} {source}".strip(), "",
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


def _conditions(record: dict[str, Any]) -> str:
    """Machine, versions, weights and lengths of the measurement."""
    settings, weights = record["settings"], "Random" if record["load_format"] == "dummy" else "Real"
    # A suite with shorter requests notes their lengths.
    prompt, new = (record.get(name, settings[name]) for name in ("prompt_tokens", "new_tokens"))
    return f"{machine_line(record)}\n{weights} weights, {record['dtype']}, prompts of {prompt} tokens, {new} new ones, greedy."


def machine_line(record: dict[str, Any]) -> str:
    """Hardware, versions and commit of the measurement."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return f"{machine.get('gpu') or machine['cpu']}; {versions}; commit {machine['commit'] or 'not noted'}."
