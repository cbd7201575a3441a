"""Speculative decoding: drafters, what is accepted, and that drafts change nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCAB
from helpers_constraints import Alternating, Failing
from helpers_declared import lms, vector
from helpers_drafts import KINDS, Faulty, Told, checked_steps
from helpers_runner import random_ids

from pymllm_interp import LM, Capture, Gate, SamplingParams, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.client.handle import RequestError
from pymllm_interp.config import ServerConfig
from pymllm_interp.core.request_drafts import (
    MAX_MISSES,
    MISSED_PAUSE,
    MISSES_AGAIN,
    PAUSE,
    WINDOW,
    RequestDrafts,
)
from pymllm_interp.core.step import SchedulerOutput
from pymllm_interp.core.structured.token_constraint import ConstraintError
from pymllm_interp.core.unsupported import OPTIONS
from pymllm_interp.interventions import Knockout
from pymllm_interp.runner import executions
from pymllm_interp.sampling import RejectionSampler
from pymllm_interp.server.command import hint_of
from pymllm_interp.speculative.drafter import MAX_DRAFTS, SpeculativeConfig
from pymllm_interp.speculative.ngram import NgramDrafter, continuation
from pymllm_interp.utils.arguments import PromptError

pytestmark = pytest.mark.local  # looks into an engine of this process
PROMPTS = [random_ids(7, seed=1), random_ids(12, seed=2)]
NEW = 24


def greedy(tokens: int = NEW, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **kwargs)


def drawn(tokens: int = NEW, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=1.3, seed=4, max_tokens=tokens, ignore_eos=True, **kwargs)


@pytest.fixture(scope="module")
def plain(lm_of: Callable[..., LM]) -> LM:
    """The engine without drafts."""
    return lm_of("llama")


@pytest.fixture
def with_drafter(model_folder: Callable[[str], Path]) -> Any:
    """(drafter, **arguments) -> an LM over the same weights."""
    made: list[LM] = []

    def load(speculative: Any, **kwargs: Any) -> LM:
        made.append(
            LM(model_folder("llama"), **with_tuning(dtype="float32", device="cpu", speculative=speculative, **kwargs))
        )
        return made[-1]

    yield load
    for lm in made:
        lm.shutdown()


def counts_of(outs: Sequence[RequestOutput]) -> tuple[int, int]:
    """(drafts, accepted drafts) of these outputs."""
    found = [one.drafts for out in outs for one in out.outputs if one.drafts is not None]
    return sum(c.drafted for c in found), sum(c.accepted for c in found)


# -- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"method": "ngram"},
            ValueError,
            r"speculative\['num_speculative_tokens'\]=None: expected a whole number from 1",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, ValueError, "=0: expected a whole number from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": MAX_DRAFTS + 1}, ValueError, "=33: expected"),
        ({"method": "ngram", "num_speculative_tokens": True}, ValueError, "=True: expected"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, ValueError, "=2.0: expected"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            ValueError,
            "prompt_lookup_min=3 is above prompt_lookup_max=2",
        ),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 0}, ValueError, "prompt_lookup_max"),
        ({"method": "medusa", "num_speculative_tokens": 2}, ValueError, "'medusa'.*is not supported: 'ngram', "),
        ({"method": "nagram", "num_speculative_tokens": 2}, ValueError, "'nagram'.*expected one of 'ngram', "),
        ({"num_speculative_tokens": 2}, ValueError, "expected one of 'ngram'"),
        ({"method": "ngram", "quantization": "fp8"}, TypeError, "the draft model has the model's dtype"),
        ({"method": "ngram", "num_speculativ_tokens": 1}, TypeError, "did you mean num_speculative_tokens"),
        ("ngram", TypeError, "expected {'method': 'ngram'"),
        (NgramDrafter, TypeError, "expected {'method': 'ngram'"),
        (Told(k=0), ValueError, "Told.num_speculative_tokens=0: expected"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(given, error, message):
    with pytest.raises(error, match=message):
        ServerConfig(speculative=given)


def test_settings_have_the_defaults_of_vllm():
    of, base = SpeculativeConfig.of, {"method": "ngram", "num_speculative_tokens": 3}
    assert of(None) is None and of(base) == SpeculativeConfig("ngram", 3, 5, 5)
    assert of({**base, "prompt_lookup_max": 4}) == SpeculativeConfig("ngram", 3, 4, 4)
    assert of({**base, "prompt_lookup_min": 2}) == SpeculativeConfig("ngram", 3, 2, 2)
    drafter = Faulty([])
    found = of(drafter)
    assert found is not None and found.num_speculative_tokens == 4 and found.make() is drafter


@pytest.mark.parametrize("name", ["speculative_config", "num_speculative_tokens", "prompt_lookup_max"])
def test_the_keywords_of_vllm_say_what_they_are_here(name):
    with pytest.raises(TypeError, match=rf"LM\(\) has no argument '{name}': here it is speculative="):
        LM("demo", **with_tuning(**{name: 3}))
    assert name not in OPTIONS
    assert hint_of(["--speculative-config", "{}"]) == "--speculative-config: here it is --option speculative={}"


# -- the drafter of n-grams -------------------------------------------------------------------


def looked_up(tokens: list[int], longest: int, shortest: int, k: int) -> list[int]:
    """What `continuation` gives, in plain Python."""
    for size in range(longest, shortest - 1, -1):
        ends = (
            [i for i in range(size, len(tokens)) if tokens[i - size : i] == tokens[-size:]]
            if size <= len(tokens)
            else []
        )
        if ends:
            full = [end for end in ends if end + k <= len(tokens)]
            end = full[-1] if full else ends[0]
            return tokens[end : end + k]
    return []


@pytest.mark.parametrize("vocab", [1, 2, 5, 50])
def test_the_longest_n_gram_is_continued(vocab):
    rng = random.Random(vocab)
    num_found = 0
    for _ in range(400):
        tokens = [rng.randrange(vocab) for _ in range(rng.randrange(1, 60))]
        shortest, k = rng.randrange(1, 4), rng.randrange(1, 6)
        longest = shortest + rng.randrange(4)
        found = continuation(np.array(tokens, dtype=np.int32), longest, shortest, k)
        assert found == looked_up(tokens, longest, shortest, k), (tokens, longest, shortest, k)
        num_found += bool(found)
    assert num_found > 20


def test_the_drafter_of_n_grams_follows_a_growing_output():
    rng, drafter = random.Random(0), NgramDrafter(3, 1)
    requests: Any = [
        type("R", (), {"prompt_token_ids": [rng.randrange(4) for _ in range(n)], "output_token_ids": []})()
        for n in (1, 9)
    ]
    for _ in range(200):
        for request in requests:
            request.output_token_ids += [rng.randrange(4) for _ in range(rng.randrange(3))]
        wanted = [looked_up(r.prompt_token_ids + r.output_token_ids, 3, 1, 4) for r in requests]
        assert drafter.propose(requests, 4) == wanted
    del request
    requests.clear()
    assert not drafter._texts, "the tokens of requests that are gone are kept"


# -- what is accepted ---------------------------------------------------------------------------


def test_drafts_are_accepted_up_to_the_first_other_token():
    rng = random.Random(3)
    for _ in range(200):
        drafts = [
            None if rng.random() < 0.2 else [rng.randrange(3) for _ in range(rng.randrange(5))]
            for _ in range(rng.randrange(1, 6))
        ]
        drafts.append([1])
        chosen = [None if own is None else [rng.randrange(3) for _ in range(len(own) + 1)] for own in drafts]
        sampled = torch.tensor([token for own in chosen if own for token in own], dtype=torch.int32)
        sampler = RejectionSampler(drafts)
        found = sampler(sampled)
        for i, (own, tokens) in enumerate(zip(drafts, chosen, strict=True)):
            number = int(found.num_sampled[i])
            if own is None or tokens is None:
                assert number == 0 and int(found.num_rejected[i]) == 0
                continue
            right = [a == b for a, b in zip(own, tokens, strict=False)]
            accepted = right.index(False) if False in right else len(own)
            assert number == accepted + 1 and int(found.num_rejected[i]) == len(own) - accepted
            assert found.sampled[i, :number].tolist() == tokens[:number] and int(found.last[i]) == tokens[accepted]
        assert sampler.starts[-1] == len(sampled)


# -- tokens ----------------------------------------------------------------------------------


@pytest.mark.thin(4)
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("kind", [*KINDS, "all of them"])
def test_tokens_are_those_without_drafts(kind, ahead, plain, with_drafter):
    drafter = Told(*(KINDS if kind == "all of them" else [kind]))
    lm = with_drafter(drafter, async_scheduling=ahead)
    for params in (greedy(logprobs=2), drawn(logprobs=1, presence_penalty=0.5), drawn(n=3, top_k=30)):
        wanted = plain.generate(PROMPTS, params)
        drafter.tell(wanted)
        before = lm.engine.stats()["steps"]
        with checked_steps(lm):
            found = lm.generate(PROMPTS, params)
        assert [[o.token_ids for o in out.outputs] for out in found] == [
            [o.token_ids for o in out.outputs] for out in wanted
        ]
        for mine, other in zip(found, wanted, strict=True):
            for one, two in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                assert {t: v.logprob for t, v in one.items()} == pytest.approx(
                    {t: v.logprob for t, v in two.items()}, abs=1e-5
                )
        drafted, accepted = counts_of(found)
        assert drafted > 0 if kind != "empty" else drafted == 0
        if kind == "right" and params.n == 1:
            assert accepted == drafted and lm.engine.stats()["steps"] - before <= 1 + -(-NEW // 4)
        if kind == "wrong":
            assert accepted < drafted / 10


@pytest.mark.parametrize(
    ("family", "impl"),
    [("gpt2", "auto"), ("gemma3_text", "auto"), ("llama-rope", "auto"), ("mistral", "auto"), ("llama", "transformers")],
)
def test_other_families_are_drafted_for(family, impl, model_folder, lm_of):
    """Windows of attention, learned positions, RoPE of other kinds, and transformers' own modules."""
    drafter = Told("partly", "right")
    wanted = lm_of(family, impl=impl).generate(PROMPTS, greedy())
    drafter.tell(wanted)
    with LM(model_folder(family), dtype="float32", device="cpu", impl=impl, speculative=drafter) as lm:
        found = lm.generate(PROMPTS, greedy())
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    assert counts_of(found)[1] > 5


