"""Captures that are reduced on the device: features of SAEs, lenses, and the outputs of norms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_declared import captured_rows, lms, prompt_of, vector
from helpers_paths import GOLDEN
from helpers_saes import random_sae
from safetensors.torch import load_file, save_file

from pymllm_interp import LM, SAE, Activations, Capture, SamplingParams, Steer
from pymllm_interp.captures import Features, JacobianLens, Lens, Project, TunedLens
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.harvest import open_harvest
from pymllm_interp.hooks.captures.egress.ring import CaptureRing
from pymllm_interp.hooks.captures.reductions.reduction import Reduction
from pymllm_interp.hooks.captures.rows import CapturedRows
from pymllm_interp.hooks.site import Site, expand
from pymllm_interp.interventions import Generated  # fmt: skip
from pymllm_interp.utils.arguments import PromptError

pytest.importorskip("triton", reason="the kernels' tests need the package triton")

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
LENSES = GOLDEN / "lenses"
FAMILIES = ["llama", "gpt2", "gemma2", "gpt_neox"]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CLOSE = {"rtol": 1e-5, "atol": 1e-4}
"""Features are sums of 72 products of about 10."""


@pytest.fixture(scope="module", params=["functions", "tables"])
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM in float32: captures as functions, and through the ring."""
    with lms(request.param, model_folder) as load:
        yield load


def check_features(found: Activations, states: torch.Tensor, sae: SAE, top_k: int, close: Any = None) -> int:
    """Raise where a site's features are not those of its states. Returns the number of features that were left out."""
    assert sae.site is not None
    features = sae.encode(states)
    values, _ = features.topk(top_k, dim=-1)
    torch.testing.assert_close(found[sae.site], values.to(found[sae.site].dtype), **(close or CLOSE))
    if close is not None:
        return 0  # features next to 0, or next to each other, may change places
    assert found.counts[sae.site].tolist() == (features > 0).sum(-1).tolist()
    numbers = found.indexes[sae.site]
    assert ((numbers < 0) == (values == 0)).all()
    kept = features.gather(-1, numbers.clamp(min=0)).where(numbers >= 0, 0)
    torch.testing.assert_close(kept, values, **CLOSE)
    return int((features > 0).sum(-1).sub(top_k).clamp(min=0).sum())


# -- features ----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 37])
def test_features_are_the_largest_of_each_row_and_the_rest_is_counted(top_k: int, lm_of: Any) -> None:
    lm = lm_of("llama", kv_cache_tokens=96, page_size=4, max_num_tokens=8)  # in chunks
    sae = random_sae(lm.model_spec.hidden_size)
    prompts = [prompt_of(n, n) for n in (11, 3)]
    plain = lm.generate(prompts, GREEDY, capture=["resid_post.1"])
    found = lm.generate(prompts, GREEDY, capture=[Capture("resid_post.1", reduce=Features(sae, top_k=top_k))])
    for one, other in zip(found, plain, strict=True):
        assert one.token_ids == other.token_ids
        cut = check_features(one.activations, other.activations["resid_post.1"], sae, top_k)
        assert one.receipt.captures[0].cut == cut
        assert (cut > 0) == (top_k < 20), "random features are active by halves"
        assert (
            one.activations.positions["resid_post.1"].tolist() == other.activations.positions["resid_post.1"].tolist()
        )


def test_an_sae_is_found_by_name_when_a_request_is_submitted(lm_of: Any) -> None:
    lm = lm_of("llama")
    lm.saes["own"] = random_sae(lm.model_spec.hidden_size)
    capture = [Capture("resid_post.1", reduce=Features("own", top_k=4), positions=[-1])]
    (first,) = lm.generate([prompt_of(5, 0)], GREEDY, capture=capture)
    lm.saes["own"] = random_sae(lm.model_spec.hidden_size, seed=1)
    (second,) = lm.generate([prompt_of(5, 0)], GREEDY, capture=capture)
    assert not torch.equal(first.activations["resid_post.1"], second.activations["resid_post.1"])
    assert first.receipt.spec != second.receipt.spec, "the receipt's hash has the SAE's content"
    del lm.saes["own"]
    with pytest.raises(ValueError, match=r"Features: no SAE 'own'; there are: none \(lm.saes\['own'\] = SAE.load"):
        lm.generate([prompt_of(5, 0)], GREEDY, capture=capture)


