"""`lm.activations`: batches of a corpus' states on the engine's device. A harvest of the same documents is the oracle."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_declared import WAYS, is_freed, lms
from helpers_harvest import corpus
from torch.utils.data import DataLoader

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.harvest import open_harvest
from pymllm_interp.hooks.captures.egress.device_memory import DeviceMemory
from pymllm_interp.interventions import Generated
from pymllm_interp.utils.arguments import PromptError

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
SITES = ["resid_post.0", "mlp_out.1"]
SMALL = {"kv_cache_tokens": 128, "page_size": 4, "max_num_tokens": 16, "max_running_requests": 5}


@pytest.fixture(scope="module", params=WAYS)
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM in float32, its hooks in each of the ways."""
    with lms(request.param, model_folder) as load:
        yield load


@pytest.fixture(scope="module")
def lm(model_folder: Callable[[str], Path]) -> Iterator[LM]:
    with lms("functions", model_folder) as load:
        yield load("llama", **SMALL)


def memory_of(lm: LM) -> DeviceMemory:
    return lm.runner.declared.device_memory


def rows_of(batches: Any) -> list[tuple[int, int, int, dict[str, torch.Tensor]]]:
    """(document, position, token, state by site) of each row, in order."""
    found = []
    for batch in batches:
        index = (batch.documents.tolist(), batch.positions.tolist(), batch.token_ids.tolist())
        states = {site: rows.cpu() for site, rows in batch.states.items()}
        assert all(len(rows) == len(index[0]) for rows in states.values())
        found += [
            (*place, {site: rows[i] for site, rows in states.items()})
            for i, place in enumerate(zip(*index, strict=True))
        ]
    return found


def harvested(lm: LM, documents: Any, folder: Path, capture: list[Any] = SITES, **options: Any) -> Any:
    """The same rows of a harvest, sorted."""
    lm.harvest(documents, capture=capture, out=folder, progress=False, **options)
    found = open_harvest(folder)
    index = zip(*(x[:].tolist() for x in (found.document_ids(), found.positions(), found.token_ids())), strict=True)
    return [(*place, {site: found[site][i] for site in found}) for i, place in enumerate(index)]


def assert_same_rows(found: Any, wanted: Any) -> None:
    """As multisets: each row once."""
    found = sorted(found, key=lambda row: row[:2])
    assert [row[:3] for row in found] == [row[:3] for row in sorted(wanted, key=lambda row: row[:2])]
    for (*_, states), (*_, others) in zip(found, wanted, strict=True):
        assert states.keys() == others.keys()
        for site, row in states.items():
            torch.testing.assert_close(row, others[site], rtol=1e-4, atol=1e-4)


@contextmanager
def others(lm: LM) -> Iterator[None]:
    """Other requests come, run, capture and are aborted meanwhile."""
    stop, rng = threading.Event(), random.Random(5)

    def run() -> None:
        while not stop.is_set():
            params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 9))
            capture = rng.choice([[], ["resid_post.*"], [Capture("embed", device="engine")]])
            handle = lm.submit([rng.randrange(90) for _ in range(rng.randrange(1, 20))], params, capture=capture)
            if rng.random() < 0.5:
                handle.cancel()
            handle.wait()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.few("shuffle", 16, 10_000, ways=["functions"])
