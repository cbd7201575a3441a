"""LM end to end on tiny random models in float32: the oracle is transformers' model over the same weights."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import pickle
import random
import re
import shutil
import threading
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB, held
from helpers_waits import WAIT, assert_idle, until

from pymllm_interp import LM, RequestOutput, SamplingParams
from pymllm_interp.client.calls.lm_arguments import ELSEWHERE, with_tuning
from pymllm_interp.client.detokenizer import StopStrings
from pymllm_interp.client.handle import RequestError
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.sampling_params import ELSEWHERE as SAMPLING_ELSEWHERE
from pymllm_interp.core.step import SchedulerOutput
from pymllm_interp.runner import model_runner
from pymllm_interp.runner.parts import LONG_PASS

LmOf = Callable[..., LM]
Oracle = Callable[[str], Any]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PAGE = 16
LENGTHS = [1, 2, 7, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 1]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB - 2) for _ in range(length)] for length in lengths]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def greedy(**kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **kwargs})


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab]."""
    return model(torch.tensor([ids])).logits[0].float()


def reference(
    model: Any, prompt: list[int], steps: int, adjust: Callable[[torch.Tensor, list[int]], torch.Tensor]
) -> list[int]:
    """Greedy tokens under logits that `adjust(logits, generated so far)` changes, each step from the whole sequence."""
    generated: list[int] = []
    for _ in range(steps):
        generated.append(int(adjust(logits_of(model, prompt + generated)[-1].clone(), generated).argmax()))
    return generated


@contextmanager
def recorded_steps(lm: LM) -> Iterator[list[SchedulerOutput]]:
    """The steps that the scheduler makes meanwhile."""
    steps: list[SchedulerOutput] = []
    schedule = lm.engine.scheduler.schedule

    def record() -> SchedulerOutput:
        step = schedule()
        steps.append(step)
        return step

    lm.engine.scheduler.schedule = record  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del lm.engine.scheduler.schedule


# -- greedy ------------------------------------------------------------------------


@pytest.mark.few("family", "llama-rope", "mistral", "gpt2", "gemma3_text", "gpt_oss", "gpt_neox")
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_of_a_ragged_batch_are_those_of_transformers_generate(
    family: str, lm_of: LmOf, oracle: Oracle
) -> None:
    prompts, model = prompts_of(LENGTHS), oracle(family)
    outs = lm_of(family).generate(prompts, greedy(max_tokens=18))
    for prompt, out in zip(prompts, outs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=18, do_sample=False)[0, len(prompt) :].tolist()
        assert out.token_ids == expected
        assert (out.prompt_token_ids, out.finish_reason, out.finished) == (prompt, "length", True)
    assert_idle(lm_of(family))


@pytest.mark.thin(8)
@pytest.mark.parametrize("max_num_tokens", [1, 4, 7, 64])
@pytest.mark.parametrize("family", ["llama", "llama-rope", "mistral", "qwen2"])
def test_chunks_change_neither_tokens_nor_prompt_logprobs(family: str, max_num_tokens: int, lm_of: LmOf) -> None:
    prompts, params = prompts_of([1, 9, 17, 30]), greedy(max_tokens=5, prompt_logprobs=2, logprobs=1)
    whole = lm_of(family).generate(prompts, params)
    chunked = lm_of(family, max_num_tokens=max_num_tokens).generate(prompts, params)
    assert tokens(chunked) == tokens(whole)
    for a, b in zip(chunked, whole, strict=True):
        assert_logprobs_close(a, b)


def assert_logprobs_close(a: RequestOutput, b: RequestOutput) -> None:
    for mine, other in ((a.prompt_logprobs, b.prompt_logprobs), (a.logprobs, b.logprobs)):
        assert mine is not None and other is not None and len(mine) == len(other)
        for left, right in zip(mine, other, strict=True):
            if left is None or right is None:
                assert left is right
                continue
            assert left.keys() == right.keys()
            assert all(abs(left[t].logprob - right[t].logprob) < 1e-4 for t in left)
            assert [left[t].rank for t in left] == [right[t].rank for t in right]


def test_requests_that_gave_way_have_the_tokens_and_logprobs_of_a_roomy_engine(lm_of: LmOf) -> None:
    prompts, params = prompts_of([3, 9, 6, 12, 1, 8], seed=4), greedy(max_tokens=14, logprobs=2, prompt_logprobs=1)
    tight = lm_of("llama", kv_cache_tokens=48, page_size=4)
    before = tight.engine.scheduler.num_preempted
    outs, roomy = tight.generate(prompts, params), lm_of("llama").generate(prompts, params)
    assert tight.engine.scheduler.num_preempted > before
    assert tokens(outs) == tokens(roomy)
    for a, b in zip(outs, roomy, strict=True):
        assert_logprobs_close(a, b)
    assert_idle(tight)


@pytest.mark.parametrize("kwargs", [{"prefill_policy": "prefill_first"}, {"page_size": 1}, {"max_running_requests": 2}])
def test_scheduling_does_not_change_tokens(kwargs: dict[str, Any], lm_of: LmOf) -> None:
    prompts = prompts_of(LENGTHS, seed=2)
    lm = lm_of("qwen3", max_num_tokens=20, **kwargs)
    handles = [lm.submit(prompt, GREEDY) for prompt in prompts]
    assert tokens([h.result(WAIT) for h in handles]) == tokens(lm_of("qwen3").generate(prompts, GREEDY))


