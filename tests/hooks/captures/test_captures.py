"""Captures: as functions on a CPU, and through the tables, the ring and its thread.

Where there is no GPU, the tables and the ring are CPU tensors and the kernels run under Triton's interpreter: everything but
streams and pinned memory is the same code.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCAB, held
from helpers_declared import (
    INNER,
    SITES,
    WAYS,
    captured_rows,
    copy_records,
    lms,
    ops_at,
    place_of,
    prompt_of,
    random_specs,
    states_of,
    vector,
)  # fmt: skip
from helpers_heads import in_double
from helpers_runner import random_ids
from helpers_simulation import POLICIES, Simulation

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.core.model_spec import INNER_SITES, ModelSpec, site_index
from pymllm_interp.core.request import Request
from pymllm_interp.harvest import open_harvest
from pymllm_interp.hooks.bind import bind
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.captures.activations import Activations, CaptureError
from pymllm_interp.hooks.captures.egress.admission import ring_captures
from pymllm_interp.hooks.captures.egress.result_memory import FRESH, SMALL, FreshMemory, ResultMemory
from pymllm_interp.hooks.captures.egress.ring import CaptureRing
from pymllm_interp.hooks.captures.egress.ring_allocator import RingAllocator
from pymllm_interp.hooks.captures.group import Group
from pymllm_interp.hooks.captures.rows import CapturedRows
from pymllm_interp.hooks.captures.spec import Project
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.hooks.site import Site, expand
from pymllm_interp.interventions import Generated
from pymllm_interp.runner import model_runner
from pymllm_interp.runner.parts import LONG_PASS
from pymllm_interp.runner.stages.declared_stage import DeclaredStage

pytest.importorskip("triton", reason="the kernels' tests need the package triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []
INFO = ModelSpec.of(CONFIGS["llama"](), torch.float32)
WAIT = 600


@pytest.fixture(scope="module", params=WAYS)
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM in float32, its hooks in each of the ways."""
    with lms(request.param, model_folder) as load:
        yield load


@pytest.fixture(scope="module")
def ring_lm(model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """The same with tables only, a new one at each call."""
    made: list[LM] = []

    def load(**kwargs: Any) -> LM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeclaredStage, "has_tables", True)
            options = {"dtype": "float32", "device": DEVICE, "disable_cuda_graph": not CUDA, "kv_cache_tokens": 4096}
            made.append(LM(model_folder("llama"), **with_tuning(**{**options, **kwargs})))
        return made[-1]

    yield load
    for lm in made:
        lm.shutdown()


def ring_of(lm: LM) -> CaptureRing:
    ring = lm.runner.capture_ring
    assert ring is not None
    return ring


@contextmanager
def drain_held(ring: CaptureRing) -> Iterator[threading.Event]:
    """Nothing is copied out of the ring until the event is set, or the block ends."""
    goes_on, stands = threading.Event(), threading.Event()
    ring.open()
    ring.after(stands.set)
    ring.after(lambda: goes_on.wait() and None)
    stands.wait()
    try:
        yield goes_on
    finally:
        goes_on.set()


def assert_same(found: Activations, wanted: Activations) -> None:
    assert list(found) == list(wanted)
    for site, rows in wanted.items():
        torch.testing.assert_close(found[site], rows, rtol=1e-4, atol=1e-4, msg=site)
        assert torch.equal(found.positions[site], wanted.positions[site]), site
        assert torch.equal(found.token_ids[site], wanted.token_ids[site]), site


# -- through the engine, both ways -------------------------------------------------------------------


@pytest.mark.few("family", ways=["tables"])  # those that are reduced, or in a tight ring, are
@pytest.mark.few("family", "llama", ways=["graphs"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_captures_are_the_states_that_the_model_goes_on_with(family: str, lm_of: Any, oracle: Any) -> None:
    """Beside others, in chunks, and after giving way: each position once, in order, with its token."""
    model, rng = oracle(family), random.Random(3)
    lm = lm_of(family, kv_cache_tokens=80, page_size=4, max_num_tokens=16, inner_sites=INNER_SITES)
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(12)]
    # The oracle edits resid_mid through what the attention adds, which is then not what attn_out is.
    sites = [site for site in SITES + INNER if "mid" not in site]
    specs = [random_specs(rng, model.config, sites) for _ in prompts]
    before = lm.engine.stats()["preempted"]
    inner = ["q.0", "k.*", "v.1", "z.1", "mlp_act.*"]
    wanted = ["embed", "attn_out.*", "mlp_out.1", "resid_post.*", Capture("final_norm", positions="generated"), *inner]
    outs = lm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), interventions=specs, capture=wanted)
    assert lm.engine.stats()["preempted"] > before
    layers = model.config.num_hidden_layers
    for prompt, spec, out in zip(prompts, specs, outs, strict=True):
        ids = (prompt + out.token_ids)[:-1]
        states, got = states_of(model, ids, spec, len(prompt)), out.activations
        assert len(got) == 6 + 4 * layers and set(got) <= set(states)
        for site, rows in got.items():
            first = len(prompt) if site == "final_norm" else 0
            assert got.positions[site].tolist() == list(range(first, len(ids))), site
            assert got.token_ids[site].tolist() == ids[first:]
            assert rows.shape[1:] == lm.runner.model_spec.shape(site.partition(".")[0]), site
            torch.testing.assert_close(rows.flatten(1), states[site][first:], rtol=1e-4, atol=1e-4, msg=site)


def some_ops(lm: LM, site: str, number: int) -> list[Any]:
    """All of `ops_at`; where Triton's interpreter computes them, one, another one at the next site."""
    ops = ops_at(site, lm.hf_config)
    return ops if CUDA or lm.runner.device_tables is None else [ops[number % len(ops)]]


@pytest.mark.few("family", "llama", "gpt_neox", "gemma2", ways=["functions"])
@pytest.mark.few("family", "gpt_neox", "gemma2", ways=["tables"])  # deltas that are parallel, and norms behind them
@pytest.mark.few("family", "llama", "gpt2", ways=["graphs"])  # the same kernels
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def test_each_op_at_each_site_leaves_transformers_states_at_every_site(family: str, lm_of: Any, oracle: Any) -> None:
    """Beside requests with other ops, in chunks: the prompt's positions and generated ones, to 1e-5 of a site's largest number."""
    model, prompt = oracle(family), random_ids(9, seed=3)
    lm = lm_of(family, max_num_tokens=24, inner_sites=INNER_SITES)
    family_row, layers = lm.model_spec.family, model.config.num_hidden_layers
    sites = [place for site in SITES + INNER if (place := place_of(site, family_row))]
    specs = [op for number, site in enumerate(sites) for op in some_ops(lm, site, number)]
    random.Random(1).shuffle(specs)  # a pass has ops of all kinds at all sites
    kinds = ["attn_out", "mlp_out", "resid_post", "q", "k", "v", "z", "mlp_act"]
    everywhere = [place_of("embed", family_row), *(f"{kind}.*" for kind in kinds), "final_norm", "logits"]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    outs = lm.generate([prompt] * len(specs), params, interventions=[[op] for op in specs], capture=everywhere)
    for op, out in zip(specs, outs, strict=True):
        assert len(out.activations) == 3 + len(kinds) * layers
        states = states_of(model, (prompt + out.token_ids)[:-1], [op], len(prompt))
        for site, rows in out.activations.items():
            if str(op.site) == site.replace("attn_out", "resid_mid"):
                continue  # the oracle edits resid_mid through what the attention adds
            wanted = states[site]
            apart = (rows.flatten(1) - wanted).abs().max() / wanted.abs().max()
            assert apart <= 1e-5, (op, site, float(apart))


@pytest.mark.few("lm_of", "functions")
@pytest.mark.few("family", "llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_op_at_each_site_in_half_precision_is_its_maths_on_the_state_that_came(family: str, lm_of: Any) -> None:
    """A cosine of 0.9999 with it in double precision; rows that it leaves alone keep their bits. Which token is drawn is forced, so
    that a site gets the same states with the op and without."""
    lm, prompt = lm_of(family, dtype="bfloat16", inner_sites=INNER_SITES, max_num_tokens=16), prompt_of(9, 3)
    if lm.runner.device_tables is not None and not CUDA:
        pytest.skip("Triton's interpreter cuts bfloat16s off where a device rounds them")
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, logit_bias={7: 1e5})
    acted: Counter[type] = Counter()
    for site in SITES + INNER:
        name, ops = str(expand(site, lm.runner.num_hidden_layers, INFO.family)[0]), ops_at(site, lm.hf_config)
        # One by one: the last bits depend on the batch.
        plain, *others = [
            lm.generate([prompt], params, interventions=[given], capture=[site])[0].activations[name].flatten(1)
            for given in ([], *([op] for op in ops))
        ]
        for op, found in zip(ops, others, strict=True):
            wanted = in_double(op, plain, len(prompt))
            same = (wanted == plain.double()).all(1)
            acted[type(op)] += not same.all()
            assert torch.equal(found[same], plain[same]), op
            assert torch.cosine_similarity(found.double(), wanted, dim=1).min() >= 0.9999, op
            lengths = found.double().norm(dim=1) / wanted.norm(dim=1)
            assert (lengths - 1).abs().max() <= 1e-2, op
    assert len(acted) == 5 and min(acted.values()) > 7, "ops that leave every row alone show little"


