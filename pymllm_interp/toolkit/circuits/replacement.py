"""SAEs, transcoders and cross-layer transcoders in place of parts of a model.

A replacement reads a site and writes one or several::

    transcoder               mlp_in.i or resid_mid.i -> mlp_out.i
    cross-layer transcoder   mlp_in.i or resid_mid.i -> mlp_out.{i,i+1,...}
    SAE                      mlp_out.i or resid_post.i, in its own place

Each written site is then ``features + skip + error + constant``, exactly. The error is the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.model_spec import ModelSpec
from ...hooks.saes.registry import check_fits
from ...hooks.saes.sae import SAE, products_float32
from ...hooks.site import expand
from .frozen import FrozenLayer

READS = {True: ("mlp_in", "resid_mid"), False: ("mlp_out", "resid_post")}
"""Whether it is a transcoder -> kinds of sites that a replacement may read."""


class Replacement(NamedTuple):
    """One SAE or transcoder in its place."""

    sae: SAE
    layer: int
    """The layer that it reads, which names its features."""
    kind: str
    """Kind of the site that it reads."""
    writes: tuple[int, ...]
    """Layers that it writes, at `written_kind`."""

    @property
    def written_kind(self) -> str:
        """Kind of the sites that it writes."""
        return "mlp_out" if self.sae.transcoder else self.kind

    def columns(self, layer: int) -> slice:
        """The part of its output that a layer gets."""
        width, index = self.sae.d_out // len(self.writes), self.writes.index(layer)
        return slice(index * width, (index + 1) * width)

    def decoder(self, layer: int, features: Tensor, device: torch.device) -> Tensor:
        """Rows [features, hidden] of its decoder for a layer."""
        return self.sae.W_dec[features.to(self.sae.device), self.columns(layer)].to(device)

    def readers(self, features: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The maps of a state to pre-activations: vectors [features, width], constants [features] float32."""
        sae, ids = self.sae, features.to(self.sae.device)
        vectors, bias = sae.W_enc[:, ids].T, sae.b_enc[ids].float()
        shift = (
            vectors.float() @ sae.b_dec.float() if sae.subtract_b_dec and not sae.transcoder else torch.zeros_like(bias)
        )
        if sae.architecture == "gated":
            assert sae.r_mag is not None and sae.b_mag is not None
            gain = sae.r_mag[ids].exp()
            vectors, shift, bias = vectors * gain[:, None], shift * gain.float(), sae.b_mag[ids].float()
        return vectors.to(device), (bias - shift).to(device)

    def input(self, frozen: FrozenLayer, resid_post: Tensor) -> Tensor:
        """The states [tokens, width] that it encodes in a run."""
        if self.kind == "mlp_in" and not self.sae.norm_gain:
            return (frozen.resid_mid * frozen.mlp_norm.scale).to(frozen.resid_mid.dtype)
        return resid_post if self.kind == "resid_post" else getattr(frozen, self.kind)

    def at_stream(self, frozen: FrozenLayer, positions: Tensor | slice, vectors: Tensor) -> Tensor:
        """Gradients at the site that it reads, [..., positions, width] -> the same before a norm there."""
        if self.kind != "mlp_in":
            return vectors
        norm = frozen.mlp_norm
        return vectors * norm.scale[positions] * (norm.gain if self.sae.norm_gain else 1.0)

    def skip(self, x: Tensor, layer: int) -> Tensor | None:
        """The skip connection's part of a written site, [tokens, hidden] float32; None without one."""
        weight = self._skip_weight(layer, x.device)
        return None if weight is None else products_float32(x.to(weight.dtype), weight)

    def skip_back(self, grad: Tensor, layer: int) -> Tensor | None:
        """Transpose of `skip`: [batch, rows, hidden] at `mlp_out` of a layer -> the same at the site that it reads."""
        weight = self._skip_weight(layer, grad.device)
        return None if weight is None else grad @ weight.T.to(grad.dtype)

    def _skip_weight(self, layer: int, device: torch.device) -> Tensor | None:
        weight = self.sae.W_skip
        return None if weight is None else weight[:, self.columns(layer)].to(device)


class ActiveFeatures(NamedTuple):
    """Features of a replacement that are active in the run, by position and feature."""

    positions: Tensor  # [n] int64
    features: Tensor  # [n] int64
    values: Tensor  # [n] float32


def replacements_of(lm: Any, transcoders: Any, offload: bool) -> list[Replacement]:
    """The replacements by layer, from SAEs, names in `lm.saes`, or a collection of both.

    Args:
        offload: leave the tensors where they are.

    Raises:
        ValueError: none, two of a layer, an unknown name, another model's SAE, or an unsupported site or kind.
    """
    spec: ModelSpec = lm.model_spec
    found = sorted((_placed(lm, each, spec, offload) for each in _each(lm, transcoders)), key=lambda made: made.layer)
    if not found:
        raise ValueError("a circuit needs transcoders: an SAE, a name in lm.saes, or a list of them")
    for one, other in pairwise(found):
        if one.layer == other.layer:
            raise ValueError(
                f"{one.sae.site} and {other.sae.site}: a circuit takes one SAE or transcoder that reads a layer"
            )
    return found


def _each(lm: Any, transcoders: Any) -> Iterator[Any]:
    several = transcoders.values() if isinstance(transcoders, Mapping) else transcoders
    for each in [several] if isinstance(several, str | SAE) else several:
        yield from members_of(lm, each) if isinstance(each, str) else [each]


def members_of(lm: Any, name: str) -> list[str]:
    """Names in `lm.saes` of a set, which are ``name/...``; a name that no set has is one SAE's."""
    return [name] if name in lm.saes else [each for each in lm.saes if each.startswith(f"{name}/")] or [name]


def _placed(lm: Any, source: Any, spec: ModelSpec, offload: bool) -> Replacement:
    if not isinstance(source, str | SAE):
        raise ValueError(f"transcoders: {type(source).__name__} is neither an SAE nor a name in lm.saes")
    if isinstance(source, SAE):
        check_fits(source, spec, "circuit")
        sae = source if offload else lm.saes._copy_of(source)
    else:
        sae = lm.saes._on_device(source, "circuit")
    if sae.pursuit is not None or sae.normalization != "none":
        what = sae.architecture if sae.pursuit is not None else f"normalization {sae.normalization!r}"
        raise ValueError(f"circuit: the SAE at {sae.site} has {what}: its pre-activations are not linear in the state")
    sites = expand(sae.site or "", spec.num_hidden_layers, spec.family)
    written = sites if not sae.transcoder else expand(sae.site_out or "", spec.num_hidden_layers, spec.family)
    kinds = {site.kind for site in written}
    read = sites[0]
    if (
        len(sites) > 1
        or read.kind not in READS[sae.transcoder]
        or kinds != {"mlp_out" if sae.transcoder else read.kind}
    ):
        raise ValueError(
            f"circuit: {sae.site} -> {sae.site_out or sae.site}: transcoders read mlp_in.N or resid_mid.N and write mlp_out, and "
            "SAEs are at mlp_out.N or resid_post.N"
        )
    layers = tuple(site.layer or 0 for site in written)
    if min(layers) < (read.layer or 0):
        raise ValueError(f"circuit: the transcoder reads {read}, which is not before mlp_out.{min(layers)}")
    return Replacement(sae, read.layer or 0, read.kind, layers)
