"""SAEs: their files and their maths, against sae-lens (tests/golden/make_saes.py), and the registry."""

import base64
import gc
import json
import pickle
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers_paths import GOLDEN
from helpers_waits import until
from safetensors.torch import load_file, save_file

from pymllm_interp import LM, SAE, Activations, Capture, SamplingParams
from pymllm_interp.captures import Features, JacobianLens, Lens
from pymllm_interp.hooks.saes.sae import ARCHITECTURES

SAES = GOLDEN / "saes"
FOLDERS = sorted(path.parent.relative_to(SAES).as_posix() for path in SAES.rglob("expected.safetensors"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_features_and_decoded_states_equal_those_of_sae_lens(folder):
    sae, expected = SAE.load(SAES / folder), load_file(SAES / folder / "expected.safetensors")
    features = sae.encode(expected["x"])
    assert 0 < int((expected["features"] > 0).sum()) < expected["features"].numel()
    torch.testing.assert_close(sae.encode_float32(expected["x"]), expected["features"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sae.reconstruct(expected["x"]), expected["decoded"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features, expected["features"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sae.decode(features, expected["x"]), expected["decoded"], rtol=1e-5, atol=1e-5)
    assert (sae.width, sae.d_sae) == (expected["x"].shape[1], features.shape[1])
    torch.testing.assert_close(sae.encode(expected["x"][None, 0]), features[None, 0])


def test_all_architectures_have_golden_files():
    loaded = [SAE.load(SAES / folder) for folder in FOLDERS]
    kinds = {(sae.architecture, sae.transcoder, sae.W_skip is not None) for sae in loaded}
    assert {(kind, False, False) for kind in ARCHITECTURES} < kinds
    assert {(kind, True, skip) for kind in ("standard", "jumprelu") for skip in (False, True)} < kinds
    assert {sae.normalization for sae in loaded} == {"none", "layer_norm", "constant_norm_rescale"}


@pytest.mark.parametrize(
    ("folder", "site", "site_out", "norm_gain"),
    [
        ("standard", "resid_post.1", None, True),
        ("gated", "mlp_out.0", None, True),
        ("heads", "z.1", None, True),
        ("before_version_6", "resid_pre.1", None, True),
        ("transcoder", "mlp_in.1", "mlp_out.1", False),
        ("skip_transcoder", "mlp_in.1", "mlp_out.1", True),
        ("gemma-scope-2b-pt-res/layer_1/width_16k/average_l0_5", "resid_post.1", None, True),
        ("gemma-scope-2b-pt-transcoders/layer_1/width_16k/average_l0_5", "mlp_in.1", "mlp_out.1", False),
        ("gemma-scope-2-1b-pt/transcoder_all/layer_1_width_16k_l0_small_affine", "mlp_in.1", "mlp_out.1", True),
        ("Llama3_1-8B-Base-L1R-8x", "resid_post.1", None, True),
    ],
)
def test_sites_follow_the_hook_names_of_transformers(folder, site, site_out, norm_gain):
    sae = SAE.load(SAES / folder)
    assert (sae.site, sae.site_out, sae.norm_gain) == (site, site_out, norm_gain)


def test_a_skip_connection_of_gemma_scope_2_is_not_transposed(tmp_path):
    folder = tmp_path / "sae"
    shutil.copytree(SAES / "gemma-scope-2-1b-pt/transcoder_all/layer_1_width_16k_l0_small_affine", folder)
    tensors = load_file(folder / "params.safetensors")
    tensors["affine_skip_connection"] = torch.randn_like(tensors["affine_skip_connection"])
    save_file(tensors, folder / "params.safetensors")
    x = torch.randn(3, 12)
    pre = x @ tensors["w_enc"] + tensors["b_enc"]
    features = torch.where(pre > tensors["threshold"], pre.relu(), 0)
    expected = features @ tensors["w_dec"] + tensors["b_dec"] + x @ tensors["affine_skip_connection"]
    sae = SAE.load(folder)
    torch.testing.assert_close(sae.decode(sae.encode(x), x), expected)


@pytest.mark.parametrize("folder", ["gated", "batchtopk_training", "skip_transcoder"])
def test_an_object_of_sae_lens_equals_its_files(folder):
    config = json.loads((SAES / folder / "cfg.json").read_text())
    tensors = load_file(SAES / folder / "sae_weights.safetensors")
    theirs = SimpleNamespace(cfg=SimpleNamespace(to_dict=lambda: config), state_dict=lambda: tensors)
    assert SAE.load(theirs).fingerprint == SAE.load(SAES / folder).fingerprint


def test_dtype_site_and_fields_can_be_given():
    sae = SAE.load(SAES / "standard", dtype="bfloat16", site="mlp_in.0", norm_gain=False)
    assert (sae.dtype, sae.site, sae.norm_gain) == (torch.bfloat16, "mlp_in.0", False)
    assert sae.encode(torch.randn(2, 12)).dtype is torch.bfloat16
    assert sae.at("resid_mid.2").site == "resid_mid.2"
    assert sae.fingerprint != sae.at("resid_mid.2").fingerprint
    assert sae.to(torch.device("cpu")) is sae
    assert sae.to(dtype=torch.float32).dtype is torch.float32


def edited(folder, tmp_path, config=(), tensors=(), without=()):
    """A copy of a golden folder of SAELens with other content."""
    made = json.loads((SAES / folder / "cfg.json").read_text()) | dict(config)
    found = load_file(SAES / folder / "sae_weights.safetensors") | dict(tensors)
    (tmp_path / "cfg.json").write_text(json.dumps(made))
    save_file(
        {name: value for name, value in found.items() if name not in without}, tmp_path / "sae_weights.safetensors"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        ("standard", {"config": {"architecture": "temporal"}}, "a temporal SAE is not supported: its features depend on"),
        ("standard", {"config": {"activation_fn": "tanh-relu"}}, "'tanh-relu' is not supported"),
        ("standard", {"config": {"normalize_activations": "covariance_whitening"}}, "whitening of its inputs"),
        ("standard", {"config": {"normalize_activations": "expected_average_only_in"}}, "norm_scaling_factor=..."),
        ("standard", {"config": {"metadata": {"hook_name": "blocks.1.hook_mlp_in"}}}, "stream before the norm in TransformerLens"),
        ("standard", {"config": {"metadata": {}}}, "does not name its hook"),
        ("standard", {"config": {"metadata": {"hook_name": "blocks.1.attn.hook_pattern"}}}, "its hook has no site"),
        ("standard", {"config": {"hook_head_index": 2}}, "one attention head, 2"),
        ("standard", {"without": ["b_dec"]}, "has no tensor b_dec"),
        ("standard", {"tensors": {"b_enc": torch.zeros(41)}}, r"b_enc is \[41\], not \[40\]"),
        ("standard", {"tensors": {"b_enc": torch.full((40,), torch.nan)}}, "it holds NaN"),
        ("standard", {"tensors": {"extra": torch.zeros(4)}}, "tensor 'extra' is not of an SAE"),
        ("standard", {"tensors": {"scaling_factor": torch.full((40,), 2.0)}}, "scaling_factor of fine-tuning"),
        ("batchtopk_training", {"without": ["topk_threshold"]}, "threshold of its training"),
        ("topk", {"config": {"k": 41}}, "k=41; expected from 1 to 40"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_served_are_refused(folder, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SAE.load(edited(folder, tmp_path, **changes))


def test_what_a_file_lacks_can_be_given(tmp_path):
    folder = edited("standard", tmp_path, config={"normalize_activations": "expected_average_only_in", "metadata": {}})
    sae, plain = SAE.load(folder, site="resid_post.1", norm_scaling_factor=0.5), SAE.load(SAES / "standard")
    x = torch.randn(4, 12)
    # As fold_activation_norm_scaling_factor of sae-lens: b_dec is of the states before the scaling.
    expected = (((x - plain.b_dec / 0.5) * 0.5) @ plain.W_enc + plain.b_enc).relu()
    torch.testing.assert_close(sae.encode(x), expected)
    assert SAE.load(folder, site="resid_post.1", norm_scaling_factor=1).W_enc.equal(plain.W_enc)


def test_no_pickle_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for name in ("params.npz", "weights.pt"):
        with open(tmp_path / name, "wb") as file:
            if name.endswith("npz"):
                np.savez(file, W_enc=np.array([Evil()], dtype=object))
            else:
                pickle.dump({"W_enc": Evil()}, file, protocol=2)
        with pytest.raises(ValueError, match="Pickles are not run"):
            SAE.load(tmp_path / name, site="resid_post.1")
    assert not (tmp_path / "ran").exists()


def test_files_of_tensors_alone_need_a_site(tmp_path):
    plain = SAE.load(SAES / "standard")
    linear = {"encoder_linear.weight": plain.W_enc.T, "encoder_linear.bias": plain.b_enc}
    linear |= {"decoder_linear.weight": plain.W_dec.T, "decoder_linear.bias": plain.b_dec}
    torch.save(linear, tmp_path / "sae.pth")
    with pytest.raises(ValueError, match=r"SAE.load\(..., site='resid_post.12'\)"):
        SAE.load(tmp_path / "sae.pth")
    sae = SAE.load(tmp_path / "sae.pth", site="resid_post.1", subtract_b_dec=True)
    assert sae.fingerprint == SAE.load(plain, model_name="").fingerprint


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        SAE.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        SAE.load(tmp_path)
    save_file({"W_enc": torch.zeros(2, 2)}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(FileNotFoundError, match=r"cfg\.json"):
        SAE.load(tmp_path)
    with pytest.raises(ValueError, match="neither a path nor an SAE of sae_lens"):
        SAE.load(3)
    with pytest.raises(TypeError, match="did you mean norm_gain"):
        SAE.load(SAES / "standard", norm_gains=True)


def test_an_sae_shows_its_sizes_and_what_is_no_default():
    tensors = {"W_enc": torch.ones(3, 5), "b_enc": torch.ones(5), "W_dec": torch.ones(5, 3), "b_dec": torch.ones(3)}
    assert repr(SAE(**tensors)) == "SAE(3 -> 5 features)"
    shown = "SAE(3 -> 5 features, architecture='topk', site='resid_post.1', k=2)"
    assert repr(SAE(**tensors, architecture="topk", k=2, site="blocks.1.hook_resid_post")) == shown
    with pytest.raises(ValueError, match=r"b_enc is \[5\], not \[3\]: W_enc \[width, d_sae\] is \[5, 3\]"):
        SAE(**tensors | {"W_enc": torch.ones(5, 3), "W_dec": torch.ones(3, 5)})


def test_states_of_another_width_and_missing_inputs_are_refused():
    with pytest.raises(ValueError, match="the states have 11 values; this SAE reads 12"):
        SAE.load(SAES / "standard").encode(torch.randn(2, 11))
    for folder in ("skip_transcoder", "layer_norm"):
        with pytest.raises(ValueError, match=r"decode\(features, x\)"):
            SAE.load(SAES / folder).decode(torch.randn(2, 40))


# -- the registry ------------------------------------------------------------------------------


def test_the_registry_checks_saes_against_the_model(lm_of):
    tiny_lm = lm_of("llama")
    width = tiny_lm.model_spec.hidden_size

    def of(width, **fields):
        made = {
            "W_enc": torch.randn(width, 5),
            "b_enc": torch.zeros(5),
            "W_dec": torch.randn(5, width),
            "b_dec": torch.zeros(width),
        }
        return SAE(**{**made, "site": "resid_post.1", **fields})

    tiny_lm.saes["own"] = of(width)
    assert list(tiny_lm.saes) == ["own"]
    assert tiny_lm.saes["own"].site == "resid_post.1"
    for sae, message in (
        (
            of(width + 1, model_name="other"),
            rf"SAE 'x', of other, is for another model: it has {width + 1} values at resid_post.1",
        ),
        (of(width, site="resid_post.99"), "is for another model: .*there is no layer 99"),
        (of(width, site=None), "does not say which site"),
        (of(width - 1, site="q.0"), r"71 values at q\.0; this model has 72 \(num_attention_heads \* head_dim\)"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_lm.saes["x"] = sae
    with pytest.raises(ValueError, match="SAE's name is a string"):
        tiny_lm.saes[""] = of(width)
    with pytest.raises(KeyError, match="did you mean 'own'"):
        tiny_lm.saes["owm"]
    del tiny_lm.saes["own"]
    assert not tiny_lm.saes


# -- the server --------------------------------------------------------------------------------


def test_an_sae_that_a_spec_held_is_dropped_with_it(lm_of):
    lm = lm_of("llama")
    width = lm.model_spec.hidden_size
    sae = SAE(
        W_enc=torch.randn(width, 5), b_enc=torch.zeros(5), W_dec=torch.randn(5, width), b_dec=torch.zeros(width),
        site="resid_post.1",
    )  # fmt: skip
    lm.generate([[1, 2]], SamplingParams(max_tokens=2), capture=[Capture(sae.site, reduce=Features(sae, top_k=2))])
    dropped = weakref.ref(sae)
    del sae
    until(lambda: gc.collect() >= 0 and dropped() is None)


def test_a_server_has_saes_by_name_and_reductions_in_json(model_folder, tmp_path):
    from helpers_served import served

    width, prompt, params = 72, [5, 3, 8, 1], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    made = {
        "W_enc": torch.randn(width, 20),
        "b_enc": torch.zeros(20),
        "W_dec": torch.randn(20, width),
        "b_dec": torch.zeros(width),
    }
    save_file(made, tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(
        json.dumps({"architecture": "standard", "hook_name": "blocks.1.hook_resid_post"})
    )
    specs = [
        Capture("resid_post.1", reduce=Features("sea", top_k=3)),
        Capture("resid_mid.*", reduce=Lens(top_k=2, tokens=[4])),
    ]
    capture = [
        {"site": "resid_post.1", "reduce": {"type": "features", "sae": "sea", "top_k": 3}},
        {"site": "resid_mid.*", "reduce": {"type": "lens", "top_k": 2, "tokens": [4]}},
    ]
    with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=256) as lm:
        lm.saes["sea"] = tmp_path
        (wanted,) = lm.generate([prompt], params, capture=specs)
    with served(
        model_folder("llama"), "--sae", f"sea={tmp_path}", "--option", "kv_cache_tokens=256", keys=None
    ) as server:
        with server.client(None) as client:
            assert client.get("/v1/interp/capabilities").json()["saes"] == {
                "sea": {"site": "resid_post.1", "features": 20}
            }
            body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "capture": capture}
            answer = client.post("/v1/completions", json=body).json()["choices"][0]
            raw = Activations.from_bytes(base64.b64decode(answer["activations"]["data"]))
            for reduce, message in (
                ({"type": "features", "sae": "sae"}, "no SAE 'sae'; did you mean 'sea'?"),
                ({"type": "lens", "transport": "tuned"}, "a server has the logit lens alone; capture the states"),
            ):
                refused = client.post(
                    "/v1/completions", json={**body, "capture": [{"site": "resid_post.1", "reduce": reduce}]}
                )
                assert refused.status_code in (400, 422) and message in refused.text
        with LM.connect(server.url) as remote:
            (found,) = remote.generate([prompt], params, capture=specs)
            with pytest.raises(
                ValueError, match=r"sae: an? SAE is not sent to a server; give the name .*--sae NAME=PATH"
            ):
                remote.generate(
                    [prompt], params, capture=[Capture("resid_post.1", reduce=Features(SAE.load(tmp_path), top_k=3))]
                )
            transport = JacobianLens({1: torch.eye(width)})
            with pytest.raises(ValueError, match="transport: a JacobianLens is not sent to a server"):
                remote.generate([prompt], params, capture=[Capture("resid_post.1", reduce=Lens(transport=transport))])
    cut = [entry.cut for entry in wanted.receipt.captures]
    assert [entry.cut for entry in found.receipt.captures] == cut
    assert answer["receipt"]["captures"][2].get("cut") == max(cut) > 0
    for other in (found.activations, raw):
        assert list(other) == list(wanted.activations)
        for site, rows in wanted.activations.items():
            torch.testing.assert_close(other[site], rows)
            assert {**other.others(site)}.keys() == wanted.activations.others(site).keys()
            assert all(
                other.others(site)[name].shape == rows.shape for name, rows in wanted.activations.others(site).items()
            )
