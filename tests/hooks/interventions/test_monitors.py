"""Monitors: scores against plain captures, and decisions against a loop over the captured states."""

from __future__ import annotations

import random
import sys
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from conftest import held
from helpers_declared import lms, vector
from helpers_drafts import Told
from helpers_runner import random_ids
from torch import nn

from pymllm_interp import LM, SamplingParams, Scale, Steer
from pymllm_interp.hooks.monitors.monitor import BoundMonitor
from pymllm_interp.hooks.monitors.request_monitors import ReducedScores, RequestMonitors, limits_of
from pymllm_interp.hooks.positions import Window
from pymllm_interp.interventions import Ablate, FeatureProbe, Gate, Generated, Monitor, Probe
from pymllm_interp.wire.specs import intervention_of, to_json

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
WAIT, WIDTH = 600, 64
SITES = ["resid_post.0", "resid_pre.1", "attn_out.1", "mlp_out.0", "final_norm"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def torch_score(probe: Any, states: torch.Tensor) -> torch.Tensor:
    """The reference: [rows] of states [rows, width], by torch's own modules."""
    if isinstance(probe, FeatureProbe):
        return probe.sae.encode(states)[:, probe.feature]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(probe, nn.Module):
        return probe(states)[:, 0].detach()
    if isinstance(probe, torch.Tensor):
        return states @ probe
    values = states @ probe.weight.T + torch.tensor(probe.bias)
    if probe.activation != "identity":
        values = getattr(nn.functional, probe.activation)(values)
    if probe.out_weight is not None:
        values = values @ torch.atleast_2d(torch.tensor(probe.out_weight)).T + torch.tensor(probe.out_bias)
    values = values.softmax(-1) if probe.output == "softmax" else values
    values = values.reshape(len(states), -1)[:, probe.index]
    return values.sigmoid() if probe.output == "sigmoid" else values


def some_probe(rng: random.Random, width: int) -> Any:
    seed = rng.randrange(10**6)
    torch.manual_seed(seed)
    rows = vector(width, seed, 5) / 8
    return rng.choice([
        rows[0],
        nn.Linear(width, 1),
        nn.Sequential(nn.Linear(width, 7), nn.SiLU(), nn.Dropout(0.0), nn.Linear(7, 1), nn.Sigmoid()),
        Probe(rows, [0.1, 0.2, 0.3, 0.4, 0.5], output="softmax", index=rng.randrange(5)),
        Probe(rows, activation="gelu", out_weight=vector(5, seed), out_bias=0.5, output="sigmoid"),
        Probe(rows, activation="tanh", out_weight=vector(5, seed, 3).tolist(), output="softmax", index=1),
    ])  # fmt: skip


def reduced(reduce: str, decay: float, scores: list[float]) -> list[float]:
    """What is compared with the threshold, by a loop."""
    found, smooth = [], scores[0]
    for i, score in enumerate(scores):
        so_far, smooth = scores[: i + 1], decay * smooth + (1 - decay) * score
        found.append({"token": score, "mean": sum(so_far) / len(so_far), "max": max(so_far), "ewma": smooth}[reduce])
    return found


def first_fire(values: list[float], positions: list[int], threshold: float, patience: int) -> int | None:
    """The first position that fires, by a loop."""
    streak = 0
    for value, position in zip(values, positions, strict=True):
        streak = streak + 1 if value > threshold else 0
        if streak >= patience:
            return position
    return None


def wanted_scores(out: Any, site: str, positions: Any, prompt_len: int) -> tuple[torch.Tensor, list[int]]:
    """The states and positions that a monitor sees, from a capture of all positions."""
    count = len(out.activations[site])
    selected = {
        "all": range(count), "prompt": range(prompt_len), "generated": range(prompt_len, count),
        Generated(0, None, 2): range(prompt_len, count, 2), (-1,): range(prompt_len - 1, prompt_len),
    }[positions]  # fmt: skip
    return out.activations[site][list(selected)].float(), list(selected)


@pytest.mark.parametrize("way", ["functions", "tables", "graphs"])
def test_scores_are_torchs_over_captures_in_any_company(way: str, model_folder: Any) -> None:
    """Chunks, a small pool, ops and captures beside them; several monitors at a site, and different ones in each request."""
    rng = random.Random(7)
    count = 10 if way == "functions" else 4
    with lms(way, model_folder) as load:
        lm = load("llama", kv_cache_tokens=60, page_size=4, max_num_tokens=9)
        width, asked, handles = lm.hidden_size, [], []
        with held(lm):
            for i in range(count):
                prompt = random_ids(rng.randrange(1, 14), seed=i)
                probes, monitors = [], []
                for j in range(rng.randrange(1, 4)):
                    probes.append(some_probe(rng, width))
                    positions = rng.choice(["all", "prompt", "generated", Generated(0, None, 2), (-1,)])
                    monitors.append(
                        Monitor(rng.choice(SITES[:3] if j else SITES), probes[-1], name=f"{j}", positions=positions)
                    )
                sites = sorted({str(monitor.site) for monitor in monitors})
                ops = [Steer("resid_post.0", vector(width, i), scale=0.5)] if i % 3 == 0 else []
                options: Any = {"interventions": ops, "capture": sites}
                asked.append((prompt, probes, monitors, options))
                handles.append(lm.submit(prompt, GREEDY, monitors=monitors, **options))
        outs = [handle.result(WAIT) for handle in handles]
        if way == "functions":
            assert lm.engine.stats()["preempted"]
        for (prompt, probes, monitors, options), out in zip(asked, outs, strict=True):
            for probe, monitor in zip(probes, monitors, strict=True):
                states, positions = wanted_scores(out, str(monitor.site), monitor.positions, len(prompt))
                found = out.monitors[monitor.name]
                assert found.positions.tolist() == positions
                torch.testing.assert_close(found.scores, torch_score(probe, states), rtol=1e-5, atol=1e-5)
            plain = lm.generate([prompt], GREEDY, **options)[0]
            assert plain.token_ids == out.token_ids, "a monitor changes no state"


def stops(lm: Any, seed: int) -> bool:
    """A mix of requests with monitors that stop, against a loop over the states of requests without. Whether some stopped."""
    rng = random.Random(seed)
    prompts = [random_ids(rng.randrange(1, 12), seed=rng.randrange(999)) for _ in range(4)]
    site, width = rng.choice(SITES), lm.hidden_size
    plain = lm.generate(prompts, GREEDY, capture=[site])
    monitors: list[Monitor] = []
    expected: list[int | None] = []
    for prompt, out in zip(prompts, plain, strict=True):
        probe, where = some_probe(rng, width), rng.choice(["all", "generated"])
        states, positions = wanted_scores(out, site, where, len(prompt))
        reduce: Any = rng.choice(["token", "token", "mean", "max", "ewma"])
        decay, patience, threshold = rng.random() * 0.9, rng.choice([1, 1, 2]), 1e6
        values = reduced(reduce, decay, torch_score(probe, states).tolist())
        gaps = [(low + high) / 2 for low, high in pairwise(sorted(values)) if high - low > 1e-4]
        if gaps and rng.random() < 0.8:
            threshold = rng.choice(gaps)
        expected.append(first_fire(values, positions, threshold, patience))
        monitors.append(Monitor(site, probe, threshold, "stop", "m", reduce, decay, patience, where))
    with held(lm):
        handles = [lm.submit(p, GREEDY, monitors=[m], capture=[site]) for p, m in zip(prompts, monitors, strict=True)]
    for prompt, before, fire, handle in zip(prompts, plain, expected, handles, strict=True):
        out = handle.result(WAIT)
        if fire is None:
            assert out.token_ids == before.token_ids and out.finish_reason == "length"
            continue
        kept = max(fire + 1 - len(prompt), 0)
        assert (out.token_ids, out.finish_reason) == (before.token_ids[:kept], "monitor")
        assert out.outputs[0].stop_reason == "m" and out.monitors["m"].stopped and out.monitors["m"].fired[0] == fire
        assert len(out.activations[site]) >= fire + 1, "the state that fired is captured"
    return any(fire is not None for fire in expected)


@pytest.mark.parametrize("seed", range(6))
def test_a_stop_comes_at_the_token_of_a_loop_over_the_states(seed: int, lm_of: Any) -> None:
    assert stops(lm_of("llama", kv_cache_tokens=60, page_size=4, max_num_tokens=5), seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "qwen3"])
