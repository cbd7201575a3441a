"""Blocks that a wrong analysis would lower: each gives what it gives in the forward passes."""

from __future__ import annotations

import ast
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_idle import left_behind
from test_lowering import GENERATION, ONE_PASS, PROMPT, assert_equal, same

from pymllm_interp import LM
from pymllm_interp.client.backend import Submission
from pymllm_interp.client.calls import traces
from pymllm_interp.hooks.traces.blocks.trace import RequestTrace
from pymllm_interp.hooks.traces.lowering.analysis import lower
from pymllm_interp.hooks.traces.lowering.plan import BlockPlan, NotLowered

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]
LAYERS = "lm.model.layers"


@pytest.fixture
def lms(lm_of) -> tuple[LM, LM]:
    return lm_of("llama", lower_traces="auto"), lm_of("llama", lower_traces="off")


READS = {
    "a truth value as an index": [f"h = {LAYERS}[0].output[True, -1].save()"],
    "a mask of two dimensions": [f"h = {LAYERS}[0].output[[[True, False, True, False, True, False, True]], -1].save()"],
    "a mask that is a tensor": ["mask = torch.ones(1, 7) > 0", f"h = {LAYERS}[0].output[mask, -1].save()"],
    "a new dimension first": [f"h = {LAYERS}[0].output[None, -1].save()"],
    "a truth value for the rows": [f"h = {LAYERS}[0].output[0, True].save()"],
    "a read in the width of a text": [f"s = str(f'{{1.0:{{{LAYERS}[0].output.shape[0]}}}}').save()"],
    "relu in place": [
        f"h = {LAYERS}[0].output",
        "torch.nn.functional.relu(h, inplace=True)",
        f"o = {LAYERS}[1].output.save()",
    ],
    "relu in place, by position": [
        f"h = {LAYERS}[0].output",
        "torch.nn.functional.relu(h, True)",
        f"o = {LAYERS}[1].output.save()",
    ],
    "normalize into its argument": [
        f"h = {LAYERS}[0].output",
        "torch.nn.functional.normalize(h, 2.0, -1, 1e-12, h)",
        f"o = {LAYERS}[1].output.save()",
    ],
    "a list that is sorted": ["known['rows'].sort()", f"h = {LAYERS}[known['rows'][0]].output.save()"],
    "a generator with a name of later": [
        "i = 1",
        f"g = ({LAYERS}[i].output for _ in range(1))",
        "i = 0",
        "h = list(g).save()",
    ],
    "an iterator that is used twice": [
        "pairs, last = zip([1], [1]), 0",
        "for pair in pairs: last = pair[0]",
        "for pair in pairs: last = last - pair[0]",
        f"h = {LAYERS}[last].output.save()",
    ],
    "a name that may be a list of the caller": [
        "xs = [0] and known['rows']",
        "xs += [0]",
        f"h = {LAYERS}[known['rows'][-1]].output.save()",
    ],
    "a sum over many numbers": ["x = sum(range(10**6))", f"h = {LAYERS}[0].output.save()"],
    "a long chain of operators": ["x = " + "+".join(["1"] * 900), f"h = {LAYERS}[0].output.save()"],
}


@pytest.mark.parametrize("what", READS)
def test_one_pass_gives_the_same(what, lms):
    same(lms, READS[what], ONE_PASS)