def test_what_flows_in_a_layer_adds_up(lm_of: Any) -> None:
    lm = lm_of("llama")
    (out,) = lm.generate([prompt_of(9, 1)], SamplingParams(temperature=0, max_tokens=5), capture=[
        "resid_pre.1", "attn_out.1", "resid_mid.1", "mlp_out.1", "resid_post.1", "resid_post.0"
    ])  # fmt: skip
    got = out.activations
    assert torch.equal(got["resid_pre.1"], got["resid_post.0"])
    torch.testing.assert_close(got["resid_pre.1"] + got["attn_out.1"], got["resid_mid.1"])
    torch.testing.assert_close(got["resid_mid.1"] + got["mlp_out.1"], got["resid_post.1"])
    with pytest.raises(KeyError, match=r"not captured; there is resid_pre\.1"):
        got["mlp_out.0"]


@pytest.mark.few("lm_of", "functions", "tables")
def test_captures_select_convert_and_reduce(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(8, 2)
    params = SamplingParams(temperature=0, max_tokens=4)
    probes = vector(lm.hf_config.hidden_size, 3, 5)

    def capture(*specs: Any) -> Any:
        return lm.generate([prompt], params, capture=list(specs))[0].activations

    whole = capture("resid_post.1")["resid_post.1"]
    assert whole.shape == (11, lm.hf_config.hidden_size)
    last = capture(Capture("resid_post.1", positions=[-1, 0]))
    assert torch.equal(last["resid_post.1"], whole[[0, 7]]) and last.positions["resid_post.1"].tolist() == [0, 7]
    half = capture(Capture("resid_post.1", dtype="float16"))["resid_post.1"]
    assert torch.equal(half, whole.half())
    torch.testing.assert_close(
        capture(Capture("resid_post.1", reduce="mean"))["resid_post.1"], whole.mean(0, keepdim=True)
    )
    assert torch.equal(capture(Capture("resid_post.1", reduce="max"))["resid_post.1"], whole.amax(0, keepdim=True))
    end = capture(Capture("resid_post.1", reduce="last"))
    assert torch.equal(end["resid_post.1"], whole[-1:]) and end.positions["resid_post.1"].tolist() == [10]
    for directions in (probes, vector(lm.hf_config.hidden_size, 3, 40)):  # on the device, and too many for that
        wanted = whole @ directions.T
        dots = capture(Capture("resid_post.1", reduce=Project(directions)))
        torch.testing.assert_close(dots["resid_post.1"], wanted, rtol=1e-5, atol=1e-4)
        assert dots.positions["resid_post.1"].tolist() == list(range(11))
        top = capture(Capture("resid_post.1", dtype="bfloat16", reduce=Project(directions, top_k=2)))
        best = wanted.topk(2)
        torch.testing.assert_close(top["resid_post.1"], best.values.bfloat16())
        assert torch.equal(top.indexes["resid_post.1"], best.indices)
    mean, end = (capture(Capture("resid_post.1", dtype="bfloat16", reduce=reduce)) for reduce in ("mean", "last"))
    torch.testing.assert_close(mean["resid_post.1"], whole.mean(0, keepdim=True).bfloat16())
    # Triton's interpreter cuts bfloat16s off where a device rounds them.
    torch.testing.assert_close(end["resid_post.1"], whole[-1:].bfloat16(), rtol=0 if CUDA else 8e-3, atol=0)
    none = capture(Capture("resid_post.1", positions=Generated(50), reduce=Project(probes, top_k=2)))
    assert none["resid_post.1"].shape == none.indexes["resid_post.1"].shape == (0, 2)
    never = capture(Capture("resid_post.1", positions=Generated(50)))
    assert never["resid_post.1"].shape == (0, lm.hf_config.hidden_size) and never.token_ids["resid_post.1"].numel() == 0


@pytest.mark.few("lm_of", "functions", "graphs")
def test_what_is_reduced_is_each_position_once(lm_of: Any, oracle: Any) -> None:
    """Beside each other and beside whole states, in chunks, and after giving way."""
    model, rng = oracle("llama"), random.Random(4)
    lm = lm_of("llama", kv_cache_tokens=80, page_size=4, max_num_tokens=16, inner_sites=INNER_SITES)
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(12)]
    width = lm.runner.model_spec.width
    probes = {kind: vector(width(kind), 7, 3) for kind in ("mlp_out", "k", "mlp_act", "final_norm")}
    captures = [
        ["resid_post.0", Capture("resid_post.2", reduce="mean"), Capture("embed", reduce="last")],
        [Capture("mlp_out.*", reduce=Project(probes["mlp_out"])), Capture("embed", dtype="float16")],
        [Capture(f"{kind}.1", reduce=Project(probes[kind])) for kind in ("k", "mlp_act", "mlp_out")],
        [Capture("attn_out.*", positions="generated", reduce="mean"), Capture("v.0", dtype="bfloat16")],
        ["resid_post.1", Capture("final_norm", positions="prompt", reduce=Project(probes["final_norm"][:1]))],
    ]
    asked = [captures[i % len(captures)] for i in range(len(prompts))]
    before = lm.engine.stats()["preempted"]
    outs = lm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), capture=asked)
    assert lm.engine.stats()["preempted"] > before
    for prompt, specs, out in zip(prompts, asked, outs, strict=True):
        ids = (prompt + out.token_ids)[:-1]
        states = states_of(model, ids, [], len(prompt))
        for spec in (Capture(s) if isinstance(s, str) else s for s in specs):
            for bound in bind(spec, lm.runner.model_spec, len(prompt)):
                site, first, stop = str(bound.site), 0, len(ids)
                if spec.positions != "all":
                    first, stop = (0, len(prompt)) if spec.positions == "prompt" else (len(prompt), len(ids))
                rows = states[site][first:stop]
                if spec.reduce == "mean":
                    rows = rows.mean(0, keepdim=True)
                elif spec.reduce == "last":
                    rows, first = rows[-1:], stop - 1
                elif isinstance(spec.reduce, Project):
                    rows = rows @ spec.reduce.directions.T
                assert out.activations.positions[site].tolist() == list(range(first, stop)), site
                found = out.activations[site].flatten(1)
                tolerance = 1e-4 if spec.dtype is None else {torch.float16: 2e-3, torch.bfloat16: 2e-2}[spec.dtype]
                torch.testing.assert_close(found, rows.to(found.dtype), rtol=tolerance, atol=tolerance, msg=site)


PLACES = ["all", "prompt", "generated", [-1], range(1, 6), slice(None, None, 3), [0, 1, 4, 5], Generated(1, 7, 2)]


@pytest.mark.few("lm_of", "functions", "tables")
@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_mean_and_a_last_row_are_those_of_the_whole_states(ahead: bool, lm_of: Any) -> None:
    """Of positions of all kinds, in chunks, after giving way, with steps launched ahead, and stops that nobody saw coming."""
    lm = lm_of("llama", kv_cache_tokens=80, page_size=4, max_num_tokens=16, async_scheduling=ahead)
    rng, sites = random.Random(6), ["embed", "attn_out.{0,2}", "resid_post.1", "final_norm"]
    prompts = [prompt_of(rng.randrange(6, 25), i) for i in range(8)]
    plain = SamplingParams(temperature=0, max_tokens=9)
    ids = [out.token_ids for out in lm.generate(prompts, plain)]
    params = [
        SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[i[4]] if n % 2 else []) for n, i in enumerate(ids)
    ]

    def activations(reduce: Any) -> tuple[list[Activations], int]:
        before = lm.engine.stats()["preempted"], 0 if lm.runner.capture_ring is None else ring_of(lm).bytes_sent
        asked = [
            [Capture(site, positions=PLACES[(i + j) % len(PLACES)], reduce=reduce) for j, site in enumerate(sites)]
            for i in range(len(prompts))
        ]
        found = [out.activations for out in lm.generate(prompts, params, capture=asked)]
        assert lm.engine.stats()["preempted"] > before[0]
        return found, 0 if lm.runner.capture_ring is None else ring_of(lm).bytes_sent - before[1]

    (wholes, all_bytes), (means, mean_bytes), (lasts, last_bytes) = (activations(how) for how in (None, "mean", "last"))
    largest, max_bytes = activations("max")
    for whole, mean, most, last in zip(wholes, means, largest, lasts, strict=True):
        assert list(whole) == list(mean) == list(most) == list(last)
        for site, rows in whole.items():
            assert torch.equal(mean.positions[site], whole.positions[site])
            assert torch.equal(last.positions[site], whole.positions[site][-1:])
            assert torch.equal(last.token_ids[site], whole.token_ids[site][-1:])
            wanted = rows.mean(0, keepdim=True)[: len(rows)]
            torch.testing.assert_close(mean[site], wanted, rtol=1e-5, atol=1e-5, msg=site)
            torch.testing.assert_close(last[site], rows[-1:], rtol=1e-5, atol=1e-5, msg=site)
            largest_rows = rows.amax(0, keepdim=True) if len(rows) else rows
            torch.testing.assert_close(most[site], largest_rows, rtol=1e-5, atol=1e-5, msg=site)
    assert lm.runner.capture_ring is None or max(mean_bytes, max_bytes, last_bytes) < all_bytes


@pytest.mark.parametrize("reduce", ["mean", "last"])
def test_of_a_prompt_a_row_leaves_for_each_step_or_one(reduce: Any, ring_lm: Any) -> None:
    """And of generated positions one each."""
    lm, row = ring_lm(max_num_tokens=32, capture_ring_bytes=1 << 20), INFO.num_hidden_layers * INFO.hidden_size * 4

    def sent(positions: Any, how: Any) -> int:
        before = ring_of(lm).bytes_sent
        params = SamplingParams(temperature=0, max_tokens=4)
        lm.generate([prompt_of(60, 1)], params, capture=[Capture("resid_post.*", positions=positions, reduce=how)])
        return (ring_of(lm).bytes_sent - before) // row

    steps = 2 if reduce == "mean" else 1
    assert sent("all", None) == 63 and sent("all", reduce) == steps + 3
    assert sent("prompt", None) == 60 and sent("prompt", reduce) == steps
    assert sent(slice(None, None, 2), None) == 30 and sent(slice(None, None, 2), reduce) == steps
    assert sent("generated", reduce) == 3


