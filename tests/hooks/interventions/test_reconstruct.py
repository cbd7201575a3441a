"""`Reconstruct`, and `SetFeature` by SAEs that encode whole states, against formulas written out on transformers' model."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CONFIGS, held
from helpers_declared import hooked, lms
from helpers_runner import random_ids
from safetensors.torch import save_file

from pymllm_interp import LM, SAE, Capture, Gate, SamplingParams, Scale, Steer
from pymllm_interp.captures import Features
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.bind import DeclaredLimits
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.interventions.op import apply
from pymllm_interp.hooks.positions import ordinals_of, windows_of
from pymllm_interp.hooks.saes.encoders import Encoders
from pymllm_interp.hooks.saes.pursuit import Pursuit
from pymllm_interp.hooks.saes.registry import SAERegistry
from pymllm_interp.interventions import Reconstruct, SetFeature
from pymllm_interp.toolkit import loss_recovered
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.specs import intervention_of, to_json

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)
WIDTH, LAYERS, FEATURES = MODEL.hidden_size, MODEL.num_hidden_layers, 40
ARCHITECTURES = ["standard", "jumprelu", "gated", "topk", "abstopk", "matching_pursuit"]
NORMALIZATIONS = ["none", "layer_norm", "constant_norm_rescale"]


def sae_of(
    architecture: str, seed: int = 0, outputs: int = 1, site: str = "resid_post.1", width: int = WIDTH, **changes: Any
) -> SAE:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    made: dict[str, Any] = {
        "jumprelu": {"threshold": rand(FEATURES).abs()}, "gated": {"r_mag": rand(FEATURES, scale=0.3), "b_mag": rand(FEATURES)},
        "topk": {"k": 5}, "abstopk": {"k": 5}, "matching_pursuit": {"pursuit": Pursuit(0.3, 6)},
    }.get(architecture, {})  # fmt: skip
    W_enc, W_dec = rand(width, FEATURES, scale=0.3), rand(FEATURES, outputs * width, scale=0.3)
    b_enc = rand(FEATURES)
    if architecture == "matching_pursuit":
        W_dec = F.normalize(W_dec, dim=-1)
        W_enc, b_enc = W_dec.T.contiguous(), torch.zeros(FEATURES)
    if changes.get("transcoder"):
        changes.setdefault("subtract_b_dec", False)
    return SAE(
        W_enc=W_enc, b_enc=b_enc, W_dec=W_dec, b_dec=rand(outputs * width), architecture=architecture, site=site,  # pyright: ignore[reportArgumentType]
        **made, **changes,
    )  # fmt: skip


# -- the formulas, written out -----------------------------------------------------------------


def normalized(sae: SAE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normalized, factor of the output, summand of the output)."""
    one, zero = torch.ones(len(x), 1), torch.zeros(len(x), 1)
    if sae.normalization == "layer_norm":
        mean = x.mean(-1, keepdim=True)
        std = ((x - mean) ** 2).sum(-1, keepdim=True).div(x.shape[-1] - 1).sqrt()
        return (x - mean) / (std + 1e-5), std, mean
    if sae.normalization == "constant_norm_rescale":
        length = (x**2).sum(-1, keepdim=True).sqrt()
        return x * x.shape[-1] ** 0.5 / length, length / x.shape[-1] ** 0.5, zero
    return x, one, zero


def encoded(sae: SAE, x: torch.Tensor) -> torch.Tensor:
    x = normalized(sae, x)[0]
    centred = x - sae.b_dec if sae.subtract_b_dec else x
    if sae.pursuit is not None:
        return torch.stack([pursued(sae, row) for row in centred])
    pre = centred @ sae.W_enc + sae.b_enc
    match sae.architecture:
        case "jumprelu":
            return torch.where(pre > sae.threshold, pre.relu(), 0)
        case "gated":
            magnitude = (centred @ sae.W_enc) * torch.exp(sae.r_mag) + sae.b_mag  # pyright: ignore[reportArgumentType, reportOperatorIssue]
            return torch.where(pre > 0, magnitude.relu(), 0)
        case "topk" | "abstopk":
            rank = pre.abs() if sae.architecture == "abstopk" else pre
            kth = rank.sort(-1, descending=True).values[:, sae.k - 1, None]  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
            kept = torch.where(rank >= kth, pre, 0)
            return kept if sae.architecture == "abstopk" else kept.relu()
    return pre.relu()


