"""Each rule of the prefix cache on a running engine: what is shared, and that what comes out is what an engine without it gives."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB, held
from helpers_declared import WAYS, lms, vector
from helpers_outputs import assert_equal

from pymllm_interp import LM, Ablate, Capture, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.interventions import Knockout
from pymllm_interp.runner.executions import Executions

LmOf = Callable[..., LM]
PAGE, LENGTH = 4, 22
FULL = (LENGTH - 1) // PAGE * PAGE
"""Tokens of a prompt that another request with it can reuse."""
WIDTH = CONFIGS["llama"]().hidden_size
STRONG, OTHER = 8 * vector(WIDTH, 1), 8 * vector(WIDTH, 2)
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
WAIT = 600


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB - 2) for _ in range(length)]


PROMPT = prompt_of(LENGTH, 5)


class Pair:
    """An engine with a prefix cache, and one without."""

    def __init__(self, lm: LM, reference: LM) -> None:
        self.lm, self.reference = lm, reference

    def run(self, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
        """The output, once it has been found equal to that of the engine without a cache."""
        (out,) = self.lm.generate([prompt], params, **options)
        (wanted,) = self.reference.generate([prompt], params, **options)
        assert_equal(out, wanted)
        assert wanted.num_cached_tokens == 0
        self.lm.engine.call(self.lm.engine.scheduler.check_integrity)
        return out

    def cached(self, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> int:
        """Tokens that were reused."""
        return self.run(prompt, params, **options).num_cached_tokens


@pytest.fixture
def pair(lm_of: LmOf, request: pytest.FixtureRequest) -> Pair:
    server = {"page_size": PAGE, "kv_cache_tokens": 2048, **getattr(request, "param", {})}
    found = Pair(lm_of("llama", **server), lm_of("llama", enable_prefix_caching=False, **server))
    found.lm.reset_prefix_cache()
    return found


# -- plain requests --------------------------------------------------------------------


def test_plain_requests_share_whole_pages_and_compute_at_least_one_token(pair: Pair) -> None:
    assert pair.cached(PROMPT) == 0
    assert pair.cached(PROMPT) == FULL
    assert pair.cached(PROMPT[:20]) == 16, "the last token is always computed"
    assert pair.cached(PROMPT[:9] + prompt_of(13, 8)) == 8
    assert pair.cached(prompt_of(LENGTH, 9)) == 0


def test_the_next_turn_reuses_the_answer_but_for_the_last_sampled_token(pair: Pair) -> None:
    for extra in range(8):
        pair.lm.reset_prefix_cache()
        prompt = prompt_of(LENGTH + extra, 11)
        out = pair.run(prompt)
        chat = prompt + out.token_ids
        assert pair.cached([*chat, 7, 8]) == (len(chat) - 1) // PAGE * PAGE


def test_prompts_of_one_call_compute_their_common_beginning_once(pair: Pair) -> None:
    tails = [[seed, 50, 51] for seed in range(6)]
    with computed(pair.lm) as counts:
        outs = pair.lm.generate([PROMPT + tail for tail in tails], GREEDY)
    steps = 6 * (6 - 1)  # of the tokens after the first
    assert sum(counts) - steps == 25 + 5 * (25 - FULL)
    assert [out.num_cached_tokens for out in outs] == [0] + [FULL] * 5
    for out, wanted in zip(outs, pair.reference.generate([PROMPT + tail for tail in tails], GREEDY), strict=True):
        assert_equal(out, wanted)


def test_a_prompt_in_chunks_is_shared_while_it_is_computed(lm_of: LmOf) -> None:
    server = {"page_size": PAGE, "kv_cache_tokens": 2048, "max_num_tokens": 16}
    pair = Pair(lm_of("llama", **server), lm_of("llama", enable_prefix_caching=False, **server))
    prompts = [prompt_of(60, 3) + prompt_of(5, seed) for seed in range(4)]
    with computed(pair.lm) as counts:
        outs = pair.lm.generate(prompts, GREEDY)
    assert sum(counts) == 65 + 3 * 5 + 4 * 5
    for out, wanted in zip(outs, pair.reference.generate(prompts, GREEDY), strict=True):
        assert_equal(out, wanted)


def test_completions_and_runs_of_a_sweep_share_their_prompt(pair: Pair) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=4)
    with computed(pair.lm) as counts:
        (out,) = pair.lm.generate([PROMPT], params)
    assert sum(counts) == LENGTH + 3 * (LENGTH - FULL) + 4 * 3
    (wanted,) = pair.reference.generate([PROMPT], params)
    assert [o.token_ids for o in out.outputs] == [o.token_ids for o in wanted.outputs]
    runs = [None, *(Steer("resid_post.1", STRONG, scale=s, positions=[-2]) for s in (0.5, 1.0, 2.0))]
    outs, others = pair.lm.sweep(PROMPT, runs, GREEDY), pair.reference.sweep(PROMPT, runs, GREEDY)
    assert [out.num_cached_tokens for out in outs] == [FULL] * 4
    for out, other in zip(outs, others, strict=True):
        assert_equal(out, other)


@pytest.mark.parametrize("option", ["off", "skip", "salt"])
def test_requests_can_opt_out(pair: Pair, option: str) -> None:
    pair.cached(PROMPT)
    if option == "off":
        (out,) = pair.reference.generate([PROMPT], GREEDY)
        assert out.num_cached_tokens == 0
    elif option == "skip":
        assert pair.cached(PROMPT, SamplingParams(temperature=0, skip_reading_prefix_cache=True)) == 0
        assert pair.cached(PROMPT) == FULL
    else:
        assert pair.cached(PROMPT, cache_salt="a") == 0
        assert pair.cached(PROMPT, cache_salt="b") == 0
        assert pair.cached(PROMPT, cache_salt="a") == FULL
        assert pair.cached(PROMPT) == FULL
        steer = [Steer("resid_post.0", STRONG, positions=[9])]
        assert pair.cached(PROMPT, cache_salt="a", interventions=steer) == 8


# -- interventions ---------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 3, 4, 9, 19, 20, 21])
def test_an_edit_shares_the_pages_before_it_with_everybody_and_none_after(pair: Pair, position: int) -> None:
    before = min(position // PAGE * PAGE, FULL)
    steer = [Steer("resid_post.0", STRONG, positions=[position])]
    pair.cached(PROMPT)
    assert pair.cached(PROMPT, interventions=steer) == before
    pair.lm.reset_prefix_cache()
    pair.cached(PROMPT, interventions=steer)
    assert pair.cached(PROMPT) == before, "KV that was steered is not given to a plain request"
    assert pair.cached(PROMPT, interventions=steer) == FULL


EDITS = {
    "Steer": lambda: Steer("resid_post.0", STRONG, positions=[9]),
    "another vector": lambda: Steer("resid_post.0", OTHER, positions=[9]),
    "another scale": lambda: Steer("resid_post.0", STRONG, scale=0.5, positions=[9]),
    "another site": lambda: Steer("resid_post.1", STRONG, positions=[9]),
    "another position": lambda: Steer("resid_post.0", STRONG, positions=[10]),
    "another norm": lambda: Steer("resid_post.0", STRONG, positions=[9], norm="preserve"),
    "Scale": lambda: Scale("resid_post.0", 0.1, positions=[9]),
    "Ablate": lambda: Ablate("resid_post.0", STRONG, positions=[9]),
    "Patch": lambda: Patch("resid_post.0", STRONG, positions=[9]),
    "rows": lambda: Patch("resid_post.0", torch.stack([STRONG, OTHER]), positions=[9, 13]),
    "other rows": lambda: Patch("resid_post.0", torch.stack([OTHER, STRONG]), positions=[9, 13]),
    "one head": lambda: Scale("z.0", 0.0, positions=[9], heads=[1]),
    "another head": lambda: Scale("z.0", 0.0, positions=[9], heads=[2]),
    "Knockout": lambda: Knockout(0, from_=[9], to=[2]),
    "other keys": lambda: Knockout(0, from_=[9], to=[3]),
    "other heads": lambda: Knockout(0, from_=[9], to=[2], heads=[0]),
    "K": lambda: Steer("k.-1", torch.ones(24), positions=[9]),
    "V": lambda: Steer("v.-1", torch.ones(24), positions=[9]),
}


@pytest.mark.few("name", min(EDITS), "other rows", "one head", "Knockout", "V")
@pytest.mark.parametrize("name", EDITS)
def test_equal_edits_share_with_each_other_and_with_no_other_edit(pair: Pair, name: str) -> None:
    for make in EDITS.values() if name == min(EDITS) else ():  # once: all edits are known to the engine before a reset
        pair.cached(PROMPT, interventions=[make()])
    expected = dict.fromkeys(EDITS, 8) | {name: FULL}
    pair.lm.reset_prefix_cache()
    pair.cached(PROMPT, interventions=[EDITS[name]()])
    found = {other: pair.cached(PROMPT, interventions=[make()]) for other, make in EDITS.items()}
    if name in ("rows", "other rows", "Patch"):
        # A patch of one vector writes what the first of the rows does; its page is not shared all the same.
        assert found[name] == FULL
    assert found == expected


def test_the_order_of_edits_at_one_site_is_part_of_what_they_do(pair: Pair) -> None:
    edits = [Steer("resid_post.0", STRONG, positions=[9]), Scale("resid_post.0", 0.5, positions=[9])]
    pair.cached(PROMPT, interventions=edits)
    assert pair.cached(PROMPT, interventions=edits[::-1]) == 8
    assert pair.cached(PROMPT, interventions=edits) == FULL


def test_an_edit_of_all_positions_is_shared_by_prompts_of_other_lengths(pair: Pair) -> None:
    for positions in ("all", "prompt"):
        steer = [Steer("resid_post.0", STRONG, positions=positions)]
        pair.lm.reset_prefix_cache()
        assert pair.cached(PROMPT, interventions=steer) == 0
        assert pair.cached(PROMPT + prompt_of(9, 6), interventions=steer) == FULL
        assert pair.cached(PROMPT) == 0


def test_edits_of_generated_positions_share_the_whole_prompt_and_nothing_after_it(pair: Pair) -> None:
    """A prompt of whole pages has no page in a namespace of the edit."""
    for scale, length in ((0.5, LENGTH), (1.0, FULL)):
        prompt, steer = PROMPT[:length], [Steer("resid_post.0", STRONG, scale=scale, positions="generated")]
        pair.lm.reset_prefix_cache()
        pair.cached(prompt, SamplingParams(max_tokens=0))
        out = pair.run(prompt, interventions=steer)
        assert out.num_cached_tokens == (length - 1) // PAGE * PAGE
        assert pair.cached([*prompt, *out.token_ids, 5, 6, 7]) == FULL, "the answer's KV was steered"


@pytest.mark.parametrize("site", ["resid_post.-1", "mlp_out.-1", "attn_out.-1", "q.-1", "final_norm", "logits"])
def test_what_acts_after_the_last_keys_and_values_changes_no_kv(pair: Pair, site: str) -> None:
    width = {"q.-1": 72, "logits": 97}.get(site, WIDTH)
    edit = [Steer(site, vector(width, 3), positions="all")]
    out = pair.run(PROMPT, interventions=edit)
    assert pair.cached([*PROMPT, *out.token_ids, 3]) == (LENGTH + len(out.token_ids) - 1) // PAGE * PAGE
    assert pair.cached(PROMPT, interventions=edit) == FULL


def test_a_knockout_edits_later_layers_from_its_first_cut_query_on(pair: Pair) -> None:
    pair.cached(PROMPT)
    assert pair.cached(PROMPT, interventions=[Knockout("*", from_="all", to=[13], heads=[0, 1])]) == 12
    assert pair.cached(PROMPT, interventions=[Knockout(1, from_=[-1], to=[0])]) == FULL
    assert pair.cached(PROMPT, interventions=[Knockout(-1, from_=[10], to=[0])]) == FULL, "no layer comes after it"
    assert pair.cached(PROMPT, interventions=[Knockout(1, from_=[10], to=[0])]) == 8


def test_a_steered_prompt_does_not_poison_a_plain_one(model_folder: Any) -> None:
    """Bit for bit what a fresh engine gives, and so is the KV that it computes."""
    options = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "kv_cache_tokens": 256}
    with LM(model_folder("llama"), **options) as lm, LM(model_folder("llama"), **options) as fresh:
        lm.generate([PROMPT], GREEDY, interventions=[Steer("resid_post.*", 10 * STRONG)])
        lm.generate([PROMPT], GREEDY, interventions=[Patch("embed", STRONG, positions="prompt")])
        with lm.generate(PROMPT, max_new_tokens=3):
            lm.model.layers[0].output[:] = 100.0
        (out,), (wanted,) = lm.generate([PROMPT], GREEDY), fresh.generate([PROMPT], GREEDY)
        assert out.num_cached_tokens == 0
        assert out.token_ids == wanted.token_ids and out.logprobs == wanted.logprobs
        (again,), (other,) = lm.generate([PROMPT], GREEDY), fresh.generate([PROMPT], GREEDY)
        assert again.num_cached_tokens == other.num_cached_tokens == FULL
        assert again.token_ids == other.token_ids and again.logprobs == other.logprobs


# -- what must be computed ----------------------------------------------------------------


@pytest.mark.thin(8)
@pytest.mark.parametrize("positions", [[0], [3, 9], [13], [-1], slice(8, None, 3), "prompt", "generated", "all"])
@pytest.mark.parametrize("reduce", [None, "mean", "last"])
def test_captures_reuse_what_is_before_the_first_captured_position(pair: Pair, positions: Any, reduce: Any) -> None:
    first = {"prompt": 0, "all": 0, "generated": LENGTH}.get(positions) if isinstance(positions, str) else None
    if first is None:
        first = positions.start if isinstance(positions, slice) else min(p % LENGTH for p in positions)
    pair.cached(PROMPT)
    capture = [Capture("resid_post.1", positions=positions, reduce=reduce), Capture("k.2", positions=positions)]
    out = pair.run(PROMPT, capture=capture)
    assert out.num_cached_tokens == min(first // PAGE * PAGE, FULL)
    missed = FULL - out.num_cached_tokens
    assert out.receipt.num_cached_tokens == out.num_cached_tokens
    assert out.receipt.not_reused == (f"{missed} tokens: captured" if missed else "")


def test_a_capturing_request_leaves_its_kv_to_others(pair: Pair) -> None:
    pair.cached(PROMPT, capture=["resid_post.1"])
    assert pair.cached(PROMPT) == FULL
    assert pair.cached(PROMPT + prompt_of(9, 1), capture=["resid_post.1"]) == 0
    assert pair.cached(PROMPT + prompt_of(9, 1)) == 28, "what followed the known pages was added when it ended"


def test_log_probabilities_of_the_prompt_need_all_of_it(pair: Pair) -> None:
    pair.cached(PROMPT)
    out = pair.run(PROMPT, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2))
    assert out.num_cached_tokens == 0 and len(out.prompt_logprobs or []) == LENGTH
    assert pair.lm.engine.stats()["prefix_cache"]["not_reused"]["logits of the prompt"] >= 1


def test_rows_on_which_a_gate_is_counted_are_computed(pair: Pair) -> None:
    gated = [Steer("resid_post.0", STRONG, positions=slice(9, None), when=Gate(vector(WIDTH, 4), 0.0))]
    first, again = pair.run(PROMPT, interventions=gated), pair.run(PROMPT, interventions=gated)
    assert again.num_cached_tokens == 8
    assert again.receipt.interventions[0].gate_fires == first.receipt.interventions[0].gate_fires > 0


@pytest.mark.parametrize("pair", [{"lower_traces": "off"}], indirect=True)
def test_a_trace_shares_nothing_and_leaves_nothing(pair: Pair) -> None:
    pair.cached(PROMPT)
    for lm in (pair.lm, pair.reference):
        with lm.generate(PROMPT, max_new_tokens=4) as tracer:
            seen = list().save()
            for _ in tracer.iter[:]:
                lm.model.layers[0].output[:] += 3 * STRONG
                seen.append(lm.model.layers[1].output.clone()[0])
        assert [len(states) for states in seen] == [LENGTH, 1, 1, 1]
    assert pair.cached(PROMPT) == FULL
    edited = prompt_of(LENGTH, 77)
    with pair.lm.generate(edited, max_new_tokens=4):
        pair.lm.model.layers[0].output[:] = 50.0
    assert pair.cached(edited) == 0, "what a block may have written is nobody else's"
    assert pair.lm.engine.stats()["prefix_cache"]["not_reused"]["a trace"] >= 2


def test_persistent_edits_are_traces(pair: Pair) -> None:
    pair.cached(PROMPT)
    with pair.lm.edit() as (_, edited):
        edited.model.layers[0].output[:] = 50.0
    (out,) = edited.generate([PROMPT], GREEDY)
    assert out.num_cached_tokens == 0
    assert pair.cached(PROMPT) == FULL


def test_a_pass_with_gradients_sees_the_whole_prompt(pair: Pair) -> None:
    pair.cached(PROMPT)
    grads = []
    for lm in (pair.lm, pair.reference):
        with lm.trace(PROMPT):
            state = lm.model.layers[0].output
            with lm.lm_head.output[0, -1].max().backward():
                grad = state.grad.save()
        grads.append(grad)
    assert grads[0].shape == (1, LENGTH, WIDTH)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("way", WAYS)
def test_edits_and_captures_after_reused_pages_in_every_way_that_hooks_run(way: str, model_folder: Any) -> None:
    """Prompts in chunks, whose first pages are known, beside others; captures leave through the ring where there are tables."""
    base = prompt_of(40, 3)
    specs = [
        [Steer("resid_post.0", STRONG, positions=slice(21, None))],
        [Steer("resid_post.0", STRONG, positions=slice(21, None)), Scale("mlp_out.1", 0.5, positions="generated")],
        [Patch("resid_post.1", torch.stack([STRONG, OTHER]), positions=[30, 37])],
        [],
    ]
    captures = [
        [Capture("resid_post.{0,2}", positions=slice(25, None, 2)), Capture("mlp_out.1", positions="generated")],
        [Capture("resid_post.1", positions=slice(33, None), reduce="mean"), Capture("attn_out.0", positions=[-1])],
        [Capture("resid_post.*", positions=slice(18, None), reduce="last")],
        [Capture("resid_post.1", positions=[35, 39], dtype=torch.float16)],
    ]
    with lms(way, model_folder) as load:
        server = {"page_size": PAGE, "max_num_tokens": 24}
        pair = Pair(load("llama", **server), load("llama", enable_prefix_caching=False, **server))
        pair.cached(base)
        prompts = [[*base, seed] for seed in range(4)]
        outs, others = (
            lm.generate(prompts, GREEDY, interventions=specs, capture=captures) for lm in (pair.lm, pair.reference)
        )
        for out, other in zip(outs, others, strict=True):
            assert_equal(out, other)
        assert [out.num_cached_tokens for out in outs] == [20, 32, 16, 32], "equal edits share within one step, too"


# -- what drops the cache ---------------------------------------------------------------------


def test_edited_weights_drop_what_the_old_ones_computed(model_folder: Any) -> None:
    options = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "kv_cache_tokens": 256}
    with LM(model_folder("llama"), **options) as lm, LM(model_folder("llama"), **options) as fresh:
        lm.generate([PROMPT], GREEDY)
        for each in (lm, fresh):
            each.model.layers[0].mlp.down_proj.weight[:] *= -3
        (out,), (wanted,) = lm.generate([PROMPT], GREEDY), fresh.generate([PROMPT], GREEDY)
        assert out.num_cached_tokens == 0 and out.logprobs == wanted.logprobs
        (again,) = lm.generate([PROMPT], GREEDY)
        assert again.num_cached_tokens == FULL


def test_kv_of_two_versions_of_the_weights_is_not_kept(model_folder: Any) -> None:
    options = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "kv_cache_tokens": 256}
    with LM(model_folder("llama"), **options) as lm:
        stream = lm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        next(stream)
        lm.model.layers[0].mlp.down_proj.weight[:] *= -3
        text = list(stream)
        assert text
        assert lm.engine.stats()["prefix_cache"]["kept_tokens"] == 0
        (out,) = lm.generate([PROMPT], GREEDY)
        assert out.num_cached_tokens == 0


def test_a_cache_is_reset_by_hand(pair: Pair) -> None:
    pair.cached(PROMPT)
    pair.lm.reset_prefix_cache()
    assert pair.cached(PROMPT) == 0


def test_what_a_failed_step_was_to_write_is_not_kept(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "kv_cache_tokens": 256}
    with LM(model_folder("llama"), **options) as lm, LM(model_folder("llama"), **options) as fresh:
        forward, failing = Executions.run, [True]

        def run(self: Any, *args: Any) -> Any:
            if self is lm.runner.executions and failing:
                failing.clear()
                raise RuntimeError("planned")
            return forward(self, *args)

        monkeypatch.setattr(Executions, "run", run)
        other = PROMPT + prompt_of(9, 4)
        with held(lm):
            traced = [lm.submit(prompt, GREEDY) for prompt in (PROMPT, other)]
        for handle in traced:
            with pytest.raises(RuntimeError):
                handle.result(WAIT)
        lm.engine.call(lm.engine.scheduler.check_integrity)
        assert lm.engine.stats()["prefix_cache"]["kept_tokens"] == 0
        (out,), (wanted,) = lm.generate([PROMPT], GREEDY), fresh.generate([PROMPT], GREEDY)
        assert out.num_cached_tokens == 0 and out.logprobs == wanted.logprobs


def test_plain_requests_start_again_when_a_trace_beside_them_failed_the_step(
    lm_of: LmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"page_size": PAGE, "kv_cache_tokens": 512, "lower_traces": "off"}
    pair = Pair(lm_of("llama", **server), lm_of("llama", enable_prefix_caching=False, **server))
    lm = pair.lm
    lm.reset_prefix_cache()
    forward, failing = Executions.run, [True]

    def run(self: Any, *args: Any) -> Any:
        if self is lm.runner.executions and failing:
            failing.clear()
            raise RuntimeError("planned")
        return forward(self, *args)

    monkeypatch.setattr(Executions, "run", run)
    prompts = [PROMPT, PROMPT + prompt_of(9, 4)]
    errors: list[BaseException] = []

    def trace() -> None:
        try:
            with lm.generate(prompt_of(5, 1), max_new_tokens=2):
                lm.model.layers[0].output.save()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=trace)
    with held(lm) as arrived:
        thread.start()
        arrived(1)
        handles = [lm.submit(prompt, GREEDY) for prompt in prompts]
    thread.join(WAIT)
    assert errors
    for prompt, handle in zip(prompts, handles, strict=True):
        assert_equal(handle.result(WAIT), pair.reference.generate([prompt], GREEDY)[0])
    lm.engine.call(lm.engine.scheduler.check_integrity)


# -- preemption ----------------------------------------------------------------------------------


def test_a_preempted_request_goes_on_from_what_the_cache_kept(lm_of: LmOf) -> None:
    tight = {"page_size": PAGE, "kv_cache_tokens": 96}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [prompt_of(20, seed) for seed in range(3)]
    roomy = lm_of("llama", enable_prefix_caching=False, page_size=PAGE, kv_cache_tokens=2048)
    wanted = roomy.generate(prompts, params, capture=["resid_post.1"])
    recomputed: list[float] = []
    for caching in (True, False):
        lm = lm_of("llama", enable_prefix_caching=caching, **tight)
        lm.reset_prefix_cache()
        before = lm.engine.stats()
        with held(lm):
            handles = [lm.submit(prompt, params, capture=["resid_post.1"]) for prompt in prompts]
        for handle, other in zip(handles, wanted, strict=True):
            out = handle.result(WAIT)
            assert_equal(out, other)
            assert len(out.activations["resid_post.1"]) == 20 + 30 - 1, "each position once"
        after = lm.engine.stats()
        preempted = after["preempted"] - before["preempted"]
        assert 0 < preempted <= 3, "admission does not thrash"
        again = after["prefix_cache"]["recomputed_tokens"] - before["prefix_cache"]["recomputed_tokens"]
        recomputed.append(again / preempted)
        lm.engine.call(lm.engine.scheduler.check_integrity)
    assert recomputed[0] < recomputed[1]


# -- policies ---------------------------------------------------------------------------------------


def test_options_are_checked(pair: Pair) -> None:
    for wrong in ({"priority": "high"}, {"priority": [1, 2]}, {"cache_salt": ""}, {"cache_salt": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            pair.lm.generate([PROMPT], GREEDY, **wrong)


def test_rates_are_counted_by_kind_of_namespace(pair: Pair) -> None:
    before = pair.lm.engine.stats()["prefix_cache"]
    pair.cached(PROMPT)
    pair.cached(PROMPT)
    pair.cached(PROMPT, interventions=[Steer("resid_post.0", OTHER, positions=[9])])
    after = pair.lm.engine.stats()["prefix_cache"]

    def grown(name: str, kind: str) -> int:
        return after[name].get(kind, 0) - before[name].get(kind, 0)

    assert (grown("asked_tokens", "plain"), grown("cached_tokens", "plain")) == (2 * LENGTH, FULL)
    assert (grown("asked_tokens", "edited"), grown("cached_tokens", "edited")) == (LENGTH, 8)
    assert after["hit_rate"]["plain"] == after["cached_tokens"]["plain"] / after["asked_tokens"]["plain"]


# -- helpers ------------------------------------------------------------------------------------------


class computed:
    """Token rows of each step that the engine runs meanwhile."""

    def __init__(self, lm: LM) -> None:
        self.scheduler, self.counts = lm.engine.scheduler, list[int]()

    def __enter__(self) -> list[int]:
        schedule = self.scheduler.schedule

        def record() -> Any:
            step = schedule()
            self.counts.append(step.total_num_scheduled_tokens)
            return step

        self.scheduler.schedule = record  # type: ignore[method-assign]
        return self.counts

    def __exit__(self, *exc: object) -> None:
        del self.scheduler.schedule


def test_random_prompts_of_one_base_give_what_an_engine_without_a_cache_gives(pair: Pair) -> None:
    rng, base = random.Random(4), prompt_of(40, 2)
    prompts = [base[: rng.randrange(1, 40)] + prompt_of(rng.randrange(1, 12), i) for i in range(30)]
    for out, wanted in zip(pair.lm.generate(prompts, GREEDY), pair.reference.generate(prompts, GREEDY), strict=True):
        assert_equal(out, wanted)
