"""`SetFeature`: change features of a sparse autoencoder or a transcoder, and keep its reconstruction error."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Annotated, Any, Literal

import torch
from einops import rearrange
from torch import Tensor

from ...kernels import edit_codes as codes
from ...kernels.edit_codes import OpWords
from ...utils.arguments import is_whole
from ..positions import Positions
from ..registry import op
from ..saes.sae import SAE
from ..site import Site, is_several
from ..spec import is_number
from .op import Gate, Missing, row_dots
from .sae_op import SAEOp

MAX_FEATURES = 32
"""Most features of one `SetFeature`."""
FeatureTargets = Annotated[Any, "features"]
"""A mapping from features to values, or to (low, high)."""
SCALARS = 8
"""Numbers of a feature beside its vectors: see `SetFeature.table`."""


@op
@dataclass(frozen=True, eq=False)
class SetFeature(SAEOp):
    """Change features of an SAE: ``state + sum((target_i - a_i) * W_dec[i])``, where ``a_i`` is feature i of the state.

    The SAE's error is kept: all that it does not reconstruct stays in the state. Every feature is read from the state before the
    op, so their order does not matter. Features that have their targets change no bit. An SAE that normalizes its input also scales
    the change back. The features of a transcoder are read at its `site`, after all ops there, and its `site_out` is changed. A
    cross-layer transcoder changes each site that it writes.

    A top-k SAE, an SAE that normalizes its input and a transcoder must encode all features to know one. On CUDA, passes encode the
    SAEs of ``LM(..., saes={"name": sae})``. A `SetFeature` of such an autoencoder is the first op at its site.

    Args:
        sae: An `SAE`, or a name in `lm.saes`.
        features: {feature: value}; with mode="clamp" {feature: (low, high)}, either of which may be None.
        mode: Target of a feature a: "set": the value; "add": a + value; "scale": a * value; "clamp": a within the bounds.
        site: A site's name, or None: the site that the SAE reads, or that a transcoder writes.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        when: A `Gate` that decides row by row; None acts on every row.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: an SAE without a site, or a crosscoder. So are an unknown feature, more than `MAX_FEATURES`, and values that do
            not suit the mode.
    """

    sae: SAE | str
    features: FeatureTargets
    mode: Literal["set", "add", "scale", "clamp"] = "set"
    site: Site | str | None = field(
        default=None,
        metadata={"description": "the site; null: the one that the SAE reads, or that a transcoder writes"},
    )
    positions: Positions = "all"
    when: Gate | None = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        self._set("features", self._checked_features())
        super().__post_init__()

    @property
    def reads(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The features."""
        return tuple(feature for feature, _ in self.features)

    def _checked_features(self) -> tuple[tuple[int, Any], ...]:
        pairs = self.features.items() if isinstance(self.features, Mapping) else self.features
        if hasattr(pairs, "__len__") and len(pairs) > MAX_FEATURES:
            raise ValueError(f"{self.name}: features has {len(pairs)}; at most {MAX_FEATURES}: use several SetFeature")
        what = "{feature: value}" if self.mode != "clamp" else "{feature: (low, high)}"
        try:
            pairs = sorted((feature, value) for feature, value in pairs)
        except (TypeError, ValueError):
            pairs = []
        numbers = bool(pairs) and all(is_whole(feature) and feature >= 0 for feature, _ in pairs)
        self._check("features", numbers, what)
        return tuple((int(feature), self._checked_value(feature, value)) for feature, value in pairs)

    def _checked_value(self, feature: int, value: Any) -> float | tuple[float | None, float | None]:
        bounds: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
        finite = all(v is None or (is_number(v) and abs(v) <= torch.finfo(torch.float32).max) for v in bounds)
        if self.mode == "clamp":
            pair = len(bounds) == 2 and finite and bounds != (None, None)
            if not pair or (None not in bounds and bounds[0] > bounds[1]):
                raise ValueError(
                    f"{self.name}: feature {feature}: {value}; mode='clamp' takes (low, high), low <= high, or None"
                )
            low, high = (None if v is None else float(v) for v in bounds)
            return low, high
        if isinstance(value, list | tuple) or not finite or value is None:
            raise ValueError(f"{self.name}: feature {feature}: {value}; mode={self.mode!r} takes a finite number")
        return float(bounds[0])

    def _check_sae(self, sae: SAE) -> None:
        super()._check_sae(sae)
        for feature, _ in self.features:
            if feature >= sae.d_sae:
                raise ValueError(f"{self.name}: there is no feature {feature}; the SAE has {sae.d_sae}, from 0")
        if sae.d_out < SCALARS:
            raise ValueError(f"{self.name}: it writes {sae.d_out} values; {SCALARS} are the fewest")

    @property
    def encodes(self) -> SAE | None:
        """The SAE, if it must encode all features to know one; None if one feature can be computed separately."""
        return self.sae if isinstance(self.sae, SAE) and self.sae.encodes_whole else None

    @cached_property
    def table(self) -> Tensor:
        """[3 * features, width] float32 on the CPU: of each feature the encoder's column, the decoder's row, and 8 numbers.

        With d, the dot product of the state and the first vector, ``a = relu(n0 * d + n1)`` where ``d + n2 > n3``, else 0. The
        target is ``n4 * a + n5``, within n6 and n7. Of an SAE that `encodes`, the first vector and n0 to n3 are 0: all is read.
        """
        assert isinstance(self.sae, SAE)
        self._content()  # which notes the SAE's version
        sae, ids = self.sae, list(self.reads)
        decoder = sae.W_dec[ids, self.columns].double().cpu()
        if self.encodes is None:
            encoder, numbers = encoder_rows(sae, ids)
        else:
            encoder, numbers = torch.zeros_like(decoder), torch.zeros(len(ids), SCALARS).double()
        for row, (_, value) in zip(numbers, self.features, strict=True):
            low, high = value if isinstance(value, tuple) else (None, None)
            row[6], row[7] = -inf if low is None else low, inf if high is None else high
            if not isinstance(value, tuple):
                row[4], row[5] = {"set": (0.0, value), "add": (1.0, value), "scale": (value, 0.0)}[self.mode]
            else:
                row[4] = 1.0
        rows = [encoder, decoder, torch.nn.functional.pad(numbers, (0, decoder.shape[1] - SCALARS))]
        return rearrange(rows, "three features width -> (features three) width").float()

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The `table`."""
        return (self.table,)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The encoder's columns and decoder's rows, where these have the site's width, and the gate's probe."""
        if isinstance(self.sae, SAE) and not is_several(str(self.site)):
            yield "sae", self.table
        yield from super().tensors()

    def written(self) -> Iterator[tuple[str, float]]:
        """The largest value times its decoder's row, where values are written."""
        if self.mode in ("set", "add"):
            for row, (feature, value) in zip(self.table[1::3], self.features, strict=True):
                yield f"feature {feature}", value * row.abs().max().item()

    def _hash_of(self, name: str, value: Any) -> Any:
        """Hash of the parts of the SAE that the op reads."""
        return self._table_hash if name == "sae" and isinstance(value, SAE) else super()._hash_of(name, value)

    @cached_property
    def _table_hash(self) -> str:
        digest = hashlib.sha256(self.table.numpy().tobytes())
        if self.encodes is not None:  # all of it decides which features are active
            digest.update(self.encodes.fingerprint.encode())
        return digest.hexdigest()

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The states with the features at their targets."""
        read, rows = self.given(vectors), vectors[0].unflatten(0, (-1, 3))
        scale: Any = 1.0
        if read is None and (sae := self.encodes) is not None:
            sae = sae.to(x.device)
            read = torch.cat((sae.encode_float32(x)[:, list(self.reads)], sae.output_scale(x)), -1)
        if read is not None:
            scale = read[:, -1:]
        y = x
        for i, (encoder, decoder, n) in enumerate(rows):
            if read is None:
                dot = row_dots(x, encoder)
                feature = torch.where(dot + n[2] > n[3], (n[0] * dot + n[1]).relu(), 0.0)
            else:
                feature = read[:, i : i + 1]
            change = ((n[4] * feature + n[5]).clamp(n[6], n[7]) - feature) * scale
            y = torch.where(change != 0, y + change * decoder, y)
        return y

    def words(self) -> OpWords:
        """Table words of SET_FEATURE."""
        return OpWords(codes.SET_FEATURE, rank=len(self.features))


def encoder_rows(sae: SAE, features: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The encoder of some features: columns [features, width], and numbers n0 to n3 of `SetFeature.table` [features, `SCALARS`].

    Both are float64 on the CPU.
    """
    ids = torch.tensor(features)

    def of(tensor: Tensor) -> Tensor:
        return tensor[ids.to(tensor.device)].double().cpu()

    encoder = sae.W_enc[:, ids.to(sae.device)].T.double().cpu()
    shift = (
        encoder @ sae.b_dec.double().cpu()
        if sae.subtract_b_dec and not sae.transcoder
        else torch.zeros(len(ids)).double()
    )
    numbers = torch.zeros(len(ids), SCALARS).double()
    numbers[:, 0], numbers[:, 1], numbers[:, 2] = 1, of(sae.b_enc) - shift, of(sae.b_enc) - shift
    numbers[:, 3] = -inf if sae.architecture == "standard" else 0
    if sae.architecture == "jumprelu":
        assert sae.threshold is not None
        numbers[:, 3] = of(sae.threshold)
    if sae.architecture == "gated":
        assert sae.r_mag is not None and sae.b_mag is not None
        numbers[:, 0] = of(sae.r_mag).exp()
        numbers[:, 1] = of(sae.b_mag) - shift * numbers[:, 0]
    return encoder, numbers