def pursued(sae: SAE, left: torch.Tensor) -> torch.Tensor:
    """One row: until it is short, the chosen feature is a known one, or the steps are used up."""
    features, pursuit = torch.zeros(FEATURES), sae.pursuit
    for _ in range(pursuit.max_iterations or len(left)):  # pyright: ignore[reportOptionalMemberAccess]
        products = sae.W_dec @ left
        best = int(products.argmax())
        known = bool(features[best] != 0) or products[best] <= 0
        features[best] += products[best].clamp(min=0)
        left = left - products[best].clamp(min=0) * sae.W_dec[best]
        if known or left.norm() < pursuit.residual_threshold:  # pyright: ignore[reportOptionalMemberAccess]
            break
    return features


def decoded(sae: SAE, features: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = features @ sae.W_dec + sae.b_dec
    if not sae.transcoder:
        _, factor, summand = normalized(sae, x)
        out = out * factor + summand
    return out if sae.W_skip is None else out + x @ sae.W_skip


def targets(spec: SetFeature, found: torch.Tensor) -> torch.Tensor:
    wanted = found.clone()
    for feature, value in spec.features:
        column = found[:, feature]
        match spec.mode:
            case "clamp":
                wanted[:, feature] = column.clamp(*value)
            case "set":
                wanted[:, feature] = value
            case "add":
                wanted[:, feature] = column + value
            case "scale":
                wanted[:, feature] = column * value
    return wanted


def changed(specs: list[Any], x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The state [rows, outputs * width] after ops by one SAE, which reads x: at most a Reconstruct, then a SetFeature."""
    sae = specs[0].sae
    found = encoded(sae, x)
    wanted = found
    for spec in specs:
        wanted = targets(spec, found) if isinstance(spec, SetFeature) else wanted
    rebuilt = decoded(sae, wanted, x)
    if isinstance(specs[0], Reconstruct) and not specs[0].error:
        return rebuilt
    return state + rebuilt - decoded(sae, found, x)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_each_architecture_is_its_formula(architecture: str, normalization: str) -> None:
    x = 2 * torch.randn(23, WIDTH, generator=torch.Generator().manual_seed(1)) + 0.5
    for subtract in (True, False):
        sae = sae_of(architecture, normalization=normalization, subtract_b_dec=subtract)
        found = encoded(sae, x)
        assert 0 < int((found != 0).sum()) < found.numel()
        for mine in (sae.encode(x), sae.encode_float32(x), sae.encode(x[None])[0]):
            torch.testing.assert_close(mine, found, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(apply(Reconstruct(sae), x), decoded(sae, found, x), rtol=1e-4, atol=1e-4)
        assert apply(Reconstruct(sae, error=True), x) is x
        for mode, value in (("set", 2.5), ("add", -1.0), ("scale", 0.5), ("clamp", (None, 0.4))):
            spec = SetFeature(sae, {3: value, 11: value}, mode)  # pyright: ignore[reportArgumentType]
            torch.testing.assert_close(apply(spec, x), changed([spec], x, x), rtol=1e-4, atol=1e-4)


# -- in engines --------------------------------------------------------------------------------


def module_of(model: Any, site: str, gain: bool) -> tuple[Any, bool]:
    """(module, whether its output is the state; else it is its input, to be normed without a gain)."""
    path, end = MODEL.family.points[site.partition(".")[0]]
    assert end == "output"
    return model.get_submodule(path.format(site.partition(".")[2])), gain


@contextmanager
def by_hand(model: Any, specs: list[Any], positions: Any, prompt_len: int) -> Iterator[None]:
    """transformers' model with `changed` where the SAE of the specs writes."""
    if not specs:
        yield
        return
    sae, handles, seen = specs[0].sae, [], {}
    selected = ordinals_of(windows_of(specs[0].positions, prompt_len), positions)[:, None] >= 0
    written = (sae.site_out if sae.transcoder else sae.site).replace("{", "").replace("}", "")
    kind, _, layers = written.partition(".")
    first, _, last = layers.partition("..")

    def read(module: Any, args: Any, out: Any) -> None:
        if sae.norm_gain:
            seen["x"] = (out[0] if isinstance(out, tuple) else out)[0]
        else:
            x = args[0][0]
            seen["x"] = x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

    def write(index: int) -> Any:
        def hook(module: Any, args: Any, out: Any) -> Any:
            state = (out[0] if isinstance(out, tuple) else out)[0]
            part = slice(index * WIDTH, (index + 1) * WIDTH)
            whole = torch.zeros(len(state), sae.d_out)
            whole[:, part] = state
            x = seen["x"] if sae.transcoder else state
            new = torch.where(selected, changed(specs, x, whole)[:, part], state)[None]
            return (new, *out[1:]) if isinstance(out, tuple) else new

        return hook

    if sae.transcoder:
        module, _ = module_of(model, sae.site, sae.norm_gain)
        handles.append(module.register_forward_hook(read))
    for i, layer in enumerate(range(int(first), int(last or first) + 1)):
        module, _ = module_of(model, f"{kind}.{layer}", True)
        handles.append(module.register_forward_hook(write(i)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def transcoders() -> dict[str, SAE]:
    """Of each place: a norm's output with and without its gain, with a skip connection, and over layers."""
    skip = 0.2 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))
    across = f"mlp_out.{{0..{LAYERS - 1}}}"
    return {
        "plain": sae_of("jumprelu", 1, site="mlp_in.1", site_out="mlp_out.1", transcoder=True),
        "ungained": sae_of("standard", 2, site="mlp_in.0", site_out="mlp_out.0", transcoder=True, norm_gain=False),
        "skip": sae_of("topk", 3, site="mlp_in.1", site_out="mlp_out.1", transcoder=True, W_skip=skip),
        "across": sae_of("jumprelu", 4, LAYERS, site="mlp_in.0", site_out=across, transcoder=True),
        "stream": sae_of("gated", 6, site="attn_out.0", site_out="resid_post.1", transcoder=True),
    }


def autoencoders() -> dict[str, SAE]:
    """At the places of a layer; two at one site."""
    return {
        "layer_norm": sae_of("standard", 7, normalization="layer_norm"),
        "rescaled": sae_of("topk", 8, normalization="constant_norm_rescale", site="mlp_out.0"),
        "signed": sae_of("abstopk", 9, site="attn_out.1"),
        "jumprelu": sae_of("jumprelu", 10),
        "last": sae_of("gated", 11, site=f"resid_post.{LAYERS - 1}"),
    }


def cases(saes: dict[str, SAE]) -> list[list[Any]]:
    """The ops of each request: each SAE reconstructed, set, and both."""
    rng, found = random.Random(3), []
    for sae in saes.values():
        positions = [rng.choice(["all", "prompt", "generated", slice(None, None, 2)]) for _ in range(3)]
        features = {feature: rng.choice([0.0, 3.0, -2.0]) for feature in rng.sample(range(FEATURES), 4)}
        found.append([Reconstruct(sae, positions=positions[0])])
        found.append([SetFeature(sae, features, rng.choice(["set", "add"]), positions=positions[1])])
        found.append([Reconstruct(sae, positions=positions[2]), SetFeature(sae, features, positions=positions[2])])
        found.append(
            [
                Reconstruct(sae, error=True, positions=positions[2]),
                SetFeature(sae, features, "scale", positions=positions[2]),
            ]
        )
    return [*found, []]


SLOW = pytest.mark.slow  # Triton's interpreter takes seconds for each


@pytest.mark.thin(99)
@pytest.mark.parametrize(
    ("way", "make"),
    [
        ("functions", transcoders), ("functions", autoencoders), ("class", transcoders), ("class", autoencoders),
        ("tables", autoencoders), ("graphs", transcoders),
        pytest.param("tables", transcoders, marks=SLOW), pytest.param("graphs", autoencoders, marks=SLOW),
    ],
)  # fmt: skip
def test_engines_equal_the_formulas_on_transformers(way: str, make: Any, model_folder: Any, oracle: Any) -> None:
    """Requests with all ops in the same chunked steps of a small pool, and each token that they draw."""
    saes, model = make(), oracle("llama")
    specs = cases(saes)
    prompts = [random_ids(random.Random(i).randrange(1, 14), seed=i) for i in range(len(specs))]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    kwargs: dict[str, Any] = {"impl": "transformers"} if way == "class" else {}
    with lms("functions" if way == "class" else way, model_folder) as load:
        lm = load(
            "llama", saes=saes, reconstruct=tuple(saes), max_num_tokens=9, page_size=4, kv_cache_tokens=96, **kwargs
        )
        sites = [f"resid_post.{i}" for i in range(LAYERS)]
        with held(lm):
            handles = [
                lm.submit(prompt, params, interventions=own, capture=sites)
                for prompt, own in zip(prompts, specs, strict=True)
            ]
        outs = [handle.result(600) for handle in handles]
    for prompt, own, out in zip(prompts, specs, outs, strict=True):
        ids = (prompt + out.token_ids)[:-1]
        with torch.no_grad(), by_hand(model, own, torch.arange(len(ids)), len(prompt)), left_by_layers(model) as wanted:
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == out.token_ids, own
        for site, states in zip(sites, wanted, strict=True):
            torch.testing.assert_close(out.activations[site], states, rtol=1e-3, atol=1e-3, msg=f"{own}, {site}")


@contextmanager
def left_by_layers(model: Any) -> Iterator[list[torch.Tensor]]:
    """The states that each layer's hooks have left, [tokens, width] each."""
    found: list[torch.Tensor] = []
    handles = [
        model.get_submodule(f"{MODEL.family.layers}.{i}").register_forward_hook(
            lambda module, args, out: found.append((out[0] if isinstance(out, tuple) else out)[0])
        )
        for i in range(LAYERS)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "gpt_neox"])
def test_transcoders_of_all_kinds_of_norms_and_layers(family: str, lm_of: Any) -> None:
    """A change at `mlp_out` does not change the state at `mlp_in` of the same layer, so that plain states are the oracle."""
    lm, params, prompt = lm_of(family), SamplingParams(max_tokens=1), random_ids(9, seed=4)
    width = lm.model_spec.hidden_size
    sites = ["mlp_in.1", "mlp_out.1"]
    sae = sae_of("jumprelu", 1, width=width, site=sites[0], site_out=sites[1], transcoder=True)
    if "resid_mid" in lm.model_spec.family.missing:
        with pytest.raises(ValueError, match="have no site resid_mid, which the norm before the MLP reads"):
            lm.generate([prompt], params, interventions=[Reconstruct(sae)])
        return
    (plain,) = lm.generate([prompt], params, capture=sites)
    x, state = (plain.activations[site] for site in sites)
    for specs in (
        [Reconstruct(sae)],
        [SetFeature(sae, {2: 3.0, 5: -1.0})],
        [Reconstruct(sae), SetFeature(sae, {2: 3.0})],
    ):
        (out,) = lm.generate([prompt], params, interventions=specs, capture=sites[1:])
        torch.testing.assert_close(out.activations[sites[1]], changed(specs, x, state), rtol=1e-3, atol=1e-3)


def test_kv_is_shared_with_equal_ops_only(lm_of: Any, model_folder: Any) -> None:
    """A plain request behind a spliced one equals a fresh engine's, and equal ops start behind each other's pages."""
    lm, params, prompt = (
        lm_of("llama", page_size=4),
        SamplingParams(temperature=0, max_tokens=3),
        random_ids(17, seed=2),
    )
    coder = transcoders()["plain"].at("mlp_in.0")
    coder = dataclasses.replace(coder, site_out="mlp_out.0")
    other = dataclasses.replace(coder, W_enc=coder.W_enc * -1)
    (before,) = lm.generate([prompt], params, capture=["final_norm"])
    cached = []
    for specs in ([Reconstruct(coder)], [Reconstruct(coder)], [Reconstruct(other)], [SetFeature(coder, {1: 2.0})]):
        (out,) = lm.generate([prompt], params, interventions=specs)
        cached.append(out.num_cached_tokens)
    assert cached[0] == cached[2] == cached[3] == 0 and cached[1] == 16
    (after,) = lm.generate([prompt], params, capture=["final_norm"])
    assert torch.equal(before.activations["final_norm"], after.activations["final_norm"])


def test_drafts_change_no_token(lm_of: Any, model_folder: Any) -> None:
    """Reads of drafted positions come again where drafts are not accepted."""
    saes, params = transcoders(), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    specs = [[Reconstruct(saes["plain"])], [SetFeature(saes["across"], {1: 3.0}, positions="generated")], []]
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6] for _ in specs]
    outs = [lm_of("llama").generate(prompts, params, interventions=specs)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=256, speculative=ngram) as lm:
        outs.append(lm.generate(prompts, params, interventions=specs))
    assert [out.token_ids for out in outs[0]] == [out.token_ids for out in outs[1]]
    assert any(out.receipt.drafted for out in outs[1])


