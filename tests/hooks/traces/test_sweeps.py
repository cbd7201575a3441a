"""Traces of many invokes with one code: what is found once for all of them, and rows that are put into lists without a block."""

# pyright: reportMissingImports=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalMemberAccess=false

from __future__ import annotations

import gc
import pickle
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from helpers_idle import left_behind
from test_lowering import assert_equal

from pymllm_interp import LM
from pymllm_interp.client.calls.lowered import Lowered
from pymllm_interp.hooks.traces.blocks.block_analysis import all_names, variables_of
from pymllm_interp.hooks.traces.lowering.ahead import RowsAhead
from pymllm_interp.hooks.traces.lowering.step_loop import rows_in_place

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]
PROMPTS = [[1 + (3 * i + j) % 40 for j in range(2 + i % 5)] for i in range(12)]


@pytest.fixture
def lms(lm_of) -> tuple[LM, LM]:
    return lm_of("llama", lower_traces="auto"), lm_of("llama", lower_traces="off")


def sweep(lm: LM, prompts: list[Any] = PROMPTS) -> tuple[Any, list[torch.Tensor]]:
    with lm.generate(max_new_tokens=2, ignore_eos=True) as tracer:
        rows = list().save()
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows.append(lm.model.layers[1].output[0, -1])
    return tracer, rows


def assert_equal_without_order(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert_equal(*(sorted(rows, key=lambda row: row.tolist()) for rows in (ours, theirs)), "rows")


def test_a_sweep_in_pieces_of_prompts_has_the_rows_of_the_passes(lm_of, lms):
    chunked = lm_of("llama", lower_traces="require", max_num_tokens=3, page_size=1)
    _, ours = sweep(chunked)
    for prompt, row in zip(PROMPTS, ours, strict=True):
        _, (wanted,) = sweep(lms[1], [prompt])
        torch.testing.assert_close(row, wanted, rtol=1e-4, atol=1e-4)  # products differ by the batch


def test_a_prompt_that_runs_into_its_timeout_costs_the_others_nothing(lms):
    found = []
    for lm in lms:
        with pytest.raises(TimeoutError), lm.generate(max_new_tokens=2, ignore_eos=True) as tracer:
            rows = list().save()
            for i, prompt in enumerate(PROMPTS):
                with tracer.invoke(prompt, timeout=1e-9 if i == 4 else None):
                    rows.append(lm.model.layers[1].output[0, -1])
        found.append(rows)
    assert len(found[0]) == len(PROMPTS) - 1
    # The prompt is in the company of the others, or not: last bits depend on it.
    ours, theirs = (sorted(rows, key=lambda row: row.tolist()) for rows in found)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not left_behind(lms[0])


def test_names_that_differ_between_invokes_are_each_invokes_own(lms):
    """Lists, layers and helpers that one name stands for, in invokes of one code."""
    found = []
    for lm in lms:
        lists = []

        def opened(tracer: Any, prompt: list[int], into: list[Any], layer: int) -> None:
            with tracer.invoke(prompt):
                into.append(lm.model.layers[layer].output[0, -1])  # noqa: B023

        with lm.trace() as tracer:
            first, second = list().save(), list().save()
            first.append("there before")
            for i, prompt in enumerate(PROMPTS):
                opened(tracer, prompt, (first, second)[i % 2], i % 3)
        lists.append((first, second))
        found.append(lists)
        assert all(receipt.lowered == (lm is lms[0]) for receipt in tracer.receipts)
    for (ours,), (theirs,) in [found]:
        assert ours[0][0] == theirs[0][0] == "there before"
        assert_equal_without_order(ours[0][1:], theirs[0][1:])
        assert_equal_without_order(ours[1], theirs[1])


def test_a_name_that_is_no_list_runs_the_blocks(lms):
    class Kept(list):
        pass

    found = []
    for lm in lms:
        with lm.trace() as tracer:
            rows = Kept().save()
            for prompt in PROMPTS[:4]:
                with tracer.invoke(prompt):
                    rows.append(lm.model.layers[1].output[0, -1])
        found.append(rows)
    assert type(found[0]) is Kept
    assert_equal(list(found[0]), list(found[1]), "rows")


def test_rows_of_a_sweep_are_apart_from_each_other(lms):
    tracer, rows = sweep(lms[0])
    assert all(receipt.lowered and receipt.reads == 1 for receipt in tracer.receipts)
    before = [row.clone() for row in rows]
    rows[3].fill_(7)
    rows[5].requires_grad_()
    for i, (row, wanted) in enumerate(zip(rows, before, strict=True)):
        assert row._base is None and (i == 3 or torch.equal(row.detach(), wanted))
        assert len(pickle.dumps(row)) < row.nbytes + 2000


def test_requests_of_a_sweep_share_no_receipt_and_no_parameters_that_change(lms):
    tracer, _ = sweep(lms[0])
    assert len({id(receipt) for receipt in tracer.receipts}) == len(PROMPTS)
    with pytest.raises(FrozenInstanceError):  # requests with equal counts share it
        tracer.receipts[0].captures[0].prompt_rows = 99
    tracer.receipts[0].captures.clear()
    assert [receipt.captures[0].prompt_rows for receipt in tracer.receipts[1:]] == [1] * (len(PROMPTS) - 1)
    assert [receipt.captures[0].generated_rows for receipt in tracer.receipts[1:]] == [0] * (len(PROMPTS) - 1)


def test_keywords_of_single_invokes_are_their_own(lms):
    """What was read of one invoke's keywords is not another's, though their prompts have one length."""
    found = []
    for lm in lms:
        with lm.generate(ignore_eos=True) as tracer:
            tokens = list().save()
            for new in (1, 3, 3, 2, 1):
                with tracer.invoke([5, 6, 7], max_new_tokens=new):
                    tokens.append(tracer.result)
        found.append([out.shape[1] - 3 for out in tokens])
    assert sorted(found[0]) == sorted(found[1]) == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_in_place_are_tensors_of_their_own(dtype):
    block = torch.randn(9, 3, 16).to(dtype)
    for part in (block[:, 1], block[:, 2:3], block[1:, 0]):
        rows = rows_in_place(part)
        assert len(rows) == len(part)
        for row, wanted in zip(rows, part, strict=True):
            assert torch.equal(row, wanted) and row.dtype == dtype and row.shape == wanted.shape
            assert row.data_ptr() == wanted.data_ptr() and row.untyped_storage().nbytes() == row.nbytes
            assert row._base is None and row.is_contiguous()
    edits = rows[1]._version
    rows[0].fill_(3)
    assert rows[1]._version == edits and torch.equal(block[1, 0], rows[0])


def kept_steps(lm: LM, steps: list[int], layers: tuple[int, ...], rows: Any = -1) -> list[list[torch.Tensor]]:
    """Rows of a loop over steps, of a request for each number of steps."""
    with lm.generate(ignore_eos=True) as tracer:
        lists = dict().save()
        for i, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt, max_new_tokens=steps[i]):
                into = list()
                for _ in tracer.iter[:]:
                    for layer in layers:
                        into.append(lm.model.layers[layer].output[0, rows])
                lists[i] = into
    assert all(receipt.lowered == (lm.backend.lowered.mode != "off") for receipt in tracer.receipts)
    return [lists[i] for i in range(len(steps))]