def test_features_see_what_interventions_leave(lm_of: Any) -> None:
    lm = lm_of("llama")
    sae, steer = (
        random_sae(lm.model_spec.hidden_size),
        Steer("resid_post.1", vector(lm.model_spec.hidden_size, 3), scale=5),
    )
    specs = [Capture("resid_post.1", reduce=Features(sae, top_k=9))], ["resid_post.1"]
    found, plain = (lm.generate([prompt_of(6, 0)], GREEDY, capture=spec, interventions=[steer])[0] for spec in specs)
    check_features(found.activations, plain.activations["resid_post.1"], sae, 9)


@pytest.mark.parametrize(
    ("reduce", "site", "message"),
    [
        (lambda w: Features(random_sae(w), 4), "resid_post.0", "SAE reads resid_post.1, and this is resid_post.0"),
        (lambda w: Features(random_sae(w + 1), 4), "resid_post.1", "for another model: it has 73 values"),
        (lambda w: Features(random_sae(w), top_k=38), "resid_post.1", "top_k=38; expected from 1 to 37, the SAE's features"),
        (lambda w: Features(random_sae(w), top_k=0), "resid_post.1", "top_k=0"),
        (lambda w: Features(vector(w, 1)), "resid_post.1", "sae is a Tensor; expected an SAE"),
        (lambda w: Lens(), "mlp_out.0", "Lens: it reads the residual stream: embed, resid_pre"),
        (lambda w: Lens(top_k=98), "resid_post.1", "top_k=98; the vocabulary has 97 tokens"),
        (lambda w: Lens(tokens=[97]), "resid_post.1", "tokens holds 97; the vocabulary goes from 0 to 96"),
        (lambda w: Lens(top_k=0), "resid_post.1", "top_k=0; expected from 1 on, or tokens to look up"),
        (lambda w: Lens(tokens=[-1]), "resid_post.1", "expected token ids, from 0 on, or texts"),
        (lambda w: Lens(), "logits", "Lens: it reads states before the head"),
        (lambda w: Lens(transport=JacobianLens({0: torch.eye(w)})), "resid_post.1", "no map for resid_post.1; it has the layers 0"),
        (lambda w: Lens(transport=TunedLens({0: torch.eye(w + 1)})), "resid_pre.0", "is for another model: its width is 73"),
        (lambda w: Lens(transport=3), "resid_post.1", "expected None, a TunedLens or a JacobianLens"),
    ],
)  # fmt: skip
def test_what_cannot_be_reduced_is_refused_before_anything_runs(
    reduce: Any, site: str, message: str, lm_of: Any
) -> None:
    lm = lm_of("llama")
    with pytest.raises(ValueError, match=message):
        lm.generate([prompt_of(4, 0)], GREEDY, capture=[Capture(site, reduce=reduce(lm.model_spec.hidden_size))])


def test_a_reduction_of_ones_own_reads_each_site_by_itself(lm_of: Any) -> None:
    class ByLayer(Lens):
        def read_alike(self, site: Site) -> object:
            return Reduction.read_alike(self, site)

        def read(self, site: Site, rows: torch.Tensor, readout: Any) -> torch.Tensor:
            return super().read(site, rows * (1 + (site.layer or 0)) if site.layer != 1 else -rows, readout)

    lm, prompt = lm_of("llama"), prompt_of(5, 0)
    both = lm.generate([prompt], GREEDY, capture=[Capture("resid_post.*", reduce=ByLayer(top_k=3))])[0].activations
    for site in both:
        alone = lm.generate([prompt], GREEDY, capture=[Capture(site, reduce=ByLayer(top_k=3))])[0].activations
        torch.testing.assert_close(both[site], alone[site], **CLOSE)


