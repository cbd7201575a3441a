"""`lm.pause` and `lm.resume`: no step runs in between, and each request's tokens are those of an engine that never paused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
from helpers_waits import assert_idle, until

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.handle import EngineClosedError, RequestHandle
from pymllm_interp.engine.lifecycle import lifecycle

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = [[1, 2, 3], [7], list(range(5, 38))]


@pytest.fixture
def lm(lm_of: Callable[..., LM], monkeypatch: pytest.MonkeyPatch) -> Iterator[LM]:
    """An engine with steps that a test can come between."""
    found, slow = lm_of("llama", kv_cache_tokens=1024, page_size=4), monkeypatch.setattr
    step = found.engine.step
    slow(found.engine, "step", lambda: (time.sleep(0.004), step()))
    yield found
    found.resume()
    assert not found.is_paused()
    assert_idle(found)


def running(lm: LM, prompt: list[int]) -> RequestHandle:
    """A request that has some tokens."""
    handle = lm.submit(prompt, LONG)
    until(lambda: len(handle.requests[0].output_token_ids) > 2)
    return handle


def steps_in(lm: LM, seconds: float = 0.2) -> int:
    before = lm.engine.stats()["steps"]
    time.sleep(seconds)
    return lm.engine.stats()["steps"] - before


def test_kept_requests_go_on_where_they_were(lm: LM):
    alone = [lm.generate([prompt], LONG)[0].outputs[0].token_ids for prompt in PROMPTS]
    handles = [running(lm, prompt) for prompt in PROMPTS]
    lm.pause("keep")
    assert lm.is_paused() and lm.engine.state.startswith("paused, live requests")
    late = lm.submit([9, 8], LONG)
    assert steps_in(lm) == 0 and not late.done
    lm.pause("keep")  # again
    lm.resume()
    assert [handle.result().outputs[0].token_ids for handle in handles] == alone
    assert len(late.result().outputs[0].token_ids) == 60


def test_aborted_requests_have_the_tokens_so_far(lm: LM):
    whole = lm.generate([PROMPTS[0]], LONG)[0].outputs[0].token_ids
    handle = running(lm, PROMPTS[0])
    lm.pause()
    found, late = handle.result().outputs[0], lm.submit(PROMPTS[1], LONG)
    assert found.finish_reason == "abort" and 2 < len(found.token_ids) < 60
    assert found.token_ids == whole[: len(found.token_ids)]
    assert steps_in(lm) == 0 and not late.done
    lm.resume()
    assert late.result().outputs[0].finish_reason == "length"


def test_wait_lets_running_requests_end_and_holds_new_ones(lm: LM):
    first = [running(lm, prompt) for prompt in PROMPTS]
    waiter = threading.Thread(target=lm.pause, args=("wait",))
    waiter.start()
    until(lm.is_paused)
    late, ended = lm.submit([4, 4], LONG), lm.submit([4, 5], LONG)
    ended.cancel()
    waiter.join(20)
    assert all(handle.done for handle in first) and ended.result().outputs[0].finish_reason == "abort"
    assert steps_in(lm) == 0 and not late.done
    lm.resume()
    assert late.result().outputs[0].token_ids == lm.generate([[4, 4]], LONG)[0].outputs[0].token_ids


def interrupted(lm: LM, meanwhile: Callable[[], None]) -> Callable[[], Future[None]]:
    """`Intake.drain` for a call that Ctrl-C interrupts."""
    drain = lm.engine.intake.drain

    def result() -> None:
        meanwhile()
        raise KeyboardInterrupt

    def drained() -> Future[None]:
        done: Any = drain()
        done.result = result
        return done

    return drained


def test_an_interrupted_wait_leaves_no_pause(lm: LM, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C in a notebook: requests go on, new ones too."""

    monkeypatch.setattr(lm.engine.intake, "drain", interrupted(lm, lambda: None))
    handle = running(lm, PROMPTS[0])
    with pytest.raises(KeyboardInterrupt):
        lm.pause("wait")
    assert not lm.is_paused()
    assert lm.submit([4, 4], LONG).result(30).outputs[0].finish_reason == "length"
    assert handle.result().outputs[0].finish_reason == "length" and not lm.is_paused()
    with pytest.raises(KeyboardInterrupt):
        lm.pause("wait")  # which began at once
    assert not lm.is_paused()
    lm.pause("keep")
    with pytest.raises(KeyboardInterrupt):
        lm.pause("wait")
    assert lm.is_paused(), "it was paused before"
    lm.resume()