def test_n_grams_shorten_a_text_that_repeats(plain, with_drafter):
    lm = with_drafter({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1})
    bias = {5: 90.0, 6: 90.0}  # an output of two tokens repeats
    wanted, found = (one.generate(PROMPTS, greedy(40, logit_bias=bias)) for one in (plain, lm))
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    drafted, accepted = counts_of(found)
    assert accepted > drafted / 2 > 10
    stats = lm.engine.stats()
    assert stats["steps"] < 40 and stats["speculation"]["drafted"] == drafted
    assert stats["speculation"]["accepted"] == accepted


@pytest.mark.parametrize("way", ["functions", "graphs"])
def test_steps_without_drafts_are_those_of_an_engine_without(way, model_folder):
    with lms(way, model_folder) as load:
        found = []
        for options in ({}, {"speculative": Told("empty")}):
            lm = load("llama", max_running_requests=4, **options)
            lm.generate(PROMPTS, greedy())
            stats = lm.engine.stats()
            found.append((stats["steps"], stats["execution"]))
        assert found[0] == found[1]


# -- drafters that fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("out of ideas"), r"propose\(\) raised RuntimeError\('out of ideas'\)"),
        (SystemExit(3), r"propose\(\) raised SystemExit"),
        ([5, VOCAB], f"token {VOCAB} is proposed, but token ids go from 0 to {VOCAB - 1}"),
        ([-1], "token -1 is proposed"),
        (["w3"], "raised TypeError"),
        (7, "raised TypeError"),
        ("too few", "0 lists of drafts came for 2 requests"),
    ],
    ids=str,
)
def test_requests_of_a_drafter_that_fails_continue_without(answer, message, plain, with_drafter, caplog):
    drafter = Faulty(answer)
    lm = with_drafter(drafter)
    wanted = plain.generate(PROMPTS, greedy())
    for _ in range(2):
        found = lm.generate(PROMPTS, greedy())
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
        for out in found:
            assert len(out.warnings) == 1 and out.outputs[0].error is None
            assert out.warnings[0].startswith("the drafter Faulty: ")
            assert re.search(message, out.warnings[0])
    assert drafter.num_calls == 4, "it is asked no more for these requests"
    assert sum("the drafter Faulty" in record.message for record in caplog.records) == 1
    assert lm.engine.stats()["speculation"]["undrafted"] == {"the drafter failed": 4}