@pytest.mark.slow
def test_a_transcoder_in_half_precision_is_its_maths_on_the_state_that_came(model_folder: Any) -> None:
    coder = transcoders()["plain"].to(dtype=torch.bfloat16)
    sites, prompt, params = ["mlp_in.1", "mlp_out.1"], random_ids(9, seed=2), SamplingParams(max_tokens=1)
    with lms("tables", model_folder) as load:
        lm = load("llama", dtype="bfloat16", saes={"coder": coder}, reconstruct=("coder",))
        (plain,) = lm.generate([prompt], params, capture=sites)
        x, state = (plain.activations[site].float() for site in sites)
        for specs in ([Reconstruct("coder")], [SetFeature("coder", {2: 3.0, 5: 1.0}, "add")]):
            (out,) = lm.generate([prompt], params, interventions=specs, capture=sites[1:])
            own = [dataclasses.replace(spec, sae=coder.to(dtype=torch.float32), site="mlp_out.1") for spec in specs]
            torch.testing.assert_close(out.activations[sites[1]].float(), changed(own, x, state), rtol=0.03, atol=0.1)


# -- crosscoders -------------------------------------------------------------------------------


def crosscoder() -> SAE:
    made = sae_of("jumprelu", 12, 2, transcoder=True)
    W_enc = 0.3 * torch.randn(2 * WIDTH, FEATURES, generator=torch.Generator().manual_seed(13))
    return dataclasses.replace(made, W_enc=W_enc, site="resid_post.{0,2}", subtract_b_dec=True, transcoder=False)


