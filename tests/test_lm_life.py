"""The life of an `LM`, its engine and its handles: construction, faults at the end, and the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import held
from helpers_runner import random_ids

from pymllm_interp import LM, SamplingParams
from pymllm_interp.core.events import FinishedEvent
from pymllm_interp.core.request import Request
from pymllm_interp.engine.handle import EngineClosedError, RequestHandle

LONG = SamplingParams(max_tokens=90, ignore_eos=True, temperature=0, logprobs=1)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "engine" in thread.name}


@pytest.mark.parametrize(
    "body",
    [
        "handle = LM(folder, device='cpu').submit([1, 2, 3], long)",
        "lm = LM(folder, device='cpu'); handle = lm.submit([1, 2, 3], long)",
        "stream = LM(folder, device='cpu').stream([1, 2, 3], long); next(iter(stream))",
        "LM(folder, device='cpu')",
    ],
)
def test_a_process_ends_cleanly_while_requests_run(body: str, model_folder: Callable[[str], Path]) -> None:
    """Also where the `LM` itself is gone: its engine still serves the handles."""
    script = (
        "import sys, time\nfrom pymllm_interp import LM, SamplingParams\nfolder = sys.argv[1]\n"
        "long = SamplingParams(max_tokens=90, ignore_eos=True)\n"
        f"for _ in range(3):\n    {body}\ntime.sleep(0.02)\n"
    )
    command = [sys.executable, "-c", script, str(model_folder("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("rename", [5, {"model": 3}, {3: "x"}])
def test_an_lm_that_cannot_be_made_leaves_no_engine(rename: Any, model_folder: Callable[[str], Path]) -> None:
    before = engine_threads()
    with pytest.raises((TypeError, AttributeError, ValueError)):
        LM(model_folder("llama"), device="cpu", rename=rename)
    assert engine_threads() == before


def test_the_output_of_a_request_that_runs_has_its_tokens_so_far(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    while True:
        handle = lm.submit(random_ids(3), LONG)
        while len(handle.requests[0].output_token_ids) < 3:
            pass
        with held(lm):
            partial = handle.output()
        whole = handle.result()
        if not partial.finished:  # else it had ended before the engine stood still
            break
    assert 3 <= len(partial.token_ids) < 90 and partial.token_ids == whole.token_ids[: len(partial.token_ids)]
    assert partial.finish_reason is None and whole.finish_reason == "length"
    assert partial.logprobs == (whole.logprobs or [])[: len(partial.token_ids)]


def test_a_fault_while_the_engine_closes_leaves_no_caller_waiting(model_folder: Callable[[str], Path]) -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("cudaErrorIllegalAddress")

        def close(self) -> None:
            pass

    lm = LM(model_folder("llama"), device="cpu")
    with held(lm):
        handles = [lm.submit(random_ids(3), LONG) for _ in range(3)]
        stage: Any = lm.runner.declared
        stage.capture_ring = Broken()
        closing = threading.Thread(target=lm.shutdown)
        closing.start()
    closing.join(60)
    for handle in handles:
        with pytest.raises(EngineClosedError):
            handle.result(60)


def test_a_handle_whose_notification_fails_still_ends() -> None:
    """As where the event loop of an asynchronous stream was closed."""
    handle = RequestHandle(None, [Request("r", [1], LONG, 4, 0)], None, None, streaming=True)  # pyright: ignore[reportArgumentType]

    def closed() -> None:
        raise RuntimeError("Event loop is closed")

    handle._on_event = closed
    with pytest.raises(RuntimeError, match="Event loop"):
        handle.put(FinishedEvent("r", [7], "stop"))
    assert handle.done and handle.output().token_ids == [7]
