"""The suite "serving": its workloads, what it measures, the record that grows, and the table."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers_paths import ROOT
from suite import main
from suites.own_engine import OurEngine
from suites.serving.peers import VllmEngine
from suites.serving.suite import DEFAULT, ServingSettings, measure_workload
from suites.serving.traffic import Percentiles, TokenStream, measure, run
from suites.serving.workloads import (
    Sizes,
    Workload,
    interference,
    long,
    make_workload,
    mix,
    multi_turn,
    poisson,
    shared_prefix,
)
from suites.tables import read_aims, render
from transformers import LlamaConfig

from pymllm_interp import LM, Steer

BENCHMARKS = ROOT / "benchmarks"
SIZES = Sizes(vocab_size=1000, longest=16384)
NAMES = ("mix", "long", "poisson-10", "poisson-25", "shared-prefix", "multi-turn", "interference")


# -- workloads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_made_of_its_seed_alone_and_each_run_has_its_own_tokens(name: str) -> None:
    sizes = Sizes(vocab_size=50_000, longest=4096, scale=0.1, seed=3)
    workload = make_workload(name, sizes)
    assert workload == make_workload(name, sizes) and workload.name == name
    again = make_workload(name, Sizes(vocab_size=50_000, longest=4096, scale=0.1, seed=3, run=1))
    assert (again.arrivals, again.new_tokens) == (workload.arrivals, workload.new_tokens)
    assert [len(prompt) for prompt in again.prompts] == [len(prompt) for prompt in workload.prompts]
    assert all(own[0] != other[0] for own, other in zip(workload.prompts[:1], again.prompts, strict=False))
    assert sum(a == b for a, b in zip(workload.prompts, again.prompts, strict=True)) == 0
    if name not in ("long", "interference"):
        other = make_workload(name, Sizes(vocab_size=50_000, longest=4096, scale=0.1, seed=4))
        assert (other.arrivals, [*map(len, other.prompts)]) != (workload.arrivals, [*map(len, workload.prompts)])


def log_moments(values: Sequence[int]) -> tuple[float, float]:
    """(median, standard deviation of the logarithms)."""
    return statistics.median(values), statistics.stdev(map(math.log, values))


def test_mixed_lengths_are_log_normal_within_their_bounds() -> None:
    made = [mix(Sizes(vocab_size=1000, longest=16384, seed=seed)) for seed in range(4)]
    assert all(len(workload.prompts) == 512 and set(workload.arrivals) == {0.0} for workload in made)
    prompts = [len(prompt) for workload in made for prompt in workload.prompts]
    news = [new for workload in made for new in workload.new_tokens]
    assert 4 <= min(prompts) and max(prompts) == 2000 and 4 <= min(news) and max(news) == 600
    assert log_moments(prompts) == (pytest.approx(200, rel=0.08), pytest.approx(0.8, rel=0.06))
    assert log_moments(news) == (pytest.approx(150, rel=0.08), pytest.approx(0.6, rel=0.06))
    assert np.corrcoef(prompts, news)[0, 1] == pytest.approx(0, abs=0.08)
    ids = [token for prompt in made[0].prompts for token in prompt]
    assert min(ids) == 0 and max(ids) == 999


@pytest.mark.parametrize("rate", [10, 25])
def test_poisson_arrivals_have_the_rate_and_exponential_gaps(rate: int) -> None:
    made = [poisson(Sizes(vocab_size=10, longest=16384, seed=seed), rate) for seed in range(10)]
    counts = [len(workload.arrivals) for workload in made]
    assert statistics.mean(counts) == pytest.approx(20 * rate, rel=0.05) and len(set(counts)) > 1
    gaps = [gap for workload in made for gap in np.diff(workload.arrivals)]
    assert min(gaps) >= 0 and max(time for workload in made for time in workload.arrivals) < 20
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.08), "an exponential's deviation is its mean"


def test_long_prompts_are_equally_long_and_only_differ_in_new_tokens() -> None:
    many, few = long(SIZES), long(SIZES, 2)
    assert {len(prompt) for prompt in many.prompts} == {8192} and len(many.prompts) == 32
    assert many.prompts == few.prompts and set(many.new_tokens) == {66} and set(few.new_tokens) == {2}


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    workload = shared_prefix(SIZES)
    prefix = workload.prompts[0][:1024]
    assert len(workload.prompts) == 256 and all(prompt[:1024] == prefix for prompt in workload.prompts)
    suffixes = [len(prompt) - 1024 for prompt in workload.prompts]
    assert 4 <= min(suffixes) and max(suffixes) <= 512 and statistics.median(suffixes) == pytest.approx(64, rel=0.15)
    assert len({tuple(prompt[1024:1028]) for prompt in workload.prompts}) > 250
    assert set(workload.new_tokens) == {64}


def test_four_fifths_of_the_tokens_of_chats_were_sent_before() -> None:
    workload = multi_turn(SIZES)
    assert len(workload.prompts) == 64 * 8 and max(map(len, workload.prompts)) > 1000
    sent: set[tuple[int, ...]] = set()
    again = 0
    for prompt in workload.prompts:
        known = [n for n in range(0, len(prompt) + 1, 16) if tuple(prompt[:n]) in sent]
        again += max(known, default=0)
        sent |= {tuple(prompt[:n]) for n in range(0, len(prompt) + 1, 16)}
    # A reply of 64 tokens within a prompt is not sent before: it was generated.
    replies = 64 * 7 * 64
    assert (again + replies) / sum(map(len, workload.prompts)) == pytest.approx(0.88, abs=0.04)
    assert again / sum(map(len, workload.prompts)) == pytest.approx(0.8, abs=0.04)


def test_long_prompts_interfere_in_the_background() -> None:
    workload = interference(SIZES)
    assert [len(prompt) for prompt in workload.prompts] == [128] * 32 + [8000] * 8 and workload.background == 8
    assert workload.arrivals == [0.0] * 32 + [0.5 * i for i in range(1, 9)]
    alone = interference(SIZES, prompts=False)
    assert alone.prompts == workload.prompts[:32] and alone.background == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("longest", [8, 24, 127, 700])
def test_requests_fit_the_context_and_workloads_the_scale(name: str, longest: int) -> None:
    workload = make_workload(name, Sizes(vocab_size=5, longest=longest, scale=0.05))
    sums = [len(prompt) + new for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)]
    assert max(sums) <= longest and all(workload.prompts) and min(workload.new_tokens) >= 1
    expected = {"mix": 26, "long": 2, "shared-prefix": 13, "interference": 2 + 2}
    assert len(workload.prompts) == expected.get(name, len(workload.prompts)) < 60
    assert max(workload.arrivals) < 1 and list(workload.arrivals) == sorted(workload.arrivals)


def test_the_head_of_a_workload_begins_at_once_and_is_short() -> None:
    whole = make_workload("poisson-25", SIZES)
    head = whole.head(8, 16)
    assert head.prompts == whole.prompts[:8] and head.arrivals == [0.0] * 8 and max(head.new_tokens) == 16


@pytest.mark.parametrize("name", ["", "mixed", "poisson", "poisson-x", "poisson-0", "poisson--1", "poisson-inf"])
def test_an_unknown_workload_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of mix, .*, interference, or poisson-RATE"):
        make_workload(name, SIZES)
    with pytest.raises(ValueError, match="workload"):
        ServingSettings(workloads=("mix", f"{name}-steered"))


# -- measure -------------------------------------------------------------------------------------


def tiny(lm: LM, **sizes: Any) -> Workload:
    """11 or so requests over half a second."""
    return poisson(Sizes(vocab_size=lm.limits.vocab_size, longest=40, scale=0.025, **sizes), 25)


def test_latencies_are_not_those_of_requests_in_the_background(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    workload = replace(tiny(lm), background=3)
    streams, result = run(OurEngine(lm), workload)
    counted = streams[:-3]
    assert result.requests == len(streams) and result.new_tokens == sum(workload.new_tokens)
    assert result.ttft_ms == Percentiles.of(stream.times[0] - stream.due for stream in counted)
    assert result.e2e_ms == Percentiles.of(stream.times[-1] - stream.due for stream in counted)


def test_each_request_gets_its_tokens_at_rising_times_and_the_counts_add_up(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    measure(OurEngine(lm), tiny(lm).head(2, 3))  # an engine that has made steps before
    workload, before, started = tiny(lm), lm.engine.num_steps, time.perf_counter()
    streams, result = run(OurEngine(lm), workload)
    wall = time.perf_counter() - started
    assert [len(stream.times) for stream in streams] == workload.new_tokens
    assert [stream.prompt for stream in streams] == workload.prompts
    for stream, arrival in zip(streams, workload.arrivals, strict=True):
        assert stream.times == sorted(stream.times)
        assert started + arrival <= stream.due <= stream.sent < stream.times[0]
    assert result.requests == len(workload.prompts) and result.traced == 0
    assert result.new_tokens == sum(workload.new_tokens)
    assert result.prompt_tokens == sum(map(len, workload.prompts))
    assert workload.arrivals[-1] < result.seconds <= wall
    assert result.tokens_per_s == pytest.approx(result.new_tokens / result.seconds)
    assert sum(result.execution.values()) == lm.engine.num_steps - before >= max(workload.new_tokens)


def test_percentiles_are_those_of_all_requests_and_all_gaps(lm_of: Callable[..., LM]) -> None:
    streams, result = run(OurEngine(lm_of("llama")), tiny(lm_of("llama"), seed=1))
    gaps = [later - before for s in streams for before, later in zip(s.times, s.times[1:], strict=False)]
    assert len(gaps) == result.new_tokens - result.requests
    for found, seconds in (
        (result.ttft_ms, [s.times[0] - s.due for s in streams]),
        (result.itl_ms, gaps),
        (result.e2e_ms, [s.times[-1] - s.due for s in streams]),
        (result.late_ms, [s.sent - s.due for s in streams]),
    ):
        assert found == pytest.approx([1e3 * np.percentile(seconds, p) for p in (50, 90, 99)])
        assert found.p50 <= found.p90 <= found.p99


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_percentiles_are_milliseconds_and_interpolate(count: int) -> None:
    seconds = np.random.default_rng(count).exponential(size=count)
    ordered = sorted(1e3 * seconds)

    def percentile(share: float) -> float:
        below = int(share * (count - 1))
        above = min(below + 1, count - 1)
        return ordered[below] + (share * (count - 1) - below) * (ordered[above] - ordered[below])

    assert Percentiles.of(iter(seconds)) == pytest.approx([percentile(share) for share in (0.5, 0.9, 0.99)])
    assert all(map(math.isnan, Percentiles.of([])))


def test_requests_under_load_generate_what_they_generate_alone(lm_of: Callable[..., LM]) -> None:
    """The vectors are the requests' own: each one's tokens are those of a call with them."""
    lm = lm_of("llama")
    workload = tiny(lm)
    steers = [[Steer("resid_post.1", torch.randn(72) * 30)] for _ in workload.prompts]
    engine, seen = OurEngine(lm, interventions=steers), {}
    made = lm.engine.submit_all

    def keep(groups: Any) -> None:
        seen.update({tuple(request.prompt_token_ids): request for requests, _ in groups for request in requests})
        made(groups)

    lm.engine.submit_all = keep  # type: ignore[method-assign]
    try:
        measure(engine, workload)
    finally:
        del lm.engine.submit_all
    outputs = lm.generate(
        workload.prompts,
        [seen[tuple(prompt)].params for prompt in workload.prompts],
        interventions=steers,
    )
    plain = lm.generate(workload.prompts, [seen[tuple(prompt)].params for prompt in workload.prompts])
    found = [seen[tuple(prompt)].output_token_ids for prompt in workload.prompts]
    assert found == [output.token_ids for output in outputs]
    assert sum(own != output.token_ids for own, output in zip(found, plain, strict=True)) > len(found) // 2


def test_traced_requests_run_beside_the_others_and_have_no_latencies(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama", lower_traces="off")
    workload = tiny(lm)
    traced = {1: 0, 4: 2, 5: 1}
    streams, result = run(OurEngine(lm, traced=traced), workload)
    assert result.traced == 3 and [s.index for s in streams if s.traced] == [1, 4, 5]
    assert result.new_tokens == sum(workload.new_tokens), "they count as tokens"
    plain = [s for s in streams if not s.traced]
    assert result.ttft_ms == pytest.approx(
        [1e3 * np.percentile([s.times[0] - s.due for s in plain], p) for p in (50, 90, 99)]
    )
    gaps = [gap for s in plain for gap in np.diff(s.times)]
    assert result.itl_ms == pytest.approx([1e3 * np.percentile(gaps, p) for p in (50, 90, 99)])
    assert any(how.startswith(("modules", "segments", "split")) for how in result.execution), "blocks were served"


def test_a_request_that_fails_is_told(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    workload = Workload("bad", [[1, 2, 3]], [500], [0.0], 0)  # more than the context
    with pytest.raises(ValueError, match="max_model_len"):
        measure(OurEngine(lm), workload)


def test_a_request_that_ends_early_is_told(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    engine = OurEngine(lm)
    now = time.perf_counter()
    streams = [TokenStream(0, [1, 2], 3, now), TokenStream(1, [3, 4], 100, now)]
    engine.submit(streams)
    while not streams[1].times:
        time.sleep(0.001)
    lm.engine.abort([request.request_id for request in lm.engine.call(lambda: lm.engine.scheduler.live)])
    with pytest.raises(RuntimeError, match=r"request \d+ ended with 'abort'"):
        engine.serve(None)


class Late:
    """An engine of known times: a token each 10 ms after the first, which takes 50 ms; the second request loses one."""

    name, vocab_size, max_model_len = "late", 10, 100

    def __init__(self, lost: int = 0) -> None:
        self.lost, self.calls = lost, list[Any]()

    def submit(self, streams: Sequence[TokenStream]) -> None:
        self.calls.append([stream.index for stream in streams])
        for stream in streams:
            stream.times += [stream.due + 0.05 + 0.01 * i for i in range(stream.new_tokens - self.lost * stream.index)]

    def serve(self, until: float | None) -> None:
        self.calls.append(until is None)

    def execution(self) -> Mapping[str, int]:
        return {}


def test_requests_that_are_due_together_are_sent_together() -> None:
    engine = Late()
    workload = Workload("x", [[1], [2], [3]], [3, 5, 2], [0.0, 0.0, 0.5], 0)
    result = measure(engine, workload)
    assert engine.calls == [False, [0, 1], False, [2], True]
    assert result.ttft_ms == pytest.approx((50, 50, 50)) and result.itl_ms == pytest.approx((10, 10, 10))
    assert result.e2e_ms.p50 == pytest.approx(70) and result.seconds == pytest.approx(0.56)
    assert result.tokens_per_s == pytest.approx(10 / 0.56)
    with pytest.raises(RuntimeError, match=r"late, x: request 1 has 4 tokens of 5"):
        measure(Late(lost=1), workload)


def test_a_step_of_long_prompts_is_the_difference_of_two_runs() -> None:
    settings = ServingSettings(repeats=2, scale=0.1)
    row, result = measure_workload(lambda _: Late(), Late(), "long", settings, 0)
    assert row["step_ms"] == pytest.approx(10) and row["step_ms_runs"] == pytest.approx([10, 10])
    assert row["new_tokens"] == result.new_tokens == 3 * 50 and row["requests"] == 3


@pytest.mark.parametrize("name", ["mix", "long", "shared-prefix"])
def test_no_run_sends_the_prompts_of_another(name: str) -> None:
    """Else the second would find them in a prefix cache."""
    sent: list[tuple[int, ...]] = []

    class Recording(Late):
        vocab_size = 50_000

        def submit(self, streams: Sequence[TokenStream]) -> None:
            sent.extend(tuple(stream.prompt) for stream in streams)
            super().submit(streams)

    measure_workload(lambda _: Recording(), Recording(), name, ServingSettings(scale=0.1), 0)
    runs = {"long": 7}.get(name, 2)
    assert len(sent) > 8 and len({prompt[:3] for prompt in sent}) == (runs if name == "shared-prefix" else len(sent))


# -- the suite -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policies", "workloads"),
    [(("mixed",), DEFAULT), (("mixed", "prefill_first"), ("poisson-25", "poisson-25-steered"))],
)
def test_one_command_measures_every_workload_on_each_policy(
    policies: Sequence[str],
    workloads: Sequence[str],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "x.json"
    command = ["serving", "--config", str(model_folder("llama")), "--device", "cpu", "--quick"]
    options = ["--options", "max_num_tokens=48", "--options", "hook_execution=eager", "--dtype", "float32"]
    chosen = [] if workloads is DEFAULT else ["--workloads", *workloads]
    assert main([*command, *options, "--policies", *policies, *chosen, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["settings"]["options"] == {"max_num_tokens": 48, "hook_execution": "eager"}
    assert record["limits"]["max_num_tokens"] == 48
    assert record["machine"]["versions"]["torch"] and record["dtype"] == "float32"
    keys = [(row["policy"], "-".join(filter(None, (row["workload"], row["variant"])))) for row in record["rows"]]
    assert keys == [(policy, name) for policy in policies for name in workloads]
    for row in record["rows"]:
        assert row["requests"] >= 2 and row["tokens_per_s"] > 0 and row["engine"] == "pymllm-interp"
        assert sum(row["execution"].values()) >= row["new_tokens"] / row["requests"]
        assert ("against_plain" in row) == (row["variant"] is not None) and ("step_ms" in row) == (
            row["workload"] == "long"
        )
        assert (row["traced"] > 0) == (row["variant"] == "traced")
        assert ("against_alone" in row) == (row["workload"] == "interference")
    by_key = dict(zip(keys, record["rows"], strict=True))
    plain, steered = by_key["mixed", "poisson-25"], by_key["mixed", "poisson-25-steered"]
    assert plain["new_tokens"] == steered["new_tokens"] and plain["prompt_tokens"] == steered["prompt_tokens"]
    ratio = steered["itl_ms"]["p99"] / plain["itl_ms"]["p99"]
    assert steered["against_plain"]["itl_ms"]["p99"] == pytest.approx(ratio)
    printed = capsys.readouterr().out
    assert all(
        f"| {name.replace('-steered', ', steered').replace('-traced', ', traced')}, mixed |" in printed
        for name in workloads
    )


def test_the_record_is_written_after_each_workload(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cut off leaves what it has measured."""
    out = tmp_path / "x.json"
    submit, written = OurEngine.submit, list[list[str]]()

    def looking(self: OurEngine, streams: Sequence[TokenStream]) -> None:
        found = [row["workload"] for row in json.loads(out.read_text())["rows"]] if out.is_file() else []
        if not written or written[-1] != found:
            written.append(found)
        if found == ["mix", "long"]:
            raise KeyboardInterrupt
        submit(self, streams)

    monkeypatch.setattr(OurEngine, "submit", looking)
    command = ["serving", "--config", str(model_folder("llama")), "--device", "cpu", "--quick"]
    workloads = ["--workloads", "mix", "long", "shared-prefix"]
    with pytest.raises(KeyboardInterrupt):
        main([*command, *workloads, "--out", str(out)])
    assert written == [[], ["mix"], ["mix", "long"]]
    assert [row["workload"] for row in json.loads(out.read_text())["rows"]] == ["mix", "long"]