@pytest.mark.few("shuffle", 48, ways=["tables"])
@pytest.mark.few("shuffle", ways=["graphs"])
@pytest.mark.parametrize("shuffle", [0, 16, 48, 10_000])
def test_each_row_of_a_harvest_comes_once_at_any_pace(shuffle: int, lm_of: Any, tmp_path: Path) -> None:
    """In chunks, after giving way, with equal documents, beside others; two epochs, each in an order of its own."""
    lm, rng = lm_of("llama", **SMALL), random.Random(shuffle)
    documents = corpus(8, 30, seed=2)
    documents += [documents[3], documents[3][:5], [7], documents[4] * 2]
    wanted, held = harvested(lm, documents, tmp_path), memory_of(lm).used
    batches, orders = lm.activations(documents, SITES, rows=16, shuffle=shuffle), []
    with others(lm):
        for epoch in range(2):
            found = []
            for batch in batches:
                assert batches.epoch == epoch and all(
                    x.device.type == lm.runner.device[:4].rstrip(":") for x in batch[1:]
                )
                found += rows_of([batch])
                time.sleep(rng.choice([0, 0, 0.002]))
            assert_same_rows(found, wanted)
            orders.append([row[:2] for row in found])
    in_order = [row[:2] for row in wanted]
    if shuffle:
        assert orders[0] != orders[1] and in_order not in orders
        assert orders[0] == [row[:2] for row in rows_of(lm.activations(documents, SITES, rows=16, shuffle=shuffle))]
        assert orders[0] != [
            row[:2] for row in rows_of(lm.activations(documents, SITES, rows=16, shuffle=shuffle, seed=1))
        ]
    else:
        assert orders == [in_order, in_order]
    del batch, found
    assert is_freed(memory_of(lm), held)


def test_a_buffer_mixes_evenly(lm: LM) -> None:
    """Each batch but the last ones is full, and draws from the whole buffer: documents far apart meet."""
    documents = [[i % 90] * 10 for i in range(60)]
    sizes, spans = [], []
    for batch in lm.activations(documents, "embed", rows=20, shuffle=200, seed=4):
        sizes.append(len(batch.documents))
        spans.append(int(batch.documents.max() - batch.documents.min()))
    assert sizes == [20] * 30 and min(spans[:-5]) >= 10


def test_the_order_of_the_input_does_not_depend_on_how_a_loop_is_resumed(lm: LM) -> None:
    """From any batch, in another object, also within a document that is split; and from the end of an epoch."""
    documents = corpus(10, 40, seed=3)
    for shuffle in (0, 32):
        options: Any = {"rows": 16, "shuffle": shuffle, "seed": 3, "max_length": 12, "too_long": "split"}
        make = lambda options=options: lm.activations(documents, SITES, **options)  # noqa: E731
        first = make()
        epochs = [[rows_of([batch]) for batch in first] for _ in range(2)]
        count = len(epochs[0])
        for stop in (1, 2, count // 2, count - 1, count):
            begun, found = make(), []
            for batch in begun:
                found.append(rows_of([batch]))
                state = begun.state_dict()
                if len(found) == stop:
                    break
            assert begun.state_dict().keys() >= {"held"} and is_freed(memory_of(lm))
            assert not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in state.values())
            other = make()
            other.load_state_dict(state)
            assert other.state_dict() is state
            found += [rows_of([batch]) for batch in other]
            assert [[row[:3] for row in rows] for rows in found] == [[row[:3] for row in rows] for rows in epochs[0]]
            for rows, wanted in zip(found, epochs[0], strict=True):
                assert_same_rows(rows, sorted(wanted, key=lambda row: row[:2]))
            assert [row[:3] for batch in other for row in rows_of([batch])] == [
                row[:3] for rows in epochs[1] for row in rows
            ]
    whole = make()
    assert sum(len(batch.documents) for batch in whole) == sum(map(len, documents))
    again = make()
    again.load_state_dict(whole.state_dict())
    assert next(iter(again)) and again.epoch == 1


