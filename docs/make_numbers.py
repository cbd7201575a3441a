"""Writes the tables and sentences of numbers in README and docs from the records in benchmarks/results.

Usage: python docs/make_numbers.py

A page has `<!-- numbers: NAME -->` before a table, or sentences, and `<!-- end -->` after it. The text between them is the entry
`NAME` of `TABLES`. tests/docs/test_numbers.py fails where a page has another text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- numbers: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BATCHES = (1, 32, 256)
OURS, VLLM = "pymllm-interp 0.1.0", "vLLM 0.26.0"

TABLES: dict[str, Callable[[], str]] = {}
"""Name of a table -> the function that makes it."""


def table_of(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers a function as the table `name`."""

    def register(make: Callable[[], str]) -> Callable[[], str]:
        TABLES[name] = make
        return make

    return register


def read(name: str) -> Any:
    """A record of benchmarks/results."""
    return json.loads((RESULTS / name).read_text())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return (
        "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def digits(value: float) -> str:
    """Three digits of a number, or all before the point: 3.88, 12.7, 9,401."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def slash(values: Iterable[float], show: Callable[[float], str] = digits) -> str:
    """Values side by side: 3.88 / 4.99 / 10.1."""
    return " / ".join(map(show, values))


def ratio(value: float, lower_is_better: bool = True) -> str:
    """A ratio ours / peer, marked where we are slower."""
    text = f"{value:.2f}"
    worse = value >= 1.005 if lower_is_better else value < 0.995
    return f"{text}, **slower**" if worse else text


def of_batches(rows: Iterable[dict[str, Any]], key: str, **where: Any) -> list[float]:
    """`key` of the rows that match `where`, by batch."""
    found = [row for row in rows if all(row.get(name) == value for name, value in where.items())]
    return [row[key] for row in sorted(found, key=lambda row: row["batch"])]


@table_of("vllm-h200")
def beside_vllm_on_an_h200() -> str:
    """Throughput and steps of both engines in one lease."""
    record = read("h200-serving-vllm.json")
    decode = record["decode"]["ms"]
    rows = [
        (f"decode, ms a step, batch {batch}", ours, peer, True)
        for batch, ours, peer in zip(record["decode"]["batches"], decode[OURS], decode[VLLM], strict=True)
    ]
    prefill = record["prefill_tokens_per_s"]
    rows.append(("prefill, tokens a second", prefill[OURS], prefill[VLLM], False))
    found = {(row["workload"], row["engine"]): row for row in record["rows"]}
    for workload, key, what, lower in (
        ("mix-256", "tokens_per_s", "mixed lengths, new tokens a second, 256 requests", False),
        ("mix", "tokens_per_s", "mixed lengths, new tokens a second, 512 requests", False),
        ("long", "step_ms", "32 contexts of 8,192, ms a step", True),
        ("shared-prefix", "tokens_per_s", "a shared prefix, new tokens a second", False),
        ("interference", "itl_p99_against_alone", "p99 between tokens beside long prompts, by without them", True),
    ):
        rows.append((what, found[workload, OURS][key], found[workload, VLLM][key], lower))
    return markdown(
        ("one H200, 8B shape, bfloat16", "pymllm-interp", VLLM, "ours / vLLM"),
        [(what, digits(ours), digits(peer), ratio(ours / peer, lower)) for what, ours, peer, lower in rows],
    )


@table_of("latency-h100")
def latencies_on_an_h100() -> str:
    """Percentiles of both engines in one lease, by the engine and over HTTP."""
    record = read("h100-traffic-272ebfa.json")
    rows: list[tuple[str, ...]] = []
    for way, name, second, token in (
        ("offline", "workload", "itl_ms", "between tokens"),
        ("http", "load", "tpot_ms", "a token of the output"),
    ):
        ours = {row[name]: row for row in record[way]["ours"]["rows"] if row.get("variant") is None}
        for load, peer in ((row[name], row) for row in record[way]["vllm"]["rows"]):
            label = load if way == "offline" else f"HTTP, {load}"
            for what, key in (("first token", "ttft_ms"), (token, second)):
                if load == "interference" and key == "ttft_ms":
                    continue
                values = [[engine[key][p] for p in ("p50", "p90", "p99")] for engine in (ours[load], peer)]
                worse = ", ".join(p for p, a, b in zip(("p50", "p90", "p99"), *values, strict=True) if a > 1.005 * b)
                rows.append((label, what, slash(values[0]), slash(values[1]), worse))
    return markdown(("one H100, ms at p50 / p90 / p99", "", "pymllm-interp", VLLM, "slower at"), rows)


@table_of("sglang-h200")
def serving_beside_sglang() -> str:
    """Percentiles of both servers in one lease, over HTTP."""
    record = read("h200-http-sglang-9e68a46c.json")["rows"]
    rows: list[tuple[str, ...]] = []
    for load in ("poisson-10", "clients-32", "clients-256"):
        ours, peer = (next(r for r in record if (r["name"], r["load"]) == (name, load)) for name in ("ours", "sglang"))
        speed = [f"{server['tokens_per_s']:,.0f}" for server in (ours, peer)]
        rows.append((load, "new tokens a second", *speed, ""))
        for what, key in (
            ("first token", "ttft_ms"),
            ("between tokens", "itl_ms"),
            ("a token of the output", "tpot_ms"),
        ):
            values = [[server[key][p] for p in ("p50", "p90", "p99")] for server in (ours, peer)]
            worse = ", ".join(p for p, a, b in zip(("p50", "p90", "p99"), *values, strict=True) if a > 1.005 * b)
            rows.append((load, what, slash(values[0]), slash(values[1]), worse))
    return markdown(("one H200, HTTP, ms at p50 / p90 / p99", "", "pymllm-interp", "SGLang 0.5.15", "slower at"), rows)


@table_of("burst-h200")
def prompt_tokens_of_a_step() -> str:
    """Servers with two sizes of a step of several prompts, over HTTP; means of their turns."""
    record = read("h200-http-burst-5afa9366.json")["rows"]
    rows: list[tuple[str, ...]] = []
    for load in ("clients-32", "clients-256", "poisson-25", "mix"):
        speeds, times = [], dict[str, list[str]]()
        for name in ("8192", "2048"):
            turns = [row for row in record if (row["name"], row["load"]) == (name, load)]
            speeds.append(f"{fmean(turn['tokens_per_s'] for turn in turns):,.0f}")
            for key in ("ttft_ms", "itl_ms"):
                means = [fmean(turn[key][p] for turn in turns) for p in ("p50", "p90", "p99")]
                times.setdefault(key, []).append(slash(means))
        rows.append((load, " / ".join(speeds), *times["ttft_ms"], *times["itl_ms"]))
    head = (
        "8,192 / 2,048 tokens",
        "new tokens a second",
        "first token, 8,192",
        "2,048",
        "between tokens, 8,192",
        "2,048",
    )
    return markdown(head, rows)


@table_of("hooks-h200")
def what_hooks_cost() -> str:
    """Decode steps with hooks against plain steps of the same engine."""
    rows: list[tuple[str, ...]] = []
    for name, cases in (
        ("gpu-interventions-llama8b.json", {
            "one site steered, a vector each": "one site steered, a vector for each request",
            "all layers steered, a vector each": "all layers steered, a vector for each request",
            "all resid_post captured to the host": "`resid_post` of all layers captured to the host",
        }),
        ("gpu-toolkit-llama8b.json", {
            "top 64 of an SAE with 32,768 features, every row": "top 64 features of an SAE with 32,768, every row",
            "logit lens, top 10 at every layer, every row": "logit lens, top 10 at every layer, every row",
        }),
        ("gpu-traces-llama8b.json", {
            "one request reads one layer": "a trace in the passes: one request reads one layer",
            "every request reads one layer": "traces in the passes: every request reads one layer",
            "every request reads 8 layers": "traces in the passes: every request reads 8 layers",
        }),
    ):  # fmt: skip
        record = read(name)["rows"]
        for case, shown in cases.items():
            values = [f"x {value:.3f}" for value in of_batches(record, "ratio", case=case)]
            rows.append((shown, *values, *["-"] * (3 - len(values)), f"[{name}](RESULTS/{name})"))
    return markdown(("one H200, 8B shape, a decode step against a plain one", "batch 1", "32", "256", "record"), rows)


@table_of("lowered-h100")
def what_lowered_blocks_cost() -> str:
    """Lowered blocks and blocks in the passes, against plain steps."""
    rows = read("h100-lowered-22aabec.json")["rows"]
    cases = {
        "saves one layer": "reads one layer",
        "saves eight layers": "reads eight layers",
        "adds its own vector": "adds its own vector",
    }
    return markdown(
        ("one H100, each request, against a plain step", "lowered, batch 32 / 256", "in the passes, batch 32 / 256"),
        [
            (
                shown,
                *(slash(of_batches(rows, "ratio", what=what, mode=mode), "{:.2f}".format) for mode in ("auto", "off")),
            )
            for what, shown in cases.items()
        ],
    )


@table_of("experts-h100")
def experts_beside_vllm() -> str:
    """Mixtures of experts beside vLLM, in one lease."""
    record = read("h100-quantized-d40aaf4.json")
    ours = of_batches(record["qwen3-30b-a3b"], "decode_ms")
    peer = of_batches(record["vllm"]["qwen3-30b-a3b"]["rows"], "ms")
    oss = of_batches(read("h100-gpt-oss-d1b7007.json")["rows"], "decode_ms")
    return markdown(
        ("ms a decode step, batch 1 / 32 / 256", "pymllm-interp", VLLM, "ours / vLLM"),
        [
            (
                "Qwen3-30B-A3B, bfloat16",
                slash(ours),
                slash(peer),
                slash((a / b for a, b in zip(ours, peer, strict=True)), "{:.2f}".format),
            ),
            ("gpt-oss-20b, experts in MXFP4", slash(oss), "not valid", "-"),
        ],
    )


@table_of("quantized-h100")
def quantised_steps() -> str:
    """Decode steps by format, on H100s; vLLM's from the lease that its record names."""
    now, before, beside = (read(f"h100-quantized-{commit}.json") for commit in ("f1264ba", "d40aaf4", "1ae85c8"))
    w8a8 = of_batches(before["llama8b"], "ms", format="fp8-w8a8")
    w4a16 = of_batches(beside["llama8b"], "ms", format="w4a16")
    vllm_fp8 = of_batches(before["vllm"]["llama8b fp8"]["rows"], "ms")
    vllm_w4 = of_batches(beside["vllm"]["rows"], "ms")
    return markdown(
        ("H100, 8B shape, ms a decode step, batch 1 / 32 / 256", "pymllm-interp", f"{VLLM}, same lease", "ours / vLLM"),
        [
            ("bfloat16", slash(of_batches(now["rows"], "ms", format="bf16")), "", ""),
            ("FP8", slash(of_batches(now["rows"], "ms", format="fp8")), "", ""),
            ("W4A16", slash(of_batches(now["rows"], "ms", format="w4a16")), "", ""),
            (
                "`fp8-w8a8`, an earlier commit",
                slash(w8a8),
                slash(vllm_fp8),
                slash((a / b for a, b in zip(w8a8, vllm_fp8, strict=True)), "{:.2f}".format),
            ),
            (
                "W4A16, an earlier commit",
                slash(w4a16),
                slash(vllm_w4),
                slash((a / b for a, b in zip(w4a16, vllm_w4, strict=True)), "{:.2f}".format),
            ),
        ],
    )


@table_of("lora-h100")
def lora_steps() -> str:
    """Decode steps with adapters against plain ones."""
    return markdown(
        ("one H100, 8B shape, rank 64", "adapters", "plain, ms", "with adapters, ms", "ratio"),
        [
            (
                f"batch {row['batch']}",
                str(row["adapters"]),
                digits(row["plain_ms"]),
                digits(row["ms"]),
                f"{row['ratio']:.2f}",
            )
            for row in read("h100-lora-a3210ec.json")["rows"]
        ],
    )


@table_of("speculative-h100")
def drafts_by_plain() -> str:
    """Throughput with drafts by plain throughput."""
    rows = read("h100-speculative-efc4656.json")["rows"]
    cases = {
        "synthetic, all right": "all drafts right, without a cost",
        "synthetic, 0.7 right each": "each draft right with 0.7, without a cost",
        "n-gram, nothing to draft": "n-gram, nothing to draft",
        "draft_model, all right": "a draft model with half the layers, all right",
        "eagle3, all right": "an EAGLE-3 head, all right",
    }
    return markdown(
        ("one H100, 8B shape, throughput by plain decoding", "batch 1", "batch 32"),
        [(shown, *(f"{value:.2f}" for value in of_batches(rows, "ratio", case=case))) for case, shown in cases.items()],
    )


@table_of("vllm-engine-h100")
def hooks_in_vllm() -> str:
    """Throughput with hooks in vLLM by plain vLLM's, in the same rounds."""
    records = {
        "41b22b6": ("bf16", "one H100"), "tp2-4c83c8c": ("tp", "two H100"), "moe-d1b7007": ("moe", "a MoE shape"),
        "fp8-efc4656": ("fp8", "FP8"),
    }  # fmt: skip
    ratios = {shown: read(f"h100-vllm-engine-{name}.json")[part]["ratios"] for name, (part, shown) in records.items()}
    return _by_case(ratios)


@table_of("vllm-ranks-h200")
def hooks_in_ranks_of_vllm() -> str:
    """Throughput with hooks on two ranks by plain vLLM's with the same ranks."""
    speed = read("h200x2-vllm-ranks-ee63df92.json")["speed"] | read("h200x2-vllm-ranks-f213574f.json")["speed"]
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "experts, a MoE shape"}
    return _by_case({shown: speed[name]["ratios"] for name, shown in names.items()})