def test_two_hundred_mixes_stop_as_a_loop(family: str, lm_of: Any) -> None:
    lm = lm_of(family, kv_cache_tokens=60, page_size=4, max_num_tokens=5)
    assert sum(stops(lm, 1000 + seed) for seed in range(50)) > 40


def firing(lm: Any, prompt: list[int], site: str, after: int, **more: Any) -> tuple[torch.Tensor, float, Any]:
    """A probe and a threshold that fires first at the generated position of token `after`, and the plain output."""
    plain = lm.generate([prompt], GREEDY, capture=[site], **more)[0]
    states = plain.activations[site].float()[len(prompt) :]
    for seed in range(1000):
        probe = vector(states.shape[1], seed)
        scores = states @ probe
        rest = torch.cat([scores[:after], scores.new_full((1,), -1e9)]).max()
        if scores[after] - rest > 0.1:
            return probe, float((scores[after] + rest) / 2), plain
    raise AssertionError("no probe found")


@pytest.mark.few("way", "functions", "graphs")
@pytest.mark.parametrize("way", ["functions", "tables", "graphs"])
def test_ops_of_a_monitor_act_at_the_positions_after(way: str, model_folder: Any) -> None:
    with lms(way, model_folder) as load:
        lm = load("llama", page_size=4)
        prompt, width = random_ids(6, seed=1), lm.hidden_size
        probe, threshold, plain = firing(lm, prompt, "resid_post.1", 3)
        ops = [Steer("resid_post.0", vector(width, 5), scale=9.0), Ablate("attn_out.1", vector(width, 6))]
        monitor = Monitor("resid_post.1", probe, threshold, then=ops, positions="generated", name="m")
        options: Any = {"capture": ["final_norm", "resid_post.1"]}
        with held(lm):
            handles = [
                lm.submit(prompt, GREEDY, monitors=[monitor], **options),
                lm.submit(random_ids(5, seed=2), GREEDY),
            ]
        out = handles[0].result(WAIT)
        later = [Steer("resid_post.0", ops[0].vector, scale=9.0, positions=Generated(4)),
                 Ablate("attn_out.1", ops[1].directions, positions=Generated(4))]  # fmt: skip
        wanted = lm.generate([prompt], GREEDY, interventions=later, **options)[0]
        assert out.token_ids == wanted.token_ids != plain.token_ids
        torch.testing.assert_close(
            out.activations["final_norm"], wanted.activations["final_norm"], rtol=1e-5, atol=1e-5
        )
        assert out.monitors["m"].fired[0] == len(prompt) + 3
        assert [entry.generated_rows for entry in out.receipt.interventions] == [3, 3]
        steered = Monitor("resid_post.1", probe, -1e9, then=ops, positions="prompt")
        found = lm.generate([prompt], GREEDY, monitors=[steered])[0]
        at_once = [Steer("resid_post.0", ops[0].vector, scale=9.0, positions="generated"),
                   Ablate("attn_out.1", ops[1].directions, positions="generated")]  # fmt: skip
        assert found.token_ids == lm.generate([prompt], GREEDY, interventions=at_once)[0].token_ids