def test_a_state_of_other_batches_or_documents_is_refused(lm: LM) -> None:
    documents = corpus(12, 30, seed=3)
    make = lambda docs=documents, **options: lm.activations(docs, "embed", **{"rows": 16, "shuffle": 32, **options})  # noqa: E731
    batches = make()
    for number, _ in enumerate(batches):
        if number == 2:
            break
    state = batches.state_dict()
    for other in (
        {"rows": 8},
        {"seed": 1},
        {"shuffle": 0},
        {"max_length": 40},
        {"interventions": [Steer("embed", torch.ones(72))]},
    ):
        with pytest.raises(ValueError, match=r"another lm\.activations"):
            make(**other).load_state_dict(state)
    for inputs, message in (
        ([[1, 2, 3], *documents[1:]], "are not those of the state"),
        (documents[:1], "ends after document 0|not those of the state"),
    ):
        other = make(inputs)
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            list(other)
        with pytest.raises(ValueError, match=message):  # nothing was lost by the attempt
            list(other)
    assert len(lm.generate([[1, 2]], SamplingParams(max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize("way", ["waits", "raises", "breaks", "is dropped", "is dropped in a cycle"])
def test_a_consumer_that_stops_leaves_an_engine_that_serves(way: str, lm: LM) -> None:
    """A consumer that waits stops the feed and nothing else; whatever ends a loop frees its memory, and the next one runs."""
    read: list[int] = []

    def documents() -> Iterator[list[int]]:
        for number in range(10_000):
            read.append(number)
            yield [number % 90] * 10

    batches = lm.activations(documents(), "resid_post.1", rows=16, shuffle=16)
    reader: Any = iter(batches)
    batch = next(reader)
    assert len(batch.rows) == 16
    count = len(read)
    assert count < 2 * 16 / 10 + 2 * 5 + 5  # two steps, a batch and the buffer
    if way == "waits":
        outs = lm.generate([[1, 2, 3]] * 4, SamplingParams(temperature=0, max_tokens=20))
        assert all(len(out.token_ids) == 20 for out in outs) and len(read) == count
        with pytest.raises(RuntimeError, match="second consumer"):
            next(iter(batches))
        with pytest.raises(RuntimeError, match="load_state_dict"):
            batches.load_state_dict(batches.state_dict())
        second = lm.activations([[4] * 20], "resid_post.1", rows=8)
        assert [len(one.rows) for one in second] == [8, 8, 4]
        assert len(next(reader).rows) == 16
        reader.close()
    elif way == "raises":
        with pytest.raises(ZeroDivisionError):
            reader.throw(ZeroDivisionError)
    elif way == "breaks":
        reader.close()
    elif way == "is dropped":
        del reader
    else:
        cycle: list[Any] = [reader]
        cycle.append(cycle)
        del reader, cycle
    reader = None
    gc.collect()
    assert batches.state_dict()["held"] is not None
    assert len(lm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].token_ids) == 3
    assert is_freed(memory_of(lm))
    assert [len(one.rows) for one in lm.activations([[4] * 20], "resid_post.1", rows=8)] == [8, 8, 4]


def test_the_feed_waits_for_room_and_says_when_there_is_none(model_folder: Any, tmp_path: Path) -> None:
    documents = corpus(30, 16, seed=8)
    row = 72 * 4
    with LM(model_folder("llama"), dtype="float32", device="cpu", tuning=tuning(50 * row), **SMALL) as lm:
        wanted = harvested(lm, documents, tmp_path, ["embed"])
        assert_same_rows(rows_of(lm.activations(documents, "embed", rows=4, shuffle=16)), wanted)
        assert is_freed(memory_of(lm))
        with pytest.raises(ValueError, match=rf"{64 * row} bytes.*device_capture_bytes"):
            list(lm.activations(documents, "embed", rows=4, shuffle=64))
        with pytest.raises(ValueError, match="device_capture_bytes"):
            list(lm.activations([[1] * 51], "embed", rows=4))
        assert is_freed(memory_of(lm))
        kept = lm.generate([[1] * 48], SamplingParams(max_tokens=0), capture=[Capture("embed", device="engine")])
        with pytest.raises(ValueError, match="live results hold"):
            list(lm.activations(documents, "embed", rows=4, on_error="skip"))  # of the engine, not of a document
        del kept
        assert is_freed(memory_of(lm))
        assert_same_rows(rows_of(lm.activations(documents, "embed", rows=4)), wanted)


def tuning(size: int) -> Any:
    from pymllm_interp.config import EngineTuning

    return EngineTuning(device_capture_bytes=size)


def test_passes_end_behind_the_last_site_and_apply_interventions(lm: LM, tmp_path: Path) -> None:
    documents, ops = corpus(6, 20), [Steer("resid_post.0", torch.ones(72))]
    capture: list[Any] = [Capture("resid_post.0", positions=slice(1, None), missing="skip", dtype="float16")]
    wanted = harvested(lm, documents, tmp_path, capture, interventions=ops, max_length=8, too_long="truncate")
    before = dict(lm.engine.stats()["depths"])
    found = rows_of(lm.activations(documents, capture[0], rows=5, interventions=ops, max_length=8, too_long="truncate"))
    assert_same_rows(found, wanted)
    assert found[0][3]["resid_post.0"].dtype is torch.float16
    assert {n for n, count in lm.engine.stats()["depths"].items() if count != before.get(n, 0)} == {1}


def test_readers_of_torch_and_of_saelens(lm: LM) -> None:
    documents = corpus(8, 20)
    tokens = sum(map(len, documents))
    batches = lm.activations(documents, SITES, rows=16)
    loaded = list(DataLoader(batches, batch_size=None))
    assert sum(len(batch.documents) for batch in loaded) == tokens and loaded[0].states.keys() == set(SITES)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        list(DataLoader(batches, batch_size=None, num_workers=1))
    assert sum(len(rows) for rows in batches.tensors("mlp_out.1", epochs=2)) == 2 * tokens
    endless = lm.activations(documents, "embed", rows=16).tensors(epochs=None)
    assert sum(len(next(endless)) for _ in range(40)) > 2 * tokens
    assert isinstance(endless, Iterator)
    with pytest.raises(ValueError, match="this batch has"):
        next(batches.tensors())
    with pytest.raises(RuntimeError, match="an epoch has read"):
        list(lm.activations(iter(documents), "embed", rows=16).tensors(epochs=2))
    elsewhere = next(iter(lm.activations(documents, "embed", rows=16, device="meta")))
    assert elsewhere.rows.device.type == elsewhere.positions.device.type == "meta"


def test_documents_that_fail(lm: LM) -> None:
    documents = [[1, 2, 3], [4, 5], [1, 96_000], [6] * 3]
    found: list[int] = []
    with pytest.raises(PromptError, match="document 2"):
        for batch in lm.activations(documents, "embed", rows=2):
            found += batch.documents.tolist()
    assert found == [0, 0, 0, 1]  # earlier ones came
    batches = lm.activations(documents, "embed", rows=4, on_error="skip")
    assert [batch.documents.tolist() for batch in batches] == [[0, 0, 0, 1], [1, 3, 3, 3]]
    assert batches.skipped.keys() == {2} and "vocabulary" in batches.skipped[2]
    assert list(lm.activations([], "embed")) == []


@pytest.mark.parametrize(
    ("site", "options", "message"),
    [
        ("resid_post.9", {}, "resid_post.9"),
        ("embed", {"rows": 0}, "rows=0"),
        ("embed", {"rows": 8, "shuffle": 7}, "shuffle=7"),
        ("embed", {"shuffle": -1}, "shuffle=-1"),
        ("embed", {"seed": 0.5}, "seed=0.5"),
        ("embed", {"device": "nowhere"}, "device='nowhere'"),
        ("embed", {"max_length": 10**9}, "max_length"),
        ("embed", {"on_error": "no"}, "on_error"),
        ([], {}, "nothing to capture"),
        (Capture("embed", reduce="mean"), {}, "leave out reduce"),
        (Capture("embed", positions=Generated()), {}, "generates nothing"),
        (["embed", Capture("resid_post.0", positions=[0])], {}, "different positions"),
        ("pattern.0", {}, "patterns"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(site: Any, options: Any, message: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=message):
        lm.activations([[1, 2]], site, **options)


def test_an_engine_that_ends_ends_the_loop(model_folder: Any) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu", **SMALL) as lm:
        reader = iter(lm.activations(([i % 90] * 9 for i in range(10_000)), "embed", rows=8))
        next(reader)
    with pytest.raises((RuntimeError, ValueError), match=r"shut down|ended|closed"):
        list(reader)
    with pytest.raises(RuntimeError):
        lm.activations([[1]], "embed")
