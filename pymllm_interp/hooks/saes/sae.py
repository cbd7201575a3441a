"""`SAE`: a sparse autoencoder or a transcoder.

    sae = SAE.load("gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82")
    features = sae.encode(x)                       # [..., d_sae], of states x [..., width]
    x_hat = sae.decode(features)                   # [..., d_out]
    lm.saes["sea"] = sae                           # for captures and interventions that give a name

With the input ``x``, the pre-activations are ``p = (n(x) - b_dec) @ W_enc + b_enc``, where `n` is the normalization, if there is
one. Transcoders, and SAEs with ``subtract_b_dec=False``, leave `b_dec` out. The features are

- `standard`: ``relu(p)``
- `jumprelu`: ``relu(p) * (p > threshold)``. A batch-top-k SAE is one, with the threshold that its training kept.
- `gated`: ``relu((p - b_enc) * exp(r_mag) + b_mag) * (p > 0)``, where `b_enc` is the bias of the gate
- `topk`: ``relu(p)`` of the `k` largest, 0 for all others
- `abstopk`: `p` of the `k` largest by magnitude, 0 for all others
- `matching_pursuit`: found one after the other, with the decoder as the encoder (`pursuit.py`)

A crosscoder reads several sites, and a cross-layer transcoder writes several. Their site is a pattern, ``resid_post.{3,7}``. Their
state is the concatenation of the states there, in the order of the layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from ...layers.invariant import batch_invariant, invariant_device, product
from ...utils.arguments import check_names
from ...utils.cached_properties import version_of, versioned_property
from ...utils.upload import flat_bytes
from ..site import Site, canonical, is_several
from .configurations import NORMALIZATIONS, SAEFile
from .formats import read_fields
from .pursuit import Pursuit, pursue

Architecture = Literal["standard", "jumprelu", "gated", "topk", "abstopk", "matching_pursuit"]
ARCHITECTURES = get_args(Architecture)
_EPSILON = 1e-5
"""Epsilon of layer_norm, as in SAELens."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SAE:
    """A sparse autoencoder, or a transcoder. Tensors have one floating dtype, and are on one device.

    Raises:
        ValueError: shapes that do not fit each other, NaN or Inf, or an unknown architecture, normalization or site.
    """

    W_enc: Tensor = field(repr=False)
    """[width, d_sae]"""
    b_enc: Tensor = field(repr=False)
    """[d_sae]"""
    W_dec: Tensor = field(repr=False)
    """[d_sae, d_out]"""
    b_dec: Tensor = field(repr=False)
    """[d_out]"""
    architecture: Architecture = "standard"
    site: str | None = None
    """The site that it reads, or a pattern of several; None: it was not told."""
    site_out: str | None = None
    """The site that a transcoder predicts, or a pattern of several."""
    transcoder: bool = False
    """Whether it predicts another state than the one it reads."""
    threshold: Tensor | None = field(default=None, repr=False)
    """[d_sae] of `jumprelu`."""
    r_mag: Tensor | None = field(default=None, repr=False)
    """[d_sae] of `gated`."""
    b_mag: Tensor | None = field(default=None, repr=False)
    """[d_sae] of `gated`."""
    k: int | None = None
    """Number of active features of `topk` and `abstopk`."""
    pursuit: Pursuit | None = None
    """End of a `matching_pursuit`."""
    W_skip: Tensor | None = field(default=None, repr=False)
    """[width, d_out] of a transcoder with a skip connection, which adds ``x @ W_skip``."""
    subtract_b_dec: bool = True
    """Whether the encoder subtracts `b_dec` from its input."""
    normalization: str = "none"
    """Normalization of the input: "none", "layer_norm" or "constant_norm_rescale". An autoencoder's output undoes it."""
    norm_gain: bool = True
    """Whether the norm's gain applies at `attn_in` and `mlp_in`. False: states are normed without it."""
    model_name: str = ""
    """The model that it was trained on, as the file names it."""
    feature_names: Mapping[int, str] = field(default_factory=dict, repr=False)
    """Feature -> its name, for plots: ``SAE.load(path, feature_names={7: "the sea"})``. Not part of the fingerprint."""

    def __repr__(self) -> str:
        """Its sizes, and the fields that are not the defaults."""
        told = {part.name: getattr(self, part.name) for part in fields(self) if part.repr}
        told = {name: value for name, value in told.items() if value != getattr(type(self), name)}
        return f"SAE({', '.join([f'{self.width} -> {self.d_sae} features', *(f'{n}={v!r}' for n, v in told.items())])})"

    def __post_init__(self) -> None:
        self._check(
            self.architecture in ARCHITECTURES, f"architecture {self.architecture!r}; there are {ARCHITECTURES}"
        )
        self._check(
            self.normalization in NORMALIZATIONS, f"normalization {self.normalization!r}; there are {NORMALIZATIONS}"
        )
        for name in ("site", "site_out"):
            if getattr(self, name) is not None:
                found = canonical(getattr(self, name))
                object.__setattr__(self, name, found if is_several(found) else str(Site.parse(found)))
        self._check(self.W_enc.ndim == 2 and self.W_dec.ndim == 2, "W_enc and W_dec have two dimensions")
        width, d_sae, d_out = self.width, self.d_sae, self.d_out
        shapes: dict[str, tuple[int, ...]] = {
            "W_enc": (width, d_sae), "b_enc": (d_sae,), "W_dec": (d_sae, d_out), "b_dec": (d_out,), "threshold": (d_sae,),
            "r_mag": (d_sae,), "b_mag": (d_sae,), "W_skip": (width, d_out),
        }  # fmt: skip
        for name, tensor in self.tensors():
            self._check(
                tuple(tensor.shape) == shapes[name],
                f"{name} is {list(tensor.shape)}, not {list(shapes[name])}: W_enc [width, d_sae] is {[width, d_sae]}",
            )
            self._check(
                tensor.is_floating_point() and tensor.dtype is self.dtype, f"{name} is {tensor.dtype}, not {self.dtype}"
            )
        needed = {
            "jumprelu": ("threshold",), "gated": ("r_mag", "b_mag"), "topk": ("k",), "abstopk": ("k",),
            "matching_pursuit": ("pursuit",),
        }.get(self.architecture, ())  # fmt: skip
        for name in needed:
            self._check(getattr(self, name) is not None, f"an architecture {self.architecture!r} needs {name}")
        if self.k is not None:
            self._check(1 <= self.k <= d_sae, f"k={self.k}; expected from 1 to {d_sae}, its features")
        if not self.transcoder:
            self._check(width == d_out, f"it reads {width} values and writes {d_out}; only a transcoder may")
            self._check(self.W_skip is None, "only a transcoder has a skip connection")

    # -- files ---------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        source: str | Path | Any,
        *,
        site: str | Site | None = None,
        dtype: torch.dtype | str | None = None,
        norm_scaling_factor: float | None = None,
        **fields: Any,
    ) -> SAE:
        """Read an SAE from a local file or folder. No pickle is run.

        Args:
            source: a folder of SAELens (cfg.json, sae_weights.safetensors) or Gemma Scope (params.npz). Or a folder of Gemma
                Scope 2 (config.json, params.safetensors) or Llama Scope (hyperparams.json, checkpoints/final.safetensors). Or
                a file of tensors (.safetensors, .npz, or .pt with tensors only), or an SAE of the package sae_lens.
            site: site that it reads, instead of the file's.
            dtype: dtype of its tensors and of `encode`; None: the file's.
            norm_scaling_factor: factor of inputs for SAELens' "expected_average_only_in". 1 if it is folded into the weights.
            fields: fields of `SAE` that replace the file's (``norm_gain=False``).

        Raises:
            FileNotFoundError: no such file or folder, or no weights in it.
            ValueError: an unsupported architecture, a hook without a site, tensors that do not fit, or a file that needs pickle.
        """
        known = list(cls.__dataclass_fields__)
        check_names("SAE.load", fields, known, {})
        if isinstance(source, SAE):
            source = SAEFile({name: getattr(source, name) for name in known}, {})
        who, made = read_fields(
            source, dtype, norm_scaling_factor, fields if site is None else {**fields, "site": str(site)}
        )
        try:
            return cls(**made)
        except ValueError as error:
            raise ValueError(f"{who}: {error}") from None

    # -- facts ---------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Values of a state that it reads."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.W_dec.shape[0]

    @property
    def d_out(self) -> int:
        """Values of a state that it writes."""
        return self.W_dec.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its tensors and of `encode`."""
        return self.W_enc.dtype

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return self.W_enc.device

    @property
    def encodes_whole(self) -> bool:
        """Whether it must encode all features, or another state, to know one: no column of the encoder suffices."""
        several = self.architecture in ("topk", "abstopk", "matching_pursuit") or self.normalization != "none"
        return several or self.transcoder

    @property
    def version(self) -> int:
        """Grows with every edit of its tensors in place that torch counts."""
        return version_of(tensor for _, tensor in self.tensors())

    @versioned_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, as it is now: 64 hexadecimal digits."""
        digest = hashlib.sha256()
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name == "feature_names" or (part.name == "pursuit" and value is None):
                continue
            if isinstance(value, Tensor):
                digest.update(f"|{part.name}={tuple(value.shape)}, {value.dtype}".encode())
                digest.update(flat_bytes(value.detach().cpu()).numpy().data)
            else:
                digest.update(f"|{part.name}={value!r}".encode())
        return digest.hexdigest()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(field, tensor) of all tensors."""
        for part in fields(self):
            if isinstance(value := getattr(self, part.name), Tensor):
                yield part.name, value

    def at(self, site: str | Site) -> Self:
        """The same SAE for another site. The tensors are shared."""
        return replace(self, site=str(site))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The SAE on a device, and in a dtype. Itself if nothing changes."""
        moved: dict[str, Any] = {name: tensor.to(device, dtype) for name, tensor in self.tensors()}
        if all(moved[name] is tensor for name, tensor in self.tensors()):
            return self
        return replace(self, **moved)

    # -- maths ---------------------------------------------------------------------------

    def encode(self, x: Tensor) -> Tensor:
        """The features [..., d_sae] of states [..., width]."""
        if x.shape[-1] != self.width:
            raise ValueError(f"the states have {x.shape[-1]} values; this SAE reads {self.width}")
        x, _, _ = self._normalized(x.to(self.dtype))
        if self.subtract_b_dec and not self.transcoder:
            x = x - self.b_dec
        return pursue(x, self.W_dec, self.pursuit) if self.pursuit else self._activated(product(x, self.W_enc))

    def encode_float32(self, x: Tensor) -> Tensor:
        """`encode` of rows [n, width], with products that are not rounded: [n, d_sae] float32.

        In bfloat16 many pre-activations would be equal to the k-th. So a top-k SAE's last features may be others than `encode` has.
        """
        if self.normalization != "none":
            x = self._normalized(x.float())[0].to(self.dtype)
        if self.pursuit:
            x = x.float() - self.b_dec.float() if self.subtract_b_dec else x.float()
            return pursue(x, self.W_dec.float(), self.pursuit)
        products = products_float32(x, self.W_enc)
        return self._activated(products - self._shift if self.subtract_b_dec and not self.transcoder else products)

    def _activated(self, pre: Tensor) -> Tensor:
        """The features [..., d_sae] of products [..., d_sae] without `b_enc`. The products are overwritten."""
        bias = self.b_enc.to(pre.dtype)
        if self.architecture == "gated":
            assert self.r_mag is not None and self.b_mag is not None
            magnitudes = pre * self.r_mag.to(pre.dtype).exp() + self.b_mag.to(pre.dtype)
            return magnitudes.relu_() * (pre + bias > 0)
        pre += bias
        if self.architecture == "jumprelu":
            assert self.threshold is not None
            return pre.relu() * (pre > self.threshold.to(pre.dtype))
        if self.architecture in ("topk", "abstopk"):
            assert self.k is not None
            signed = self.architecture == "abstopk"
            found = (pre.abs() if signed else pre).topk(self.k, dim=-1, sorted=False)
            values = pre.gather(-1, found.indices) if signed else found.values.relu_()
            return torch.zeros_like(pre).scatter_(-1, found.indices, values)
        return pre.relu_()

    @versioned_property
    def _shift(self) -> Tensor:
        """[d_sae] float32, the encoder's products with `b_dec`. Captured passes keep its address."""
        with torch.no_grad(), batch_invariant(None):  # the same for all who share the SAE
            shift = products_float32(self.b_dec[None], self.W_enc)[0]
            kept: Tensor = self.__dict__.setdefault("_shift_memory", shift)
            return kept.copy_(shift)

    def refresh(self) -> None:
        """Recompute the tensors that passes keep of it, if it was edited in place since."""
        if self.subtract_b_dec and not self.transcoder:
            self._shift  # noqa: B018

    def decode(self, features: Tensor, x: Tensor | None = None) -> Tensor:
        """The states [..., d_out] that features [..., d_sae] stand for.

        Args:
            features: result of `encode`.
            x: the input, [..., width], for a skip connection or a normalization.

        Raises:
            ValueError: `x` is needed.
        """
        out = product(features.to(self.dtype), self.W_dec) + self.b_dec
        undone = self.normalization != "none" and not self.transcoder
        if x is None:
            if undone or self.W_skip is not None:
                what = "skip connection" if self.W_skip is not None else f"normalization, {self.normalization},"
                raise ValueError(f"this SAE has a {what} which needs its input: decode(features, x)")
            return out
        if undone:
            _, scale, mean = self._normalized(x.to(self.dtype))
            out = out * scale + mean
        return out if self.W_skip is None else out + product(x.to(self.dtype), self.W_skip)

    def reconstruct(self, x: Tensor, features: Tensor | None = None) -> Tensor:
        """``decode(encode(x), x)`` of rows [n, width], with products that are not rounded: [n, d_out] float32.

        Args:
            features: result of `encode_float32`, if it is known.
        """
        found = self.encode_float32(x) if features is None else features
        out = products_float32(found.to(self.dtype), self.W_dec) + self.b_dec.float()
        if self.normalization != "none" and not self.transcoder:
            _, scale, mean = self._normalized(x.float())
            out = out * scale + mean
        return out if self.W_skip is None else out + products_float32(x.to(self.dtype), self.W_skip)

    def output_scale(self, x: Tensor) -> Tensor:
        """Factor of the decoder's output for rows [n, width], which undoes a normalization: [n, 1] float32."""
        if self.normalization == "none" or self.transcoder:
            return torch.ones(len(x), 1, device=x.device)
        _, scale, _ = self._normalized(x.float())
        assert isinstance(scale, Tensor)
        return scale

    def _normalized(self, x: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """(normalized states, inverse: a factor, and a summand)."""
        if self.normalization == "layer_norm":
            mean = x.mean(-1, keepdim=True)
            x = x - mean
            std = x.std(-1, keepdim=True)
            return x / (std + _EPSILON), std, mean
        if self.normalization == "constant_norm_rescale":
            factor = self.width**0.5 / x.norm(dim=-1, keepdim=True)
            return x * factor, 1 / factor, 0.0
        return x, 1.0, 0.0

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            raise ValueError(f"SAE: {message}")


def products_float32(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` for x [n, width], not rounded to the dtype of either."""
    if (
        x.is_cuda
        and x.dtype is weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and invariant_device() is None
    ):
        return torch.mm(x, weight, out_dtype=torch.float32)
    return product(x, weight, torch.float32)
