"""ModelRunner by steps, as seed 003 (vLLM's GPUModelRunner) has them: rows V3, V16 to V55."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from helpers_runner import ByHand, Steps, make_runner, random_ids
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pymllm_interp import SamplingParams
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.forward_batch import ForwardMode
from pymllm_interp.core.step import ModelRunnerOutput, NewRequest, PageWrite, ScheduledRequest, SchedulerOutput
from pymllm_interp.runner import ModelRunner
from pymllm_interp.runner.model_runner import Execution
from pymllm_interp.runner.partition import Partition
from pymllm_interp.runner.request_state import RequestState
from pymllm_interp.runner.step_inputs import PAD_SLOT_ID


def fresh(folder: Any, **server: Any) -> Steps:
    return Steps(make_runner(folder, **{"page_size": 4, "kv_cache_tokens": 256, "max_running_requests": 16, **server}))


@pytest.fixture
def steps(model_folder) -> Steps:
    return fresh(model_folder("llama"))


def greedy_oracle(hf: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens of transformers, each from a pass over everything before it."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(hf(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# -- limits and the request table ----------------------------------------------------


def test_v03_update_max_model_len_reaches_the_request_table(steps):
    """V3."""
    runner = steps.runner
    assert runner.max_num_tokens == 2048 and runner.max_running_requests == 16 and runner.context_len == 128
    runner.update_max_model_len(10)
    assert runner.context_len == runner.req_states.max_model_len == 10
    with pytest.raises(ValueError, match="request x: 11 tokens, rows hold 10"):
        runner.req_states.add_request(entering("x", 1, 11, [0] * 11, 0))
    runner.update_max_model_len(128)
    assert runner.req_states.max_model_len == 128
    for wrong in (0, 129):
        with pytest.raises(ValueError, match=f"max_model_len={wrong}: the tables hold 1 to 128"):
            runner.update_max_model_len(wrong)
    assert fresh(CONFIGS["llama"](), max_num_tokens=33).runner.max_num_tokens == 33


def entering(name: str, row: int, prompt_len: int, token_ids: list[int], computed: int) -> NewRequest:
    return NewRequest(name, row, prompt_len, token_ids, computed, SamplingParams(temperature=0), seed=0)


class RequestTable(RuleBasedStateMachine):
    """RequestState beside a dict of lists."""

    ROWS, LEN = 4, 12

    @initialize()
    def make(self) -> None:
        self.table = RequestState(self.ROWS, self.LEN, "cpu")
        self.model: dict[str, dict[str, Any]] = {}

    def free_row(self) -> int | None:
        rows = {entry["row"] for entry in self.model.values()}
        return next((row for row in range(1, self.ROWS + 1) if row not in rows), None)

    @rule(
        name=st.sampled_from("abcde"), tokens=st.lists(st.integers(0, 96), min_size=1, max_size=6), prompt=st.integers(1, 6),
        computed=st.integers(0, 5),
    )  # fmt: skip
    def add(self, name: str, tokens: list[int], prompt: int, computed: int) -> None:
        row = self.model[name]["row"] if name in self.model else self.free_row()
        if row is None:
            return
        computed = min(computed, len(tokens) - 1)
        self.table.add_request(entering(name, row, min(prompt, len(tokens)), list(tokens), computed))
        self.table.apply_staged_writes()
        self.model[name] = {
            "row": row, "tokens": list(tokens), "prefill": len(tokens), "computed": computed, "last": None,
            "prompt": min(prompt, len(tokens)),
        }  # fmt: skip

    @rule(name=st.sampled_from("abcde"))
    def remove(self, name: str) -> None:
        assert self.table.remove_request(name) is (self.model.pop(name, None) is not None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some requests compute some of their tokens; those that have computed all draw one."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=1))
        names = [name for name in names if self.model[name]["computed"] < len(self.model[name]["tokens"])]
        if not names:
            return
        sizes = [
            data.draw(st.integers(1, len(self.model[name]["tokens"]) - self.model[name]["computed"])) for name in names
        ]
        index = np.array([self.model[name]["row"] for name in names])
        computed = [self.model[name]["computed"] + size for name, size in zip(names, sizes, strict=True)]
        self.table.set_computed(index, np.array(computed, dtype=np.int32))
        rows, tokens, accepted = [], [], []
        for name, size in zip(names, sizes, strict=True):
            entry = self.model[name]
            entry["computed"] += size
            if entry["computed"] == len(entry["tokens"]) < self.LEN:
                entry["last"] = data.draw(st.integers(0, 96))
                accepted.append((name, len(entry["tokens"]), entry["last"]))
                entry["tokens"].append(entry["last"])
                rows.append(entry["row"])
                tokens.append(entry["last"])
        if rows:
            self.table.accept([*accepted, ("gone", 3, 5)])
            self.table.feed(torch.tensor(rows), torch.tensor(tokens))

    @invariant()
    def agrees(self) -> None:
        assert self.table.req_id_to_index == {name: entry["row"] for name, entry in self.model.items()}
        for name, entry in self.model.items():
            row, tokens = entry["row"], entry["tokens"]
            assert self.table.all_token_ids[row, : len(tokens)].tolist() == tokens
            assert self.table.total_len[row] == len(tokens)
            assert self.table.prompt_len[row] == entry["prompt"]
            assert self.table.prefill_len[row] == entry["prefill"]
            assert self.table.num_computed_tokens(name) == self.table.num_computed_tokens_np[row] == entry["computed"]
            assert self.table.num_computed_prefill_tokens[row] == min(entry["computed"], entry["prefill"])
            assert self.table.next_prefill_tokens(name, 2) == tokens[entry["computed"] : entry["computed"] + 2]
            assert self.table.any_prefills(np.array([row])) is (entry["computed"] < entry["prefill"])
            if entry["last"] is not None:
                assert self.table.last_sampled_tokens[row] == entry["last"]


TestV16RequestTable = RequestTable.TestCase
TestV16RequestTable.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_v17_input_buffers_keep_their_addresses_and_steps_use_them(steps):
    """V17."""
    buffers = steps.runner.input_buffers
    names = ("input_ids", "positions", "out_cache_loc")
    before = [getattr(buffers, name).data_ptr() for name in names]
    steps.add(random_ids(9), 3)
    for _ in range(3):
        schedule = steps.scheduler.schedule()
        assert steps.runner.execute_model(schedule) is None
        batch = steps.runner.execute_model_state.forward_batch
        assert [getattr(batch, name).data_ptr() for name in names] == before
        steps.scheduler.launched(schedule)
        steps.scheduler.update(schedule, steps.runner.sample_tokens())
    assert [getattr(buffers, name).data_ptr() for name in names] == before


def test_v18_v19_a_seeds_tokens_do_not_depend_on_the_place_in_the_batch(model_folder):
    """V18, V19."""
    found = []
    for before in (0, 1, 5):
        steps = fresh(model_folder("llama"))
        for i in range(before):
            steps.add(random_ids(3 + i, seed=i), 6, temperature=1.0, seed=100 + i)
        mine = steps.add([1, 2, 3, 4], 6, temperature=1.0, seed=42)
        other = steps.add([1, 2, 3, 4], 6, temperature=1.0, seed=43)
        steps.run()
        found.append((mine.output_token_ids, other.output_token_ids))
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]


def test_v18_a_step_mixes_every_kind_of_sampling(steps, oracle):
    """V18: each request gets its own parameters."""
    prompt = random_ids(5)
    best = greedy_oracle(oracle("llama"), prompt, 3)
    greedy = steps.add(prompt, 3)
    biased = steps.add(prompt, 3, logit_bias={17: 1e6})
    top_one = steps.add(prompt, 3, temperature=2.0, top_k=1)
    hot = steps.add(prompt, 3, temperature=50.0, seed=3)
    steps.run()
    assert greedy.output_token_ids == top_one.output_token_ids == best
    assert biased.output_token_ids == [17] * 3 and hot.output_token_ids != best


# -- prompt log probabilities, chunks -----------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_v20_v40_prompt_logprobs_and_tokens_equal_transformers_in_chunks_of_any_size(chunk, model_folder, oracle):
    """V20, V40 for plain requests."""
    steps = fresh(model_folder("mistral"), max_num_tokens=chunk)
    prompt = random_ids(19)
    request = steps.add(prompt, 4, prompt_logprobs=2)
    found, sampled_in = [], []
    for schedule, output in steps.run():
        assert schedule.total_num_scheduled_tokens <= chunk
        found += output.prompt_logprobs.get(request.request_id, [])
        if schedule.scheduled:
            sampled_in.append(bool(output.sampled_token_ids[0]))
    with torch.no_grad():
        logprobs = oracle("mistral")(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        assert entry.token_ids[0] == prompt[position + 1]
        assert entry.token_ids[1:] == logprobs[position].topk(2).indices.tolist()
        torch.testing.assert_close(torch.tensor(entry.logprobs), logprobs[position][entry.token_ids], rtol=0, atol=2e-4)
    assert request.output_token_ids == greedy_oracle(oracle("mistral"), prompt, 4)
    prefills = -(-len(prompt) // chunk)
    assert sampled_in == [False] * (prefills - 1) + [True] * 4, "nothing is sampled until the prompt is complete"


# -- loading, KV, paging ---------------------------------------------------------------


def test_v25_dummy_weights_are_reproducible_by_seed_and_can_be_asked_for_at_load(model_folder):
    """V25."""

    def weights(seed: int) -> torch.Tensor:
        model = ModelConfig(model="d", load_format="dummy", hf_config=CONFIGS["qwen3"](), seed=seed)
        runner = ModelRunner(ServerConfig(device="cpu", kv_cache_tokens=64), model)
        runner.initialize()
        return torch.cat([p.flatten() for p in runner.get_model().parameters()])

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))
    runner = make_runner(model_folder("qwen3"))
    real = runner.model.model.norm.weight.clone()
    runner.load_model(load_dummy_weights=True)
    assert not torch.equal(runner.model.model.norm.weight, real)
    assert runner.model_memory_usage == 0.0, "of the device, which has none here"


def test_v26_accessors(steps):
    """V26: bytes a token as the spec has it and as measured."""
    runner = steps.runner
    assert runner.get_model() is runner.model
    spec = runner.get_kv_cache_spec()
    assert spec == dict.fromkeys(range(3), (3, 8, torch.float32))
    by_spec = sum(2 * heads * dim * dtype.itemsize for heads, dim, dtype in spec.values())
    pool = runner.token_to_kv_pool
    assert by_spec == pool.nbytes // pool.num_slots
    assert runner.get_supported_tasks() == ("generate", "embed", "token_embed", "score")


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_v27_page_size_changes_no_token(page_size, model_folder, oracle):
    """V27."""
    steps = fresh(model_folder("qwen2"), page_size=page_size)
    prompts = [random_ids(n, seed=n) for n in (1, 15, 16, 17)]
    requests = [steps.add(prompt, 5) for prompt in prompts]
    steps.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == greedy_oracle(oracle("qwen2"), prompt, 5), len(prompt)


def scheduled(*entries: tuple[Any, int, int], new: bool = True) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled=[
            ScheduledRequest(
                request.request_id,
                request.req_pool_idx,
                size,
                start,
                samples := start + size == request.num_tokens,
                request.is_decoding,
                size if request.all_logits else int(samples),
            )
            for request, size, start in entries
        ],
        scheduled_new_reqs=[entry[0].entering() for entry in entries] if new else [],
        page_writes=[
            PageWrite(request.req_pool_idx, first := 0 if new else request.num_pages_sent, request.pages[first:])
            for request, _, _ in entries
        ],
    )


def placed(steps: Steps, prompt: list[int], pages: list[int], row: int, **kwargs: Any) -> Any:
    """A request with rows and pages of the test's choosing."""
    request = steps.request(prompt, **kwargs)
    request.req_pool_idx, request.pages = row, pages
    steps.runner.req_to_token_pool._live.add(row)
    return request