# -- hooks ----------------------------------------------------------------------------------


def specs() -> dict[str, Any]:
    width = CONFIGS["llama"]().hidden_size
    return {
        "interventions": [
            Steer("resid_post.1", vector(width, 1), scale=3.0, when=Gate(vector(width, 3), 0.1)),
            Steer("resid_mid.2", vector(width, 2), when=Gate(vector(width, 4), 0.0, site="resid_post.0")),
            Steer("logits", torch.eye(VOCAB)[7], scale=0.5),
        ],
        "capture": [
            Capture("resid_post.*"), Capture("attn_out.1", reduce="mean"), Capture("resid_mid.1", reduce="last"),
            Capture("logits", positions="generated"),
        ],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["right", "wrong", "partly"])
def test_hooks_see_accepted_positions_only_and_once(kind, plain, with_drafter):
    drafter = Told(kind)
    lm, params = with_drafter(drafter), drawn(logprobs=1)
    (wanted,) = plain.generate([PROMPTS[0]], params, **specs())
    drafter.tell([wanted])
    (found,) = lm.generate([PROMPTS[0]], params, **specs())
    receipt, other = found.receipt, wanted.receipt
    assert receipt is not None and other is not None and found.token_ids == wanted.token_ids
    assert receipt.interventions == other.interventions and receipt.captures == other.captures
    assert any(0 < (a.gate_fires or 0) < len(PROMPTS[0]) + NEW - 1 for a in other.interventions)
    assert (receipt.drafted, receipt.accepted) == counts_of([found])
    assert (
        receipt.accepted == {"right": receipt.drafted, "wrong": 0}.get(kind, receipt.accepted) and receipt.drafted > 0
    )
    assert list(found.activations) == list(wanted.activations)
    for site, rows in wanted.activations.items():
        torch.testing.assert_close(found.activations[site], rows, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.activations.positions[site], wanted.activations.positions[site])


