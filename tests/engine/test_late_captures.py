"""CUDA graphs that are captured while the engine serves: after `lm.wake`, and with `lazy_graphs`.

On a CPU a graph is a function (tests/support/helpers_graphs.py); the same bodies run on CUDA, where it is one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from helpers_adapters import write_adapter
from helpers_devices import DEVICES, ways
from helpers_drafts import drafted_by
from helpers_graphs import use_eager_graphs
from helpers_waits import assert_idle, until

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.engine import engine
from pymllm_interp.engine.lifecycle import late_captures
from pymllm_interp.runner.graphs import graph_capture

PROMPTS = [[1], list(range(5, 22)), [7, 8, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES = {
    "kv_cache_tokens": 1024, "page_size": 4, "max_num_tokens": 64, "max_running_requests": 6, "prefill_graph_tokens": 40,
    "capture_ring_bytes": 64 << 20,
}  # fmt: skip
ALL = {"captured": 4 + 3, "missing": 0, "failure": ""}  # of 1, 2, 4 and 6 decoding requests; of 16, 32 and 40 rows
LARGEST = {"captured": 2, "missing": 5, "failure": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("late")
    random_model(CONFIGS["llama"](), 0).save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return found


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes can be captured; engines capture nothing late by themselves (`idle` has them do it)."""
    if not torch.cuda.is_available():
        use_eager_graphs(monkeypatch)
    monkeypatch.setattr(engine, "IDLE_SECONDS", 600)
    monkeypatch.setattr(late_captures, "LEAST_ASKED", 1000)
    yield