def test_what_a_monitor_did_outlasts_a_preemption(lm_of: Any) -> None:
    lm = lm_of("llama", page_size=4, kv_cache_tokens=28)
    prompt, width = random_ids(8, seed=1), lm.hidden_size
    probe, threshold, _ = firing(lm, prompt, "resid_post.1", 1)
    op = Steer("resid_post.0", vector(width, 5), scale=9.0)
    monitor = Monitor("resid_post.1", probe, threshold, then=op, positions="generated")
    alone = lm.generate([prompt], GREEDY, monitors=[monitor])[0]
    with held(lm):
        handles = [lm.submit(random_ids(8, seed=9), GREEDY), lm.submit(prompt, GREEDY, monitors=[monitor])]
    out = handles[1].result(WAIT)
    assert out.receipt.preemptions and handles[0].result(WAIT)
    assert (
        out.token_ids == alone.token_ids and out.monitors["resid_post.1"].fired == alone.monitors["resid_post.1"].fired
    )
    torch.testing.assert_close(out.monitors["resid_post.1"].scores, alone.monitors["resid_post.1"].scores)


def test_kv_behind_a_monitor_is_reused_only_behind_the_same_one(lm_of: Any) -> None:
    lm = lm_of("llama", page_size=4)
    prompt, width = random_ids(8, seed=1), lm.hidden_size
    probe, threshold, _ = firing(lm, prompt, "resid_post.1", 0)
    op = Steer("resid_post.0", vector(width, 5), scale=9.0)
    on, off = (Monitor("resid_post.1", probe, t, then=op, positions="generated") for t in (threshold, 1e9))
    first = lm.generate([prompt], GREEDY, monitors=[on])[0]
    longer = prompt + first.token_ids[:-1]
    plain = lm.generate([longer], GREEDY)[0]
    lm.engine.reset_prefix_cache() if hasattr(lm.engine, "reset_prefix_cache") else lm.reset_prefix_cache()
    assert plain.token_ids == lm.generate([longer], GREEDY)[0].token_ids
    assert lm.generate([prompt], GREEDY, monitors=[off])[0].token_ids == lm.generate([prompt], GREEDY)[0].token_ids