@pytest.mark.parametrize("way", ["functions", "tables"])
def test_features_of_a_crosscoder_are_those_of_its_sites_side_by_side(way: str, model_folder: Any) -> None:
    """Beside plain captures of one of its sites, other requests, and in chunks."""
    sae, rng = crosscoder(), random.Random(1)
    prompts = [random_ids(rng.randrange(1, 14), seed=i) for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with lms(way, model_folder) as load:
        lm = load("llama", max_num_tokens=9, page_size=4, kv_cache_tokens=96)
        lm.saes["cross"] = sae
        captures: list[Any] = [Capture(str(sae.site), reduce=Features("cross", top_k=30)), "resid_post.1"]
        with held(lm):
            handles = [lm.submit(p, params, capture=captures) for p in prompts]
            plain = [lm.submit(p, params, capture=["resid_post.0", "resid_post.2"]) for p in prompts]
        for handle, other in zip(handles, plain, strict=True):
            found, states = handle.result(600).activations, other.result(600).activations
            assert found is not None and states is not None
            x = torch.cat((states["resid_post.0"], states["resid_post.2"]), -1)
            wanted = encoded(sae, x)
            for site in ("resid_post.0", "resid_post.2"):
                torch.testing.assert_close(found[site], wanted.topk(30, dim=-1).values, rtol=1e-4, atol=1e-4)
                assert torch.equal(found.counts[site], (wanted > 0).sum(-1))
            torch.testing.assert_close(sae.decode(sae.encode(x)), decoded(sae, wanted, x), rtol=1e-4, atol=1e-4)
            assert found["resid_post.1"].shape == states["resid_post.0"].shape


def test_crosscoders_come_from_files_with_a_dimension_for_the_sites(tmp_path: Any) -> None:
    sae = crosscoder()
    own = {"W_enc": sae.W_enc.unflatten(0, (2, WIDTH)), "W_dec": sae.W_dec.unflatten(1, (2, WIDTH))}
    own |= {"b_enc": sae.b_enc, "b_dec": sae.b_dec.view(2, WIDTH), "threshold": sae.threshold}
    learned = {"encoder.weight": own["W_enc"], "decoder.weight": own["W_dec"].movedim(1, 0).contiguous()}
    learned |= {"encoder.bias": own["b_enc"], "decoder.bias": own["b_dec"], "threshold": sae.threshold}
    for i, tensors in enumerate((own, learned)):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / f"{i}.safetensors")  # pyright: ignore[reportOptionalMemberAccess]
        read = SAE.load(tmp_path / f"{i}.safetensors", site=sae.site, subtract_b_dec=True)
        assert read.fingerprint == sae.fingerprint
    with pytest.raises(ValueError, match=r"reads resid_post\.\{0,2\} together"):
        alone = Capture("resid_post.0", reduce=Features(sae, top_k=4))
        BoundHooks.of([], MODEL, 5, DeclaredLimits(4, 400, 1 << 20), [alone], 6)
    with pytest.raises(ValueError, match="crosscoder's features are known only behind the last site"):
        SetFeature(sae, {0: 1.0})
    with pytest.raises(
        ValueError, match=r"144 values at resid_post\.\*; this model has 216 \(3 sites \* hidden_size\)"
    ):
        SAERegistry(MODEL, "cpu")["cross"] = sae.at("resid_post.*")


