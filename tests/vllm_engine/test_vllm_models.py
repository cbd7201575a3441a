"""Families, runners and ranks of vLLM against our own engine: batches in which each request declares something else.

Each engine also has something that moves rows: prompts in chunks, a small KV pool that preempts, ranks, a compiler, the V2 runner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import write_adapter
from helpers_vllm import (
    LAYERS,
    LORA,
    NGRAM,
    V2_DRAFTS,
    WIDTH,
    assert_close,
    assert_close_tensor,
    assert_ends_with_a_rank,
    assert_same_scores,
    both_engines,
    is_since,
    needs_runner,
    needs_vllm,
    own_lm,
    prompt,
    ranks_of,
    save_model,
    shared_files,
    vector,
    vllm_lm,
)
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.captures import Lens, Project
from pymllm_interp.interventions import Generated, Monitor, Probe
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.vllm_engine.settings import TAPS, WITH_TABLES

pytestmark = needs_vllm
EMBEDS = "enable_prompt_embeds"
QKVZ = ("q", "k", "v", "z")
DENSE = {"inner_sites": (*QKVZ, "mlp_act")}
# Before, vLLM's V2 runner takes no embeddings.
V2_EMBEDS = {EMBEDS: True} if is_since("0.32") else {}
# Before, vLLM's kernel for CPUs chooses experts by itself.
SPARSE = {"inner_sites": (*QKVZ, "router", *(["experts"] if is_since("0.30") else []))}


@dataclass(frozen=True)
class Case:
    """An engine of vLLM.

    Attributes:
        steps: what its receipts call a step.
        preempts: its pool is too small for all requests at once.
    """

    family: str
    steps: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    preempts: bool = False


CASES = {
    "qwen3, chunks of 48, a small pool": Case(
        "qwen3", "vllm V1 none",
        {"max_num_tokens": 48, "kv_cache_tokens": 384, "enable_prefix_caching": False, "enable_lora": True}, preempts=True,
    ),
    "mixtral, two ranks, chunks of 20": Case(
        "mixtral", "vllm V1 none", {"max_num_tokens": 20, "tensor_parallel_size": 2, EMBEDS: True, **SPARSE},
    ),
    "gemma2, compiled": Case(
        "gemma2", "vllm V1 none", {"disable_cuda_graph": False, "max_num_tokens": 64, EMBEDS: True, **DENSE}
    ),
    "llama, device tables, in the norms": Case(
        "llama", "vllm V1 none", {"max_num_tokens": 24, "kv_cache_tokens": 384, **LORA, **DENSE},
        {WITH_TABLES: "1", "TRITON_INTERPRET": "1", TAPS: "norm"}, preempts=True,
    ),
    "llama, drafts": Case("llama", "vllm V1 none", {"max_num_tokens": 48, "kv_cache_tokens": 384, **NGRAM, **DENSE}, preempts=True),
    "lfm2, chunks of 40, a small pool": Case(
        "lfm2", "vllm V1 none",
        {"max_num_tokens": 40, "kv_cache_tokens": 512, "enable_lora": True, EMBEDS: True}, preempts=True,
    ),
    "lfm2, V2 runner": Case("lfm2", "vllm V2 none", {"max_num_tokens": 40, **V2_EMBEDS}, {"TRITON_INTERPRET": "1"}),
    "llama, V2 runner": Case(
        "llama", "vllm V2 none", {"max_num_tokens": 32, "inner_sites": ("z", "mlp_act"), **V2_EMBEDS}, {"TRITON_INTERPRET": "1"}
    ),
    "llama, V2 runner, drafts": Case(
        "llama", "vllm V2 none", {"max_num_tokens": 48, "kv_cache_tokens": 384, **NGRAM, **DENSE}, {"TRITON_INTERPRET": "1"},
        preempts=True,
    ),
}  # fmt: skip


MARKS = {"lfm2, V2 runner": pytest.mark.slow, "llama, V2 runner, drafts": V2_DRAFTS}


@pytest.fixture(scope="module", params=[pytest.param(one, marks=MARKS.get(one, ())) for one in CASES])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Case, LM, LM]]:
    """A case, its LM, and our own engine over the same weights."""
    case = CASES[request.param]
    needs_runner("V2" in case.steps)
    with both_engines(case.family, tmp_path_factory, case.environment, **case.options) as (lm, oracle):
        yield case, lm, oracle


PROMPTS = [prompt(30, 1), prompt(45, 2), prompt(17, 3), prompt(52, 4), prompt(6, 5), prompt(33, 6)]
OPS: list[Any] = [
    [Steer("resid_post.1", vector(1), 2.0), Steer("mlp_out.2", vector(2), positions=slice(3, None, 2))],
    None,
    [Ablate("resid_mid.1", vector(3, 2, WIDTH)), Scale("attn_out.0", 0.5, positions="generated")],
    [
        Patch("resid_pre.1", vector(4, 3, WIDTH), positions=[0, 2, -1]),
        Clamp(f"resid_post.{LAYERS - 1}", vector(5), high=0.5),
    ],
    [Steer("embed", vector(6), 0.3), Steer("final_norm", vector(7), positions=Generated(1, 6, 2))],
    [Steer("resid_post.2", vector(8), when=Gate(vector(9), 0.0, site="resid_post.0"))],
]
KINDS = ("attn_out", "resid_mid", "mlp_out", "resid_post")
CAPTURED: list[Any] = [
    [f"{kind}.*" for kind in KINDS],
    None,
    [Capture("resid_post.*", reduce="mean"), Capture("resid_mid.1", positions=[0, -1])],
    ["attn_out.3", Capture("resid_post.*", reduce=Project(vector(11, 3, WIDTH)))],
    ["embed", "final_norm", "logits"],
    [Capture("mlp_out.*", reduce="last")],
]


def test_a_batch_of_different_requests_is_our_engines(engines: tuple[Case, LM, LM]) -> None:
    case, lm, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=40 if case.preempts else 8, ignore_eos=True, logprobs=1)
    found, wanted = (model.generate(PROMPTS, params, interventions=OPS, capture=CAPTURED) for model in (lm, oracle))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
    receipts = [out.receipt for out in found if out.receipt is not None]
    assert {mode for receipt in receipts for mode in receipt.steps} == {case.steps}
    assert any(receipt.preemptions for receipt in receipts) == case.preempts


def test_what_is_cached_is_never_anothers(engines: tuple[Case, LM, LM]) -> None:
    """The same prompts again, with and without what was declared before: hits of the prefix cache change nothing."""
    case, lm, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    hits = 0
    for ops in (None, OPS, None, OPS):
        found, wanted = (model.generate(PROMPTS, params, interventions=ops) for model in (lm, oracle))
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
        hits += sum(out.num_cached_tokens for out in found)
    assert (hits > 0) == case.options.get("enable_prefix_caching", True)


def test_rows_without_numbers_reach_no_other_request(engines: tuple[Case, LM, LM]) -> None:
    """NaN of some requests, beside others and in the blocks of KV that these get after them."""
    case, lm, oracle = engines
    if not case.preempts:
        pytest.skip("the blocks of a larger pool do not come again here")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    prompts = [prompt(length, 90 + length) for length in (1, 5, 31, 33, 60)]
    wanted = oracle.generate(prompts, params)
    ops: Any = [[Scale("resid_post.*", 1e20)], None, [Scale("resid_post.*", 1e20)], None]
    batch = [prompt(100, 1), prompts[0], prompt(70, 2), prompts[3]]
    for _ in range(3):  # all blocks of the pool
        lm.reset_prefix_cache()
        found = lm.generate(batch, params, interventions=ops, capture=[["resid_post.3"], None, None, None])
        assert found[0].activations["resid_post.3"].isnan().any()
        assert_close(found[1], wanted[0])
        assert_close(found[3], wanted[3])
        for one, other in zip(lm.generate(prompts, params), wanted, strict=True):
            assert_close(one, other)


def inner_ops(kinds: Sequence[str], width: int, last: int) -> list[list[Any]]:
    """For each prompt ops at some of these inner sites: whole rows, single heads, directions, positions and gates.

    Args:
        width: width of k and v.
        last: number of their last head.
    """
    ops: dict[str, list[Any]] = {
        "q": [Steer("q.0", vector(20, 128), 0.5), Scale("q.1", 0.5, heads=[3])],
        "k": [Ablate("k.2", vector(21, width)), Steer("k.0", vector(22, 32), heads=[last], positions=slice(1, None, 2))],
        "v": [Clamp("v.1", vector(23, width), high=0.2)],
        "z": [Scale("z.*", 0.0, heads=[0, 2]), Steer("z.1", vector(24, 128), when=Gate(vector(25), 0.0, site="resid_pre.1"))],
        "mlp_act": [Patch("mlp_act.1", vector(26, 2, 128), positions=[1, -1]), Scale("mlp_act.3", 1.5, positions="generated")],
        "router": [Steer("router.2", vector(27, 4), 2.0)],
    }  # fmt: skip
    found = [ops[kind] for kind in kinds if kind in ops]
    return [found[i % len(found)] for i in range(len(PROMPTS) - 1)] + [[op for some in found for op in some]]


def test_inner_sites_are_our_engines(engines: tuple[Case, LM, LM]) -> None:
    """Heads, neurons and experts, each rank with its own: edited, captured and monitored, also beside requests without any."""
    case, lm, oracle = engines
    kinds = case.options.get("inner_sites", ())
    assert lm.backend.facts.inner_sites == set(kinds)
    if not kinds:
        kind = next(one for one in ("z", "mlp_act") if one in oracle.backend.facts.spec.family.points)
        with pytest.raises(ValueError, match=rf"without taps at '{kind}': LM\(.*inner_sites=\('{kind}',\)\)"):
            lm.generate(PROMPTS[:1], SamplingParams(max_tokens=1), capture=[f"{kind}.0"])
        return
    spec = oracle.backend.facts.spec
    all_ops = inner_ops(kinds, spec.width("k"), spec.num_key_value_heads - 1)
    ops: list[Any] = [*all_ops[:-1], None]
    everything = [f"{kind}.*" for kind in kinds]
    captures: list[Any] = [
        everything, None, [Capture(f"{kinds[0]}.*", reduce="mean"), f"{kinds[1]}.1"],
        [Capture("z.{0,2..3}", positions=[0, -1]), Capture("z.1", heads=[1])],
        [Capture("z.2", reduce=Project(vector(28, 2, 128)))], everything,
    ]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    for own_ops in (ops, all_ops[::-1]):
        found, wanted = (
            model.generate(PROMPTS, params, interventions=own_ops, capture=captures) for model in (lm, oracle)
        )
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    monitors = [Monitor("z.1", vector(29, 128), 0.0)]
    one, other = (model.generate(PROMPTS[:1], params, monitors=monitors)[0] for model in (lm, oracle))
    (scores,), (own,) = one.monitors.values(), other.monitors.values()
    torch.testing.assert_close(scores.scores, own.scores, rtol=1e-3, atol=1e-3)
    missing = next(kind for kind in ("q", "mlp_act", "router") if kind not in kinds)
    with pytest.raises(ValueError, match=missing):
        lm.generate(PROMPTS[:1], params, capture=[f"{missing}.0"])


def test_the_lens_reads_the_models_head_where_one_rank_has_it(engines: tuple[Case, LM, LM]) -> None:
    case, lm, oracle = engines
    capture, params = (
        [Capture("resid_post.*", reduce=Lens(top_k=2, tokens=[3]))],
        SamplingParams(temperature=0, max_tokens=2),
    )
    if case.options.get("tensor_parallel_size", 1) > 1:
        with pytest.raises(ValueError, match="tensor_parallel_size=2 splits"):
            lm.generate(PROMPTS[:1], params, capture=capture)
        return
    found, wanted = (model.generate(PROMPTS[:1], params, capture=capture)[0] for model in (lm, oracle))
    assert_close(found, wanted)


def test_rows_of_drafts_are_neither_counted_nor_delivered(engines: tuple[Case, LM, LM]) -> None:
    """Some drafts are accepted, which takes fewer steps, and some are not."""
    case, lm, oracle = engines
    if "speculative_config" not in case.options:
        pytest.skip("there are no drafts")
    assert lm.backend.facts.speculates
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    found, wanted = (
        model.generate(PROMPTS, params, interventions=OPS, capture=["resid_post.1", "logits"]) for model in (lm, oracle)
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
    steps = [sum(one.receipt.steps.values()) for one in found]
    assert min(steps) < 40 + len(PROMPTS), "no draft was accepted"
    stopped = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[wanted[0].token_ids[9]], logprobs=1)
    one, other = (model.generate(PROMPTS[:1], stopped, capture=["resid_post.*"])[0] for model in (lm, oracle))
    assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=V2_DRAFTS)])
def test_rows_of_a_models_drafts_are_neither_counted_nor_delivered(runner: str, tmp_path: Path) -> None:
    """All drafts of the model itself are accepted, where nothing is edited."""
    needs_runner(runner == "V2")
    folder = save_model("llama", tmp_path / "llama")
    drafter = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    with vllm_lm(folder, speculative_config=drafter, **DENSE) as lm, own_lm(folder) as oracle:
        for ops in (None, OPS):
            found, wanted = (
                model.generate(PROMPTS, params, interventions=ops, capture=["resid_post.*", "z.1"])
                for model in (lm, oracle)
            )
            for one, other in zip(found, wanted, strict=True):
                assert_close(one, other)
            if ops is None:
                assert max(sum(one.receipt.steps.values()) for one in found) < 12


def test_adapters_beside_the_model_are_our_engines(engines: tuple[Case, LM, LM], tmp_path: Path) -> None:
    """Requests with adapters and without in one step. States have the adapter's part, and its name tells nothing of its KV."""
    case, lm, oracle = engines
    own: Any = oracle.backend
    # Our engine refuses adapters inside of a short convolution.
    targets = ["q_proj", "k_proj", "v_proj", "w1", "w2", "w3"] if case.family == "lfm2" else None
    folders = [
        write_adapter(
            tmp_path / str(i), AutoModelForCausalLM.from_pretrained(own.facts.folder), targets=targets, seed=i, rank=8, **fields
        )
        for i, fields in enumerate(({}, {}, {"alpha_pattern": {"q_proj": 3}}))
    ]  # fmt: skip
    if not case.options.get("enable_lora"):
        with pytest.raises(ValueError, match="enable_lora=True"):
            lm.adapters.load("one", folders[0])
        return
    kinds = [f"{kind}.*" for kind in (*case.options.get("inner_sites", ()), "attn_out", "resid_post")]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    named: list[str | None] = ["one", None, "two", "one", None, "two"]
    for order in (folders[:2], folders[1::-1]):  # the second time the names are the other way around
        for model in (lm, oracle):
            model.adapters.load("one", order[0])
            model.adapters.load("two", order[1])
        assert (
            dict(lm.adapters) == dict(oracle.adapters) and lm.weights.fingerprint_with("one") != lm.weights.fingerprint
        )
        for captures in (None, [kinds, None, kinds, None, kinds, None]):
            found, wanted = (
                model.generate(PROMPTS, params, interventions=OPS, capture=captures, lora=named)
                for model in (lm, oracle)
            )
            for one, other in zip(found, wanted, strict=True):
                assert_close(one, other)
        assert (
            lm.generate(PROMPTS[:1], params, lora="one")[0].token_ids != lm.generate(PROMPTS[:1], params)[0].token_ids
        )
        for model in (lm, oracle):
            model.adapters.unload("one")
            model.adapters.unload("two")
    for folder, name, match in (
        (folders[2], "three", "alpha_pattern are not read by vLLM"),
        (tmp_path / "none", "three", "adapter_config.json"),
        (folders[0], "", "a string that is not empty"),
    ):
        with pytest.raises(ValueError, match=match):
            lm.adapters.load(name, folder)
    with pytest.raises(ValueError, match="there is no adapter 'one'"):
        lm.generate(PROMPTS[:1], params, lora="one")
    assert not lm.adapters