def _by_case(ratios: dict[str, Any]) -> str:
    cases = {
        "plain, plain again": "plain vLLM again", "ours norm, idle": "nothing declared", "ours norm, one site": "one site steered",
        "ours norm, all layers": "all layers steered", "ours norm, captured": "`resid_post` of all layers captured",
    }  # fmt: skip
    return markdown(
        ("throughput by plain vLLM, batch 1 / 32 / 256", *ratios),
        [
            (shown, *(" / ".join(f"{found[case][str(batch)]:.3f}" for batch in BATCHES) for found in ratios.values()))
            for case, shown in cases.items()
        ],
    )


@table_of("cluster-h100")
def clusters() -> str:
    """Two replicas, and what a front costs."""
    compared = read("h100-cluster-aae450d.json")["compared"]
    return markdown(
        ("two H100 of one host", ""),
        [
            ("throughput of two replicas by one, 32 streams for each", f"{compared['all/one at 32 a replica']:.2f}"),
            ("throughput of two replicas by one, 128 streams for each", f"{compared['all/one at 128 a replica']:.2f}"),
            ("throughput of one replica by `serve`, 32 streams", f"{compared['one/serve at 32']:.3f}"),
            ("time to first token of a single request, against `serve`", f"+ {compared['ttft_ms one-serve']:.1f} ms"),
            ("prefix hits of two replicas by one's", f"{compared['hit rate all/one']:.2f}"),
        ],
    )


