"""Gates at earlier sites: a pass under transformers' hooks reads, a second one steers where the first one said."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held
from helpers_declared import lms, states_of, vector
from helpers_runner import random_ids

from pymllm_interp import Ablate, Gate, SamplingParams, Scale, Steer
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.bind import DeclaredLimits, bind, resolved
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.interventions.gates import is_before, share_kernel
from pymllm_interp.hooks.interventions.op import Op
from pymllm_interp.hooks.positions import ordinals_of
from pymllm_interp.hooks.site import Site
from pymllm_interp.interventions import Generated
from pymllm_interp.wire.specs import intervention_of, to_json

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
CAPTURE = ["resid_post.*", "final_norm"]
WAIT = 600
MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)
LIMITS = DeclaredLimits(8, 999, 1 << 24)
PAIRS = [
    ("embed", "attn_out.0"), ("resid_post.0", "resid_post.1"), ("resid_pre.1", "mlp_out.2"), ("mlp_out.0", "resid_post.0"),
    ("resid_mid.1", "resid_post.2"), ("attn_out.0", "resid_mid.0"), ("resid_post.-1", "final_norm"), ("z.1", "mlp_act.1"),
    ("resid_post.0", "v.2"), ("resid_post.0", "z.1"), ("q.0", "z.0"), ("mlp_act.0", "attn_out.1"),
]  # fmt: skip
"""(where a gate reads, where its op acts)."""


def is_parallel(model: ModelSpec) -> bool:
    return "resid_mid" in model.family.missing


def gated_op(rng: random.Random, model: Any, prompt: list[int], in_kernels: bool = False) -> Op:
    """An op whose gate fires at some of the prompt's positions and not at the others, by a margin.

    Args:
        in_kernels: one that tables hold.
    """
    info = ModelSpec.of(model.config, torch.float32)
    while True:
        read, site = rng.choice(PAIRS)
        kinds = {name.partition(".")[0] for name in (read, site)}
        if kinds & info.family.missing or any(
            name.endswith(".2") and info.num_hidden_layers < 3 for name in (read, site)
        ):
            continue
        if is_before(*(bind(Scale(s, 2.0), info, 1)[0].site for s in (read, site)), info):
            break
    probe = vector(info.width(Site.parse(read).kind), rng.randrange(10**6))
    (place,) = (bound.site for bound in bind(Scale(read, 2.0), info, len(prompt)))
    name = f"resid_post.{place.layer - 1}" if place.kind == "resid_pre" and place.layer else str(place)
    if place.kind == "resid_mid":
        threshold = 0.0
    else:
        dots = (states_of(model, prompt, [], len(prompt))[name] @ probe).sort().values
        gaps = [i for i in range(len(dots) - 1) if dots[i + 1] - dots[i] > 1e-2]  # equal tokens have equal states
        middle = rng.choice(gaps)
        threshold = float(dots[middle : middle + 2].mean())
    scope: Any = rng.choice(["token", "prompt"])
    if in_kernels and share_kernel(*(bind(Scale(s, 2.0), info, 1)[0].site for s in (read, site)), info):
        scope = "token"
    when = Gate(probe, threshold, site=read, scope=scope)
    positions: Any = rng.choice(["all", "all", "generated", "prompt", slice(1, None, 2), Generated(0, None, 2)])
    width = info.width(Site.parse(site).kind)
    made = [
        Steer(site, vector(width, rng.randrange(99)), scale=2.0, positions=positions, when=when),
        Ablate(site, vector(width, rng.randrange(99)), positions=positions, when=when),
        Scale(site, 0.3, positions=positions, when=when),
    ]
    return rng.choice(made)


def read_states(model: Any, ids: list[int], specs: list[Op], site: Site) -> torch.Tensor:
    if site.kind == "resid_mid":  # no module's output: what the MLP's norm reads
        info, found = ModelSpec.of(model.config, torch.float32), []
        path, _ = info.family.point(site)
        handle = model.get_submodule(path).register_forward_pre_hook(lambda module, args: found.append(args[0][0]))
        states_of(model, ids, specs, len(ids))
        handle.remove()
        return found[0]
    states = states_of(model, ids, specs, len(ids))
    return states[f"resid_post.{site.layer - 1}" if site.kind == "resid_pre" and site.layer else str(site)]


def two_pass(model: Any, ids: list[int], specs: list[Op], prompt_len: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The states of `ids` when each gate, read in a pass of its own, is replaced by the positions where it lets its op act.

    Gates must be in the order of their sites. Also how often each op acted.
    """
    info, at, resolved_specs, fires = ModelSpec.of(model.config, torch.float32), torch.arange(len(ids)), [], []
    for spec in specs:
        (bound,) = bind(spec, info, prompt_len)
        gate = spec.when
        (place,) = (found.site for found in bind(Scale(gate.site, 2.0), info, prompt_len))
        fired = read_states(model, ids, resolved_specs, place) @ gate.probe > gate.threshold
        if gate.scope == "prompt":
            fired[prompt_len:] = False
            fired = fired.cumsum(0) > 0
        acts = fired & (ordinals_of(bound.windows, at) >= 0)
        fires.append(int(acts.sum()))
        if acts.any():
            resolved_specs.append(replace(spec, when=None, positions=acts.nonzero()[:, 0].tolist()))  # pyright: ignore
    return states_of(model, ids, resolved_specs, len(ids)), fires