def test_v28_v41_slot_mappings_are_golden_and_padding_points_to_the_dummy(steps):
    """V28, V41."""
    runner = steps.runner
    a, b = placed(steps, random_ids(6), [7, 3], 2), placed(steps, random_ids(3), [5], 1)
    step = scheduled((a, 6, 0), (b, 3, 0))
    runner.add_requests(step)
    runner.update_requests(step)
    batch = runner.prepare_inputs(step)
    golden = [28, 29, 30, 31, 12, 13, 20, 21, 22]
    rows, slots = runner.prepare_attn(batch)
    assert rows.tolist() == [2, 1] and slots.tolist() == golden and slots.dtype == torch.int64
    assert runner.req_to_token_pool.req_to_token[rows, :6].tolist()[0] == golden[:6], "the gathered block table"
    rows, slots = runner.prepare_dummy_attn(3, 5)
    assert rows.tolist() == [0] * 3 and slots.tolist() == [PAD_SLOT_ID] * 5
    assert PAD_SLOT_ID not in runner.token_to_kv_pool_allocator.slots_of(list(range(1, 65)), 0, 256)
    assert (runner.req_to_token_pool.req_to_token[0] == PAD_SLOT_ID).all(), "the dummy row reads what padding writes"
    runner.input_buffers.clear()
    assert (runner.input_buffers.out_cache_loc == PAD_SLOT_ID).all(), "rows of padding in a pass write there"


