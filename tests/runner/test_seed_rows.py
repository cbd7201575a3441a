"""Rows of the seeds' list: what a pass and an engine use is the seeds' structure itself."""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_drafts import Told
from helpers_runner import make_runner, random_ids

from pymllm_interp import LM, SamplingParams
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.request import Request
from pymllm_interp.core.step import LogitsProcessorOutput, ModelRunnerOutput, RequestHooks, SchedulerOutput
from pymllm_interp.hooks.traces.blocks.trace import RequestTrace
from pymllm_interp.hooks.traces.serving.rows import rows_of_step
from pymllm_interp.hooks.traces.syntax.envoy import TracedModel
from pymllm_interp.runner import InterpModelRunner, ModelRunner, device_memory, dummy_run, model_runner, parts
from pymllm_interp.runner.stages.stage import PassDemands
from pymllm_interp.runner.stages.traced_stage import TracedStage
from pymllm_interp.sampling import RejectionSampler
from pymllm_interp.server.process.served_model import ServedModel

PROMPT = [5, 17, 3, 80, 44, 9, 61]


class Stepped:
    """The traced stage of a runner, fed with the steps of a scheduler. Its traces have no blocks."""

    def __init__(self, runner: Any) -> None:
        self.stage = TracedStage("auto")
        self.stage.model_spec = runner.model_spec
        self.stage.interleaver.bind(runner.nnsight_model, runner.model_spec.family)
        self.helper = self.stage.helper

    def request(self, name: str, prompt: int = 3, trace: RequestTrace | None = None) -> Request:
        request = Request(name, [1] * prompt, SamplingParams(temperature=0), 16, seed=0)
        request.req_pool_idx, request.trace = 1, trace
        if trace is not None:
            request.hooks = RequestHooks(max_tokens=16, trace_key=trace.key)
            self.helper.register(trace)
        return request

    def step(self, requests: list[Request], new: list[Request] | None = None, preempted: str = "") -> SchedulerOutput:
        """Begin a step with one token of each request, or with the prompts of `new` ones."""
        new = new or []
        parts = [request.scheduled(request.prompt_len if request in new else 1) for request in requests]
        step = SchedulerOutput(parts, [request.entering() for request in new], preempted_req_ids={*preempted.split()})
        self.stage.begin(step, PassDemands())
        return step

    def check(self, step: SchedulerOutput, traced: dict[str, RequestTrace]) -> None:
        """The mapping is that of the step, and the rows that blocks see are those that it names."""
        helper = self.helper
        wanted = {e.request_id: rows for e, rows in zip(step.scheduled, rows_of_step(step.scheduled), strict=True)}
        own = [rid for rid in wanted if rid in traced]
        assert list(helper.req_id_to_batch_group_idx) == own
        assert helper.traces == [traced[rid] for rid in own]
        for rid, group in helper.req_id_to_batch_group_idx.items():
            rows = helper.batch_groups[group]
            assert traced[rid].rows is rows
            assert (rows.start, rows.size, rows.total) == (wanted[rid].start, wanted[rid].size, wanted[rid].total)


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    runner = make_runner(CONFIGS["llama"](), InterpModelRunner)
    yield runner
    runner.shutdown()


@pytest.fixture
def stepped(runner: Any) -> Stepped:
    return Stepped(runner)


# -- N4, N5: the mappings of the helper --------------------------------------------------------------


def test_n04_a_preempted_request_has_no_batch_group_in_steps_without_it(stepped: Stepped) -> None:
    a, p = stepped.request("a", trace=RequestTrace(None, [])), stepped.request("p")
    stepped.check(stepped.step([a, p], new=[a, p]), {"a": a.trace})
    stepped.stage.abandon()
    step = stepped.step([p], preempted="a")
    stepped.check(step, {"a": a.trace})
    assert stepped.helper.req_id_to_batch_group_idx == {} and stepped.helper.batch_groups == []
    stepped.check(stepped.step([p, a], new=[a]), {"a": a.trace})  # it resumes