@pytest.mark.parametrize(("kv_cache_tokens", "seed"), [(40, 2), (40, 6), (64, 3)])
def test_a_request_that_gives_way_before_its_last_token_is_read_keeps_its_states(
    kv_cache_tokens: int, seed: int, model_folder: Callable[[str], Path]
) -> None:
    """It ends with that token, and is not computed again."""
    rng = random.Random(seed)
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(1, 20)) for _ in prompts]
    options = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_num_tokens": 16, "max_running_requests": 16}
    with LM(model_folder("llama"), async_scheduling=True, kv_cache_tokens=kv_cache_tokens, **options) as lm:
        outs = lm.generate(prompts, params, capture=["embed"])
        assert lm.engine.stats()["preempted"]
    for prompt, out in zip(prompts, outs, strict=True):
        ids = (prompt + out.token_ids)[:-1]
        assert out.activations.token_ids["embed"].tolist() == ids and len(out.activations["embed"]) == len(ids)
        (entry,) = out.receipt.captures
        assert (entry.prompt_rows, entry.generated_rows) == (len(prompt), len(out.token_ids) - 1)


@pytest.mark.few("lm_of", "functions", "tables")
@pytest.mark.parametrize("long", [LONG_PASS, 1])
def test_a_row_that_was_computed_after_the_end_is_not_captured(
    long: int, lm_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps launched ahead, a request that stops has run a step too many; in long passes it ends between two layers of it."""
    monkeypatch.setattr(model_runner, "LONG_PASS", long)
    late, prompt = lm_of("llama", async_scheduling=True), prompt_of(6, 5)
    ids = late.generate([prompt], SamplingParams(temperature=0, max_tokens=9))[0].token_ids
    stop = next(i for i in range(2, 9) if ids[i] not in ids[:i])
    params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[ids[stop]])
    captures = ["resid_post.0", Capture("resid_post.1", reduce="mean"), Capture("mlp_out.0", reduce="last")]
    (out,) = late.generate([prompt], params, capture=captures)
    assert out.token_ids == ids[: stop + 1]
    found = out.activations
    assert found.token_ids["resid_post.0"].tolist() == found.token_ids["resid_post.1"].tolist() == prompt + ids[:stop]
    assert found.token_ids["mlp_out.0"].tolist() == [ids[stop - 1]]
    (whole,) = late.generate([prompt], params, capture=["resid_post.1", "mlp_out.0"])
    torch.testing.assert_close(found["resid_post.1"], whole.activations["resid_post.1"].mean(0, keepdim=True))
    torch.testing.assert_close(found["mlp_out.0"], whole.activations["mlp_out.0"][-1:])


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (
            ["resid_post.1", Capture("resid_post.*", positions=[0])],
            "resid_post.1 is captured twice, with different positions",
        ),
        ([Capture("logits", positions="prompt")], "from position 2 on, the prompt's last.*prompt_logprobs=0"),
        ([3], "capture: 3 is not one"),
        ([["resid_post.0"], ["resid_post.1"]], "a list for each of the 1; got 2 of them$"),
    ],
)
def test_captures_that_cannot_be_served_are_refused(capture: Any, message: str, lm_of: Any) -> None:
    with pytest.raises(ValueError, match=message):
        lm_of("llama").generate([[1, 2, 3]], capture=capture)


def test_sites_that_several_captures_name_alike_are_captured_once(lm_of: Any, tmp_path: Path) -> None:
    lm, prompt, params = lm_of("llama"), prompt_of(6, 1), SamplingParams(temperature=0, max_tokens=3)
    (whole,) = lm.generate([prompt], params, capture=["resid_post.*", "pattern.*"])
    mean = Capture("mlp_out.0", reduce="mean")
    twice = ["resid_post.1", mean, "pattern.1", "resid_post.*", Capture("blocks.1.hook_resid_post"), mean, "pattern.*"]
    (out,) = lm.generate([prompt], params, capture=twice)
    assert set(out.activations) == {*whole.activations, "mlp_out.0"}
    for site in whole.activations:
        assert torch.equal(out.activations[site], whole.activations[site]), site
    names = [captured.site for captured in out.receipt.captures]
    assert len(names) == len(set(names)) == len(out.activations)


@pytest.mark.local
def test_a_harvest_takes_sites_that_are_named_twice(lm_of: Any, tmp_path: Path) -> None:
    lm, prompts = lm_of("llama"), [prompt_of(6, 1), prompt_of(4, 2)]
    lm.harvest(prompts, capture=["resid_post.1", "resid_post.*"], out=tmp_path / "h", progress=False)
    rows = open_harvest(tmp_path / "h")["resid_post.1"]
    outs = lm.forward(prompts, capture=["resid_post.1"])
    assert torch.equal(rows[:], torch.cat([out.activations["resid_post.1"] for out in outs]))


def test_captures_that_would_outgrow_the_host_are_refused(lm_of: Any) -> None:
    small = lm_of("llama", max_capture_bytes=4000)
    with pytest.raises(ValueError, match=r"12 positions.*max_capture_bytes"):
        small.generate([prompt_of(9, 1)], SamplingParams(max_tokens=4), capture=["resid_post.0", "mlp_out.0"])


def test_one_state_by_two_names_is_captured_alike_or_refused(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(5, 1)
    (out,) = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), capture=["resid_pre.1", "resid_post.0"])
    assert torch.equal(out.activations["resid_pre.1"], out.activations["resid_post.0"])
    with pytest.raises(ValueError, match=r"resid_post\.0 is the same state as resid_pre\.1, captured differently"):
        lm.generate([prompt], capture=["resid_pre.1", Capture("resid_post.0", positions=[0])])


def test_what_was_captured_is_found_by_each_name_of_its_site(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(5, 1)
    asked = ["blocks.1.hook_resid_post", Capture("resid_post.-1", reduce=Project(torch.ones(3, 72), top_k=2)), "logits"]
    (out,) = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), capture=asked)
    found = out.activations
    assert list(found) == list(found.positions) == ["resid_post.1", "resid_post.2", "logits"]
    names = ["blocks.1.hook_resid_post", "resid_post.-2", "model.layers.1", "layers_output[1]", Site("resid_post", 1)]
    for name in names:
        assert name in found and found[name] is found["resid_post.1"]
        for by_site in (found.positions, found.token_ids):
            assert by_site[name] is by_site["resid_post.1"]
    assert found.indexes["resid_post.-1"] is found.indexes["model.layers.2.output"] and list(found.indexes) == [
        "resid_post.2"
    ]
    assert found["lm_head"] is found["logits"]
    for missing in ("resid_post.0", "resid_post.-4", "resid_post.*", "hook_resid", "", 1):
        assert missing not in found and found.get(missing) is None
        with pytest.raises(KeyError, match=r"was not captured(: .*)?; there is resid_post\.\{1\.\.2\}, logits"):
            found[missing]


def test_completions_of_one_prompt_have_all_its_positions_each(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(7, 3)
    (out,) = lm.generate([prompt], SamplingParams(max_tokens=3, n=3, seed=1), capture=["resid_post.1"])
    first = out.outputs[0].activations["resid_post.1"][:7]
    for completion in out.outputs:
        assert completion.activations.token_ids["resid_post.1"].tolist() == (prompt + completion.token_ids)[:-1]
        torch.testing.assert_close(completion.activations["resid_post.1"][:7], first, rtol=1e-4, atol=1e-4)


def test_a_streams_last_piece_has_what_was_captured_and_the_receipt(lm_of: Any) -> None:
    """Of each completion its own: a stream has no output that could carry them."""
    lm, prompt = lm_of("llama"), prompt_of(7, 3)
    params = SamplingParams(max_tokens=6, n=2, seed=1, temperature=3.0, stop_token_ids=list(range(0, VOCAB, 3)))
    declared = {"capture": ["resid_post.1"], "interventions": [Steer("embed", vector(INFO.hidden_size, 1))]}
    (whole,) = lm.generate([prompt], params, **declared)
    assert whole.outputs[0].token_ids != whole.outputs[1].token_ids
    pieces = list(lm.stream(prompt, params, **declared))
    last = {piece.output_index: piece for piece in pieces if piece.finish_reason}
    assert len(last) == 2 and whole.receipt is whole.outputs[0].receipt
    for index, completion in enumerate(whole.outputs):
        assert_same(last[index].activations, completion.activations)
        generated = len(completion.token_ids) - 1
        for receipt in (last[index].receipt, completion.receipt):
            (entry,) = receipt.interventions
            assert (entry.prompt_rows, entry.generated_rows) == (7, generated)
            assert (receipt.captures[0].prompt_rows, receipt.captures[0].generated_rows) == (7, generated)
    assert all(piece.activations is piece.receipt is None for piece in pieces if not piece.finish_reason)


def test_receipts_count_captured_rows(lm_of: Any) -> None:
    captures = [Capture("embed", positions=[0, -1]), Capture("final_norm", reduce="mean"), "resid_post.{0,1}"]
    (out,) = lm_of("llama").generate([prompt_of(6, 1)], SamplingParams(temperature=0, max_tokens=4), capture=captures)
    found = {entry.site: (entry.prompt_rows, entry.generated_rows) for entry in out.receipt.captures}
    assert found == {"embed": (2, 0), "resid_post.0": (6, 3), "resid_post.1": (6, 3), "final_norm": (6, 3)}


@pytest.mark.few("lm_of", "functions", "graphs")
def test_receipts_of_declared_requests_say_how_their_steps_ran(lm_of: Any) -> None:
    """SiteModule and captured decode steps are replayed as any other; beside a block that waits, in segments, or by modules."""
    lm, prompt = lm_of("llama"), prompt_of(6, 1)
    params = SamplingParams(temperature=0, max_tokens=6)
    declared = {"capture": ["resid_post.1"], "interventions": [Steer("embed", vector(INFO.hidden_size, 1))]}
    graphs = lm.runner.graph_runner is not None
    (out,) = lm.generate([prompt], params, **declared)
    assert out.receipt.steps == ({"replay": 6} if graphs else {"plain": 6})
    with held(lm) as arrived:
        beside, tracers = lm.submit(prompt, params, **declared), []

        def trace() -> None:
            with lm.generate(prompt, max_new_tokens=6, **declared) as tracer:
                for _ in tracer.iter[:]:
                    lm.model.layers[1].output.save()
            tracers.append(tracer)

        thread = threading.Thread(target=trace)
        thread.start()
        arrived(2)
    steps = beside.result(WAIT).receipt.steps
    thread.join(WAIT)
    assert steps == tracers[0].receipt.steps == {"segments" if graphs else "modules": 6}


def test_streams_and_aborted_requests_end_with_what_was_captured(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(6, 1)
    handle = lm.submit(prompt, SamplingParams(temperature=0, max_tokens=100), capture=["resid_post.1"])
    handle.cancel()
    out = handle.result(WAIT)
    rows = out.activations["resid_post.1"]
    assert out.finish_reason == "abort" and len(rows) <= len(prompt) + len(out.token_ids)
    assert out.activations.token_ids["resid_post.1"].tolist() == (prompt + out.token_ids)[: len(rows)]


# -- traced requests ---------------------------------------------------------------------------------

STREAM = [
    "embed",
    "resid_post.0",
    "attn_out.1",
    "resid_mid.1",
    "mlp_out.1",
    "resid_post.1",
    "resid_post.2",
    "final_norm",
]


def test_a_capture_takes_what_the_block_left(lm_of: Any) -> None:
    """Section 3's order of effects: declared ops, the block, the capture. Each site is edited, and captured, at its own module."""
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    width = lm.hf_config.hidden_size
    ops = [Steer(site, vector(width, i), scale=0.3) for i, site in enumerate(STREAM)]

    def traced(edit: bool, capture: list[str] | None = STREAM) -> tuple[dict[str, torch.Tensor], Any]:
        layer = lm.model.layers[1]
        with lm.trace(prompt, interventions=ops, capture=capture) as tracer:
            seen = dict().save()
            for name, envoy in (
                ("embed", lm.model.embed_tokens),
                ("resid_post.0", lm.model.layers[0]),
                ("attn_out.1", layer.self_attn),
                ("mlp_out.1", layer.mlp),
                ("resid_post.1", layer),
                ("resid_post.2", lm.model.layers[2]),
                ("final_norm", lm.model.norm),
            ):
                value = envoy.output[0] if name == "attn_out.1" else envoy.output
                seen[name] = value.clone()
                if edit:
                    value[:, 2:4] *= -3
                    seen[name] = value.clone()
            logits = lm.logits.save()
        seen["logits"] = logits
        return seen, tracer.activations

    for edit in (False, True):
        seen, got = traced(edit)
        assert list(got) == STREAM
        for site in STREAM:
            if site != "resid_mid.1":
                assert torch.equal(got[site], seen[site][0]), (site, edit)
        assert got.token_ids["resid_mid.1"].tolist() == prompt
        torch.testing.assert_close(
            got["resid_mid.1"],
            got["resid_post.0"] + got["attn_out.1"] + 0.3 * vector(width, STREAM.index("resid_mid.1")),
        )
        without, none = traced(edit, capture=None)
        assert not none and torch.equal(without["logits"], seen["logits"]), "capturing changes nothing"


@pytest.mark.few("server", {}, ways=["functions"])
@pytest.mark.few("server", {"hook_execution": "eager"}, ways=["tables"])
@pytest.mark.few("server", {}, {"hook_execution": "split"}, ways=["graphs"])
@pytest.mark.parametrize("server", [{}, {"hook_execution": "eager"}, {"hook_execution": "split"}])
def test_a_traced_generation_is_captured_in_each_of_its_steps(server: dict[str, Any], lm_of: Any) -> None:
    """Beside requests without a trace that capture, too; where a block waits, and where it does not."""
    lm, prompt = lm_of("llama", **server), prompt_of(5, 4)
    params = SamplingParams(temperature=0, max_tokens=6)
    wanted = [out.activations for out in lm.generate([prompt, prompt_of(9, 5)], params, capture=STREAM)]
    beside = lm.submit(prompt_of(9, 5), params, capture=STREAM)
    with lm.generate(prompt, max_new_tokens=6, capture=STREAM) as tracer:
        states = list().save()
        for _ in tracer.iter[1:4]:
            lm.model.layers[1].output[:] += 0
            states.append(lm.model.layers[1].output[0].clone())
    assert lm.runner.graph_runner is None or server or tracer.receipt.steps["segments"]
    assert_same(tracer.activations, wanted[0])
    assert torch.equal(tracer.activations["resid_post.1"][5:8], torch.cat(states))
    assert_same(beside.result(WAIT).activations, wanted[1])


def test_each_invoke_has_its_own_captures(lm_of: Any) -> None:
    lm = lm_of("llama")
    prompts = [prompt_of(4, 1), prompt_of(6, 2), prompt_of(5, 3)]
    with lm.trace(capture=["resid_post.0"]) as tracer:
        with tracer.invoke(prompts[0]):
            lm.model.layers[0].output[:] = 0
        with tracer.invoke(prompts[1], capture=["embed", Capture("mlp_out.0", positions=[-1])]):
            pass
        with tracer.invoke(prompts[2], capture=None):
            lm.model.layers[0].output.save()
    zeroed, chosen, none = tracer.captures
    assert list(zeroed) == ["resid_post.0"] and zeroed["resid_post.0"].shape[0] == 4
    assert zeroed["resid_post.0"].abs().max() == 0
    assert list(chosen) == ["embed", "mlp_out.0"] and chosen.token_ids["embed"].tolist() == prompts[1]
    assert chosen.positions["mlp_out.0"].tolist() == [5]
    assert not none
    with pytest.raises(ValueError, match=r"3 requests: use tracer\.captures"):
        tracer.activations  # noqa: B018
    with pytest.raises(ValueError, match="capture: 3 is not one"):
        with lm.trace(prompts[0], capture=[3]):
            lm.model.layers[0].output.save()


def test_reading_where_nothing_was_captured_says_how_to_ask(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(4, 1)
    (out,) = lm.generate([prompt], SamplingParams(max_tokens=2))
    with lm.trace() as tracer:
        with tracer.invoke(prompt):
            lm.model.layers[0].output.save()
        with tracer.invoke(prompt, capture=["embed"]):
            pass
    for found in (out.activations, out.outputs[0].activations, tracer.captures[0]):
        assert not found and list(found) == [] and isinstance(found, Activations)
        with pytest.raises(KeyError, match=r"'resid_post\.0': nothing was captured; .* capture=\['resid_post\.3'\]"):
            found["resid_post.0"]


def test_a_pass_with_gradients_is_captured(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    with lm.trace(prompt, capture=["resid_post.1", "final_norm"]) as tracer:
        state = lm.model.layers[1].output
        state.retain_grad()
        lm.output.logits.sum().backward()
        grad = state.grad.save()
        seen = state.save()
    assert grad.shape == seen.shape and not tracer.activations["resid_post.1"].requires_grad
    assert torch.equal(tracer.activations["resid_post.1"], seen[0].detach().cpu()), (
        "a part of a graph stays on its device"
    )


def test_a_block_that_fails_keeps_nobody_from_their_captures(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    params = SamplingParams(temperature=0, max_tokens=5)
    wanted = lm.generate([prompt], params, capture=["resid_post.1"])[0].activations
    beside = lm.submit(prompt, params, capture=["resid_post.1"])
    with pytest.raises(ZeroDivisionError):
        with lm.generate(prompt, max_new_tokens=5, capture=["resid_post.1"]) as tracer:
            for _ in tracer.iter[2]:
                lm.model.layers[1].output[:] = 1 // 0
    assert_same(beside.result(WAIT).activations, wanted)


# -- no room -----------------------------------------------------------------------------------------

RECORD = 3 * INFO.hidden_size * 4  # bytes of a position of CAPTURE
CAPTURE = ["resid_post.*"]


def test_a_tight_ring_changes_no_result(ring_lm: Any, oracle: Any) -> None:
    """Prompts in pieces, rows that wait, requests that give way and come back: every state once, and the right one."""
    rng, model = random.Random(5), oracle("llama")
    lm = ring_lm(
        capture_ring_bytes=5 * RECORD + 64, kv_cache_tokens=40, page_size=4, max_num_tokens=16, async_scheduling=True
    )
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(10)]
    captures = [CAPTURE if i % 3 else [] for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=8)
    outs = lm.generate(prompts, params, capture=captures)
    assert lm.engine.stats()["preempted"]
    for prompt, capture, out in zip(prompts, captures, outs, strict=True):
        ids = (prompt + out.token_ids)[:-1]
        states = states_of(model, ids, [], len(prompt))
        for site, rows in out.activations.items():
            assert out.activations.token_ids[site].tolist() == ids
            torch.testing.assert_close(rows, states[site], rtol=1e-4, atol=1e-4)
        assert bool(out.activations) == bool(capture)
    ring_of(lm).wait()
    ring_of(lm).allocator.check_integrity()
    assert not ring_of(lm).allocator.in_use


def test_who_finds_no_room_waits_and_nobody_else_does(ring_lm: Any) -> None:
    lm = ring_lm(capture_ring_bytes=8 * RECORD)
    params = SamplingParams(temperature=0, max_tokens=12)
    wanted = lm.generate([prompt_of(5, 1)], params, capture=CAPTURE)[0]
    with drain_held(ring_of(lm)) as goes_on:
        capturing = lm.submit(prompt_of(5, 1), params, capture=CAPTURE)
        plain = lm.submit(prompt_of(5, 2), params)
        traced_tokens = None
        with lm.generate(prompt_of(5, 2), max_new_tokens=12) as tracer:
            traced_tokens = tracer.result.save()
        assert plain.result(WAIT).token_ids == traced_tokens[0, 5:].tolist()
        assert not capturing.done and lm.engine.stats()["running"] == 1
        deadline = time.monotonic() + WAIT
        while not lm.engine._waits_for_room:  # the engine sleeps, it does not look for room again and again
            assert time.monotonic() < deadline, "the engine goes on picking steps"
            time.sleep(0.005)
        # Nothing can run now; what comes meanwhile is served at once, and what is ended ends.
        assert lm.generate([prompt_of(5, 2)], params)[0].token_ids == plain.result().token_ids
        ended = lm.submit(prompt_of(5, 1), params, capture=CAPTURE)
        ended.cancel()
        assert not ended.done, "its result has all that was captured before, and that has not left yet"
        goes_on.set()
        out = capturing.result(WAIT)
        assert ended.result(WAIT).finish_reason == "abort"
    assert out.token_ids == wanted.token_ids
    assert_same(out.activations, wanted.activations)


def test_captures_that_find_no_room_are_lost_where_that_was_asked_for(ring_lm: Any) -> None:
    lm = ring_lm(capture_ring_bytes=8 * RECORD, capture_when_full="fail")
    params = SamplingParams(temperature=0, max_tokens=12)
    wanted = lm.generate([prompt_of(5, 1)], params)[0].token_ids
    with drain_held(ring_of(lm)) as goes_on:
        handle = lm.submit(prompt_of(5, 1), params, capture=CAPTURE)
        lm.generate([prompt_of(5, 1)], SamplingParams(temperature=0, max_tokens=60))  # it takes no longer than this one
        goes_on.set()
        out = handle.result(WAIT)
    assert out.token_ids == wanted
    with pytest.raises(CaptureError, match=r"capture_ring_bytes.*capture_when_full='block'"):
        out.activations["resid_post.0"]
    assert ["capture_ring_bytes" in warning for warning in out.warnings] == [True] and not out.receipt.captures
    small = lm.generate([prompt_of(5, 1)], SamplingParams(temperature=0, max_tokens=2), capture=CAPTURE)[0]
    assert small.activations["resid_post.0"].shape[0] == 6, "the next one finds room"


def test_the_receipt_counts_no_rows_that_were_lost_on_their_way(ring_lm: Any, monkeypatch: Any) -> None:
    lm = ring_lm()
    params = SamplingParams(temperature=0, max_tokens=2)
    lm.generate([prompt_of(5, 1)], params, capture=CAPTURE)
    with monkeypatch.context() as patch:
        patch.setattr(ring_of(lm).results, "empty", raises(MemoryError("no memory")))
        lost = lm.generate([prompt_of(5, 1)], params, capture=CAPTURE)[0]
    with pytest.raises(CaptureError, match="no memory"):
        lost.activations["resid_post.0"]
    assert not lost.receipt.captures and len(lost.token_ids) == 2


def test_what_can_never_fit_is_refused_with_the_setting(ring_lm: Any) -> None:
    lm = ring_lm(capture_ring_bytes=4 * RECORD)
    wide = ["resid_post.*", "attn_out.*", "embed", "mlp_out.*", "resid_mid.*"]  # 13 states
    message = rf"this request take {13 * INFO.hidden_size * 4} bytes.*has {4 * RECORD} \(capture_ring_bytes"
    with pytest.raises(ValueError, match=message):
        lm.submit([1, 2], capture=wide)
    with pytest.raises(ValueError, match="capture_ring_bytes"):
        with lm.trace(prompt_of(5, 1), capture=CAPTURE):  # a traced prompt is one step's
            lm.model.layers[0].output.save()
    with pytest.raises(ValueError, match=r"prompts of one trace.*capture_ring_bytes"):
        with lm.trace() as tracer:
            meet = tracer.barrier(2)
            for i in range(2):
                with tracer.invoke(prompt_of(3, i), capture=CAPTURE):
                    meet()
    (out,) = lm.generate([prompt_of(30, 1)], SamplingParams(max_tokens=2), capture=[*wide[:3], "mlp_out.0"])
    assert len(out.activations["resid_post.0"]) == 31, "a plain prompt comes in pieces"


def test_an_engine_that_is_shut_down_answers_with_what_was_captured(ring_lm: Any) -> None:
    lm = ring_lm()
    prompt, params = prompt_of(5, 1), SamplingParams(temperature=0, max_tokens=3)
    with drain_held(ring_of(lm)) as goes_on:
        handle = lm.submit(prompt, params, capture=CAPTURE)
        lm.generate([prompt], SamplingParams(temperature=0, max_tokens=30))
        assert not handle.done
        closing = threading.Thread(target=lm.shutdown)
        closing.start()
        goes_on.set()
        closing.join()
    assert handle.done and len(handle.result().activations["resid_post.0"]) == 7


# -- a request's captures -----------------------------------------------------------------------------


def captures_of(specs: list[Any], prompt_len: int, longest: int, dtype: torch.dtype = torch.float32) -> CapturedRows:
    return captured_rows(specs, INFO, prompt_len, longest, dtype)


def random_captures(rng: random.Random) -> list[Any]:
    kinds = rng.sample(
        ["embed", "resid_post.{0,1}", "attn_out.*", "mlp_out.2", "final_norm", "resid_mid.1"], rng.randrange(1, 5)
    )
    positions: list[Any] = ["all", "prompt", "generated", [0, -1], slice(1, None, 2), Generated(1, 5, 2), [0, 2, 3]]
    reduce: list[Any] = [None, None, "mean", "max", "last", *PROJECTIONS]
    dtypes = [None, None, torch.float16, torch.bfloat16, torch.float32]
    return [
        Capture(kind, positions=rng.choice(positions), dtype=rng.choice(dtypes), reduce=rng.choice(reduce))
        for kind in kinds
    ]


PROJECTIONS = [Project(vector(INFO.hidden_size, 1, 3), top_k=2), Project(vector(INFO.hidden_size, 2, 20))]


def what_leaves(spec: Capture, state: torch.Tensor) -> torch.Tensor:
    """The bytes of a state that a kernel stores."""
    if isinstance(spec.reduce, Project):
        if len(spec.reduce.directions) <= 16:
            state = spec.reduce.directions @ state.float()
    elif isinstance(spec.dtype, torch.dtype) and spec.dtype.itemsize < state.itemsize and spec.reduction.narrows:
        state = state.to(spec.dtype)
    return state.view(torch.uint8)


class UsedMemory(FreshMemory):
    """Memory in which somebody else's states lie."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).view(torch.uint8).fill_(77).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_records_and_functions_come_to_the_same(seed: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """Captures of random positions, in chunks of random sizes, some computed twice, the end somewhere before the last row."""
    rng = random.Random(seed)
    monkeypatch.setattr("pymllm_interp.hooks.captures.layout.MAX_RUNS", rng.choice([0, 3, 16]))
    prompt_len = rng.randrange(3, 20)
    longest = prompt_len + rng.randrange(1, 12)
    specs = random_captures(rng)
    by_function, by_record = (captures_of(specs, prompt_len, longest, dtype) for _ in range(2))
    states = {site: vector(INFO.hidden_size, site, longest).to(dtype) for site in by_record.layout.by_site}
    for site, rows in states.items():  # all at once: of what comes in pieces, the sums are the same
        by_function.put(0, site, rows)
    start = 0
    while start < longest:
        count = min(rng.choice([1, 1, 2, 5, 9]), longest - start)
        sizes = by_record.record_sizes(start, count)
        record = torch.full((int(sizes.sum()) + 8,), torch.nan, dtype=dtype)[8:]  # a slice of a ring
        stored = record.view(torch.uint8)
        for i, first in enumerate((np.cumsum(sizes) - sizes).tolist()):
            for site, offset in by_record.layout.offsets.items():
                if offset < sizes[i]:
                    part = what_leaves(by_record.layout.by_site[site][0].spec, states[site][start + i])
                    stored[(at := (first + offset) * dtype.itemsize) : at + len(part)] = part
        by_record.prepare(UsedMemory())
        if sizes.any() and by_record.packs(start):
            packed = torch.full((8 + by_record.reserved_size(start, count) - len(record),), torch.nan, dtype=dtype)[8:]
            by_record.layout.pack(record, packed, start, sizes)
            copy_records(by_record, packed, start, sizes, packed=True)
        else:
            copy_records(by_record, record, start, sizes)
        by_record.next_position = max(by_record.next_position, start + count)
        by_record.mark_copied(by_record.next_position)
        start = rng.randrange(start) if start and rng.random() < 0.15 else start + count
    tokens = list(range(100, 100 + longest - rng.randrange(2)))
    found, wanted = by_record.result(tokens), by_function.result(tokens)
    assert list(found) == list(wanted)
    for site, rows in wanted.items():
        number = site_index(Site.parse(site), INFO.num_hidden_layers)
        spec, whole = by_record.layout.by_site[number][0].spec, states[number][found.positions[site]]
        if isinstance(spec.reduce, Project):
            whole = whole.float() @ spec.reduce.directions.T
            whole = whole if spec.reduce.top_k is None else whole.topk(2).values
            torch.testing.assert_close(found[site], rows)
        else:
            if spec.reduce in ("mean", "max") and len(whole):
                whole = whole.double()
                whole = (whole.mean(0) if spec.reduce == "mean" else whole.amax(0))[None]
            if spec.reduce == "mean":  # of sums in float32, in another order
                torch.testing.assert_close(found[site], rows, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(found[site], rows), site
        torch.testing.assert_close(rows, whole.to(rows.dtype), msg=site)
        assert torch.equal(found.positions[site], wanted.positions[site])
        assert torch.equal(found.token_ids[site], found.positions[site] + 100)
        assert site not in wanted.indexes or torch.equal(found.indexes[site], wanted.indexes[site])


def test_records_that_are_kept_as_they_were_sent_are_copied_as_blocks() -> None:
    """Others are converted, or folded."""
    whole: list[list[Any]] = [
        [Capture("resid_post.*", positions=[1, 3, 4])],
        [Capture("resid_post.0", positions="prompt"), Capture("mlp_out.0")],
        [Capture("resid_post.0", reduce=Project(vector(INFO.hidden_size, 3, 2)))],
    ]
    for specs in whole:
        assert captures_of(specs, 5, 9, torch.bfloat16).layout.copied, specs
    for spec in (
        Capture("resid_post.0", dtype=torch.float32),
        Capture("resid_post.0", reduce="mean"),
        Capture("resid_post.0", reduce="max"),
        Capture("resid_post.0", reduce="last"),
    ):
        assert not captures_of([spec, "mlp_out.0"], 5, 9, torch.bfloat16).layout.copied, spec


@pytest.mark.parametrize("reduce", ["mean", "max", "last"])
def test_a_request_that_ends_before_what_is_kept_has_nothing_of_it(reduce: Any) -> None:
    """It was preempted, and finished before it had recomputed all. The extra row of an overlapped step is left out."""
    captures = captures_of([Capture("resid_post.0", reduce=reduce)], 8, 14)
    states, (site,) = vector(INFO.hidden_size, 1, 10), captures.layout.by_site
    captures.put(0, site, states)
    for count in (10, 9):
        own = states[:count]
        wanted = {"mean": own.mean(0), "max": own.amax(0), "last": own[-1]}[reduce]
        found = captures.result(range(count))
        torch.testing.assert_close(found["resid_post.0"], wanted[None])
        assert found.positions["resid_post.0"].tolist() == list(range(count))[-1 if reduce == "last" else 0 :]
    for count in (8, 5, 0):
        found = captures.result(range(count))
        assert found["resid_post.0"].shape == (0, INFO.hidden_size) and not len(found.positions["resid_post.0"])


def test_no_row_of_a_prompt_is_taken_back_from_its_sum() -> None:
    """It came with others of its chunk."""
    captures = captures_of([Capture("resid_post.0", reduce="mean")], 12, 14)
    states, (site,) = vector(INFO.hidden_size, 1, 10), captures.layout.by_site
    captures.put(0, site, states)
    torch.testing.assert_close(captures.result(range(10))["resid_post.0"], states.mean(0, keepdim=True))
    assert not len(captures.result(range(9))["resid_post.0"])


@pytest.mark.parametrize("reduce", [None, "mean", "last"])
def test_sums_and_last_rows_are_copied_in_the_order_of_the_positions(reduce: Any) -> None:
    ring = CaptureRing(1 << 16, torch.float32, DEVICE, "block")
    ring.open()
    request = capturing_request(1, ["embed", Capture("resid_post.0", positions="generated", reduce=reduce)], 41)
    captures = request.declared.captures
    for start, count in ((0, 31), (31, 10)):
        ring.lay_out([(ring_captures(request), start, count)])
        ring.memory.fill_(float(start))
        ring.send()
        ring.wait()
    ring.close()
    wanted = {None: [0.0] * 30 + [31.0] * 10, "mean": [7.75], "last": [31.0]}[reduce]
    assert captures.result(range(41))["resid_post.0"][:, 0].tolist() == wanted


def test_no_more_leaves_the_device_than_is_asked_for_and_no_more_is_kept() -> None:
    width, sites, prompt_len, longest = INFO.hidden_size, INFO.num_hidden_layers, 6, 9

    def sizes(model: torch.dtype = torch.float32, **how: Any) -> tuple[int, int, int]:
        """Bytes that leave of a prompt, in two chunks, and of a step behind it; and that are kept."""
        ring = CaptureRing(1 << 17, model, DEVICE, "block")
        ring.open()
        request = capturing_request(prompt_len, [Capture("resid_post.*", **how)], longest - prompt_len + 1, model)
        sent = [0]
        for start, count in ((0, 4), (4, 2), (6, 1)):
            ring.lay_out([(ring_captures(request), start, count)])
            ring.send()
            ring.wait()
            sent.append(ring.bytes_sent)
        ring.close()
        return sent[2], sent[3] - sent[2], request.declared.captures.layout.num_bytes

    def rounded(size: int, itemsize: int = 4) -> int:
        return -(-size // (8 * itemsize)) * 8 * itemsize

    whole = sites * width * 4
    assert sizes() == (6 * whole, whole, longest * whole)
    for dtype in (torch.float16, torch.bfloat16):
        half = rounded(whole // 2)
        assert sizes(dtype=dtype) == (6 * half, half, longest * whole // 2)
        assert sizes(dtype=dtype, reduce="last") == (half, half, whole)
        assert sizes(dtype=dtype, reduce="mean") == (2 * whole, whole, 4 * whole), "the mean of what the model has"
    assert sizes(reduce="last") == (whole, whole, 2 * whole)
    assert sizes(reduce="mean") == (2 * whole, whole, 4 * whole), "a sum for each chunk"
    assert sizes(torch.bfloat16, reduce="mean") == (2 * whole, whole // 2, 4 * whole), "sums in float32"
    assert sizes(reduce="last", positions="prompt") == (whole, 0, 2 * whole)
    assert sizes(reduce="mean", positions="generated") == (0, whole, 4 * whole)
    for count in (1, 3, 16):
        reduce, size = Project(vector(width, 1, count)), sites * count * 4
        assert sizes(reduce=reduce) == (6 * rounded(size), rounded(size), longest * size)
        assert sizes(torch.bfloat16, reduce=reduce) == (6 * rounded(size, 2), rounded(size, 2), longest * size)
    many = Project(vector(width, 1, 17))
    assert sizes(reduce=many) == (6 * whole, whole, longest * whole), "too many for a kernel"
    wider = sizes(torch.bfloat16, dtype=torch.float32)
    assert wider == (3 * whole, whole // 2, longest * whole), "made wider on the host"

    ring = CaptureRing(1 << 16, torch.float32, DEVICE, "block")
    ring.open()
    request = capturing_request(6, [Capture("mlp_out.*", reduce=Project(vector(width, 1, 5))), "embed"])
    with drain_held(ring):
        ring.lay_out([(ring_captures(request), 0, 6)])
        ring.send()
        ((start, stop),) = ring.allocator._spans
        assert stop - start == 6 * (width + rounded(sites * 5 * 4) // 4)
    ring.close()


@pytest.mark.parametrize("max_runs", [0, 16])
def test_sums_leave_beside_whole_states_and_each_request_has_its_own(max_runs: int, monkeypatch: Any) -> None:
    """Of a step with requests that are packed and others; what is packed takes room for its records as well, which stay."""
    monkeypatch.setattr("pymllm_interp.hooks.captures.layout.MAX_RUNS", max_runs)
    ring, width = CaptureRing(1 << 17, torch.float32, DEVICE, "block"), INFO.hidden_size
    ring.open()
    mean = Capture("embed", reduce="mean", positions=slice(1, None, 2))
    requests = [
        capturing_request(6, specs)
        for specs in (["embed"], [mean], [mean, Capture("mlp_out.*", positions=[0, 2, 5])], ["embed"], [mean])
    ]
    parts = [(ring_captures(request), 0, 6) for request in requests]
    ring.admission.begin()
    assert ring.admission.take([(request, 6) for request in requests]) == 6
    taken = ring.allocator.size - ring.admission._free
    records = ring.lay_out(parts)
    ring.memory.fill_(torch.nan)
    for row, (start, stop) in enumerate(records.T.tolist()):
        offsets = requests[row // 6].declared.captures.layout.offsets if start < stop else {}
        for site, offset in offsets.items():
            if start + offset < stop:
                ring.memory[start + offset : start + offset + width] = 100 * site + row
    assert ring._host is not None
    ring._host.fill_(-1)
    ring.send()
    ring.wait()
    third = 5 * 4 if max_runs == 0 else 3 * 4 + 2  # states of its records, which have one size, or end where they can
    stay = (3 + third + 3) * width
    leave = (6 + 1 + (1 + 3 * 3) + 6 + 1) * width
    assert taken == stay + leave and ring.bytes_sent == 4 * leave
    assert (ring._host[leave:] == -1).all(), "what is summed up stays on the device"
    assert not ring.allocator.in_use
    embed = site_index(Site.parse("embed"), INFO.num_hidden_layers)
    for number, request in enumerate(requests):
        found, first = request.declared.captures.result([1] * 6), 100 * embed + 6 * number
        wanted = [[first + i] for i in range(6)] if number in (0, 3) else [[first + 3]]
        assert found["embed"][:, :1].tolist() == wanted and (found["embed"] == found["embed"][:, :1]).all()
        assert found.positions["embed"].tolist() == ([*range(6)] if number in (0, 3) else [1, 3, 5])
    site = site_index(Site.parse("mlp_out.1"), INFO.num_hidden_layers)
    found = requests[2].declared.captures.result([1] * 6)["mlp_out.1"]
    assert found[:, -1].tolist() == [100 * site + row for row in (12, 14, 17)]
    ring.close()


def test_a_record_ends_behind_the_last_state_that_its_position_wants() -> None:
    captures = captures_of([Capture("resid_post.*", positions=[-1]), "embed"], 6, 9)
    width = INFO.hidden_size
    assert captures.record_sizes(0, 9).tolist() == [width] * 5 + [4 * width] + [width] * 3
    captures.next_position = 4
    assert captures.record_sizes(2, 4).tolist() == [0, 0, width, 4 * width]
    captures = captures_of([Capture("resid_post.*", positions="prompt", reduce="mean"), "embed"], 6, 9)
    assert captures.packs(5) and captures.reserved_size(4, 2) == 2 * 4 * width + 3 * width + 2 * width
    assert captures.record_sizes(6, 3).tolist() == [width] * 3, "what is packed comes last, where it is not wanted"
    captures.next_position = 6
    assert not captures.packs(0) and captures.reserved_size(0, 7) == width, (
        "of a prompt that is computed again nothing is summed up"
    )


# -- the ring ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_spans_of_the_ring_never_overlap_and_the_largest_only_grows_until_one_is_allocated(seed: int) -> None:
    rng, allocator = random.Random(seed), RingAllocator(97)
    held: list[tuple[int, int]] = []
    for _ in range(3000):
        room = allocator.largest_free
        if held and rng.random() < 0.5:
            allocator.free_oldest()
            held.pop(0)
            assert allocator.largest_free >= room
        elif room:
            count = rng.randrange(1, room + 1) if rng.random() < 0.3 else rng.randrange(1, min(room, 12) + 1)
            start = allocator.find(count)
            assert all(stop <= start or start + count <= first for first, stop in held), "somebody else's"
            allocator.allocate(start, count)
            held.append((start, start + count))
            assert allocator.in_use
        allocator.check_integrity()
        with pytest.raises(ValueError, match="no room"):
            allocator.find(allocator.largest_free + 1)
    while held:
        allocator.free_oldest()
        held.pop()
    assert allocator.largest_free == 97 and not allocator.in_use


def raises(error: Exception) -> Any:
    def function(*args: Any) -> None:
        raise error

    return function


def capturing_request(
    prompt_len: int, specs: list[Any], max_tokens: int = 2, dtype: torch.dtype = torch.float32
) -> Request:
    request = Request("r", [1] * prompt_len, SamplingParams(max_tokens=max_tokens), max_tokens, seed=0)
    captures = captures_of(specs, prompt_len, prompt_len + max_tokens - 1, dtype)
    request.declared = SimpleNamespace(captures=captures)
    return request


def test_prompts_take_a_quarter_of_the_ring_in_one_step() -> None:
    """So that the rest is emptied meanwhile; a traced one, which is not cut, takes what it needs, or waits."""
    admission = CaptureRing(16 * RECORD, torch.float32, "cpu", "block").admission
    prompt, other = capturing_request(30, CAPTURE), capturing_request(3, CAPTURE)
    last = capturing_request(30, [Capture("resid_post.*", positions=[-1])])
    admission.begin()
    assert admission.take([(other, 3)], whole=False) == 3 and admission.take([(prompt, 30)], whole=False) == 1
    assert admission.take([(prompt, 29)], whole=False) == 0 and admission.take([(last, 30)], whole=False) == 29
    assert admission.take([(other, 1)]) == 1 and not admission.refused, "there is room for others"
    admission.begin()
    assert admission.take([(prompt, 2)], whole=False) == 2 and admission.take([(prompt, 28)], whole=False) == 2
    admission.begin()
    assert (
        admission.take([(prompt, 15)]) == 15
        and admission.take([(other, 3)], whole=False) == 1
        and not admission.refused
    )
    assert admission.take([(other, 3)], whole=False) == 0 and admission.refused
    assert admission.take([(other, 1)]) == 0, "first come, first served"
    wide = CaptureRing(RECORD + 4, torch.float32, "cpu", "block").admission
    wide.begin()
    assert wide.take([(prompt, 30)], whole=False) == 1, "one position at least, where the ring is free"


def test_a_prompt_that_comes_after_the_step_s_share_loses_nothing() -> None:
    """With capture_when_full="fail", too: there is room, and it is next."""
    admission = CaptureRing(8 * RECORD, torch.float32, "cpu", "fail").admission
    first, second = capturing_request(30, CAPTURE), capturing_request(3, CAPTURE)
    admission.begin()
    assert admission.take([(first, 30)], whole=False) == 2 and admission.take([(second, 3)], whole=False) == 0
    admission.begin()
    assert admission.take([(second, 3)], whole=False) == 2
    assert first.declared.captures.error is None and second.declared.captures.error is None


def test_results_have_the_memory_of_those_that_are_gone_and_of_no_other() -> None:
    """Whatever is held and dropped, in whatever order, no two that are held overlap, and no more than was asked for is kept."""
    memory, rng = ResultMemory(40 << 20), random.Random(1)
    held: list[tuple[torch.Tensor, int]] = []
    addresses = set()
    for number in range(300):
        rows = memory.empty((rng.choice([3, 1024, 1030, 5000]), 1024), rng.choice([torch.bfloat16, torch.float32]))
        addresses.add(rows.data_ptr())
        held.append((rows[1:].fill_(number % 100), number % 100))  # a view holds the memory as well
        while held and rng.random() < len(held) / 8:
            held.pop(rng.randrange(len(held)))
        del rows
        assert 0 <= memory.kept <= 40 << 20
        if number % 8 == 7:
            assert all(bool((kept == value).all()) for kept, value in held), number
    assert len(addresses) < 150, "it is used again"
    large = memory.empty((1 << 20, 16), torch.float32)
    assert large.untyped_storage().nbytes() == large.nbytes, "a result owns its own rows"
    del large
    assert memory.kept <= 40 << 20
    held.clear()
    memory.close()
    assert memory.kept == 0
    rows = memory.empty((1024, 1024), torch.float32)
    del rows
    assert memory.kept == 0, "and nothing is kept after the end"


@pytest.mark.parametrize("positions", [9, 1300, 12_000])
def test_nothing_of_others_lies_behind_the_rows_of_a_request_that_ended_early(positions: int) -> None:
    """Filled, gone, taken again: what `torch.save` would write of a result has its own rows, and zeros. Of less than a page, of
    less than a huge page, and of several."""
    memory, addresses, width = ResultMemory(1 << 30), set(), INFO.num_hidden_layers * INFO.hidden_size
    for ended in (positions, 1, positions // 2, positions - 1, 0, positions):
        captures = captures_of(["resid_post.*"], 1, positions)
        captures.prepare(memory)
        records = torch.full((ended * width,), 1 + ended, dtype=torch.int32).view(torch.float32)
        copy_records(captures, records, 0, captures.record_sizes(0, ended))
        captures.mark_copied(ended)
        found = captures.result(range(ended)).as_arrived("resid_post.0")
        assert found.shape == (ended, INFO.hidden_size) and (found.view(torch.int32) == 1 + ended).all()
        stored = torch.empty(0).set_(found.untyped_storage())
        assert stored.shape == (positions * width,), "all that was taken"
        assert (stored[ended * width :] == 0).all(), ended
        addresses.add(stored.data_ptr())
        stored.fill_(77.0)
        del found, stored, captures
    assert len(addresses) == 1 or positions * width * 4 < SMALL, "of what is large the memory is used again"


def test_a_piece_that_cannot_be_sent_leaves_the_ring_as_it_was(monkeypatch: Any) -> None:
    """Packing takes memory of the device, and may find none."""
    ring = CaptureRing(40 * RECORD, torch.float32, DEVICE, "block")
    ring.open()
    request = capturing_request(6, [Capture("resid_post.*", reduce="mean")])
    for fails in (True, False):
        ring.lay_out([(ring_captures(request), 0, 5)])
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
            if fails:
                patch.setattr(Group, "pack", raises(torch.OutOfMemoryError("of the device")))
            ring.send()
        assert request.declared.captures.next_position == (0 if fails else 5), "what did not leave is captured again"
        ring.wait()
        assert not ring.allocator.in_use
    ring.close()


def test_captures_that_are_lost_while_their_step_is_laid_out_take_nobody_s_place(monkeypatch: Any) -> None:
    """The ring's thread finds no memory for a mean whose next records are being placed."""
    ring = CaptureRing(40 * RECORD, torch.float32, DEVICE, "block")
    ring.open()
    before, lost, behind = requests = [
        capturing_request(5, [Capture("resid_post.*", reduce=reduce)]) for reduce in (None, "mean", None)
    ]
    captures, packs, calls = lost.declared.captures, lost.declared.captures.packs, []

    def in_between(first: int) -> bool:
        calls.append(first)
        if len(calls) == 2:  # its sizes have been read
            captures.error = CaptureError("lost")
        return packs(first)

    monkeypatch.setattr(captures, "packs", in_between)
    records = ring.lay_out([(ring_captures(request), 0, 4) for request in requests])
    assert len(calls) >= 2 and (records >= 0).all() and (records <= len(ring.memory)).all()
    for number, request_records in enumerate(np.split(records, 3, axis=1)):
        for start, stop in request_records.T.tolist():
            ring.memory[start:stop] = number
    ring.send()
    ring.wait()
    ring.allocator.check_integrity()
    for number, request in ((0, before), (2, behind)):
        found = request.declared.captures.result([1] * 4)
        assert all(rows.shape[0] == 4 and (rows == number).all() for rows in found.values())
    ring.close()


@pytest.mark.parametrize("reduce", [None, "mean", "last", "few", "many", "top"])
def test_captured_rows_are_tensors_as_any_other(reduce: Any) -> None:
    """They may be edited in place with what needs a gradient; dot products lie behind each other."""
    projects = {
        "few": Project(vector(INFO.hidden_size, 1, 3)),
        "many": Project(vector(INFO.hidden_size, 2, 20)),
        "top": Project(vector(INFO.hidden_size, 3, 20), top_k=2),
    }
    captures = captures_of([Capture("resid_post.*", reduce=projects.get(reduce, reduce))], 5, 9)
    captures.prepare(FRESH)
    sizes = captures.record_sizes(0, 5)
    copy_records(captures, torch.zeros(int(sizes.sum())), 0, sizes)
    captures.mark_copied(5)
    found = captures.result(range(5))
    factor = torch.ones((), requires_grad=True)
    for site, rows in found.items():
        assert rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.nbytes
        rows[0] = (rows[0] + 1) * factor
        rows.sum().backward()
        assert factor.grad is not None and factor.grad > 0, site
        factor.grad = None


@pytest.mark.parametrize("where", ["prepare", "copy_rows", "keep"])
def test_what_one_request_has_no_memory_for_costs_nobody_else_theirs(where: str, monkeypatch: Any) -> None:
    ring = CaptureRing(400 * RECORD, torch.float32, DEVICE, "block")
    ring.open()
    taken_apart = [Capture("resid_post.*", reduce="last")] if where == "keep" else CAPTURE
    before, unlucky, behind = requests = [capturing_request(21, specs) for specs in (CAPTURE, taken_apart, CAPTURE)]
    monkeypatch.setattr(unlucky.declared.captures.groups[0], where, raises(MemoryError("no memory")))
    for start, count in ((0, 20), (20, 1)):
        parts = [(ring_captures(request), start, count) for request in requests]
        rows = ring.lay_out(parts)[0].tolist()
        assert rows[-1] > rows[0]
        ring.memory.copy_(torch.arange(len(ring.memory)) % 997)
        ring.send()
        ring.wait()
    for request in (before, behind):
        found = request.declared.captures.result([1] * 21)
        assert found["resid_post.0"].shape == (21, INFO.hidden_size) and found["resid_post.0"].max() > 0
    with pytest.raises(CaptureError, match="no memory"):
        unlucky.declared.captures.result([1] * 21)["resid_post.0"]
    assert not ring.allocator.in_use
    ring.close()


REDUCED: tuple[Any, ...] = (None, "mean", "max", "last")


class Capturing(Simulation):
    """The scheduler's simulation with a ring beside the pools: many requests capture, and the model writes `state_of`.

    The ring's thread stands still between `release`s, so that nothing hangs on its pace.
    """

    def __init__(self, ring_rows: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ring = CaptureRing(ring_rows * 3 * INFO.hidden_size * 4, torch.float32, "cpu", "block")
        self.scheduler.ring_admission = self.ring.admission
        self.capturing: list[Request] = []
        self.captures: dict[str, CapturedRows] = {}  # the worker's, by request
        self.refused = 0
        self.compared: Counter[str | None] = Counter()
        self.goes_on = threading.Event()
        self.ring.open()
        self.hold()

    def make(
        self, prompt_len: int, max_tokens: int, *, n: int = 1, traced: bool = False, **kwargs: Any
    ) -> list[Request]:
        requests = super().make(prompt_len, max_tokens, n=n, traced=traced, **kwargs)
        for request in requests:
            if self.random.random() < 0.8:
                positions = self.random.choice(["all", "all", "prompt", "generated", [-1]])
                specs = [
                    Capture("resid_post.0", positions=positions),
                    Capture("resid_post.{1,2}", positions=positions, reduce=self.random.choice(REDUCED)),
                ]
                captures = captures_of(specs, prompt_len, prompt_len + max_tokens - 1)
                request.declared = Declared(BoundHooks({}, captures.layout, prompt_len)).demands()
                self.captures[request.request_id] = captures
                self.ring.admission.check([(captures, [(0, prompt_len)] if traced else [])], "a request")
                self.capturing.append(request)
        return requests

    def hold(self) -> None:
        goes_on = self.goes_on = threading.Event()
        self.ring.after(lambda: goes_on.wait() and None)

    def release(self) -> None:
        """Let all that was sent be copied out."""
        self.goes_on.set()
        self.ring.wait()
        assert not self.ring.allocator.in_use
        self.hold()

    def state_of(self, request: Request, position: int, site: int) -> torch.Tensor:
        return torch.full(
            (INFO.hidden_size,), float(int(request.request_id.split("-")[0]) * 1000 + position * 10 + site % 10)
        )

    def check_step(self, step: Any) -> None:
        super().check_step(step)
        if not step.scheduled:
            return
        parts = [(self.captures.get(e.request_id), e.start, e.num_tokens) for e in step.scheduled]
        records, row = self.ring.lay_out(parts), 0
        for rid, _, count, first, *_ in step.scheduled:
            request = self.by_id[rid]
            for position in range(first, first + count):
                start, stop = records[:, row].tolist()
                offsets = self.captures[rid].layout.offsets if start < stop else {}
                for site, offset in offsets.items():
                    if start + offset < stop:
                        at = start + offset
                        self.ring.memory[at : at + INFO.hidden_size] = self.state_of(request, position, site)
                row += 1
        self.ring.send()
        self.ring.allocator.check_integrity()

    def step(self) -> Any:
        step = super().step()
        self.refused += self.ring.admission.refused
        if not step.scheduled or self.random.random() < 0.05:
            self.release()
        return step

    def check_sat_out(self, decoding: list[Request], step: Any) -> None:
        """Who captures may wait for room; nobody else does for theirs."""
        others = [r for r in decoding if all(member.declared is None for member in r.gang or [r])]
        super().check_sat_out(others, step)

    def finish(self) -> None:
        """Every request has the states of its own positions, each once."""
        self.goes_on.set()
        self.ring.wait()
        for request in self.capturing:
            ids = request.all_token_ids[: request.computed_once]
            captures = self.captures[request.request_id]
            found = captures.result(ids)
            for name in found:
                site = 4 * int(name.split(".")[1]) + 5
                group, _ = captures.layout.by_site[site]
                reduce, wanted = group.spec.reduce, np.flatnonzero(group.captured[: len(ids)])
                rows = [self.state_of(request, int(position), site) for position in wanted]
                if not len(found[name]):
                    assert not rows or (reduce is not None and not request.output_token_ids)
                    continue
                if reduce == "mean":
                    rows = [torch.stack(rows).mean(0)]
                elif reduce == "max":
                    rows = [torch.stack(rows).amax(0)]
                elif reduce == "last":
                    wanted, rows = wanted[-1:], rows[-1:]
                assert found.positions[name].tolist() == wanted.tolist(), (request.request_id, name)
                assert found.token_ids[name].tolist() == [ids[position] for position in wanted]
                torch.testing.assert_close(found[name], torch.stack(rows), msg=f"{request.request_id} {name}")
                self.compared[reduce] += 1
        self.ring.close()


@pytest.mark.thin(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8)), 68, 78, 94, 105]
)
def test_random_traffic_through_a_small_ring(policy: str, seed: int) -> None:
    """Prompts, completions, traces and gangs, in pools and a ring that are too small for them, with steps launched ahead."""
    rng = random.Random(seed)
    sim = Capturing(
        ring_rows=14 + seed % 5, num_pages=12, page_size=4, max_num_tokens=14, max_running=6, policy=policy, seed=seed,
        ahead=bool(seed % 2),
    )  # fmt: skip
    for _ in range(8):
        for _ in range(rng.randrange(1, 5)):
            kind = rng.randrange(4)
            if kind == 0:
                sim.add(rng.randrange(1, 12), rng.randrange(1, 10), traced=True)
            elif kind == 1:
                sim.add_gang([(rng.randrange(1, 5), rng.randrange(1, 6)) for _ in range(2)])
            else:
                sim.add(rng.randrange(1, 30), rng.randrange(1, 12), n=rng.choice([1, 1, 2]))
        for _ in range(rng.randrange(6)):
            sim.step()
        if sim.scheduler.live and rng.random() < 0.3:
            victim = rng.choice(sim.scheduler.live)
            if victim.gang is None:
                sim.abort(victim)
    sim.run(3 * sim.limit())
    sim.finish()
    assert sim.compared.keys() == set(REDUCED)
    assert sim.refused, "a ring in which everybody finds room shows little"


def test_thousands_of_requests_leave_the_ring_as_it_was() -> None:
    ring = CaptureRing(40 * RECORD, torch.float32, DEVICE, "block")
    ring.open()
    memory = ring.memory.data_ptr()
    live: list[Request] = []
    for number in range(2_000):
        live.append(capturing_request(3, [Capture("resid_post.*", positions=[number % 3])]))
        if len(live) == 8:
            ring.admission.begin()
            if not all(ring.admission.take([(request, 3)]) for request in live):
                ring.wait()
            ring.lay_out([(ring_captures(request), 0, 3) for request in live])
            ring.send()
            live.clear()
    ring.wait()
    ring.allocator.check_integrity()
    assert not ring.allocator.in_use and ring.allocator.largest_free == ring.allocator.size == 40 * RECORD // 4
    assert ring.memory.data_ptr() == memory and ring.idle
    ring.close()
