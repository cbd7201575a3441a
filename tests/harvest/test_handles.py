"""Captured states that another process opens: `share_states` and `open_handle`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_devices import DEVICES, lm_on
from helpers_forks import forking

from pymllm_interp import LM, Activations, Capture, SamplingParams
from pymllm_interp.harvest import HandleError, open_handle, share_states
from pymllm_interp.harvest.feed import handles
from pymllm_interp.hooks.captures.activations import NOTHING
from pymllm_interp.wire.weights import FOLDER, SentWeights

OPENER = """
import json, sys, torch
from pymllm_interp.harvest import HandleError, open_handle
for line in sys.stdin:
    try:
        found = open_handle(json.loads(line))
        found = {site: [str(rows.device)[:4], list(rows.shape), rows.double().sum().item(), found.positions[site].tolist(),
                        found.token_ids[site].tolist()] for site, rows in found.items()}
        torch.cuda.is_available() and torch.cuda.ipc_collect()
    except HandleError as error:
        found = str(error)
    print(json.dumps(found), flush=True)
"""
SHARER = """
import json, os, sys, torch
from pymllm_interp import LM, Capture, SamplingParams
from pymllm_interp.harvest import share_states
with LM(sys.argv[1], device="cpu") as lm:
    (out,) = lm.generate([[1, 2, 3]], SamplingParams(max_tokens=0), capture=[Capture("embed", device="engine")])
    handle = share_states(out.activations)
    print(json.dumps(handle.info), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def opener() -> Iterator[Callable[[Any], Any]]:
    """Opens a handle's JSON in another process: what it finds, or its error."""
    with forking():
        process = subprocess.Popen(
            [sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def opened(info: Any) -> Any:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(info) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield opened
    process.communicate(timeout=30)


@pytest.fixture(scope="module", params=DEVICES)
def lm(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[LM]:
    with lm_on(request.param, model_folder("llama"), inner_sites=("z",)) as found:
        yield found


def captured(lm: LM, *specs: Any, length: int = 17) -> Activations:
    wanted: Any = specs or [{"site": "resid_post.*"}]
    captures = [Capture(**spec, device="engine") for spec in wanted]
    return lm.generate([list(range(1, length + 1))], SamplingParams(max_tokens=0), capture=captures)[0].activations


MADE: list[Path] = []
"""Segments of this process. The folder has those of other workers, too, which come and go."""


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SentWeights.__init__

    def note(self: SentWeights, weights: Any) -> None:
        made(self, weights)
        MADE.append(self._path)

    monkeypatch.setattr(SentWeights, "__init__", note)


def segments() -> set[Path]:
    return {path for path in MADE if path.exists()}


def summary(states: Activations, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for site, rows in states.items():
        index = states.positions[site].tolist(), states.token_ids[site].tolist()
        found[site] = [device[:4], list(rows.shape), rows.double().sum().item(), *index]
    return found


SPECS = [
    [{"site": "resid_post.*"}],
    [{"site": "embed", "positions": [0, -1]}, {"site": "z.1", "dtype": "bfloat16"}],
    [{"site": "logits"}],
]


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("length", [2, 17])
def test_another_process_has_the_same_states(specs: Any, length: int, lm: LM, opener: Callable[[Any], Any]) -> None:
    before, states = segments(), captured(lm, *specs, length=length)
    with share_states(states) as handle:
        found = opener(handle.info)
        assert found == summary(states, lm.runner.device)
        assert "opened before" in opener(handle.info), "a handle is opened once"
    assert segments() == before
    handle.release()
    with share_states(states) as again:
        assert opener(again.info) == found


def test_a_released_handle_cannot_be_opened_and_its_states_are_freed(lm: LM, opener: Callable[[Any], Any]) -> None:
    before = segments()
    for _ in range(3):
        handle = share_states(captured(lm))
        handle.release()
        assert "released, or opened before" in opener(handle.info)
    dropped = share_states(captured(lm)).info
    assert segments() == before and "released" in opener(dropped)
    lost = json.loads(json.dumps(dropped))
    assert handles.StatesHandle._open == 0 and lost == dropped


def test_the_handle_of_a_killed_process_is_a_named_error(model_folder: Callable[[str], Path]) -> None:
    with forking():
        done = subprocess.run(
            [sys.executable, "-c", SHARER, str(model_folder("llama"))], capture_output=True, timeout=120, check=False
        )
    info = json.loads(done.stdout)
    left = [FOLDER / info[part]["segment"] for part in ("rows", "index")]
    assert done.returncode == -9 and all(path.exists() for path in left)
    with pytest.raises(HandleError, match=f"process {info['pid']}, which has these states, has ended"):
        open_handle(info)
    assert not any(path.exists() for path in left), "what it left is removed"
    with pytest.raises(HandleError, match="has ended"):  # a process of its number, which is another one
        open_handle(info | {"pid": handles.os.getpid()})


def test_handles_are_bounded_and_what_is_none_is_refused(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MAX_HANDLES", 2)
    states = captured(lm)
    first, second = share_states(states), share_states(states)
    with pytest.raises(HandleError, match="2 handles of states are open"):
        share_states(states)
    first.release()
    with share_states(states) as third:
        good = third.info
        for change in (
            {"sites": [["embed"]]}, {"order": ["embed"]}, {"index": {}}, {"rows": {}}, {"sites": None}, {"pid": "1"},
            {"num_layers": None}, {"num_layers": "x"}, {"rows": good["rows"] | {"names": []}},
            {"index": good["index"] | {"segment": "../../etc/passwd"}},
        ):  # fmt: skip
            with share_states_of(lm, monkeypatch) as own, pytest.raises(HandleError):
                open_handle(own.info | change)
        with pytest.raises(HandleError):
            open_handle({})
    second.release()
    with pytest.raises(HandleError, match="nothing was captured"):
        share_states(NOTHING)


def share_states_of(lm: LM, monkeypatch: pytest.MonkeyPatch) -> handles.StatesHandle:
    monkeypatch.setattr(handles, "MAX_HANDLES", 100)
    return share_states(captured(lm))


def test_a_handle_that_cannot_be_made_leaves_nothing(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a full /dev/shm, from which nobody would remove what was written."""
    before, states, real = segments(), captured(lm), SentWeights.__enter__

    def full(self: SentWeights) -> Any:
        if any("positions" in name for name in self.info["names"]):
            monkeypatch.setattr(self, "_kept", [*self._kept, object()])  # fails behind the first tensors
        return real(self)

    monkeypatch.setattr(SentWeights, "__enter__", full)
    with pytest.raises(AttributeError):
        share_states(states)
    assert segments() == before and handles.StatesHandle._open == 0


def test_a_handle_may_be_collected_while_another_is_made(lm: LM) -> None:
    handle = share_states(captured(lm))

    def release() -> None:
        with handles.StatesHandle._lock:  # a garbage collection there releases handles of cycles
            handle.release()

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and handles.StatesHandle._open == 0


@pytest.mark.parametrize("device", [each for each in DEVICES if each != "cpu"])
def test_memory_of_unopened_handles_goes_back_and_a_false_size_is_refused(
    device: str, model_folder: Callable[[str], Path], opener: Callable[[Any], Any]
) -> None:
    with lm_on(device, model_folder("llama")) as lm:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for i in range(20):
            with share_states(captured(lm)) as handle:
                if i % 2:
                    opener(handle.info)
            del handle
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() - before < 1 << 20
        with share_states(captured(lm)) as handle:
            (given,) = handle.info["rows"]["ipc_handles"][0].values()
            given["storage_size_bytes"] = 1 << 40
            handle.info["rows"]["shapes"][0][0] = 1 << 28
            assert "its memory ends before" in opener(handle.info)