@pytest.mark.parametrize("layers", [(1,), (0, 2), (1, 1)])
@pytest.mark.parametrize("rows", [-1, slice(None), slice(-1, None)])
def test_tensors_made_while_the_requests_run(lms, layers, rows, monkeypatch):
    """They are those of the passes, in separate storage, also where requests end before others."""
    taken = []
    take = RowsAhead.take
    monkeypatch.setattr(RowsAhead, "take", lambda self, *given: taken.append(take(self, *given)) or taken[-1])
    monkeypatch.setattr("pymllm_interp.hooks.traces.lowering.ahead.FEWEST_ROWS", 1)
    monkeypatch.setattr("pymllm_interp.hooks.traces.lowering.ahead.FEWEST_TENSORS", 1)
    monkeypatch.setattr("pymllm_interp.client.calls.traces.IDLE_S", 1e-4)
    steps = [60, 60, 7, 1, 2, 60, 33, 60, 3, 60, 60, 60]
    ours, theirs = (kept_steps(lm, steps, layers, rows) for lm in lms)
    assert any(taken)
    for own, wanted in zip(ours, theirs, strict=True):
        assert type(own) is list and len(own) == len(wanted) > 0
        for row, other in zip(own, wanted, strict=True):
            assert torch.equal(row, other) and row.stride() == other.stride() and row._base is None
            assert row.untyped_storage().nbytes() == row.nbytes
    every = [row for own in ours for row in own]
    assert len({row.data_ptr() for row in every}) == len({id(row) for row in every})


def test_python_calls_after_requests_do_not_grow_with_their_steps(lms, monkeypatch):
    """A list of rows takes no call of Python's for each row."""
    found, replayed = [], Lowered.replay

    def counted(self: Lowered, ended: Any) -> None:
        calls = [0]
        sys.setprofile(lambda frame, event, given: calls.append(1) if event in ("call", "c_call") else None)
        try:
            replayed(self, ended)
        finally:
            sys.setprofile(None)
        found.append(len(calls) / len(ended))

    monkeypatch.setattr(Lowered, "replay", counted)
    for steps in (10, 10, 60):
        kept_steps(lms[0], [steps] * len(PROMPTS), (0, 1, 2))
    assert found[2] < found[1] + 25 and found[2] < 900


def test_the_collector_does_not_look_at_rows_that_are_dropped(lms):
    """Collections of Python's garbage while a thousand rows live would look at each of them, and free none."""
    seen = []

    def look(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(sum(type(one) is torch.Tensor for one in gc.get_objects(generation=0)))

    def drop(steps: int) -> int:
        with lms[0].generate(max_new_tokens=steps, ignore_eos=True) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    kept = list().save()
                    for _ in tracer.iter[:]:
                        for layer in (0, 1, 2):
                            kept.append(lms[0].model.layers[layer].output[0, -1])
        return len(kept)

    drop(60)
    gc.callbacks.append(look)
    try:
        rows = drop(60)
        assert rows == 180
        gc.collect()
    finally:
        gc.callbacks.remove(look)
    assert max(seen) < len(PROMPTS) * rows / 4, seen


def test_variables_of_a_block_are_names_that_are_no_attributes():
    source = "import a.b as c\nfrom d import e\nx = f.g(h)[k]\nz.y = lambda q: w.v + q\ndel u\n[i for i in t]\n"
    code = compile(source, "<block>", "exec")
    assert {"f", "h", "k", "x", "z", "w", "u", "t", "c", "e"} <= set(variables_of(code))
    assert not {"g", "y", "v"} & set(variables_of(code)) and {"g", "y", "v"} <= all_names(code)
