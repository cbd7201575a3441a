"""InterpModelRunner and NNsightRequestHelper as seed 004 documents them: rows N1 to N19, and V36 and V51 with traces."""

from __future__ import annotations

import inspect
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_runner import Steps, make_runner, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from pymllm_interp import LM, SamplingParams
from pymllm_interp.core.request import Request
from pymllm_interp.core.step import ModelRunnerOutput, RequestHooks, ScheduledRequest, SchedulerOutput
from pymllm_interp.hooks.traces.blocks.trace import RequestTrace
from pymllm_interp.hooks.traces.serving.batch_groups import NNsightRequestHelper
from pymllm_interp.hooks.traces.serving.interleaver import EngineInterleaver
from pymllm_interp.hooks.traces.syntax.envoy import TracedModel
from pymllm_interp.runner import InterpModelRunner, ModelRunner
from pymllm_interp.runner.async_output import AsyncOutput

PROMPT = [5, 17, 3, 80, 44, 9, 61]
OTHERS = [[7, 2, 93], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def lm(lm_of) -> LM:
    # Without a prefix cache: the rows of a step, and so their last bits, would depend on what ran before.
    return lm_of("llama", kv_cache_tokens=512, page_size=4, enable_prefix_caching=False)


@contextmanager
def held(lm: LM, submissions: int) -> Iterator[None]:
    """The engine holds still until so many submissions wait for it, so that one step takes them all."""
    gate = threading.Event()

    def open_gate() -> None:
        while len(lm.engine._inbox) < submissions and not gate.is_set():
            time.sleep(0.001)
        gate.set()

    lm.engine._post(lambda: gate.wait(600) and None)
    while lm.engine._inbox:  # until the engine is at the gate
        time.sleep(0.001)
    watcher = threading.Thread(target=open_gate)
    watcher.start()
    try:
        yield
    finally:
        gate.set()
        watcher.join()


def plain_beside(lm: LM, block: Callable[[], Any]) -> tuple[list[Any], Any]:
    """Plain requests in one step with a single-pass trace; their outputs, and what the block gave or raised."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=5)
    with held(lm, 3):
        handles = [lm.submit(prompt, params) for prompt in OTHERS]
        try:
            given: Any = block()
        except Exception as error:
            given = error
    outputs = [handle.result(timeout=600) for handle in handles]
    return [(out.token_ids, out.logprobs, out.finish_reason) for out in outputs], given


# -- the runner's parts -------------------------------------------------------------


def test_n01_it_is_a_model_runner_and_the_base_works_alone(model_folder):
    """N1: that the base imports nothing of hooks: tests/test_architecture.py."""
    assert issubclass(InterpModelRunner, ModelRunner) and not hasattr(ModelRunner(), "nnsight_model")
    steps = Steps(make_runner(model_folder("llama")))
    interp = Steps(make_runner(model_folder("llama"), InterpModelRunner))
    a, b = steps.add(PROMPT, 5), interp.add(PROMPT, 5)
    steps.run()
    interp.run()
    assert a.output_token_ids == b.output_token_ids and len(a.output_token_ids) == 5


def test_n02_n03_the_tree_and_the_helper_are_the_runners_own_and_no_weight_is_copied(lm):
    """N2, N3."""
    runners = [make_runner(CONFIGS["llama"](), InterpModelRunner) for _ in range(2)]
    for runner in runners:
        assert isinstance(runner.nnsight_model, TracedModel)
        assert runner.nnsight_model._module is runner.model
        envoy = runner.nnsight_model.model.layers[1].mlp.down_proj
        assert envoy._module.weight.data_ptr() == runner.model.model.layers[1].mlp.down_proj.weight.data_ptr()
        assert type(runner.nnsight_request_helper) is NNsightRequestHelper
    one, two = (runner.nnsight_request_helper for runner in runners)
    assert one is not two and one.req_id_to_batch_group_idx is not two.req_id_to_batch_group_idx
    assert one.num_prompts_in_mediator is not two.num_prompts_in_mediator
    assert "req_id_to_batch_group_idx" not in vars(NNsightRequestHelper)
    assert lm.runner.nnsight_model is lm and lm._module is lm.runner.model


def test_n12_load_model_wraps_once_after_the_weights_are_there(model_folder, oracle):
    """N12."""
    seen = []
    expected = oracle("llama").model.norm.weight

    def wrap(module: torch.nn.Module, interleaver: EngineInterleaver) -> TracedModel:
        seen.append(torch.equal(module.model.norm.weight, expected))  # pyright: ignore
        return TracedModel(module, interleaver=interleaver)

    class Runner(InterpModelRunner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, wrap=wrap)

    runner = make_runner(model_folder("llama"), Runner)
    assert seen == [True]
    runner.load_model(load_dummy_weights=True)  # arguments reach the base
    assert seen == [True, False] and runner.nnsight_model._module is runner.model


# -- batch groups -----------------------------------------------------------------------


class Batch:
    """A helper fed with requests that have no blocks, so that their rows alone are in question."""

    def __init__(self) -> None:
        self.model = make_runner(CONFIGS["llama"](), InterpModelRunner).nnsight_model
        self.helper = NNsightRequestHelper(self.model.interleaver)

    def request(
        self, name: str, prompt: int, traced: bool, of: RequestTrace | None = None, prompts: int = 1
    ) -> Request:
        params = SamplingParams(temperature=0)
        request = Request(name, [1] * prompt, params, 16, seed=0)
        if traced:
            request.trace = RequestTrace(None, [])
            request.trace.num_prompts = prompts
            request.hooks = RequestHooks(max_tokens=16, trace_key=request.trace.key)
            self.helper.register(request.trace)
            if of is not None:
                request.trace.trace_id = of.trace_id
        return request

    def step(self, *entries: tuple[Request, int]) -> list[ScheduledRequest]:
        for request, _ in entries:
            request.req_pool_idx = request.req_pool_idx or 1
            self.helper.enter([request.entering()])
        rows = [request.scheduled(size) for request, size in entries]
        self.helper.process_new_reqs(rows)
        return rows


@pytest.fixture(scope="module")
def batch_model() -> Batch:
    return Batch()


@pytest.fixture
def batch(batch_model) -> Batch:
    batch_model.helper = NNsightRequestHelper(batch_model.model.interleaver)
    return batch_model


def token_rows(helper: NNsightRequestHelper) -> dict[str, tuple[int, int]]:
    """(start, size) of each traced request, through the seed's index of its batch group."""
    return {
        rid: (helper.batch_groups[i].start, helper.batch_groups[i].size) for rid, i in helper.ids_to_batch_group.items()
    }


def test_n04_n07_groups_follow_new_finished_and_reordered_requests(batch):
    """N4, N7: plain only, hooked only, interleaved, chunked neighbours; golden."""
    p, q = batch.request("p", 4, False), batch.request("q", 9, False)
    a, b = batch.request("a", 3, True), batch.request("b", 5, True)
    helper = batch.helper
    batch.step((p, 4), (q, 2))
    assert helper.req_id_to_batch_group_idx == {} and helper.traces == []
    batch.step((a, 3), (b, 5))
    assert token_rows(helper) == {"a": (0, 3), "b": (3, 5)}
    batch.step((p, 1), (a, 1), (q, 7), (b, 1))
    assert token_rows(helper) == {"a": (1, 1), "b": (9, 1)}
    assert helper.req_id_to_batch_group_idx == {"a": 0, "b": 1}, "plain requests are skipped, their rows are counted"
    batch.step((b, 1), (p, 1), (a, 1))
    assert token_rows(helper) == {"b": (0, 1), "a": (2, 1)} and helper.traces == [b.trace, a.trace]
    helper.process_finished_reqs([b.ending()])
    assert "b" not in helper.req_id_to_batch_group_idx
    batch.step((p, 1), (a, 1))
    assert token_rows(helper) == {"a": (1, 1)}
    helper.process_finished_reqs([a.ending()])
    batch.step((p, 1))
    assert helper.req_id_to_batch_group_idx == {} == dict(helper.interleaver_to_ids)


def test_n05_prompts_of_a_trace_are_counted_down_as_they_finish(batch):
    """N5."""
    first = batch.request("0", 2, True, prompts=3)
    requests = [first, *(batch.request(str(i), 2, True, of=first.trace, prompts=3) for i in (1, 2))]
    batch.step(*((request, 2) for request in requests))
    counts, key = batch.helper.num_prompts_in_mediator, first.trace.trace_id
    assert counts == {key: 3}
    assert dict(batch.helper.interleaver_to_ids) == {key: {"0", "1", "2"}}
    batch.helper.process_finished_reqs([requests[1].ending()])
    assert counts == {key: 2}
    batch.helper.process_finished_reqs([requests[0].ending(), requests[2].ending()])
    assert counts.get(key, 0) == 0 and not batch.helper.interleaver_to_ids


def test_n06_the_mapping_views_are_read_only(batch):
    """N6."""
    a = batch.request("a", 3, True, prompts=2)
    b = batch.request("b", 2, True, of=a.trace, prompts=2)
    batch.step((a, 3), (batch.request("p", 4, False), 4), (b, 2))
    helper = batch.helper
    assert dict(helper.ids_to_batch_group) == {"a": 0, "b": 1}, "an index, as nnsight has it"
    assert dict(helper.flat_batch_groups) == {a.trace.trace_id: [(0, 3), (7, 2)]}
    assert dict(helper.interleaver_to_ids) == {a.trace.trace_id: {"a", "b"}}
    for view in (helper.ids_to_batch_group, helper.interleaver_to_ids, helper.flat_batch_groups):
        with pytest.raises(TypeError):
            view["x"] = 1  # pyright: ignore
    helper.flat_batch_groups[a.trace.trace_id].clear()
    assert dict(helper.flat_batch_groups) == {a.trace.trace_id: [(0, 3), (7, 2)]}, "a view's lists are copies"


@settings(max_examples=80, deadline=None)
@given(entries=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
def test_n08_groups_are_disjoint_ordered_token_ranges_inside_the_batch(batch_model, entries):
    """N8."""
    batch_model.helper = NNsightRequestHelper(batch_model.model.interleaver)
    requests = [batch_model.request(str(i), size, traced) for i, (size, traced) in enumerate(entries)]
    batch_model.step(*((request, size) for request, (size, _) in zip(requests, entries, strict=True)))
    groups = token_rows(batch_model.helper)
    total, end = sum(size for size, _ in entries), 0
    assert list(groups) == [str(i) for i, (_, traced) in enumerate(entries) if traced]
    for i, (size, traced) in enumerate(entries):
        if traced:
            start, length = groups[str(i)]
            assert length == size and start >= end and start + length <= total
            assert start == sum(s for s, _ in entries[:i])
            end = start + length
            rows = requests[i].trace.rows
            assert (rows.start, rows.size, rows.total) == (start, length, total)


def test_n09_unflatten_points_to_sampled_rows_with_plain_and_unfinished_requests_between(batch):
    """N9: a prompt in chunks samples nothing and has no row; a plain one has."""
    p, chunked = batch.request("p", 4, False), batch.request("c", 9, False)
    a, b = batch.request("a", 3, True), batch.request("b", 5, True)
    rows = batch.step((a, 3), (p, 4), (chunked, 2), (b, 5))
    assert [(t.rows.logit_start, t.rows.logit_total) for t in (a.trace, b.trace)] == [(0, 3), (2, 3)]
    batch.helper.unflatten([row for row in rows if row.samples])
    assert [(t.rows.start, t.rows.size, t.rows.total) for t in (a.trace, b.trace)] == [(0, 1, 3), (2, 1, 3)]


def test_n10_a_requests_values_do_not_depend_on_its_place_in_the_batch(lm):
    """N10: shuffled among others, each sees its own rows."""
    prompts = [PROMPT, [3], random_ids(9, seed=4)]

    def read(order: list[int]) -> dict[int, torch.Tensor]:
        found = {}
        with lm.trace() as tracer:
            for i in order:
                with tracer.invoke(prompts[i]):
                    found[i] = lm.model.layers[1].mlp.output.save()
        return found

    solo = {i: read([i])[i] for i in range(3)}
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        for i, value in read(order).items():
            assert value.shape == (1, len(prompts[i]), 72)
            torch.testing.assert_close(value, solo[i], rtol=0, atol=1e-4)


# -- a step with blocks --------------------------------------------------------------------


def test_n11_nothing_is_left_of_finished_requests(lm):
    """N11: results are served, mappings dropped, stuck code ended."""
    for i in range(40):
        with lm.generate([1, 2, 3 + i], max_new_tokens=2) as tracer:
            out = tracer.result.save()
        assert out.shape == (1, 5)
    helper = lm.runner.nnsight_request_helper
    assert (
        not helper.attached
        and not helper.req_id_to_batch_group_idx
        and not helper.num_prompts_in_mediator
        and not helper.interleaver_to_ids
    )
    assert not lm.interleaver.traces and not lm.interleaver.points
    assert len(lm.runner.req_states.req_id_to_index) <= 1, "all but the last, which the next step drops"
    lm.engine.call(lm.engine.scheduler.check_integrity)


def test_n11_a_hook_that_waits_for_what_never_comes_ends_its_own_request_only(lm):
    """N11: one that waits for a module out of order, one for step 100 of 5; the neighbours notice nothing."""

    def fine() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[2].output.save()

    def out_of_order() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[2].output.save()
            lm.model.layers[0].output.save()

    quiet, given = plain_beside(lm, fine)
    assert given is None
    loud, given = plain_beside(lm, out_of_order)
    assert type(given).__name__ == "OutOfOrderError" and "layers.0" in str(given)
    assert loud == quiet
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lm.generate(PROMPT, max_new_tokens=5) as tracer:
            steps = list().save()
            for _ in tracer.iter[5:100]:
                steps.append(lm.model.layers[0].output)
            out = tracer.result.save()
    assert steps == [] and out.shape == (1, len(PROMPT) + 5)
    assert any("100" in str(w.message) for w in caught), "it is told, not passed over"


def test_n13_a_failing_hook_ends_its_own_request_and_the_others_finish_bit_equal(lm):
    """N13: and N19's wrong shape among the failures."""

    def fine() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[1].output.save()

    def raising() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[1].output.save()
            raise ZeroDivisionError("mine")

    def misshapen() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[1].output = torch.zeros(1, 2, 72)

    quiet, _ = plain_beside(lm, fine)
    assert [reason for *_, reason in quiet] == ["length", "length"]
    for block, error in ((raising, ZeroDivisionError), (misshapen, ValueError)):
        loud, given = plain_beside(lm, block)
        assert isinstance(given, error), given
        assert loud == quiet
    parameters = list(inspect.signature(InterpModelRunner.execute_model).parameters)
    assert parameters == ["self", "scheduler_output", "intermediate_tensors"]


def test_n13_the_error_stands_in_the_steps_output_under_its_owner(lm, monkeypatch):
    """N13."""
    outputs: list[ModelRunnerOutput] = []
    sample = InterpModelRunner.sample_tokens_async

    def spy(self: InterpModelRunner) -> AsyncOutput | None:
        sampled = sample(self)
        assert sampled is not None
        outputs.append(sampled.output)
        return sampled

    monkeypatch.setattr(InterpModelRunner, "sample_tokens_async", spy)

    def raising() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[1].output.save()
            raise KeyError("x")

    plain_beside(lm, raising)
    failed = [output for output in outputs if output.errors]
    assert len(failed) == 1 and len(failed[0].req_ids) == 3
    ((owner, error),) = failed[0].errors.items()
    assert owner in failed[0].req_ids and isinstance(error, KeyError)


def test_n14_finish_nnsight_gives_each_requests_saves_under_its_own_id(lm, monkeypatch):
    """N14: one name in two requests does not collide."""
    monkeypatch.setattr(lm.backend.lowered, "mode", "off")
    outputs: list[ModelRunnerOutput] = []
    finish = InterpModelRunner.finish_nnsight
    monkeypatch.setattr(
        InterpModelRunner, "finish_nnsight", lambda self, done: outputs.append(finish(self, done)) or outputs[-1]
    )
    with lm.trace() as tracer:
        with tracer.invoke(PROMPT):
            h = lm.model.layers[0].output.save()
            unsaved = lm.model.layers[1].output  # noqa: F841
        with tracer.invoke([4, 5]):
            h = lm.model.layers[0].output.save()
    assert h.shape[1] in (2, len(PROMPT))
    saves = {rid: values for output in outputs for rid, values in output.saves.items()}
    assert len(saves) == 2 and all(set(values) == {"h"} for values in saves.values())
    shapes = sorted(values["h"].shape[1] for values in saves.values())
    assert shapes == [2, len(PROMPT)]
    for values in saves.values():
        value = values["h"]
        assert value.dtype == torch.float32 and value.device.type == "cpu" and not value.requires_grad
        assert value.untyped_storage().nbytes() == value.nbytes, "a save does not pin the batch"
    assert all(isinstance(output, ModelRunnerOutput) for output in outputs)


def test_n15_hidden_states_logits_and_samples_are_hook_points(lm, oracle):
    """N15: a greedy token is the argmax of the patched logits; an assigned sample is what generation goes on with."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        theirs = oracle("llama")(input_ids=ids, output_hidden_states=True)
    with lm.generate(PROMPT, max_new_tokens=1):
        hidden = lm.model.layers[0].output.save()
        logits = lm.logits.save()
        sample = lm.samples.save()
    torch.testing.assert_close(hidden, theirs.hidden_states[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits, theirs.logits[:, -1], rtol=0, atol=1e-4)
    assert logits.shape == (1, 97) and sample.shape == (1, 1) and int(sample) == int(theirs.logits[0, -1].argmax())
    with lm.generate(PROMPT, max_new_tokens=1) as tracer:
        lm.logits[:, 55] = 1e6
        out = tracer.result.save()
    assert out[0, -1] == 55
    with lm.generate(PROMPT, max_new_tokens=2) as tracer:
        lm.samples = torch.tensor([[31]])
        out = tracer.result.save()
    with torch.no_grad():
        following = int(oracle("llama")(input_ids=torch.tensor([[*PROMPT, 31]])).logits[0, -1].argmax())
    assert out[0].tolist() == [*PROMPT, 31, following]


def test_n15_a_sample_outside_of_the_vocabulary_is_its_requests_error(lm):
    """N15."""
    with pytest.raises(ValueError, match=r"request \S+: `samples` was set to 97, but token ids go from 0 to 96"):
        with lm.generate(PROMPT, max_new_tokens=2):
            lm.samples = torch.tensor([[97]])


def test_n16_a_step_is_picked_by_its_number(lm, oracle):
    """N16."""
    tokens = lm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=5))[0].token_ids
    with lm.generate(PROMPT, max_new_tokens=5) as tracer:
        at_two = list().save()
        for _ in tracer.iter[2]:
            at_two.append(lm.model.layers[1].output)
    with lm.generate(PROMPT, max_new_tokens=5) as tracer:
        every = list().save()
        for _ in tracer.iter[:]:
            every.append(lm.model.layers[1].output)
    with torch.no_grad():
        states = oracle("llama")(input_ids=torch.tensor([PROMPT + tokens]), output_hidden_states=True).hidden_states[2]
    assert [tuple(value.shape) for value in every] == [(1, len(PROMPT), 72)] + [(1, 1, 72)] * 4
    assert len(at_two) == 1 and torch.equal(at_two[0], every[2])
    torch.testing.assert_close(at_two[0][0, 0], states[0, len(PROMPT) + 1], rtol=0, atol=2e-4)


def test_n17_a_patch_never_touches_another_request_bit_for_bit(lm):
    """N17: an identity edit and a violent one leave the neighbours' log probabilities as a plain read does."""
    results = []

    def read() -> None:
        with lm.trace(PROMPT):
            results.append(lm.lm_head.output.clone().save())

    def identity() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[0].output = lm.model.layers[0].output.clone()
            results.append(lm.lm_head.output.clone().save())

    def violent() -> None:
        with lm.trace(PROMPT):
            lm.model.layers[0].output[:] = float("nan")
            lm.model.layers[1].self_attn.q_proj.output[:] = 1e9
            results.append(lm.lm_head.output.clone().save())

    seen = [plain_beside(lm, block) for block in (read, identity, violent)]
    assert [given for _, given in seen] == [None] * 3
    assert seen[0][0] == seen[1][0] == seen[2][0]
    assert torch.equal(results[0], results[1]) and results[2].isnan().all()


def test_n18_plain_requests_cost_no_hook_and_no_module_call(lm, monkeypatch):
    """N18."""
    monkeypatch.setattr(lm.backend.lowered, "mode", "off")
    calls: list[str] = []
    for owner, name in (
        (type(lm.interleaver), "handle"), (type(lm.interleaver), "begin_pass"), (NNsightRequestHelper, "process_new_reqs"),
    ):  # fmt: skip
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, *args, real=real, name=name: calls.append(name) or real(self, *args)
        )
    # Past the refusal of hooks on a served model.
    register = torch.nn.Module.register_forward_hook
    handles = [register(m, lambda *_: calls.append("module")) for m in lm._module.modules()]
    before = Counter(lm.runner.partition.counts)
    lm.generate([PROMPT, *OTHERS], SamplingParams(temperature=0, max_tokens=4))
    assert calls == []
    with lm.trace(PROMPT):
        lm.model.layers[0].output.save()
    for handle in handles:
        handle.remove()
    assert {"handle", "begin_pass", "process_new_reqs", "module"} <= set(calls), "the spies see what is there"
    steps = Counter(lm.runner.partition.counts) - before
    assert sum(count for (how, _), count in steps.items() if how in ("plain", "replay")) == 4


@pytest.mark.parametrize(
    ("value", "expected", "got"),
    [
        (torch.zeros(1, 3, 72), "[1, 7, 72] of float32", "[1, 3, 72] of float32"),
        (torch.zeros(1, 7, 72, dtype=torch.float64), "[1, 7, 72] of float32", "[1, 7, 72] of float64"),
        (torch.zeros(1, 7, 72, device="meta"), "on cpu", "on meta"),
        ("text", "[1, 7, 72] of float32", "str"),
    ],
    ids=["shape", "dtype", "device", "type"],
)
@pytest.mark.parametrize("alone", [True, False])
def test_n19_an_edit_that_does_not_fit_names_request_site_layer_and_both_shapes(alone, value, expected, got, lm):
    """N19."""
    with pytest.raises(ValueError) as raised:
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                lm.model.layers[1].mlp.output = value
            if not alone:
                with tracer.invoke([1, 2]):
                    lm.model.layers[1].mlp.output.save()
    text = str(raised.value)
    assert "request " in text and "model.layers.1.mlp.output" in text
    assert expected in text.partition("got")[0] and got in text.partition("got")[2]


def test_n19_an_edit_with_nan_is_allowed_and_counted(lm):
    """N19."""
    with pytest.warns(UserWarning, match="1 edit held NaN"):
        with lm.trace(PROMPT) as tracer:
            lm.model.layers[1].output = torch.full((1, 7, 72), float("nan"))
            logits = lm.lm_head.output.save()
    assert logits.isnan().all() and tracer.receipt.nan_edits == 1


# -- seed 003 with traces ---------------------------------------------------------------


def test_v36_traced_requests_that_give_way_come_back_with_their_step_counts(lm_of, lm):
    """V36."""
    small = lm_of("llama", kv_cache_tokens=40, page_size=4)
    prompts = [random_ids(10, seed=i) for i in range(3)]

    def run(model: LM, chosen: list[int]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        with model.generate(max_new_tokens=12) as tracer:
            for i in chosen:
                with tracer.invoke(prompts[i]):
                    steps = list().save()
                    for step in tracer.iter[:]:
                        steps.append((step, model.model.layers[1].output[0, -1].clone()))
                    found[i] = (steps, tracer.result.save())
        return found

    moved = small.engine.stats()["moved_to_host"]
    together = run(small, [0, 1, 2])
    assert small.engine.stats()["moved_to_host"] > moved
    for i in range(3):
        steps, ids = together[i]
        solo_steps, solo_ids = run(lm, [i])[i]
        assert torch.equal(ids, solo_ids) and [step for step, _ in steps] == list(range(12))
        for (_, value), (_, expected) in zip(steps, solo_steps, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-4)


def test_v51_a_pass_inside_of_a_pass_is_refused(lm):
    """V51: a block that steps the engine itself; the pass that it interrupts goes on."""
    with lm.trace(PROMPT):
        lm.model.layers[0].output.save()
        try:
            lm.runner.execute_model(SchedulerOutput())
            message = "nothing was raised".upper()
        except RuntimeError as error:
            message = str(error)
        logits = lm.lm_head.output.save()
        text = [message].save()
    assert "a pass is under way" in text[0] and logits.isfinite().all()