def assert_equals_two_passes(model: Any, prompt: list[int], specs: list[Op], out: Any) -> list[int]:
    ids = (prompt + out.token_ids)[:-1]
    wanted, fires = two_pass(model, ids, specs, len(prompt))
    for site in [f"resid_post.{i}" for i in range(model.config.num_hidden_layers)] + ["final_norm"]:
        torch.testing.assert_close(out.activations[site], wanted[site], rtol=1e-4, atol=1e-4)
    assert wanted["logits"][len(prompt) - 1 :].argmax(-1).tolist() == out.token_ids
    found = {(entry.intervention, entry.site): entry.gate_fires for entry in out.receipt.interventions}
    info = ModelSpec.of(model.config, torch.float32)
    names = [(type(spec).__name__, str(bind(spec, info, len(prompt))[0].site)) for spec in specs]
    assert [found[name] for name in names] == fires
    return fires


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_gates_equal_two_passes_under_chunks_and_preemption(family: str, lm_of: Any, oracle: Any) -> None:
    model = oracle(family)
    lm = lm_of(family, kv_cache_tokens=44, page_size=4, max_num_tokens=7)
    rng = random.Random(sum(map(ord, family)))
    prompts = [random_ids(rng.randrange(2, 20), seed=i) for i in range(10)]
    specs = [[gated_op(rng, model, prompt)] for prompt in prompts]
    before = lm.engine.stats()["preempted"]
    params = SamplingParams(temperature=0, max_tokens=8)
    with held(lm):
        handles = [lm.submit(p, params, interventions=s, capture=CAPTURE) for p, s in zip(prompts, specs, strict=True)]
    partly = 0
    for prompt, spec, handle in zip(prompts, specs, handles, strict=True):
        out = handle.result(WAIT)
        (fires,), (entry,) = assert_equals_two_passes(model, prompt, spec, out), out.receipt.interventions
        partly += 0 < fires < entry.prompt_rows + entry.generated_rows
    assert lm.engine.stats()["preempted"] > before and partly


@pytest.mark.parametrize("way", ["graphs"])
def test_kernels_set_and_read_flags_as_functions_do(way: str, model_folder: Any, oracle: Any) -> None:
    rng, model = random.Random(5), oracle("llama")
    prompts = [random_ids(rng.randrange(2, 12), seed=i) for i in range(4)]
    specs = [[gated_op(rng, model, prompt, in_kernels=True)] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=5)
    with lms(way, model_folder) as load:
        lm = load("llama", page_size=4, kv_cache_tokens=28, max_num_tokens=7, inner_sites=("q", "v", "z", "mlp_act"))
        with held(lm):
            handles = [
                lm.submit(p, params, interventions=s, capture=CAPTURE) for p, s in zip(prompts, specs, strict=True)
            ]
        outs = [handle.result(WAIT) for handle in handles]
        assert lm.engine.stats()["preempted"]
    for prompt, spec, out in zip(prompts, specs, outs, strict=True):
        wanted, fires = two_pass(model, (prompt + out.token_ids)[:-1], spec, len(prompt))
        torch.testing.assert_close(out.activations["final_norm"], wanted["final_norm"], rtol=1e-4, atol=1e-4)
        assert [entry.gate_fires for entry in out.receipt.interventions] == fires