def test_n04_a_request_that_leaves_the_mapping_has_left_the_pass(stepped: Stepped) -> None:
    """The traces of a pass, their number and their rows are read from it."""
    a, b = (stepped.request(name, trace=RequestTrace(None, [])) for name in "ab")
    step = stepped.step([a, b], new=[a, b])
    del stepped.helper.req_id_to_batch_group_idx["a"]
    assert stepped.helper.traces == [b.trace] and stepped.helper.count_requests({a.trace, b.trace}) == 1
    a.trace.rows = None
    stepped.helper.pad_prompts_to(16)
    stepped.helper.unflatten(step.scheduled)
    assert a.trace.rows is None and (b.trace.rows.start, b.trace.rows.total) == (1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_n04_after_new_finished_reordered_and_preempted_requests_it_is_that_of_the_step(
    seed: int, stepped: Stepped
) -> None:
    rng, live, away, made = random.Random(seed), [], [], 0
    traced: dict[str, RequestTrace] = {}
    for _ in range(30):
        new, gone = [], set()
        for _ in range(rng.randrange(3)):
            trace = RequestTrace(None, []) if rng.random() < 0.6 else None
            new.append(stepped.request(f"r{made}", rng.randrange(1, 6), trace))
            made += 1
            if trace is not None:
                traced[new[-1].request_id] = trace
        if away and rng.random() < 0.5:
            new.append(away.pop(rng.randrange(len(away))))
        if live and rng.random() < 0.3:
            away.append(live.pop(rng.randrange(len(live))))
            gone.add(away[-1].request_id)
        live += new
        rng.shuffle(live)
        step = stepped.step(live, new, preempted=" ".join(gone))
        stepped.check(step, traced)
        ending = [live.pop(rng.randrange(len(live)))] if live and rng.random() < 0.4 else []
        dropped = stepped.helper.drop_finished({request.request_id for request in ending})
        for trace in dropped:
            stepped.stage.interleaver.leave(trace)
        stepped.helper.process_finished_reqs([request.ending() for request in ending if request.trace])
        for request in ending:
            traced.pop(request.request_id, None)
        left = [entry.request_id for entry in step.scheduled if entry.request_id in traced]
        assert list(stepped.helper.req_id_to_batch_group_idx) == left
        assert stepped.helper.traces == [traced[rid] for rid in left] == stepped.stage.interleaver.traces
        stepped.stage.abandon()


def whole_batch(stepped: Stepped) -> tuple[list[Request], RequestTrace]:
    """Three requests of one ``with`` block, and the trace of an invoke without a prompt."""
    traces, whole = [RequestTrace(None, []) for _ in range(3)], RequestTrace(None, [])
    for trace in traces:
        trace.trace_id, trace.num_prompts, trace.whole_batch = traces[0].trace_id, 3, (whole,)
    whole.trace_id, whole.order, whole.sees_all, whole.request_ids = traces[0].trace_id, 3, True, ("a", "b", "c")
    requests = [stepped.request(name, trace=trace) for name, trace in zip("abc", traces, strict=True)]
    stepped.step(requests, new=requests)
    stepped.stage.abandon()
    return requests, whole


def test_n05_blocks_that_see_all_prompts_end_when_the_count_of_prompts_is_zero(stepped: Stepped) -> None:
    (a, b, c), whole = whole_batch(stepped)
    counts, key = stepped.helper.num_prompts_in_mediator, a.trace.trace_id
    assert counts == {key: 3}
    stepped.helper.process_finished_reqs([b.ending()])
    assert counts == {key: 2} and b.trace.over and not whole.over
    stepped.helper.process_finished_reqs([a.ending(), c.ending()])
    assert counts == {} and whole.over


def test_n05_the_count_is_what_the_helper_reads(stepped: Stepped) -> None:
    (a, *_), whole = whole_batch(stepped)
    stepped.helper.num_prompts_in_mediator[a.trace.trace_id] = 1
    stepped.helper.process_finished_reqs([a.ending()])
    assert whole.over


# -- N12: the tree --------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [LM, ServedModel])
def test_n12_load_model_wraps_the_weights_in_the_clients_own_tree(
    cls: Any, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees: list[Any] = []
    load = InterpModelRunner.load_model

    def spy(self: InterpModelRunner, *args: Any, **kwargs: Any) -> None:
        assert self.nnsight_model is None
        load(self, *args, **kwargs)
        trees.append(self.nnsight_model)
        assert trees[-1]._module is self.model

    monkeypatch.setattr(InterpModelRunner, "load_model", spy)
    if cls is LM:
        made: Any = LM(model_folder("llama"), device="cpu")
    else:
        made = ServedModel(ModelConfig(model=str(model_folder("llama"))), ServerConfig(device="cpu"))
    assert trees == [made] and made.backend.runner.nnsight_model is made
    made.engine.shutdown()


def test_n12_a_client_that_was_deleted_while_its_model_was_loaded_gets_no_tree(
    model_folder: Callable[[str], Path],
) -> None:
    class Owner(TracedModel):
        def __init__(self) -> None:
            pass

    owner = Owner()
    runner = InterpModelRunner(
        ServerConfig(device="cpu"), ModelConfig(model=str(model_folder("llama"))), wrap=owner._tree_maker()
    )
    del owner
    with pytest.raises(ReferenceError, match="deleted while its model was loaded"):
        runner.initialize()
    runner.shutdown()


# -- N14: saves ------------------------------------------------------------------------------------


def test_n14_what_callers_get_is_what_finish_nnsight_gives(
    lm_of: Callable[..., LM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By request, and for the invoke without a prompt by its trace."""
    lm: Any = lm_of("llama", kv_cache_tokens=512)
    outputs: list[ModelRunnerOutput] = []
    finish = InterpModelRunner.finish_nnsight

    def changed(self: InterpModelRunner, finished_requests: Any) -> ModelRunnerOutput:
        output = finish(self, finished_requests)
        outputs.append(output)
        for saves in (*output.saves.values(), *output.shared_saves.values()):
            saves.pop("lost", None)
            saves.update({name: value + 100 for name, value in saves.items()})
        return output

    def traced() -> tuple[Any, ...]:
        lost = None
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                h = lm.model.layers[0].output.save()
                lost = lm.model.layers[1].output.save()
            with tracer.invoke([4, 5]):
                g = lm.model.layers[0].output.save()
            with tracer.invoke():
                whole = lm.model.layers[0].output.save()
        return h, g, whole, lost

    h, g, whole, lost = traced()
    assert lost is not None and whole.shape[:2] == (2, len(PROMPT))
    with monkeypatch.context() as patch:
        patch.setattr(InterpModelRunner, "finish_nnsight", changed)
        found = traced()
    assert found[3] is None
    for value, wanted in zip(found[:3], (h, g, whole), strict=True):
        torch.testing.assert_close(value, wanted + 100)
    (output,) = outputs
    assert [set(saves) for saves in output.saves.values()] == [{"h"}, {"g"}]
    assert [set(saves) for saves in output.shared_saves.values()] == [{"whole"}]


def test_n14_one_name_in_requests_of_two_traces_is_delivered_to_each(lm_of: Callable[..., LM]) -> None:
    lm: Any = lm_of("llama", kv_cache_tokens=512)
    found = []
    for prompt in (PROMPT, [4, 5]):
        with lm.generate([prompt, random_ids(3)], max_new_tokens=2):
            h = lm.model.layers[0].output.save()
        found.append(h)
    assert [tuple(h.shape[:2]) for h in found] == [(2, len(PROMPT)), (2, 3)]


# -- names that the seeds have --------------------------------------------------------------------------


def test_memory_messages_name_what_the_device_functions_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "get_available_gpu_memory", lambda device="cuda", gpu_id=0: 3.0 + gpu_id)
    monkeypatch.setattr(device_memory, "get_total_gpu_memory", lambda device="cuda", gpu_id=0: 8.0 + gpu_id)
    assert device_memory.memory_left("cuda:1", 1) == " (4.0 of 9.0 GiB are free)"
    assert device_memory.memory_left("cpu", 0) == ""


def test_the_kv_cache_spec_is_what_sizes_the_pool(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = runner.token_to_kv_pool
    assert device_memory.kv_bytes_per_token(runner) == pool.nbytes // pool.num_slots
    monkeypatch.setattr(InterpModelRunner, "get_kv_cache_spec", lambda self: {0: (2, 8, torch.float16)})
    assert device_memory.kv_bytes_per_token(runner) == 2 * 2 * 8 * 2


def test_the_largest_step_is_measured_with_sample_and_its_log_probabilities(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    sample = ModelRunner.sample

    def spy(self: Any, output: Any, batch: Any, *args: Any) -> torch.Tensor:
        tokens = sample(self, output, batch, *args)
        calls.append((batch.return_logprob, len(output.next_token_logprobs), len(tokens)))
        return tokens

    monkeypatch.setattr(ModelRunner, "sample", spy)
    runner.profile_run()
    assert calls == [(True, runner.max_running_requests, runner.max_running_requests)]


def test_short_names_of_the_seeds_stand_for_what_runs() -> None:
    names = {
        "sliding_window_size", "get_supported_tasks", "update_max_model_len", "prepare_attn", "max_model_len",
        "draft_tokens_handler", "take_draft_token_ids", "prepare_dummy_attn", "prepare_forward_batch_extend",
        "prepare_forward_batch_decode", "graph_runner", "profile_cudagraph_memory", "profile_run",
    }  # fmt: skip
    classes = [ast.parse(inspect.getsource(module)) for module in (model_runner, parts)]
    functions = {n.name: n for tree in classes for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert names <= functions.keys() and names <= {*dir(ModelRunner)}
    assert all(len(functions[name].body) <= 5 for name in names), "a docstring, and what the name stands for"
    assert ModelRunner._dummy_run is dummy_run.dummy_run
    assert ModelRunner._dummy_sampler_run is dummy_run.dummy_sampler_run


def test_r02_r03_names_of_the_seeds_module_are_there_to_import() -> None:
    assert model_runner.LogitsProcessorOutput is LogitsProcessorOutput
    assert model_runner.get_total_gpu_memory is device_memory.get_total_gpu_memory
    assert model_runner.get_available_gpu_memory is device_memory.get_available_gpu_memory


def test_max_model_len_is_what_is_served(runner: Any) -> None:
    before = runner.max_model_len
    assert before == runner.context_len == runner.req_states.max_model_len
    runner.update_max_model_len(before - 1)
    assert runner.max_model_len == before - 1
    runner.update_max_model_len(before)


def test_v12_the_drafts_of_a_step_are_those_that_it_verifies(model_folder: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        wanted = lm.generate([PROMPT], params)
        assert lm.runner.take_draft_token_ids() is None is lm.runner.draft_tokens_handler
    told, seen = Told("right", k=3), []
    told.tell(wanted)
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=told) as lm:
        sample = lm.runner.sample_tokens_async

        def sampling() -> Any:
            drafts, handler = lm.runner.take_draft_token_ids(), lm.runner.draft_tokens_handler
            output = sample()
            if drafts is not None:
                assert isinstance(handler, RejectionSampler)
                (own,), (tokens,) = drafts.values(), output.get_output().sampled_token_ids
                seen.append(own == tokens[: len(own)])
            return output

        lm.runner.sample_tokens_async = sampling
        assert lm.generate([PROMPT], params)[0].token_ids == wanted[0].token_ids
    assert len(seen) >= 2 and all(seen), "all drafts were right"


def test_r24_sample_with_penalties_picks_what_the_engine_picks(lm_of: Callable[..., LM]) -> None:
    """The oracle is the running path: each token of a penalised generation, from its raw logits."""
    lm = lm_of("llama")
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, frequency_penalty=1.5, presence_penalty=0.5)
    (plain,) = lm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    (out,) = lm.generate([PROMPT], params, capture=["logits"])
    assert out.token_ids != plain.token_ids, "the penalties change it"
    histories = [out.token_ids[:i] for i in range(10)]
    penalties = {
        "repetition_penalties": None, "frequency_penalties": torch.full((10,), 1.5),
        "presence_penalties": torch.full((10,), 0.5), "token_histories": histories,
    }  # fmt: skip
    logits = LogitsProcessorOutput(out.activations["logits"][-10:])
    batch = lm.runner.prepare_forward_batch_decode(*(torch.zeros(10, dtype=torch.int32) for _ in range(4)))
    assert lm.runner.sample(logits, batch, penalty_params=penalties).tolist() == out.token_ids