def test_signed_features_are_the_largest_by_magnitude(lm_of: Any) -> None:
    sae, prompt = sae_of("abstopk"), random_ids(7, seed=1)
    capture = [Capture("resid_post.1", reduce=Features(sae, top_k=4))]
    (out,) = lm_of("llama").generate([prompt], SamplingParams(max_tokens=1), capture=capture)
    (plain,) = lm_of("llama").generate([prompt], SamplingParams(max_tokens=1), capture=["resid_post.1"])
    wanted = encoded(sae, plain.activations["resid_post.1"])
    found, indexes = out.activations["resid_post.1"], out.activations.indexes["resid_post.1"]
    assert (out.activations.counts["resid_post.1"] == 5).all() and (found < 0).any()
    torch.testing.assert_close(found.abs(), wanted.abs().topk(4, dim=-1).values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, wanted.gather(1, indexes), rtol=1e-4, atol=1e-4)


# -- what is refused, and JSON ------------------------------------------------------------------


def bound(specs: list[Any], saes: dict[str, SAE] | None = None, reconstruct: tuple[str, ...] = ()) -> BoundHooks:
    """Bound as on CUDA."""
    encoders = Encoders(saes or {}, MODEL, None, reconstruct) or None
    return BoundHooks.of(specs, MODEL, 5, DeclaredLimits(8, 400, 1 << 20, device_tables=True, encoders=encoders))


