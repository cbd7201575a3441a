"""The files that SAEs come in. No pickle is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...utils.arguments import shown
from ...utils.device import DTYPES
from ...utils.files.checked_files import check_safetensors, check_zip, read_json
from ..vectors.files import checked_vector, load_torch
from .configurations import SAEFile, gemma_scope, gemma_scope_2, llama_scope, of_config

Tensors = dict[str, Any]
_TRANSPOSED = {
    "encoder.weight": "W_enc", "encoder_linear.weight": "W_enc", "decoder.weight": "W_dec", "decoder_linear.weight": "W_dec",
}  # fmt: skip
_RENAMED = {
    "w_enc": "W_enc", "w_dec": "W_dec", "w_skip": "W_skip", "encoder.bias": "b_enc", "encoder_linear.bias": "b_enc",
    "decoder.bias": "b_dec", "decoder_linear.bias": "b_dec", "affine_skip_connection": "W_skip", "bias": "b_dec",
    "b_gate": "b_enc", "topk_threshold": "threshold",
}  # fmt: skip
"""Names of tensors -> names in `SAE`. The first are stored transposed, as torch.nn.Linear's weights are."""
_TENSORS = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold", "r_mag", "b_mag", "W_skip")


def read_fields(
    source: Any, dtype: torch.dtype | str | None, norm_scaling_factor: float | None, changes: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The fields of an `SAE`, and a name of the source for messages. See `SAE.load`.

    Args:
        source: see `SAE.load`; an `SAEFile` is accepted instead of an SAE.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"SAE.load: dtype={dtype!r}; expected one of {', '.join(sorted(DTYPES))}")
        dtype = DTYPES[dtype]
    if isinstance(source, SAEFile):
        who, found = "SAE", source
    elif isinstance(source, str | Path):
        who, found = str(source), _read(Path(source), norm_scaling_factor)
    elif hasattr(source, "cfg") and hasattr(source, "state_dict"):
        who = type(source).__name__
        found = of_config(source.cfg.to_dict(), dict(source.state_dict()), norm_scaling_factor, who)
    else:
        raise ValueError(f"SAE.load: {shown(source)} is neither a path nor an SAE of sae_lens")
    made: dict[str, Any] = found.fields | _named(found, who, dtype) | dict(changes)
    if made.get("site") is None and (reason := made.pop("no_site", "")):
        raise ValueError(f"{who}: {reason}; name the site that it reads, as in SAE.load(..., site='resid_post.12')")
    made.pop("no_site", None)
    return who, made


