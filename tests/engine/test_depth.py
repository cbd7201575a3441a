"""Passes that end early: requests that only read states need no layer behind their last site (`Request.depth`).

The oracle is the same request with one more capture, at the final norm: its passes run through all layers.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB, held
from family_configs import tiny_config
from helpers_declared import lms, vector
from helpers_devices import DEVICES, ways
from helpers_graphs import captured_lms
from helpers_outputs import assert_equal
from helpers_simulation import POLICIES, Simulation
from recurrent_configs import RECURRENT
from registry_configs import registry_config

from pymllm_interp import LM, Ablate, Capture, Gate, Patch, SamplingParams, Steer
from pymllm_interp.captures import Lens
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.core.model_spec import INNER_SITES, NUMBERED_SITES, inner_site, layers_to, site_index
from pymllm_interp.core.request import Request
from pymllm_interp.engine import waiting_queue
from pymllm_interp.harvest import open_harvest
from pymllm_interp.hooks.site import WITHOUT_LAYER, Site
from pymllm_interp.interventions import Knockout, Monitor

LmOf = Callable[..., LM]
PAGE = 4
READ = SamplingParams(max_tokens=0)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {"page_size": PAGE, "kv_cache_tokens": 1024, "max_num_tokens": 16, "max_running_requests": 8}
LENGTHS = (1, PAGE + 1, 23, 9)
WIDTH = CONFIGS["llama"]().hidden_size
WAIT = 600


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB - 2) for _ in range(length)]


def depths(lm: LM) -> Counter[int]:
    """Layers -> passes so far that ended after so many."""
    return Counter(lm.engine.stats()["depths"])


def together(lm: LM, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    """The outputs of requests that only read, from steps that hold the same rows whenever it is called."""
    with held(lm) as arrived:
        handles = [lm.submit(prompt, READ, **options) for prompt in prompts]
        arrived(len(prompts))
    return [handle.result(WAIT) for handle in handles]


def sites_within(lm: LM, depth: int) -> list[str]:
    """Every numbered site that a pass of so many layers reaches, and that the engine serves."""
    spec, found = lm.model_spec, []
    num_layers, known = spec.num_hidden_layers, lm.backend.facts.inner_sites
    for kind in spec.family.points:
        if kind not in NUMBERED_SITES or kind == "resid_pre" or (kind in INNER_SITES and kind not in known):
            continue
        layers = [None] if kind in WITHOUT_LAYER else range(spec.family.first_layer(kind), num_layers)
        sites = [Site(kind, layer) for layer in layers]
        found += [str(site) for site in sites if layers_to(site_index(site, num_layers), num_layers) <= depth]
    return found


def check_states(lm: LM, depth: int, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> list[RequestOutput]:
    """All sites within `depth`: equal bits in a pass that ends there, and in one that does not."""
    prompts = [prompt_of(length, 10 * depth + length) for length in lengths]
    last = f"resid_post.{depth - 1}"
    sites = sites_within(lm, depth)
    assert last in sites
    before = depths(lm)
    early = together(lm, prompts, capture=sites, **options)
    assert (depths(lm) - before).keys() == {depth}
    before = depths(lm)
    whole = together(lm, prompts, capture=[*sites, "final_norm"], **options)
    assert depths(lm) == before
    for mine, other in zip(early, whole, strict=True):
        assert mine.finish_reason == "length" and mine.token_ids == []
        for site in sites:
            assert torch.equal(mine.activations[site], other.activations[site]), site
            assert torch.equal(mine.activations.positions[site], other.activations.positions[site])
        assert mine.receipt.interventions == other.receipt.interventions
        assert [c.prompt_rows for c in mine.receipt.captures] == [len(mine.prompt_token_ids)] * len(sites)
    lm.engine.call(lm.engine.scheduler.check_integrity)
    return early


# -- states ------------------------------------------------------------------------------


def test_layers_to_a_site() -> None:
    for kind, layer, wanted in (
        ("embed", None, 0), ("resid_pre", 0, 0), ("resid_pre", 3, 3), ("attn_out", 3, 4), ("resid_mid", 3, 4), ("mlp_out", 3, 4),
        ("resid_post", 3, 4), ("resid_post", 6, 7), ("q", 0, 1), ("mlp_act", 6, 7), ("router", 2, 3),
    ):  # fmt: skip
        assert layers_to(site_index(Site(kind, layer), 7), 7) == wanted, (kind, layer)
    assert layers_to(inner_site(7, 0, "logits"), 7) > 7 and layers_to(site_index(Site("final_norm"), 7), 7) >= 7


@pytest.mark.parametrize("family", CONFIGS)
def test_states_equal_those_of_whole_passes(family: str, lm_of: LmOf) -> None:
    lm = lm_of(family, enable_prefix_caching=False, **SIZES)
    for depth in range(1, lm.num_layers):
        check_states(lm, depth)


def test_later_layers_do_not_run(lm_of: LmOf, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = lm_of("llama", enable_prefix_caching=False, **SIZES)
    model: Any = lm.runner.get_model()
    monkeypatch.setattr(model.model.layers[1], "forward_fused", None)
    monkeypatch.setattr(model, "head_fused", None)
    outs = together(lm, [prompt_of(n, n) for n in LENGTHS], capture=["resid_post.0", "resid_pre.1", "attn_in.1"])
    assert [len(out.activations["resid_post.0"]) for out in outs] == list(LENGTHS)


BY_CLASS = "gpt2", "gemma2", "qwen2_moe", "bloom", "mpt", "gpt_oss", "llama4_text", "deepseek_v2", "phi3", "gptj", "opt"
RECURRENT_CLASSES = "nemotron_h", "qwen3_next", "jamba", "zamba2", "rwkv", "recurrent_gemma", "mamba2"


@pytest.mark.parametrize("family", BY_CLASS)
def test_classes_of_transformers_end_early(family: str) -> None:
    check_class(tiny_config(family))


@pytest.mark.parametrize("family", RECURRENT_CLASSES)
def test_recurrent_states_of_the_layers_that_run(family: str) -> None:
    check_class(registry_config(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(RECURRENT.keys() - set(RECURRENT_CLASSES)))
def test_recurrent_states_of_all_families(family: str) -> None:
    check_class(registry_config(family))


@contextmanager
def called() -> Iterator[set[torch.nn.Module]]:
    """The modules that are called meanwhile."""
    found, call = set[torch.nn.Module](), torch.nn.Module._call_impl

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.add(module)
        return call(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "_call_impl", noted)
        yield found


def check_class(config: Any) -> None:
    """Prompts in chunks, which go on from what the chunk before left."""
    options: dict[str, Any] = {"load_format": "dummy", "impl": "transformers", "device": "cpu", "dtype": "float32"}
    lm = LM(hf_config=config, enable_prefix_caching=False, **{**options, **SIZES, "max_running_requests": 4})
    for depth in range(1, lm.num_layers):
        check_states(lm, depth)
    later, ran = lm.runner.get_model().get_submodule(f"{lm.model_spec.family.layers}.1"), []
    for params, options in ((READ, {"capture": ["resid_post.0"]}), (GREEDY, {})):
        with called() as modules:
            lm.generate([prompt_of(9, 1)], params, **options)
        ran.append(bool(modules & set(later.children())))
    assert ran == [False, True]
    lm.shutdown()


@pytest.mark.parametrize("way", ["tables", "graphs"])
def test_states_from_tables(way: str, model_folder: Callable[[str], Path]) -> None:
    """As on CUDA. A captured prefill is replayed up to the graph in which the next layer begins."""
    with lms(way, model_folder) as load:
        lm = load("llama", **SIZES, enable_prefix_caching=False, prefill_graph_tokens=16, inner_sites=("q", "mlp_act"))
        before = ways(lm)
        check_states(
            lm, 1, (1, 19), interventions=[Steer("resid_mid.0", vector(WIDTH, 1), positions=slice(0, None, 3))]
        )
        assert {"tables": "plain", "graphs": "replay"}[way] in ways(lm) - before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma3_text"])
def test_captured_prefills_end_early(device: str, family: str, model_folder: Callable[[str], Path]) -> None:
    """Of all captured sizes, and of larger ones that run kernel by kernel."""
    options = {**SIZES, "max_num_tokens": 96, "prefill_graph_tokens": 48, "capture_ring_bytes": 16 << 20}
    with captured_lms(model_folder, enable_prefix_caching=False, **options) as load:
        lm = load(device, family, tables=device == "cuda")
        for depth in range(1, lm.num_layers):
            for lengths in ((1,), (15, 17), (33, 40, 5)):
                check_states(lm, depth, lengths)


# -- which requests ------------------------------------------------------------------------


@pytest.fixture
def lm(lm_of: LmOf) -> LM:
    return lm_of("llama", **SIZES)


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        ({"capture": ["embed"]}, 1),
        ({"capture": ["resid_pre.2"]}, 2),
        ({"capture": ["mlp_in.1", "q.0"]}, 2),
        ({"capture": [Capture("resid_post.0", reduce=Lens(top_k=2))]}, 1),
        ({"capture": [Capture("resid_post.*", positions=[0]), "embed"]}, None),
        ({"capture": ["pattern.1"]}, 2),
        ({"capture": ["embed"], "interventions": [Steer("resid_post.1", vector(WIDTH, 1))]}, 2),
        ({"capture": ["embed"], "interventions": [Knockout([0, 1], from_=-1, to=0)]}, 2),
        ({"capture": ["embed"], "interventions": [Patch("logits", vector(VOCAB, 1), positions=[-1])]}, None),
        (
            {
                "capture": ["embed"],
                "interventions": [Ablate("mlp_out.1", vector(WIDTH, 1), when=Gate(vector(WIDTH, 2), 0.1))],
            },
            2,
        ),
        ({"monitors": [Monitor("resid_post.1", vector(WIDTH, 1))]}, 2),
        (
            {
                "capture": ["embed"],
                "monitors": [Monitor("resid_post.0", vector(WIDTH, 1), then=Steer("mlp_out.1", vector(WIDTH, 1)))],
            },
            2,
        ),
        ({"capture": ["embed"], "monitors": [Monitor("final_norm", vector(WIDTH, 1))]}, None),
        ({"capture": ["logits"]}, None),
        ({"capture": ["final_norm"]}, None),
        ({}, None),
        ({"interventions": [Steer("resid_post.0", vector(WIDTH, 1))]}, None),
    ],
)
def test_the_depth_of_a_request(options: dict[str, Any], depth: int | None, lm: LM) -> None:
    before, prompt = depths(lm), prompt_of(11, 7)
    (out,) = lm.generate([prompt], READ, **options)
    assert set(depths(lm) - before) == ({depth} if depth else set())
    wanted = [*options.get("capture", ()), "final_norm"]
    (whole,) = lm.generate([prompt], READ, **{**options, "capture": wanted[-1:] if depth is None else wanted})
    assert out.receipt is None or out.receipt.interventions == whole.receipt.interventions
    for name, scored in out.monitors.items():
        assert len(scored.scores) == 11 and torch.equal(scored.scores, whole.monitors[name].scores)
    for site in out.activations if depth else ():
        mine, other = (
            [each] if isinstance(each, torch.Tensor) else each
            for each in (out.activations[site], whole.activations[site])
        )
        assert all(map(torch.equal, mine, other)) and len(mine) == len(other), site


def test_requests_with_results_behind_their_captures_run_whole(lm: LM) -> None:
    before, prompt = depths(lm), prompt_of(11, 8)
    (scored,) = lm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1), capture=["resid_post.0"])
    (drawn,) = lm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), capture=["resid_post.0"])
    (passed,) = lm.forward([prompt], capture=["resid_post.0"])
    assert depths(lm) == before
    assert len(scored.prompt_logprobs) == 11 and len(drawn.token_ids) == 1 and len(passed.logits) == 11


def test_a_lowered_block_that_reads_a_state(lm: LM) -> None:
    before, prompt = depths(lm), prompt_of(13, 9)
    with lm.trace(prompt) as tracer:
        early = lm.model.layers[1].output.save()
    assert tracer.receipt.lowered and set(depths(lm) - before) == {2}
    before = depths(lm)
    with lm.trace(prompt):
        whole = lm.model.layers[1].output.save()
        lm.logits.save()
    assert depths(lm) == before
    torch.testing.assert_close(early, whole, rtol=0, atol=0)


# -- the prefix cache ------------------------------------------------------------------------

LONG = prompt_of(22, 5)
FULL = (len(LONG) - 1) // PAGE * PAGE


def last(layer: int) -> list[Capture]:
    return [Capture(f"resid_post.{layer}", positions=[-1])]


def test_kept_layers_serve_requests_of_the_same_depth_only(lm: LM) -> None:
    def cached(params: SamplingParams = READ, **options: Any) -> int:
        (out,) = lm.generate([LONG], params, **options)
        return out.num_cached_tokens

    lm.reset_prefix_cache()
    assert [cached(capture=last(0)) for _ in range(2)] == [0, FULL]
    assert [cached(capture=last(1)) for _ in range(2)] == [0, FULL], "one layer is not two"
    assert [cached(GREEDY) for _ in range(2)] == [0, FULL], "two layers are not three"
    lm.reset_prefix_cache()
    assert cached(GREEDY) == 0
    assert [cached(capture=last(0)), cached(capture=last(1)), cached(GREEDY)] == [FULL] * 3, "all layers serve each"


def test_a_request_goes_on_from_whole_pages_with_pages_of_its_depth(lm: LM) -> None:
    lm.reset_prefix_cache()
    lm.generate([LONG[:9]], GREEDY)
    tails = [LONG[:8] + prompt_of(14, seed) for seed in (1, 1, 2)]
    found = [lm.generate([tail], READ, capture=last(0))[0].num_cached_tokens for tail in tails]
    assert found == [8, 20, 8]
    assert lm.generate([tails[0]], GREEDY)[0].num_cached_tokens == 8


def test_a_prompt_that_nobody_reads_is_kept_whole(lm: LM) -> None:
    """As by callers who want the next request to find its KV."""
    lm.reset_prefix_cache()
    for options in ({}, {"interventions": [Steer("resid_post.0", vector(WIDTH, 1))]}):
        found = [lm.generate([LONG], params, **options)[0].num_cached_tokens for params in (READ, GREEDY)]
        assert found == [0, FULL]


def test_vectors_in_a_prompt_are_part_of_the_key(lm: LM) -> None:
    lm.reset_prefix_cache()
    one, two = ({"prompt_token_ids": LONG, "embeds": {9: vector(WIDTH, seed)}} for seed in (1, 2))
    before, outs = depths(lm), [lm.generate([prompt], READ, capture=last(0))[0] for prompt in (one, one, two, LONG)]
    assert [out.num_cached_tokens for out in outs] == [0, FULL, 8, 8] and (depths(lm) - before).keys() == {1}
    assert lm.generate([one], GREEDY)[0].num_cached_tokens == 0
    wholes = [lm.generate([prompt], READ, capture=[*last(0), "final_norm"])[0] for prompt in (one, one, two, LONG)]
    for out, whole in zip(outs, wholes, strict=True):
        torch.testing.assert_close(out.activations["resid_post.0"], whole.activations["resid_post.0"])


@pytest.mark.parametrize("kv_tokens", [1024, 96])
def test_random_traffic_equals_that_without_a_prefix_cache(kv_tokens: int, lm_of: LmOf) -> None:
    """Prompts with common beginnings, read at several depths and generated from, while pages are evicted."""
    options = {**SIZES, "kv_cache_tokens": kv_tokens, "max_model_len": 64}
    lm, reference = lm_of("llama", **options), lm_of("llama", **options, enable_prefix_caching=False)
    rng, stems = random.Random(kv_tokens), [prompt_of(17, seed) for seed in range(3)]
    steer = [Steer("resid_post.0", 8 * vector(WIDTH, 1), positions=[6])]
    before, cached = depths(lm), Counter[int | None]()
    for _ in range(12):
        calls = []
        for _ in range(rng.randrange(1, 6)):
            prompt = rng.choice(stems)[: rng.randrange(5, 18)] + prompt_of(rng.randrange(1, 8), rng.randrange(4))
            params, given = READ, {"capture": last(rng.randrange(3)), "interventions": rng.choice([None, None, steer])}
            if rng.random() < 0.4:
                params, given = GREEDY, {"interventions": rng.choice([None, steer])}
            calls.append((prompt, params, given))
        both = []
        for each in (lm, reference):
            handles = [each.submit(prompt, params, **given) for prompt, params, given in calls]
            both.append([handle.result(WAIT) for handle in handles])
        for (_, params, given), out, wanted in zip(calls, *both, strict=True):
            assert_equal(out, wanted)
            cached[None if params is GREEDY else int(given["capture"][0].site[-1])] += out.num_cached_tokens
        lm.engine.call(lm.engine.scheduler.check_integrity)
    assert (depths(lm) - before).keys() == {1, 2} and all(cached[kind] for kind in (None, 0, 1, 2))
    assert kv_tokens > 96 or lm.engine.stats()["prefix_cache"]["evicted_tokens"]


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_snapshots_of_states_are_kept_by_depth(family: str) -> None:
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "dtype": "float32", **SIZES}
    lm = LM(hf_config=registry_config(family), **{**options, "max_running_requests": 4})
    plain = LM(hf_config=registry_config(family), enable_prefix_caching=False, **{**options, "max_running_requests": 4})
    prompt, cached = prompt_of(43, 1), []
    for params, given in (
        (READ, {"capture": last(0)}), (READ, {"capture": last(0)}), (READ, {"capture": last(1)}), (GREEDY, {}), (GREEDY, {}),
        (READ, {"capture": last(1)}), (READ, {"capture": last(0)}),
    ):  # fmt: skip
        for tail in ([], [7, 9]):
            (out,), (wanted,) = (each.generate([prompt + tail], params, **given) for each in (lm, plain))
            assert_equal(out, wanted)
            cached.append(out.num_cached_tokens)
        lm.engine.call(lm.engine.scheduler.check_integrity)
    assert [bool(tokens) for tokens in cached[::2]] == [False, True, False, False, True, True, True]
    for each in (lm, plain):
        each.shutdown()


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 200), marks=pytest.mark.slow)])
def test_kept_kv_is_that_of_all_layers_that_its_reader_needs(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of three layers, which writes as many as the step runs. The KV of each request is checked after each step.

    Pages are evicted, requests are preempted, and depths meet or have steps of their own.
    """
    cached, preempted, evicted = Counter[int | None](), Counter[int | None](), 0
    for seed in seeds:
        rng = random.Random(seed)
        monkeypatch.setattr(waiting_queue, "PASS_TOKENS", rng.choice([0, 4, 256]))
        sim = Simulation(
            num_pages=rng.choice([26, 40, 80]), page_size=rng.choice([1, 2, 4]), max_num_tokens=rng.randrange(4, 20),
            max_running=rng.randrange(2, 7), policy=rng.choice(POLICIES), seed=seed, ahead=rng.random() < 0.5,
            order=rng.choice(["fcfs", "lpm"]), eos_rate=0.02,
        )  # fmt: skip
        for _ in range(16):
            depth = rng.choice([None, None, 1, 2])
            edits, captured = rng.choice([[], [], [(0, [2, 5, 8])], [(0, "all")]]), rng.choice([[0], [20], [24]])
            (request,) = sim.add(
                rng.choice([25, 37] if depth else [5, 25]), 1 if depth else rng.randrange(1, 30), base=0,
                shared=rng.choice([8, 24, 40]), edits=edits, captured=captured if depth else [], depth=depth,
                cache_salt=rng.choice([None, None, "a"]),
            )  # fmt: skip
            for _ in range(rng.randrange(4)):
                sim.step()
            if rng.random() < 0.1 and not request.finished:
                sim.abort(request)
        sim.run(sim.limit())
        for request in sim.requests:
            cached[request.depth] += request.num_cached_tokens
            preempted[request.depth] += request.num_preemptions
        evicted += sim.sharing.tree.num_evicted
    assert min(cached[depth] for depth in (None, 1, 2)) > 8 * len(seeds), cached
    assert evicted > len(seeds) and min(preempted[depth] for depth in (None, 1, 2)) > 0, (evicted, preempted)