def refusals() -> list[tuple[Any, str]]:
    sae, normed = sae_of("standard"), sae_of("standard", 1, normalization="layer_norm")
    coder = transcoders()["plain"]
    many = [SetFeature(coder, dict.fromkeys(range(i, i + 32), 1.0)) for i in range(4)]
    return [
        (lambda: bound([Reconstruct(sae)]), r"takes all 40 features; on CUDA .*reconstruct=\['name'\]\). This one has none"),
        (lambda: bound([Reconstruct(sae)], {"a": sae}), "reconstruct="),
        (lambda: bound([SetFeature(coder, {0: 1.0})]), "a transcoder reads mlp_in.1, and writes later; on CUDA"),
        (lambda: bound([SetFeature(normed, {0: 1.0})]), r"normalizes its input \(layer_norm\); on CUDA"),
        (lambda: bound([Steer("resid_post.1", torch.ones(WIDTH)), Reconstruct(sae)], {"a": sae}, ("a",)), "changes the state"),
        (lambda: bound([Reconstruct(sae_of("matching_pursuit"))]), "chooses features one after the other"),
        (lambda: bound([*many, SetFeature(coder, {39: 1.0})], {"a": coder}), "a request has up to 132 features"),
        (lambda: bound([], {"a": sae}, ("b",)), "saes has no 'b'; it has a"),
        (lambda: Reconstruct(sae, error=1), "error=1; expected True or False"),
        (lambda: Reconstruct("sea", site="resid_post.*"), "one site"),
        (lambda: Reconstruct(dataclasses.replace(sae, site=None)), "one that names its site"),
        (lambda: SetFeature(dataclasses.replace(coder, site_out=None), {0: 1.0}), "site_out='mlp_out.12'"),
        (lambda: bound([SetFeature(coder, {0: 1.0}, site="attn_out.1")]), "reads mlp_in.1, which is not before attn_out.1"),
        (lambda: bound([Reconstruct("sea", site="resid_post.1")]), "'sea' is a name"),
        (lambda: bound([Reconstruct(sae.at("mlp_act.1"))]), "72 values at mlp_act.1; this model has"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", range(len(refusals())))
def test_what_cannot_be_is_refused(case: int) -> None:
    make, error = refusals()[case]
    with pytest.raises(ValueError, match=error):
        make()


def test_names_and_json() -> None:
    spec = Reconstruct("sea", positions="generated", when=Gate("dark", 0.5))
    sent = json.loads(json.dumps(to_json(spec)))
    assert sent["op"] == "reconstruct" and sent["sae"] == "sea" and intervention_of(sent) == spec
    assert intervention_of({"op": "reconstruct", "sae": "sea", "error": True}).identity
    saes = SAERegistry(MODEL, "cpu")
    saes["sea"] = coder = transcoders()["across"]
    found = saes.resolved(intervention_of({"op": "setfeature", "sae": "sea", "features": {"1": 2.0}}))
    assert str(found.site) == coder.site_out and found == SetFeature(coder, {1: 2.0})


# -- loss recovered ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layer_norm", "plain"])
def test_the_loss_recovered_is_that_of_hooks_on_transformers(name: str, lm_of: Any, oracle: Any) -> None:
    sae, model = ({**autoencoders(), **transcoders()})[name], oracle("llama")
    prompts = [random_ids(length, seed=length) for length in (2, 9, 17)]
    positions = slice(1, None)
    lm = lm_of("llama")
    lm.saes["mine"] = sae
    site = str(sae.site_out or sae.site)
    sums = torch.zeros(3)
    for ids in prompts:
        at = torch.arange(len(ids))
        for i, specs in enumerate(
            ([], [Reconstruct(sae, positions=positions)], [Scale(site, 0.0, positions=positions)])
        ):
            runs = by_hand(model, specs, at, len(ids)) if i < 2 else hooked(model, specs, len(ids), lambda at=at: at)
            with torch.no_grad(), runs:
                logits = model(torch.tensor([ids])).logits[0, :-1]
            sums[i] += F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
    wanted = sums / (1 + 8 + 16)
    found = loss_recovered(lm, "mine", prompts, positions=positions)
    del lm.saes["mine"]
    torch.testing.assert_close(torch.tensor([found.loss, found.spliced, found.ablated]), wanted, rtol=1e-4, atol=1e-4)
    assert found.tokens == 25 and found.recovered == pytest.approx(
        float((wanted[2] - wanted[1]) / (wanted[2] - wanted[0])), rel=0.01
    )
    with pytest.raises(PromptError, match="prompt 1 has one token"):
        loss_recovered(lm, sae, [prompts[0], [4]])
    with pytest.raises(PromptError, match="expected a list"):
        loss_recovered(lm, sae, "text")