def test_v28_v37_a_request_that_grows_appends_its_slots_and_one_that_resumes_overwrites_them(steps):
    """V28 (append and overwrite), V37."""
    runner = steps.runner
    a = placed(steps, random_ids(4), [9], 1)
    step = scheduled((a, 4, 0))
    runner.add_requests(step)
    runner.update_requests(step)
    table = runner.req_to_token_pool.req_to_token
    a.pages, a.num_pages_sent = [9, 2], 1  # one more page, as the fifth position crosses the boundary
    runner.update_requests(scheduled((a, 1, 4), new=False))
    assert table[1, :5].tolist() == [36, 37, 38, 39, 8]
    a.pages = [4, 6]
    runner.update_requests(scheduled((a, 1, 4), new=True))
    assert table[1, :5].tolist() == [16, 17, 18, 19, 24], "all positions, not the new one alone"


@pytest.mark.parametrize("mode", list(ForwardMode))
@pytest.mark.parametrize("hooked", [0, 1, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize("is_profile", [False, True])
def test_v29_dispatch_is_a_decision_table(mode, hooked, num_tokens, is_profile):
    """V29: mode x hooked x size x profile, counted by reason."""
    partition = Partition()
    decided = partition.decide(mode, num_tokens, min(num_tokens, 2), hooked, is_profile)
    if mode is ForwardMode.IDLE or num_tokens == 0:
        expected = Execution.IDLE
    else:
        expected = Execution.MODULES if hooked or is_profile else Execution.PLAIN
    assert decided.execution is expected
    assert (decided.num_tokens, decided.num_reqs) == (num_tokens, min(num_tokens, 2))
    assert partition.counts == {(expected.value, decided.reason): 1} and decided.reason


@pytest.mark.parametrize("how", ["auto", "segments", "split", "eager"])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED])
@pytest.mark.parametrize("plain", [0, 3])
@pytest.mark.parametrize("captured", [False, True])
def test_v29_hooked_decode_rows_run_in_segments_or_as_is_asked_for(how, mode, plain, captured):
    """V29, R20, G9: only a decode pass with others in it can be split, and only a captured pass has segments."""
    decided = Partition(how).decide(mode, plain + 1, plain + 1, hooked=1, can_replay=captured)
    expected = Execution.MODULES
    if mode is ForwardMode.DECODE and how == "split" and plain:
        expected = Execution.SPLIT
    elif how in ("auto", "segments") and captured:
        expected = Execution.SEGMENTS
    assert decided.execution is expected and decided.num_hooked == 1


