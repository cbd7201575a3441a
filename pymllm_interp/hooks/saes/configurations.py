"""Reader of SAE configuration files. Returns the fields of `SAE`.

Differences between the formats:

- The site follows from `hf_hook_name`, if there is one. SAELens calls the input of Gemma 3's transcoders `hook_mlp_in`, which in
  TransformerLens is the stream before the norm.
- `hook_normalized` of TransformerLens is the normed state before the gain. Gemma Scope's transcoders for Gemma 2 read it, too.
- SAELens multiplies by the transpose of a skip connection's weight, Gemma Scope 2 by the weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from ...core.model_spec import OF_PASSES
from ..site import Site
from .pursuit import Pursuit

NORMALIZATIONS = ("none", "layer_norm", "constant_norm_rescale")
"""Normalizations of an SAE's input."""
_ARCHITECTURES = {
    "standard": "standard", "gated": "gated", "jumprelu": "jumprelu", "jump_relu": "jumprelu", "topk": "topk",
    "abstopk": "abstopk", "matching_pursuit": "matching_pursuit",
    "batchtopk": "jumprelu", "matryoshka_batchtopk": "jumprelu", "transcoder": "standard", "skip_transcoder": "standard",
    "jumprelu_transcoder": "jumprelu", "jumprelu_skip_transcoder": "jumprelu",
}  # fmt: skip
_GEMMA_SCOPE = {"-res": "resid_post", "-mlp": "mlp_out", "-att": "z", "-transcoders": "mlp_in"}
"""Ending of a repository's name -> the kind of site that its SAEs read."""


@dataclass
class SAEFile:
    """Contents of a file: fields of `SAE` beside the tensors, and tensors by the file's names."""

    fields: dict[str, Any]
    tensors: dict[str, Any]
    scale: float = 1.0
    """The input is multiplied by it, and for an autoencoder the output divided."""
    scale_out: float | None = None
    """The output of a transcoder is divided by it; None: by `scale`."""


def of_config(config: Mapping[str, Any], tensors: dict[str, Any], factor: float | None, who: str) -> SAEFile:
    """An SAE of SAELens, with the several forms of its configuration."""
    meta = {**config, **(config.get("metadata") or {})}
    kwargs = meta.get("activation_fn_kwargs") or {}
    asked = str(meta.get("architecture") or "standard")
    if "activation_fn" in meta or "activation_fn_str" in meta:  # before version 6
        activation = meta.get("activation_fn") or meta.get("activation_fn_str")
        if activation == "topk":
            asked = "topk"
        elif activation != "relu":
            raise ValueError(f"{who}: the activation function {activation!r} is not supported; relu and topk are")
    if asked == "temporal":
        raise ValueError(
            f"{who}: a temporal SAE is not supported: its features depend on the positions before, so it has no features of a state"
        )
    if asked not in _ARCHITECTURES:
        raise ValueError(f"{who}: the architecture {asked!r} is not supported; there are {', '.join(_ARCHITECTURES)}")
    architecture, transcoder = _ARCHITECTURES[asked], "transcoder" in asked
    if meta.get("hook_head_index") is not None:
        raise ValueError(f"{who}: it reads one attention head, {meta['hook_head_index']}, which is not supported")
    tensors = dict(tensors)
    tuning = tensors.pop("scaling_factor", None)
    if tuning is not None and not bool((tuning == 1).all()):
        raise ValueError(f"{who}: a scaling_factor of fine-tuning that is not folded in is not supported")
    if asked.endswith("batchtopk") and not {"threshold", "topk_threshold"} & tensors.keys():
        raise ValueError(
            f"{who}: a batch-top-k SAE needs the threshold of its training: without it, rows depend on each other"
        )
    if "W_skip" in tensors:
        tensors["W_skip"] = tensors["W_skip"].T
    if meta.get("rescale_acts_by_decoder_norm"):  # as if the decoder's rows had length 1: folded in
        lengths = tensors["W_dec"].norm(dim=-1).clamp(min=1e-8)
        tensors |= {"W_enc": tensors["W_enc"] * lengths, "b_enc": tensors["b_enc"] * lengths}
        tensors["W_dec"] = tensors["W_dec"] / lengths[:, None]
    normalization, scale = meta.get("normalize_activations") or "none", 1.0
    if normalization in (True, "expected_average_only_in"):
        found = factor if factor is not None else meta.get("norm_scaling_factor")
        if found is None:
            raise ValueError(
                f"{who}: its inputs are to be normalised by their average norm, which the file does not hold: give it, "
                "SAE.load(..., norm_scaling_factor=...), or 1 where it is folded into the weights"
            )
        normalization, scale = "none", float(found)
    elif normalization == "covariance_whitening":
        raise ValueError(
            f"{who}: the whitening of its inputs ('covariance_whitening') is not folded into its weights, and the file does not "
            "hold it: save the SAE for inference (save_inference_model), which folds it"
        )
    elif normalization not in NORMALIZATIONS:
        raise ValueError(f"{who}: the normalization {normalization!r} is not supported; there are {NORMALIZATIONS}")
    if architecture == "matching_pursuit":
        tensors = _tied(tensors, bool(meta.get("apply_b_dec_to_input", True)))
    made: dict[str, Any] = {
        "architecture": architecture, "transcoder": transcoder, "model_name": str(meta.get("model_name") or ""),
        "k": int(meta.get("k") or kwargs["k"]) if architecture in ("topk", "abstopk") else None, "normalization": normalization,
        "subtract_b_dec": bool(meta.get("apply_b_dec_to_input", True)) and not transcoder,
    }  # fmt: skip
    made |= _site_fields(meta.get("hf_hook_name"), meta.get("hook_name") or meta.get("hook_point"))
    if architecture == "matching_pursuit":
        made["pursuit"] = Pursuit(**{name: meta[name] for name in Pursuit._fields if name in meta})
    if transcoder:
        out = _site_fields(meta.get("hf_hook_name_out"), meta.get("hook_name_out"))
        made["site_out"] = out.get("site")
    return SAEFile(made, tensors, scale)


