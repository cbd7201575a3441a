"""Rows of captures with `stream=True` in the pieces of a stream, against the result of the same request and of one without."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import held
from helpers_classes import load, random_prompt
from helpers_declared import lms, vector
from helpers_drafts import Told
from helpers_runner import random_ids

from pymllm_interp import LM, SAE, Capture, SamplingParams
from pymllm_interp.captures import Activations, CaptureError, Features, Lens, Project
from pymllm_interp.core.events import RowsEvent
from pymllm_interp.hooks.captures import streamed
from pymllm_interp.interventions import Monitor, Steer

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
WAIT, OTHERS = 600, ("indexes", "counts", "token_log_probs", "token_ranks")
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def rows_of(pieces: Sequence[Any]) -> list[Activations]:
    return [piece.captures for piece in pieces if piece.captures is not None]


def check(pieces: Sequence[Any], found: Activations, pooled: Sequence[str] = (), quiet: Sequence[str] = ()) -> None:
    """The pieces' rows, one after the other, are those of the result: of all sites but the `quiet` ones."""
    parts = rows_of(pieces)
    assert {site for part in parts for site in part} == set(found) - set(quiet)
    for site in set(found) - set(quiet):
        own = [part for part in parts if site in part]
        assert site not in pooled or (len(own) == 1 and own[0] is parts[-1]), "its one row comes last"
        for name in ("positions", "token_ids", *(name for name in OTHERS if site in getattr(found, name))):
            assert torch.equal(torch.cat([getattr(part, name)[site] for part in own]), getattr(found, name)[site])
        rows = [part[site] for part in own]
        if site.startswith("pattern"):  # of as many keys as there were
            rows = [torch.nn.functional.pad(part, (0, found[site].shape[-1] - part.shape[-1])) for part in rows]
        assert torch.equal(torch.cat(rows), found[site]) and rows[0].dtype is found[site].dtype


def some_captures(rng: random.Random, lm: LM, patterns: bool) -> tuple[list[Capture], list[str], list[str]]:
    """Captures of a request, with the sites of pools, and those that do not stream."""
    width = lm.hidden_size
    sae = SAE(
        W_enc=vector(width, 1, 24).T, W_dec=vector(width, 2, 24), b_enc=torch.zeros(24), b_dec=torch.zeros(width),
        site="resid_mid.1",
    )  # fmt: skip
    positions: Any = rng.choice(["all", "prompt", "generated", [0, -1], slice(0, None, 3)])
    found = [
        Capture("resid_post.*", positions=positions, stream=True),
        Capture("resid_pre.1", reduce=Lens(top_k=3, tokens=[5, 7]), stream=True),
        Capture("attn_out.0", reduce=Project(vector(width, 3, 4), top_k=2), stream=True),
        Capture("mlp_out.1", reduce="mean", stream=True),
        Capture("mlp_out.0", reduce="last", stream=True),
        Capture("resid_mid.1", reduce=Features(sae, top_k=4), stream=True),
        Capture("z.1", heads=[1], dtype="float16", stream=True),
        Capture("logits", stream=True),
        Capture("final_norm"),
    ]
    if patterns:
        found.append(Capture("pattern.1", heads=[0], positions="generated", stream=True))
    kept = rng.sample(found, rng.randrange(1, len(found) + 1))
    sites = {str(capture.site) for capture in kept}
    return kept, [site for site in ("mlp_out.0", "mlp_out.1") if site in sites], sorted({"final_norm"} & sites)