@pytest.mark.parametrize(("policy", "long"), [("mixed", LONG_PASS), ("prefill_first", LONG_PASS), ("mixed", 1)])
def test_reading_tokens_a_step_late_changes_no_result(
    policy: str, long: int, lm_of: LmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V4: every kind of end and of giving way, in a pool that is too small, beside requests that need their tokens at once.
    The last case reads them between two layers of the next pass."""
    monkeypatch.setattr(model_runner, "LONG_PASS", long)
    rng = random.Random(11)
    server = {"kv_cache_tokens": 96, "page_size": 4, "max_num_tokens": 24, "prefill_policy": policy}
    late, lm = lm_of("llama", async_scheduling=True, **server), lm_of("llama", async_scheduling=False, **server)
    prompts = prompts_of([rng.randrange(1, 20) for _ in range(24)], seed=11)
    ends = [token for ids in tokens(lm_of("llama").generate(prompts[:6], greedy())) for token in ids[2:5]]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.9]), seed=i, max_tokens=rng.randrange(1, 16), n=rng.choice([1, 1, 3]),
            stop_token_ids=rng.choice([None, ends]), stop=rng.choice([None, ["w1", "w33"]]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]), min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, None, 2]), prompt_logprobs=rng.choice([None, None, 1]),
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    before = lm.engine.stats()["overlapped_steps"], late.engine.stats()["overlapped_steps"]
    expected, outs = lm.generate(prompts, params), late.generate(prompts, params)
    for i, (one, other) in enumerate(zip(expected, outs, strict=True)):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            fields = ("token_ids", "text", "finish_reason", "stop_reason")
            assert [getattr(a, name) for name in fields] == [getattr(b, name) for name in fields], params[i]
            assert [list(entry) for entry in a.logprobs or []] == [list(entry) for entry in b.logprobs or []]
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    stats = late.engine.stats()
    assert stats["preempted"] > 0 and {o.finish_reason for out in outs for o in out.outputs} == {"stop", "length"}
    assert lm.engine.stats()["overlapped_steps"] == before[0] == 0, "nothing is read late where that was not asked for"
    assert stats["overlapped_steps"] > before[1]
    assert_idle(late)


def test_tokens_arrive_while_a_long_pass_is_launched(lm_of: LmOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "LONG_PASS", 64)
    late, (decoding, long) = lm_of("llama", async_scheduling=True), prompts_of([4, 100], seed=3)
    arrived, at_layers, handles = [], [], []

    class Arrivals:
        def put(self, event: Any) -> None:
            arrived.append(event)
            if len(arrived) == 3:
                handles.append(late.submit(long, greedy(max_tokens=2)))

    for layer in (late.runner.get_model().model.layers[0], late.runner.get_model().model.layers[-1]):

        def run(h: torch.Tensor, *given: Any, fused: Callable[..., Any] = layer.forward_fused) -> Any:
            if h.shape[1] >= 100:
                at_layers.append(len(arrived))
            return fused(h, *given)

        monkeypatch.setattr(layer, "forward_fused", run)
    requests = late.backend.factory.requests(decoding, greedy(max_tokens=12))
    requests[0].stream = True
    late.engine.submit(requests, Arrivals())
    until(lambda: handles)
    handles[0].result(WAIT)
    assert len(at_layers) == 2 and at_layers[1] == at_layers[0] + 1, "before the last layer, and not after the pass"
    until(lambda: not late.engine.progress().busy)
    assert_idle(late)


@pytest.mark.parametrize("ends", ["stop", "length"])
def test_a_block_that_ends_during_a_long_pass_may_use_gradients(
    ends: str, lm_of: LmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's pass, which has none, does not turn them off."""
    monkeypatch.setattr(model_runner, "LONG_PASS", 1)
    late, (prompt, other) = lm_of("llama", async_scheduling=True), prompts_of([5, 9], seed=1)
    ids = late.generate([prompt], greedy(max_tokens=12))[0].token_ids
    stop = next(i for i in range(2, 12) if ids[i] not in ids[:i])
    end = {"stop_token_ids": [ids[stop]], "max_new_tokens": 12} if ends == "stop" else {"max_new_tokens": stop + 1}
    neighbour = late.submit(other, greedy(max_tokens=40))
    with late.generate(prompt, **end) as tracer:
        found = tracer.result.save()
        modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()].save()
    assert found[0, 5:].tolist() == ids[: stop + 1] and modes == [True, False]
    assert len(neighbour.result(WAIT).token_ids) == 40


def test_requests_that_end_while_their_next_step_is_under_way_leave_nothing_behind(lm_of: LmOf) -> None:
    late = lm_of("qwen3", async_scheduling=True)
    prompts = prompts_of([3, 9, 17], seed=12)
    expected = tokens(late.generate(prompts, greedy(max_tokens=30)))
    with held(late):
        handles = [late.submit(prompt, greedy(max_tokens=30)) for prompt in prompts * 4]
    for handle in handles[3:]:
        handle.cancel()
    assert tokens([handle.result(WAIT) for handle in handles[:3]]) == expected
    for handle, whole in zip(handles[3:], expected * 3, strict=True):
        ids = handle.result(WAIT).token_ids
        assert ids == whole[: len(ids)]
    assert_idle(late)


def test_a_trace_beside_requests_that_run_ahead_is_served_step_by_step(lm_of: LmOf) -> None:
    late, lm = lm_of("llama", async_scheduling=True), lm_of("llama")
    prompts = prompts_of([5, 11, 30], seed=13)
    expected = tokens(lm.generate(prompts, greedy(max_tokens=40)))
    handles = [late.submit(prompt, greedy(max_tokens=40)) for prompt in prompts]
    found = []
    for model in (late, lm):
        seen = []
        with model.generate(prompts[0], max_new_tokens=6) as tracer:
            seen = list().save()
            for _ in tracer.iter[:6]:
                seen.append(model.model.layers[1].output)
        found.append(torch.cat([h[:, -1] for h in seen]))
    assert tokens([handle.result(WAIT) for handle in handles]) == expected
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert_idle(late)


@pytest.mark.parametrize("ahead", [False, True])
def test_pages_that_a_step_frees_in_the_midst_of_a_pass_are_nobodys_until_it_is_launched(
    ahead: bool, lm_of: LmOf
) -> None:
    """A request ends while the pass that was launched for it still writes its KV; a completion that waits for its prompt's KV
    must not get those pages in between."""
    traced, ending, leading = prompts_of([9, 5, 33], seed=21)
    lm, quiet = lm_of("llama", async_scheduling=ahead, kv_cache_tokens=1024), lm_of("llama")
    stop = quiet.generate([ending], greedy(max_tokens=12))[0].token_ids[6]
    expected = tokens(quiet.generate([leading], greedy(max_tokens=10)))
    two = SamplingParams(temperature=0, max_tokens=10, n=2)
    for at in range(9):
        handles = [lm.submit(ending, greedy(max_tokens=30, stop_token_ids=[stop]))]
        with lm.generate(traced, max_new_tokens=20) as tracer:
            for step in tracer.iter[:]:
                lm.model.layers[0].output.save()
                if step == at:
                    handles.append(lm.submit(leading, two))
        out = handles[1].result(WAIT)
        assert [o.token_ids for o in out.outputs] == expected * 2, at
    assert_idle(lm)


# -- sampling ------------------------------------------------------------------------

SAMPLED = [
    SamplingParams(max_tokens=12, seed=11),
    SamplingParams(max_tokens=12, seed=2**64 - 1, temperature=1.7, top_k=20),
    SamplingParams(max_tokens=12, seed=-5, top_p=0.8),
    SamplingParams(max_tokens=12, seed=0, min_p=0.05, temperature=0.7),
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=12, seed=11, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.2),
]


def test_seeded_requests_draw_the_same_alone_in_a_batch_in_any_order_and_after_giving_way(lm_of: LmOf) -> None:
    prompts, lm = prompts_of([4, 7, 1, 9, 5, 11], seed=6), lm_of("llama")
    alone = [lm.generate([prompt], params)[0].token_ids for prompt, params in zip(prompts, SAMPLED, strict=True)]
    assert tokens(lm.generate(prompts, SAMPLED)) == alone
    assert tokens(lm.generate(prompts[::-1], SAMPLED[::-1])) == alone[::-1]
    tight = lm_of("llama", kv_cache_tokens=48, page_size=4)
    before = tight.engine.scheduler.num_preempted
    assert tokens(tight.generate(prompts, SAMPLED)) == alone
    assert tight.engine.scheduler.num_preempted > before
    assert tokens(lm.generate([prompts[0]] * 2, [SAMPLED[0], SamplingParams(max_tokens=12, seed=12)]))[1] != alone[0]


def test_requests_without_a_seed_differ_but_an_engine_with_the_same_seed_repeats_them(
    model_folder: Callable[[str], Path],
) -> None:
    params, found = SamplingParams(max_tokens=12), []
    for seed in (3, 3, 4):
        with LM(model_folder("llama"), dtype="float32", device="cpu", seed=seed) as lm:
            found.append(tokens(lm.generate([[5, 6]] * 3, params)))
    assert found[0] == found[1] != found[2]
    assert len(set(map(tuple, found[0]))) == 3