def test_a_variant_brings_its_plain_workload(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    command = ["serving", "--config", str(model_folder("llama")), "--device", "cpu", "--quick"]
    assert main([*command, "--workloads", "mix-traced", "mix-steered", "mix", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["workload"], row["variant"]) for row in rows] == [("mix", None), ("mix", "traced"), ("mix", "steered")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workloads", "mixed"], "workload 'mixed': expected one of"),
        (["--batches", "2"], "the suite 'serving' has no setting batches"),
        (["--scale", "0"], "scale=0.0: expected above 0"),
        (["--longest", "7"], "longest=7: requests need at least 8 tokens"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serving", "--quick", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


def test_other_suites_take_no_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traces", "--quick", "--workloads", "mix"]) == 2
    assert "the suite 'traces' has no setting workloads" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serving", "--options", "max_num_tokens"])
    assert "expected NAME=VALUE" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("engine", ["vllm", "both"])
def test_vllm_where_there_is_none_is_told_before_anything_runs(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.json"
    assert main(["serving", "--quick", "--engine", engine, "--out", str(out)]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err and not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_is_measured_as_we_are(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=97, max_position_embeddings=128, num_hidden_layers=2, **sizes
    )
    config.save_pretrained(tmp_path)
    engine = VllmEngine(str(tmp_path), "float32", "dummy")
    try:
        workload = poisson(Sizes(vocab_size=engine.vocab_size, longest=40, scale=0.025), 25)
        streams, result = run(engine, workload)
        assert (engine.vocab_size, engine.max_model_len) == (97, 128)
        assert [len(stream.times) for stream in streams] == workload.new_tokens
        assert result.new_tokens == sum(workload.new_tokens) and workload.arrivals[-1] < result.seconds
        for stream in streams:
            assert stream.due <= stream.sent < stream.times[0] and stream.times == sorted(stream.times)
        assert measure(engine, workload.head(3, 4)).new_tokens == 12
    finally:
        engine.shutdown()


# -- the table -----------------------------------------------------------------------------------


def a_row(policy: str | None, workload: str, variant: str | None = None, **more: Any) -> dict[str, Any]:
    times = {"p50": 5.0, "p90": 50.0, "p99": 123.4}
    return {
        "policy": policy, "engine": "pymllm-interp" if policy else "Other 2.0", "workload": workload, "variant": variant,
        "tokens_per_s": 9400.4, "ttft_ms": times, "itl_ms": {**times, "p99": 46.0}, "e2e_ms": {**times, "p99": 12345.6},
    } | more  # fmt: skip


def test_the_table_has_aims_peers_and_ratios_beside_each_workload() -> None:
    ratios = {"tokens_per_s": 0.987, "itl_ms": {"p50": 1.0, "p90": 1.111, "p99": 1.5}}
    record = {
        "suite": "serving", "model": "m", "dtype": "bfloat16", "load_format": "dummy", "settings": {"scale": 0.5},
        "machine": {"gpu": "GPU Z", "cpu": "C", "versions": {"torch": "2.x"}, "commit": "c0ffee"},
        "rows": [
            a_row("mixed", "mix"), a_row("mixed", "mix", "steered", against_plain=ratios), a_row("mixed", "long", step_ms=13.75),
            a_row("mixed", "poisson-25"), a_row("prefill_first", "poisson-25"), a_row(None, "mix"), a_row(None, "poisson-25"),
            a_row("mixed", "interference", against_alone={"tokens_per_s": 0.5, "itl_ms": {"p50": 1.25, "p90": 2.0, "p99": 2.5}}),
        ],
    }  # fmt: skip
    numbers = {"ttft_ms": {"p50": 5, "p99": 120}, "itl_ms": {"p50": 4.99, "p99": 46}}
    aims = {
        "peer": "Other 1.0",
        "serving": {
            "aim": {"mix": {"tokens_per_s": 9401}, "long": {"step_ms": 13.75}, "poisson-25": numbers},
            "peer": {"mix": {"tokens_per_s": 8530}},
        },
    }
    text = render(record, aims, "[file](path)")
    assert (
        "GPU Z; torch 2.x; commit c0ffee. [file](path)\nRandom weights, bfloat16, greedy. 0.5 of the requests" in text
    )
    times = "5 / 50 / 123 | 5 / 50 / 46 | 5 / 50 / 12,346 |"
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[2:] == [
        f"| mix, mixed | 9,400 | - | {times}",
        "| ... aim | 9,401 **missed** | - | - | - | - |",
        "| ... Other 1.0, measured before | 8,530 | - | - | - | - |",
        f"| mix, Other 2.0 | 9,400 | - | {times}",
        f"| mix, steered, mixed | 9,400 | - | {times}",
        "| ... against plain | x 0.99 | - | - | x 1.00 / x 1.11 / x 1.50 | - |",
        f"| long, mixed | 9,400 | 13.8 | {times}",
        "| ... aim | - | 13.8 met | - | - | - |",
        f"| poisson-25, mixed | 9,400 | - | {times}",
        "| ... aim | - | - | 5 met / - / 120 **missed** | 4.99 **missed** / - / 46 met | - |",
        f"| poisson-25, prefill_first | 9,400 | - | {times}",
        "| ... aim | - | - | 5 met / - / 120 **missed** | 4.99 **missed** / - / 46 met | - |",
        f"| poisson-25, Other 2.0 | 9,400 | - | {times}",
        f"| interference, mixed | 9,400 | - | {times}",
        "| ... against no long prompts | x 0.50 | - | - | x 1.25 / x 2.00 / x 2.50 | - |",
    ]
    assert len({line.count("|") for line in lines}) == 1, "every row has all cells"
    assert "aim" not in render(record, {}) and "Other 1.0" not in render(record, {})


def test_the_aims_of_the_8b_shape_are_those_of_the_peer_and_a_tenth_more_throughput() -> None:
    serving = read_aims(BENCHMARKS / "configs" / "llama8b")["serving"]
    aim, peer = serving["aim"], serving["peer"]
    assert aim["mix"]["tokens_per_s"] == pytest.approx(1.1 * peer["mix"]["tokens_per_s"], abs=1)
    assert {name: values for name, values in aim.items() if name != "mix"} == {
        name: values for name, values in peer.items() if name != "mix"
    }
    assert aim.keys() <= set(DEFAULT)


# -- the picture ---------------------------------------------------------------------------------


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/serving_chart.py, which imports its neighbour."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("serving_chart")


def test_the_picture_has_a_bar_for_each_engine_and_workload(chart: ModuleType) -> None:
    rows = [
        a_row("mixed", "mix"), a_row("mixed", "mix", "steered"), a_row("mixed", "long", step_ms=13.75),
        a_row("mixed", "poisson-25"), a_row("prefill_first", "poisson-25"),
    ]  # fmt: skip
    record = {"model": "m", "dtype": "bfloat16", "machine": {"gpu": "GPU Z", "cpu": "C"}, "rows": rows}
    aims = {
        "peer": "Other 1.0",
        "serving": {"peer": {"mix": {"tokens_per_s": 8530}, "poisson-25": {"ttft_ms": {"p50": 7.0}}}},
    }
    read = chart.read_chart(record, aims)
    assert read.title == "m, bfloat16, GPU Z"
    assert read.engines == ["pymllm-interp, mixed", "pymllm-interp, prefill_first", "Other 1.0"]
    values = [
        (panel.title.partition(",")[0], bars.workload, bars.values) for panel in read.panels for bars in panel.rows
    ]
    assert values == [
        ("new tokens a second", "mix", [9400.4, None, 8530]),
        ("ms a step", "long", [13.75, None, None]),
        ("ms to the first token", "poisson-25", [5.0, 5.0, 7.0]),
        ("ms to the first token", "poisson-25", [123.4, 123.4, None]),
        ("ms between tokens", "poisson-25", [5.0, 5.0, None]),
        ("ms between tokens", "poisson-25", [46.0, 46.0, None]),
    ]
    beside = chart.read_chart({**record, "rows": [*rows, a_row(None, "poisson-25", ttft_ms={"p50": 8.0})]}, aims)
    assert beside.engines[-1] == "Other 2.0" and beside.panels[2].rows[0].values == [5.0, 5.0, 8.0]
    assert beside.panels[0].rows[0].values == [9400.4, None, None], "the peer of the same run, or none"
    drawn = ElementTree.fromstring(chart.draw([read]))
    boxes = [float(box.get("width", "")) for box in drawn if box.tag.endswith("rect") and box.get("x")]
    assert len(boxes) == 12 and max(boxes) == chart.WIDTH
    assert boxes[1] == pytest.approx(chart.WIDTH * 8530 / 9400.4, abs=0.1)


def test_the_picture_in_the_documentation_is_that_of_the_records(chart: ModuleType) -> None:
    charts, picture = chart.read_charts(BENCHMARKS), BENCHMARKS.parent / "docs" / "images" / "serving.svg"
    assert picture.exists() == bool(charts)
    if charts:
        assert chart.draw(charts) == picture.read_text(), "run `python benchmarks/serving_chart.py`"