def monitors_of(oracle: LM, params: SamplingParams) -> list[list[Monitor]]:
    """For each prompt a probe that records, and one that stops it at some token, or not, or at its prompt."""
    probe, found = vector(12), list[list[Monitor]]()
    for i, out in enumerate(oracle.generate(PROMPTS, params, interventions=OPS, capture=["resid_post.2"])):
        first = len(PROMPTS[i]) if i % 2 else 0
        scores = sorted((out.activations["resid_post.2"].float()[first:] @ probe).tolist())
        low, high = max(pairwise(scores[-4:]), key=lambda gap: gap[1] - gap[0])
        where: Any = "generated" if i % 2 else "all"
        stop = Monitor("resid_post.2", probe, (low + high) / 2, then="stop", name="stop", positions=where)
        softmax = Probe(vector(13, 2, WIDTH), output="softmax", index=1)
        record = Monitor("attn_out.1", softmax, name="record", reduce="mean", positions=slice(2, None))
        found.append([[record], [record, stop], [stop], [], [stop], [record]][i])
    return found


THEN = [Steer("resid_post.2", vector(14), 4.0), Ablate("mlp_out.1", vector(15))]


def test_monitors_record_stop_and_act_as_in_our_engine(engines: tuple[Case, LM, LM]) -> None:
    """In chunks, with preemptions, behind cached prefixes and on two ranks; all at once, and in streams."""
    case, lm, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=30 if case.preempts else 9, ignore_eos=True, logprobs=1)
    if "speculative_config" in case.options:  # such requests have no drafts
        with pytest.raises(ValueError, match="rows of drafts cannot be taken back from monitors"):
            monitors = [Monitor("resid_post.1", vector(1))]
            lm.generate(PROMPTS[:1], replace(params, speculate=True), monitors=monitors)
    monitors = monitors_of(oracle, params)
    wanted = oracle.generate(PROMPTS, params, interventions=OPS, monitors=monitors)
    assert {out.finish_reason for out in wanted} == {"monitor", "length"}

    for _ in range(2):
        found = lm.generate(PROMPTS, params, interventions=OPS, monitors=monitors)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
            assert (one.finish_reason, one.outputs[0].stop_reason) == (
                other.finish_reason,
                other.outputs[0].stop_reason,
            )
            assert_same_scores(one, other)
    for i in (1, 2):
        pieces = list(lm.stream(PROMPTS[i], params, interventions=OPS[i], monitors=monitors[i]))
        assert [token for piece in pieces for token in piece.token_ids] == wanted[i].token_ids
        assert pieces[-1].finish_reason == "monitor"
        assert_same_scores(pieces[-1], wanted[i])
        scored = [pair for piece in pieces for pair in piece.scores.get("stop", [])]
        assert [position for position, _ in scored] == wanted[i].monitors["stop"].positions.tolist()
    acting = [[replace(one, then=THEN) if one.then == "stop" else one for one in own] for own in monitors]
    wanted = oracle.generate(PROMPTS, params, interventions=OPS, monitors=acting, capture=["resid_post.3"])
    found = lm.generate(PROMPTS, params, interventions=OPS, monitors=acting, capture=["resid_post.3"])
    assert (
        sum(any(one.monitor == "stop" and one.generated_rows for one in out.receipt.interventions) for out in wanted)
        > 1
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
        assert_same_scores(one, other)
    call = Monitor("resid_post.1", vector(1), then=print)
    with pytest.raises(ValueError, match="a function of this process"):
        lm.generate(PROMPTS[:1], params, monitors=[call])


def test_captured_rows_stream_and_are_those_of_the_result(engines: tuple[Case, LM, LM]) -> None:
    """All at once, behind chunks and preemptions; one request is ended by a monitor, and one does not stream."""
    case, lm, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=20 if case.preempts else 7, ignore_eos=True)
    captures = [
        Capture("resid_post.*", stream=True), Capture("mlp_out.1", positions=slice(1, None, 3), stream=True),
        Capture("resid_mid.2", reduce=Project(vector(11, 3, WIDTH)), stream=True), Capture("final_norm"),
        Capture("attn_out.0", reduce="mean", stream=True), Capture("logits", positions="generated", stream=True),
    ]  # fmt: skip
    if "speculative_config" in case.options:  # such requests have no drafts
        with pytest.raises(ValueError, match="rows of drafts cannot be taken back from streamed captures"):
            next(iter(lm.stream(PROMPTS[0], replace(params, speculate=True), capture=captures[:1])))
    stop = [m for m in monitors_of(oracle, params)[1] if m.name == "stop"]
    asked: list[dict[str, Any]] = [
        {"capture": captures, "interventions": OPS[i], "monitors": stop if i == 1 else None} for i in range(4)
    ]
    streams = [lm.stream(PROMPTS[i], params, **options) for i, options in enumerate(asked)]
    quiet = lm.submit(PROMPTS[4], params, capture=captures)
    for i, (stream, options) in enumerate(zip(streams, asked, strict=True)):
        pieces = list(stream)
        (wanted,) = oracle.generate([PROMPTS[i]], params, **options)
        assert [token for piece in pieces for token in piece.token_ids] == wanted.token_ids
        assert pieces[-1].finish_reason == wanted.finish_reason == ("monitor" if i == 1 else "length")
        parts, whole = [piece.captures for piece in pieces if piece.captures is not None], pieces[-1].activations
        assert len(parts) > 1 and "final_norm" not in {site for part in parts for site in part}
        for site in set(whole) - {"final_norm"}:
            own = [part for part in parts if site in part]
            assert len(own) > 1 or not site.startswith("resid_post") or i == 1
            assert torch.equal(torch.cat([part[site] for part in own]), whole[site]), site
            for name in ("positions", "token_ids"):
                rows = torch.cat([getattr(part, name)[site] for part in own])
                assert torch.equal(rows, getattr(whole, name)[site]), (site, name)
            assert_close_tensor(whole[site], wanted.activations[site], site)
    assert_close(quiet.result(600), oracle.generate([PROMPTS[4]], params, capture=captures)[0])