@pytest.mark.parametrize("length", [1, PAGE, 30])
def test_n_completions_differ_repeat_and_share_one_prefill(length: int, lm_of: LmOf) -> None:
    (prompt,), lm = prompts_of([length], seed=7), lm_of("llama")
    params = SamplingParams(n=3, seed=8, max_tokens=6, logprobs=1, prompt_logprobs=1)
    with recorded_steps(lm) as steps:
        (out,) = lm.generate([prompt], params)
    own = length - (length - 1) // PAGE * PAGE  # the pages before are shared
    assert sum(step.total_num_scheduled_tokens for step in steps) == length + 2 * own + 3 * 5
    found = [tuple(c.token_ids) for c in out.outputs]
    assert len(set(found)) == 3 and [c.index for c in out.outputs] == [0, 1, 2]
    assert [tuple(c.token_ids) for c in lm.generate([prompt], params)[0].outputs] == found
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == length
    assert all(c.logprobs is not None and len(c.logprobs) == 6 for c in out.outputs)
    single = lm.generate([prompt], SamplingParams(seed=8, max_tokens=6))[0]
    assert tuple(single.token_ids) == found[0]
    tight = lm_of("llama", kv_cache_tokens=48, page_size=4)
    assert [tuple(c.token_ids) for c in tight.generate([prompt], params)[0].outputs] == found
    assert_idle(tight)


def test_greedy_completions_of_one_prompt_are_equal(lm_of: LmOf) -> None:
    (out,) = lm_of("llama").generate([[3, 4, 5]], greedy(n=3))
    assert out.outputs[0].token_ids == out.outputs[1].token_ids == out.outputs[2].token_ids


# -- when a generation ends -----------------------------------------------------------


def test_stop_strings_end_where_they_first_appear_also_across_tokens(lm_of: LmOf) -> None:
    (prompt,), lm = prompts_of([5], seed=9), lm_of("llama")
    params = SamplingParams(max_tokens=12, seed=1)
    plain = lm.generate([prompt], params)[0]
    texts = [lm.tokenizer.decode(plain.token_ids[: i + 1]) for i in range(12)]
    assert plain.text == texts[-1]
    rng, cases = random.Random(0), []
    for _ in range(60):
        picks = [sorted(rng.sample(range(len(plain.text) + 1), 2)) for _ in range(rng.choice([1, 1, 2]))]
        stops = [plain.text[i : min(j, i + 7)] for i, j in picks] + rng.choice([[], ["never"]])
        cases.append((stops, rng.choice([0, 0, 4]), rng.random() < 0.5))
    outs = lm.generate(
        [prompt] * len(cases),
        [
            SamplingParams(max_tokens=12, seed=1, stop=stops, min_tokens=least, include_stop_str_in_output=kept)
            for stops, least, kept in cases
        ],
    )
    crossed = 0
    for (stops, least, kept), out in zip(cases, outs, strict=True):
        length, text, reason, stop = first_stop(texts, stops, least, kept)
        assert (out.token_ids, out.text) == (plain.token_ids[:length], text), (stops, least, kept)
        assert (out.finish_reason, out.outputs[0].stop_reason) == (reason, stop)
        crossed += stop is not None and "w" in stop[1:]
    assert crossed > 10


def first_stop(texts: list[str], stops: list[str], least: int, kept: bool) -> tuple[int, str, str, str | None]:
    """(tokens, text, finish_reason, stop_reason): the first of `stops` to end in a token, behind the first `least` ones."""
    before = ""
    for length, text in enumerate(texts, 1):
        ends = [
            (start, stop) for stop in stops for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]  # fmt: skip
        if ends and length > least:
            start, stop = min(ends, key=lambda one: (one[0] + len(one[1]), stops.index(one[1])))
            return length, text[: start + len(stop) * kept], "stop", stop
        before = text
    return len(texts), texts[-1], "length", None


@pytest.mark.parametrize("kept", [True, False])
def test_stop_strings_of_one_token_end_as_in_vllm(kept: bool, lm_of: LmOf) -> None:
    """Of several that a token completes, the one that ends first; one that the last of `min_tokens` tokens completes is none."""
    (prompt,), lm = prompts_of([5], seed=9), lm_of("llama")
    plain = lm.generate([prompt], SamplingParams(max_tokens=6, seed=1))[0]
    texts = [lm.tokenizer.decode(plain.token_ids[: i + 1]) for i in range(6)]
    token = texts[2][len(texts[1]) :]  # "w..."
    stops = [texts[2][-len(token) - 1 :], token[:2]]
    params = SamplingParams(max_tokens=6, seed=1, stop=stops, min_tokens=2, include_stop_str_in_output=kept)
    (out,) = lm.generate([prompt], params)
    assert (out.text, out.outputs[0].stop_reason) == (texts[1] + token[:2] * kept, token[:2])
    (later,) = lm.generate([prompt], replace(params, min_tokens=3))
    assert (len(out.token_ids), later.token_ids[:4]) == (3, plain.token_ids[:4])


def test_stop_token_ids_end_a_generation_after_min_tokens(lm_of: LmOf) -> None:
    (prompt,), lm = prompts_of([6], seed=10), lm_of("llama")
    plain = lm.generate([prompt], SamplingParams(max_tokens=12, seed=4))[0].token_ids
    stop = plain[5]
    out = lm.generate([prompt], SamplingParams(max_tokens=12, seed=4, stop_token_ids=[stop, 96]))[0]
    assert out.token_ids == plain[: plain.index(stop) + 1] and out.finish_reason == "stop"
    assert out.outputs[0].stop_reason == stop and out.text == lm.tokenizer.decode(out.token_ids[:-1])
    params = SamplingParams(max_tokens=12, seed=4, stop_token_ids=[stop], include_stop_str_in_output=True)
    out = lm.generate([prompt], params)[0]
    assert out.text == lm.tokenizer.decode(out.token_ids) and out.outputs[0].stop_reason == stop
    word = lm.tokenizer.decode([stop])
    out = lm.generate([prompt], replace(params, stop=[word]))[0]
    assert (out.text.endswith(word), out.outputs[0].stop_reason) == (True, word), "vLLM looks at the text that it keeps"


def test_the_main_end_of_sequence_token_is_no_stop_reason(with_eos: tuple[LM, LM, list[int], list[int]]) -> None:
    """As in vLLM, where further ones of generation_config.json are stop tokens."""
    one, two, prompt, plain = with_eos
    out = one.generate([prompt], greedy(max_tokens=20))[0]
    first = plain.index(plain[4])
    assert (out.token_ids, out.finish_reason, out.outputs[0].stop_reason) == (plain[: first + 1], "stop", None)
    assert out.text == one.tokenizer.decode(plain[:first])
    kept = one.generate([prompt], greedy(max_tokens=20, include_stop_str_in_output=True))[0]
    assert kept.text == one.tokenizer.decode(plain[: first + 1])
    named = one.generate([prompt], greedy(max_tokens=20, ignore_eos=True, stop_token_ids=[plain[4]]))[0]
    assert named.outputs[0].stop_reason == plain[4]
    *_, piece = one.stream(prompt, greedy(max_tokens=20))
    assert piece.finish_reason == "stop"
    ended = two.generate([prompt], greedy(max_tokens=20))[0]
    token, least = ended.token_ids[-1], min(plain[3], plain[6])
    assert token in (plain[3], plain[6]) and ended.outputs[0].stop_reason == (None if token == least else token)