def assert_states_equal(found: RequestOutput, wanted: RequestOutput) -> None:
    assert found.activations.keys() == wanted.activations.keys()
    for site, rows in wanted.activations.items():
        torch.testing.assert_close(found.activations[site], rows, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.activations.positions[site], wanted.activations.positions[site])


@pytest.mark.parametrize("way", ["tables", "graphs"])
def test_states_that_leave_by_the_ring_are_those_of_accepted_positions(way, model_folder):
    """Rows of rejected drafts are replaced when their positions are computed again; a small ring has no room for drafts."""
    drafter = Told("partly", "wrong", "right", k=4)
    captures = [
        Capture("resid_post.*"),
        Capture("mlp_out.1", positions=slice(1, None, 2)),
        Capture("logits", positions=[-1]),
    ]
    kept = {"kv_cache_tokens": 48, "page_size": 4, "max_num_tokens": 24, "max_running_requests": 3}
    with lms(way, model_folder) as load:
        reference = load("llama", enable_prefix_caching=False)
        width = reference.hidden_size * reference.num_layers * 4
        large, small = 64 << 20, 8 * (2 * width + 4 * VOCAB)
        for room in (large, small) if way == "tables" else (small,):
            lm = load("llama", speculative=drafter, capture_ring_bytes=room, **kept)
            prompts = [random_ids(n, seed=n) for n in (3, 8, 14, 17)]
            wanted = reference.generate(prompts, greedy(20), capture=captures)
            drafter.tell(wanted)
            with checked_steps(lm):
                found = lm.generate(prompts, greedy(20), capture=captures)
            for mine, other in zip(found, wanted, strict=True):
                assert mine.token_ids == other.token_ids
                assert mine.receipt is not None and other.receipt is not None
                assert mine.receipt.captures == other.receipt.captures
                assert_states_equal(mine, other)
            assert counts_of(found)[0] > counts_of(found)[1] > 0
            assert lm.engine.stats()["preempted"]