@table_of("cpu-demo")
def the_demo_on_a_cpu() -> str:
    """New tokens a second beside transformers, in one run."""
    decode = read("cpu-demo-bfloat16.json")["decode"]
    speeds = [(row["batch"], row["tokens_per_s"], row["transformers_tokens_per_s"]) for row in decode]
    return markdown(
        ("two cores of a Xeon with AMX, bfloat16", "pymllm-interp", "transformers", "ours / transformers"),
        [
            (f"batch {batch}, new tokens a second", f"{ours:,.1f}", f"{peer:,.1f}", f"{ours / peer:.2f}")
            for batch, ours, peer in speeds
        ],
    )


@table_of("cpu-traces")
def traces_on_a_cpu() -> str:
    """Microseconds of a visit beside nnsight's, in one run."""
    found = read("trace-cost-cpu.json")["microseconds"]
    theirs = found["nnsight_read_and_edit"] - found["nnsight_read"]
    rows = (
        ("a read in a pass that calls the module anyway, us", found["read"], found["nnsight_read"]),
        (
            "a read, for each of 8 traces at one place, us",
            found["read_beside_7_others"],
            found["nnsight_read_beside_7_others"],
        ),
        ("an edit, over a read, us", found["edit"], theirs),
        (
            "a whole pass that reads one layer, ms",
            found["pass_with_one_read"] / 1000,
            found["nnsight_pass_with_one_read"] / 1000,
        ),
    )
    return markdown(
        ("one thread, 32 layers with almost no arithmetic", "pymllm-interp", "nnsight 0.8.1", "ours / nnsight"),
        [(what, digits(ours), digits(peer), ratio(ours / peer)) for what, ours, peer in rows],
    )