def test_heads_are_refused_with_features(lm_of: Any) -> None:
    lm = lm_of("llama", inner_sites=("z",))
    sae = random_sae(lm.model_spec.width("z"), "z.1")
    found = lm.generate([prompt_of(4, 0)], GREEDY, capture=[Capture("z.1", reduce=Features(sae, top_k=3))])[
        0
    ].activations
    states = lm.generate([prompt_of(4, 0)], GREEDY, capture=["z.1"])[0].activations["z.1"]
    check_features(found, states.flatten(1), sae, 3)
    with pytest.raises(ValueError, match=r"reads whole states, and heads=\(1,\): leave heads out"):
        lm.generate([prompt_of(4, 0)], GREEDY, capture=[Capture("z.1", heads=[1], reduce=Features(sae, top_k=3))])


@pytest.mark.few("seed", 0, ways=["functions"])
@pytest.mark.few("seed", 1, ways=["tables"])
@pytest.mark.parametrize(("seed", "dtype"), [(0, "float32"), (1, "bfloat16")])
def test_random_reductions_of_random_traffic_are_those_of_the_states(seed: int, dtype: str, lm_of: Any) -> None:
    """Prompts in chunks, beside each other, with generated tokens and a ring that is too small for all at once."""
    rng = random.Random(seed)
    lm = lm_of("llama", dtype=dtype, kv_cache_tokens=160, page_size=4, max_num_tokens=8, capture_ring_bytes=1 << 17)
    width, prompts = lm.model_spec.hidden_size, [prompt_of(n, n) for n in (19, 1, 6)]
    sites = ("resid_post.1", "mlp_in.0", "mlp_out.2")
    saes = {site: random_sae(width, site, rng.randrange(5, 40), i) for i, site in enumerate(sites)}
    kinds: list[dict[str, Any]] = [
        {"site": "resid_mid.0"}, {"site": "attn_in.*"}, {"site": "resid_post.0", "reduce": "mean"},
        {"site": "attn_out.*", "dtype": "float16"}, {"site": "mlp_in.1", "reduce": "mean"},
        {"site": "resid_mid.{1,2}", "reduce": Lens(top_k=3, tokens=[5, 6])},
        *({"site": site, "reduce": Features(sae, top_k=rng.randrange(1, sae.d_sae))} for site, sae in saes.items()),
    ]  # fmt: skip
    specs = []
    for _ in prompts:
        positions = rng.choice(["all", "generated", [-1], slice(None, None, 2)])
        chosen = rng.sample(kinds, rng.randrange(3, 7))
        specs.append([Capture(**kind, positions=rng.choice(["all", positions]), missing="skip") for kind in chosen])
    outs = lm.generate(prompts, GREEDY, capture=specs)
    whole = ["resid_mid.*", "resid_post.*", "mlp_out.*", "attn_in.*", "mlp_in.*", "attn_out.*"]
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.05, "atol": 0.1}
    plain = lm.generate(prompts, GREEDY, capture=whole)
    for out, other, own in zip(outs, plain, specs, strict=True):
        assert out.token_ids == other.token_ids, "captures change nothing"
        found = out.activations
        assert set(found) == {str(site) for spec in own for site in expand(spec.site, 3, lm.model_spec.family)}
        for site in found:
            spec = next(spec for spec in own if site in map(str, expand(spec.site, 3, lm.model_spec.family)))
            rows = other.activations[site][found.positions[site]]
            if isinstance(spec.reduce, Features):
                check_features(found, rows, saes[site], spec.reduce.top_k, None if dtype == "float32" else close)
            elif isinstance(spec.reduce, Lens):
                logits = lm.lm_head(lm.model.norm(rows.to(lm.device))).float().log_softmax(-1).cpu()
                torch.testing.assert_close(found[site], logits.topk(3).values, **close)
                torch.testing.assert_close(found.token_log_probs[site], logits[:, [5, 6]], **close)
            elif spec.reduce == "mean":
                mean = rows.float().mean(0, keepdim=True)[: len(found[site])]
                torch.testing.assert_close(found[site].float(), mean, **close)
            else:
                torch.testing.assert_close(found[site], rows.to(found[site].dtype), **close)