def _tied(tensors: Mapping[str, Any], with_bias: bool) -> dict[str, Any]:
    """The tensors of a matching pursuit, with the decoder as the encoder. `b_dec` counts only if the input is without it."""
    decoder, bias = tensors["W_dec"], tensors["b_dec"]
    others = {name: value for name, value in tensors.items() if name != "W_enc"}
    encoder = {"W_enc": decoder.T.contiguous(), "b_enc": decoder.new_zeros(len(decoder))}
    return others | encoder | {"b_dec": bias if with_bias else torch.zeros_like(bias)}


def _site_fields(hf_name: str | None, name: str | None) -> dict[str, Any]:
    """`site`, and `norm_gain` if it is False; or `no_site`, the reason that the SAE has no site."""
    for written in (hf_name, name):
        if not isinstance(written, str) or not written:
            continue
        normalized = re.fullmatch(r"blocks\.(\d+)\.ln([12])\.hook_normalized", written)
        if normalized:
            return {"site": f"{('attn_in', 'mlp_in')[int(normalized[2]) - 1]}.{normalized[1]}", "norm_gain": False}
        if re.fullmatch(r"blocks\.\d+\.hook_(mlp|attn)_in", written):
            return {
                "no_site": f"its hook {written} is the stream before the norm in TransformerLens (resid_mid or resid_pre), and "
                "what the norm returns for Gemma 3's transcoders (mlp_in)"
            }
        try:
            site = Site.parse(written)
            if site.kind in OF_PASSES:
                raise ValueError(f"{written} is not a state of a position")
            return {"site": str(site)}
        except ValueError as error:
            return {"no_site": f"its hook has no site: {error}"}
    return {"no_site": "the file does not name its hook"}