def test_hooks_that_cannot_take_drafts_back_have_none(model_folder):
    """As on CUDA, where kernels count gates, and pools fold states that leave by the ring."""
    width = CONFIGS["llama"]().hidden_size
    steer = Steer("resid_post.1", vector(width, 1), scale=2.0)
    gated = Steer("resid_post.1", vector(width, 1), when=Gate(vector(width, 3), 0.1))
    options = {
        "": {"interventions": [steer], "capture": ["resid_post.1", "logits"]}, "gates on CUDA": {"interventions": [gated]},
        "pooled captures on CUDA": {"capture": [Capture("resid_post.1", reduce="mean")]},
        "attention patterns": {"capture": [Capture("pattern.1")]},
    }  # fmt: skip
    drafter = Told("partly", "right")
    with lms("tables", model_folder) as load:
        reference, lm = load("llama"), load("llama", speculative=drafter)
        for why, given in options.items():
            wanted = reference.generate(PROMPTS, greedy(5), **given)
            drafter.tell(wanted)
            found = lm.generate(PROMPTS, greedy(5), **given)
            assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
            assert (counts_of(found)[1] > 0) is (not why)
            for mine, other in zip(found, wanted, strict=True):
                assert_states_equal(mine, other)
            if why:
                assert all(out.outputs[0].drafts is None for out in found)
                assert lm.engine.stats()["speculation"]["undrafted"][why] == 2
                with pytest.raises(PromptError, match=f"speculate=True, but no drafts are proposed beside {why}"):
                    lm.generate(PROMPTS, greedy(speculate=True), **given)


def test_traced_requests_have_no_drafts(plain, with_drafter):
    drafter = Told("right")
    lm = with_drafter(drafter, lower_traces="off")
    drafter.tell(plain.generate([PROMPTS[0]], greedy()))
    with lm.generate(PROMPTS[0], temperature=0, max_tokens=6, ignore_eos=True) as tracer:
        saved = lm.model.layers[1].output.save()
        ids = tracer.result.save()
    assert saved.shape[1] == len(PROMPTS[0]) and drafter.num_calls == 0
    assert ids[0, -6:].tolist() == plain.generate([PROMPTS[0]], greedy())[0].token_ids[:6]
    assert lm.engine.stats()["speculation"]["undrafted"] == {"a trace": 1}
    with pytest.raises(PromptError, match="speculate=True, but no drafts are proposed beside a trace"):
        with lm.generate(PROMPTS[0], sampling_params=greedy(speculate=True)):
            lm.model.layers[1].output.save()


def test_a_lowered_trace_has_drafts(plain, with_drafter):
    """Its block runs after the request, and sees a step for each token that was accepted."""
    drafter = Told("right")
    drafter.tell(plain.generate([PROMPTS[0]], greedy()))
    found = []
    for one in (with_drafter(drafter), with_drafter(None)):
        with one.generate(PROMPTS[0], temperature=0, max_tokens=12, ignore_eos=True) as tracer:
            kept = list().save()
            for _ in tracer.iter[:]:
                kept.append(one.model.layers[1].output[0, -1])
            ids = tracer.result.save()
        assert tracer.receipt.lowered
        found.append((torch.stack(kept), ids, tracer.receipt))
    assert torch.equal(found[0][1], found[1][1]) and len(found[0][0]) == 12
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    assert found[0][2].accepted > 0 and found[0][2].reads == found[1][2].reads


def test_requests_may_ask_for_drafts_or_for_none(plain, with_drafter):
    drafter = Told("right")
    lm = with_drafter(drafter)
    drafter.tell(wanted := plain.generate(PROMPTS, greedy()))
    off, on = (lm.generate(PROMPTS, greedy(speculate=asked)) for asked in (False, True))
    assert [out.token_ids for out in off] == [out.token_ids for out in on] == [out.token_ids for out in wanted]
    assert counts_of(off) == (0, 0) and counts_of(on)[1] > 0
    with pytest.raises(PromptError, match="speculate=True, but this engine has no drafter"):
        plain.generate(PROMPTS, greedy(speculate=True))
    with pytest.raises(ValueError, match="speculate='yes'"):
        SamplingParams(speculate="yes")  # pyright: ignore[reportArgumentType]


# -- constraints ----------------------------------------------------------------------------


def test_a_constraint_is_rolled_back_from_drafts(plain, with_drafter):
    drafter = Told("partly", "right", "wrong")
    lm = with_drafter(drafter)
    for params in (greedy, drawn):
        wanted = plain.generate(PROMPTS, params(constraint=Alternating()))
        drafter.tell(wanted)
        spec = Alternating()
        found = lm.generate(PROMPTS, params(constraint=spec))
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
        assert [made.tokens for made in spec.made] == [out.token_ids for out in found], "each token is accepted once"
        assert counts_of(found)[1] > 0


