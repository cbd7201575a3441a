"""Monitors in traces, sweeps and harvests: scores against plain captures, stops against generations."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_declared import lms, vector
from helpers_runner import random_ids
from test_monitors import GREEDY, firing

from pymllm_interp import Capture, Patch, SamplingParams, Scale, Steer
from pymllm_interp.client.calls.lowered import LoweringError
from pymllm_interp.harvest.progress import HarvestError
from pymllm_interp.harvest.reader import open_harvest
from pymllm_interp.interventions import Monitor, Probe

SITE = "resid_post.1"


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lowered", [True, False])
@pytest.mark.parametrize("way", ["functions", "tables"])
def test_a_trace_with_monitors_has_their_scores(way: str, lowered: bool, model_folder: Any) -> None:
    with lms(way, model_folder) as load:
        lm = load("llama", page_size=4, lower_traces="require" if lowered else "off")
        probe, prompts = vector(lm.hidden_size, 1), [random_ids(7, seed=1), random_ids(3, seed=2)]
        lm.monitors["sea"] = Monitor(SITE, probe, 0.5)
        late = Monitor("final_norm", probe, positions="generated")
        plain = lm.generate(prompts, GREEDY, capture=[SITE, "final_norm"])
        with lm.generate(temperature=0, max_new_tokens=8) as tracer:
            with tracer.invoke(prompts[0], monitors=["sea", late]):
                first = lm.model.layers[0].output[0, -1].save()
            with tracer.invoke(prompts[1]):
                second = tracer.result.save()
        assert [receipt.lowered for receipt in tracer.receipts] == [lowered, lowered]
        assert second[0].tolist() == prompts[1] + plain[1].token_ids
        assert tracer.scores[0].keys() == {"sea", "final_norm"} and not tracer.scores[1]
        close(tracer.scores[0]["sea"].scores, plain[0].activations[SITE] @ probe)
        close(tracer.scores[0]["final_norm"].scores, plain[0].activations["final_norm"][7:] @ probe)
        assert tracer.scores[0]["sea"].fired == [i for i, s in enumerate(tracer.scores[0]["sea"].scores) if s > 0.5]
        with lm.trace(prompts[0], monitors=["sea"]) as tracer:
            again = lm.model.layers[0].output[0, -1].save()
        close(tracer.monitors["sea"].scores, plain[0].activations[SITE][:7] @ probe)
        close(again, first)


def test_a_block_that_edits_and_a_monitor_that_acts(lm_of: Any) -> None:
    """A monitor sees the edits of earlier sites, and the state before those of its own. A block sees what a monitor did."""
    lm, prompt = lm_of("llama", page_size=4), random_ids(6, seed=1)
    added, probe = vector(lm.hidden_size, 3), vector(lm.hidden_size, 1)
    at_both = [Monitor("resid_post.0", probe, name="own"), Monitor(SITE, probe, name="after")]
    with lm.trace(prompt, monitors=at_both) as tracer:
        lm.model.layers[0].output[:] += added
        states = lm.model.layers[1].output[0].save()
    assert not tracer.receipt.lowered and "monitor" in tracer.receipt.not_lowered
    plain = lm.forward([prompt], capture=["resid_post.0"])[0]
    close(tracer.monitors["own"].scores, plain.activations["resid_post.0"] @ probe)
    close(tracer.monitors["after"].scores, states @ probe)

    op = Steer("resid_post.0", added, scale=9.0)
    acting = Monitor(SITE, probe, -1e9, then=op, positions="prompt")
    wanted = lm.generate([prompt], GREEDY, monitors=[acting], capture=["resid_post.0"])[0]
    for mode in ("require", "off"):
        lm = lm_of("llama", page_size=4, lower_traces=mode)
        with lm.generate(prompt, temperature=0, max_new_tokens=8, monitors=[acting]) as tracer:
            rows = list().save()
            for _ in tracer.iter[:]:
                rows.append(lm.model.layers[0].output[0, -1])
            result = tracer.result.save()
        assert result[0, 6:].tolist() == wanted.token_ids
        close(torch.stack(list(rows)), wanted.activations["resid_post.0"][5:])
        assert tracer.receipt.interventions[0].generated_rows == 7


def test_a_monitor_stops_a_traced_generation_where_it_stops_another(lm_of: Any) -> None:
    lm, prompt = lm_of("llama", page_size=4), random_ids(6, seed=1)
    probe, threshold, plain = firing(lm, prompt, SITE, 3)
    stop = Monitor(SITE, probe, threshold, then="stop", positions="generated", name="m")
    with lm.generate(prompt, temperature=0, max_new_tokens=8, monitors=[stop]) as tracer:
        rows = list().save()
        for _ in tracer.iter[:]:
            rows.append(lm.model.layers[1].output[0, -1])
        result = tracer.result.save()
    assert "stop" in tracer.receipt.not_lowered and tracer.monitors["m"].stopped
    assert result[0].tolist() == prompt + plain.token_ids[:4]
    close(torch.stack(list(rows)), plain.activations[SITE][5:10])
    with lm.generate([prompt, prompt[:4]], temperature=0, max_new_tokens=8, monitors=[[stop], None]) as tracer:
        both = tracer.result.save()
    assert (
        both[0, :10].tolist() == prompt + plain.token_ids[:4] and tracer.scores[0]["m"].stopped and not tracer.scores[1]
    )
    with lm.trace(prompt, monitors=[Monitor(SITE, probe, -1e9, then="stop", name="m")]) as tracer:
        logits = lm.lm_head.output.save()
    assert logits.shape[1] == 6 and tracer.monitors["m"].stopped and len(tracer.monitors["m"].scores) == 6


def test_a_trace_with_gradients_and_monitors(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), random_ids(5, seed=1)
    probe = vector(lm.hidden_size, 1)
    with lm.trace(prompt, monitors=[Monitor(SITE, probe)]) as tracer:
        state = lm.model.layers[0].output
        with lm.lm_head.output.sum().backward():
            grad = state.grad.save()
    assert grad.abs().sum() > 0
    close(tracer.monitors[SITE].scores, lm.forward([prompt], capture=[SITE])[0].activations[SITE] @ probe)


def test_monitors_of_a_trace_that_cannot_be_served_are_refused(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), [1, 2, 3]
    probe = vector(lm.hidden_size, 1)
    for monitors, message in [
        (["nowhere"], "no monitor 'nowhere'"),
        ([Monitor("resid_post.0", [1.0, 2.0])], "has 2 values"),
        ([Steer("resid_post.0", probe)], "Monitor"),
        ([Monitor("resid_post.0", probe)] * 2, "two monitors"),
    ]:
        with pytest.raises(ValueError, match=message):
            with lm.trace(prompt, monitors=monitors):
                lm.model.layers[0].output.save()
    lm = lm_of("llama", lower_traces="require")
    with pytest.raises(LoweringError, match="a monitor may stop it"):
        with lm.trace(prompt, monitors=[Monitor("resid_post.0", probe, then="stop")]):
            lm.model.layers[0].output.save()
    assert lm.generate([prompt], GREEDY)[0].token_ids


def test_a_sweep_of_patches_has_the_scores_of_each_run(lm_of: Any) -> None:
    lm, prompt = lm_of("llama", page_size=4), random_ids(6, seed=1)
    probe = vector(lm.hidden_size, 1)
    runs = [None, *(Patch("resid_post.0", vector(lm.hidden_size, i), positions=[i]) for i in range(5))]
    found = lm.sweep(prompt, runs, SamplingParams(max_tokens=0), monitors=[Monitor(SITE, probe)], capture=[SITE])
    scores = [out.monitors[SITE].scores for out in found]
    for out, own in zip(found, scores, strict=True):
        close(own, out.activations[SITE] @ probe)
    assert all(not torch.equal(a, b) for a, b in pairwise(scores))


DOCUMENTS = [random_ids(random.Random(i).randrange(2, 12), seed=i) for i in range(9)]


def rows_by_document(harvest: Any, name: str) -> list[torch.Tensor]:
    per_site = harvest.manifest["identity"]["index_per_site"]
    owners = harvest.document_ids(name if per_site else None)[:]
    return [harvest[name][(owners == i).nonzero()[:, 0]] for i in range(len(DOCUMENTS))]


@pytest.mark.parametrize("captures", [[SITE], ["resid_pre.1", Capture(SITE, positions=-1)], []])
def test_a_harvest_has_rows_of_scores_beside_the_states(captures: list[Any], lm_of: Any, tmp_path: Path) -> None:
    """Also without captures, at positions of their own, in small chunks; a run that was stopped goes on."""
    lm = lm_of("llama", kv_cache_tokens=60, page_size=4, max_num_tokens=5)
    probe, rows = vector(lm.hidden_size, 1), vector(lm.hidden_size, 2, 3)
    lm.monitors["sea"] = Monitor(SITE, probe, reduce="mean")
    softmax = Monitor(
        "resid_post.0", Probe(rows, output="softmax", index=1), 0.5, name="land", positions=slice(1, None)
    )
    options: Any = {
        "capture": captures,
        "monitors": ["sea", softmax],
        "shard_bytes": 200,
        "interventions": [Scale("embed", 2.0)],
    }
    with pytest.raises(HarvestError, match="document 5"):
        lm.harvest([*DOCUMENTS[:5], [10**6]], out=tmp_path, **options)
    result = lm.harvest(DOCUMENTS, out=tmp_path, **options)
    harvest = open_harvest(tmp_path)
    assert result.rows["scores.sea"] == sum(map(len, DOCUMENTS)) and len(harvest.shards) > 1
    states = [
        lm.forward([ids], capture=[SITE, "resid_post.0"], interventions=[Scale("embed", 2.0)])[0].activations
        for ids in DOCUMENTS
    ]
    for found, own in zip(rows_by_document(harvest, "scores.sea"), states, strict=True):
        close(found, own[SITE] @ probe)
    for found, own in zip(rows_by_document(harvest, "scores.land"), states, strict=True):
        close(found, (own["resid_post.0"][1:] @ rows.T).softmax(-1)[:, 1])
    assert harvest.positions("scores.land")[:].min() == 1
    if captures == [SITE]:
        for found, own in zip(rows_by_document(harvest, SITE), states, strict=True):
            close(found, own[SITE])


def test_what_a_harvest_cannot_record_is_refused_before_anything_runs(lm_of: Any, tmp_path: Path) -> None:
    lm, probe = lm_of("llama"), vector(lm_of("llama").hidden_size, 1)
    for monitor, message in [
        (Monitor(SITE, probe, then="stop", name="m"), "m: a monitor of a harvest records scores"),
        (Monitor(SITE, probe, then=Steer(SITE, probe)), "records scores"),
        (Monitor(SITE, probe, then=print), "records scores"),
        (Monitor(SITE, probe, positions="generated"), "generates nothing"),
        (Monitor(SITE, [1.0]), "has 1 values"),
        ("nowhere", "no monitor 'nowhere'"),
        (Steer(SITE, probe), "Monitor"),
    ]:
        with pytest.raises(ValueError, match=message):
            lm.harvest(DOCUMENTS, capture=[SITE], out=tmp_path / "out", monitors=[monitor])
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").glob("*.safetensors"))


def test_a_harvest_of_scores_alone_has_the_size_that_was_estimated(lm_of: Any, tmp_path: Path) -> None:
    from pymllm_interp.harvest.size import expected_bytes

    lm, documents = lm_of("llama"), DOCUMENTS
    monitors = [
        Monitor(SITE, vector(lm.hidden_size, 1)),
        Monitor("embed", vector(lm.hidden_size, 2), positions="prompt"),
    ]
    lm.harvest(documents, capture=[], monitors=monitors, out=tmp_path)
    harvest = open_harvest(tmp_path)
    names = [f"{index}.scores.{one.name}" for one in monitors for index in ("document_ids", "positions", "token_ids")]
    found = sum(shard.tensor(name).nbytes for shard in harvest.shards for name in [*harvest.sites, *names])
    specs = lm._requests.resolved([], monitors)[1]
    assert found == sum(expected_bytes(specs, lm.model_spec, len(ids)) for ids in documents)  # pyright: ignore[reportArgumentType]