# -- outputs of norms --------------------------------------------------------------------------


@pytest.mark.thin(12)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_norms_are_those_of_transformers(family: str, impl: str, lm_of: Any, oracle: Any) -> None:
    lm = lm_of(family, impl=impl)
    spec, model, prompt = lm.model_spec, oracle(family), prompt_of(7, 0)
    kinds = ["attn_in"] if family == "gpt_neox" else ["attn_in", "mlp_in"]
    seen: dict[str, torch.Tensor] = {}
    hooks = []
    for kind in kinds:
        for layer in range(spec.num_hidden_layers):
            module = model.get_submodule(spec.family.points[kind].module.format(layer))

            def keep(_: Any, __: Any, out: torch.Tensor, name: str = f"{kind}.{layer}") -> None:
                seen[name] = out[0].detach()

            hooks.append(module.register_forward_hook(keep))
    (out,) = lm.generate([prompt], GREEDY, capture=[f"{kind}.*" for kind in kinds])
    with torch.no_grad():
        model(torch.tensor([[*prompt, *out.token_ids[:-1]]]))
    for hook in hooks:
        hook.remove()
    assert set(out.activations) == set(seen)
    for site, states in seen.items():
        torch.testing.assert_close(out.activations[site], states, rtol=1e-4, atol=1e-4)
    rows = {entry.site: (entry.prompt_rows, entry.generated_rows) for entry in out.receipt.captures}
    assert rows == dict.fromkeys(seen, (7, 3))


def test_the_stream_and_its_norm_are_captured_together(lm_of: Any) -> None:
    lm = lm_of("llama")
    sae = random_sae(lm.model_spec.hidden_size, "mlp_in.1", norm_gain=False)
    norm = lm.model.layers[1].post_attention_layernorm
    capture = [
        "resid_mid.1",
        Capture("mlp_in.1", reduce=Features(sae, top_k=5)),
        "attn_in.1",
        Capture("resid_post.0", dtype="float16"),
    ]
    with pytest.raises(ValueError, match=r"resid_post.0 is the same state as attn_in.1, captured differently"):
        lm.generate([prompt_of(6, 0)], GREEDY, capture=capture)
    (out,) = lm.generate([prompt_of(6, 0)], GREEDY, capture=capture[:3])
    found, mid = out.activations, out.activations["resid_mid.1"]
    check_features(found, torch.nn.functional.rms_norm(mid, mid.shape[-1:], None, norm.eps), sae, 5)
    assert list(found) == ["attn_in.1", "resid_mid.1", "mlp_in.1"], "in the order of a pass"


def test_means_and_projections_of_a_norms_output(lm_of: Any) -> None:
    lm, width = lm_of("llama"), 72
    project = Project(vector(width, 1, 20), top_k=3)
    plain = lm.generate([prompt_of(6, 0)], GREEDY, capture=["mlp_in.1"])[0].activations
    for reduce, made in (
        ("mean", lambda rows: rows.mean(0, keepdim=True)),
        ("last", lambda rows: rows[-1:]),
        (Project(vector(width, 1, 2)), lambda rows: rows @ vector(width, 1, 2).T),
        (project, lambda rows: (rows @ project.directions.T).topk(3).values),
    ):
        found = lm.generate([prompt_of(6, 0)], GREEDY, capture=[Capture("mlp_in.1", reduce=reduce)])[0].activations
        for site in plain:
            torch.testing.assert_close(found[site], made(plain[site]), rtol=1e-5, atol=1e-5)


