"""`bench` and the suites of benchmarks/suite.py, on a CPU: they measure what they say; the tables show what the records hold."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report
import torch
from helpers_paths import ROOT
from suite import main
from suites import common, toolkit, traces
from suites.interventions import TABLES_PRESENT
from suites.memory import held_memory, run_requests
from suites.profile import StepProfile, covered, profile_decode, profile_prefill
from suites.tables import read_aims, render
from torch.autograd.profiler_util import Interval
from transformers import AutoConfig

from pymllm_interp import LM
from pymllm_interp.bench import describe_machine
from pymllm_interp.bench.suites import BenchSettings, Model, measure_decode, records
from pymllm_interp.cli import main as command_line
from pymllm_interp.kernels.cpu import cpu_dispatch
from pymllm_interp.models.registry import NATIVE, architecture_of

BENCHMARKS = ROOT / "benchmarks"
FOLDERS = sorted(path.parent for path in (BENCHMARKS / "configs").glob("*/config.json"))


def tiny(model_folder: Callable[[str], Path], **sizes: Any) -> Model:
    settings = BenchSettings.of(False, quick=True, **sizes)
    return Model(
        model=str(model_folder("llama")), dtype="float32", device="cpu", load_format="dummy", settings=settings
    )


def ways(row: dict[str, Any]) -> set[str]:
    """How the row's steps ran."""
    return {how.partition(":")[0] for how in row["execution"]}


# -- the suites -------------------------------------------------------------------------------