@pytest.mark.parametrize("way", ["functions", "tables"])
def test_a_chain_of_gates_reads_what_the_ops_before_left(way: str, model_folder: Any, oracle: Any) -> None:
    """An op that a gate lets act changes what the next gate reads; several ops share a gate."""
    model, prompt = oracle("llama"), random_ids(9, seed=3)
    width = MODEL.hidden_size
    first = Gate(vector(width, 1), 0.0, site="resid_post.0", scope="prompt")
    second = Gate(vector(width, 2), 0.5, site="resid_post.1")
    specs: list[Op] = [
        Steer("resid_mid.1", vector(width, 3), scale=3.0, when=first),
        Scale("mlp_out.1", 0.1, when=first, positions="generated"),
        Steer("resid_post.2", vector(width, 4), when=second),
        Scale("final_norm", 0.5, when=second),
    ]
    with lms(way, model_folder) as load:
        lm = load("llama", max_num_tokens=4)
        params = SamplingParams(temperature=0, max_tokens=4)
        (out,) = lm.generate([prompt], params, interventions=specs[::-1], capture=CAPTURE)
    fires = assert_equals_two_passes(model, prompt, specs, out)
    plain, _ = two_pass(model, prompt, [specs[2]], len(prompt))
    assert 0 < fires[2] < len(prompt) + 3 and plain


