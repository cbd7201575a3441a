"""Constraints on the next token: their masks, and requests that carry them beside all else."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from functools import partial
from typing import Any

import pytest
import torch
from conftest import held
from helpers_constraints import Alternating, Failing, OnlyThese, Slow, next_set

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.handle import RequestError
from pymllm_interp.sampling import BitmaskRows, ConstraintError, TokenMasks, allow_only
from pymllm_interp.sampling.bitmasks import allows, empty_bitmask
from pymllm_interp.utils.arguments import PromptError

pytestmark = pytest.mark.local  # a server takes no constraints
PROMPT, OTHER = "w3 w14 w15 w9", "w2 w7 w1 w8 w2 w8"
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])


def greedy(tokens: int = 24, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **kwargs)


def drawn(seed: int, tokens: int = 24, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=1.4, seed=seed, max_tokens=tokens, ignore_eos=True, **kwargs)


def tokens_of(lm: LM, prompt: str, params: SamplingParams, **options: Any) -> list[int]:
    (found,) = lm.generate([prompt], params, **options)
    return found.token_ids


def stepwise(lm: LM, prompt: str, count: int, **options: Any) -> list[int]:
    """What `Alternating` gives greedily: one request a token, with the allowed tokens as `allowed_token_ids`."""
    ids = lm.generate([prompt], greedy(1))[0].prompt_token_ids
    history: list[int] = []
    for _ in range(count):
        params = greedy(1, allowed_token_ids=list(next_set(history)))
        history += lm.generate([ids + history], params, **options)[0].token_ids
    return history


# -- masks ------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 97])
def test_a_bitmask_has_a_bit_for_each_token(vocab_size):
    row = empty_bitmask(2, vocab_size)[1]
    assert row.dtype == torch.int32 and len(row) == -(-vocab_size // 32)
    assert all(allows(row, token) for token in range(vocab_size))
    assert not any(allows(row, token) for token in range(vocab_size, 32 * len(row)))
    chosen = {0, vocab_size // 2, vocab_size - 1, min(31, vocab_size - 1)}
    allow_only(row, chosen)
    assert {token for token in range(32 * len(row)) if allows(row, token)} == chosen
    with pytest.raises(ConstraintError, match="expected a token id from 0"):
        allow_only(row, [-1])


@pytest.mark.parametrize("vocab_size", [31, 32, 97])
def test_masked_rows_keep_the_allowed_scores_and_others_all(vocab_size):
    scores = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(1))
    before, bits = scores.clone(), empty_bitmask(2, vocab_size)
    chosen = [[0, vocab_size - 1], [3, 30]]
    for row, tokens in zip(bits, chosen, strict=True):
        allow_only(row, tokens)
    masks = pickle.loads(pickle.dumps(TokenMasks(["c", "a"], bits)))
    masks.for_rows(["a", "b", "c", "d"], "cpu").apply_(scores)
    expected = before.clone()
    for row, tokens in ((2, chosen[0]), (0, chosen[1])):
        expected[row] = -torch.inf
        expected[row, tokens] = before[row, tokens]
    assert torch.equal(scores, expected)


def test_masks_of_xgrammar_layout():
    """Bit t % 32 of word t // 32, sign bit included; the reference unpacks with numpy."""
    numpy = pytest.importorskip("numpy")
    bits = torch.tensor([[-(2**31) + 5, 2**31 - 1, 1]], dtype=torch.int32)
    scores = torch.zeros(1, 70)
    BitmaskRows(torch.tensor([0]), bits).apply_(scores)
    expected = numpy.unpackbits(bits.numpy().view("uint8"), bitorder="little")[:70]
    assert (scores[0] == 0).tolist() == expected.astype(bool).tolist()


# -- requests ------------------------------------------------------------------------------


@pytest.mark.thin(4)
@AHEAD
@pytest.mark.parametrize("params", [greedy, lambda **kw: drawn(3, **kw)], ids=["greedy", "sampled"])
def test_only_these_tokens_is_allowed_token_ids(lm_of, ahead, params):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    ids = (5, 6, 7, 31, 32, 96)
    expected = tokens_of(lm, PROMPT, params(allowed_token_ids=list(ids)))
    assert tokens_of(lm, PROMPT, params(constraint=OnlyThese(ids))) == expected and set(expected) <= set(ids)


