"""Write small random SAEs, and what sae-lens makes of them, to tests/golden/saes.

sae-lens needs transformer-lens < 4, so it runs in an environment of its own:

    python -m venv saeenv
    saeenv/bin/pip install torch==2.13.0 sae-lens==6.54
    saeenv/bin/python tests/golden/make_saes.py

Each folder holds the files of one SAE, and expected.safetensors: `x` [rows, width], `features` of it, and `decoded` (with the
skip connection, where there is one).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import sae_lens
import torch
from sae_lens.loading import pretrained_sae_loaders as loaders
from safetensors.torch import save_file

WIDTH, D_SAE, ROWS, MODEL = 12, 40, 9, {"model_name": "tiny"}
OUT = Path(__file__).parent / "saes"


def randomized(sae: Any) -> Any:
    """The SAE with random tensors: those that are made are zeros, or tied."""
    with torch.no_grad():
        for name, tensor in sae.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * (0.3 if tensor.ndim > 1 else 0.1))
            if name == "threshold":
                tensor.abs_().add_(0.2)
    return sae


def write(name: str, sae: Any, save: Any = None, heads: int = 0) -> None:
    """The files of an SAE, by `save(folder)`, or as sae-lens saves them; and what it makes of random states."""
    folder = OUT / name
    folder.mkdir(parents=True)
    (save or sae.save_model)(folder)
    x = torch.randn(ROWS, WIDTH) * 2 + 0.5
    given = x.unflatten(-1, (heads, -1)) if heads else x
    with torch.no_grad():
        features = sae.encode(given)
        decoded = sae(given)  # and not decode: it leaves skip connections out
    save_file({"x": x, "features": features, "decoded": decoded.reshape(ROWS, -1)}, folder / "expected.safetensors")


def config(hook: str = "blocks.1.hook_resid_post", **others: Any) -> dict[str, Any]:
    meta = {"hook_name": hook, **MODEL}
    meta |= {key: others.pop(key) for key in ("hf_hook_name", "hf_hook_name_out", "hook_name_out") if key in others}
    return {"d_in": WIDTH, "d_sae": D_SAE, **others, "metadata": sae_lens.saes.sae.SAEMetadata(**meta)}


def write_saelens() -> None:
    """Files of SAELens."""
    lens = sae_lens
    write("standard", randomized(lens.StandardSAE(lens.StandardSAEConfig(**config()))))
    for name in ("layer_norm", "constant_norm_rescale"):
        write(name, randomized(lens.StandardSAE(lens.StandardSAEConfig(**config(normalize_activations=name)))))
    write("gated", randomized(lens.GatedSAE(lens.GatedSAEConfig(**config("blocks.0.hook_mlp_out")))))
    plain = config(apply_b_dec_to_input=False)
    write("jumprelu", randomized(lens.JumpReLUSAE(lens.JumpReLUSAEConfig(**plain))))
    write("topk", randomized(lens.TopKSAE(lens.TopKSAEConfig(**config(k=5)))))
    write(
        "topk_rescaled", randomized(lens.TopKSAE(lens.TopKSAEConfig(**config(k=5, rescale_acts_by_decoder_norm=True))))
    )
    heads = config("blocks.1.attn.hook_z", reshape_activations="hook_z")
    write("heads", randomized(lens.StandardSAE(lens.StandardSAEConfig(**heads))), heads=3)

    batch = randomized(lens.BatchTopKTrainingSAE(lens.BatchTopKTrainingSAEConfig(**config(k=5))))
    batch.topk_threshold = torch.tensor(0.8, dtype=torch.float64)
    folder = OUT / "scratch"
    batch.save_inference_model(folder)
    saved = lens.SAE.load_from_disk(folder)
    write("batchtopk", saved)  # as they are shared: as jumprelu
    write("batchtopk_training", saved, batch.save_model)
    shutil.rmtree(folder)

    across = {"apply_b_dec_to_input": False, "d_out": WIDTH, "hook_name_out": "blocks.1.hook_mlp_out"}
    hf = {"hf_hook_name": "model.layers.1.pre_feedforward_layernorm.output"}
    hf["hf_hook_name_out"] = "model.layers.1.post_feedforward_layernorm.output"
    mlp_in = config("blocks.1.hook_mlp_in", **across, **hf)
    write(
        "transcoder",
        randomized(lens.Transcoder(lens.TranscoderConfig(**config("blocks.1.ln2.hook_normalized", **across)))),
    )
    write("skip_transcoder", randomized(lens.SkipTranscoder(lens.SkipTranscoderConfig(**mlp_in))))
    write("jumprelu_transcoder", randomized(lens.JumpReLUTranscoder(lens.JumpReLUTranscoderConfig(**mlp_in))))
    mlp_in = config("blocks.1.hook_mlp_in", **across, **hf)
    skip = lens.JumpReLUSkipTranscoder(lens.JumpReLUSkipTranscoderConfig(**mlp_in))
    write("jumprelu_skip_transcoder", randomized(skip))


def write_others() -> None:
    """SAEs of SAELens whose features are not a function of pre-activations one by one."""
    lens = sae_lens
    write("abstopk", randomized(lens.AbsTopKSAE(lens.AbsTopKSAEConfig(**config(k=5)))))
    for name, biased in (("matching_pursuit", True), ("matching_pursuit_unbiased", False)):
        pursuit = lens.MatchingPursuitSAEConfig(
            **config(apply_b_dec_to_input=biased, residual_threshold=0.5, max_iterations=8)
        )
        sae = randomized(lens.MatchingPursuitSAE(pursuit))
        sae.W_dec.data /= sae.W_dec.data.norm(dim=-1, keepdim=True)
        write(name, sae)


def write_old() -> None:
    """Configurations of SAELens before version 6."""
    old = {
        "d_in": WIDTH,
        "d_sae": D_SAE,
        "dtype": "float32",
        "model_name": "tiny",
        "hook_point": "blocks.1.hook_resid_pre",
    }
    old |= {
        "hook_point_layer": 1,
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 6},
        "normalize_activations": False,
    }
    sae = randomized(sae_lens.TopKSAE(sae_lens.TopKSAEConfig(**config(k=6))))

    def save(folder: Path) -> None:
        save_file({**sae.state_dict(), "scaling_factor": torch.ones(D_SAE)}, folder / "sae_weights.safetensors")
        (folder / "cfg.json").write_text(json.dumps(old))

    folder = OUT / "scratch"
    folder.mkdir()
    save(folder)
    write("before_version_6", sae_lens.SAE.load_from_disk(folder), save)
    shutil.rmtree(folder)


def tensors() -> dict[str, torch.Tensor]:
    """Of a jumprelu SAE, by Gemma Scope's names."""
    made = {"w_enc": torch.randn(WIDTH, D_SAE) * 0.3, "w_dec": torch.randn(D_SAE, WIDTH) * 0.3}
    return {
        **made,
        "b_enc": torch.randn(D_SAE) * 0.1,
        "b_dec": torch.randn(WIDTH) * 0.1,
        "threshold": torch.rand(D_SAE) + 0.1,
    }