def gemma_scope(path: Path, tensors: dict[str, Any]) -> SAEFile:
    """Gemma Scope's SAEs and transcoders for Gemma 2. Their folders' names are their configuration."""
    layer = re.search(r"layer_(\d+)", str(path))
    kind = next(
        (
            kind
            for ending, kind in _GEMMA_SCOPE.items()
            if re.search(rf"gemma-scope-[^/]*{ending}(?=[/-]|$)", str(path))
        ),
        None,
    )
    transcoder = kind == "mlp_in"
    made: dict[str, Any] = {"architecture": "jumprelu", "subtract_b_dec": False, "transcoder": transcoder}
    size = re.search(r"gemma-scope-(\d+b)-(pt|it)", str(path))
    if size is not None:
        made["model_name"] = f"gemma-2-{size[1]}" + ("-it" if size[2] == "it" else "")
    if kind is None or layer is None:
        return SAEFile(
            {**made, "no_site": "its path names no repository and layer, such as gemma-scope-2b-pt-res/layer_12"},
            tensors,
        )
    made["site"] = f"{kind}.{layer[1]}"
    if transcoder:
        made |= {"site_out": f"mlp_out.{layer[1]}", "norm_gain": False}
    return SAEFile(made, tensors)


def gemma_scope_2(config: Mapping[str, Any], tensors: dict[str, Any], who: str) -> SAEFile:
    """Gemma Scope 2's SAEs and transcoders for Gemma 3."""
    if config.get("architecture") != "jump_relu":
        raise ValueError(f"{who}: the architecture {config.get('architecture')!r} is not Gemma Scope 2's, jump_relu")
    hook_in, hook_out = config.get("hf_hook_point_in"), config.get("hf_hook_point_out")
    transcoder = hook_out is not None and hook_out != hook_in
    made: dict[str, Any] = {"architecture": "jumprelu", "subtract_b_dec": False, "transcoder": transcoder}
    made |= {"model_name": str(config.get("model_name") or ""), **_site_fields(hook_in, None)}
    if transcoder:
        made["site_out"] = _site_fields(hook_out, None).get("site")
    if tensors.get("w_dec", torch.empty(0)).ndim == 3:
        made["site_out"], tensors = _across_layers(made["site_out"], tensors, who)
    return SAEFile(made, tensors)


def _across_layers(first: str | None, tensors: Mapping[str, Any], who: str) -> tuple[str, dict[str, Any]]:
    """(pattern of the sites, tensors) of one layer of a cross-layer transcoder, with w_dec [d_sae, layers, width].

    The first layer written is its own, `first`: only it gets the bias and the skip connection.
    """
    if first is None:
        raise ValueError(
            f"{who}: it writes to several layers, and its configuration does not name the first, hf_hook_point_out"
        )
    kind, _, layer = first.partition(".")
    decoder, bias, skip = tensors["w_dec"], tensors["b_dec"], tensors.get("affine_skip_connection")
    if not decoder[:, : int(layer)].any() and decoder.shape[1] > int(layer):  # layers before it are stored, too
        decoder = decoder[:, int(layer) :]
    layers, width = decoder.shape[1:]
    found = {**tensors, "w_dec": decoder.flatten(1), "b_dec": pad(bias, (0, (layers - 1) * width))}
    if skip is not None:
        found["affine_skip_connection"] = pad(skip, (0, (layers - 1) * width))
    return f"{kind}.{{{layer}..{int(layer) + layers - 1}}}", found


def llama_scope(config: Mapping[str, Any], tensors: dict[str, Any]) -> SAEFile:
    """Llama Scope's SAEs and transcoders, which were trained on states of length sqrt(width) on average."""
    norms, width = config["dataset_average_activation_norm"], int(config["d_model"])
    scale, hook_in, hook_out = sqrt(width) / norms["in"], config["hook_point_in"], config.get("hook_point_out")
    transcoder = hook_out is not None and hook_out != hook_in
    made: dict[str, Any] = {"architecture": "jumprelu", "subtract_b_dec": False, "transcoder": transcoder}
    made |= {"model_name": "Llama-3.1-8B", **_site_fields(None, hook_in)}
    scale_out = None
    if transcoder:
        made["site_out"], scale_out = _site_fields(None, hook_out).get("site"), sqrt(width) / norms["out"]
    # SAELens multiplies the threshold, too.
    threshold = torch.tensor(float(config["jump_relu_threshold"]) * scale, dtype=tensors["encoder.bias"].dtype)
    return SAEFile(made, {**tensors, "threshold": threshold}, scale, scale_out)
