"""Random requests with random drafts against an engine without: the same tokens, receipts, captures and log probabilities.

The pools are small: pages are evicted, requests preempted, prompts chunked. Pages and rows are counted after every step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB, held
from helpers_constraints import Alternating, OnlyThese
from helpers_declared import lms, vector
from helpers_drafts import Told, checked_steps
from helpers_traffic import Call, random_edit

from pymllm_interp import LM, Capture, Gate, SamplingParams, Steer
from pymllm_interp.client.completion import CompletionOutput, RequestOutput
from pymllm_interp.interventions import Generated

pytestmark = pytest.mark.local  # looks into an engine of this process
WIDTH = CONFIGS["llama"]().hidden_size
VECTORS = [4 * vector(WIDTH, seed) for seed in range(3)]
BASE = [random.Random(seed).randrange(VOCAB - 2) for seed in range(48)]
WAIT = 600
SERVERS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "ahead": {"async_scheduling": True},
    "prefill first": {"prefill_policy": "prefill_first", "page_size": 8, "kv_cache_tokens": 96},
}


def edit_of(rng: random.Random, length: int) -> Any:
    site = rng.choice(["embed", "resid_post.0", "attn_out.1", "resid_post.2", "logits"])
    if site == "logits":
        return Steer(site, torch.eye(VOCAB)[rng.randrange(VOCAB)], scale=2.0, positions="generated")
    earlier = {"site": "embed", "scope": rng.choice(["token", "prompt"])} if site == "resid_post.2" else {}
    return random_edit(rng, site, length, VECTORS, lambda: Gate(vector(WIDTH, 9), 0.0, **earlier))


def random_params(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters of all kinds."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randrange(1, 20), "ignore_eos": True}
    chosen = {
        "sampled": {"temperature": 1.0, "seed": rng.randrange(100), "n": rng.choice([1, 3]), "top_k": rng.choice([0, 20])},
        "filtered": {"temperature": 1.2, "seed": rng.randrange(100), "top_p": 0.8, "min_p": 0.02},
        "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
        "bias": {"logit_bias": {5: 3.0, 6: -2.0}},
        "allowed": {"allowed_token_ids": list(range(3, 60))},
        "bad words": {"bad_words": ["w7", "w3 w4", f"w{rng.randrange(VOCAB - 2)} w{rng.randrange(VOCAB - 2)}"]},
        "stops": {"stop_token_ids": [rng.randrange(VOCAB) for _ in range(12)], "min_tokens": rng.randrange(2)},
        "stop strings": {"stop": [f"w{rng.randrange(1, 9)}", "w33 w"], "include_stop_str_in_output": rng.random() < 0.5},
        "logprobs": {"logprobs": 2},
        "prompt logprobs": {"prompt_logprobs": 1},
        "constraint": {"constraint": rng.choice([OnlyThese((5, 6, 7, 31, 96)), Alternating()])},
        "off": {"speculate": False},
    }  # fmt: skip
    for name in chosen:
        if rng.random() < 0.17 and not ("constraint" in name and "allowed_token_ids" in params):
            params |= chosen[name]
    if "constraint" in params:  # whose few tokens these might forbid
        for name in ("bad_words", "stop_token_ids", "min_tokens"):
            params.pop(name, None)
    params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    return params


def random_call(rng: random.Random) -> Call:
    length = rng.randrange(2, 30)
    shared = rng.choice([0, length // 2, length])
    prompt = BASE[:shared] + [rng.randrange(VOCAB - 2) for _ in range(length - shared)]
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["interventions"] = [edit_of(rng, length) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.5:
        positions = rng.choice(["all", "prompt", "generated", [rng.randrange(length)], Generated(0, None, 3)])
        reduce = rng.choice([None, None, "mean", "last"])
        options["capture"] = [
            Capture("resid_post.1", positions=positions, reduce=reduce),
            Capture("attn_out.0", positions="generated"),
            Capture("logits", positions="generated"),
            *([Capture("pattern.1")] if rng.random() < 0.2 else []),
        ]
    if rng.random() < 0.2:
        options["priority"] = rng.randrange(3)
    traced = rng.random() < 0.15
    params = {"max_tokens": rng.randrange(1, 12)} if traced else random_params(rng)
    return Call(prompt, SamplingParams(**params), options, not traced and rng.random() < 0.12, traced)


def trace(lm: LM, call: Call) -> tuple[list[Any], torch.Tensor]:
    """What a trace read, and its tokens."""
    with lm.generate(call.prompt, max_new_tokens=call.params.max_tokens) as tracer:
        states = list().save()
        for step in tracer.iter[:]:
            if step == 1:
                lm.model.layers[0].output[:] += VECTORS[1].to(lm.device)
            states.append(lm.model.layers[1].output.clone())
        ids = tracer.result.save()
    return states, ids


def run(lm: LM, calls: list[Call]) -> None:
    """All at once, ten at a time."""

    def traced(call: Call) -> None:
        call.found = trace(lm, call)

    for first in range(0, len(calls), 10):
        wave = calls[first : first + 10]
        threads = [threading.Thread(target=traced, args=(call,)) for call in wave if call.traced]
        with held(lm) as arrived:
            for thread in threads:
                thread.start()
            arrived(len(threads))
            handles = [(c, lm.submit(c.prompt, c.params, **c.options)) for c in wave if not c.traced]
        for call, handle in handles:
            if call.aborted:
                handle.cancel()
        for call, handle in handles:
            call.found = handle.result(WAIT)
        for thread in threads:
            thread.join(WAIT)


def check(call: Call) -> None:
    if call.traced:
        (states, ids), (others, tokens) = call.found, call.wanted
        assert torch.equal(ids, tokens)
        torch.testing.assert_close(states, others, rtol=1e-4, atol=1e-4)
        return
    out, wanted = call.found, call.wanted
    for mine, other in zip(out.outputs, wanted.outputs, strict=True):
        if call.aborted and mine.finish_reason == "abort":
            assert mine.token_ids == other.token_ids[: len(mine.token_ids)]
        else:
            check_completion(mine, other)
    found = out.prompt_logprobs or []
    assert call.aborted or len(found) == len(wanted.prompt_logprobs or [])
    for one, two in zip(found, wanted.prompt_logprobs or [], strict=False):
        assert one == two or {token: value.logprob for token, value in one.items()} == rounded(two)


def rounded(entry: dict[int, Any]) -> dict[int, Any]:
    return {token: pytest.approx(value.logprob, abs=2e-5) for token, value in entry.items()}


def check_completion(mine: CompletionOutput, other: CompletionOutput) -> None:
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(mine, name) == getattr(other, name), name
    assert type(mine.error) is type(other.error)
    assert len(mine.logprobs or []) == len(other.logprobs or [])
    for one, two in zip(mine.logprobs or [], other.logprobs or [], strict=True):
        assert {token: value.logprob for token, value in one.items()} == rounded(two)
    assert list(mine.activations) == list(other.activations)
    for site, rows in other.activations.items():
        torch.testing.assert_close(mine.activations[site], rows, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine.activations.positions[site], other.activations.positions[site])
    if other.receipt is None:
        return
    assert mine.receipt.interventions == other.receipt.interventions
    assert mine.receipt.captures == other.receipt.captures and mine.receipt.spec == other.receipt.spec


def traffic(lm: LM, reference: LM, drafter: Told | None, seed: int, count: int) -> list[Call]:
    """Random calls of both engines, compared. A drafter is told what the reference says. Returns the calls."""
    rng = random.Random(seed)
    calls = [random_call(rng) for _ in range(count)]
    for call in calls:
        if call.traced:
            call.wanted = trace(reference, call)
        else:
            (call.wanted,) = reference.generate([call.prompt], call.params, **call.options)
            if drafter is not None:
                drafter.tell([call.wanted])
    with checked_steps(lm) as drafted:
        run(lm, calls)
    for number, call in enumerate(calls):
        try:
            check(call)
        except AssertionError as error:
            raise AssertionError(f"call {number} of seed {seed}: {call}") from error
    outs: list[RequestOutput] = [call.found for call in calls if not call.traced]
    counts = [one.drafts for out in outs for one in out.outputs if one.drafts is not None]
    assert sum(c.drafted for c in counts) == sum(len(d) for drafts in drafted for d in drafts.values())
    assert sum(c.drafted for c in counts) > sum(c.accepted for c in counts) >= (0 if drafter is None else 11)
    return calls


def speculating(load: Callable[..., LM], seed: int, **options: Any) -> tuple[LM, Told]:
    drafter = Told(seed=seed, k=1 + seed % 4)
    small = {"page_size": 4, "kv_cache_tokens": 72, "max_num_tokens": 32, "max_running_requests": 6}
    return load("llama", speculative=drafter, **{**small, **options}), drafter


@pytest.mark.parametrize(
    ("seed", "server"),
    [
        *((0, server) for server in SERVERS),
        pytest.param(1, "ahead", marks=pytest.mark.slow),
    ],  # more seeds: the next test
)
def test_random_traffic_with_random_drafts_gives_what_it_gives_without(
    seed: int, server: str, model_folder: Callable[[str], Path]
) -> None:
    with lms("functions", model_folder) as load:
        lm, drafter = speculating(load, seed, **SERVERS[server])
        traffic(lm, load("llama", enable_prefix_caching=False), drafter, seed, 40)
        stats = lm.engine.stats()
        assert stats["preempted"] and stats["prefix_cache"]["cached_tokens"]["plain"]
        assert set(stats["speculation"]["undrafted"]) == {"speculate=False", "a trace", "attention patterns"}
        assert stats["free_kv_tokens"] == lm.runner.max_total_num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tables", "graphs"])
def test_random_traffic_with_drafts_as_on_cuda(way: str, model_folder: Callable[[str], Path]) -> None:
    """Ops from device tables, captures through the ring, replayed steps; launched ahead."""
    with lms(way, model_folder) as load:
        lm, drafter = speculating(load, 2, async_scheduling=True)
        traffic(lm, load("llama", enable_prefix_caching=False), drafter, 2, 30)
        assert "pooled captures on CUDA" in lm.engine.stats()["speculation"]["undrafted"]


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("seed", range(100, 108))
def test_much_random_traffic_with_random_drafts(seed: int, server: str, model_folder: Callable[[str], Path]) -> None:
    with lms("functions", model_folder) as load:
        lm, drafter = speculating(load, seed, **SERVERS[server])
        traffic(lm, load("llama", enable_prefix_caching=False), drafter, seed, 300)