def loaded(loader: Any, repo: str, folder: str, root: Path, **overrides: Any) -> Any:
    """The SAE that a loader of sae-lens makes of local files."""
    loaders.hf_hub_download = lambda repo_id, filename, subfolder="", **_: str(root / subfolder / filename)
    if hasattr(loaders, "get_safetensors_tensor_shapes"):
        loaders.get_safetensors_tensor_shapes = lambda repo_id, filename: {
            name: list(tensor.shape) for name, tensor in loaders.load_safetensors_weights(root / filename).items()
        }
    made, state, _ = loader(
        repo, folder, "cpu", False, {"d_in": WIDTH, "d_sae": D_SAE, "dtype": "float32", **overrides}
    )
    made = loaders.handle_config_defaulting(made)
    sae = sae_lens.SAE.from_dict(made)
    sae.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return sae


def write_scopes() -> None:
    """Files of Gemma Scope, Gemma Scope 2 and Llama Scope, as sae-lens reads them."""
    root = OUT / "scratch"
    for repo, loader, extra in (
        ("gemma-scope-2b-pt-res", loaders.gemma_2_sae_huggingface_loader, {}),
        ("gemma-scope-2b-pt-transcoders", loaders.gemma_2_transcoder_huggingface_loader, {"d_out": WIDTH}),
    ):
        folder = "layer_1/width_16k/average_l0_5"
        found = {name.replace("w_", "W_"): tensor.numpy() for name, tensor in tensors().items()}

        def save(path: Path, found: dict[str, Any] = found) -> None:
            path.mkdir(parents=True, exist_ok=True)
            np.savez(path / "params.npz", **found)

        save(root / folder)
        write(f"{repo}/{folder}", loaded(loader, f"google/{repo}", folder, root, **extra), save)

    for name, kind in (("resid_post", "resid_post"), ("transcoder_all", "transcoder")):
        folder, found = f"{name}/layer_1_width_16k_l0_small_affine", tensors()
        hook = {"resid_post": "model.layers.1.output"}.get(kind, "model.layers.1.pre_feedforward_layernorm.output")
        about = {"architecture": "jump_relu", "model_name": "gemma-v3-1b-pt", "hf_hook_point_in": hook}
        if kind == "transcoder":
            about |= {
                "hf_hook_point_out": "model.layers.1.post_feedforward_layernorm.output",
                "affine_connection": True,
            }
            # Symmetric: sae-lens multiplies by its transpose, and Gemma Scope 2 by it.
            weight = torch.randn(WIDTH, WIDTH) * 0.2
            found["affine_skip_connection"] = weight + weight.T

        def save_2(path: Path, found: dict[str, Any] = found, about: dict[str, Any] = about) -> None:
            path.mkdir(parents=True, exist_ok=True)
            save_file(found, path / "params.safetensors")
            (path / "config.json").write_text(json.dumps(about))

        save_2(root / folder)
        sae = loaded(loaders.gemma_3_sae_huggingface_loader, "google/gemma-scope-2-1b-pt", folder, root)
        write(f"gemma-scope-2-1b-pt/{folder}", sae, save_2)

    folder, found = "Llama3_1-8B-Base-L1R-8x", tensors()
    weights = {
        "encoder.weight": found["w_enc"].T.contiguous(), "encoder.bias": found["b_enc"],
        "decoder.weight": found["w_dec"].T.contiguous(), "decoder.bias": found["b_dec"],
    }  # fmt: skip
    about = {"d_model": WIDTH, "d_sae": D_SAE, "jump_relu_threshold": 0.4, "hook_point_in": "blocks.1.hook_resid_post"}
    about |= {"hook_point_out": "blocks.1.hook_resid_post", "dataset_average_activation_norm": {"in": 7.5, "out": 7.5}}

    def save_llama(path: Path) -> None:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        save_file(weights, path / "checkpoints" / "final.safetensors")
        (path / "hyperparams.json").write_text(json.dumps(about))

    save_llama(root / folder)
    sae = loaded(loaders.llama_scope_sae_huggingface_loader, "fnlp/Llama3_1-8B-Base-LXR-8x", folder, root)
    sae.fold_activation_norm_scaling_factor(WIDTH**0.5 / 7.5)
    write(folder, sae, save_llama)
    shutil.rmtree(root)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    torch.manual_seed(0)
    write_saelens()
    write_old()
    write_scopes()
    write_others()
    print(f"{len(list(OUT.rglob('expected.safetensors')))} SAEs in {OUT}")