def _named(found: SAEFile, who: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Tensors by the names of `SAE`'s fields, scaled."""
    given, tensors = found.tensors, {}
    for name, value in given.items():
        own = _TRANSPOSED.get(name) or _RENAMED.get(name, name)
        if own not in _TENSORS:
            raise ValueError(
                f"{who}: the tensor {name!r} is not of an SAE that is supported; they have {', '.join(_names())}"
            )
        tensor = _checked(value, f"{who}, {name}", dtype)
        if own in _OF_SITES and tensor.ndim == _OF_SITES[own]:
            tensors[own] = _side_by_side(own, name, tensor)
        else:
            tensors[own] = tensor.T.contiguous() if name in _TRANSPOSED else tensor
    for name in ("W_enc", "b_enc", "W_dec", "b_dec") if given else ():
        if name not in tensors:
            raise ValueError(f"{who} has no tensor {name}; it has {', '.join(sorted(given))}")
    if "threshold" in tensors and not tensors["threshold"].ndim:  # one for all features
        tensors["threshold"] = tensors["threshold"].expand(len(tensors["b_enc"])).clone()
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:  # SAELens keeps thresholds in float64 while it trains
        own = tensors["W_enc"].dtype
        tensors = {name: tensor.to(own) for name, tensor in tensors.items()}
    if found.scale != 1.0:
        out = found.scale if found.scale_out is None else found.scale_out
        tensors |= {
            "W_enc": tensors["W_enc"] * found.scale,
            "W_dec": tensors["W_dec"] / out,
            "b_dec": tensors["b_dec"] / out,
        }
    return {name: _finite(tensor, f"{who}, {name}") for name, tensor in tensors.items()}


_OF_SITES = {"W_enc": 3, "W_dec": 3, "b_dec": 2}
"""Tensors of a crosscoder -> their dimensions, one of which is the sites."""


def _side_by_side(own: str, name: str, tensor: Tensor) -> Tensor:
    """A crosscoder's tensor for the concatenation of its sites' states.

    Encoders are [sites, width, d_sae]. Decoders are [d_sae, sites, width], or under `decoder.weight` [sites, d_sae, width].
    """
    if own == "W_dec":
        return (tensor.movedim(0, 1) if name == "decoder.weight" else tensor).flatten(1)
    return tensor.flatten(0, 1) if own == "W_enc" else tensor.flatten()


def _names() -> list[str]:
    return sorted({*_TRANSPOSED, *_RENAMED, *_TENSORS})


def _checked(tensor: Any, who: str, dtype: torch.dtype | None) -> Tensor:
    """A finite tensor on the CPU, in a dtype; None: its own floating dtype, or else float32."""
    found = checked_vector(tensor, who, (0, 1, 2, 3))
    own = tensor.dtype if isinstance(tensor, Tensor) and tensor.is_floating_point() else torch.float32
    return _finite(found.to(dtype or own), who)


def _finite(tensor: Tensor, who: str) -> Tensor:
    """The tensor, if a conversion or a scale has left its numbers finite."""
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{who}: numbers beyond {tensor.dtype}, after the scale of the file's configuration")
    return tensor


# -- files -------------------------------------------------------------------------------


def _read(path: Path, factor: float | None) -> SAEFile:
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or folder; files of the hub come by huggingface_hub.snapshot_download"
        )
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        for name in ("sae_weights.safetensors", "params.safetensors", "params.npz", "checkpoints/final.safetensors"):
            if (path / name).is_file():
                path = path / name
                break
        else:
            raise FileNotFoundError(
                f"{path} holds no weights: sae_weights.safetensors (SAELens), params.npz or params.safetensors (Gemma Scope), or "
                "checkpoints/final.safetensors (Llama Scope)"
            )
    tensors, who = read_tensors(path), str(path)
    if path.name == "sae_weights.safetensors":
        return of_config(_json(folder / "cfg.json"), tensors, factor, who)
    if path.name == "params.npz":
        return gemma_scope(path, tensors)
    if path.name == "params.safetensors":
        return gemma_scope_2(_json(folder / "config.json"), tensors, who)
    if path.name == "final.safetensors":
        return llama_scope(_json((path.parent.parent) / "hyperparams.json"), tensors)
    return _bare(tensors)


def read_tensors(path: Path) -> Tensors:
    """The tensors of a file by name: .safetensors, .npz, or .pt and .pth with nothing but tensors.
    Raises ValueError: another suffix, a damaged file, or one that needs pickle."""
    try:
        if path.suffix == ".safetensors":
            check_safetensors(path)
            return dict(load_file(path))
        if path.suffix == ".npz":
            check_zip(path)
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        if path.suffix in (".pt", ".pth"):
            return dict(load_torch(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or it is damaged ({error})") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{path} does not hold tensors alone, or it is damaged ({error}). Pickles are not run: if you trust the file, load it "
            "yourself, and save its tensors as .safetensors"
        ) from error
    raise ValueError(f"{path}: tensors are read from .safetensors, .npz, .pt and .pth files")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, which says what the weights beside it are")
    return read_json(path)


def _bare(tensors: Tensors) -> SAEFile:
    """A file with tensors only: their names determine the architecture."""
    made: dict[str, Any] = {
        "architecture": "standard",
        "subtract_b_dec": False,
        "no_site": "the file does not name its hook",
    }
    if "threshold" in tensors:
        made["architecture"] = "jumprelu"
    elif "r_mag" in tensors:
        made["architecture"] = "gated"
    return SAEFile(made, tensors)