@table_of("sweeps")
def patch_sweeps() -> str:
    """Patch sweeps as a wavefront and as requests."""
    rows = [
        ("demo, float32, one CPU thread", row, row["wavefront_cpu_s"], row["requests_cpu_s"], row["cpu_ratio"])
        for row in read("toolkit-cpu.json")["sweeps"]
    ]
    rows += [
        ("Qwen3-0.6B shape, bfloat16, H200", row, row["wavefront_s"], row["requests_s"], row["ratio"])
        for row in read("gpu-sweep-qwen3-0.6b.json")["sweeps"]
    ]
    return markdown(
        ("model", "tokens", "cells", "prefix cache of the requests", "wavefront, s", "requests, s", "ratio"),
        [
            (
                model,
                str(row["tokens"]),
                f"{row['cells']:,}",
                "on" if row["prefix_cache"] else "off",
                digits(wave),
                digits(requests),
                f"{value:.2f}",
            )
            for model, row, wave, requests, value in rows
        ],
    )


@table_of("http-cpu")
def what_http_adds() -> str:
    """Milliseconds that HTTP adds to a request of 8 tokens."""
    return markdown(
        ("added by HTTP, ms", "p50", "p99"),
        [
            (
                row["name"].replace("1 clients", "1 client"),
                *(f"{row[f'http_{p}'] - row[f'engine_{p}']:.1f}" for p in ("p50", "p99")),
            )
            for row in read("server-overhead-cpu.json")["results"]
        ],
    )