def test_v29_the_runner_runs_what_was_decided(steps, monkeypatch):
    """V29."""
    seen = []
    forward = ModelRunner.forward
    monkeypatch.setattr(ModelRunner, "forward", lambda self, batch, how: seen.append(how) or forward(self, batch, how))
    steps.add([1, 2, 3], 2)
    steps.run()
    assert seen == [Execution.PLAIN] * 2
    assert steps.runner.partition.counts == {("plain", "nobody waits for a module"): 2}


# -- dummy runs -------------------------------------------------------------------------


@pytest.mark.parametrize("uniform_decode", [False, True])
def test_v30_a_dummy_run_touches_no_request_and_no_kv(uniform_decode, steps):
    """V30."""
    steps.add(random_ids(5), 8)
    steps.step()
    runner = steps.runner
    before = (
        runner.token_to_kv_pool._kv.clone(), runner.req_to_token_pool.req_to_token.clone(),
        runner.req_states.all_token_ids.copy(), runner.req_states.num_computed_tokens_np.copy(),
        dict(runner.req_states.req_id_to_index),
    )  # fmt: skip
    hidden, last = runner._dummy_run(37, uniform_decode=uniform_decode)
    assert hidden.shape == (37, 72) and last.shape == (37 if uniform_decode else 16, 72)
    hidden, last = runner._dummy_run(37, skip_attn=True, is_profile=True)
    assert hidden.shape == (37, 72) and hidden.isfinite().all()
    assert torch.equal(runner.token_to_kv_pool._kv, before[0])
    assert torch.equal(runner.req_to_token_pool.req_to_token, before[1])
    assert np.array_equal(runner.req_states.all_token_ids, before[2])
    assert np.array_equal(runner.req_states.num_computed_tokens_np, before[3])
    assert runner.req_states.req_id_to_index == before[4] and runner.execute_model_state is None