def test_one_command_writes_every_number_of_both_suites(
    model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "x.json"
    sizes = ["--batches", "1", "3", "--prompt-tokens", "5", "--new-tokens", "7"]
    command = [
        "bench",
        "--config",
        str(model_folder("llama")),
        "--suite",
        "all",
        "--quick",
        "--dtype",
        "float32",
        *sizes,
    ]
    assert command_line([*command, "--commit", "elsewhere", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["settings"] == {"batches": [1, 3], "prompt_tokens": 5, "new_tokens": 7, "repeats": 1}
    assert record["load_format"] == "dummy" and record["dtype"] == "float32" and record["machine"]["commit"]
    assert [row["batch"] for row in record["decode"]] == [1, 3]
    for row in record["decode"]:
        assert all(row[name] > 0 for name in ("tokens_per_s", "first_token_ms")) and math.isfinite(row["decode_ms"])
    assert record["prefill"]["prompt_tokens"] == 80 and record["prefill"]["tokens_per_s"] > 0

    found = {(row["way"], row["layers"], row["batch"]): row for row in record["hooks"]}
    sides = [("no graphs", 0), ("split", 1), ("eager", 1), ("eager", 3), ("auto", 0), ("auto", 1), ("auto", 3)]
    assert set(found) == {(*side, batch) for side in sides for batch in (1, 3)}
    assert all(math.isfinite(row["ms"]) for row in record["hooks"])
    assert ways(found["no graphs", 0, 3]) == ways(found["auto", 0, 3]) == {"plain"}, "nobody reads"
    assert ways(found["split", 1, 3]) == {"modules", "split"}, "modules: the prompts"
    assert ways(found["eager", 1, 3]) == {"modules"}
    row = found["eager", 3, 3]
    assert row["plain_tokens_per_s"] == pytest.approx(2 / row["ms"] * 1e3)
    shown = capsys.readouterr().out
    assert f"{row['ms']:.3f}" in shown and f"{record['prefill']['tokens_per_s']:,.0f}" in shown


def test_the_decode_suite_alone_measures_no_hooks_and_names_its_file(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = model_folder("llama")
    assert command_line(["bench", "--config", str(folder), "--suite", "decode", "--quick", "--device", "cpu"]) == 0
    record = json.loads((tmp_path / f"cpu-{folder.name}.json").read_text())
    assert record["decode"] and not record["hooks"]


def test_what_was_measured_is_there_before_the_next_part_is(model_folder: Callable[[str], Path]) -> None:
    growing = records("all", tiny(model_folder, batches=(1,)), describe_machine())
    record = next(growing)
    assert record["decode"] and record["hooks"] == []
    assert [row["way"] for row in next(growing)["hooks"]] == ["no graphs"]
    growing.close()


def test_profiles_say_where_the_time_of_steps_goes(lm_of: Callable[..., LM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dispatch, "cpu_kernels", lambda: None)  # torch's profiler sees no kernels but torch's
    lm, settings = lm_of("llama", lower_traces="off"), BenchSettings.of(False, quick=True, batches=(2,), new_tokens=24)
    profiles = {"decode": profile_decode(lm, 2, settings), "prefill": profile_prefill(lm, settings)}
    profiles["one reads"] = profile_decode(lm, 2, settings, [1])
    for name, step in profiles.items():
        times = [entry["us"] for entry in step["kernels"]]
        assert times and times == sorted(times, reverse=True) and times[-1] > 0
        assert sum(times) / 8 <= step["busy_us"] <= step["us"] * 1.01, "some threads at once"
        assert step["steps"] >= (1 if name == "prefill" else 12)
        (products,) = [entry["launches"] for entry in step["kernels"] if entry["kernel"] == "aten::mm"]
        assert products >= 4 * 3 + 1, "every layer's, and the head's"


@pytest.mark.slow  # the profiles are those of the test above
def test_the_profile_suite_names_each_step(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    command = ["profile", "--config", str(model_folder("llama")), "--quick", "--device", "cpu", "--new-tokens", "40"]
    assert main([*command, "--batches", "2", "--out", str(out)]) == 0
    assert list(json.loads(out.read_text())["profile"]) == ["decode 2", "prefill", "split 2", "eager 2", "auto 2"]


@pytest.mark.slow  # two processes
def test_the_startup_suite_measures_a_fresh_process(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    command = ["startup", "--config", str(model_folder("llama")), "--quick", "--device", "cpu", "--out", str(out)]
    assert main(command) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert all(row[name] > 0 for name in ("import_s", "import_lm_s", "start_s")) and len(record["runs"]) == 1


def test_what_overlaps_is_busy_once() -> None:
    assert covered([]) == 0
    assert covered([Interval(5, 9), Interval(0, 2), Interval(1, 3), Interval(6, 7), Interval(9, 10)]) == 3 + 5


def test_a_profile_of_nothing_is_refused(lm_of: Callable[..., LM]) -> None:
    profile = StepProfile(lm_of("llama"))
    assert profile.steps is None
    lm_of("llama").engine.call(profile.start)
    lm_of("llama").engine.call(profile.stop)
    with pytest.raises(RuntimeError, match="nothing ran"):
        profile.result()


def test_too_few_new_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        BenchSettings(new_tokens=3)


def test_transformers_takes_turns_where_the_device_is_a_cpu(lm_of: Callable[..., LM]) -> None:
    """Both generate as many tokens; a slower side has the lower rate, and nothing of the other's time."""
    lm, settings = lm_of("llama"), BenchSettings.of(False, quick=True, new_tokens=4)
    calls: list[tuple[int, ...]] = []

    class Slow:
        def generate(self, ids: torch.Tensor, **given: Any) -> torch.Tensor:
            calls.append((*ids.shape, given["max_new_tokens"]))
            time.sleep(0.3 if given["max_new_tokens"] == 4 else 0)
            return torch.zeros(len(ids), ids.shape[1] + given["max_new_tokens"])

    row = measure_decode(lm, 3, settings, Slow())
    assert calls == [(3, 4, 4), (3, 4, 1), (3, 4, 4)]
    assert row["transformers_tokens_per_s"] == pytest.approx(3 * 4 / 0.3, rel=0.3)
    assert row["transformers_tokens_per_s"] < row["tokens_per_s"]
    assert "transformers_tokens_per_s" not in measure_decode(lm, 3, settings)


# -- the tables -----------------------------------------------------------------------------------


AIMS: dict[str, Any] = {
    "peer": "Other 1.0",
    "batches": [1, 4, 8],
    "decode_ms": {"aim": [2.0, 3.0, 9.0], "peer": [2.5, 3.5, 9.5], "limit": [1.25, None, None]},
    "tokens_per_s": {"aim": [400, 1200, 9], "peer": [350, 1000, 9]},
    "eager_ms": {"aim": [5.0, 6.0, 9.0], "peer": [8.0, 8.5, 9.0]},
    "prefill_tokens_per_s": {"aim": 20000, "peer": 19000},
}


def a_record() -> dict[str, Any]:
    hooks = [
        {"way": way, "batch": batch, "layers": layers, "ms": ms, "plain_tokens_per_s": (batch - 1) / ms * 1e3,
         "execution": {"modules: of the prompt": 3} | ({"split: it is quicker": 9} if batch > 1 and way == "auto" else {})}
        for way, layers, times in (
            ("no graphs", 0, (3.0, 3.5)), ("split", 1, (4.0, 7.0)), ("eager", 1, (5.0, 6.5)), ("eager", 32, (6.0, 6.8)),
            ("auto", 0, (1.9, 3.1)), ("auto", 1, (4.0, 7.0)),
        )
        for batch, ms in zip((1, 4), times, strict=True)
    ]  # fmt: skip
    hooks.append({"way": "auto", "batch": 1, "layers": 32, "ms": 9.0, "plain_tokens_per_s": 0.0, "execution": {}})
    kernel = {"kernel": "void gemm<a|b>(`x`)", "us": 1500.0, "launches": 12.4}
    return {
        "suite": "all", "model": "m", "dtype": "bfloat16", "load_format": "dummy",
        "settings": {"batches": [1, 4], "prompt_tokens": 128, "new_tokens": 256, "repeats": 3},
        "machine": {"gpu": "GPU Z", "cpu": "C", "versions": {"torch": "2.x", "flashinfer-python": None}, "commit": "c0ffee"},
        "start_s": 4.56, "graphs": 36, "graphs_mib": 1426.4,
        "decode": [
            {"batch": 1, "decode_ms": 1.9, "graph_ms": 1.8, "tokens_per_s": 450.4, "first_token_ms": 9.0},
            {"batch": 4, "decode_ms": 3.1, "graph_ms": None, "tokens_per_s": 1234.5, "first_token_ms": 10.26},
        ],
        "prefill": {"batch": 16, "prompt_tokens": 2048, "tokens_per_s": 19999.0},
        "hooks": hooks,
        "profile": {"decode 4": {"steps": 20, "us": 3100.4, "busy_us": 2800.0, "kernels": [kernel] * 9}},
    }  # fmt: skip


def test_a_table_has_the_aims_beside_the_numbers_and_marks_what_is_missed() -> None:
    lines = render(a_record(), AIMS, "[file](path)").splitlines()
    assert "GPU Z; torch 2.x; commit c0ffee." in lines
    assert "Random weights, bfloat16, prompts of 128 tokens, 256 new ones, greedy. [file](path)" in lines
    for line in (
        "| plain serving | bs 1 | bs 4 |",
        "| decode, ms a step | 1.900 | 3.100 |",
        "| ... aim, at most | 2.00, met | 3.00, **missed** |",
        "| ... Other 1.0 | 2.500 | 3.500 |",
        "| ... limit, by the memory's bandwidth | 1.25 | - |",
        "| of that, the CUDA graph alone | 1.800 | - |",
        "| tokens a second, prefill included | 450 | 1,234 |",
        "| ... aim, at least | 400, met | 1,200, met |",
        "| whole batch eager | 5.000 | 6.500 |",
        "| ... aim, at most | 5.00, met | 6.00, **missed** |",
        "| the default | 4.000, whole batch | 7.000, split |",
        "| the default, and every layer is read | 9.000 | - |",
        "| ... against the better of the two | - | +7.7% (aim +5%, **missed**) |",
        "| one that reads, the default | - | 429 |",
        "Prefill, 16 prompts of 2,048 tokens: 19,999 tokens a second (aim 20,000, **missed**; Other 1.0 19,000).",
        "Start-up: 4.6 s; 36 graphs, 1,426 MiB.",
    ):
        assert line in lines, line
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1, "every row has all cells"


def test_a_miss_comes_with_its_profile_or_says_that_there_is_none() -> None:
    text = render(a_record(), AIMS)
    explained = "- decode at bs 4: 3,100 us a step, 2,800 of them busy: `void gemm<a/b>(x)` 1,500 us (12 x), "
    assert explained in text and text.count("1,500 us") == 6
    assert "- Not profiled (`--profile`): prefill, eager at bs 4, the default's step at bs 4." in text
    earlier = {
        "machine": {"commit": "01d"},
        "profile": {"prefill": {**a_record()["profile"]["decode 4"], "us": 9000.0}},
    }
    text = render(a_record(), AIMS, earlier=earlier)
    assert explained in text and "- prefill: in a run of 01d, 9,000 us a step, 2,800 of them busy: `void" in text
    assert "- Not profiled (`--profile`): eager at bs 4, the default's step at bs 4." in text
    met = a_record()
    met["hooks"], met["decode"], met["prefill"]["tokens_per_s"] = [], met["decode"][:1], 20000.0
    assert "issed" not in render(met, AIMS)


def test_without_aims_the_numbers_stand_alone() -> None:
    text = render(a_record(), {})
    assert "aim, at" not in text and "Other" not in text and "| decode, ms a step | 1.900 | 3.100 |" in text


def test_a_table_against_plain_steps_has_ratios_and_times_beside_their_aims() -> None:
    row = {"case": "every request reads", "plain_ms": 2.0, "lowest": 1.0, "highest": 1.5}
    record = {
        **{name: a_record()[name] for name in ("model", "dtype", "load_format", "settings", "machine")}, "suite": "traces",
        "rows": [{**row, "batch": 1, "ms": 2.5, "ratio": 1.25}, {**row, "batch": 4, "ms": 2.1, "ratio": 1.05}],
        "sweep": {"invokes": 1024, "prompt_tokens": 32, "plain_s": 2.0, "traced_s": 3.0, "ratio": 1.5, "lowest": 1, "highest": 2},
    }  # fmt: skip
    asked = {"every request reads": {"ratio": [1.1, 1.1], "ms": [None, 2.0], "peer": [10.0, 20.0]}, "sweep": 1.25}
    lines = render(
        record, {"batches": [1, 4], "traced_peer": "Other on Other", "traces": asked}, "[file](path)"
    ).splitlines()
    for line in (
        "| every request reads | 2.500, x 1.250 (1.000 to 1.500) | 2.100, x 1.050 (1.000 to 1.500) |",
        "| ... aim, at most | x 1.100, **missed** | x 1.100, met |",
        "| ... aim, at most | - | 2.0 ms, **missed** |",
        "| ... Other on Other | 10.00 | 20.00 |",
        "One trace of 1,024 invokes (32 tokens each, one new one) that each save a layer: 3.00 s, plain generation of the same "
        "2.00 s, x 1.50 (1.00 to 2.00); aim, at most: x 1.25, **missed**.",
    ):
        assert line in lines, line


def test_captures_and_harvests_have_their_aims_beside_them_and_requests_the_length_that_they_had() -> None:
    row = {"case": "captured", "plain_ms": 2.0, "lowest": 1.0, "highest": 1.5, "ms": 2.5, "ratio": 1.25}
    record = {
        **{name: a_record()[name] for name in ("model", "dtype", "load_format", "settings", "machine")}, "new_tokens": 65,
        "suite": "interventions", "rows": [{**row, "batch": 1, "gb_per_s": 0.06}, {**row, "batch": 4, "gb_per_s": 7.29}],
        "captured_prefill": {"prompts": 4, "prompt_tokens": 2048, "gb_per_s": 9.7, "of_plain": 0.85},
        "harvest": {"bytes": 4.3e9, "gb_per_s": 1.7, "disk_gb_per_s": 1.5},
    }  # fmt: skip
    record["rows"] += [{**row, "case": TABLES_PRESENT, "batch": n, "ratio": 1 + n / 100} for n in (1, 4)]
    aims = {"gb_per_s": 5.5, "prefill_gb_per_s": 10, "prefill_of_plain": 0.9, "harvest_gb_per_s": 3}
    text = render(record, {"batches": [1, 4], "captures": aims})
    assert (
        "bs 1 0.06, bs 4 7.29 (aim 5.5, met); in the prefill of 4 prompts of 2,048 tokens 9.70 (aim 10, **missed**)"
        in text
    )
    assert "at 85% of its speed without (aim 90%, **missed**)." in text
    assert "| ... against a graph without tables | x 1.262 | x 1.300 |" in text
    assert "to the local disk: 1.70 GB a second (aim 1.50, met), until all" in text, "no more than the disk's own speed"
    assert "prompts of 128 tokens, 65 new ones" in text
    assert "aim" not in render(record, {}) and "aim 3.00, **missed**" in render(
        {**record, "harvest": {"bytes": 1, "gb_per_s": 2.9, "disk_gb_per_s": 9.0}}, {"captures": aims}
    )


@pytest.mark.parametrize(
    "suite", ["traces", *(pytest.param(name, marks=pytest.mark.slow) for name in ("interventions", "toolkit"))]
)
def test_a_suite_against_plain_steps_measures_each_case_at_each_batch_size(
    suite: str, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "PAIRS", 2)
    monkeypatch.setattr(traces, "PAIRS", 1)
    monkeypatch.setattr(toolkit, "FEATURES", 256)
    out = tmp_path / "x.json"
    command = [suite, "--config", str(model_folder("llama")), "--quick", "--device", "cpu"]
    assert main([*command, "--batches", "1", "3", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    cells = [(row["case"], row["batch"]) for row in record["rows"]]
    assert len(set(cells)) == len(cells) and {batch for _, batch in cells} == {1, 3} and len(cells) >= 8
    assert all(row["lowest"] <= row["ratio"] <= row["highest"] and math.isfinite(row["ms"]) for row in record["rows"])
    if suite == "traces":
        for sweep in (record["sweep"], record["sweep, in the passes"]):
            assert sweep["invokes"] == 8 and sweep["traced_s"] > 0
        assert sum(case.endswith(", in the passes") for case, _ in cells) == len(cells) / 2
    elif suite == "toolkit":
        assert record["lens"]["rows"] == 64 and math.isfinite(record["lens"]["ms"])
    else:
        assert record["harvest"]["gb_per_s"] > 0 and record["captured_prefill"]["gb_per_s"] > 0


def test_requests_of_all_kinds_leave_nothing_behind(lm_of: Callable[..., LM]) -> None:
    lm, settings, count = lm_of("llama"), BenchSettings.of(False, quick=True), 4
    left = []
    while (
        len(left) < 6 and min(left, default=math.inf) > 0
    ):  # what is made once is no leak, nor what other tests' engines do
        before = held_memory()["objects"]
        for _ in range(5):
            run_requests(lm, count, settings)
        left.append(held_memory()["objects"] - before)
    assert min(left) < count, f"not one for each request of any kind: {left} after {5 * count} of each"
    stats = lm.engine.stats()
    assert (stats["running"], stats["waiting"], stats["free_kv_tokens"]) == (0, 0, lm.runner.max_total_num_tokens)


def test_the_memory_suite_counts_after_each_round(
    model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.json"
    command = ["memory", "--config", str(model_folder("llama")), "--quick", "--device", "cpu"]
    assert main([*command, "--batches", "3", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["requests"] for row in record["rows"]] == [20, 40]
    assert all(row["objects"] > 0 and row["free_kv_tokens"] > 0 for row in record["rows"])
    assert ways(record) == {"plain", "modules"}
    assert f"| 40 | {record['rows'][1]['objects']:,} |" in capsys.readouterr().out


def test_the_speculative_suite_measures_each_drafter_at_each_batch_size(
    model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.json"
    command = ["speculative", "--config", str(model_folder("llama")), "--quick", "--device", "cpu"]
    assert main([*command, "--batches", "1", "2", "64", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    cells = {(row["case"].partition(",")[0], row["batch"]) for row in record["rows"]}
    assert cells == {(case, n) for case in ("synthetic", "n-gram", "draft_model", "eagle3") for n in (1, 2)}
    for row in record["rows"]:
        assert row["lowest"] <= row["ratio"] <= row["highest"] and math.isfinite(row["tokens_per_s"])
        assert row["tokens_a_pass"] == (
            1.0 if "n-gram" in row["case"] else pytest.approx(row["tokens_a_pass"], abs=2.5)
        )
        assert "all right" not in row["case"] or row["tokens_a_pass"] == 3.5
    assert record["ngram_us"] > 0 and record["mask_us"]["median"] > 0
    other = record["other_tokens"]
    assert [other[name]["same"] for name in ("again", "batch 4", "with drafts")] == [other["texts"]] * 3, "in float32"
    assert record["schema_ratio"] is None, "there is no end token"
    printed = capsys.readouterr().out
    assert "| draft_model, all right | " in printed and "a mask of a JSON schema" in printed


def test_a_page_gets_the_tables_of_all_records_between_its_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "page.md"
    for name, content in (
        ("gpu-m.json", a_record()),
        ("gpu-kernels.json", {"results": []}),
        ("cpu-m.json", {"suite": "cpu"}),
    ):
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / name).write_text(json.dumps(content))
    (tmp_path / "configs" / "m").mkdir(parents=True)
    (tmp_path / "configs" / "m" / "aims.json").write_text(json.dumps(AIMS))
    page.parent.mkdir()
    page.write_text(f"before\n{report.BEGIN}old{report.END}\nafter\n")
    report.update_page(page, tmp_path)
    before, between, after = report.split_page(page)
    assert (before, after) == ("before\n", "\nafter\n")
    assert between.strip() == render(a_record(), AIMS, "[gpu-m.json](../results/gpu-m.json)").strip()
    once = page.read_text()
    report.update_page(page, tmp_path)
    assert page.read_text() == once
    page.write_text("no markers")
    assert report.main([str(page)]) == 2
    error = capsys.readouterr().err
    assert "bench: begin" in error and error.startswith("report.py: ") and error.count("\n") == 1


@pytest.mark.slow  # half a minute of the demo model
def test_trace_cost_runs_and_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    subprocess.run(
        [sys.executable, BENCHMARKS / "trace_cost.py", "--quick", "--out", out], check=True, capture_output=True
    )
    record = json.loads(out.read_text())
    assert record.keys() == {"machine", "microseconds", "crowd", "empty_trace", "many_invokes"}
    numbers = [value for part, values in record.items() if part != "machine" for value in values.values()]
    assert len(numbers) == 23 and all(math.isfinite(number) for number in numbers)


# -- benchmarks/configs ---------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_shape_is_one_that_is_served_and_its_aims_are_whole(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert architecture_of(config) in NATIVE
    aims = read_aims(folder)
    rows = [values for name in ("decode_ms", "tokens_per_s", "eager_ms") for values in aims.get(name, {}).values()]
    for suite in ("interventions", "traces", "toolkit"):
        rows += [values for case in aims.get(suite, {}).values() if isinstance(case, dict) for values in case.values()]
    assert all(len(values) == len(aims["batches"]) for values in rows)
    assert bool(rows) == (folder / "aims.json").is_file()