@AHEAD
def test_the_next_set_follows_the_last_token(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    spec, before = Alternating(), lm.engine.num_overlapped_steps
    found = tokens_of(lm, PROMPT, greedy(constraint=spec))
    assert found == stepwise(lm, PROMPT, 24)
    assert spec.made[0].tokens == found, "each token is accepted once"
    assert (lm.engine.num_overlapped_steps > before) is ahead


@AHEAD
def test_plain_requests_beside_constrained_ones_are_as_alone(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    plain = [
        greedy(30, logprobs=3),
        drawn(5, 30, logprobs=2, top_k=20),
        greedy(7),
        drawn(6, 19, repetition_penalty=1.3),
    ]
    bound = [greedy(20, constraint=Alternating()), drawn(8, 26, constraint=Alternating(), top_p=0.9)]
    alone = [lm.generate([PROMPT], params)[0] for params in plain]
    bound_alone = [tokens_of(lm, OTHER, params) for params in bound]
    handles = [lm.submit(PROMPT, params) for params in plain] + [lm.submit(OTHER, params) for params in bound]
    found = [handle.result() for handle in handles]
    for one, expected in zip(found, alone, strict=False):
        assert one.token_ids == expected.token_ids and one.logprobs == expected.logprobs
    assert [one.token_ids for one in found[4:]] == bound_alone
    for tokens in bound_alone:
        next_set(tokens)


@AHEAD
def test_each_completion_has_its_own_constraint(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    spec = Alternating()
    (found,) = lm.generate([PROMPT], drawn(2, 20, n=4, constraint=spec))
    assert [history.tokens for history in spec.made] == [one.token_ids for one in found.outputs]
    assert len({tuple(one.token_ids) for one in found.outputs}) == 4


@pytest.mark.thin(9)
@AHEAD
def test_preempted_requests_accept_each_token_once(lm_of, ahead):
    arguments = {"async_scheduling": ahead, "enable_prefix_caching": False, "max_model_len": 120}
    lm, roomy = lm_of("llama", kv_cache_tokens=256, **arguments), lm_of("llama", kv_cache_tokens=4096, **arguments)
    specs = [Alternating() for _ in range(6)]
    params = [drawn(i, 90, constraint=spec) for i, spec in enumerate(specs)]
    before = lm.engine.scheduler.num_preempted
    found = [one.token_ids for one in lm.generate([PROMPT] * 6, params)]
    assert lm.engine.scheduler.num_preempted > before
    assert [spec.made[0].tokens for spec in specs] == found
    assert found == [tokens_of(roomy, PROMPT, one) for one in params]


def test_logprobs_are_of_the_raw_logits(lm_of):
    lm: LM = lm_of("llama")
    (found,) = lm.generate([PROMPT], greedy(1, constraint=OnlyThese((5, 9)), logprobs=64))
    (free,) = lm.generate([PROMPT], greedy(1, logprobs=64))
    assert found.token_ids[0] in (5, 9)
    same = found.logprobs[0].keys() & free.logprobs[0].keys()
    assert len(same) >= 64 and all(found.logprobs[0][t].logprob == free.logprobs[0][t].logprob for t in same)


def test_bias_and_bans_act_within_the_constraint(lm_of):
    lm: LM = lm_of("llama")
    spec = OnlyThese((5, 6, 7))
    assert tokens_of(lm, PROMPT, greedy(3, constraint=spec, logit_bias={6: 90.0, 50: 99.0})) == [6] * 3
    found = tokens_of(lm, PROMPT, greedy(9, constraint=spec, bad_words=["w5", "w6 w7"]))
    assert set(found) <= {6, 7} and (6, 7) not in itertools.pairwise(found)


@AHEAD
def test_an_end_of_sequence_token_ends_where_it_is_allowed(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    params = {"temperature": 0, "max_tokens": 9, "stop_token_ids": [20, 21, 33, 64, 96]}
    (found,) = lm.generate([PROMPT], SamplingParams(**params, constraint=Alternating()))
    assert found.finish_reason in ("stop", "length")
    assert found.token_ids == stepwise(lm, PROMPT, len(found.token_ids))


# -- beside hooks ----------------------------------------------------------------------------


@AHEAD
def test_a_steered_and_captured_request_is_constrained(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    steer = Steer("resid_post.1", torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(4)), scale=6.0)
    beside = lm.submit(OTHER, greedy(30))
    (found,) = lm.generate(
        [PROMPT], greedy(16, constraint=Alternating()), interventions=[steer], capture=["resid_post.1", "logits"]
    )
    assert found.token_ids == stepwise(lm, PROMPT, 16, interventions=[steer]) != stepwise(lm, PROMPT, 16)
    logits = found.activations["logits"]
    for i in range(1, 16):
        row, allowed = logits[i - 16], list(next_set(found.token_ids[:i]))
        assert row.isfinite().all() and allowed[int(row[allowed].argmax())] == found.token_ids[i]
    assert beside.result().token_ids == tokens_of(lm, OTHER, greedy(30))


@AHEAD
def test_a_trace_edits_logits_before_the_mask(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    with lm.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True, constraint=Alternating()) as tracer:
        kept = [].save()
        for _ in tracer.iter[:]:
            lm.logits[:, 50] = 1e4
            lm.logits[:, 8] = 1e3
            lm.logits[:, 64] = 1e3
            kept.append(lm.samples.clone())
    assert [int(x) for x in kept] == [8, 64] * 3, "50 is most likely, and forbidden"


@AHEAD
def test_a_samples_edit_outside_of_the_constraint_ends_its_own_request(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    beside = [lm.submit(OTHER, greedy(30)), lm.submit(OTHER, greedy(30, constraint=Alternating()))]
    with (
        pytest.raises(ConstraintError, match=r"History forbids token 50.*`samples`"),
        lm.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, constraint=Alternating()) as tracer,
    ):
        for step in tracer.iter[:]:
            if step == 3:
                lm.samples[:] = 50
    assert beside[0].result().token_ids == tokens_of(lm, OTHER, greedy(30))
    assert beside[1].result().token_ids == stepwise(lm, OTHER, 30)


@AHEAD
def test_a_samples_edit_within_the_constraint_is_accepted(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    spec = Alternating()
    with lm.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True, constraint=spec) as tracer:
        for step in tracer.iter[:]:
            lm.samples[:] = 40 if step % 2 == 0 else 20
    assert spec.made[0].tokens == [40, 20] * 3


# -- failures ------------------------------------------------------------------------------


@pytest.mark.thin(4)
@AHEAD
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Failing("mask", error=KeyError("x")), r"mask\(\) of the constraint FailingHistory raised KeyError"),
        (Failing("accept", error=SystemExit(3)), r"accept\(\) of the constraint FailingHistory raised SystemExit"),
        (Failing("nothing"), "allows no token"),
        (Failing("mask", after=0, error=RuntimeError("at once")), "at once"),
    ],
)
def test_a_constraint_that_fails_ends_its_own_request(lm_of, ahead, spec, message):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    expected = [tokens_of(lm, OTHER, greedy(20)), stepwise(lm, PROMPT, 20)]
    beside = [lm.submit(OTHER, greedy(20)), lm.submit(PROMPT, greedy(20, constraint=Alternating()))]
    failing = [
        lm.submit(PROMPT, greedy(20, constraint=spec)),
        lm.submit(PROMPT, greedy(20, constraint=spec), capture=["resid_post.0", "logits"]),
    ]
    for handle in failing:
        with pytest.raises(RequestError, match=message) as raised:
            handle.result()
        assert isinstance(raised.value.__cause__, ConstraintError)
    assert [handle.result().token_ids for handle in beside] == expected


def test_bans_that_leave_no_allowed_token_end_the_request(lm_of):
    lm: LM = lm_of("llama")
    with pytest.raises(RequestError, match="bad_words may forbid all tokens that it allows here: leave them out"):
        lm.generate([PROMPT], greedy(3, constraint=OnlyThese((5,)), bad_words=["w5"]))


@AHEAD
def test_an_aborted_request_leaves_the_others_as_they_are(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    expected = tokens_of(lm, PROMPT, greedy(60, constraint=Alternating()))
    aborted = lm.submit(OTHER, greedy(110, constraint=Alternating()))
    kept = lm.submit(PROMPT, greedy(60, constraint=Alternating()))
    aborted.cancel()
    assert kept.result().token_ids == expected and aborted.result().finish_reason == "abort"


def test_what_cannot_be_a_constraint_is_refused_before_anything_runs(lm_of):
    lm: LM = lm_of("llama")
    with pytest.raises(ValueError, match=r"constraint=.*expected an object with make"):
        SamplingParams(constraint=lambda row: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PromptError, match="the constraint Failing could not be made: RuntimeError"):
        lm.generate([PROMPT], greedy(constraint=Failing("make", error=RuntimeError("bad grammar"))))


def test_plain_steps_ask_for_no_mask(lm_of, monkeypatch):
    lm: LM = lm_of("llama")
    asked: list[int] = []
    monkeypatch.setattr(lm.engine, "_constrain", lambda step: asked.append(1))
    tokens_of(lm, PROMPT, greedy(4))
    assert not asked and not lm.engine.ends.constrained


@AHEAD
def test_a_failed_step_is_sampled_again_by_the_same_masks(lm_of, ahead, monkeypatch):
    lm: LM = lm_of("llama", async_scheduling=ahead, lower_traces="off")
    expected, spec, failed = tokens_of(lm, PROMPT, greedy(100, constraint=Alternating())), Alternating(), []
    sampler = lm.runner.sampler

    def fails_with_a_trace(logits: torch.Tensor, batch: Any) -> Any:
        deadline = time.monotonic() + 60
        while not failed and len(lm.engine.ends.subscribers) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)  # the trace comes while the other request decodes
        if lm.runner.interleaver.traces and batch.constrained is not None:
            failed.append(batch.rows)
            raise RuntimeError("of a test")
        return sampler(logits, batch)

    monkeypatch.setattr(lm.runner, "sampler", fails_with_a_trace)
    constrained = lm.submit(PROMPT, greedy(100, constraint=spec))
    with pytest.raises(RuntimeError, match="of a test"), lm.trace(OTHER):
        lm.logits.save()
    assert constrained.result().token_ids == expected == spec.made[0].tokens
    assert failed == [2], "one step held both, and the trace ended with it"


@AHEAD
@pytest.mark.parametrize("traced", [False, True])
def test_a_step_that_fails_before_it_is_sampled_is_forgotten(lm_of, ahead, traced, monkeypatch):
    """An error between the pass and the sampling, with and without blocks: later steps run."""
    lm: LM = lm_of("llama", async_scheduling=ahead)
    expected = tokens_of(lm, PROMPT, greedy(constraint=Alternating()))

    def fails(step: Any) -> None:
        raise RuntimeError("of a test")

    with monkeypatch.context() as patched:
        patched.setattr(lm.engine, "_constrain", fails)
        if traced:
            with (
                pytest.raises(RuntimeError, match="of a test"),
                lm.generate(PROMPT, max_tokens=4, temperature=0, constraint=Alternating()),
            ):
                lm.logits.save()
        else:
            with pytest.raises(RequestError, match="of a test"):
                tokens_of(lm, PROMPT, greedy(constraint=Alternating()))
    assert tokens_of(lm, PROMPT, greedy(constraint=Alternating())) == expected


@pytest.mark.thin(3)
@AHEAD
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)]
)  # two: without a prefix cache and with one
def test_mixed_traffic_in_a_small_pool_is_as_alone(lm_of, ahead, seed):
    """Constrained, failing, steered, captured, traced, cancelled and plain requests; preempted, each as alone."""
    arguments = {"async_scheduling": ahead, "max_model_len": 120, "enable_prefix_caching": bool(seed % 2)}
    lm, roomy = lm_of("llama", kv_cache_tokens=288, **arguments), lm_of("llama", kv_cache_tokens=4096, **arguments)
    rng = random.Random(seed)
    steer = Steer("resid_post.1", torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(seed)), scale=5.0)
    jobs: list[tuple[str, SamplingParams, dict[str, Any]]] = []
    for i in range(14):
        make = greedy if rng.random() < 0.4 else partial(drawn, 100 * seed + i)
        constraint = rng.choice([None, OnlyThese((5, 40, 96)), Alternating(), Alternating()])
        hooks: dict[str, Any] = rng.choice(
            [{}, {}, {"interventions": [steer]}, {"capture": ["resid_post.0", "logits"]}]
        )
        jobs.append((rng.choice([PROMPT, OTHER]), make(rng.randrange(5, 90), constraint=constraint, logprobs=2), hooks))
    alone = [roomy.generate([prompt], params, **hooks)[0] for prompt, params, hooks in jobs]
    before = lm.engine.scheduler.num_preempted
    with held(lm):
        cancelled = [lm.submit(OTHER, drawn(i, 100, constraint=Alternating())) for i in range(2)]
        handles = [lm.submit(prompt, params, **hooks) for prompt, params, hooks in jobs]
        failing = lm.submit(PROMPT, greedy(60, constraint=Failing("mask", after=9, error=KeyError("late"))))
    with lm.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True, constraint=Alternating()) as tracer:
        traced = [].save()
        for _ in tracer.iter[:]:
            lm.logits[:, 50] = 1e4
            traced.append(lm.samples.clone())
    for handle in cancelled:
        handle.cancel()
    for handle, one in zip(handles, alone, strict=True):
        found = handle.result()
        assert found.token_ids == one.token_ids
        assert [entry.keys() for entry in found.logprobs] == [entry.keys() for entry in one.logprobs]
        for site in one.activations:
            assert found.activations[site].shape == one.activations[site].shape
    with pytest.raises(RequestError, match="late"):
        failing.result()
    assert [int(token) for token in traced] == stepwise(roomy, PROMPT, 12), "50 is never allowed"
    assert lm.engine.scheduler.num_preempted > before