def test_prompt_positions_are_scored_behind_a_prefix_hit(lm_of: Any) -> None:
    lm = lm_of("llama", page_size=4)
    prompt, probe = random_ids(13, seed=3), vector(lm.hidden_size, 3)
    before = lm.generate([prompt], GREEDY, monitors=[Monitor("resid_post.0", probe)])[0]
    again = lm.generate([prompt], GREEDY, monitors=[Monitor("resid_post.0", probe)])[0]
    assert again.monitors["resid_post.0"].positions.tolist() == list(range(20))
    torch.testing.assert_close(again.monitors["resid_post.0"].scores, before.monitors["resid_post.0"].scores)
    generated = lm.generate([prompt], GREEDY, monitors=[Monitor("resid_post.0", probe, positions="generated")])[0]
    assert generated.receipt.num_cached_tokens == 12
    assert torch.equal(generated.monitors["resid_post.0"].positions, torch.arange(13, 20))


def test_a_stream_carries_scores_and_nothing_behind_a_stop(lm_of: Any) -> None:
    lm = lm_of("llama", page_size=4)
    prompt = random_ids(6, seed=1)
    probe, threshold, plain = firing(lm, prompt, "resid_post.1", 3)
    pieces = list(lm.stream(prompt, GREEDY, monitors=[Monitor("resid_post.1", probe, threshold, then="stop", name="m",
                                                              positions="generated")]))  # fmt: skip
    assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids[:4]
    assert pieces[-1].finish_reason == "monitor" and pieces[-1].monitors["m"].fired == [9]
    scored = [pair for piece in pieces for pair in piece.scores.get("m", [])]
    assert [position for position, _ in scored] == [6, 7, 8, 9]
    assert [score for _, score in scored] == pieces[-1].monitors["m"].scores.tolist()