def test_an_interrupted_wait_leaves_those_of_others(lm: LM, monkeypatch: pytest.MonkeyPatch):
    intake, other = lm.engine.intake, threading.Thread(target=lm.pause, args=("wait",), daemon=True)
    drain = intake.drain

    def meanwhile() -> None:
        monkeypatch.setattr(intake, "drain", drain)
        other.start()
        until(lambda: len(intake._drained) == 2)

    handle = running(lm, PROMPTS[0])
    monkeypatch.setattr(intake, "drain", interrupted(lm, meanwhile))
    with pytest.raises(KeyboardInterrupt):
        lm.pause("wait")
    other.join(20)
    assert not other.is_alive() and handle.done and lm.is_paused()


@pytest.mark.parametrize("call", [lambda lm: lm.pause("wait"), lambda lm: lm.sleep(drain=True)], ids=["pause", "sleep"])
def test_a_resume_counts_during_a_wait_of_a_paused_engine(call: Callable[[LM], None], lm: LM):
    lm.pause("keep")
    handle, pool = lm.submit(PROMPTS[0], LONG), ThreadPoolExecutor(1)
    waiter = pool.submit(call, lm)
    until(lambda: lm.engine.intake.held is not None)
    lm.resume()
    with pytest.raises(RuntimeError, match=r"lm.resume\(\) was called before"):
        waiter.result(20)
    assert not lm.is_paused()
    assert handle.result(20).outputs[0].finish_reason == "length"


def test_a_request_that_the_engine_has_not_taken_yet_ends_before_a_sleep(lm: LM):
    """It was submitted before, and the engine's thread is elsewhere."""
    entered, go, pool = threading.Event(), threading.Event(), ThreadPoolExecutor(2)
    pool.submit(lm.engine.call, lambda: (entered.set(), go.wait(20)))
    assert entered.wait(20)
    handle = lm.submit(PROMPTS[0], LONG)
    sleeper = pool.submit(lm.sleep, drain=True)
    until(lambda: len(lm.engine._inbox) > 1 or lm.engine.intake.why_closed is not None)
    go.set()
    sleeper.result(20)
    lm.wake()
    assert handle.result(20).outputs[0].finish_reason == "length"


def test_a_pause_stays_when_a_sleep_waits_for_the_same_requests(lm: LM):
    running(lm, PROMPTS[0])
    with ThreadPoolExecutor(2) as pool:
        pause = pool.submit(lm.pause, "wait")
        until(lm.is_paused)
        sleep = pool.submit(lm.sleep, drain=True)
        pause.result(20), sleep.result(20)
    lm.wake()
    assert lm.is_paused()


@pytest.mark.parametrize("orders", [
    ("keep", "resume"), ("resume", "keep"), ("abort", "resume", "keep"), ("resume", "abort", "resume"), ("keep", "resume", "wait"),
])  # fmt: skip
def test_orders_of_operators_end_alike_in_whatever_sequence_they_come(orders: tuple[str, ...], lm: LM):
    """Two fronts send a pause and a resume at the same time, and each replica gets them in its own sequence."""
    for sequence in permutations(enumerate(orders, start=1)):
        base = time.time_ns()
        for stamp, order in sequence:
            given = {} if order == "resume" else {"mode": order}
            with contextlib.suppress(RuntimeError):  # a wait that was resumed
                lm.backend.control("resume" if order == "resume" else "pause", stamp=base + stamp, **given)
        assert lm.is_paused() == (orders[-1] != "resume"), sequence
    lm.resume()
    assert not lm.is_paused(), "without a stamp it is the newest"


def test_orders_count_after_a_clock_was_set_back(lm: LM, monkeypatch: pytest.MonkeyPatch):
    now = time.time_ns()
    lm.backend.control("resume", stamp=now + 3600 * 10**9)
    lm.backend.control("pause", mode="keep", stamp=now)
    assert not lm.is_paused(), "it may have been on its way"
    monkeypatch.setattr(lifecycle, "ON_THE_WAY", -1.0, raising=False)
    lm.backend.control("resume", stamp=now + 3600 * 10**9)
    lm.backend.control("pause", mode="keep", stamp=now + 1)
    assert lm.is_paused()
    lm.backend.control("resume", stamp=now + 2)
    assert not lm.is_paused()