@pytest.mark.parametrize("way", ["functions", "tables"])
def test_what_a_prompt_decided_outlasts_a_preemption(way: str, model_folder: Any, oracle: Any) -> None:
    """The gate fires at the prompt's first page alone, which is not computed again when the request comes back."""
    model = oracle("llama")
    for seed in range(100):
        prompt, probe = random_ids(16, seed=seed), vector(MODEL.hidden_size, seed)
        dots = states_of(model, prompt, [], len(prompt))["resid_post.0"] @ probe
        highest = dots.topk(2)
        if int(highest.indices[0]) < 4 and highest.values[0] - highest.values[1] > 0.1:
            break
    gate = Gate(probe, float(highest.values.mean()), site="resid_post.0", scope="prompt")
    steer = Steer("resid_post.1", vector(MODEL.hidden_size, 4), scale=2.0, when=gate)
    with lms(way, model_folder) as load:
        lm = load("llama", page_size=4, kv_cache_tokens=48)
        with held(lm):
            other = lm.submit(random_ids(8, seed=7), SamplingParams(temperature=0, max_tokens=24))
            handle = lm.submit(
                prompt, SamplingParams(temperature=0, max_tokens=20), interventions=[steer], capture=["final_norm"]
            )
        out = handle.result(WAIT)
        other.result(WAIT)
        assert out.receipt.preemptions and lm.engine.stats()["prefix_cache"]["recomputed_tokens"] < 16
    wanted, _ = two_pass(model, (prompt + out.token_ids)[:-1], [steer], len(prompt))
    torch.testing.assert_close(out.activations["final_norm"], wanted["final_norm"], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def sharing(model_folder: Any) -> Iterator[tuple[Any, Any]]:
    """Engines with and without a prefix cache."""
    with lms("functions", model_folder) as load:
        yield tuple(load("llama", page_size=4, enable_prefix_caching=on) for on in (True, False))


@pytest.mark.parametrize("scope", ["token", "prompt"])
@pytest.mark.parametrize("positions", ["all", "generated", [9, 10]])
def test_what_is_reused_is_what_would_be_computed(scope: Any, positions: Any, sharing: Any) -> None:
    """Prompts with a common beginning, gates whose flags differ, and one's answer as the other's prompt."""
    shared, alone = sharing
    base = random_ids(12, seed=hash((scope, str(positions))) % 1000)
    gate = Gate(vector(MODEL.hidden_size, 3), 1.0, site="resid_post.0", scope=scope)
    steer = Steer("resid_post.1", vector(MODEL.hidden_size, 4), scale=3.0, positions=positions, when=gate)
    params = SamplingParams(temperature=0, max_tokens=6)
    prompts = [base, base, [*base[:11], 5, 6, 7]]
    cached = []
    for _ in range(2):
        for prompt in prompts:
            found, wanted = (lm.generate([prompt], params, interventions=[steer])[0] for lm in (shared, alone))
            assert found.token_ids == wanted.token_ids
            fires = [out.receipt.interventions[0].gate_fires for out in (found, wanted)]
            assert fires[0] == fires[1]
            cached.append(found.receipt.num_cached_tokens)
        prompts.append(base + found.token_ids[:-1])
        plain = [lm.generate([prompts[-1]], params)[0].token_ids for lm in (shared, alone)]
        assert plain[0] == plain[1]
    if scope == "prompt" or positions == "all":
        assert not any(cached), "every position of the prompt is read"
    else:
        assert cached[1] == (8)


@pytest.mark.parametrize("way", ["functions", "tables"])
@pytest.mark.parametrize("sharing", [True, False])
def test_rows_that_are_computed_again_after_a_preemption_count_once(way: str, sharing: bool, model_folder: Any) -> None:
    """Gates at the op's own site, at an earlier one, and at the logits; long prompts in chunks, and requests that decode."""
    rng, width = random.Random(3), MODEL.hidden_size
    gates = [Gate(vector(width, 3), 0.0), Gate(vector(width, 5), 0.2, site="resid_post.0")]
    specs = [Steer("resid_post.1", vector(width, 4), when=gate) for gate in gates]
    specs.append(Scale("logits", 0.9, when=Gate(vector(MODEL.vocab_size, 6), 0.0)))
    prompts = [random_ids(rng.choice([3, 9, 20, 26]), seed=seed) for seed in range(12)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with lms(way, model_folder) as load:
        common = {"page_size": 4, "enable_prefix_caching": sharing, "max_num_tokens": 16}
        lm, wide = load("llama", kv_cache_tokens=88, **common), load("llama", **common)
        before = lm.engine.stats()["preempted"]
        outs = lm.generate(prompts, params, interventions=[specs] * len(prompts))
        assert lm.engine.stats()["preempted"] > before
        fires = [[entry.gate_fires for entry in out.receipt.interventions] for out in outs]
        wanted = [wide.generate([prompt], params, interventions=specs)[0] for prompt in prompts]
        assert fires == [[entry.gate_fires for entry in out.receipt.interventions] for out in wanted]
        assert all(sum(counts) for counts in zip(*fires, strict=True))


def test_pages_say_where_the_prompt_ends_that_decides_for_them() -> None:
    gates = {
        scope: Gate(vector(MODEL.hidden_size, 1), 0.0, site="resid_post.0", scope=scope)
        for scope in ("token", "prompt")
    }

    def by_page(scope: str, prompt_len: int, positions: Any = "all", pages: int = 8) -> list[Any]:
        spec = Steer("resid_post.1", vector(MODEL.hidden_size, 2), positions=positions, when=gates[scope])
        declared = BoundHooks.of([spec], MODEL, prompt_len, LIMITS, longest=40)
        spans, found = declared.kv_edits.namespaces(4, 4 * pages), []
        for page in range(pages):
            before = [namespace for start, namespace in spans if start <= page]
            found.append(before[-1] if before else None)
        return found

    assert by_page("token", 9) == by_page("token", 20)
    nine, twenty = by_page("prompt", 9), by_page("prompt", 20)
    assert nine[:2] == twenty[:2] and all(one != two for one, two in zip(nine[2:], twenty[2:], strict=True))
    assert nine[0] != by_page("token", 9)[0] and nine[4] == nine[5]
    assert by_page("prompt", 9, "generated")[:2] == [None, None] != by_page("prompt", 9, "generated")[2:4]
    assert by_page("prompt", 9, [1, 2]) == by_page("prompt", 20, [1, 2])


def test_a_gates_probe_may_be_a_name_and_have_its_own_width(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), random_ids(8, seed=1)
    neurons = vector(MODEL.width("mlp_act"), 1)
    lm.vectors["probe"], lm.vectors["layers"] = neurons, {0: neurons, 1: vector(MODEL.width("mlp_act"), 2)}
    params = SamplingParams(temperature=0, max_tokens=3)
    outs = []
    for probe in (neurons, "probe", "layers", {0: neurons}):
        steer = Scale("z.1", 0, heads=[1], when=Gate(probe, 0.0, site="mlp_act.0"))
        outs.append(lm.generate([prompt], params, interventions=[steer])[0])
    del lm.vectors["probe"], lm.vectors["layers"]
    fires = [out.receipt.interventions[0].gate_fires for out in outs]
    assert fires == fires[:1] * 4 and 0 < fires[0] < 10
    assert all(out.token_ids == outs[0].token_ids for out in outs)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v, 0.0, site="resid_post.1")),
         r"the gate reads resid_post.1, which is not before resid_post.1: .*leave out site="),
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v, 0.0, site="resid_pre.2")), "not before"),
        (lambda v: Scale("resid_post.{0..2}", 2.0, when=Gate(v, 0.0, site="resid_post.1")), "not before resid_post.0"),
        (lambda v: Scale("k.1", 2.0, when=Gate(v[:1].expand(MODEL.width("q")), 0.0, site="q.1")), "not before k.1"),
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v, 0.0, site="resid_post.*")), "may name several sites"),
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v, 0.0, site="resid_post.99")), "there is no layer 99"),
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v, 0.0, site="mlp_in.0")), "mlp_in"),
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v[1:], 0.0, site="resid_post.0")), r"probe has 71 values; at resid_post"),
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v, 0.0, scope="prompt")), r"scope='prompt'; expected 'token', or a site="),
        (lambda v: Scale("resid_post.1", 2.0, when=Gate(v, 0.0, site="embed", scope="all")), "expected 'token' or 'prompt'"),
        (lambda v: [Scale("resid_post.1", 2.0, positions=[0], when=Gate(v, i, site=f"mlp_out.{i % 2}")) for i in range(17)],
         "up to 16 different gates"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_fix(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        specs = make(vector(MODEL.hidden_size, 1))
        BoundHooks.of(specs if isinstance(specs, list) else [specs], MODEL, 5, DeclaredLimits(99, 999, 1 << 24))


def test_rows_of_one_kernel_do_not_decide_for_each_other() -> None:
    """Thread blocks of one launch run in any order, so what a prompt decides there is not known to its later rows."""
    probe, tables = vector(MODEL.hidden_size, 1), DeclaredLimits(99, 999, 1 << 24, device_tables=True)
    last = MODEL.num_hidden_layers - 1
    pairs = {
        ("attn_out.1", "resid_mid.1"): True, ("mlp_out.0", "resid_post.0"): True, ("mlp_out.0", "resid_pre.1"): True,
        (f"resid_post.{last}", "final_norm"): True, (f"mlp_out.{last}", "final_norm"): True, ("embed", "attn_out.0"): False,
        ("resid_mid.1", "mlp_out.1"): False, ("resid_post.0", "attn_out.1"): False, (f"resid_mid.{last}", "final_norm"): False,
    }  # fmt: skip
    for (read, site), shared in pairs.items():
        for scope in ("token", "prompt"):
            op = Scale(site, 2.0, when=Gate(probe, 0.0, site=read, scope=scope))
            BoundHooks.of([op], MODEL, 5, DeclaredLimits(99, 999, 1 << 24))  # functions see whole batches
            if shared and scope == "prompt":
                with pytest.raises(ValueError, match=r"one kernel computes .*scope='token'"):
                    BoundHooks.of([op], MODEL, 5, tables)
            else:
                BoundHooks.of([op], MODEL, 5, tables)
    neox = ModelSpec.of(CONFIGS["gpt_neox"](), torch.float32)
    assert share_kernel(Site("attn_out", 0), Site("resid_post", 0), neox)
    assert not share_kernel(Site("attn_out", 0), Site("resid_post", 0), MODEL)
    assert not share_kernel(Site("z", 0), Site("attn_out", 0), MODEL)


def test_attention_and_mlp_of_parallel_layers_are_not_ordered() -> None:
    neox = ModelSpec.of(CONFIGS["gpt_neox"](), torch.float32)
    assert is_parallel(neox) and not is_parallel(MODEL)
    for first, second in (("attn_out", "mlp_out"), ("z", "mlp_act"), ("mlp_act", "attn_out")):
        assert not is_before(Site(first, 1), Site(second, 1), neox)
    assert is_before(Site("attn_out", 1), Site("mlp_act", 1), MODEL) and is_before(
        Site("attn_out", 0), Site("mlp_out", 1), neox
    )
    assert is_before(Site("resid_pre", 1), Site("mlp_act", 1), neox) and is_before(
        Site("mlp_out", 1), Site("final_norm"), neox
    )


def test_it_goes_through_json_and_old_fingerprints_hold() -> None:
    gate = Gate(vector(MODEL.hidden_size, 1), 0.5, site="blocks.0.hook_resid_post", scope="prompt")
    spec = Scale("resid_post.1", 2.0, when=gate)
    again = intervention_of(json.loads(json.dumps(to_json(spec))))
    assert again == spec and again.when.site == "resid_post.0" and again.when.scope == "prompt"
    plain = Gate(vector(MODEL.hidden_size, 1), 0.5)
    assert plain != gate and replace(gate, site=None, scope="token") == plain
    (found,) = resolved([[Scale("resid_post.1", 2.0, when=plain)]], {}, MODEL)[0]
    assert found.when == plain