def test_prompts_of_embeddings_are_our_engines(engines: tuple[Case, LM, LM]) -> None:
    """Whole, mixed with tokens and beside plain prompts; with ops and captures; equal vectors twice, and near ones."""
    case, lm, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    table = 0.2 * vector(20, 60, WIDTH)
    near = table[:40].clone()
    near[39, -1] = torch.nextafter(near[39, -1], torch.tensor(torch.inf))
    mixed = {"prompt_token_ids": PROMPTS[0], "embeds": {i: table[i] for i in (0, 7, 8, 29)}}
    prompts: list[Any] = [
        {"prompt_embeds": table[:40]},
        mixed,
        PROMPTS[0],
        {"prompt_embeds": near},
        {"prompt_embeds": table[3:4]},
    ]
    if EMBEDS not in case.options:
        with pytest.raises(PromptError, match="enable_prompt_embeds=True"):
            lm.generate(prompts, params)
        assert "pattern.*" in lm.sites and lm.capabilities["cuts_edges"]
        return
    with pytest.raises(ValueError, match="no attention pattern is captured"):
        lm.generate(PROMPTS[:1], params, capture=["pattern.1"])
    assert "pattern.*" not in lm.sites and not lm.capabilities["cuts_edges"]
    options: dict[str, Any] = {
        "interventions": [OPS[0], None, None, None, [Steer("embed", vector(6), 0.3, positions="all")]],
        "capture": ["embed", "resid_post.*"],
    }
    for _ in range(2):
        found, wanted = (model.generate(prompts, params, **options) for model in (lm, oracle))
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    for _ in range(2):  # without captures, behind cached pages
        found, wanted = (model.generate(prompts, params) for model in (lm, oracle))
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    with pytest.raises(PromptError, match="repetition_penalty counts"):
        lm.generate([mixed], SamplingParams(max_tokens=1, repetition_penalty=1.5))


def test_an_abort_leaves_the_others_as_they_are(engines: tuple[Case, LM, LM]) -> None:
    _, lm, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    options = {"interventions": OPS[0], "capture": ["resid_post.2"]}
    ended = [lm.submit(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True), **options) for _ in range(2)]
    kept = lm.submit(PROMPTS[2], params, **options)
    for handle in ended:
        handle.cancel()
    assert {handle.result(600).finish_reason for handle in ended} <= {"abort", "length"}
    assert_close(kept.result(600), oracle.generate([PROMPTS[2]], params, **options)[0])


def test_a_rank_that_is_killed_ends_what_waits(engines: tuple[Case, LM, LM]) -> None:
    """The last test of an engine."""
    case, lm, _ = engines
    count = case.options.get("tensor_parallel_size", 1)
    if count == 1:
        pytest.skip("one case is enough: the one with two ranks")
    files, ranks = shared_files(lm), ranks_of(lm)
    assert len(ranks) == count
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    handles = [lm.submit(PROMPTS[1], params, capture=["resid_post.*"] if i else None) for i in range(2)]
    ranks[-1].kill()
    assert_ends_with_a_rank(lm, handles, r"rank 1 of 2 \(process \d+\) (was ended by SIGKILL|has ended)", files)