def test_norms_without_a_site_before_them_are_refused(lm_of: Any) -> None:
    with pytest.raises(ValueError, match=r"mlp_in.0: gpt_neox models have no site resid_mid.*a trace reads"):
        lm_of("gpt_neox").generate([prompt_of(4, 0)], GREEDY, capture=["mlp_in.0"])
    with pytest.raises(ValueError, match="interventions act at embed"):
        lm_of("llama").generate([prompt_of(4, 0)], GREEDY, interventions=[Steer("mlp_in.0", vector(72, 1))])


# -- lenses ------------------------------------------------------------------------------------


@pytest.mark.thin(12)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lens_at_the_last_layer_reads_the_models_own_logits(family: str, impl: str, lm_of: Any) -> None:
    lm = lm_of(family, impl=impl)
    asked = [3, 96, 0]
    lens = Lens(top_k=5, tokens=asked)
    last = f"resid_post.{lm.model_spec.num_hidden_layers - 1}"
    capture = [Capture(last, reduce=lens), Capture("final_norm", reduce=lens), "logits"]
    (out,) = lm.generate([prompt_of(9, 0)], GREEDY, capture=capture)
    found, logits = out.activations, out.activations["logits"].float()
    wanted = logits.log_softmax(-1)
    for site in (last, "final_norm"):
        rows = slice(-len(logits), None)  # positions with logits
        torch.testing.assert_close(found[site][rows], wanted.topk(5).values, rtol=1e-5, atol=1e-5)
        assert found.indexes[site][rows].equal(logits.topk(5).indices)
        assert found.indexes[site][rows][:, 0].tolist() == out.token_ids
        torch.testing.assert_close(found.token_log_probs[site][rows], wanted[:, asked], rtol=1e-5, atol=1e-5)
        ranks = [[int((row > row[token]).sum()) for token in asked] for row in logits]
        assert found.token_ranks[site][rows].tolist() == ranks


def test_a_lens_at_every_layer_is_the_final_norm_and_the_head(lm_of: Any, oracle: Any) -> None:
    lm, model = lm_of("gemma2"), oracle("gemma2")
    capture = [Capture("resid_post.*", reduce=Lens(top_k=3)), Capture("resid_mid.*", reduce=Lens(top_k=0, tokens=[5]))]
    found = lm.generate([prompt_of(6, 0)], GREEDY, capture=capture)[0].activations
    states = lm.generate([prompt_of(6, 0)], GREEDY, capture=["resid_post.*", "resid_mid.*"])[0].activations
    cap = model.config.final_logit_softcapping
    for site in states:
        logits = model.lm_head(model.model.norm(states[site]))
        log_probs = (cap * (logits / cap).tanh()).log_softmax(-1).detach()
        if "post" in site:
            torch.testing.assert_close(found[site], log_probs.topk(3).values, rtol=1e-4, atol=1e-4)
        else:
            assert found[site].shape == (9, 0)
            torch.testing.assert_close(found.token_log_probs[site], log_probs[:, [5]], rtol=1e-4, atol=1e-4)


def test_a_lens_takes_the_text_of_tokens(lm_of: Any) -> None:
    lm = lm_of("llama")
    ids = [lm.to_single_token("w5"), 7]
    named, numbered = (Capture("resid_post.*", reduce=Lens(tokens=tokens)) for tokens in (["w5", 7], ids))
    with_text, with_ids = (
        lm.generate([prompt_of(6, 0)], GREEDY, capture=[one])[0].activations for one in (named, numbered)
    )
    for site in with_ids:
        assert torch.equal(with_text.token_log_probs[site], with_ids.token_log_probs[site])
        assert torch.equal(with_text.token_ranks[site], with_ids.token_ranks[site])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["w5 w6"], r"tokens holds 'w5 w6', which is 2 tokens, \['w5', 'w6'\]: name one of them, or its id"),
        ([""], r"tokens holds '', which is 0 tokens"),
    ],
)
def test_a_lens_refuses_text_that_is_not_one_token(tokens: list[str], message: str, lm_of: Any) -> None:
    with pytest.raises(PromptError, match=message):
        lm_of("llama").generate(
            [prompt_of(6, 0)], GREEDY, capture=[Capture("resid_post.1", reduce=Lens(tokens=tokens))]
        )


