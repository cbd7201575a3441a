"""Results as Markdown tables. The scripts in benchmarks/ extend them by aims and peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NumbersByBatch = Mapping[int, float]
"""Numbers by batch size."""


class Report:
    """The tables of a record of `suites.records`."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.batches = list(record["settings"]["batches"])

    def lines(self, source: str = "") -> list[str]:
        """All lines, with the conditions of the measurement.

        Args:
            source: a link to the file.
        """
        record = self.record
        lines = [f"### {record['model']}", "", f"{conditions(record)} {source}".strip(), ""]
        if "decode" in record:
            lines += self._decode()
        if record["hooks"]:
            lines += self._hooks()
        return lines

    def beside(self, name: str, values: NumbersByBatch, step: str) -> list[str]:
        """Rows shown under a quantity; the base class has no such rows."""
        return []

    def beside_prefill(self, rate: float) -> str:
        """Text after the speed of prefill: none here."""
        return ""

    def over_better(self, batch: int, over: float) -> str:
        """Extra time of a default step over one in the better mode, as text."""
        return f"{over:+.1%}"

    def _decode(self) -> list[str]:
        record, prefill = self.record, self.record["prefill"]
        graphs, steps, rates, theirs = (
            {row["batch"]: row[name] for row in record["decode"] if name in row}
            for name in ("graph_ms", "decode_ms", "tokens_per_s", "transformers_tokens_per_s")
        )
        rows = [
            *self.head("plain serving"),
            self.row("decode, ms a step", steps, "{:.3f}"),
            *self.beside("decode_ms", steps, "decode"),
            self.row("of that, the CUDA graph alone", graphs, "{:.3f}"),
            self.row("tokens a second, prefill included", rates, "{:,.0f}"),
            *self.beside("tokens_per_s", rates, "decode"),
        ]
        if theirs:
            ratios = {n: f"{rate:,.0f}, x {rates[n] / rate:.2f}" for n, rate in theirs.items()}
            rows.append(self.cells("... transformers on this machine, and our ratio", ratios))
        firsts = {row["batch"]: row["first_token_ms"] for row in record["decode"]}
        return [
            *rows, self.row("all first tokens, ms", firsts, "{:.1f}"), "",
            f"Prefill, {prefill['batch']} prompts of {prefill['prompt_tokens']:,} tokens: "
            f"{prefill['tokens_per_s']:,.0f} tokens a second{self.beside_prefill(prefill['tokens_per_s'])}.",
            f"Start-up: {record['start_s']:.1f} s; {record['graphs']} graphs, {record['graphs_mib']:,.0f} MiB.", "",
        ]  # fmt: skip

    def _hooks(self) -> list[str]:
        found = self.record["hooks"]

        def values(way: str, layers: Callable[[int], bool], name: str = "ms") -> NumbersByBatch:
            return {row["batch"]: row[name] for row in found if row["way"] == way and layers(row["layers"])}

        def picked(row: dict[str, Any]) -> str:
            ran = {how.partition(":")[0] for how in row["execution"]}
            return next((way for way in ("segments", "split") if way in ran), "whole batch")

        nobody, one, every = (lambda n: n == 0), (lambda n: n == 1), (lambda n: n > 1)
        auto, eager, split = (values(way, one) for way in ("auto", "eager", "split"))
        picks = {row["batch"]: picked(row) for row in found if row["way"] == "auto" and row["layers"]}
        over = {n: auto[n] / min(ms, split.get(n, ms)) - 1 for n, ms in eager.items() if n > 1 and n in auto}
        rates = (
            ("one more plain request", "auto", nobody), ("one that reads, the default", "auto", one),
            ("one that reads, split", "split", one), ("one that reads, whole batch eager", "eager", one),
        )  # fmt: skip
        return [
            *self.head("one request of the batch reads a layer at each step: ms a step"),
            self.row("whole batch eager", eager, "{:.3f}"),
            *self.beside("eager_ms", eager, "eager"),
            self.row("the same, and every layer is read", values("eager", every), "{:.3f}"),
            self.row("split", split, "{:.3f}"),
            self.cells("the default", {n: f"{ms:.3f}, {picks[n]}" for n, ms in auto.items()}),
            self.cells("... against the better of the two", {n: self.over_better(n, part) for n, part in over.items()}),
            self.row("the default, and every layer is read", values("auto", every), "{:.3f}"),
            self.row("nobody reads", values("auto", nobody), "{:.3f}"),
            self.row("nobody reads, no graphs", values("no graphs", nobody), "{:.3f}"),
            "",
            *self.head("tokens a second of the plain requests, beside"),
            *(
                self.row(name, {n: r for n, r in values(way, layers, "plain_tokens_per_s").items() if n > 1}, "{:,.0f}")
                for name, way, layers in rates
            ),
            "",
        ]

    def head(self, title: str) -> list[str]:
        """The first two lines of a table: its title and the batch sizes."""
        return [self.cells(title, {n: f"bs {n}" for n in self.batches}), "|---" * (1 + len(self.batches)) + "|"]

    def row(self, name: str, values: Mapping[int, float | None], form: str) -> str:
        """A line of formatted numbers, with "-" for missing batch sizes."""
        return self.cells(name, {n: form.format(value) for n, value in values.items() if value is not None})

    def cells(self, name: str, cells: Mapping[int, str]) -> str:
        """A line of texts by batch size."""
        return "| " + " | ".join([name, *(cells.get(n, "-") for n in self.batches)]) + " |"


def conditions(record: dict[str, Any]) -> str:
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