@pytest.fixture(scope="module")
def with_eos(
    model_folder: Callable[[str], Path], lm_of: LmOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LM, LM, list[int], list[int]]]:
    """(LM with one eos id, LM with two in generation_config.json, a prompt, its greedy tokens without any eos)."""
    prompt = prompts_of([7], seed=11)[0]
    plain = lm_of("llama").generate([prompt], greedy(max_tokens=20))[0].token_ids
    made = []
    for name, config, generation in (("one", plain[4], plain[4]), ("two", None, [plain[6], plain[3]])):
        folder = tmp_path_factory.mktemp("eos") / name
        shutil.copytree(model_folder("llama"), folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": config}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        made.append(LM(folder, dtype="float32", device="cpu"))
    yield made[0], made[1], prompt, plain
    for lm in made:
        lm.shutdown()


def test_the_models_eos_ends_a_generation_unless_ignored(with_eos: tuple[LM, LM, list[int], list[int]]) -> None:
    one, two, prompt, plain = with_eos
    for lm, ends in ((one, plain[4:5]), (two, [plain[6], plain[3]])):
        length = min(plain.index(eos) for eos in ends) + 1
        params = [{}, {"ignore_eos": True}, {"ignore_eos": True, "stop_token_ids": ends}]
        out, ignored, asked = lm.generate([prompt] * 3, [greedy(max_tokens=20, **param) for param in params])
        assert (out.token_ids, out.finish_reason) == (plain[:length], "stop")
        assert out.text == lm.tokenizer.decode(plain[: length - 1])
        assert (ignored.token_ids, ignored.finish_reason) == (plain, "length")
        assert asked.token_ids == plain[:length]


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("least", [1, 5, 9, 20])
def test_no_eos_before_min_tokens(
    least: int, ignored: bool, with_eos: tuple[LM, LM, list[int], list[int]], oracle: Oracle
) -> None:
    """Whether or not it would end the generation, as vLLM's processor of `min_tokens`."""
    one, _, prompt, plain = with_eos
    eos = plain[4]

    def forbid(logits: torch.Tensor, generated: list[int]) -> torch.Tensor:
        if len(generated) < least:
            logits[eos] = -torch.inf
        return logits

    expected = reference(oracle("llama"), prompt, 20, forbid)
    if eos in expected and not ignored:
        expected = expected[: expected.index(eos) + 1]
    params = greedy(max_tokens=20, min_tokens=least, ignore_eos=ignored)
    assert one.generate([prompt], params)[0].token_ids == expected
    assert len(expected) >= least


def test_no_max_tokens_fills_the_context(lm_of: LmOf) -> None:
    lm = lm_of("qwen3", max_model_len=24)
    prompts = prompts_of([1, 10, 23])
    outs = lm.generate(prompts, greedy(max_tokens=None))
    assert [len(out.token_ids) for out in outs] == [23, 14, 1]
    assert {out.finish_reason for out in outs} == {"length"}
    assert outs[1].token_ids == lm_of("qwen3").generate([prompts[1]], greedy(max_tokens=14))[0].token_ids


# -- logits ------------------------------------------------------------------------------


def test_logit_bias_and_penalties_are_those_of_a_python_reimplementation(lm_of: LmOf, oracle: Oracle) -> None:
    prompts = prompts_of([5, 9, 6, 8], seed=12)
    cases: list[dict[str, Any]] = [
        {"logit_bias": {3: 4.0, 40: -100.0, 17: 2.5}},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 1.1, "presence_penalty": -0.7},
        {"logit_bias": {9: 3.0}, "repetition_penalty": 0.7, "frequency_penalty": 2.0, "presence_penalty": 0.4},
    ]
    outs = lm_of("qwen2").generate(prompts, [greedy(max_tokens=14, **case) for case in cases])
    changed = 0
    for prompt, case, out in zip(prompts, cases, outs, strict=True):
        model = oracle("qwen2")
        assert out.token_ids == reference(model, prompt, 14, lambda x, seen, p=prompt, c=case: penalise(x, p, seen, c))
        changed += out.token_ids != reference(model, prompt, 14, lambda x, _: x)
    assert changed >= 3


def penalise(logits: torch.Tensor, prompt: list[int], generated: list[int], case: dict[str, Any]) -> torch.Tensor:
    for token, bias in case.get("logit_bias", {}).items():
        logits[token] += bias
    factor = case.get("repetition_penalty", 1.0)
    for token in {*prompt, *generated}:
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(generated):
        logits[token] -= case.get("frequency_penalty", 0.0) * generated.count(token) + case.get("presence_penalty", 0.0)
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logprobs_and_prompt_logprobs_are_those_of_log_softmax(family: str, lm_of: LmOf, oracle: Oracle) -> None:
    prompts, lm = prompts_of([1, 6, PAGE + 1], seed=13), lm_of(family)
    params = SamplingParams(max_tokens=6, seed=3, temperature=1.5, logprobs=3, prompt_logprobs=2, presence_penalty=1.0)
    for prompt, out in zip(prompts, lm.generate(prompts, params), strict=True):
        rows = logits_of(oracle(family), prompt + out.token_ids).log_softmax(-1)
        assert out.prompt_logprobs is not None and out.logprobs is not None
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(prompt)
        found = [*out.prompt_logprobs[1:], *out.logprobs]
        sequence = prompt + out.token_ids
        assert len(found) == len(sequence) - 1
        for position, entry in enumerate(found):
            assert entry is not None
            check_entry(lm, entry, rows[position], sequence[position + 1], 2 if position < len(prompt) - 1 else 3)


def check_entry(lm: LM, entry: dict, row: torch.Tensor, token: int, top: int) -> None:
    order = row.argsort(descending=True).tolist()
    assert next(iter(entry)) == token and set(entry) == {token, *order[:top]}
    for candidate, value in entry.items():
        assert value.logprob == pytest.approx(row[candidate].item(), abs=1e-4)
        assert value.rank == order.index(candidate) + 1
        assert value.decoded_token == lm.tokenizer.decode([candidate])


def test_logprobs_of_zero_hold_the_sampled_token_alone(lm_of: LmOf) -> None:
    (out,) = lm_of("llama").generate([[1, 2, 3]], greedy(logprobs=0, prompt_logprobs=0))
    assert out.logprobs is not None and [list(entry) for entry in out.logprobs] == [[t] for t in out.token_ids]
    assert out.prompt_logprobs is not None and [list(entry or ()) for entry in out.prompt_logprobs] == [[], [2], [3]]


# -- streaming, handles -----------------------------------------------------------------


@pytest.mark.parametrize("stops", [False, True])
def test_streamed_pieces_join_to_the_output(stops: bool, lm_of: LmOf) -> None:
    lm, params = lm_of("llama"), SamplingParams(max_tokens=20, seed=21)
    (whole,) = lm.generate([[7, 8, 9]], params)
    if stops:  # the end of one token, a whole one, and the beginning of the next: none of it may be streamed
        words = [lm.tokenizer.decode([token]) for token in whole.token_ids]
        params = replace(params, stop=words[6][-1] + words[7] + words[8][:2])
        (whole,) = lm.generate([[7, 8, 9]], params)
    pieces = list(lm.stream([7, 8, 9], params))
    assert "".join(pieces) == whole.text == "".join(piece.text for piece in pieces)
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
    assert whole.finish_reason == ("stop" if stops else "length")


def test_streamed_completions_of_one_prompt_are_told_apart(lm_of: LmOf) -> None:
    lm, params = lm_of("llama"), SamplingParams(max_tokens=5, seed=22, n=2)
    (whole,) = lm.generate("w1 w2", params)
    pieces = list(lm.stream("w1 w2", params))
    for index in range(2):
        mine = [piece for piece in pieces if piece.output_index == index]
        assert "".join(mine) == whole.outputs[index].text and mine[-1].finish_reason == "length"


def test_leaving_a_stream_early_ends_its_request(lm_of: LmOf) -> None:
    lm = lm_of("llama")
    with held(lm):
        stream = lm.stream([1, 2], greedy(max_tokens=120))
    live: list[Any] = lm.engine.call(lambda: lm.engine.scheduler.live)
    for _ in stream:
        break
    stream.close()  # type: ignore[attr-defined]
    assert_idle(lm)
    assert [request.finish_reason for request in live] == ["abort"]