@pytest.mark.parametrize("method", ["mask", "accept", "nothing"])
@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_a_constraint_that_fails_behind_a_draft_fails_where_it_does_without(method, kind, plain, with_drafter):
    """It fails with the tokens that it fails with otherwise, and not for a draft that is not accepted."""
    drafter = Told(kind)
    lm = with_drafter(drafter)
    drafter.tell(plain.generate([PROMPTS[0]], greedy(constraint=Alternating())))
    failing = Failing(method, after=5, error=RuntimeError("no more"))
    ends = []
    for one in (plain, lm):
        handle = one.submit(PROMPTS[0], greedy(constraint=failing, logprobs=0))
        with pytest.raises((RequestError, ConstraintError)) as raised:
            handle.result(600)
        out = handle.requests[0]
        said = str(raised.value).replace(out.request_id, "r")
        ends.append((out.output_token_ids, out.finish_reason, len(out.logprobs or []), said))
    assert ends[0] == ends[1]


# -- life of a request -------------------------------------------------------------------------


def test_drafts_that_are_not_accepted_pause(plain, with_drafter):
    drafter = Told("wrong", k=4)
    lm = with_drafter(drafter)
    (wanted,) = plain.generate([PROMPTS[0]], greedy(60))
    drafter.tell([wanted])
    (found,) = lm.generate([PROMPTS[0]], greedy(60))
    assert found.token_ids == wanted.token_ids
    assert counts_of([found]) == (WINDOW, 0) and drafter.num_calls == WINDOW // 4
    assert lm.engine.stats()["speculation"]["pauses"] == 1


@pytest.mark.parametrize("text", ["nothing to draft", "a text that repeats", "a drafter that cannot say"])
def test_steps_wait_for_tokens_only_where_drafts_are_foreseen(text, plain, with_drafter):
    drafter = NgramDrafter(2, 2)
    lm = with_drafter(drafter, async_scheduling=True)
    params = greedy(60, logit_bias=None if text == "nothing to draft" else {7: 1e4})
    if text == "nothing to draft":  # no pair of tokens comes twice
        lm.engine.call(lambda: setattr(drafter, "_shortest", 100))
        lm.engine.call(lambda: setattr(drafter, "_longest", 100))
    if text == "a drafter that cannot say":
        drafter.foresees = None  # type: ignore[method-assign, assignment]
    before = lm.engine.stats()["overlapped_steps"]
    (found,) = lm.generate([PROMPTS[0]], params)
    (wanted,) = plain.generate([PROMPTS[0]], params)
    assert found.token_ids == wanted.token_ids
    overlapped = lm.engine.stats()["overlapped_steps"] - before
    if text == "nothing to draft":
        assert overlapped >= 58 and counts_of([found]) == (0, 0)
    else:
        assert overlapped < 6 and counts_of([found])[1] > 40