def test_a_lens_takes_a_list_of_tokens() -> None:
    with pytest.raises(
        ValueError, match=r"tokens=' Paris'; expected a list of token ids or texts, such as \[' Paris'\]"
    ):
        Lens(tokens=" Paris")


def test_transports_map_a_layers_state_to_the_last_ones(lm_of: Any, tmp_path: Any) -> None:
    lm, width = lm_of("llama"), 72
    weights = {i: vector(width, 10 + i, width) * 0.05 for i in range(3)}
    biases = {i: vector(width, 20 + i) for i in range(3)}
    tuned_folder = tmp_path / "tuned"
    tuned_folder.mkdir()
    (tuned_folder / "config.json").write_text('{"d_model": 72, "bias": true, "lens_type": "linear_tuned_lens"}')
    torch.save(
        {f"{i}.{n}": t[i] for n, t in (("weight", weights), ("bias", biases)) for i in range(3)},
        tuned_folder / "params.pt",
    )
    torch.save(
        {"J": {0: weights[0], 1: weights[1]}, "source_layers": [0, 1], "d_model": width, "n_prompts": 2},
        tmp_path / "j.pt",
    )
    tuned, jacobian = TunedLens.load(tuned_folder), JacobianLens.load(tmp_path / "j.pt")
    states = lm.generate([prompt_of(5, 0)], GREEDY, capture=["resid_post.*", "resid_pre.0"])[0].activations

    def logits(h: torch.Tensor) -> torch.Tensor:
        return lm.lm_head(lm.model.norm(h.to(lm.device))).detach().log_softmax(-1).topk(4).values.cpu()

    sites = ["resid_pre.0", "resid_post.0", "resid_post.1"]
    capture = [Capture(site, reduce=Lens(top_k=4, transport=tuned)) for site in (*sites, "resid_post.2")]
    found = lm.generate([prompt_of(5, 0)], GREEDY, capture=capture)[0].activations
    for i, site in enumerate(sites):
        h = states[site]
        torch.testing.assert_close(found[site], logits(h + h @ weights[i].T + biases[i]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["resid_post.2"], logits(states["resid_post.2"]), rtol=1e-4, atol=1e-4)
    capture = [Capture("resid_post.*", reduce=Lens(top_k=4, transport=jacobian))]
    found = lm.generate([prompt_of(5, 0)], GREEDY, capture=capture)[0].activations
    for i, matrix in enumerate([weights[0], weights[1], torch.eye(width)]):
        torch.testing.assert_close(
            found[f"resid_post.{i}"], logits(states[f"resid_post.{i}"] @ matrix.T), rtol=1e-4, atol=1e-4
        )


def test_lenses_are_those_of_transformer_lens(tmp_path: Path) -> None:
    """Golden files of transformer-lens 4.3 (tests/golden/make_lenses.py)."""
    expected = load_file(LENSES / "expected.safetensors")
    jacobian = JacobianLens.load(LENSES / "jacobian.pt")
    files = {f"J.{layer}": matrix for layer, matrix in jacobian.matrices.items()}
    save_file(files, tmp_path / "jacobian.safetensors")
    assert JacobianLens.load(tmp_path / "jacobian.safetensors").fingerprint == jacobian.fingerprint
    prompt = expected["tokens"].tolist()
    vocab, layers = expected["logit"].shape[-1], len(expected["jacobian"])
    with LM(LENSES / "model", dtype="float32", device="cpu", kv_cache_tokens=64) as lm:
        for name, sites, transport in (
            ("logit", ["resid_pre.0", *(f"resid_post.{i}" for i in range(layers))], None),
            ("jacobian", [f"resid_post.{i}" for i in range(layers)], jacobian),
        ):
            lens = Lens(top_k=vocab, tokens=range(vocab), transport=transport)
            (out,) = lm.generate(
                [prompt], SamplingParams(max_tokens=0), capture=[Capture(s, reduce=lens) for s in sites]
            )
            for site, logits in zip(sites, expected[name], strict=True):
                wanted, found = logits.log_softmax(-1), out.activations
                torch.testing.assert_close(found.token_log_probs[site], wanted, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(found[site], wanted.sort(descending=True).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"J": {}}, "has no J, the matrices by layer"),
        ({"jacobian_sum": {0: torch.eye(4)}}, "has no J.*it has jacobian_sum"),
        ({"J": {0: torch.eye(4)}, "d_model": 5}, "for a width of 4, and d_model is 5"),
        ({"J": {0: torch.randn(4, 3)}}, r"there are the sizes \[3, 4\]"),
        ({"J": {0: torch.full((4, 4), torch.inf)}}, "it holds Inf"),
        ({"J": {0: Path("x")}}, "Pickles are not run"),
    ],
)  # fmt: skip
def test_files_that_hold_no_jacobian_lens_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "j.pt")
    with pytest.raises(ValueError, match=message):
        JacobianLens.load(tmp_path / "j.pt")
    with pytest.raises(FileNotFoundError, match="no such file; a tuned lens is a folder"):
        TunedLens.load(tmp_path)