@pytest.mark.few("way", "functions", "graphs")  # the same kernels as in tables
@pytest.mark.parametrize("way", ["functions", "tables", "graphs"])
def test_rows_are_those_of_the_result_in_any_company(way: str, model_folder: Any) -> None:
    """Chunks, a small pool, several completions, other requests with ops and captures in the same steps."""
    rng = random.Random(11)
    count = 12 if way == "functions" else 5
    with lms(way, model_folder) as load:
        lm = load(
            "llama",
            kv_cache_tokens=60,
            page_size=4,
            max_num_tokens=9,
            inner_sites=("z",),
            async_scheduling=way != "graphs",
        )
        asked, streams, handles = [], [], []
        with held(lm):
            for i in range(count):
                prompt = random_ids(rng.randrange(1, 14), seed=i)
                captures, pooled, quiet = some_captures(rng, lm, patterns=way == "functions")
                ops = [Steer("resid_post.0", vector(lm.hidden_size, i), scale=0.5)] if i % 3 == 0 else []
                monitors = [Monitor("resid_post.0", vector(lm.hidden_size, i), 1e9)] if i % 4 == 1 else []
                options: Any = {"interventions": ops, "monitors": monitors, "capture": captures}
                asked.append((prompt, captures, pooled, quiet, options))
                streams.append(lm.stream(prompt, GREEDY, **options))
                handles.append(lm.submit(random_ids(3, seed=i), GREEDY, capture=["resid_post.1"]))
        found = [list(pieces) for pieces in streams]
        if way == "functions":
            assert lm.engine.stats()["preempted"]
        for (prompt, captures, pooled, quiet, options), pieces in zip(asked, found, strict=True):
            result = pieces[-1].activations
            streaming = {site for capture in captures if capture.stream for site in result if _names(capture, site)}
            if not streaming:
                assert not rows_of(pieces)
                continue
            empty = [site for site in result if site not in quiet and not len(result[site])]
            check(pieces, result, pooled, [*quiet, *empty])
            options["capture"] = [Capture(**{**_fields(capture), "stream": False}) for capture in captures]
            (plain,) = lm.generate([prompt], GREEDY, **options)
            assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids
            for site in result:
                torch.testing.assert_close(result[site], plain.activations[site], rtol=1e-3, atol=1e-4)
        for handle in handles:
            handle.result(WAIT)


def _fields(capture: Capture) -> dict[str, Any]:
    return {name: getattr(capture, name) for name in ("site", "positions", "dtype", "reduce", "heads", "missing")}


def _names(capture: Capture, site: str) -> bool:
    return str(capture.site) == site or (str(capture.site) == "resid_post.*" and site.startswith("resid_post."))