def test_late_orders_answer_what_the_engine_does(lm: LM):
    """A resume that a newer pause overtook is not answered as if the engine ran."""
    now, control = time.time_ns(), lm.backend.control
    assert control("pause", mode="keep", stamp=now) is True and control("resume", stamp=now - 1) is False
    assert lm.is_paused() and control("pause", mode="keep", stamp=now - 2) is True, "it is paused, by whichever order"
    assert control("resume", stamp=now + 1) is True and control("resume", stamp=now - 1) is True
    assert control("pause", mode="abort", stamp=now) is False and not lm.is_paused()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.backend, "control", lambda order, **given: control(order, stamp=now, **given))
        with pytest.raises(RuntimeError, match=r"the engine runs: an lm.resume\(\) that was called after"):
            lm.pause("keep")
        control("pause", mode="keep", stamp=now + 2)
        with pytest.raises(RuntimeError, match=r"the engine is paused: an lm.pause\(\) that was called after"):
            lm.resume()
    lm.resume()


def test_a_late_pause_ends_requests_all_the_same(lm: LM):
    lm.backend.control("resume", stamp=time.time_ns())
    handle = running(lm, PROMPTS[0])
    lm.backend.control("pause", mode="keep", stamp=5)
    with pytest.raises(RuntimeError, match=r"lm.resume\(\) was called before"):
        lm.backend.control("pause", mode="wait", stamp=6)
    assert not lm.is_paused() and not handle.done
    lm.backend.control("pause", mode="abort", stamp=7)
    assert handle.result().outputs[0].finish_reason == "abort" and not lm.is_paused()


def test_resume_ends_a_wait_with_an_error(lm: LM):
    errors = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match=r"lm.resume\(\) was called before") as error:
            lm.pause("wait")
        errors.append(error)

    handle, waiter = running(lm, PROMPTS[0]), threading.Thread(target=wait)
    waiter.start()
    until(lm.is_paused)
    lm.resume()
    waiter.join(20)
    assert errors and handle.result().outputs[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_time_limits_count_in_a_pause(lm: LM, mode: str):
    first = running(lm, PROMPTS[1])
    waiter = threading.Thread(target=lm.pause, args=(mode,))
    waiter.start()
    until(lm.is_paused)
    handle = lm.submit([1, 2], LONG, timeout=0.05)
    assert handle.result(timeout=10).outputs[0].finish_reason == "timeout"
    assert not first.done
    if mode == "keep":
        lm.resume()
    waiter.join(20)
    first.result()


def test_a_paused_trace_goes_on(lm: LM):
    lm.pause("keep")
    found = []

    def run() -> None:
        with lm.trace([1, 2, 3]):
            found.append(lm.model.layers[1].output.save())

    thread = threading.Thread(target=run)
    thread.start()
    assert steps_in(lm) == 0 and not found
    lm.resume()
    thread.join(20)
    assert found[0].shape[1] == 3


def test_other_modes_and_blocks_are_refused(lm: LM):
    with pytest.raises(ValueError, match="mode='later': expected one of 'abort', 'wait', 'keep'"):
        lm.pause("later")
    with pytest.raises(RuntimeError, match="inside the block"), lm.trace([1, 2]):
        lm.model.layers[0].output[:] = 0
        lm.pause()
    assert not lm.is_paused()


def test_an_engine_ends_while_it_is_paused(model_folder: Callable[..., object]):
    lm = LM(model_folder("llama"), device="cpu")  # type: ignore[arg-type]
    lm.pause("keep")
    handle = lm.submit([1], LONG)
    lm.shutdown()
    with pytest.raises(EngineClosedError):
        handle.result()
    with pytest.raises(EngineClosedError):
        lm.pause()
    dropped = LM(model_folder("llama"), device="cpu")  # type: ignore[arg-type]
    dropped.pause("keep")
    handle = dropped.submit([1], LONG)
    del dropped  # nobody can resume it: its requests go on
    assert len(handle.result(timeout=20).outputs[0].token_ids) == 60
