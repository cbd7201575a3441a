"""Random requests with shared prefixes against an engine without a prefix cache, in a pool so small that pages are evicted and
requests preempted. After every step the engine's pages, rows and tree are counted anew.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB, held
from helpers_declared import lms, vector
from helpers_outputs import assert_equal
from helpers_traffic import Call, random_edit

from pymllm_interp import LM, Capture, Gate, SamplingParams
from pymllm_interp.client.completion import RequestOutput

WIDTH = CONFIGS["llama"]().hidden_size
VECTORS = [4 * vector(WIDTH, seed) for seed in range(2)]
BASES = [[random.Random(seed).randrange(VOCAB - 2) for seed in range(start, start + 48)] for start in (0, 100)]
SITES = ["embed", "resid_post.0", "attn_out.1", "resid_post.2"]
WAIT = 600
SERVERS = {
    "in turn": {},
    "ahead": {"async_scheduling": True},
    "prefill first": {"prefill_policy": "prefill_first", "queue_order": "lpm"},
    "wide pages": {"page_size": 8, "kv_cache_tokens": 96, "async_scheduling": True, "queue_order": "lpm"},
}


def random_call(rng: random.Random) -> Call:
    length = rng.randrange(2, 30)
    shared = rng.choice([0, length // 2, length - 1, length])
    prompt = rng.choice(BASES)[:shared] + [rng.randrange(VOCAB - 2) for _ in range(length - shared)]
    params: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randrange(1, 14), "ignore_eos": True}
    options: dict[str, Any] = {}
    if rng.random() < 0.2:
        params |= {"temperature": 1.0, "seed": rng.randrange(100), "n": rng.choice([1, 3])}
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 1
    if rng.random() < 0.3:
        params["logprobs"] = 2
    if rng.random() < 0.5:
        options["interventions"] = [
            random_edit(rng, rng.choice(SITES), length, VECTORS, lambda: Gate(VECTORS[0], -1e6))
            for _ in range(rng.randrange(1, 3))
        ]
    if rng.random() < 0.4:
        positions = rng.choice(["all", "prompt", "generated", [rng.randrange(length)], [-1]])
        options["capture"] = [
            Capture("resid_post.1", positions=positions, reduce=rng.choice([None, None, "mean", "last"]))
        ]
    if rng.random() < 0.2:
        options["cache_salt"] = rng.choice("ab")
    if rng.random() < 0.2:
        options["priority"] = rng.randrange(3)
    traced = rng.choice(["reads", "writes"]) if rng.random() < 0.2 else None
    if traced:
        params = {"max_tokens": params["max_tokens"]}
    return Call(prompt, SamplingParams(**params), options, aborted=not traced and rng.random() < 0.15, traced=traced)


def trace(lm: LM, call: Call) -> tuple[list[Any], torch.Tensor]:
    """What a trace read, and its tokens."""
    with lm.generate(call.prompt, max_new_tokens=call.params.max_tokens) as tracer:
        states = list().save()
        for step in tracer.iter[:]:
            if call.traced == "writes" and step != 1:
                lm.model.layers[0].output[:] += VECTORS[1]
            states.append(lm.model.layers[1].output.clone())
        ids = tracer.result.save()
    return states, ids


@contextmanager
def checked(lm: LM) -> Iterator[None]:
    """`check_integrity` after every step."""
    step = lm.engine.step

    def checking() -> None:
        step()
        lm.engine.scheduler.check_integrity()

    lm.engine.step = checking  # type: ignore[method-assign]
    try:
        yield
    finally:
        del lm.engine.step


def check(call: Call) -> None:
    if call.traced:
        (states, ids), (others, tokens) = call.found, call.wanted
        assert torch.equal(ids, tokens)
        for state, other in zip(states, others, strict=True):
            torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-3)
        return
    out: RequestOutput = call.found
    if not call.aborted or all(o.finish_reason == "length" for o in out.outputs):
        assert_equal(out, call.wanted)
        return
    for mine, other in zip(out.outputs, call.wanted.outputs, strict=True):
        assert mine.token_ids == other.token_ids[: len(mine.token_ids)]
        for site, rows in mine.activations.items() if mine.activations else ():
            if call.options["capture"][0].reduce is None:
                torch.testing.assert_close(rows, other.activations[site][: len(rows)], rtol=1e-4, atol=1e-3)


def drive(lm: LM, reference: LM, seed: int, count: int) -> None:
    rng = random.Random(seed)
    calls = [random_call(rng) for _ in range(count)]
    for call in calls:
        if call.traced:
            call.wanted = trace(reference, call)
        else:
            (call.wanted,) = reference.generate([call.prompt], call.params, **call.options)

    def run(call: Call) -> None:
        call.found = trace(lm, call)

    with checked(lm):
        left = list(calls)
        while left:
            wave, left = left[:10], left[10:]
            threads = [threading.Thread(target=run, args=(call,)) for call in wave if call.traced]
            with held(lm) as arrived:
                for thread in threads:
                    thread.start()
                arrived(len(threads))
                handles = [
                    (call, lm.submit(call.prompt, call.params, **call.options)) for call in wave if not call.traced
                ]
            for call, handle in handles:
                if call.aborted:
                    handle.cancel()
            for call, handle in handles:
                call.found = handle.result(WAIT)
            for thread in threads:
                thread.join(WAIT)
    for number, call in enumerate(calls):
        try:
            check(call)
        except AssertionError as error:
            raise AssertionError(f"call {number} of seed {seed}: {call}") from error


@pytest.mark.parametrize(
    ("seed", "server"), [*((0, server) for server in SERVERS), pytest.param(1, "wide pages", marks=pytest.mark.slow)]
)
def test_random_traffic_gives_what_an_engine_without_a_cache_gives(
    lm_of: Callable[..., LM], seed: int, server: str
) -> None:
    traffic(lm_of, seed, server, 40)


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("seed", range(100, 110))
def test_much_random_traffic_gives_what_an_engine_without_a_cache_gives(
    lm_of: Callable[..., LM], seed: int, server: str
) -> None:
    traffic(lm_of, seed, server, 400)


def traffic(lm_of: Callable[..., LM], seed: int, server: str, count: int) -> None:
    options = {
        "page_size": 4,
        "kv_cache_tokens": 72,
        "max_num_tokens": 32,
        "max_running_requests": 6,
        **SERVERS[server],
    }
    lm, reference = lm_of("llama", **options), lm_of("llama", enable_prefix_caching=False, kv_cache_tokens=2048)
    before = lm.engine.stats()
    drive(lm, reference, seed, count)
    after = lm.engine.stats()
    cache, earlier = after["prefix_cache"], before["prefix_cache"]
    assert after["preempted"] > before["preempted"]
    assert cache["evicted_tokens"] > earlier["evicted_tokens"]
    for kind in ("plain", "edited"):
        assert cache["cached_tokens"].get(kind, 0) > earlier["cached_tokens"].get(kind, 0)
    assert after["free_kv_tokens"] == lm.runner.max_total_num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tables", "graphs"])
def test_random_traffic_with_hooks_as_on_cuda(way: str, model_folder: Any) -> None:
    """Ops from device tables, captures through the ring, replayed steps; launched ahead."""
    with lms(way, model_folder) as load:
        lm = load(
            "llama", page_size=4, kv_cache_tokens=72, max_num_tokens=32, max_running_requests=6, async_scheduling=True
        )
        reference = load("llama", enable_prefix_caching=False)
        drive(lm, reference, 7, 40)
        stats = lm.engine.stats()
        assert stats["preempted"] and stats["prefix_cache"]["evicted_tokens"]
        assert stats["prefix_cache"]["cached_tokens"]["edited"]