def test_async_streams_run_together_and_end_early(lm_of: LmOf) -> None:
    lm, params = lm_of("llama"), [SamplingParams(max_tokens=10, seed=s) for s in range(4)]
    expected = [out.text for out in lm.generate([[3, 4]] * 4, params)]

    async def collect(param: SamplingParams) -> str:
        return "".join([piece async for piece in lm.astream([3, 4], param)])

    async def leave() -> None:
        stream: Any = lm.astream([3, 4], greedy(max_tokens=120))
        async for _ in stream:
            break
        await stream.aclose()

    async def main() -> list[str]:
        *texts, _ = await asyncio.gather(*map(collect, params), leave())
        return texts

    assert asyncio.run(asyncio.wait_for(main(), WAIT)) == expected
    assert_idle(lm)


def test_a_handle_waits_cancels_and_calls_back(lm_of: LmOf) -> None:
    lm, called = lm_of("llama"), []
    with held(lm):
        handle = lm.submit([1, 2, 3], GREEDY)
        handle.add_done_callback(lambda: called.append(1))
        with pytest.raises(TimeoutError, match=handle.requests[0].request_id):
            handle.result(0.01)
        assert not handle.done
        cancelled = lm.submit([4], greedy(max_tokens=100))
        cancelled.cancel()
    assert len(handle.result(WAIT).token_ids) == 8 and handle.done
    until(lambda: called == [1])
    handle.add_done_callback(lambda: called.append(2))
    assert called == [1, 2]
    handle.cancel()  # a finished request stays as it is
    assert handle.result(WAIT).finish_reason == "length"
    out = cancelled.result(WAIT)
    assert (out.finish_reason, out.token_ids, out.text) == ("abort", [], "")


def test_a_cancelled_request_keeps_what_it_has_and_the_others_go_on(lm_of: LmOf) -> None:
    lm = lm_of("llama")
    prompts = prompts_of([5, 6, 7], seed=14)
    plain = lm.generate(prompts, greedy(max_tokens=100))
    handles = [lm.submit(prompt, greedy(max_tokens=100)) for prompt in prompts]
    until(lambda: len(handles[1].requests[0].output_token_ids) >= 3)
    handles[1].cancel()
    outs = [handle.result(WAIT) for handle in handles]
    assert [outs[0].token_ids, outs[2].token_ids] == [plain[0].token_ids, plain[2].token_ids]
    kept = outs[1].token_ids
    assert outs[1].finish_reason == "abort" and 3 <= len(kept) < 100 and kept == plain[1].token_ids[: len(kept)]
    assert outs[1].text == lm.tokenizer.decode(kept)


def test_a_timeout_ends_a_request_and_no_other(lm_of: LmOf) -> None:
    lm = lm_of("llama")
    with held(lm):
        late, other = lm.submit([1, 2], GREEDY, timeout=1e-6), lm.submit([1, 2], GREEDY, timeout=1000.0)
    assert late.result(WAIT).finish_reason == "timeout"
    assert other.result(WAIT).finish_reason == "length"
    assert_idle(lm)


@pytest.mark.parametrize("step", [0, 90])
def test_a_trace_that_runs_into_its_timeout_raises_timeout_error(step: int, lm_of: LmOf) -> None:
    warnings.simplefilter("ignore")
    lm = lm_of("llama")
    with pytest.raises(TimeoutError, match="ran into its timeout"):
        with lm.generate([1, 2], max_new_tokens=100, timeout=0.02) as tracer:
            for _ in tracer.iter[:]:
                time.sleep(0.01)
                lm.lm_head.output.save()
            for _ in tracer.iter[step]:
                lm.lm_head.output.save()
    assert_idle(lm)


