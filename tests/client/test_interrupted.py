"""Ctrl-C while a call waits: its requests are cancelled, and nothing holds the LM."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from pymllm_interp import LM, SamplingParams

LONG = SamplingParams(max_tokens=8000, ignore_eos=True)


@pytest.fixture(autouse=True)
def interrupts_are_raised() -> Iterator[None]:
    """A shell ignores SIGINT for its background jobs."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupt_when_it_runs(lm: Any) -> None:
    """Send SIGINT to this process once a request runs."""
    engine = lm.engine

    def send() -> None:
        while not engine.stats()["running"]:
            time.sleep(0.01)
        time.sleep(0.1)  # the caller waits by now
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


def interrupted_trace(lm: Any) -> Any:
    interrupt_when_it_runs(lm)
    with pytest.raises(KeyboardInterrupt):  # nnsight reads the inner one
        with lm.generate("Hello", max_new_tokens=8000, ignore_eos=True) as tracer:
            lm.model.layers[0].output.save()
    return tracer


def interrupted_handle(lm: Any) -> Any:
    handle = lm.submit("Hello", LONG)
    with pytest.raises(KeyboardInterrupt):
        interrupt_when_it_runs(lm)
        handle.result()
    handle.wait(60)
    assert handle.output().outputs[0].finish_reason == "abort"


def interrupted_call(lm: Any) -> Any:
    with pytest.raises(KeyboardInterrupt):
        interrupt_when_it_runs(lm)
        lm.generate(["Hello", "world"], LONG)


@pytest.mark.parametrize("call", [interrupted_trace, interrupted_handle, interrupted_call])
def test_what_ctrl_c_interrupted_ends_and_holds_no_lm(call: Any) -> None:
    lm = LM("demo")
    model = weakref.ref(lm.runner.model)
    left = call(lm)
    deadline = time.monotonic() + 60
    while lm.engine.stats()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lm.shutdown()
    del lm
    gc.collect()
    assert model() is None, left
