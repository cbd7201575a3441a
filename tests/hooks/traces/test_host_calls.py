"""Host code of traces with hundreds of blocks: Python calls and dicts a visit and an invoke, counted, since times vary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from pymllm_interp import LM
from pymllm_interp.client.calls import traces
from pymllm_interp.client.handle import RequestHandle
from pymllm_interp.hooks.traces.blocks.trace import Block, RequestTrace

pytestmark = pytest.mark.local
CALLS_A_READ, CALLS_AN_INVOKE = 24, 230
STEPS, LAYERS = 6, 3


class Calls:
    """Counts the Python calls of a thread between `begin` and `end`, those of blocks included."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        sys.setprofile(self._count)

    def end(self) -> None:
        sys.setprofile(None)

    def _count(self, _frame: Any, event: str, _argument: Any) -> None:
        self.count += event == "call"


def read(lm: LM, blocks: int) -> list[Any]:
    with lm.generate(max_new_tokens=STEPS, ignore_eos=True) as tracer:
        for i in range(blocks):
            with tracer.invoke([1 + i, 2]):
                kept = list().save()
                for _ in tracer.iter[:]:
                    for layer in range(LAYERS):
                        kept.append(lm.model.layers[layer].output[0, -1])
    assert [receipt.reads for receipt in tracer.receipts] == [STEPS * LAYERS] * blocks
    return kept


def of_one_more(calls: Callable[[int], int], few: int = 4, many: int = 20) -> float:
    """Calls of one more block, from the calls of few and of many."""
    calls(many)  # what is found once for a kind of block
    return (calls(many) - calls(few)) / (many - few)


def test_a_read_takes_few_calls(lm_of, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = lm_of("llama", lower_traces="off", max_running_requests=32)
    begin_pass, end_pass = lm.interleaver.begin_pass, lm.interleaver.end_pass

    def calls(blocks: int) -> int:
        counted = Calls()

        def begin(own: Any) -> None:
            counted.begin()
            begin_pass(own)

        def end() -> None:
            end_pass()
            counted.end()

        monkeypatch.setattr(lm.interleaver, "begin_pass", begin)
        monkeypatch.setattr(lm.interleaver, "end_pass", end)
        read(lm, blocks)
        return counted.count

    a_read = of_one_more(calls) / (STEPS * LAYERS)
    assert 1 < a_read <= CALLS_A_READ, a_read


def test_an_invoke_takes_few_calls(lm_of) -> None:
    lm = lm_of("llama", lower_traces="auto", max_running_requests=32)

    def calls(invokes: int) -> int:
        counted = Calls()
        counted.begin()
        try:
            with lm.generate(max_new_tokens=1) as tracer:
                states = list().save()
                for i in range(invokes):
                    with tracer.invoke([1 + i, 2]):
                        states.append(lm.model.layers[1].output[0, -1])
        finally:
            counted.end()
        assert len(states) == invokes
        assert all(receipt.lowered for receipt in tracer.receipts)
        return counted.count

    an_invoke = of_one_more(calls)
    assert 1 < an_invoke <= CALLS_AN_INVOKE, an_invoke


def test_what_a_visit_reads_is_in_no_dict() -> None:
    """Blocks and traces keep what each visit reads in slots."""
    block = Block(compile("", "block", "exec"), {}, {})
    assert vars(block).keys().isdisjoint({"pending", "iteration", "worker", "transform", "interleaver", "target_visit"})
    trace = RequestTrace(None, [])
    for state in (trace, trace.visits, trace.saves):
        assert not hasattr(state, "__dict__"), type(state)
    assert not vars(trace.receipt)


def test_requests_are_made_while_twice_the_running_ones_are_in_flight(lm_of, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = lm_of("llama", lower_traces="auto", max_running_requests=4)
    submit, wait, submitted, waited = lm.backend.submit, RequestHandle.wait, [], []

    def counted_submit(submission: Any) -> Any:
        submitted.append(submission)
        return submit(submission)

    def counted_wait(handle: RequestHandle, timeout: float | None = None) -> None:
        waited.append(len(submitted))
        wait(handle, timeout)

    monkeypatch.setattr(traces, "MADE_TOGETHER", 1)
    monkeypatch.setattr(lm.backend, "submit", counted_submit)
    monkeypatch.setattr(RequestHandle, "wait", counted_wait)
    with lm.generate(max_new_tokens=2) as tracer:
        rows = list().save()
        for i in range(12):
            with tracer.invoke([1 + i, 2]):
                rows.append(lm.model.layers[1].output[0, -1])
    assert len(rows) == len(submitted) == 12
    assert waited[:5] == [8, 9, 10, 11, 12]
    assert len(waited) == 12, "each is waited for once"
