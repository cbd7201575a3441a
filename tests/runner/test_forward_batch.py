"""ForwardMode and ForwardBatch: rows F1 to F11."""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_runner import ByHand, make_runner, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from pymllm_interp.core.forward_batch import ForwardBatch, ForwardMode
from pymllm_interp.runner.partition import Execution

SEED_FIELDS = [
    "forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "seq_lens_sum", "seq_lens_cpu",
    "positions", "extend_num_tokens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "extend_prefix_lens_cpu",
    "extend_seq_lens_cpu", "return_logprob", "top_logprobs_nums", "req_to_token_pool", "token_to_kv_pool", "attn_backend",
    "mrope_position_deltas", "pixel_values", "image_grid_thw",
]  # fmt: skip


def required(batch: int = 2, tokens: int = 2, mode: ForwardMode = ForwardMode.DECODE) -> list[Any]:
    """The seven required fields, in order."""
    ids, rows, slots = torch.zeros(tokens, dtype=torch.int64), torch.arange(1, batch + 1), torch.arange(16, 16 + tokens)
    lens = torch.full((batch,), 3, dtype=torch.int32)
    return [mode, batch, ids, rows, lens, slots, 3 * batch]


@pytest.fixture(scope="module")
def runner(model_folder):
    runner = make_runner(model_folder("llama"), page_size=4, kv_cache_tokens=1024)
    yield runner
    runner.shutdown()


def test_f1_modes_are_an_int_enum_of_four_in_order():
    assert issubclass(ForwardMode, IntEnum)
    assert [(mode.name, int(mode)) for mode in ForwardMode] == [("EXTEND", 1), ("DECODE", 2), ("MIXED", 3), ("IDLE", 4)]


def test_f2_predicates():
    predicates = ("is_extend", "is_prefill", "is_decode", "is_mixed", "is_idle", "is_decode_or_idle")
    truth = {
        ForwardMode.EXTEND: (1, 1, 0, 0, 0, 0),
        ForwardMode.DECODE: (0, 0, 1, 0, 0, 1),
        ForwardMode.MIXED: (1, 1, 0, 1, 0, 0),
        ForwardMode.IDLE: (0, 0, 0, 0, 1, 1),
    }
    for mode, row in truth.items():
        found = [getattr(mode, name)() for name in predicates]
        assert found == [bool(value) for value in row], mode.name
        assert all(type(value) is bool for value in found)


def test_f3_the_seeds_fields_come_first_in_its_order_and_seven_are_required():
    fields = dataclasses.fields(ForwardBatch)
    assert [field.name for field in fields][: len(SEED_FIELDS)] == SEED_FIELDS
    without = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    assert without == SEED_FIELDS[:7]
    batch = ForwardBatch(*required())  # by position
    assert batch.forward_mode is ForwardMode.DECODE and batch.seq_lens_sum == 6 and batch.num_tokens == 2
    with pytest.raises(TypeError):
        ForwardBatch(*required()[:6])  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (2, torch.zeros(3, dtype=torch.int64), "out_cache_loc has 2 rows, input_ids has 3"),
        (3, torch.ones(1, dtype=torch.int64), r"req_pool_indices has shape \(1,\), expected \(2,\)"),
        (4, torch.ones(3, dtype=torch.int32), r"seq_lens has shape \(3,\), expected \(2,\)"),
        (5, torch.ones(1, dtype=torch.int64), "out_cache_loc has 1 rows, input_ids has 2"),
    ],
)
def test_f3_shapes_that_do_not_fit_are_refused_by_name(index, value, message):
    fields = required()
    fields[index] = value
    with pytest.raises(ValueError, match=message):
        ForwardBatch(*fields)


def test_f3_a_decode_batch_has_one_token_a_request():
    with pytest.raises(ValueError, match="3 tokens for 2 requests"):
        ForwardBatch(*required(2, 3))
    ForwardBatch(*required(2, 3, ForwardMode.EXTEND))


def test_f4_mirrors_are_none_by_default_and_equal_the_device_values_when_prepared(runner):
    bare = ForwardBatch(*required())
    assert bare.seq_lens_cpu is None and bare.positions is None
    hand = ByHand(runner)
    extend = hand.batch({0: [1, 2, 3], 1: [4]})
    decode = hand.batch({0: [5], 1: [6]}, ForwardMode.DECODE)
    for batch in (extend, decode):
        assert torch.equal(batch.seq_lens_cpu, batch.seq_lens.cpu()) and batch.seq_lens_cpu.device.type == "cpu"
        assert batch.seq_lens_sum == int(batch.seq_lens.sum())
        assert batch.positions.shape == batch.input_ids.shape
    assert extend.positions.tolist() == [0, 1, 2, 0] and decode.positions.tolist() == [3, 1]


def test_f5_extend_fields_are_none_in_decode_and_add_up_in_extend(runner):
    hand = ByHand(runner)
    hand.extend({0: [1, 2, 3]})
    extend = hand.batch({0: [4, 5], 1: [6, 7, 8, 9, 1]})
    decode = hand.batch({0: [5], 1: [6]}, ForwardMode.DECODE)
    names = [name for name in SEED_FIELDS if name.startswith("extend_")]
    assert len(names) == 6 and all(getattr(decode, name) is None for name in names)
    assert extend.extend_num_tokens == extend.num_tokens == 7
    assert extend.extend_seq_lens.tolist() == extend.extend_seq_lens_cpu == [2, 5]
    assert extend.extend_prefix_lens.tolist() == extend.extend_prefix_lens_cpu == [3, 0]
    assert extend.extend_start_loc.tolist() == [0, 2]
    assert (extend.extend_prefix_lens + extend.extend_seq_lens).tolist() == extend.seq_lens.tolist()