def test_a_function_is_called_beside_the_engines_thread(lm_of: Any) -> None:
    lm, seen, done = lm_of("llama"), [], threading.Event()

    def note(fire: Any) -> None:
        seen.append((fire, threading.current_thread()))
        if len(seen) == 13:
            done.set()
        raise SystemExit("a function's own trouble")

    out = lm.generate(
        [random_ids(6, seed=1)], GREEDY, monitors=[Monitor("final_norm", vector(lm.hidden_size, 1), -1e9, note)]
    )[0]
    assert done.wait(WAIT) and out.finish_reason == "length"
    assert [fire.position for fire, _ in seen] == list(range(13))
    assert all(thread is not threading.main_thread() for _, thread in seen)
    assert lm.generate([[1, 2]], GREEDY)[0].token_ids


@pytest.mark.parametrize("reduce", ["mean", "max", "ewma"])
def test_a_running_reduction_does_not_depend_on_the_chunks(reduce: Any) -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=400).astype(np.float32)
    for decay in (0.0, 0.3, 0.999):
        monitor = Monitor("resid_post.0", [1.0], reduce=reduce, decay=decay)
        parts = ReducedScores(monitor)
        cuts = [0, 1, 1, 7, 8, 30, 400]
        found = np.concatenate([parts.take(scores[a:b]) for a, b in pairwise(cuts)])
        for values in (found, ReducedScores(monitor).take(scores)):
            np.testing.assert_allclose(values, reduced(reduce, decay, scores.tolist()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        Monitor("resid_post.0", [1.0, 2.0], 0.5, "stop", reduce="ewma", decay=0.5, patience=3, positions="generated"),
        Monitor("resid_post.0", "sea", then=Steer("resid_post.1", "land", scale=2.0), name="both"),
        Monitor(
            "resid_post.0", Probe([[1.0, 2.0]], 0.5, "relu", [2.0], 1.0, "sigmoid"), then=[Ablate("embed", [1.0, 2.0])]
        ),
        Monitor("resid_post.0", FeatureProbe("sae", 3), 0.1),
    ],
)
def test_json_of_a_monitor_is_the_monitor(spec: Monitor) -> None:
    found = intervention_of(to_json(spec))
    assert found == spec and found.fingerprint == spec.fingerprint


