"""A small body must not make large work: what one hostile request costs the engine process is counted in bytecodes."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers_waits import until

from pymllm_interp import Capture, SamplingParams, Scale
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.limits import MAX_SPECS
from pymllm_interp.hooks.captures.reductions.lens import Lens
from pymllm_interp.hooks.positions import windows_of
from pymllm_interp.interventions import Generated, Knockout
from pymllm_interp.server.process.engine_server import SUBMITTERS, EngineServer
from pymllm_interp.server.process.outbox import Outbox
from pymllm_interp.server.process.served_model import ServedModel
from pymllm_interp.utils.arguments import shown
from pymllm_interp.wire import messages as m

BUDGET = 150_000
"""Bytecodes that making a request may take, whatever numbers are in it."""
PER_SPEC = 2700
"""Bytecodes beside them for each intervention, as far as a request may have so many."""
HANDLING = 2000
"""Bytecodes that the message thread may take for it, with the start of another thread."""
HUGE = 10**18
MANY = 100_000


class Bytecodes:
    """Counts the bytecodes of new threads, by name, until one has taken too many; it is ended there."""

    def __init__(self, most: int) -> None:
        self.most, self.counts = most, dict[str, int]()

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            name = threading.current_thread().name
            self.counts[name] = self.counts.get(name, 0) + 1
            if self.counts[name] == 50 * self.most:
                raise RuntimeError(f"{self.counts[name]} bytecodes")
        return self


class InProcess:
    """An `EngineServer` of this process."""

    def __init__(self, folder: Path, store: Path) -> None:
        config = ModelConfig(model=str(folder), dtype="float32")
        self.served = ServedModel(config, ServerConfig(device="cpu", kv_cache_tokens=2048))
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox = Outbox(lambda found: [self.sent.put(one) for one in found], store, 1 << 20)
        self.number = 0

    def cost(self, **fields: Any) -> tuple[Any, int, int]:
        """(first answer, bytecodes of the message thread, of the thread that makes the requests) of one Submit."""
        self.number += 1
        sampling = fields.pop("sampling", {})
        given = {"prompts": [[3, 14, 15]], "params": [{"max_tokens": 1, "temperature": 0.0} | sampling]} | fields
        message = m.to_engine.decode(m.encoder.encode(m.Submit(self.number, "somebody", **given)))
        counted = Bytecodes(BUDGET)
        threading.settrace(counted)
        try:
            server = EngineServer(self.served, self.outbox)
            thread = threading.Thread(target=server.handle, args=(message,), name="messages")
            thread.start()
            thread.join()
            answer = self.sent.get(timeout=600)
        finally:
            threading.settrace(None)  # pyright: ignore[reportArgumentType]
        server.close()
        if isinstance(answer, m.Accepted):
            assert isinstance(self.sent.get(timeout=600), m.Finished)
        return answer, counted.counts.pop("messages"), max(counted.counts.values())


@pytest.fixture(scope="module")
def engine(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    found = InProcess(served_folder, tmp_path_factory.mktemp("store"))
    found.cost()  # what is loaded and cached once
    yield found
    found.served.engine.shutdown()
    found.outbox.close()


def scale(**fields: Any) -> dict[str, Any]:
    return {"interventions": [[{"op": "scale", "site": "resid_post.1", "factor": 1.5} | fields]]}


def steer(vector: Any) -> dict[str, Any]:
    return {"interventions": [[{"op": "steer", "site": "resid_post.1", "vector": vector}]]}


def capture(**fields: Any) -> dict[str, Any]:
    return {"captures": [[{"site": "resid_post.1"} | fields]]}


def nested(depth: int) -> list[Any]:
    found: list[Any] = [1.0]
    for _ in range(depth):
        found = [found]
    return found


knock = {"op": "knockout", "layer": "*", "from_": -1, "to": [0]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "range": (scale(positions={"range": [0, HUGE]}), "positions"),
    "range backwards": (scale(positions={"range": [HUGE, 0, -1]}), "positions"),
    "range skipped": (scale(positions={"range": [0, HUGE]}, missing="skip"), "positions"),
    "range in bounds": (scale(positions={"range": [0, 1 << 29]}), "beyond the prompt, which has 3 tokens"),
    "generated": (scale(positions={"generated": {"start": 0, "stop": HUGE, "step": HUGE - 1}}), "positions go up to"),
    "mask": (scale(positions=[True] * MANY), r"positions has 100000 positions; .*max_model_len.* holds 128"),
    "listed": (capture(positions=[0] * MANY), r"capture\[0\].positions has 100000"),
    "knockout": ({"interventions": [[knock | {"to": {"range": [0, HUGE]}}]]}, "positions"),
    "knockout layers": ({"interventions": [[knock | {"layer": [0] * MANY}]]}, "layer has 100000 entries; at most 1024"),
    "knockout heads": ({"interventions": [[knock | {"heads": [0] * MANY}]]}, "heads has 100000 entries"),
    "knockouts": ({"interventions": [[knock] * 1000]}, "1000 knockouts; a request takes at most 128"),
    "interventions": ({"interventions": [[scale()["interventions"][0][0]] * MANY]}, "100000 entries; a prompt takes at most 1024"),
    "patterns": ({"interventions": [[scale(site="resid_post.*")["interventions"][0][0]] * 1000]}, "max_interventions_per_site"),
    "captures": ({"captures": [["resid_post.*"] * MANY]}, "a prompt takes at most 1024"),
    "prompts of captures": ({"captures": [["embed"] * 1000], "prompts": [[1]] * 1000}, "at most 16384: send fewer prompts"),
    "features": (
        {"interventions": [[{"op": "setfeature", "sae": "x", "features": dict.fromkeys(map(str, range(MANY)), 1.0)}]]},
        "100000 features; at most 32",
    ),
    "layers": (steer({"layers": {str(i): [1.0] for i in range(MANY)}}), "layers has 100000 entries; at most 1024"),
    "nested": (steer(nested(400)), "vector"),
    "numbers": (steer([0.5] * (1 << 21)), "2097152 numbers; as lists at most 1048576"),
    "shape": (steer({"dtype": "float32", "shape": [HUGE // 10**7, 0], "data": ""}), "shape"),
    "name": (steer("v" * MANY), "the name of a vector has at most 256"),
    "site": (scale(site="resid_post.{" + "0," * MANY + "0}"), "characters; at most 1024"),
    "unknown site": (scale(site="x" * MANY), "characters; at most 1024"),
    "lens tokens": (capture(reduce={"type": "lens", "tokens": [1] * MANY}), "tokens has 100000"),
    "lens top_k": (capture(reduce={"type": "lens", "top_k": HUGE}), "top_k"),
    "gate": (scale(when={"probe": [1.0] * (1 << 21)}), "when.probe has 2097152 numbers"),
    "token ids": ({"prompts": [[1] * MANY]}, "has 100000 tokens, but the context holds 128"),
    "cache_salt": ({"options": {"cache_salt": "s" * 10**6}}, "cache_salt"),
    "n": ({"sampling": {"n": 10**9}}, "n=1000000000"),
    "max_tokens": ({"sampling": {"max_tokens": HUGE}}, "max_model_len"),
    "allowed_token_ids": (
        {"prompts": [[1]] * 1000, "sampling": {"allowed_token_ids": [1] * MANY}}, "lists 100000000 token ids, counting each"
    ),
    "allowed beyond": ({"sampling": {"allowed_token_ids": [1] * MANY + [10**6]}}, "names token id 1000000, the vocabulary ends"),
    "bad_words": ({"sampling": {"bad_words": ["w1"] * MANY}}, "bad_words=.*100000 entries; expected at most 1024"),
    "choices": ({"sampling": {"structured_outputs": {"choice": [1] * MANY}}}, "100000 entries; at most 4096"),
    "a schema": (
        {"sampling": {"structured_outputs": {"json": {"enum": [1] * MANY * 10}}}}, "1000.*characters; at most 131072"
    ),
    "stop": ({"sampling": {"stop": ["x" * 100] * MANY}}, "stop=...*: 100000 entries; expected at most 64"),
    "long stop": ({"sampling": {"stop": "x" * 10**6}}, "1000000 characters; expected at most 4096"),
    "stop_token_ids": ({"sampling": {"stop_token_ids": [1] * MANY}}, "stop_token_ids=.*100000 entries"),
    "logit_bias": ({"sampling": {"logit_bias": dict.fromkeys(map(str, range(MANY)), 1.0)}}, "logit_bias=.*100000 entries"),
    "temperature": ({"sampling": {"temperature": [1.0] * MANY}}, "temperature"),
    "unknown": ({"sampling": {"x" * MANY: 1}}, "has no argument"),
}  # fmt: skip
SERVED = {
    "slice": scale(positions={"slice": [0, HUGE, 1]}),
    "slice step": capture(positions={"slice": [0, None, HUGE]}),
    "top_k": {"sampling": {"top_k": HUGE, "temperature": 1.0}},
    "seed": {"sampling": {"seed": HUGE}},
    "priority": {"options": {"priority": [HUGE]}},
    "generated": scale(positions={"generated": {"start": 10**9}}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_request_is_refused_by_name_and_costs_its_share(engine: InProcess, case: str) -> None:
    fields, expected = REFUSED[case]
    answer, handling, making = engine.cost(**fields)
    assert isinstance(answer, m.Failed), answer
    assert re.search(expected, answer.failure.message), answer.failure.message[:300]
    assert len(answer.failure.message) < 1000
    budget = BUDGET + PER_SPEC * min(sum(map(len, fields.get("interventions", ()))), MAX_SPECS)
    assert handling < HANDLING and making < budget, (handling, making)


@pytest.mark.parametrize("case", SERVED)
def test_large_numbers_that_mean_something_are_served_at_the_same_cost(engine: InProcess, case: str) -> None:
    answer, handling, making = engine.cost(**SERVED[case])
    assert isinstance(answer, m.Accepted), answer
    assert handling < HANDLING and making < BUDGET, (handling, making)


def test_messages_do_not_wait_for_a_call_that_is_being_submitted(engine: InProcess) -> None:
    """An abort that comes while a call's requests are made ends them."""
    server, begun, go = EngineServer(engine.served, engine.outbox), threading.Event(), threading.Event()
    factory = engine.served.factory("slow")
    make = factory.for_prompts

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(600)
        return make(*args)

    factory.for_prompts = slow  # pyright: ignore[reportAttributeAccessIssue]
    long = {"max_tokens": 100, "ignore_eos": True}
    try:
        server.handle(m.Submit(7001, "slow", [[3, 14]], [long]))
        assert begun.wait(600)
        server.handle(m.AskStats(7002))
        answer = engine.sent.get(timeout=600)
        assert isinstance(answer, m.Answer) and answer.call == 7002
        server.handle(m.Abort(7001))
    finally:
        go.set()
    assert isinstance(engine.sent.get(timeout=600), m.Accepted)
    while not isinstance(last := engine.sent.get(timeout=600), m.Finished):
        pass
    assert last.finish_reason == "abort" and len(last.token_ids) < 100
    server.close()