STEPS = {
    "a value of before the loop": [
        f"h = {LAYERS}[0].output",
        "for _ in tracer.iter[1:]:",
        f"    g = ({LAYERS}[1].output[0, -1] + h[0, 2]).save()",
    ],
    "a value of the step before": [
        "before, xs = None, list().save()",
        "for _ in tracer.iter[:]:",
        "    if before is not None: xs.append(before[0, 0])",
        f"    before = {LAYERS}[0].output",
    ],
    "only the result": ["out = tracer.result.save()"],
    "only the tokens": ["xs = list().save()", "for _ in tracer.iter[:]:", "    xs.append(lm.samples)"],
    "no read": ["x = torch.ones(2).save()"],
    "an index that changes": [
        "i, xs = 0, list().save()",
        "for _ in tracer.iter[:]:",
        f"    xs.append({LAYERS}[i].output[0, -1])",
        "    i = 1 - i",
    ],
    "an index that is the step": [
        "xs = list().save()",
        "for s in tracer.iter[:]:",
        f"    xs.append({LAYERS}[s % 2].output[0, -1])",
    ],
    "steps beside numbers": [
        "xs = list().save()",
        "for s, i in zip(tracer.iter[:], range(3)):",
        f"    xs.append({LAYERS}[i % 2].output[0, -1])",
    ],
    "two loops": [
        "xs = list().save()",
        "for _ in tracer.iter[:2]:",
        f"    xs.append({LAYERS}[0].output[0, -1])",
        "for _ in tracer.iter[2:]:",
        f"    xs.append({LAYERS}[1].output[0, -1])",
    ],
    "a row of the generation": [f"h = {LAYERS}[0].output[0, 7].save()"],
}


@pytest.mark.parametrize("what", STEPS)
def test_a_generation_gives_the_same(what, lms):
    same(lms, STEPS[what], GENERATION)


def lowered(lm: LM, block: str, **names: Any) -> BlockPlan | NotLowered:
    """What the analysis says of a block, which does not run."""
    source = "with tracer:\n" + textwrap.indent(block, "    ")
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.With)
    block_of: Any = SimpleNamespace(
        node=node, lcls={"lm": lm, "torch": torch, **names}, code=compile(source, "<block>", "exec")
    )
    return lower(block_of, set(), lm.backend.lowered.model, True)


@pytest.mark.parametrize(
    "block",
    [
        "x = 10**10**9",
        "x = 1 << 10**9",
        "x = '%0999999999d' % 5",
        "s = 'a'\nfor i in range(60): s = s + s",
        "for i in range(10**9): pass",
        "for i in range(10**5):\n    for j in range(10**5): pass",
        "x = [0 for i in range(10**9)]",
        "x = list(range(10**9))",
        "x = sum(range(10**9))",
        "x = max(range(10**12))",
        "x = 1.5 in range(10**12)",
        "x = " + "-" * 3000 + "1",
    ],
)
def test_the_analysis_of_much_work_ends(block, lms):
    """Within the time of the test, and the memory."""
    try:
        found = lowered(lms[0], block)
    except (RecursionError, MemoryError):  # of the parser
        return
    assert isinstance(found, NotLowered)


class Hostile:
    """Raises, or counts, where the analysis uses it."""

    def __init__(self) -> None:
        self.__dict__["uses"] = []

    def __getattr__(self, name: str) -> Any:
        self.uses.append(name)
        raise ValueError(name)

    def __index__(self) -> int:
        self.uses.append("__index__")
        return 0

    def __bool__(self) -> bool:
        self.uses.append("__bool__")
        return True

    def __eq__(self, other: object) -> bool:
        self.uses.append("__eq__")
        return True

    def __hash__(self) -> int:
        self.uses.append("__hash__")
        return hash(torch.abs)

    def __call__(self, *arguments: Any) -> Any:
        self.uses.append("__call__")


class HostileList(list):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the analysis runs code of the caller")

    __iter__ = __len__ = __getitem__  # pyright: ignore


@pytest.mark.parametrize(
    "block",
    [
        "it()",
        "x = [1, 2][it]",
        "x = {1: 2}[it]",
        "x = d[it]",
        "x = lm.model.layers[it]",
        "if it: pass",
        "x = it == 1",
        "x = [it] == [1]",
        "x = str([it])",
        "x = f'{it}'",
        "x = torch.stack([it])",
        "for i in it: pass",
        "x = many[0]",
        "for i in many: pass",
        "if many: pass",
        "x = len(many)",
        "x = d.get(it)",
    ],
)
def test_the_analysis_runs_no_code_of_the_caller(block, lms):
    it = Hostile()
    assert isinstance(lowered(lms[0], block, it=it, many=HostileList(), d={1: 2}), NotLowered)
    assert not [use for use in it.uses if use != "__class__"]


class Noisy(dict):
    def __missing__(self, key: Any) -> int:
        self[key] = 1
        return 1