def test_reduced_captures_are_saved_and_read_again(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    sae = random_sae(lm.model_spec.hidden_size)
    capture = [
        Capture("resid_post.1", reduce=Features(sae, top_k=4)),
        Capture("resid_mid.*", reduce=Lens(top_k=2, tokens=[1])),
    ]
    found = lm.generate([prompt_of(5, 0)], GREEDY, capture=capture)[0].activations
    found.save(tmp_path / "found.safetensors")
    for again in (Activations.load(tmp_path / "found.safetensors"), Activations.from_bytes(found.to_bytes())):
        assert list(again) == list(found)
        for name in ("indexes", "counts", "token_log_probs", "token_ranks", "positions", "token_ids"):
            assert set(getattr(again, name)) == set(getattr(found, name))
            assert all(getattr(again, name)[site].equal(rows) for site, rows in getattr(found, name).items())
    assert set(found.counts) == {"resid_post.1"} and set(found.token_ranks) == {f"resid_mid.{i}" for i in range(3)}


def test_a_harvest_keeps_features_with_their_counts(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    lm.saes["own"] = random_sae(lm.model_spec.hidden_size)
    documents = [prompt_of(n, n) for n in (5, 9, 1)]
    capture = [Capture("resid_post.1", reduce=Features("own", top_k=4))]
    lm.harvest(documents, capture=capture, out=tmp_path / "features", progress=False)
    harvest, params = open_harvest(tmp_path / "features"), SamplingParams(max_tokens=0)
    wanted = [lm.generate([document], params, capture=capture)[0].activations for document in documents]
    assert harvest.sites == ["resid_post.1"]
    torch.testing.assert_close(harvest["resid_post.1"][:], torch.cat([found["resid_post.1"] for found in wanted]))
    assert harvest.indexes("resid_post.1").equal(torch.cat([found.indexes["resid_post.1"] for found in wanted]))
    assert harvest.other("counts", "resid_post.1").equal(torch.cat([found.counts["resid_post.1"] for found in wanted]))
    with pytest.raises(KeyError, match=r"resid_post\.1 has no token_ranks"):
        harvest.other("token_ranks", "resid_post.1")
    lm.saes["own"] = random_sae(lm.model_spec.hidden_size, seed=1)
    with pytest.raises(ValueError, match="harvested with other settings"):
        lm.harvest(documents, capture=capture, out=tmp_path / "features", progress=False)
    del lm.saes["own"]


# -- through the ring -------------------------------------------------------------------------


class HalvedReadout:
    """A model whose norms halve, and whose head is the first 50 values."""

    def norm(self, site: Site, rows: torch.Tensor, gain: bool = True) -> torch.Tensor:
        return rows / 2 if gain else rows / 4

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :50]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_steps_of_alike_and_of_other_requests_send_what_each_alone_would(seed: int, dtype: torch.dtype) -> None:
    """Steps in which all requests are alike, some are, and prompts come between; some positions are computed twice."""
    rng, model = random.Random(seed), ModelSpec.of(CONFIGS["llama"](), dtype)
    width = model.hidden_size
    sae = random_sae(width, "resid_post.1", 24).to(dtype=dtype)
    kinds: list[list[Capture]] = [
        [Capture("resid_post.1", reduce=Features(sae, top_k=7))],
        [Capture("resid_post.*", reduce=Lens(top_k=3, tokens=[5])), Capture("attn_in.1")],
        [Capture("resid_post.1", positions="generated", reduce=Features(sae, top_k=7)), Capture("embed")],
        [Capture("resid_mid.0"), Capture("mlp_in.0", positions=Generated(2))],
        [Capture("mlp_out.2", positions="generated")],
        [Capture("attn_in.1", reduce="mean"), Capture("mlp_in.1")],
        [Capture("attn_in.1"), Capture("mlp_in.1", reduce="mean")],
    ]
    if seed == 0:
        kinds = kinds[-2:]  # of equal sizes, with their sums at other places
    chosen = [rng.choice(kinds[: rng.choice([1, 2, 7])]) for _ in range(7)]
    prompt_lens, longest = [rng.randrange(1, 9) for _ in chosen], 16

    def captures_of(specs: list[Capture], prompt_len: int) -> CapturedRows:
        return captured_rows(specs, model, prompt_len, longest, dtype, HalvedReadout())

    alone, sent = ([captures_of(specs, n) for specs, n in zip(chosen, prompt_lens, strict=True)] for _ in range(2))
    states = [
        {site: vector(width, 100 * i + site, longest).to(dtype) for site in captures.layout.by_site}
        for i, captures in enumerate(sent)
    ]
    for captures, own in zip(alone, states, strict=True):
        for site, rows in own.items():
            captures.put(0, site, rows)
    ring = CaptureRing(1 << 20, dtype, "cpu", "block")
    ring.open()
    at = [0] * len(sent)
    while min(at) < longest:
        parts, rows = [], []
        for i in (
            rng.sample(range(len(sent)), rng.randrange(1, len(sent) + 1)) if rng.random() < 0.5 else range(len(sent))
        ):
            count = min(rng.choice([1, 1, 3]) if at[i] < prompt_lens[i] else 1, longest - at[i])
            if count:
                parts.append((sent[i], at[i], count))
                rows += [(i, at[i] + k) for k in range(count)]
                at[i] = max(0, at[i] - 2) if rng.random() < 0.05 else at[i] + count
        if not parts:
            continue
        starts, stops = ring.lay_out(parts).tolist()
        for (i, position), start, stop in zip(rows, starts, stops, strict=True):
            for site, offset in sent[i].layout.offsets.items():
                if start + offset < stop:  # as kernels store it
                    ring.memory[start + offset : start + offset + width] = states[i][site][position]
        ring.send()
    ring.wait()
    for i, (found, wanted) in enumerate(zip(sent, alone, strict=True)):
        found.mark_copied(longest)
        tokens = list(range(longest))
        ours, theirs = found.result(tokens), wanted.result(tokens)
        assert list(ours) == list(theirs) and list(ours), i
        for site in ours:
            assert torch.equal(ours.positions[site], theirs.positions[site])
            torch.testing.assert_close(ours[site], theirs[site], rtol=1e-2, atol=1e-2)
            assert site not in theirs.indexes or torch.equal(ours.indexes[site], theirs.indexes[site])
    ring.close()