@table_of("readme")
def readme() -> str:
    """The README's table: where we win, and where we lose."""
    serving, hooks = read("h200-serving-vllm.json"), read("gpu-interventions-llama8b.json")["rows"]
    decode, rows = serving["decode"]["ms"], {(row["workload"], row["engine"]): row for row in serving["rows"]}
    mix = rows["mix", OURS]["tokens_per_s"] / rows["mix", VLLM]["tokens_per_s"]
    ours, peer = (rows["interference", engine]["itl_p99_against_alone"] for engine in (OURS, VLLM))
    steered = slash(of_batches(hooks, "ratio", case="one site steered, a vector each"), "{:.3f}".format)
    captured = slash(of_batches(hooks, "ratio", case="all resid_post captured to the host"), "{:.3f}".format)
    blocks = [row for row in read("h100-lowered-22aabec.json")["rows"] if row["batch"] == 256]
    in_passes, lowered = (
        of_batches(blocks, "ratio", what="saves eight layers", mode=mode)[0] for mode in ("off", "auto")
    )
    in_vllm = read("h100-vllm-engine-41b22b6.json")["bf16"]["ratios"]["ours norm, captured"]
    beside = {
        name: slash(
            next(r for r in record if (r["name"], r["load"]) == (name, load))["tpot_ms"]["p50"]
            for load in ("poisson-10", "clients-32", "clients-256")
        )
        for record in [read("h200-http-sglang-9e68a46c.json")["rows"]]
        for name in ("ours", "sglang")
    }
    cpu = read("cpu-demo-bfloat16.json")["decode"][0]
    return markdown(
        ("measured", "on", "result"),
        [
            (
                "decode step, ms, batch 1 / 32 / 256",
                "H200, 8B",
                f"{slash(decode[OURS])}; {VLLM}: {slash(decode[VLLM])}",
            ),
            ("throughput, 512 requests of mixed lengths", "H200, 8B", f"{mix:.2f} of vLLM's"),
            (
                "HTTP, ms a token, 10 requests a second / 32 / 256 clients",
                "H200, 8B",
                f"{beside['ours']}; SGLang 0.5.15: {beside['sglang']}",
            ),
            ("p99 between tokens beside long prompts", "H200, 8B", f"x {ours}; vLLM: x {peer}, **slower**"),
            ("every request steered, against a plain step", "H200, 8B", f"x {steered}"),
            ("all layers captured, against a plain step", "H200, 8B", f"x {captured}"),
            (
                "traces: every request reads 8 layers, batch 256",
                "H100, 8B",
                f"x {lowered:.1f} lowered, x {in_passes:.1f} in the passes, **slower**",
            ),
            (
                "captures with vLLM as the engine, by plain vLLM, batch 32 / 256",
                "H100, 8B",
                f"{in_vllm['32']:.2f} / {in_vllm['256']:.2f}, **slower**",
            ),
            (
                "demo model, new tokens a second, batch 1",
                "2 CPU cores",
                f"{cpu['tokens_per_s']:.0f}; transformers: {cpu['transformers_tokens_per_s']:.0f}",
            ),
        ],
    )


