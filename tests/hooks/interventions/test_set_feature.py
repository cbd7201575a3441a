"""`SetFeature` against hooks on transformers' model that encode with the whole SAE, and against the kernels."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held
from helpers_declared import hooked, lms
from helpers_paths import GOLDEN
from helpers_runner import random_ids

from pymllm_interp import SAE, Capture, Gate, SamplingParams, Steer
from pymllm_interp.captures import Features, Lens
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.bind import DeclaredLimits
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.captures.lens_files import TunedLens
from pymllm_interp.hooks.interventions.op import apply
from pymllm_interp.hooks.saes.registry import SAERegistry
from pymllm_interp.interventions import SetFeature
from pymllm_interp.wire.specs import intervention_of, to_json

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)
WIDTH = MODEL.hidden_size
SAES = GOLDEN / "saes"
ARCHITECTURES = ["standard", "jumprelu", "gated"]
"""Those of which a feature can be computed alone."""
FEATURES = 40
MODES: list[Any] = ["set", "add", "scale", "clamp"]


def sae_of(architecture: str, site: str = "resid_post.1", seed: int = 0, **changes: Any) -> SAE:
    generator = torch.Generator().manual_seed(seed)
    width = MODEL.width(site.partition(".")[0])

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    more: dict[str, Any] = {}
    if architecture == "jumprelu":
        more["threshold"] = random_tensor(FEATURES).abs()
    if architecture == "gated":
        more = {"r_mag": 0.3 * random_tensor(FEATURES), "b_mag": random_tensor(FEATURES)}
    if architecture == "topk":
        more["k"] = 3
    return SAE(
        W_enc=random_tensor(width, FEATURES), b_enc=random_tensor(FEATURES), W_dec=0.2 * random_tensor(FEATURES, width),
        b_dec=random_tensor(width), architecture=architecture, site=site, **more, **changes,
    )  # fmt: skip


def random_op(rng: random.Random, sae: SAE, **kwargs: Any) -> SetFeature:
    mode = rng.choice(MODES)
    features: dict[int, Any] = {}
    for feature in rng.sample(range(FEATURES), rng.randrange(1, 5)):
        features[feature] = rng.choice([0.0, 2.5, -1.0])
        if mode == "clamp":
            features[feature] = rng.choice([(None, 1.0), (0.5, None), (0.2, 3.0)])
    return SetFeature(sae, features, mode, **kwargs)


def by_the_whole_sae(spec: SetFeature, state: torch.Tensor) -> torch.Tensor:
    """The state plus the difference of two reconstructions: with the features at their targets, and as they are."""
    sae: Any = spec.sae
    found = sae.encode(state)
    wanted = found.clone()
    for feature, value in spec.features:
        column = wanted[..., feature]
        if spec.mode == "clamp":
            wanted[..., feature] = column.clamp(*value)
        else:
            wanted[..., feature] = {"set": column * 0 + value, "add": column + value, "scale": column * value}[
                spec.mode
            ]
    return state + sae.decode(wanted, state) - sae.decode(found, state)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "topk"])
@pytest.mark.parametrize("subtract", [True, False])
def test_it_moves_the_features_and_keeps_the_error(architecture: str, subtract: bool) -> None:
    rng = random.Random(architecture)
    sae = sae_of(architecture, subtract_b_dec=subtract)
    state = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(12):
        spec = random_op(rng, sae)
        torch.testing.assert_close(apply(spec, state), by_the_whole_sae(spec, state), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("folder", ["standard", "jumprelu", "gated", "batchtopk"])
def test_saes_of_files_give_the_same(folder: str) -> None:
    sae = SAE.load(SAES / folder)
    state = torch.randn(20, sae.width, generator=torch.Generator().manual_seed(1))
    spec = SetFeature(sae, {0: 3.0, 2: 0.0}, "set")
    torch.testing.assert_close(apply(spec, state), by_the_whole_sae(spec, state), rtol=1e-4, atol=1e-4)


def test_features_at_their_targets_change_no_bit_and_order_does_not_matter() -> None:
    sae, state = sae_of("jumprelu"), torch.randn(20, WIDTH)
    state[0, 0] = -0.0
    off = [i for i in range(FEATURES) if not sae.encode(state)[:, i].any()][:1]
    same = [
        SetFeature(sae, {3: 1.0}, "scale"),
        SetFeature(sae, {3: (None, 1e9)}, "clamp"),
        SetFeature(sae, {3: 0}, "add"),
    ]
    same += [SetFeature(sae, {off[0]: 0.0})] if off else []
    for spec in same:
        assert torch.equal(apply(spec, state).view(torch.int32), state.view(torch.int32)), spec
    one, two = SetFeature(sae, {1: 2.0, 7: 0.0}), SetFeature(sae, {7: 0.0, 1: 2.0})
    assert one == two and torch.equal(apply(one, state), apply(two, state))
    top, more = sae_of("topk"), sae_of("topk", seed=1).b_enc
    more[:8] = top.b_enc[:8]  # the same columns of the features, and others beside them
    assert SetFeature(top, {1: 2.0}) != SetFeature(replace(top, b_enc=more), {1: 2.0})
    assert one != SetFeature(sae, {1: 2.0, 7: 0.5}) and one != SetFeature(sae_of("jumprelu", seed=1), {1: 2.0, 7: 0.0})


@pytest.fixture(scope="module", params=["functions", "tables"])
def lm(request: Any, model_folder: Any) -> Iterator[Any]:
    with lms(request.param, model_folder) as load:
        yield load("llama", max_num_tokens=7, page_size=4, kv_cache_tokens=64, inner_sites=("z", "mlp_act"))


def test_engines_equal_a_hook_on_transformers(lm: Any, oracle: Any) -> None:
    """Chunked prompts of many requests at random sites, positions and gates, in a tight pool, and each greedy token."""
    rng, model = random.Random(3), oracle("llama")
    prompts = [random_ids(rng.randrange(3, 16), seed=i) for i in range(6)]
    specs = []
    for i, _ in enumerate(prompts):
        site = rng.choice(["resid_post.1", "mlp_out.0", "resid_pre.1", "attn_out.1", "z.1", "mlp_act.0", "final_norm"])
        when = Gate(torch.randn(WIDTH), 0.0, site="embed") if site != "resid_pre.1" and rng.random() < 0.3 else None
        positions = rng.choice(["all", "prompt", "generated", [-1, 0], slice(None, None, 2)])
        sae = sae_of(rng.choice(ARCHITECTURES), site, seed=i)
        specs.append([random_op(rng, sae, positions=positions, when=when)])
    params = SamplingParams(temperature=0, max_tokens=4)
    with held(lm):
        handles = [
            lm.submit(p, params, interventions=s, capture=["final_norm"]) for p, s in zip(prompts, specs, strict=True)
        ]
    outs = [handle.result(600) for handle in handles]
    for prompt, (spec,), out in zip(prompts, specs, outs, strict=True):
        if spec.when is not None:
            continue  # test_gates.py; here they only share batches with the others
        ids = (prompt + out.token_ids)[:-1]
        at = torch.arange(len(ids))
        with torch.no_grad(), hooked(model, [spec], len(prompt), lambda at=at: at):
            wanted = model(torch.tensor([ids])).logits[0, len(prompt) - 1 :].argmax(-1)
        assert wanted.tolist() == out.token_ids, spec
    assert any(out.receipt.interventions[0].gate_fires is None for out in outs)


@pytest.mark.few("way", "functions", "graphs")
@pytest.mark.parametrize("way", ["functions", "tables", "graphs"])
def test_passes_encode_the_top_k_saes_that_the_engine_was_built_with(way: str, model_folder: Any, oracle: Any) -> None:
    """Two at one site, and one at each kind of place: a delta, a sum, the final norm, inside of a layer."""
    rng, model = random.Random(7), oracle("llama")
    sites = [
        "resid_post.1",
        "resid_post.1",
        "mlp_out.0",
        "resid_pre.1",
        "attn_out.2",
        "final_norm",
        "mlp_act.0",
        "embed",
    ]
    saes = {f"s{i}": sae_of("topk", site, seed=i) for i, site in enumerate(sites)}
    params = SamplingParams(temperature=0, max_tokens=4)
    with lms(way, model_folder) as load:
        lm = load("llama", saes=saes, max_num_tokens=7, page_size=4, kv_cache_tokens=64, inner_sites=("mlp_act",))
        assert sorted(lm.saes) == sorted(saes)
        prompts = [random_ids(rng.randrange(3, 16), seed=i) for i in range(9)]
        specs: list[Any] = [None]
        for i, (name, sae) in enumerate(saes.items()):
            positions = rng.choice(["all", "prompt", "generated", slice(None, None, 2)])
            specs.append([random_op(rng, sae, positions=positions)])
            if i % 2:  # by its name
                (op,) = specs[-1]
                features = dict(op.features)
                specs[-1] = [SetFeature(name, features, op.mode, positions=positions)]
        with held(lm):
            handles = [lm.submit(p, params, interventions=s or ()) for p, s in zip(prompts, specs, strict=True)]
        outs = [handle.result(600) for handle in handles]
    for i, (prompt, spec, out) in enumerate(zip(prompts, specs, outs, strict=True)):
        ids = (prompt + out.token_ids)[:-1]
        at = torch.arange(len(ids))
        own = [] if spec is None else [replace(spec[0], sae=saes[f"s{i - 1}"], site=sites[i - 1])]
        with torch.no_grad(), hooked(model, own, len(prompt), lambda at=at: at):
            wanted = model(torch.tensor([ids])).logits[0, len(prompt) - 1 :].argmax(-1)
        assert wanted.tolist() == out.token_ids, own


def test_top_k_saes_are_refused_where_no_pass_encodes_them(model_folder: Any) -> None:
    sae, other = sae_of("topk"), sae_of("topk", seed=1)
    steer, prompt = Steer("resid_post.1", torch.ones(WIDTH)), random_ids(5, seed=0)
    with lms("tables", model_folder) as load:
        lm = load("llama", saes={"sea": sae})
        lm.saes["late"] = other
        for wrong in (other, "late", sae.at("resid_post.0")):
            with pytest.raises(ValueError, match="has to encode all 40 features to know one"):
                lm.generate([prompt], interventions=[SetFeature(wrong, {0: 1.0})])
        with pytest.raises(ValueError, match="changes the state before it"):
            lm.generate([prompt], interventions=[steer, SetFeature(sae, {0: 1.0})])
        equal = sae_of("topk")  # as if it were loaded again
        for given in (sae, equal):
            lm.generate([prompt], SamplingParams(max_tokens=2), interventions=[SetFeature(given, {0: 1.0}), steer])
    with pytest.raises(ValueError, match=r"ModelConfig\(saes=3\)"):
        load("llama", saes=3)


def test_as_many_features_are_active_in_bfloat16_as_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    encoder = torch.randn(256, 2048, generator=generator)
    sae = SAE(
        W_enc=encoder, b_enc=torch.randn(2048, generator=generator), W_dec=encoder.T.contiguous(),
        b_dec=torch.randn(256, generator=generator), architecture="topk", k=64, site="resid_post.1",
    ).to(dtype=torch.bfloat16)  # fmt: skip
    sae = sae.to(DEVICE)
    states = torch.randn(64, 256, generator=generator).bfloat16().to(DEVICE)
    dots = states.double() @ sae.W_enc.double() + sae.b_enc.double() - sae.b_dec.double() @ sae.W_enc.double()
    found, wanted = sae.encode_float32(states), dots.topk(64, dim=-1)
    assert found.dtype is torch.float32 and ((found > 0).sum(-1) == 64).all()
    torch.testing.assert_close(found.topk(64, dim=-1).values, wanted.values.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.few("way", "tables")
@pytest.mark.parametrize("way", ["tables", "graphs"])
def test_a_top_k_sae_in_half_precision_is_its_maths_on_the_state_that_came(way: str, model_folder: Any) -> None:
    sae = sae_of("topk").to(dtype=torch.bfloat16)
    features: dict[int, Any] = dict.fromkeys(range(0, FEATURES, 2), 1.5)
    params, kwargs = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), {"capture": ["resid_post.1"]}
    with lms(way, model_folder) as load:
        lm = load("llama", dtype="bfloat16", saes={"sea": sae})
        prompt = random_ids(9, seed=2)
        (plain,) = lm.generate([prompt], params, **kwargs)
        # The same tokens, so that each position's state comes to the op as it came to the plain run.
        ids = (prompt + plain.token_ids)[:-1]
        for positions in ("all", [-1]):
            op = SetFeature(sae, features, positions=positions)
            (out,) = lm.generate([ids], SamplingParams(max_tokens=1), interventions=[op], **kwargs)
            (same,) = lm.generate([ids], SamplingParams(max_tokens=1), **kwargs)
            before, after = same.activations["resid_post.1"], out.activations["resid_post.1"][: len(ids)]
            changed = slice(None) if positions == "all" else slice(-1, None)
            wanted = apply(op, before[: len(ids)])
            torch.testing.assert_close(after[changed], wanted[changed], rtol=0.02, atol=0.05)
            assert not torch.equal(after[changed], before[: len(ids)][changed])
        (steered,) = lm.generate([prompt], params, interventions=[SetFeature("sea", {0: 9.0}, "add")], **kwargs)
        assert steered.receipt.interventions[0].generated_rows == 4


def test_saes_at_outputs_of_norms_may_be_named_and_are_not_encoded(model_folder: Any) -> None:
    normed = {kind: sae_of("topk", "resid_post.1").at(f"{kind}.1") for kind in ("attn_in", "mlp_in")}
    with lms("tables", model_folder) as load:
        lm = load("llama", saes=normed)
        assert not lm.runner.declared.limits.encoders and len(lm.saes) == 2
        lm.shutdown()
        assert not lm.saes


def test_names_are_resolved_when_a_request_is_submitted(lm: Any) -> None:
    sae, params, prompt = sae_of("standard"), SamplingParams(temperature=0, max_tokens=3), random_ids(6, seed=1)
    lm.saes["sea"] = sae
    kwargs: dict[str, Any] = {"capture": ["resid_post.1"]}
    by_name, by_object = (
        lm.generate([prompt], params, interventions=[SetFeature(s, {5: 4.0})], **kwargs)[0] for s in ("sea", sae)
    )
    del lm.saes["sea"]
    assert torch.equal(by_name.activations["resid_post.1"], by_object.activations["resid_post.1"])
    states = by_name.activations["resid_post.1"]
    assert [entry.site for entry in by_name.receipt.interventions] == ["resid_post.1"] and states.isfinite().all()
    with pytest.raises(ValueError, match="no SAE 'sea'"):
        lm.generate([prompt], params, interventions=[SetFeature("sea", {5: 4.0})])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SetFeature(sae_of("standard"), {40: 1.0}), "there is no feature 40; the SAE has 40"),
        (lambda: SetFeature(sae_of("standard"), {}), "features="),
        (lambda: SetFeature(sae_of("standard"), {-1: 1.0}), "features="),
        (lambda: SetFeature(sae_of("standard"), {0: float("nan")}), "takes a finite number"),
        (lambda: SetFeature(sae_of("standard"), {0: (1.0, 2.0)}), "mode='set' takes a finite number"),
        (lambda: SetFeature(sae_of("standard"), {0: 1.0}, "clamp"), r"mode='clamp' takes \(low, high\)"),
        (lambda: SetFeature(sae_of("standard"), {0: (2.0, 1.0)}, "clamp"), r"takes \(low, high\), low <= high"),
        (lambda: SetFeature(sae_of("standard"), {0: 1.0}, "multiply"), "mode='multiply'"),
        (lambda: SetFeature(sae_of("standard"), dict.fromkeys(range(33), 1.0)), "at most 32"),
        (lambda: SetFeature(sae_of("standard", transcoder=True), {0: 1.0}), "one that names its site"),
        (lambda: SetFeature(sae_of("standard"), {0: 1.0}, site="resid_post.*"), "one site"),
        (lambda: SetFeature(sae_of("standard"), {0: 1.0}, site="mlp_act.0"), r"sae has 72 values; at mlp_act"),
        (lambda: SetFeature(3, {0: 1.0}), "an SAE, or a name in lm.saes"),
        (lambda: SetFeature("sea", {0: 1.0}), "'sea' is a name"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        BoundHooks.of([make()], MODEL, 5, DeclaredLimits(4, 400, 1 << 20))


def test_http_carries_names_and_refuses_saes() -> None:
    spec = SetFeature("sea", {5: (None, 2.0), 3: (0.0, 1.0)}, "clamp", positions="generated")
    sent = json.loads(json.dumps(to_json(spec)))
    assert sent["op"] == "setfeature" and sent["features"] == {"3": [0.0, 1.0], "5": [None, 2.0]}
    assert intervention_of(sent) == spec
    saes = SAERegistry(MODEL, "cpu")
    saes["sea"] = sae_of("standard")
    found = saes.resolved(intervention_of(sent))
    assert found == SetFeature(sae_of("standard"), dict(spec.features), "clamp", positions="generated")
    with pytest.raises(ValueError, match=r"an? SAE is not sent to a server; give the name"):
        to_json(SetFeature(sae_of("standard"), {0: 1.0}))
    with pytest.raises(ValueError, match=r"'x' is not the number of a feature"):
        intervention_of({"op": "setfeature", "sae": "sea", "features": {"x": 1}})


@pytest.mark.parametrize("architecture", ["jumprelu"] if torch.cuda.is_available() else ["jumprelu", "topk"])
def test_an_sae_that_is_edited_in_place_is_read_anew(architecture: str, lm_of: Any) -> None:
    """By specs that were used before the edit, by captures, and in the prefix cache."""
    lm, sae = lm_of("llama", page_size=4), sae_of(architecture)
    spec, capture = SetFeature(sae, {3: 5.0, 7: 2.0}), Capture(sae.site, reduce=Features(sae, top_k=4))
    prompt, plain = list(range(1, 18)), Capture("resid_post.2")

    def run(spec: SetFeature, capture: Capture) -> tuple[Any, ...]:
        params = SamplingParams(max_tokens=2, temperature=0, logprobs=1)
        (steered,) = lm.generate([prompt], params, interventions=[spec], capture=[plain])
        (read,) = lm.generate([prompt], params, capture=[capture])
        found = steered.activations["resid_post.2"], read.activations[sae.site], read.activations.indexes[sae.site]
        return found, steered.receipt.spec, read.receipt.spec, sae.fingerprint

    def fresh() -> SAE:
        return dataclasses.replace(sae, **{name: tensor.clone() for name, tensor in sae.tensors()})

    before = run(spec, capture)
    sae.W_enc.mul_(-1)
    sae.b_dec[:5] += 3
    sae.W_dec[3] += 1
    after, other = run(spec, capture), fresh()
    wanted = run(SetFeature(other, {3: 5.0, 7: 2.0}), Capture(sae.site, reduce=Features(other, top_k=4)))
    for found, expected, earlier in zip(after[0], wanted[0], before[0], strict=True):
        assert torch.equal(found, expected) and not torch.equal(found, earlier)
    assert after[1:3] == wanted[1:3] and after[3] == other.fingerprint
    assert not set(after[1:]) & set(before[1:])


def test_a_lens_that_is_edited_in_place_is_read_anew(lm_of: Any) -> None:
    lm, width = lm_of("llama"), lm_of("llama").runner.model_spec.hidden_size
    lens = TunedLens({i: torch.eye(width) for i in range(3)}, {i: torch.zeros(width) for i in range(3)})
    capture, found = Capture("resid_pre.1", reduce=Lens(top_k=3, transport=lens)), []
    for edit in (lambda: None, lambda: lens.matrices[1].mul_(-4), lambda: lens.biases[1].add_(2)):
        edit()
        (out,) = lm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), capture=[capture])
        wanted = type(lens)(lens.matrices, lens.biases)
        assert lens.fingerprint == wanted.fingerprint
        found.append((lens.fingerprint, out.receipt.spec, out.activations["resid_pre.1"].sum().item()))
    assert all(len(set(values)) == 3 for values in zip(*found, strict=True)), found