@pytest.mark.thin(9)
@AHEAD
def test_slow_masks_take_turns_and_others_do_not_wait_for_all_of_them(ahead, lm_of, monkeypatch):
    """Six requests with masks of 4 ms: a step has time for two or three, and each has its turn."""
    lm, kept = lm_of("llama", async_scheduling=ahead), (5, 6, 7, 31, 96)
    wanted = [tokens_of(lm, PROMPT, drawn(seed, constraint=OnlyThese(kept))) for seed in range(6)]
    other = tokens_of(lm, OTHER, greedy(40))
    steps: list[list[str]] = []
    ids: dict[bool, list[str]] = {True: [], False: []}
    execute = lm.runner.execute_model

    def seen(step: Any) -> Any:
        for new in step.scheduled_new_reqs:
            ids[isinstance(new.params.constraint, Slow)].append(new.request_id)
        steps.append([entry.request_id for entry in step.scheduled if entry.decodes])
        return execute(step)

    monkeypatch.setattr(lm.runner, "execute_model", seen)
    with held(lm):
        plain = lm.submit(OTHER, greedy(40))
        slow = [lm.submit(PROMPT, drawn(seed, constraint=Slow(kept, 0.004))) for seed in range(6)]
    assert [handle.result().token_ids for handle in slow] == wanted and plain.result().token_ids == other
    counts = [sum(request_id in ids[True] for request_id in step) for step in steps]
    live = [i for i, count in enumerate(counts) if count]
    assert max(counts[live[len(live) // 2] :]) <= 3 < max(counts), "the first steps do not know that they are slow"
    assert sum(ids[False][0] in step for step in steps[: live[-1]]) == 39, "it took part in each step"
    shares = [sum(request_id in step for step in steps[: live[len(live) // 2]]) for request_id in ids[True]]
    assert len(shares) == 6 and max(shares) - min(shares) <= 2, shares