@table_of("cpu-aims")
def the_demo_beside_its_aims() -> str:
    """The demo's speed beside the aims, which are vLLM's speed on a machine of another kind."""
    name = "cpu-demo-bfloat16.json"
    decode, aims = read(name)["decode"], read("aims.json")[name]
    assert aims["batches"] == [row["batch"] for row in decode]
    rows = [
        (
            str(row["batch"]),
            f"{row['tokens_per_s']:.1f}",
            f"{aim}{', missed' if row['tokens_per_s'] < aim else ''}",
            str(peer),
        )
        for row, aim, peer in zip(
            decode, aims["tokens_per_s"]["aim"], aims["tokens_per_s"]["transformers"], strict=True
        )
    ]
    return markdown(("batch", "new tokens a second", "aim: vLLM on another machine", "transformers there"), rows)


@table_of("families-cpu")
def _families_cpu() -> str:
    name = "families-cpu.json"
    ratio = {(row["shape"], row["batch"]): row["ratio"] for row in read(name)["results"] if row["dtype"] == "bfloat16"}
    return (
        f"A model by its class in transformers has {ratio['equal', 1]:.2f} times the throughput of transformers' `generate` at\n"
        f"batch 1. It has {ratio['equal', 32]:.2f} times at batch 32, and {ratio['mixed', 32]:.2f} times there with mixed lengths; "
        f"bfloat16\n([record](RESULTS/{name}), one thread)."
    )


@table_of("recurrent-h100")
def _recurrent_h100() -> str:
    name = "h100-qwen3_5-49cb411.json"
    record = read(name)
    steps, prefill = {row["batch"]: row["decode_ms"] for row in record["decode"]}, record["prefill"]
    return (
        f"The 9B shape of Qwen3.5 takes {slash(steps[batch] for batch in BATCHES)} ms a decode step at batch "
        f"{slash(BATCHES, str)}\non an H100. {prefill['batch']} prompts of {prefill['prompt_tokens']:,} tokens run at "
        f"{prefill['tokens_per_s']:,.0f} tokens a second\n([record](RESULTS/{name}))."
    )


@table_of("cluster-harvest")
def _cluster_harvest() -> str:
    name = "h100-cluster-harvest-aae450d.json"
    record = read(name)
    one = record["results"][0]
    return (
        "A [harvest](../guides/harvest.md) by two workers on Ray is "
        f"{record['compared']['2 workers / 1']:.2f} times as fast as by one; coordination takes\n"
        f"{one['coordination'] * 100:.2f} % of the time with units of {one['unit_seconds']:.1f} s ([record](RESULTS/{name}))."
    )


@table_of("schema-masks")
def _schema_masks() -> str:
    name = "h100-speculative-efc4656.json"
    found = read(name)["schema_ratio"]
    return (
        f"With a JSON schema each, a step of {found['batch']} requests takes {found['ratio']:.2f} times as long on an H100\n"
        f"([{name}](RESULTS/{name})): their masks are made while the pass runs, by threads."
    )


def updated(page: Path) -> str:
    """The page's text with its tables made anew. Links of tables are made relative to the page.

    Raises:
        KeyError: a block names no table.
    """
    results = os.path.relpath(RESULTS, page.parent)
    return BLOCK.sub(
        lambda found: found[1] + TABLES[found[2]]().replace("RESULTS/", f"{results}/") + "\n" + found[4],
        page.read_text(),
    )


def pages() -> list[Path]:
    """README, the pages of docs, and the log of measurements."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), RESULTS / "README.md"]


if __name__ == "__main__":
    for path in pages():
        if (text := updated(path)) != path.read_text():
            path.write_text(text)
            print(path.relative_to(ROOT))