# -- beside others -----------------------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small passes count as long ones."""
    monkeypatch.setattr(waiting_queue, "PASS_TOKENS", 2)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_beside_requests_that_generate(policy: str, lm_of: LmOf) -> None:
    """Prompts that are read have steps of their own."""
    lm = lm_of("llama", prefill_policy=policy, enable_prefix_caching=False, **SIZES)
    texts, prompts = [prompt_of(n, n) for n in (5, 9, 2)], [prompt_of(n, 50 + n) for n in (30, 7, 1, 19)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone = [lm.generate([text], params)[0].token_ids for text in texts]
    read = [lm.generate([prompt], READ, capture=["resid_post.0", "final_norm"])[0] for prompt in prompts]
    with held(lm) as arrived:
        generated = [lm.submit(text, params) for text in texts]
        arrived(len(texts))
    while lm.engine.stats()["running"] < len(texts):
        time.sleep(0.001)
    before = depths(lm)
    early = [lm.submit(prompt, READ, capture=["resid_post.0"]) for prompt in prompts]
    for handle, wanted in zip(early, read, strict=True):
        found = handle.result(WAIT).activations["resid_post.0"]
        torch.testing.assert_close(found, wanted.activations["resid_post.0"], rtol=1e-5, atol=1e-5)
    assert (depths(lm) - before)[1] >= 2
    assert [handle.result(WAIT).token_ids for handle in generated] == alone


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_and_cancelled_readers(ahead: bool, lm_of: LmOf) -> None:
    """A pool for a few of them, steps that are launched before the last one's results are read, and some that are cancelled."""
    small = {
        **SIZES,
        "kv_cache_tokens": 80,
        "max_model_len": 64,
        "async_scheduling": ahead,
        "prefill_policy": "prefill_first",
    }
    lm, roomy = lm_of("llama", **small), lm_of("llama", enable_prefix_caching=False, **SIZES)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    calls: list[Any] = []
    for n in range(24):
        reads = n % 3 > 0
        calls.append((prompt_of(5 + n, n), READ if reads else params, {"capture": ["resid_post.1"] if reads else None}))
    wanted = [roomy.generate([prompt], param, **given)[0] for prompt, param, given in calls]
    before, preempted = depths(lm), lm.engine.scheduler.num_preempted
    with held(lm) as arrived:
        handles = [lm.submit(prompt, param, **given) for prompt, param, given in calls]
        arrived(len(calls))
    for handle in handles[1::7]:
        handle.cancel()
    for i, handle in enumerate(handles):
        if i % 7 == 1:
            handle.wait(WAIT)
            continue
        assert_equal(handle.result(WAIT), wanted[i])
    assert lm.engine.scheduler.num_preempted > preempted and (depths(lm) - before).keys() == {2}
    lm.engine.call(lm.engine.scheduler.check_integrity)
    assert lm.engine.stats()["running"] == lm.engine.stats()["waiting"] == 0


def test_two_depths_in_a_step(lm_of: LmOf) -> None:
    """It runs to the deeper one. Their pages are kept apart."""
    lm = lm_of("llama", **{**SIZES, "max_num_tokens": 64})
    lm.reset_prefix_cache()
    before = depths(lm)
    with held(lm) as arrived:
        handles = [lm.submit(LONG, READ, capture=last(layer)) for layer in (0, 1)]
        arrived(2)
    one, two = (handle.result(WAIT) for handle in handles)
    assert depths(lm) - before == {2: 1} and one.num_cached_tokens == two.num_cached_tokens == 0
    (whole,) = lm.generate([LONG], READ, capture=[*last(0), *last(1), Capture("final_norm", positions=[-1])])
    torch.testing.assert_close(one.activations["resid_post.0"], whole.activations["resid_post.0"])
    torch.testing.assert_close(two.activations["resid_post.1"], whole.activations["resid_post.1"])


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("ahead", [False, True])
def test_harvests_at_once_end_each_at_its_layer(ahead: bool, lm_of: LmOf) -> None:
    """In mixed order of arrival, with chunks. Each pass has rows of one depth."""
    lm = lm_of("llama", async_scheduling=ahead, enable_prefix_caching=False, **SIZES)
    prompts = [prompt_of(3 + 5 * n % 31, n) for n in range(18)]
    before, layers = depths(lm), [n * n % 3 for n in range(len(prompts))]  # 0, 1
    with held(lm) as arrived:
        handles = [lm.submit(p, READ, capture=last(i)) for p, i in zip(prompts, layers, strict=True)]
        arrived(len(prompts))
    outs, ran = [handle.result(WAIT) for handle in handles], depths(lm) - before
    tokens = Counter[int]()
    for prompt, layer in zip(prompts, layers, strict=True):
        tokens[layer + 1] += len(prompt)
    for depth, count in ran.items():
        assert count <= tokens[depth] / SIZES["max_num_tokens"] + 6, (ran, tokens)
    for out, prompt, layer in zip(outs, prompts, layers, strict=True):
        (whole,) = lm.generate([prompt], READ, capture=[*last(layer), "final_norm"])
        name = f"resid_post.{layer}"
        torch.testing.assert_close(out.activations[name], whole.activations[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kinds", [(1, 2), (2, None), (1, None)])
def test_nobody_waits_for_ever(policy: str, kinds: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """More arrivals of one depth than steps hold, so that some prompt has always begun: one of another depth ends soon."""
    monkeypatch.setattr(waiting_queue, "PASS_TOKENS", 0)
    for many, one in (kinds, kinds[::-1]):
        sim = Simulation(num_pages=60, max_running=6, max_num_tokens=36, policy=policy, seed=one or 7, eos_rate=0)

        def arrive(depth: int | None, sim: Simulation = sim) -> Request:
            (request,) = sim.add(37, 3 if depth is None else 1, captured=[6] if depth else [], depth=depth)
            return request

        for _ in range(4):
            arrive(many)
        stray = arrive(one)
        for _ in range(25):
            arrive(many)
            arrive(many)
            sim.step()
            if stray.finished:
                break
        assert stray.finished, (many, one)
        sim.run(sim.limit())


def test_a_token_between_others_bounds_the_steps_of_readers(lm_of: LmOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `max_itl_ms`, requests that decode sit out no step for those that read."""
    monkeypatch.setattr(waiting_queue, "PASS_TOKENS", 0)
    lm = lm_of("llama", max_itl_ms=1000.0, enable_prefix_caching=False, **SIZES)
    params, before = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), depths(lm)
    with held(lm) as arrived:
        handle = lm.submit(prompt_of(3, 1), params)
        arrived(1)
    while not lm.engine.stats()["running"]:
        time.sleep(0.001)
    outs = lm.generate([prompt_of(15, n) for n in range(3)], READ, capture=["resid_post.0"])
    assert len(handle.result(WAIT).token_ids) == 40 and all(len(out.activations["resid_post.0"]) == 15 for out in outs)
    assert sum((depths(lm) - before).values()) <= 1


class Guess:
    """Proposes tokens, right or wrong."""

    def propose(self, requests: list[Any], k: int) -> list[list[int]]:
        return [[request.all_token_ids[-1], 5] for request in requests]


def test_drafts_go_on_beside_readers(lm_of: LmOf) -> None:
    lm = lm_of("llama", speculative=Guess(), enable_prefix_caching=False, **SIZES)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (alone,) = lm_of("llama", enable_prefix_caching=False, **SIZES).generate([LONG], params)
    handle = lm.submit(LONG, params)
    for seed in range(6):
        (out,) = lm.generate([prompt_of(21, seed)], READ, capture=["resid_post.0"])
        assert len(out.activations["resid_post.0"]) == 21
    assert handle.result(WAIT).token_ids == alone.token_ids and lm.engine.stats()["speculation"]["steps"]


def test_a_harvest_ends_at_its_layer(lm: LM, tmp_path: Path) -> None:
    documents, before = [prompt_of(length, length) for length in (30, 3, 12, 1)], depths(lm)
    lm.harvest(documents, capture=["resid_post.0"], out=tmp_path / "early")
    assert (depths(lm) - before).keys() == {1}
    lm.harvest(documents, capture=["resid_post.0", "final_norm"], out=tmp_path / "whole")
    early, whole = (open_harvest(tmp_path / name) for name in ("early", "whole"))
    torch.testing.assert_close(early["resid_post.0"][:], whole["resid_post.0"][:], rtol=1e-5, atol=1e-5)