def test_f6_logprobs_equal_log_softmax_of_transformers_with_a_count_for_each_request(runner, oracle):
    prompts = {0: random_ids(4), 1: random_ids(7, seed=1), 2: random_ids(1, seed=2)}
    expected = []
    for ids in prompts.values():
        with torch.no_grad():
            expected.append(oracle("llama")(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1))
    batch = ByHand(runner).batch(prompts)
    batch.return_logprob, batch.top_logprobs_nums = True, [2, 0, 5]
    out = runner.forward(batch)
    tokens = runner.sample(out, batch)
    assert [len(entry.token_ids) for entry in out.next_token_logprobs] == [3, 1, 6]
    for row, entry in enumerate(out.next_token_logprobs):
        assert entry.token_ids[0] == tokens[row]
        assert entry.token_ids[1:] == expected[row].topk(len(entry.token_ids) - 1).indices.tolist()
        torch.testing.assert_close(torch.tensor(entry.logprobs), expected[row][entry.token_ids], rtol=0, atol=1e-4)
        assert entry.ranks[0] == 1


def test_f6_without_return_logprob_there_are_none_and_penalties_do_not_change_them(runner):
    batch = ByHand(runner).batch({0: [1, 2]})
    out = runner.forward(batch)
    runner.sample(out, batch)
    assert out.next_token_logprobs is None
    batch.return_logprob = True
    best = int(out.next_token_logits.argmax())
    params = {
        "repetition_penalties": None, "frequency_penalties": torch.tensor([1e4]), "presence_penalties": None,
        "token_histories": [[best]],
    }  # fmt: skip
    token = int(runner.sample(out, batch, penalty_params=params))
    assert token != best
    raw = out.next_token_logits.log_softmax(-1)[0, token]
    assert out.next_token_logprobs[0].logprobs == [pytest.approx(raw.item(), abs=1e-5)]


def test_f7_prepare_sets_references_to_the_runners_own_pools_and_backend(runner):
    hand = ByHand(runner)
    for batch in (hand.batch({0: [1, 2]}), hand.batch({0: [3]}, ForwardMode.DECODE)):
        assert batch.req_to_token_pool is runner.req_to_token_pool is not None
        assert batch.token_to_kv_pool is runner.token_to_kv_pool is not None
        assert batch.attn_backend is runner.attn_backend is not None
    bare = ForwardBatch(*required())
    assert bare.req_to_token_pool is None and bare.token_to_kv_pool is None and bare.attn_backend is None


@pytest.mark.parametrize("name", ["mrope_position_deltas", "pixel_values", "image_grid_thw"])
def test_f8_multimodal_fields_exist_and_are_refused_for_text_models(name):
    assert getattr(ForwardBatch(*required()), name) is None
    with pytest.raises(ValueError, match=f"{name} is set, but multimodal"):
        ForwardBatch(*required(), **{name: torch.zeros(2)})


def test_f9_two_runners_interleaved_give_the_answers_of_each_alone():
    """The backend and the pools are reached through the batch: no global knows which runner is at work."""
    configs = [CONFIGS["llama"](), CONFIGS["mistral"]()]
    prompts = [{0: random_ids(9), 1: random_ids(3, seed=1)}, {0: random_ids(6, seed=2), 1: random_ids(12, seed=3)}]
    alone = []
    for config, ids in zip(configs, prompts, strict=True):
        hand = ByHand(make_runner(config))
        alone.append([hand.extend(ids).next_token_logits, hand.decode({0: 5, 1: 6}).next_token_logits])
    hands = [ByHand(make_runner(config)) for config in configs]
    first = [hand.batch(ids) for hand, ids in zip(hands, prompts, strict=True)]  # both prepared before either runs
    extends = [hand.runner.forward(batch).next_token_logits for hand, batch in zip(hands, first, strict=True)]
    seconds = [hand.batch({0: [5], 1: [6]}, ForwardMode.DECODE) for hand in hands]
    decodes = [
        hand.runner.forward(batch).next_token_logits for hand, batch in reversed(list(zip(hands, seconds, strict=True)))
    ][::-1]
    for (extend, decode), mine, his in zip(alone, extends, decodes, strict=True):
        assert torch.equal(mine, extend) and torch.equal(his, decode)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_f11_batch_groups_tile_the_token_rows_in_batch_order(sizes):
    batch = ForwardBatch(*required(len(sizes), sum(sizes), ForwardMode.EXTEND), extend_seq_lens_cpu=sizes)
    covered = [row for start, size in batch.batch_groups for row in range(start, start + size)]
    assert covered == list(range(batch.num_tokens))
    assert [size for _, size in batch.batch_groups] == sizes


def test_f11_batch_groups_of_a_decode_pass_are_one_row_each():
    assert ForwardBatch(*required(3, 3)).batch_groups == [[0, 1], [1, 1], [2, 1]]


@pytest.mark.parametrize("execution", [Execution.PLAIN, Execution.MODULES])
def test_f10_mixed_passes_tell_each_requests_rows_apart(execution, runner):
    hand = ByHand(runner)
    hand.extend({0: [1, 2, 3, 4]})
    batch = hand.batch({0: [9], 1: [5, 6, 7]}, ForwardMode.MIXED)
    assert batch.batch_groups == [[0, 1], [1, 3]] and batch.positions.tolist() == [4, 0, 1, 2]
    together = runner.forward(batch, execution).next_token_logits
    alone = ByHand(runner).extend({0: [5, 6, 7]}, execution).next_token_logits
    torch.testing.assert_close(together[1], alone[0], rtol=0, atol=1e-4)