def test_submitters_keep_their_places_when_the_system_has_no_more_threads(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that raised was in the queue all the same: its end gave back a place that nobody had taken."""
    server, go, done = EngineServer(engine.served, engine.outbox), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        assert go.wait(20)
        done.release()

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server._in_turn("a", done.release)
    assert done.acquire(timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        for name in "abcdefgh":
            server._in_turn(name, work)
        go.set()
        for _ in "abcdefgh":
            assert done.acquire(timeout=20)
    until(lambda: server._turns._free >= SUBMITTERS and not any(server._turns._running.values()))
    assert server._turns._free == SUBMITTERS
    server.close()


def test_one_list_of_specs_and_parameters_stands_for_all_prompts(engine: InProcess) -> None:
    server = EngineServer(engine.served, engine.outbox)
    shared = m.Submit(8001, "", [[3], [4, 5]], [{"max_tokens": 2}], captures=[["resid_post.0"]])
    server.handle(shared)
    accepted = engine.sent.get(timeout=600)
    assert isinstance(accepted, m.Accepted) and accepted.max_tokens == [2, 2]
    ends = [engine.sent.get(timeout=600) for _ in range(2)]
    assert all(isinstance(end, m.Finished) and end.captured is not None for end in ends), ends
    server.close()


@pytest.mark.parametrize(
    ("positions", "length"),
    [(range(0, 10), 10), (range(9, -1, -2), 10), (range(-3, 3), 10), (range(5, 1 << 29, 7), 10), (range(1 << 29, -50, -3), 10),
     (range(-20, 20, 3), 10), (range(-1, -4, -1), 5), (range(100, 200), 10)],
)  # fmt: skip
def test_ranges_select_what_lists_of_their_numbers_do(positions: range, length: int) -> None:
    near = [index for index in positions[-60:] if abs(index) < 1000] if len(positions) > 10**6 else list(positions)
    near = [i for i in range(-1000, 1000) if i in positions][:: 1 if positions.step > 0 else -1] if not near else near
    for missing in ("error", "skip"):
        found, wanted = (_outcome(given, length, missing) for given in (positions, near))
        if len(near) == len(positions) or missing == "skip":
            assert found == wanted


def _outcome(positions: Any, length: int, missing: str) -> Any:
    try:
        return windows_of(positions, length, missing)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scale("resid_post.0", 1.0, positions=range(HUGE)), "positions go up to"),
        (lambda: Scale("resid_post.0", 1.0, positions=torch.zeros(1).long().expand(1 << 40)), "1099511627776 positions; at most"),
        (lambda: Generated(0, HUGE), "positions go up to"),
        (lambda: Knockout(range(10**12), 0, 0), "layer names 1000000000000; at most 1024"),
        (lambda: Capture("q.0", heads=torch.zeros(1).long().expand(1 << 40)), "1099511627776 heads"),
        (lambda: Capture("resid_post.0", reduce=Lens(tokens=range(10**12))), "1000000000000 ids"),
        (lambda: SamplingParams(n=10**9), "n=1000000000"),
        (lambda: SamplingParams(logit_bias=dict.fromkeys(range(2000), 0.0)), "2000 entries; expected at most 1024"),
    ],
)  # fmt: skip
def test_objects_made_in_python_have_the_same_limits(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_message_reads_only_the_beginning_of_a_value() -> None:
    many: list[Any] = [0] * 10**6
    for _ in range(5):
        many = [many] * 1000
    assert shown(many).startswith("[[[[[[0, 0") and len(shown(many)) == 203
    assert shown({"a": [1, (2, "x")]}) == "{'a': [1, (2, 'x')]}"
    assert len(shown(msgspec.json.encode(list(range(10**5))).decode())) == 203