def test_a_callback_that_raises_hurts_nobody(lm_of: LmOf) -> None:
    lm = lm_of("llama")
    with held(lm):
        handle = lm.submit([1, 2], GREEDY)
        handle.add_done_callback(lambda: 1 / 0)
    assert handle.result(WAIT).finish_reason == "length"
    assert lm.generate([[1, 2]], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_what_a_callback_raises_reaches_no_other_request(error: type[BaseException], lm_of: LmOf) -> None:
    """Requests that end in the same step, and a subscriber of one's own that raises in the midst of their events."""
    lm, called = lm_of("llama"), []

    def fails() -> None:
        called.append(1)
        raise error("of a caller")

    with held(lm):
        handles = [lm.submit([1, i], GREEDY) for i in range(4)]
        handles[0].add_done_callback(fails)
        handles[1].put = lambda event: fails()  # pyright: ignore[reportAttributeAccessIssue]
    assert [handles[i].result(WAIT).finish_reason for i in (0, 2, 3)] == ["length"] * 3
    until(lambda: len(called) == 2)

    with pytest.raises(error, match="of a caller"):
        with lm.generate([1, 2], max_new_tokens=3, on_step=lambda step, saved: fails()):
            lm.model.layers[0].output.save()
    assert lm.generate([[1, 2]], GREEDY)[0].finish_reason == "length"
    assert_idle(lm)


def test_a_tokenizer_that_fails_ends_the_request_whose_stop_strings_are_looked_for(lm_of: LmOf) -> None:
    lm = lm_of("llama")

    class Fails:
        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise KeyError("no such token")

    with held(lm):
        handles = [lm.submit([1, i], greedy(stop=["never"])) for i in range(3)]
        handles[1].requests[0].stop_checker = StopStrings(Fails(), handles[1].requests[0].params)
    with pytest.raises(RequestError, match="no such token"):
        handles[1].result(WAIT)
    assert [handles[i].result(WAIT).finish_reason for i in (0, 2)] == ["length"] * 2
    assert_idle(lm)


def test_a_request_that_cannot_be_attached_ends_and_the_commands_behind_it_are_run(
    lm_of: LmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = lm_of("llama")
    with lm.edit() as (_, edited):
        edited.model.layers[0].output[:] = 0
    attach = lm.runner.attach
    failing: list[Any] = []

    def attach_others(trace: Any) -> None:
        if trace in failing:
            raise SystemExit("not this one")
        attach(trace)

    monkeypatch.setattr(lm.runner, "attach", attach_others)
    with held(lm):
        handles = [edited.submit([1, i], GREEDY, capture=["resid_post.0"]) for i in range(3)]
        failing.append(handles[1].requests[0].trace)
    assert [handles[i].result(WAIT).finish_reason for i in (0, 2)] == ["length"] * 2
    handles[1].wait(WAIT)
    assert isinstance(handles[1].error, SystemExit)
    assert_idle(lm)


def test_a_callback_that_blocks_holds_up_nobody(
    model_folder: Callable[[str], Path], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the engine, not the callbacks of a trace, and its own engine's end for a bounded time only."""
    monkeypatch.setattr("pymllm_interp.engine.engine.CLOSING_SECONDS", 0.1)
    goes_on, begun, seen = threading.Event(), threading.Event(), []
    with LM(model_folder("llama"), dtype="float32", device="cpu") as lm:
        handle = lm.submit([1, 2], GREEDY)
        with held(lm):
            handle = lm.submit([1, 2], GREEDY)
            handle.add_done_callback(lambda: begun.set() or (goes_on.wait() and None))
        assert begun.wait(WAIT) and handle.result(WAIT).finish_reason == "length"
        with lm.generate([1, 2], max_new_tokens=3, on_step=lambda step, _: seen.append(step)):
            lm.model.layers[0].output.save()
        assert seen == [0, 1, 2]
        assert lm.generate([[1, 2]], GREEDY)[0].finish_reason == "length"
    assert "a callback still runs" in caplog.text
    goes_on.set()


def test_a_callback_may_wait_for_other_requests_and_end_the_engine(model_folder: Callable[[str], Path]) -> None:
    found: list[Any] = []
    lm = LM(model_folder("llama"), dtype="float32", device="cpu")

    def finish() -> None:
        found.extend(lm.generate([[3]], GREEDY))
        lm.shutdown()

    with held(lm):
        lm.submit([1, 2], GREEDY).add_done_callback(finish)
    lm.engine._thread.join(WAIT)
    assert not lm.engine._thread.is_alive() and found[0].finish_reason == "length"


# -- several at once ------------------------------------------------------------------


def test_client_threads_get_what_they_would_get_alone(lm_of: LmOf) -> None:
    lm = lm_of("llama")
    work = [(prompts_of([1 + i, 20 - i], seed=i), SamplingParams(max_tokens=10, seed=i)) for i in range(12)]
    alone = [tokens(lm.generate(*item)) for item in work]
    with ThreadPoolExecutor(6) as threads:
        assert [tokens(outs) for outs in threads.map(lambda item: lm.generate(*item), work)] == alone
    assert_idle(lm)


def test_two_engines_interleaved_give_the_same_answers_as_alone(lm_of: LmOf) -> None:
    engines = [lm_of("llama"), lm_of("mistral"), lm_of("llama", kv_cache_tokens=48, page_size=4)]
    prompts = prompts_of([9, 3, 17], seed=16)
    alone = [tokens(lm.generate(prompts, greedy(max_tokens=15))) for lm in engines]
    assert alone[0] == alone[2] != alone[1]
    for _ in range(3):
        handles = [[lm.submit(prompt, greedy(max_tokens=15)) for prompt in prompts] for lm in engines]
        assert [tokens([h.result(WAIT) for h in mine]) for mine in handles] == alone


def test_a_thousand_requests_leave_nothing_behind(lm_of: LmOf) -> None:
    lm, refs = lm_of("qwen2"), []
    params = [
        SamplingParams(max_tokens=2),
        greedy(max_tokens=1, logprobs=1),
        SamplingParams(max_tokens=2, n=2, stop="w1"),
    ]

    def batch(seed: int, size: int) -> None:
        prompts = prompts_of([1 + i % 3 for i in range(size)], seed)
        handles = lm._requests.submit(prompts, [params[i % 3] for i in range(size)], {})
        refs.extend(weakref.ref(request) for handle in handles for request in handle.requests)
        for handle in handles:
            handle.result(WAIT)

    batch(0, 200)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for seed in range(1, 5):
        batch(seed, 200)
    assert_idle(lm)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before - len(refs) * 200
    tracemalloc.stop()
    batch(5, 1)  # a step drops what the one before it finished
    assert len(refs) > 1000 and sum(ref() is not None for ref in refs) <= 1
    assert grown < 100_000, f"{grown} bytes were kept"
    states, helper = lm.runner.req_states, lm.runner.nnsight_request_helper
    assert len(states.req_id_to_index) <= 1 and not states._staged
    assert not helper.req_id_to_batch_group_idx and not helper.attached and not helper.num_prompts_in_mediator


def test_an_engine_keeps_nothing_of_a_trace_that_is_over(lm_of: LmOf) -> None:
    lm = lm_of("llama")

    def trace() -> list[weakref.ref]:
        with lm.trace([1, 2, 3]) as tracer:
            hidden = lm.model.layers[0].output.save()
        return [weakref.ref(hidden), weakref.ref(tracer)]

    refs = trace()
    lm.generate([[1]], greedy(max_tokens=2))
    gc.collect()
    assert [ref() is None for ref in refs] == [True, True]


# -- failures -------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


def raise_once(function: Callable[..., Any], when: Callable[..., bool] = lambda *args: True) -> Callable[..., Any]:
    """`function`, whose first call for which `when` holds raises Boom."""
    left = [1]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if left[0] and when(*args):
            left[0] = 0
            raise Boom("boom in a kernel")
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_step_that_fails_ends_its_requests_with_an_error_and_the_engine_goes_on(
    at: str, lm_of: LmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, prompts = lm_of("llama", max_running_requests=2), prompts_of([4, 5, 6, 7], seed=17)
    expected = tokens(lm.generate(prompts, GREEDY))
    model: Any = lm.runner.model
    failing = raise_once(model.forward_fused, lambda ids, *_: (ids.shape[1] > 2) == (at == "prefill"))
    monkeypatch.setattr(model, "forward_fused", failing)
    with pytest.raises(RequestError, match=r"prompt 0 failed \(2 of 4 failed\): Boom: boom in a kernel") as failed:
        lm.generate(prompts, GREEDY)
    outs = failed.value.outputs
    assert failed.value.index == 0 and isinstance(failed.value.__cause__, Boom)
    assert [out.finish_reason for out in outs] == ["error", "error", "length", "length"]
    assert all(isinstance(out.outputs[0].error, Boom) for out in outs[:2])
    assert outs[0].token_ids == ([] if at == "prefill" else expected[0][:1])
    assert tokens(outs[2:]) == expected[2:] and outs[2].outputs[0].error is None
    assert tokens(lm.generate(prompts, GREEDY)) == expected
    assert_idle(lm)


def test_sampling_that_fails_ends_its_requests_and_the_engine_goes_on(
    lm_of: LmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, params = lm_of("llama"), greedy(logprobs=1)
    expected = tokens(lm.generate([[1, 2, 3]], params))
    monkeypatch.setattr(lm.runner, "sampler", raise_once(lm.runner.sampler))
    with pytest.raises(RequestError, match="Boom: boom in a kernel") as failed:
        lm.submit([1, 2, 3], params).result()
    (out,) = failed.value.outputs
    assert out.finish_reason == "error" and isinstance(out.outputs[0].error, Boom)
    assert tokens(lm.generate([[1, 2, 3]], params)) == expected
    assert_idle(lm)


def test_a_stream_whose_request_fails_raises_what_ended_it(lm_of: LmOf, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = lm_of("llama")
    attention = lm.runner.attn_backend
    monkeypatch.setattr(attention, "forward", raise_once(attention.forward))
    with pytest.raises(Boom, match="boom"):
        list(lm.stream([1, 2, 3], GREEDY))
    assert "".join(lm.stream([1, 2, 3], GREEDY))
    assert_idle(lm)


def test_a_step_that_fails_with_a_trace_in_it_ends_the_trace_and_plain_requests_are_run_again(
    lm_of: LmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, prompts = lm_of("llama", lower_traces="off"), prompts_of([4, 9], seed=18)
    expected = tokens(lm.generate(prompts, greedy(max_tokens=30)))
    interleaver = lm.interleaver
    attention = lm.runner.attn_backend
    monkeypatch.setattr(attention, "forward", raise_once(attention.forward, lambda *_: bool(interleaver.traces)))
    with held(lm):
        handles = [lm.submit(prompt, greedy(max_tokens=30)) for prompt in prompts]
    with pytest.raises(Boom, match="boom"):
        with lm.trace([1, 2, 3]):
            lm.model.layers[1].output.save()
    outs = [handle.result(WAIT) for handle in handles]
    assert tokens(outs) == expected and [out.outputs[0].error for out in outs] == [None, None]
    assert_idle(lm)


def test_a_stream_and_a_stop_string_beside_a_block_get_what_they_get_alone(lm_of: LmOf) -> None:
    """Blocks are served in the midst of a pass, where the last step's tokens are read: a stream is told of them when the pass
    has been launched, a stop string ends its request at once."""
    lm = lm_of("llama", async_scheduling=True)
    params = greedy(max_tokens=20, ignore_eos=True)
    (alone,) = lm.generate([[7, 8, 9]], params)
    stops = greedy(max_tokens=20, ignore_eos=True, stop=[alone.text[len(alone.text) // 2 :][:3]])
    (stopped,) = lm.generate([[7, 8, 9]], stops)
    assert stopped.finish_reason == "stop"
    with held(lm) as arrived:
        handle, stream = lm.submit([7, 8, 9], stops), lm.stream([7, 8, 9], params)
        reads: list[torch.Tensor] = []

        def trace() -> None:
            with lm.generate([1, 2], max_new_tokens=20, ignore_eos=True) as tracer:
                for _ in tracer.iter[:]:
                    reads.append(lm.model.layers[1].output[0, -1])

        client = threading.Thread(target=trace)
        client.start()
        arrived(3)
    client.join(WAIT)
    pieces = list(stream)
    assert len(reads) == 20 and len(pieces) > 1
    assert "".join(pieces) == alone.text and [t for p in pieces for t in p.token_ids] == alone.token_ids
    found = handle.result(WAIT)
    assert (found.text, found.token_ids, found.finish_reason) == (stopped.text, stopped.token_ids, "stop")
    assert_idle(lm)


def fresh(model_folder: Callable[[str], Path]) -> LM:
    return LM(model_folder("llama"), dtype="float32", device="cpu", lower_traces="off")


def test_shutdown_raises_in_every_waiter(model_folder: Callable[[str], Path]) -> None:
    lm = fresh(model_folder)
    errors: dict[str, BaseException | None] = {}

    async def astream() -> None:
        async for _ in lm.astream([1], greedy(max_tokens=120)):
            pass

    def trace() -> None:
        with lm.generate([1, 2], max_new_tokens=100):
            lm.lm_head.output.save()

    waiters: dict[str, Callable[[], Any]] = {
        "generate": lambda: lm.generate([[1], [2]], greedy(max_tokens=120)),
        "n": lambda: lm.generate([[1]], SamplingParams(max_tokens=120, n=3)),
        "result": lambda: lm.submit([1], greedy(max_tokens=120)).result(),
        "stream": lambda: list(lm.stream([1], greedy(max_tokens=120))),
        "astream": lambda: asyncio.run(astream()),
        "trace": trace,
    }

    def run(name: str) -> None:
        try:
            waiters[name]()
            errors[name] = None
        except BaseException as error:
            errors[name] = error

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in waiters]
    with held(lm):
        for thread in threads:
            thread.start()
        until(lambda: len(lm.engine._inbox) == len(waiters) or bool(errors))
        assert not errors, "a waiter did not come as far as to wait"
        closing = threading.Thread(target=lm.shutdown)
        closing.start()
        until(lambda: lm.engine._closing is not None)
    for thread in (*threads, closing):
        thread.join(WAIT)
    assert sorted(errors) == sorted(waiters), "a waiter hangs"
    assert {name: type(error) for name, error in errors.items() if not isinstance(error, RuntimeError)} == {}
    assert lm.runner.model is None and not lm.engine._thread.is_alive()


def test_shutdown_in_the_midst_of_steps_gives_every_request_an_end(model_folder: Callable[[str], Path]) -> None:
    lm = fresh(model_folder)
    handles = [lm.submit([i], greedy(max_tokens=120)) for i in range(1, 9)]
    until(lambda: len(handles[0].requests[0].output_token_ids) >= 3)
    lm.shutdown()
    for handle in handles:
        with pytest.raises(RuntimeError, match=rf"request {handle.requests[0].request_id} .*shut down"):
            handle.result(WAIT)
        assert handle.requests[0].finish_reason == "abort"


def test_an_error_in_winding_up_a_trace_is_its_own_requests(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, caught = fresh(model_folder), []

    def broken(*_: Any) -> None:
        raise Boom("boom in winding up")

    def trace() -> None:
        try:
            with lm.generate([1, 2], max_new_tokens=3):
                lm.lm_head.output.save()
        except BaseException as error:
            caught.append(error)

    monkeypatch.setattr(lm.runner, "finish_nnsight", broken)
    with held(lm):
        plain = lm.submit([1], greedy(max_tokens=120))
        client = threading.Thread(target=trace, daemon=True)
        client.start()
        until(lambda: len(lm.engine._inbox) == 2 or bool(caught))
    client.join(WAIT)
    assert not client.is_alive(), "its client waits for ever"
    assert "boom in winding up" in str(caught[0])
    assert len(plain.result(WAIT).token_ids) == 120
    lm.shutdown()
    assert lm.runner.model is None and not lm.engine.ends.subscribers


def test_after_shutdown_nothing_is_taken(model_folder: Callable[[str], Path]) -> None:
    lm = fresh(model_folder)
    handle = lm.submit([1], GREEDY)
    assert handle.result(WAIT).finish_reason == "length"
    lm.shutdown()
    lm.shutdown()
    for call in (lm.generate, lm.submit, lm.stream, lm.astream):
        with pytest.raises(RuntimeError, match="shut down"):
            call([1, 2], GREEDY)
    with pytest.raises(RuntimeError, match="shut down"), lm.trace([1, 2]):
        lm.lm_head.output.save()
    handle.cancel()
    assert handle.result().finish_reason == "length"


def test_generating_inside_of_a_trace_raises_and_does_not_hang(lm_of: LmOf) -> None:
    lm = lm_of("llama")
    with pytest.raises(RuntimeError, match="waited for inside the block"):
        with lm.trace([1, 2, 3]):
            lm.model.layers[0].output.save()
            lm.generate([[4, 5]], GREEDY)
    assert_idle(lm)


# -- bad input --------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], r"is empty"),
    ("", r"is empty"),
    ([1, VOCAB, 2], rf"token id {VOCAB}, but the vocabulary goes from 0 to {VOCAB - 1}"),
    ([-1], r"token id -1"),
    ([[1.5, 2]], r"expected text, or token ids as whole numbers"),
    ([[True]], r"expected text, or token ids as whole numbers"),
    ([[1, None]], r"expected text, or token ids as whole numbers"),
    (torch.tensor([0.5]), r"is a Tensor of torch.float32: expected text, or token ids as whole numbers"),
    (torch.tensor(3), r"expected text, or token ids"),
    (torch.tensor([[1], [2]]), r"expected one prompt, got 2|one prompt is expected, got 2"),
    ({"attention_mask": [1]}, r"input_ids"),
    ({"text": "a"}, r"without `input_ids`: of a row of a data set, pass row\[.text.\]"),
    (object(), r"object.*expected text, token ids, or a list of them"),
    (list(range(94)) + [1] * 30, r"124 tokens and asks for 8 new ones \(132 in all\).* 128 \(max_model_len\)"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[message[:24] for _, message in BAD_PROMPTS])
def test_a_bad_prompt_is_named_and_no_other_request_changes(prompt: Any, message: str, lm_of: LmOf) -> None:
    lm = lm_of("llama")
    expected = tokens(lm.generate([[1, 2, 3]], GREEDY))
    with held(lm):
        other = lm.submit([1, 2, 3], GREEDY)
        if isinstance(prompt, (str, list)):
            listed = prompt[0] if prompt and isinstance(prompt, list) and isinstance(prompt[0], list) else prompt
            with pytest.raises(ValueError, match=r"prompt 1 .*" + message):
                lm.generate([[1], listed, [2]], GREEDY)
        for call in (lm.submit, lm.stream):
            with pytest.raises(ValueError, match=message if prompt != [] else "one prompt is expected, got 0"):
                call(prompt, GREEDY)
        assert len(lm.engine._inbox) == 1, "something of a bad list was scheduled"
    assert [other.result(WAIT).token_ids] == expected


def test_what_the_pool_or_the_vocabulary_cannot_hold_is_refused(lm_of: LmOf) -> None:
    tight = lm_of("llama", kv_cache_tokens=48, page_size=4)
    with pytest.raises(ValueError, match=r"KV for 59 tokens, but the pool holds 48: raise kv_cache_tokens"):
        tight.generate([[1] * 40], greedy(max_tokens=20))
    assert len(tight.generate([[1] * 40], greedy(max_tokens=9))[0].token_ids) == 9
    lm = lm_of("llama")
    with pytest.raises(ValueError, match=rf"logit_bias names token id {VOCAB}"):
        lm.generate([[1]], greedy(logit_bias={VOCAB: 1.0}))
    with pytest.raises(ValueError, match=r"stop_token_ids names token id -3"):
        lm.generate([[1]], greedy(stop_token_ids=[-3]))
    with pytest.raises(ValueError, match=r"timeout=nan"):
        lm.generate([[1]], GREEDY, timeout=float("nan"))


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, r"temperature=nan.*finite"),
    ({"temperature": -0.1}, r"temperature=-0.1.*0 \(greedy\) or above"),
    ({"temperature": float("inf")}, r"temperature=inf"),
    ({"top_p": 0.0}, r"top_p=0.0.*above 0 and at most 1"),
    ({"top_p": float("nan")}, r"top_p=nan"),
    ({"top_k": -2}, r"top_k=-2"),
    ({"top_k": 2.5}, r"top_k=2.5.*a whole number"),
    ({"min_p": 1.5}, r"min_p=1.5.*from 0 to 1"),
    ({"repetition_penalty": 0.0}, r"repetition_penalty=0.0.*above 0"),
    ({"frequency_penalty": -2.5}, r"frequency_penalty=-2.5.*from -2 to 2"),
    ({"presence_penalty": float("nan")}, r"presence_penalty=nan"),
    ({"max_tokens": -1}, r"max_tokens=-1.*at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9.*at most max_tokens \(8\)"),
    ({"n": 0}, r"n=0.*at least 1"),
    ({"logprobs": -1}, r"logprobs=-1"),
    ({"prompt_logprobs": 65}, r"prompt_logprobs=65.*from 0 to 64"),
    ({"logit_bias": {3: float("nan")}}, r"logit_bias=\{3: nan\}.*finite"),
    ({"stop": ["a", ""]}, r"empty stop string"),
]


@pytest.mark.parametrize(("values", "message"), BAD_PARAMS, ids=[str(values) for values, _ in BAD_PARAMS])
def test_a_bad_sampling_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


WRONG_TYPES: list[dict[str, Any]] = [
    {"n": 1.5}, {"temperature": "hot"}, {"max_tokens": 2.5}, {"min_tokens": "1"}, {"seed": "x"}, {"seed": 1.5},
    {"stop": [1]}, {"stop": 5}, {"stop_token_ids": ["a"]}, {"stop_token_ids": 5}, {"logprobs": 1.5},
    {"logit_bias": {"a": 1.0}}, {"logit_bias": {1: "x"}}, {"logit_bias": [1]},
]  # fmt: skip


@pytest.mark.parametrize("values", WRONG_TYPES, ids=str)
def test_a_sampling_value_of_a_wrong_type_is_named(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises((TypeError, ValueError), match=rf"SamplingParams\({name}="):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_new_tokens", "here it is max_tokens"),
        ("do_sample", "here it is temperature: 0 is greedy"),
        ("num_beams", "there is no beam search"),
        ("repetition", r"did you mean repetition_penalty\?"),
        ("zzz", "there are n, temperature, .*skip_special_tokens"),
    ],
)  # fmt: skip
def test_a_sampling_parameter_of_another_name_is_answered_with_what_it_is_here(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=rf"SamplingParams\(\) has no argument '{name}': {message}"):
        SamplingParams(**{"max_tokens": 5, name: 1})


def test_sampling_params_still_show_what_they_take() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == list(SamplingParams.__dataclass_fields__)
    assert pickle.loads(pickle.dumps(GREEDY)) == GREEDY == replace(GREEDY)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(5)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, "greedy", [None], [GREEDY, 3]], ids=str)
def test_sampling_params_of_a_wrong_type_are_refused(params: Any, lm_of: LmOf) -> None:
    prompts = [[1], [2]] if params == [GREEDY, 3] else [[1]]
    with pytest.raises(TypeError, match=r"SamplingParams is expected"):
        lm_of("llama").generate(prompts, params)


def test_as_many_params_as_prompts_are_expected(lm_of: LmOf) -> None:
    with pytest.raises(ValueError, match=r"2 prompts, but 3 SamplingParams"):
        lm_of("llama").generate([[1], [2]], [GREEDY] * 3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"device_map": "cpu"}, r"LM\(\) has no argument 'device_map': one device holds the model, device="),
        ({"max_modle_len": 8}, r"no argument 'max_modle_len': did you mean max_model_len\?"),
        ({"zzz": 1}, r"no argument 'zzz': there are model, dtype, .*page_size.* rename"),
        ({"model": torch.nn.Linear(1, 1)}, r"model is a Linear: .* expected; one that is loaded .*save_pretrained\(folder\)"),
    ],
)  # fmt: skip
def test_what_a_model_is_not_made_of_is_refused_with_what_it_is(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LM(**with_tuning(**{"model": "tiny", "load_format": "dummy", "hf_config": CONFIGS["llama"](), **keywords}))


def test_what_the_hints_name_is_there() -> None:
    named = {word.partition("=")[0] for hint in ELSEWHERE.values() for word in re.findall(r"here it is (\S+)", hint)}
    assert named <= {*ModelConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__}
    of_sampling = {word for hint in SAMPLING_ELSEWHERE.values() for word in re.findall(r"here it is (\w+)", hint)}
    assert {"max_tokens", "n"} <= of_sampling <= SamplingParams.__dataclass_fields__.keys()
    assert not SAMPLING_ELSEWHERE.keys() & SamplingParams.__dataclass_fields__.keys()


def test_a_model_says_what_its_states_are(lm_of: LmOf, model_folder: Callable[[str], Path]) -> None:
    lm = lm_of("llama")
    with lm.trace([1, 2]):
        state = lm.model.layers[0].output.save()
    assert (lm.dtype, lm.device) == (state.dtype, state.device) == (torch.float32, torch.device("cpu"))
    with LM(model_folder("llama"), dtype=torch.bfloat16, device="cpu") as half:
        assert half.dtype is torch.bfloat16


def test_text_needs_a_tokenizer(lm_of: LmOf) -> None:
    with LM("tiny", load_format="dummy", hf_config=CONFIGS["llama"](), device="cpu") as lm:
        with pytest.raises(ValueError, match="no tokenizer: pass a list of token ids"):
            lm.generate("text")
        with pytest.raises(ValueError, match=r"stop strings need a tokenizer.*stop_token_ids"):
            lm.generate([[1]], SamplingParams(stop="a"))
        (out,) = lm.generate([[1, 2]], GREEDY)
        assert out.text == "" and len(out.token_ids) == 8
        assert [t for piece in lm.stream([1, 2], GREEDY) for t in piece.token_ids] == out.token_ids