@pytest.mark.parametrize("n", [1, 3])
def test_a_token_comes_with_the_rows_that_it_was_read_from(n: int, lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    prompt = random_ids(6, seed=1)
    params = SamplingParams(temperature=1, seed=4, max_tokens=5, ignore_eos=True, n=n)
    pieces = list(lm.stream(prompt, params, capture=[Capture("resid_post.1", stream=True)]))
    for index in range(n):
        own = [piece for piece in pieces if piece.output_index == index]
        at = [piece.captures.positions["resid_post.1"].tolist() for piece in own]
        assert at == [list(range(6)), [6], [7], [8], [9]] and [len(piece.token_ids) for piece in own] == [1] * 5
        assert [piece.finish_reason for piece in own] == [None] * 4 + ["length"]
        check(own, own[-1].activations)


def test_many_rows_come_in_pieces_of_bounded_size(lm_of: Callable[..., LM], monkeypatch: pytest.MonkeyPatch) -> None:
    lm, width = lm_of("llama"), lm_of("llama").hidden_size
    monkeypatch.setattr(streamed, "PART_BYTES", 4 * 3 * width * 4)  # four positions of three layers
    captures = [Capture("resid_post.*", stream=True), Capture("mlp_out.1", reduce="mean", stream=True)]
    pieces = list(lm.stream(random_ids(14, seed=2), SamplingParams(temperature=0, max_tokens=3), capture=captures))
    assert [len(part.positions["resid_post.0"]) for part in rows_of(pieces) if "resid_post.0" in part] == [
        4,
        4,
        4,
        2,
        1,
        1,
    ]
    assert [len(piece.token_ids) for piece in pieces] == [0, 0, 0, 1, 1, 0, 1] and {*map(str, pieces[:3])} == {""}
    check(pieces, pieces[-1].activations, ["mlp_out.1"])
    (only,) = list(lm.stream(random_ids(3, seed=2), SamplingParams(max_tokens=0), capture=captures[:1]))
    check([only], only.activations)


@pytest.mark.parametrize("way", ["functions", "tables"])
def test_rows_of_drafts_are_those_that_were_accepted(way: str, model_folder: Any) -> None:
    drafter = Told()
    prompt, params = random_ids(5, seed=4) * 4, SamplingParams(temperature=0, max_tokens=24)
    captures = [Capture("resid_post.1", stream=True), Capture("resid_post.0", reduce=Lens(top_k=2), stream=True)]
    with lms(way, model_folder) as load:
        lm = load("llama", speculative=drafter)
        (plain,) = lm.generate([prompt], params, capture=captures)
        drafter.tell([plain])
        before = lm.engine.stats()["speculation"]["drafted"]
        pieces = list(lm.stream(prompt, params, capture=captures))
        assert lm.engine.stats()["speculation"]["drafted"] > before
    check(pieces, pieces[-1].activations)
    drafted, alone = (out.activations["resid_post.1"] for out in (pieces[-1], plain))
    torch.testing.assert_close(
        drafted, alone, atol=1e-4, rtol=1e-4
    )  # several rows a pass, and one: other kernels on CUDA


def test_prompt_rows_come_behind_a_prefix_hit_and_a_stop_has_no_rows_behind_it(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama", page_size=4)
    prompt, probe = random_ids(13, seed=3), vector(lm.hidden_size, 3)
    captures = [Capture("resid_post.1", stream=True)]
    first, again = (list(lm.stream(prompt, GREEDY, capture=captures)) for _ in range(2))
    assert torch.equal(again[0].captures.positions["resid_post.1"], torch.arange(13))
    check(again, first[-1].activations)
    scores = again[-1].activations["resid_post.1"][13:].float() @ probe
    monitor = Monitor("resid_post.1", probe, float(scores[:4].max()) - 1e-3, "stop", positions="generated")
    stopped = list(lm.stream(prompt, GREEDY, capture=captures, monitors=[monitor]))
    fired = 13 + int(scores[:4].argmax())
    assert stopped[-1].finish_reason == "monitor"
    assert torch.cat([p.positions["resid_post.1"] for p in rows_of(stopped)]).tolist() == list(range(fired + 1))


def test_what_nobody_reads_is_held_once_and_is_its_readers_own(lm_of: Callable[..., LM]) -> None:
    """Events name positions. A piece's rows are copies: writing to them changes neither the result nor other pieces."""
    lm = lm_of("llama")
    prompt = random_ids(6, seed=1)
    handle = lm._requests.start_one(
        "lm.stream", prompt, GREEDY, {"capture": [Capture("resid_post.1", stream=True)]}, True
    )
    wanted = handle.result(WAIT).activations["resid_post.1"].clone()
    events = []
    while not handle._events.empty():
        events.append(handle._events.get())
    rows: list[Any] = [event.rows for event in events if isinstance(event, RowsEvent)]
    assert len(rows) == 8 and all(one.sources[0] is rows[0].sources[0] for one in rows), "all read the result's memory"
    assert [len(one.token_ids) for one in rows] == [6] + [1] * 7
    handle._events = queue.SimpleQueue()
    for event in events:
        handle._events.put(event)
    pieces = list(handle)
    for part in rows_of(pieces):
        part["resid_post.1"].zero_()
    assert torch.equal(handle.output().activations["resid_post.1"], wanted)
    (whole,) = list(lm.stream(prompt, SamplingParams(max_tokens=0), capture=[Capture("resid_post.1", stream=True)]))
    whole.captures["resid_post.1"].zero_()
    assert torch.equal(whole.activations["resid_post.1"], wanted[:6]), "a part that is the whole result, too"


def test_lost_states_have_no_rows(model_folder: Any) -> None:
    """What a full ring loses is said at the end, and no other request's memory is shown in its place."""
    with lms("tables", model_folder) as load:
        lm = load("llama", capture_when_full="fail", capture_ring_bytes=8 * 3 * 64 * 4)
        stuck, goes_on = threading.Event(), threading.Event()
        lm.runner.capture_ring.open()
        lm.runner.capture_ring.after(lambda: stuck.set() or goes_on.wait(WAIT))
        assert stuck.wait(WAIT)
        pieces = lm.stream(random_ids(5, seed=1), GREEDY, capture=[Capture("resid_post.*", stream=True)])
        lm.generate([random_ids(5, seed=1)], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        goes_on.set()
        found = list(pieces)
        assert not rows_of(found) and len([token for piece in found for token in piece.token_ids]) == 8
        with pytest.raises(CaptureError, match="capture_ring_bytes"):
            found[-1].activations["resid_post.0"]
        (only,) = lm.stream(
            random_ids(5, seed=1), SamplingParams(max_tokens=0), capture=[Capture("embed", stream=True)]
        )
        check([only], only.activations)


def test_an_async_stream_and_a_lens_have_them_too(lm_of: Callable[..., LM]) -> None:
    lm, prompt = lm_of("llama"), random_ids(5, seed=6)

    async def read() -> list[Any]:
        return [piece async for piece in lm.astream(prompt, GREEDY, capture=[Capture("resid_post.1", stream=True)])]

    pieces = asyncio.run(read())
    check(pieces, pieces[-1].activations)
    pieces = list(lm.generate_with_lens(prompt, GREEDY, lens=Lens(top_k=2), stream=True))
    (out,) = lm.generate_with_lens([prompt], GREEDY, lens=Lens(top_k=2))
    check(pieces, out.activations)
    for piece in pieces:  # the last layer's most likely token is the one that came with it
        assert piece.captures.indexes[f"resid_post.{lm.num_layers - 1}"][-1, 0] == piece.token_ids[-1]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss"])
def test_families_stream_their_rows(family: str, lm_of: Callable[..., LM]) -> None:
    lm = lm_of(family)
    captures = [Capture("resid_post.*", stream=True), Capture("logits", stream=True)]
    for length in (1, 17):
        pieces = list(lm.stream(random_ids(length, seed=length), GREEDY, capture=captures))
        check(pieces, pieces[-1].activations)


@pytest.mark.parametrize("name", ["nemotron_h", "starcoder2"])
def test_models_by_class_stream_rows_and_recurrent_states(name: str) -> None:
    with load(name) as lm:
        captures = [Capture("resid_post.*", stream=True)]
        if name == "nemotron_h":
            captures.append(Capture("state.*", positions=[3, -1], stream=True))
        pieces = list(lm.stream(random_prompt(9, 9), GREEDY, capture=captures))
        check(pieces, pieces[-1].activations)


def test_a_call_without_a_stream_has_the_result_alone(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    prompts, spec = [random_ids(4, seed=1)], Capture("resid_post.1", stream=True)
    (out,), (plain,) = (
        lm.generate(prompts, GREEDY, capture=[spec]),
        lm.generate(prompts, GREEDY, capture=["resid_post.1"]),
    )
    assert torch.equal(out.activations["resid_post.1"], plain.activations["resid_post.1"])
    pieces = list(lm.stream(prompts[0], GREEDY, capture=["resid_post.1"]))
    assert not rows_of(pieces) and pieces[-1].activations


def test_what_is_wrong_is_said(lm_of: Callable[..., LM], tmp_path: Any) -> None:
    lm = lm_of("llama")
    with pytest.raises(ValueError, match="stream='yes'; expected True or False"):
        Capture("resid_post.1", stream="yes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="captured twice, with different"):
        lm.stream([1, 2], GREEDY, capture=["resid_post.1", Capture("resid_post.*", stream=True)])
    with pytest.raises(ValueError, match="a harvest streams nothing"):
        lm.harvest([[1, 2]], out=tmp_path / "rows", capture=[Capture("resid_post.1", stream=True)])
    assert Capture("embed").fingerprint != Capture("embed", stream=True).fingerprint