def test_the_analysis_adds_no_entry_to_a_dict_of_the_caller(lms):
    noisy = Noisy()
    lowered(lms[0], "h = lm.model.layers[noisy['layer']].output.save()", noisy=noisy)
    assert not noisy


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.enable_grad,
    ],
    ids=["inference mode", "autocast", "a default device", "gradients"],
)
def test_modes_of_the_callers_thread_change_no_value(mode, lms):
    found = []
    weight = torch.randn(lms[0].cfg.hidden_size, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for lm in lms:
        with mode():
            with lm.trace(PROMPT):
                h = (lm.model.layers[0].output @ weight).save()
                z = (torch.ones(2) * h.sum()).save()
        found.append((h, z))
    assert_equal(found[0], found[1], "values")


def test_a_wrong_prompt_of_an_invoke_is_the_same_error(lms):
    messages = []
    for lm in lms:
        with pytest.raises(Exception) as raised:
            with lm.trace() as tracer:
                with tracer.invoke(PROMPT):
                    h = lm.model.layers[0].output.save()  # noqa: F841
                with tracer.invoke([5, "a"]):
                    g = lm.model.layers[0].output.save()  # noqa: F841
        messages.append((type(raised.value), str(raised.value)))
    assert messages[0] == messages[1]


# -- requests that are submitted while others are made ---------------------------------------


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MADE_TOGETHER", 2)


def many_invokes(lm: LM, prompts: list[Any], max_new_tokens: int = 3) -> tuple[Any, list[Any]]:
    with lm.generate(max_new_tokens=max_new_tokens) as tracer:
        rows = list().save()
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    rows.append(lm.model.layers[0].output[0, -1])
                    rows.append(lm.model.layers[1].output[0, -1])
    return tracer, rows


def test_parts_of_a_trace_are_as_the_whole(lms, in_parts):
    prompts = [PROMPT[: 1 + i] for i in range(5)]
    (tracer, rows), (_, wanted) = (many_invokes(lm, prompts) for lm in lms)
    assert len(rows) == 30 and [receipt.lowered for receipt in tracer.receipts] == [True] * 5
    assert_equal(rows, wanted, "rows")


def test_a_wrong_prompt_of_a_later_part_is_the_same_error_and_leaves_nothing(lms, in_parts):
    prompts, messages = [PROMPT, PROMPT, PROMPT, [5, "a"], PROMPT], []
    for lm in lms:
        with pytest.raises(Exception, match="invoke 3") as raised:
            many_invokes(lm, prompts, max_new_tokens=100)
        messages.append((type(raised.value), str(raised.value)))
        raised = None
    assert messages[0] == messages[1]
    assert not left_behind(lms[0])


def test_a_trace_that_is_cancelled_between_its_parts_ends_with_all_of_them(lms, in_parts, monkeypatch):
    lm, made = lms[0], []
    served: list[RequestTrace] = []
    submit, lower = lm.backend.submit, lm.backend.lowered.lower

    def lowers(mode: str, found: list[RequestTrace], inputs: Any) -> Any:
        served.extend(found)
        return lower(mode, found, inputs)

    def submits(submission: Submission) -> Any:
        made.append(submission)
        if len(made) == 2:
            served[0].cancel()
        return submit(submission)

    monkeypatch.setattr(lm.backend.lowered, "lower", lowers)
    monkeypatch.setattr(lm.backend, "submit", submits)
    before = lm.engine.stats()["steps"]
    try:
        many_invokes(lm, [PROMPT] * 6, max_new_tokens=100)
    except Exception as error:
        assert "context holds" not in str(error)
    assert len(made) == 3 and lm.engine.stats()["steps"] - before < 100
    assert not left_behind(lm)


def test_a_plan_with_edits_is_made_once_for_equal_blocks(lms, monkeypatch):
    """For one vector once a ``with``: its values may change between two of them. For a number once."""
    lm, made = lms[0], []
    monkeypatch.setattr(lm.backend.lowered, "_known", {})
    monkeypatch.setattr("pymllm_interp.client.calls.lowered.lower", lambda *args: made.append(lower(*args)) or made[-1])
    v, found = torch.ones(lm.cfg.hidden_size), []
    for factor in (1.0, 3.0):
        v.fill_(factor)
        for by_vector in (True, False):
            before = len(made)
            with lm.trace() as tracer:
                rows = list().save()
                for i in range(4):
                    with tracer.invoke(PROMPT[: 2 + i]):
                        if by_vector:
                            lm.model.layers[0].output[:] += v
                        else:
                            lm.model.layers[0].output[:] *= 2
                        rows.append(lm.model.layers[0].output[0, -1])
            found.append((len(made) - before, torch.stack(rows)))
            assert all(receipt.lowered for receipt in tracer.receipts)
    assert [count for count, _ in found] == [1, 1, 1, 0]
    torch.testing.assert_close(found[2][1] - found[0][1], torch.full_like(found[0][1], 2.0))
    assert torch.equal(found[1][1], found[3][1])


def test_a_list_of_the_with_that_another_invoke_fills(lms):
    found = []
    for lm in lms:
        with lm.trace() as tracer:
            xs: list[Any] = []
            with tracer.invoke(PROMPT):
                xs.append(lm.model.layers[0].output[0, -1])
            with tracer.invoke(PROMPT):
                h = lm.model.layers[len(xs)].output.save()
        found.append(h)
    assert_equal(found[0], found[1], "value")


def test_a_name_that_another_invoke_binds(lms):
    found = []
    for lm in lms:
        layer = 0
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                layer = 1
                first = lm.model.layers[layer].output.save()
            with tracer.invoke(PROMPT):
                second = lm.model.layers[layer].output.save()
        found.append((first, second))
    assert_equal(found[0], found[1], "values")


def test_a_module_of_another_model(lms, lm_of):
    other, found = lm_of("qwen3", lower_traces="off"), []
    for lm in lms:
        try:
            with lm.trace(PROMPT):
                h = other.model.layers[0].output.save()
            found.append(h)
        except Exception as error:
            found.append((type(error), str(error)))
    assert_equal(found[0], found[1], "value")


def test_nothing_is_left_of_many_traces(lms):
    lm = lms[0]
    for i in range(60):
        try:
            with lm.trace(PROMPT[: 1 + i % 7]):
                h = lm.model.layers[0].output[0, 3].save()
        except IndexError:
            pass
    with pytest.raises(ZeroDivisionError):
        with lm.generate(PROMPT, max_new_tokens=3) as tracer:
            for _ in tracer.iter[:]:
                h = lm.model.layers[0].output.save()  # noqa: F841
                _ = 1 // (tracer is None)
    del tracer  # pyright: ignore[reportPossiblyUnboundVariable]
    assert not left_behind(lm)


def test_a_list_of_lowered_and_other_blocks_is_in_the_order_of_the_pass(lms):
    found = []
    for lm in lms:
        with lm.trace() as tracer:
            rows = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            with tracer.invoke(PROMPT):
                rows.append(lm.model.layers[0].output[0, -1])
                lm.model.layers[0].output[:] = 0
                rows.append(lm.model.layers[2].output[0, -1])
            with tracer.invoke(PROMPT[:3]):
                rows.append(lm.model.layers[1].output[0, -1])
        found.append(rows)
    assert_equal(found[0], found[1], "rows")


def test_lowered_blocks_beside_others_leave_nothing(lms):
    with lms[0].trace() as tracer:
        with tracer.invoke(PROMPT):
            lms[0].model.layers[0].output[:] **= 2
        with tracer.invoke(PROMPT):
            h = lms[0].model.layers[0].output.save()
    assert h.any() and [receipt.lowered for receipt in tracer.receipts] == [False, False]
    assert not left_behind(lms[0])


def test_captures_of_a_trace_without_any_are_as_many(lms):
    numbers = []
    for lm in lms:
        with lm.trace(PROMPT) as tracer:
            h = lm.model.layers[0].output.save()
        assert h.any()
        numbers.append([len(found) for found in tracer.captures])
    assert numbers[0] == numbers[1]