def idle(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave an engine alone, until it has captured all graphs."""
    monkeypatch.setattr(engine, "IDLE_SECONDS", 0.001)
    lm.engine.call(lambda: None)
    until(lambda: not lm.runner.graphs.num_missing)
    monkeypatch.setattr(engine, "IDLE_SECONDS", 600)


def load(folder: Path, device: str = "cpu", **kwargs: Any) -> LM:
    dtype = "float32" if device == "cpu" else "bfloat16"
    return LM(folder, **with_tuning(**{"device": device, "dtype": dtype, **SIZES, **kwargs}))


def graphs(lm: LM) -> dict[str, Any]:
    return lm.engine.stats()["graphs"]


def seen(lm: LM, **options: Any) -> list[Any]:
    """Tokens, states and logits: three requests at once (four rows), one, and a trace."""
    lm.reset_prefix_cache()
    together = lm.generate(PROMPTS, GREEDY, capture=["resid_post.*", "logits"], **options)
    alone = lm.generate([PROMPTS[1]], GREEDY, **options)
    with lm.trace(PROMPTS[2], **options):
        lm.model.layers[1].output[:] *= 2
        logits = lm.lm_head.output.save()
    found = [output.activations[site] for output in together for site in sorted(output.activations)]
    return [[output.outputs[0].token_ids for output in (*together, *alone)], *found, logits]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert ours[0] == theirs[0] and all(map(torch.equal, ours[1:], theirs[1:]))


def steps_of_one(lm: LM) -> dict[str, int]:
    """Steps of a plain request by how they ran."""
    before = ways(lm)
    lm.generate([[3]], GREEDY)
    return ways(lm) - before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["default", "batch_invariant"])
def test_requests_right_after_a_wake_have_the_bits_of_those_with_all_graphs(
    options: dict[str, Any], device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with load(folder, device, **options) as lm:
        assert graphs(lm) == ALL
        expected = seen(lm)
        for _ in range(2):
            lm.sleep()
            assert graphs(lm) is None and lm.wake()
            assert graphs(lm) == LARGEST
            before = ways(lm)
            assert_same(seen(lm), expected)
            ran = ways(lm) - before
            assert ran["plain"] > 5 and not ran["replay"] and ran["segments"] + ran["modules"] <= 1
            assert steps_of_one(lm) == {"plain": 6}
            idle(lm, monkeypatch)
            assert graphs(lm) == ALL
            assert steps_of_one(lm) == {"replay": 6}
            assert_same(seen(lm), expected)
        reasons = [why for how, why in lm.runner.partition.counts if how == "plain"]
        assert "nobody waits for a module, and not all passes are captured yet" in reasons


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_without_its_graph_has_the_rows_of_that_graph(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The bits of a product depend on its shape."""
    with load(folder, device, lazy_graphs=True) as lm:
        assert graphs(lm) == LARGEST
        rows, model = list[int](), lm.runner.get_model()
        forward = model.forward_fused
        monkeypatch.setattr(
            model, "forward_fused", lambda ids, *args: (rows.append(ids.shape[1]), forward(ids, *args))[1]
        )
        lm.generate(PROMPTS, GREEDY)
        assert rows == [32, 4, 4, 4, 4, 4]
        rows.clear()
        lm.generate([[1]] * 5, GREEDY)
        assert rows == [16], "the largest ones are captured"


@pytest.mark.parametrize("device", DEVICES)
def test_sleep_while_graphs_are_missing_and_updates_between(device: str, folder: Path, tmp_path: Path):
    new = random_model(CONFIGS["llama"](), 1)
    new.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with load(folder, device) as lm, load(tmp_path, device) as other:
        expected = seen(lm)
        lm.sleep()
        lm.wake()
        lm.engine.call(lm.runner.graphs.capture_next)
        assert graphs(lm) == {"captured": 3, "missing": 4, "failure": ""}
        lm.sleep()
        lm.wake()
        assert graphs(lm) == LARGEST
        assert_same(seen(lm), expected)
        lm.pause("keep")
        handle = lm.submit(PROMPTS[1], GREEDY)
        lm.update_weights({name: tensor.to(lm.runner.dtype) for name, tensor in new.state_dict().items()})
        lm.engine.call(lm.runner.graphs.capture_next)
        lm.resume()
        assert handle.result().outputs[0].token_ids == other.generate([PROMPTS[1]], GREEDY)[0].token_ids
        assert_same(seen(lm), seen(other))
        assert lm.wake(all_graphs=True) and graphs(lm) == ALL
        assert_same(seen(lm), seen(other))
        lm.reset_prefix_cache()
        assert_idle(lm)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_have_graphs_again(device: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = random_model(CONFIGS["llama"]())
    with load(folder, device) as lm:
        lm.adapters.load("a", write_adapter(tmp_path / "a", base))
        plain, adapted = seen(lm), seen(lm, lora="a")
        lm.sleep()
        lm.wake()
        assert graphs(lm) == {"captured": 3, "missing": 8, "failure": ""}
        assert_same(seen(lm, lora="a"), adapted)
        assert_same(seen(lm), plain)
        lm.adapters.unload("a")
        assert graphs(lm) == LARGEST
        lm.adapters.load(
            "a", write_adapter(tmp_path / "again", base)
        )  # with its graphs, and those whose outputs they share
        assert graphs(lm) == {"captured": 4 + 4 + 1, "missing": 2, "failure": ""}
        assert_same(seen(lm, lora="a"), adapted)
        idle(lm, monkeypatch)
        assert_same(seen(lm, lora="a"), adapted)
        assert_same(seen(lm), plain)


def test_a_busy_engine_captures_what_is_asked_for_often_and_seldom(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(late_captures, "LEAST_ASKED", 8)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with load(folder, lazy_graphs=True, async_scheduling=True) as lm:
        at, capture_next = list[int](), lm.runner.graphs.capture_next
        monkeypatch.setattr(
            lm.runner.graphs, "capture_next", lambda: (at.append(lm.engine.num_steps), capture_next())[1]
        )
        before = ways(lm)
        (output,) = lm.generate([[1]], long)
        ran = ways(lm) - before
        assert sorted(lm.runner.graphs.decode.graphs) == [1, 6] and len(at) == 1
        assert 8 <= at[0] <= 10
        assert ran["replay"] == ran.total() - ran["plain"] >= 45
        one = lm.submit([1], long)
        many = [lm.submit([2, 3], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for _ in range(3)]
        for handle in (one, *many):
            handle.result()
        assert one.result().outputs[0].token_ids == output.token_ids
        assert sorted(lm.runner.graphs.decode.graphs) == [1, 4, 6]
        assert at[1] - at[0] >= late_captures.STEPS_BETWEEN
        lm.generate([[1]], GREEDY)
        assert len(at) == 2, "no other one was asked for so often"


def test_tokens_do_not_wait_for_a_capture(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A capture takes as long as some twenty steps, and the tokens of the step before it are there."""
    monkeypatch.setattr(late_captures, "LEAST_ASKED", 4)
    with load(folder, lazy_graphs=True, async_scheduling=True) as lm:
        held, capture_next = list[int](), lm.runner.graphs.capture_next
        monkeypatch.setattr(
            lm.runner.graphs, "capture_next", lambda: (held.append(len(lm.engine.ends._events)), capture_next())[1]
        )
        assert len(list(lm.stream([1], replace(GREEDY, max_tokens=30)))) >= 30
        assert held == [0]


def test_other_requests_run_while_a_wake_waits_for_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with load(folder) as lm, ThreadPoolExecutor(1) as pool:
        expected = lm.generate(PROMPTS, GREEDY)
        lm.sleep()
        lm.wake()
        record, met = graph_capture.record, list[list[int]]()

        def slowly(*args: Any) -> Any:
            if not met:
                met.append([])
                handle = pool.submit(lm.generate, PROMPTS, GREEDY)
                until(lambda: len(lm.engine._inbox) > 0)
                met.append(handle)
            return record(*args)

        monkeypatch.setattr(graph_capture, "record", slowly)
        assert lm.wake(all_graphs=True) and graphs(lm) == ALL
        assert [out.token_ids for out in met[1].result(60)] == [out.token_ids for out in expected]  # pyright: ignore


def test_a_late_capture_that_fails_leaves_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Only passes of its size run eagerly. It is said once, and tried again behind the next sleep."""
    record, failing = graph_capture.record, [True]

    def fails(plan: Any, run: Any, *args: Any) -> Any:
        found = record(plan, run, *args)
        if failing[0] and len(found[1][0]) == 1:  # the pass of one row
            raise torch.OutOfMemoryError("no memory for a graph")
        return found

    with load(folder) as lm:
        expected = seen(lm)
        monkeypatch.setattr(graph_capture, "record", fails)
        for _ in range(2):
            lm.sleep()
            lm.wake()
            caplog.clear()
            idle(lm, monkeypatch)
            found = graphs(lm)
            assert found == {"captured": 6, "missing": 1, "failure": "a pass of 1 rows: no memory for a graph"}
            said = [one.getMessage() for one in caplog.records if "could not be captured" in one.getMessage()]
            assert len(said) == 1 and "a pass of 1 rows" in said[0]
            assert steps_of_one(lm) == {"plain": 5, "replay": 1} and graphs(lm) == found
            assert_same(seen(lm), expected)
        with pytest.raises(RuntimeError, match="could not be captured, of a pass of 1 rows"):
            lm.wake(all_graphs=True)
        failing.clear()
        failing.append(False)
        lm.sleep()
        assert lm.wake(all_graphs=True) and graphs(lm) == ALL
        assert_same(seen(lm), expected)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory for a graph"), ValueError("of a compiler")])
def test_a_late_capture_that_fails_leaves_an_engine_that_serves(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*args: Any) -> None:
        raise error

    with load(folder) as lm:
        expected = seen(lm)
        lm.sleep()
        lm.wake()
        with monkeypatch.context() as patch:
            patch.setattr(graph_capture, "record", fails)
            idle(lm, monkeypatch)
            # Graphs of prompts are recorded elsewhere.
            assert graphs(lm) == {"captured": 4, "missing": 3, "failure": f"a pass of 4 rows: {error}"}
            assert_same(seen(lm), expected)
            with pytest.raises(RuntimeError, match=f"could not be captured, of a pass of 4 rows: {error}"):
                lm.wake(all_graphs=True)
            lm.sleep()
            with pytest.raises((RuntimeError, ValueError), match=str(error)):
                lm.wake()  # the largest ones come before the first request
            assert not lm.is_sleeping()
        assert lm.wake(all_graphs=True) and graphs(lm) == ALL
        assert_same(seen(lm), expected)
        assert not lm.runner.is_capturing


def test_a_wake_and_later_captures_collect_no_garbage(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A full collection takes 0.2 s in an engine's process, and a capture had two."""
    with load(folder) as lm:
        lm.sleep()
        begun = list[str]()
        monkeypatch.setattr(graph_capture, "freeze_gc", lambda: begun.append("freeze_gc"))
        monkeypatch.setattr(graph_capture.gc, "collect", lambda *args: begun.append("collect"))
        lm.wake(all_graphs=True)
        assert graphs(lm) == ALL and not begun and gc.isenabled()


def test_the_end_of_an_engine_does_not_wait_for_graphs(folder: Path):
    lm = load(folder, lazy_graphs=True)
    lm.shutdown()
    assert lm.runner.graphs.num_missing == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_model_has_its_graphs_at_once(device: str, folder: Path):
    with load(folder, device, lazy_graphs=True, speculative=drafted_by(folder)) as lm, load(folder, device) as plain:
        drafter: Any = lm.runner.drafter
        assert not drafter.runner.graphs.num_missing and drafter.graphs is not None
        expected = [out.token_ids for out in plain.generate(PROMPTS, GREEDY)]
        assert [out.token_ids for out in lm.generate(PROMPTS, GREEDY)] == expected
        lm.sleep()
        lm.wake()
        assert not drafter.runner.graphs.num_missing and drafter.graphs is not None
        assert [out.token_ids for out in lm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
def test_late_graphs_take_the_memory_of_early_ones(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with load(folder, "cuda", max_running_requests=64, prefill_graph_tokens=512) as lm:
        seen(lm)
        free = torch.cuda.mem_get_info()[0]
        lm.sleep()
        lm.wake()
        seen(lm)
        idle(lm, monkeypatch)
        seen(lm)
        assert abs(torch.cuda.mem_get_info()[0] - free) < 256 << 20