WRONG: list[tuple[Any, str]] = [
    (lambda: Monitor("resid_post.*", [1.0]), "one site"),
    (lambda: Monitor("logits", [1.0]), "captured"),
    (lambda: Monitor("resid_post.0", [1.0], float("nan")), "finite"),
    (lambda: Monitor("resid_post.0", [float("inf")]), "Inf"),
    (lambda: Monitor("resid_post.0", [1.0], then="halt"), "'record', 'stop'"),
    (lambda: Monitor("resid_post.0", [1.0], then="lora:x"), "adapter"),
    (lambda: Monitor("resid_post.0", [1.0], then=Steer("embed", [1.0], when=Gate([1.0]))), "gate"),
    (lambda: Monitor("resid_post.0", [1.0], patience=0), "patience"),
    (lambda: Monitor("resid_post.0", [1.0], decay=1.0), "decay"),
    (lambda: Monitor("resid_post.0", [1.0], name=""), "name"),
    (lambda: Monitor("resid_post.0", nn.Linear(2, 3)), "3 outputs"),
    (lambda: Monitor("resid_post.0", nn.Conv1d(1, 1, 1)), "expected a vector"),
    (lambda: Monitor("resid_post.0", [[1.0], [2.0]]), "index"),
    (lambda: Probe([[1.0]] * 65), "at most 64"),
    (lambda: Probe([[1.0, 2.0]], [1.0, 2.0]), "1 numbers"),
    (lambda: Probe([1.0], output="softmax"), "one class"),
    (lambda: Probe([1.0], float("nan")), "finite"),
    (lambda: Monitor("resid_post.0", object()), "expected a vector"),
    (lambda: Probe(nn.Linear(2, 1)), r"weight is a Linear: Monitor\(site, module, ...\) takes a module itself"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_is_wrong_is_said(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_does_not_fit_the_model_or_the_request_is_said(lm_of: Any) -> None:
    lm = lm_of("llama")
    width, prompt = lm.hidden_size, [1, 2, 3]
    many = [Monitor("resid_post.0", vector(width, i), name=str(i)) for i in range(65)]
    patch = Steer("resid_post.0", vector(width, 1), positions="prompt")
    for monitors, message in [
        ([Monitor("resid_post.0", [1.0, 2.0])], "has 2 values"),
        ([Monitor("resid_post.99", vector(width, 1))], "99"),
        ([Monitor("resid_post.0", "nowhere")], "nowhere"),
        ([Monitor("resid_post.0", FeatureProbe("nothing", 1))], "nothing"),
        ([Monitor("resid_post.0", vector(width, 1))] * 2, "two monitors"),
        (many, "at most 64"),
        ([Monitor("resid_post.0", vector(width, 1), then=patch)], "generated positions"),
        (
            [Monitor("resid_post.0", Probe(vector(width, 1, 40), index=1), name=str(i)) for i in range(2)],
            "80 directions",
        ),
        ([Steer("resid_post.0", vector(width, 1))] * 2, "Monitor"),
    ]:
        with pytest.raises(ValueError, match=message):
            lm.generate([prompt], GREEDY, monitors=monitors)


def test_a_monitor_is_kept_by_name(lm_of: Any) -> None:
    lm = lm_of("llama")
    lm.monitors["sea"] = Monitor("resid_post.0", vector(lm.hidden_size, 1), -1e9, then="stop")
    out = lm.generate([[1, 2, 3]], GREEDY, monitors=["sea"])[0]
    assert out.finish_reason == "monitor" and not out.token_ids and out.monitors["sea"].fired[0] == 0
    with pytest.raises(ValueError, match="did you mean 'sea'"):
        lm.generate([[1, 2, 3]], GREEDY, monitors=["seas"])
    with pytest.raises(ValueError, match="expected Monitor"):
        lm.monitors["land"] = "resid_post.0"
    del lm.monitors["sea"]
    assert not lm.monitors


def test_with_drafts_only_accepted_positions_count(model_folder: Any) -> None:
    drafter = Told()
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=drafter) as lm:
        scored_with_drafts(lm, drafter)


def scored_with_drafts(lm: LM, drafter: Told) -> None:
    prompt, site = random_ids(5, seed=4) * 4, "resid_post.1"
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = lm.generate([prompt], params, capture=[site])[0]
    drafter.tell([plain])
    scores = plain.activations[site].float()
    probe = vector(scores.shape[1], 2)
    scores = scores @ probe
    before = lm.engine.stats()["speculation"]["drafted"]
    out = lm.generate([prompt], params, monitors=[Monitor(site, probe, 1e9)])[0]
    assert lm.engine.stats()["speculation"]["drafted"] > before and out.token_ids == plain.token_ids
    torch.testing.assert_close(out.monitors[site].scores, scores, rtol=1e-5, atol=1e-5)
    rest = scores[len(prompt) :]
    for fire in (3, 11, 18):
        threshold = float(rest[fire]) - 1e-4
        first = int((rest > threshold).nonzero()[0])
        stopped = lm.generate(
            [prompt], params, monitors=[Monitor(site, probe, threshold, "stop", positions="generated")]
        )[0]
        assert stopped.token_ids == plain.token_ids[: first + 1] and stopped.finish_reason == "monitor"
        found = stopped.monitors[site]
        assert found.positions.tolist() == [len(prompt) + i for i in range(first + 1)], "none behind the stop"
        assert found.fired == [len(prompt) + first]
    for end in ({"stop_token_ids": plain.token_ids[7:8]}, {"stop": [plain.text[9:14]]}, {"max_tokens": 10}):
        asked = [SamplingParams(temperature=0, **{"max_tokens": 24, "speculate": way, **end}) for way in (None, False)]
        both = lm.generate([prompt] * 2, asked, monitors=[Monitor(site, probe, 0.0)], capture=[site])
        scored = [out.monitors[site] for out in both]
        assert both[0].token_ids == both[1].token_ids and len(both[0].token_ids) < 24
        assert torch.equal(scored[0].positions, scored[1].positions) and scored[0].fired == scored[1].fired
        assert both[0].activations.positions[site].tolist() == both[1].activations.positions[site].tolist()
        assert scored[0].positions.tolist() == list(range(len(prompt) + len(both[0].token_ids) - 1))


def test_a_forward_pass_has_scores(lm_of: Any) -> None:
    lm = lm_of("llama")
    monitor, prompt = Monitor("resid_post.0", vector(lm.hidden_size, 1), name="m"), [1, 2, 3]
    out = lm.forward([prompt], monitors=[monitor], capture=["resid_post.0"])[0]
    wanted = out.activations["resid_post.0"].float() @ vector(lm.hidden_size, 1)
    torch.testing.assert_close(out.monitors["m"].scores, wanted, rtol=1e-5, atol=1e-5)
    stop = Monitor("resid_post.0", vector(lm.hidden_size, 1), -1e9, then="stop")
    out = lm.generate([prompt], SamplingParams(max_tokens=0), monitors=[stop])[0]
    assert (out.finish_reason, out.outputs[0].stop_reason) == ("monitor", "resid_post.0")
    assert len(out.monitors["resid_post.0"].scores) == 3


def watching(specs: list[Monitor], prompt_len: int = 0) -> RequestMonitors:
    """Monitors at all positions."""
    bound = [BoundMonitor(str(spec.name), spec, (Window(0),), i, 1, None) for i, spec in enumerate(specs)]
    return RequestMonitors(bound, "r", prompt_len)


def test_patience_is_that_of_a_loop_whatever_the_parts() -> None:
    rng = random.Random(1)
    for _ in range(100):
        patience, count = rng.choice([1, 2, 3, 7]), rng.randrange(1, 40)
        dots = np.array([[rng.choice([-1.0, 1.0, 1.0, np.nan]) for _ in range(count)]], np.float32)
        monitors, streak, expected = watching([Monitor("embed", [1.0], 0.0, patience=patience)]), 0, []
        for i, above in enumerate((~(dots[0] <= 0)).tolist()):
            streak = streak + 1 if above else 0
            expected += [i] * (streak >= patience)
        cuts = sorted({0, count, *(rng.randrange(count) for _ in range(3))})
        for start, stop in pairwise(cuts):
            monitors.take(start, dots[:, start:stop], rng.random() < 0.5)
        assert monitors.results()["embed"].fired == expected


def test_scores_below_their_limits_decide_nothing() -> None:
    """Dot products at the limit and a float32 above do not fire, at thresholds where roundings are as large as they get."""
    rng = random.Random(1)
    for _ in range(2000):
        size, bias = rng.choice([1e-6, 1.0, 30.0, 1e6]), rng.choice([0.0, 1.0, 1e5]) * rng.uniform(-1, 1)
        output: Any = rng.choice(["linear", "sigmoid"])
        threshold = (
            rng.uniform(-size, size) if output == "linear" else rng.choice([0.5, 1e-5, 1 - 1e-5, 1.0, rng.random()])
        )
        spec = Monitor("embed", Probe([1.0], bias, output=output), threshold, "stop", patience=rng.choice([1, 2]))
        (bound,) = watching([spec]).bound
        limit = limits_of([bound])[0]
        assert (
            output == "sigmoid" or threshold - bias - 3e-5 * (abs(threshold) + abs(bias) + 1) < limit < threshold - bias
        )
        if np.isfinite(limit):
            near = np.array([[limit, limit - 1, limit - abs(limit) / 2, -np.inf]], np.float32)
            monitors = watching([spec])
            monitors.take(0, near)
            assert monitors.stop_at is None, (spec, limit)
    probe = Probe([[1.0], [2.0]], activation="relu", out_weight=[1.0, 1.0])
    some = [
        Monitor("embed", probe, 0.0, "stop"),
        Monitor("embed", [1.0], 0.0, "stop", reduce="mean"),
        Monitor("embed", probe),
    ]
    bound = [
        BoundMonitor("", spec, (), slot, n, None) for spec, slot, n in zip(some, (0, 2, 3), (2, 1, 2), strict=True)
    ]
    assert limits_of(bound).tolist() == [-np.inf] * 3 + [np.inf] * 2


def test_scores_that_decide_nothing_wait_and_are_all_there() -> None:
    """A step of many requests whose monitors do not fire takes a few lines for each, and no arrays of its own."""
    dots = np.random.default_rng(1).normal(size=(2, 300)).astype(np.float32)
    specs = [Monitor("embed", [1.0], 9.0, "stop"), Monitor("embed", [1.0], 0.5, name="w", reduce="ewma")]
    monitors, lines, before = watching(specs), 0, sys.gettrace()

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    more = np.vstack([dots, dots])  # of a step with a request that has more monitors
    monitors.take(0, dots[:, :40])
    sys.settrace(count)
    try:
        for i in range(40, 100):
            monitors.take(i, (dots, more)[i % 2][:, i : i + 1], False)
    finally:
        sys.settrace(before)
    assert lines < 60 * 8
    assert len(monitors.unsent()["w"][0]) == 100
    for i in range(90, 300):  # some again, after a preemption
        monitors.take(i, dots[:, i : i + 1], i % 50 == 0)
    assert len(monitors.unsent()["w"][0]) == 200 and not monitors.unsent()
    found = monitors.results()
    assert found["embed"].scores.tolist() == dots[0].tolist() and found["w"].positions.tolist() == list(range(300))
    values = reduced("ewma", 0.9, dots[1].tolist())
    np.testing.assert_allclose(found["w"].values, values, rtol=1e-5, atol=1e-6)
    assert found["w"].fired == [i for i, value in enumerate(values) if value > 0.5]


def test_a_long_prompt_with_many_fires_makes_no_object_for_each() -> None:
    """A client could hold up the engine's thread with 64 monitors that fire at each of 100,000 positions."""
    ways: list[dict[str, Any]] = [{}, {"patience": 3}, {"reduce": "ewma"}, {"reduce": "max", "then": print}]
    specs = [Monitor("embed", [1.0], -1.0, name=str(i), **ways[i % 4]) for i in range(64)]
    monitors, lines = watching(specs, 100_000), 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    dots, before, objects = np.zeros((64, 100_000), np.float32), sys.gettrace(), sys.getallocatedblocks()
    sys.settrace(count)
    try:
        monitors.take(0, dots)
        unsent, found = monitors.unsent(), monitors.results()
    finally:
        sys.settrace(before)
    objects = sys.getallocatedblocks() - objects
    assert (
        lines < 20_000
        and objects < 20_000
        and all(isinstance(part, np.ndarray) for found in unsent.values() for part in found)
    )
    assert [len(own.fired) for own in found.values()] == [100_000, 99_998, 100_000, 100_000] * 16


def test_states_that_are_nan_evade_no_monitor(lm_of: Any) -> None:
    lm = lm_of("llama")
    stop = Monitor("resid_post.1", vector(lm.hidden_size, 1), 1e9, "stop", positions="generated", name="m")
    broken = Steer("resid_post.0", vector(lm.hidden_size, 2), scale=1e37, positions="generated")
    out = lm.generate([[1, 2, 3]], GREEDY, interventions=[broken, Scale("resid_post.0", 1e37)], monitors=[stop])[0]
    assert out.finish_reason == "monitor" and out.monitors["m"].scores.isnan().any()