def test_v30_skipping_attention_is_for_the_profile_run_alone(steps):
    """V30."""
    with pytest.raises(ValueError, match="skip_attn"):
        steps.runner._dummy_run(4, skip_attn=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_v31_a_dummy_sampler_run_gives_a_token_for_each_row(family, model_folder):
    """V31."""
    runner = make_runner(model_folder(family))
    _, last = runner._dummy_run(5, uniform_decode=True)
    tokens = runner._dummy_sampler_run(last)
    assert tokens.shape == (5,) and tokens.dtype == torch.int32 and ((tokens >= 0) & (tokens < 97)).all()


def test_v32_a_profile_run_is_the_largest_pass_without_attention_and_then_the_sampler(model_folder, monkeypatch):
    """V32."""
    steps, calls = fresh(model_folder("llama"), max_num_tokens=50), []
    run, sampler = ModelRunner._dummy_run, ModelRunner._dummy_sampler_run
    monkeypatch.setattr(
        ModelRunner, "_dummy_run", lambda self, n, **kwargs: calls.append((n, kwargs)) or run(self, n, **kwargs)
    )
    monkeypatch.setattr(
        ModelRunner, "_dummy_sampler_run", lambda self, h: calls.append(tuple(h.shape)) or sampler(self, h)
    )
    steps.runner.profile_run()
    assert calls == [(50, {"skip_attn": True, "is_profile": True}), (16, 72)]


def test_v33_nothing_is_captured_on_a_cpu_and_a_warning_says_so(steps, caplog):
    """V33."""
    with caplog.at_level(logging.WARNING):
        assert steps.runner.capture_model() == 0
    assert "no CUDA graphs are captured: device='cpu'" in caplog.text
    assert steps.runner.profile_cudagraph_memory() == 0


# -- requests in and out ---------------------------------------------------------------


def test_v35_an_id_that_is_added_again_replaces_its_old_state_and_an_unknown_one_is_not_removed(steps):
    """V35."""
    runner = steps.runner
    first = placed(steps, [1, 2, 3], [1], 1, request_id="same")
    runner.add_requests(scheduled((first, 3, 0)))
    again = placed(steps, [9, 8, 7, 6], [2], 3, request_id="same")
    runner.add_requests(scheduled((again, 4, 0)))
    states = runner.req_states
    assert states.req_id_to_index == {"same": 3}
    assert states.next_prefill_tokens("same", 9) == [9, 8, 7, 6] and states.prompt_len[3] == 4
    assert [row for row, request in enumerate(states.requests) if request is not None] == [3], "row 1 is free again"
    assert runner.req_states.remove_request("same") is True
    assert runner.req_states.remove_request("same") is False and runner.req_states.remove_request("nobody") is False


def test_v36_finished_and_preempted_requests_leave_the_table(steps):
    """V36."""
    runner = steps.runner
    requests = [placed(steps, [1, 2], [i + 1], i + 1, request_id=str(i)) for i in range(3)]
    runner.add_requests(scheduled(*((request, 2, 0) for request in requests)))
    runner.finish_requests(SchedulerOutput(finished_req_ids={"0", "unknown"}, preempted_req_ids={"2"}))
    assert runner.req_states.req_id_to_index == {"1": 2}


def test_v36_preempted_requests_resume_with_the_tokens_that_they_would_have_had(model_folder, oracle):
    """V36; with traces: tests/runner/test_interp_runner.py."""
    steps = fresh(model_folder("llama"), kv_cache_tokens=40)  # ten pages for three requests that need six each
    prompts = [random_ids(10, seed=i) for i in range(3)]
    requests = [steps.add(prompt, 12) for prompt in prompts]
    run = steps.run()
    assert steps.scheduler.num_preempted > 0 and any(schedule.preempted_req_ids for schedule, _ in run)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == greedy_oracle(oracle("llama"), prompt, 12)
    assert not steps.runner.req_states.req_id_to_index, "the table is empty when all have ended"


@pytest.mark.parametrize("page_size", [1, 4])
def test_v37_a_generation_crosses_page_boundaries(page_size, model_folder, oracle):
    """V37."""
    steps = fresh(model_folder("llama"), page_size=page_size)
    request = steps.add(random_ids(3), 10)
    held = []
    while steps.scheduler.has_work():
        steps.step()
        held.append(len(request.pages))
    assert request.output_token_ids == greedy_oracle(oracle("llama"), random_ids(3), 10)
    expected = [-(-(3 + i) // page_size) for i in range(10)]
    assert held[:-1] == expected[:-1] and expected[-1] > expected[0]


def test_v38_staged_tokens_and_slots_are_not_visible_before_they_are_applied(steps):
    """V38."""
    states, table = steps.runner.req_states, steps.runner.req_to_token_pool
    states.add_request(entering("a", 1, 2, [5, 6], 0))
    assert not states.all_token_ids[1].any()
    states.apply_staged_writes()
    assert states.all_token_ids[1, :3].tolist() == [5, 6, 0]
    row = table.alloc()
    table.write(row, 0, [8, 9])
    assert not table.req_to_token[row].any()
    table.apply_staged_writes()
    assert table.req_to_token[row, :3].tolist() == [8, 9, 0]


# -- a step ------------------------------------------------------------------------------


def test_v39_inputs_are_laid_out_decode_first_then_prefill(steps):
    """V39: golden values of a mixed step, the prompt's log probabilities asked for by one of three."""
    a, b = steps.add([11, 12, 13], 4), steps.add([21, 22], 4)
    steps.step()
    c = steps.add([31, 32, 33, 34], 4, prompt_logprobs=0)
    schedule = steps.scheduler.schedule()
    assert [entry.request_id for entry in schedule.scheduled] == ["r1", "r2", "r3"]
    runner = steps.runner
    runner.add_requests(schedule)
    runner.update_requests(schedule)
    batch = runner.prepare_inputs(schedule)
    assert batch.req_ids == ["r1", "r2", "r3"] and (batch.num_reqs, batch.num_tokens) == (3, 6)
    assert batch.idx_mapping_np.tolist() == [r.req_pool_idx for r in (a, b, c)]
    assert batch.num_scheduled_tokens.tolist() == [1, 1, 4]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 6]
    assert batch.input_ids.tolist() == [a.output_token_ids[0], b.output_token_ids[0], 31, 32, 33, 34]
    assert batch.positions.tolist() == [3, 2, 0, 1, 2, 3]
    assert batch.seq_lens_cpu.tolist() == [4, 3, 4] and batch.seq_lens_cpu.device.type == "cpu"
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.cu_num_logits.tolist() == [0, 1, 2, 6]
    assert batch.sample_rows == [0, 1, 5] and [e.request_id for e in batch.sampling] == ["r1", "r2", "r3"]
    forward = runner.make_forward_batch(batch)
    assert forward.forward_mode is ForwardMode.MIXED and forward.batch_groups == [[0, 1], [1, 1], [2, 4]]
    assert forward.extend_prefix_lens_cpu == [3, 2, 0]


def test_v39_modes_follow_what_the_requests_compute(steps):
    """V39: a prompt of one token extends, it does not decode."""
    modes = []
    run = steps.runner.executions.run
    steps.runner.executions.run = lambda batch, how: modes.append(batch.forward_mode) or run(batch, how)
    steps.add([5], 3)
    steps.step()
    steps.step()
    steps.add([6], 2)
    steps.step()
    assert modes == [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED]


def test_v42_the_head_runs_on_the_rows_that_are_sampled_from_and_no_other(steps, monkeypatch, oracle):
    """V42."""
    a, b = random_ids(9), random_ids(4, seed=1)
    steps.add(a, 3)
    steps.add(b, 3)
    rows, gemm = [], steps.runner.model.lm_head.gemm
    monkeypatch.setattr(steps.runner.model.lm_head, "gemm", lambda h: rows.append(h.shape[1]) or gemm(h))
    schedule = steps.scheduler.schedule()
    steps.runner.execute_model(schedule)
    logits = steps.runner.execute_model_state.logits_output.next_token_logits
    steps.runner.sample_tokens()
    assert rows == [2] and logits.shape == (2, 97)
    for row, ids in zip(logits, (a, b), strict=True):
        with torch.no_grad():
            expected = oracle("llama")(input_ids=torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(row, expected, rtol=0, atol=2e-4)


def test_v43_counters_agree_with_the_requests_after_every_mixed_step(model_folder):
    """V43."""
    steps = fresh(model_folder("llama"), max_num_tokens=6)
    requests = [steps.add(random_ids(n, seed=n), 6) for n in (3, 8, 5)]
    for _ in range(5):
        known = {request.request_id: request.all_token_ids for request in requests}  # when the step is scheduled
        schedule, output = steps.step()
        states = steps.runner.req_states
        for entry in schedule.scheduled:
            request = next(request for request in requests if request.request_id == entry.request_id)
            row = states.req_id_to_index[request.request_id]
            assert states.num_computed_tokens(request.request_id) == request.kv_len
            tokens = known[request.request_id]
            assert states.total_len[row] == len(tokens)
            assert states.all_token_ids[row, : len(tokens)].tolist() == tokens
            token_ids = output.sampled_token_ids[output.req_id_to_index[request.request_id]]
            assert len(token_ids) == (request.kv_len >= request.prompt_len)
            for token in token_ids:
                assert states.last_sampled_tokens[row] == token == request.output_token_ids[-1]
    assert any(request.output_token_ids for request in requests)


def test_v44_a_step_has_two_phases_and_its_state_is_cleared_after_them(steps):
    """V44."""
    runner = steps.runner
    assert runner.sample_tokens() is None, "nothing was executed"
    steps.add([1, 2], 2)
    schedule = steps.scheduler.schedule()
    assert runner.execute_model(schedule) is None
    assert runner.execute_model_state.scheduler_output is schedule
    assert isinstance(runner.sample_tokens(), ModelRunnerOutput)
    assert runner.execute_model_state is None and runner.sample_tokens() is None


def test_v45_no_scheduled_tokens_no_forward(steps):
    """V45: but what finished is forgotten."""
    runner = steps.runner
    steps.add([1, 2], 1)
    steps.step()
    assert runner.req_states.req_id_to_index
    passes = runner.forward_pass_id
    output = runner.execute_model(steps.scheduler.schedule())
    assert output == ModelRunnerOutput() and runner.forward_pass_id == passes
    assert not runner.req_states.req_id_to_index and runner.execute_model_state is None


def test_v46_the_output_is_by_request_in_batch_order(model_folder):
    """V46."""
    steps = fresh(model_folder("llama"), max_num_tokens=6)
    steps.add([1, 2, 3], 3, request_id="short", logprobs=1, prompt_logprobs=0)
    steps.add(random_ids(9), 3, request_id="long")
    _, output = steps.step()
    assert output.req_ids == ["short", "long"] and output.req_id_to_index == {"short": 0, "long": 1}
    assert len(output.sampled_token_ids[0]) == 1 and output.sampled_token_ids[1] == []
    assert [len(entry.token_ids) for entry in output.logprobs[0]] == [2] and output.logprobs[1] == []
    assert list(output.prompt_logprobs) == ["short"]
    assert [e.token_ids[0] for e in output.prompt_logprobs["short"]] == [2, 3]


def test_v51_a_steps_context_is_explicit_nested_steps_raise_and_an_error_clears_it(steps, monkeypatch):
    """V51: no ambient forward context; `ExecuteModelState` is the step's, the batch reaches the rest."""
    runner = steps.runner
    steps.add([1, 2], 3)
    schedule = steps.scheduler.schedule()
    runner.execute_model(schedule)
    state = runner.execute_model_state
    assert state.descriptor.num_tokens == state.forward_batch.num_tokens == 2 and state.descriptor.num_reqs == 1
    with pytest.raises(RuntimeError, match=r"call sample_tokens\(\) before"):
        runner.execute_model(SchedulerOutput())
    assert runner.execute_model_state is state, "the first step is not harmed"
    steps.scheduler.launched(schedule)
    steps.scheduler.update(schedule, runner.sample_tokens())

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(runner.executions, "call_model", broken)
    with pytest.raises(ZeroDivisionError):
        runner.execute_model(steps.scheduler.schedule())
    assert runner.execute_model_state is None
    monkeypatch.undo()
    monkeypatch.setattr(runner, "_sample", broken)
    runner.execute_model(steps.scheduler.schedule())
    with pytest.raises(ZeroDivisionError):
        runner.sample_tokens()
    assert runner.execute_model_state is None


def test_v51_intermediate_tensors_are_refused(steps):
    """V6's argument, which V51's step takes."""
    with pytest.raises(NotImplementedError, match="pipeline"):
        steps.runner.execute_model(SchedulerOutput(), {"hidden": 1})  # pyright: ignore


def test_v52_shutdown_drops_a_step_under_way_and_twice_is_safe(steps):
    """V52; what it frees: R26."""
    steps.add([1, 2], 3)
    steps.runner.execute_model(steps.scheduler.schedule())
    steps.runner.shutdown()
    assert steps.runner.execute_model_state is None and steps.runner.sample_tokens() is None
    steps.runner.shutdown()


def test_v54_no_entry_point_records_a_graph(steps):
    """V54."""
    runner = steps.runner
    for parameter in runner.model.parameters():
        parameter.requires_grad_(True)
    with torch.enable_grad():
        hand = ByHand(runner)
        batch = hand.batch({0: [1, 2]})
        batch.return_hidden_states = True
        out = runner.forward(batch, Execution.MODULES)
        hidden, last = runner._dummy_run(3)
        steps.add([1, 2], 2)
        runner.execute_model(steps.scheduler.schedule())
        logits = runner.execute_model_state.logits_output.next_token_logits
    for tensor in (out.next_token_logits, out.hidden_states, hidden, last, logits, *runner.token_to_kv_pool.k_buffer):
        assert not tensor.requires_grad


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_v54_a_module_by_module_pass_over_fresh_kv_has_the_gradients_of_transformers(family, model_folder, oracle):
    """V54: what a pass with gradients stands on."""
    runner, hf, ids = make_runner(model_folder(family)), oracle(family), random_ids(11)
    batch = ByHand(runner).batch({0: ids})
    batch.fresh_kv_only, batch.logits_indices = True, None
    runner.attn_backend.init_forward_metadata(batch)

    embeddings = next(name for name, module in hf.named_modules() if module is hf.get_input_embeddings())

    def gradient(model: Any, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Of a logit, by the embeddings."""
        leaves: list[torch.Tensor] = []

        def watch(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[0]

        handle = model.get_submodule(embeddings).register_forward_hook(watch)
        with torch.enable_grad():
            call()[0, :, 7].sum().backward()
        handle.remove()
        assert leaves[0].grad is not None
        return leaves[0].grad

    grads = (
        gradient(runner.get_model(), lambda: runner.executions.call_model(batch, Execution.MODULES)),
        gradient(hf, lambda: hf(input_ids=torch.tensor([ids]), use_cache=False).logits),
    )
    scale = grads[1].abs().max().item()
    assert scale > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-4 * max(scale, 1.0))


def test_v55_load_time_memory_and_captures_are_logged(caplog):
    """V55."""
    with caplog.at_level(logging.INFO, logger="pymllm_interp"):
        runner = make_runner(CONFIGS["llama"]())
    assert "model loaded in" in caplog.text and "GiB on the device" in caplog.text
    assert "CUDA graphs" not in caplog.text, "a CPU user is not warned of what there cannot be"
    with caplog.at_level(logging.INFO):
        runner.capture_model()
    assert "CUDA graphs" in caplog.text


# -- a step is plain data ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_steps_value_goes_through_pickle_and_the_runner_works_from_the_copy(family, model_folder, oracle):
    """The runner sees copies alone: mixed lengths in chunks, preemption, penalties, n, log probabilities."""
    steps = fresh(model_folder(family), kv_cache_tokens=64, max_num_tokens=12)
    greedy = [random_ids(n, seed=n) for n in (1, 4, 5, 17)]
    requests = [steps.add(prompt, 12) for prompt in greedy]
    params = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2}
    penalised = steps.add(random_ids(9, seed=40), 10, **params, prompt_logprobs=1)
    execute, kinds = steps.runner.execute_model, set()

    def from_a_copy(step: SchedulerOutput, *args: Any) -> Any:
        copied = pickle.loads(pickle.dumps(step))
        assert copied == step and copied.scheduled is not step.scheduled
        kinds.update(type(part).__name__ for part in plain_parts(step))
        return execute(copied, *args)

    steps.runner.execute_model = from_a_copy  # pyright: ignore[reportAttributeAccessIssue]
    steps.run()
    assert steps.scheduler.num_preempted > 0, "requests have entered the table again"
    for prompt, request in zip(greedy, requests, strict=True):
        assert request.output_token_ids == greedy_oracle(oracle(family), prompt, 12)
    alone = fresh(model_folder(family))
    expected = alone.add(random_ids(9, seed=40), 10, **params)
    alone.run()
    assert penalised.output_token_ids == expected.output_token_ids
    assert kinds <= {
        "int",
        "float",
        "bool",
        "str",
        "NoneType",
        "ScheduledRequest",
        "NewRequest",
        "PageWrite",
        "SamplingParams",
    }


def plain_parts(value: Any) -> Iterator[Any]:
    """What a step's value holds, all the way down; containers are left out."""
    if isinstance(value, dict):
        yield from (part for item in value.items() for entry in item for part in plain_parts(entry))
    elif isinstance(value, list | set | frozenset) or type(value) is tuple:
        yield from (part for item in value for part in plain_parts(item))
    elif dataclasses.is_dataclass(value) or isinstance(value, tuple):
        if not isinstance(value, SchedulerOutput):
            yield value
        names = value._fields if isinstance(value, tuple) else [spec.name for spec in dataclasses.fields(value)]
        yield from (part for name in names for part in plain_parts(getattr(value, name)))
    else:
        yield value


def test_a_step_that_fails_says_all_of_its_requests_again(steps, oracle):
    """What a failed pass left in the runner's table is stated anew: rows, tokens, pages and what is fed."""
    a, b = steps.add(random_ids(6), 8), steps.add(random_ids(3, seed=1), 8)
    for _ in range(3):
        steps.step()
    failing = steps.scheduler.schedule()
    runner = steps.runner
    runner.req_states.last_sampled_tokens.fill_(1)  # as if it had failed after its sampling
    runner.req_to_token_pool.req_to_token.fill_(0)
    steps.scheduler.failed(failing)
    again = steps.scheduler.schedule()
    assert {new.request_id for new in again.scheduled_new_reqs} == {"r1", "r2"}
    assert [(write.row, write.first, write.pages) for write in again.page_writes] == [
        (request.req_pool_idx, 0, request.pages) for request in (a, b)
    ]
    output = runner.execute_model(again) or runner.sample_tokens()
    steps.scheduler.launched(again)
    steps.scheduler.update(again, output)
    steps.run()
    assert a.output_token_ids == greedy_oracle(oracle("llama"), random_ids(6), 8)
    assert b.output_token_ids == greedy_oracle(oracle("llama"), random_ids(3, seed=1), 8)


def test_ids_that_a_failed_step_took_along_are_said_again(steps):
    """The pass may fail before the runner has read them. A row must not keep the tokens of who held it before."""
    a, b = steps.add(random_ids(6), 2), steps.add(random_ids(3, seed=1), 8)
    while not a.finished:
        steps.step()
    failing = steps.scheduler.schedule()
    assert failing.finished_req_ids == {a.request_id}
    steps.scheduler.failed(failing)
    assert steps.scheduler.schedule().finished_req_ids == {a.request_id}
    assert not b.finished


def test_a_failed_upload_leaves_no_staged_tokens(steps, monkeypatch):
    state = steps.runner.req_states
    state.add_request(NewRequest("x", 3, 2, [1, 2, 3], 0, SamplingParams(), seed=0))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(state, "feed", raises(torch.OutOfMemoryError("injected")))
        state.apply_staged_writes()
    assert not state._staged


def raises(error: Exception) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        raise error

    return function