def test_pauses_follow_what_came_of_the_drafts():
    drafts = RequestDrafts()
    assert not drafts.due(0) and drafts.due(1)
    for _ in range(48):
        assert not drafts.count(4, 2, 10), "drafts that are accepted do not pause"
    misses = [drafts.miss(20) for _ in range(MAX_MISSES)]
    assert misses.index(True) == MAX_MISSES - 1 and not drafts.due(21)
    for i in range(WINDOW // 4):
        assert drafts.count(4, 0, 40) is (i == WINDOW // 4 - 1)
    assert not drafts.due(40 + 2 * PAUSE - 1) and drafts.due(40 + 2 * PAUSE), "the second pause is twice as long"
    for _ in range(WINDOW // 4):
        assert not drafts.count(4, 4, 300)
    misses = [drafts.miss(300) for _ in range(MAX_MISSES)]
    assert misses.index(True) == MAX_MISSES - 1 and drafts.due(300 + MISSED_PAUSE)
    for pause in (2, 4, 8, 16, 16):
        misses = [drafts.miss(500) for _ in range(MISSES_AGAIN)]
        assert misses.index(True) == MISSES_AGAIN - 1
        assert not drafts.due(500 + pause * MISSED_PAUSE - 1) and drafts.due(500 + pause * MISSED_PAUSE)
    drafts.stop()
    assert not drafts.due(10**9)


def test_a_stop_drops_the_drafts_behind_it(plain, with_drafter):
    drafter = Told("right", k=8)
    lm = with_drafter(drafter)
    (text,) = plain.generate([PROMPTS[0]], greedy())
    drafter.tell([text])
    stop = text.token_ids[5]
    params = greedy(stop_token_ids=[stop], logprobs=1)
    (wanted,), (found,) = (one.generate([PROMPTS[0]], params, capture=["resid_post.1"]) for one in (plain, lm))
    assert found.token_ids == wanted.token_ids == text.token_ids[: text.token_ids.index(stop) + 1]
    assert found.finish_reason == "stop" and found.outputs[0].stop_reason == stop
    assert len(found.logprobs or []) == len(found.token_ids)
    assert found.activations["resid_post.1"].shape == wanted.activations["resid_post.1"].shape
    assert counts_of([found])[1] < len(found.token_ids) < counts_of([found])[0]


def test_a_stream_has_each_token_once(plain, with_drafter):
    drafter = Told("partly")
    lm = with_drafter(drafter)
    (wanted,) = plain.generate([PROMPTS[0]], greedy())
    drafter.tell([wanted])
    pieces = list(lm.stream(PROMPTS[0], greedy()))
    assert [token for piece in pieces for token in piece.token_ids] == wanted.token_ids
    assert "".join(pieces) == wanted.text


@pytest.mark.parametrize("beside", ["nothing", "long texts", "cut edges", "a trace"])
def test_drafts_are_rows_of_a_decode_pass_unless_something_needs_them_together(
    beside, plain, with_drafter, monkeypatch
):
    if beside == "long texts":
        monkeypatch.setattr(executions, "MAX_ROW_POSITIONS", 0)
    drafter = Told("right")
    lm = with_drafter(drafter, lower_traces="off")
    options = {"interventions": [Knockout(1, slice(3, None), 0)]} if beside == "cut edges" else {}
    wanted = plain.generate(PROMPTS, greedy(), **options)
    drafter.tell(wanted)
    prepare, modes = lm.runner.prepare_inputs, set[bool]()

    def noting(step: SchedulerOutput) -> Any:
        batch = prepare(step)
        if step.drafts:
            modes.add(batch.decodes)
        return batch

    monkeypatch.setattr(lm.runner, "prepare_inputs", noting)
    handles = [lm.submit(prompt, greedy(), **options) for prompt in PROMPTS]
    if beside == "a trace":
        with lm.generate(PROMPTS[0], max_new_tokens=3 * NEW, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                state = lm.model.layers[0].output.save()  # noqa: F841
    found = [handle.result() for handle in handles]
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    assert counts_of(found)[1] > NEW
    assert modes == {beside == "nothing"}


def test_a_pass_with_drafts_that_fails_is_run_again_without(plain, with_drafter):
    drafter = Told("wrong")
    lm = with_drafter(drafter, page_size=1)
    options = specs()
    wanted = plain.generate(PROMPTS, greedy(60), **options)
    drafter.tell(wanted)
    call, failed = lm.runner.executions.run, []

    def run(batch: Any, descriptor: Any) -> Any:
        output = call(batch, descriptor)
        if batch.batch_size > len(PROMPTS) and not failed:  # each draft is a row
            failed.append(batch)
            raise RuntimeError("the device is tired")
        return output

    lm.runner.executions.run = run  # type: ignore[method-assign]
    with checked_steps(lm):
        found = lm.generate(PROMPTS, greedy(60), **options)
    assert failed
    for mine, other in zip(found, wanted, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.receipt is not None and other.receipt is not None
        assert mine.receipt.interventions == other.receipt.interventions
        for site, rows in other.activations.items():
            torch.testing.assert_close(mine.activations[site], rows, rtol=1e-4, atol=1e-4)
    assert lm.engine.stats()["speculation"]["pauses"] == 2


def test_drafts_take_what_a_step_has_left(plain, with_drafter):
    """Rows of the budget, and free pages; no request is preempted for them."""
    drafter = Told("right", k=8)
    lm = with_drafter(drafter, max_num_tokens=6, max_running_requests=4, kv_cache_tokens=160, page_size=4)
    prompts = [random_ids(4, seed=seed) for seed in range(4)]
    wanted = plain.generate(prompts, greedy(30))
    drafter.tell(wanted)
    with checked_steps(lm) as drafted:
        found = lm.generate(prompts, greedy(30))
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    assert max(sum(map(len, step.values())) for step in drafted) <= 5 and counts_of(found)[1] > 0
    assert lm.engine.stats()["preempted"] == 0
