"""`contrast`: control vectors from pairs of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange

from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.site import Site, expand
from ..hooks.vectors.files import load_layer_vectors, origin_of, save_layer_vectors
from ..utils.arguments import PromptError, is_whole
from ..utils.caller_frames import warn_at_caller

METHODS = ("mean", "pca")
NO_DIFFERENCE = 1e-6
"""Differences below this share of the states are rounding."""


class ControlVectors(dict[int, torch.Tensor]):
    """Layer -> vector [width], float32 on the CPU. `Steer` takes it, and ``lm.vectors[name] = vectors``.

        happy - 0.5 * angry        # as in repeng: by layer; a layer that one of them lacks is zero there
        -happy, happy / 2

    Attributes:
        model_hint: the model's type.
        model_fingerprint: fingerprint of the model that they were made with; "" if unknown. Using them with another
            model warns.
    """

    __array_ufunc__ = None  # numpy's numbers leave the arithmetic to this class

    def __init__(self, vectors: Mapping[int, torch.Tensor], model_hint: str = "", model_fingerprint: str = "") -> None:
        super().__init__(vectors)
        self.model_hint, self.model_fingerprint = model_hint, model_fingerprint

    def __add__(self, other: ControlVectors) -> ControlVectors:
        """The sum, by layer; a layer that only one has is as it is there. Raises ValueError: vectors of different widths."""
        if not isinstance(other, ControlVectors):
            return NotImplemented
        widths = {len(vector) for vector in (*self.values(), *other.values())}
        if len(widths) > 1:
            raise ValueError(f"control vectors of different models: their widths are {sorted(widths)}")
        for name in ("model_hint", "model_fingerprint"):
            if len({getattr(self, name), getattr(other, name)} - {""}) > 1:
                warn_at_caller([f"control vectors of different models are combined: their {name}s differ"])
                break
        layers = sorted({*self, *other})
        vectors = {i: self[i] + other[i] if i in self and i in other else self.get(i, other.get(i)) for i in layers}
        same = self.model_fingerprint == other.model_fingerprint
        return ControlVectors(
            {i: vector.clone() for i, vector in vectors.items() if vector is not None},
            self.model_hint or other.model_hint, self.model_fingerprint if same else "",
        )  # fmt: skip

    def __neg__(self) -> ControlVectors:
        return self * -1.0

    def __sub__(self, other: ControlVectors) -> ControlVectors:
        return self + -other if isinstance(other, ControlVectors) else NotImplemented

    def __mul__(self, factor: float) -> ControlVectors:
        if not isinstance(factor, Real):
            return NotImplemented
        return ControlVectors(
            {i: vector * float(factor) for i, vector in self.items()}, self.model_hint, self.model_fingerprint
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> ControlVectors:
        if not isinstance(divisor, Real):
            return NotImplemented
        if not divisor:
            raise ZeroDivisionError("control vectors divided by zero")
        return ControlVectors(
            {i: vector / float(divisor) for i, vector in self.items()}, self.model_hint, self.model_fingerprint
        )

    def save(self, path: str | Path) -> None:
        """Write a .gguf control vector, which llama.cpp and repeng read, or a .safetensors file.

        Raises:
            ImportError: a .gguf file without the package `gguf`.
            ValueError: another suffix, or layer 0 in a .gguf file. Its layers start at 1: write the site as "resid_post.{1..-1}".
        """
        save_layer_vectors(path, self, self.model_hint, self.model_fingerprint)

    @classmethod
    def load(cls, path: str | Path) -> ControlVectors:
        """Read a file of `save`, llama.cpp or repeng.
        Raises FileNotFoundError, ImportError, ValueError: no such file, or one that holds no vectors by layer."""
        return cls(load_layer_vectors(path), *origin_of(path))

    def __repr__(self) -> str:
        width = len(next(iter(self.values()), ()))
        return f"ControlVectors(layers {list(self)}, width {width})"


def contrast(
    lm: Any,
    pairs: Sequence[tuple[Any, Any]],
    site: str | Site = "resid_post.*",
    method: Literal["mean", "pca"] = "mean",
    *,
    position: int = -1,
) -> ControlVectors:
    """Vectors that point from the second prompts of pairs to the first ones, by layer.

    Args:
        lm: an `LM`, or a server's.
        pairs: (positive, negative) prompts, of any length.
        site: kind of site, with a layer or a pattern of layers.
        method: "mean": the mean difference of the states (Rimsky et al. 2023, arXiv 2312.06681). "pca": the direction along which
            the differences are longest, of length 1, towards the positive side (Zou et al. 2023, arXiv 2310.01405).
        position: position in each prompt; -1 is its last token.

    Raises:
        PromptError, ValueError: no pairs, or something else than pairs; an unknown site, position or method. So is a layer with
            equal states in all pairs.
    """
    if not is_whole(position):
        raise ValueError(f"position={position!r}: expected a whole number; -1 is the last token")
    pairs = list(pairs)
    wrong = [
        i for i, pair in enumerate(pairs) if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2
    ]
    if wrong or len(pairs) < (2 if method == "pca" else 1):
        what = f"entry {wrong[0]} is not a pair" if wrong else f"there are {len(pairs)}"
        raise PromptError(f"pairs: {what}; expected (positive, negative) prompts, {1 + (method == 'pca')} at least")
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected {' or '.join(map(repr, METHODS))}")
    spec = lm.model_spec
    sites = expand(site, spec.num_hidden_layers, spec.family)
    if sites[0].layer is None:
        raise ValueError(f"site={str(site)!r} has no layer; 'resid_post.*' has one vector for each")
    prompts = [prompt for pair in pairs for prompt in pair]
    captures = [Capture(site, positions=[position]) for site in sites]
    outs = lm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), capture=captures)
    vectors, equal = dict[int, torch.Tensor](), list[str]()
    for one in sites:
        rows = [out.activations[str(one)].float() for out in outs]
        states = rearrange(rows, "(pairs two) ... -> pairs two (...)", two=2)
        differences = states[:, 0] - states[:, 1]  # [pairs, width]
        vector = differences.mean(0) if method == "mean" else _component(differences)
        if differences.norm() <= NO_DIFFERENCE * states.norm() or not vector.norm() > 0:
            equal.append(str(one))
        vectors[one.layer or 0] = vector
    if equal:
        raise ValueError(
            f"the states of all pairs are equal at {', '.join(equal)}: prompts that end with the same token are, before the first "
            "layer's attention; choose later layers, or prompts that differ"
        )
    return ControlVectors(vectors, spec.family.name, outs[0].receipt.model)


def _component(differences: torch.Tensor) -> torch.Tensor:
    """The first principal component of differences [pairs, width] and their negatives, [width], of length 1."""
    direction = torch.linalg.svd(differences, full_matrices=False).Vh[0]
    return direction if (differences @ direction).sum() >= 0 else -direction
