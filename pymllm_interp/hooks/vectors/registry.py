"""Vectors for interventions and reductions: checked tensors, files, and a registry of names.

    vector = load_vector("sentiment.safetensors")               # [width]
    by_layer = load_layer_vectors("happy.gguf")                 # {layer: [width]}, a control vector of repeng or llama.cpp
    [Steer(f"resid_post.{layer}", vector) for layer, vector in by_layer.items()]

File formats, by suffix:

- `.safetensors`: one tensor, or tensors named `layer.{i}` or `direction.{i}`.
- `.pt`, `.pth`: a tensor, or a dict with such names. Read with `weights_only=True`, so that no code runs.
- `.gguf`: a control vector, architecture "controlvector" with a tensor `direction.{i}` per layer. Needs the package `gguf`.

Layer i of a file is for `resid_post.{i}`, in llama.cpp and repeng alike. `direction.{i}` is added to the output of block i, counted
from 0. Block 0 has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from pathlib import Path

from torch import Tensor

from ...core.model_spec import ModelSpec
from ..by_name import ByName
from .files import (
    Named,
    Source,
    _of_file,
    checked_vector,
    origin_of,
)


class VectorRegistry(ByName[Named]):
    """Vectors by name, for specs that hold a name in place of a vector.

        lm.vectors["sea"] = torch.randn(hidden)               # [width] or [n, width]
        lm.vectors["happy"] = "happy.gguf"                    # a file; here one vector per layer, {layer: [width]}
        Steer("resid_post.12", "sea", scale=4.0)

    Replacing or deleting a vector affects later requests only. Vectors are copied on assignment and on access.

    Args:
        model: its sites' widths are the allowed widths.
    """

    kind, attribute, example = "vector", "vectors", "tensor"
    over_http = "PUT /v1/interp/vectors/NAME"

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self._layers = model.num_hidden_layers
        self._widths = {model.width(kind): " * ".join(model.settings(kind)) for kind in model.family.points}
        self._made_for: dict[str, str] = {}

    def __setitem__(self, name: str, source: Source | Mapping[int, Source] | str | Path) -> None:
        """Store a copy of a tensor, of tensors by layer, or of a file's content under `name`.

        Raises:
            ValueError: an empty name, a file with several tensors that are not by layer, or an error of
                `checked_vector`. Also a wrong width, or a layer that the model lacks.
            FileNotFoundError, ImportError: as `load_vector`.
        """
        self._check_name(name)
        who = f"vector {name!r}"
        made_for = getattr(source, "model_fingerprint", "")
        if isinstance(source, str | Path):
            path = Path(source)
            source, (_, made_for) = _of_file(path), origin_of(path)
        if not isinstance(source, Mapping):
            self._keep(name, self._fitting(source, who))
            self._made_for[name] = made_for
            return
        if not source:
            raise ValueError(f"{who}: there is no layer in it")
        for layer in source:
            if not isinstance(layer, Integral) or int(layer) not in range(self._layers):
                raise ValueError(f"{who}: there is no layer {layer!r}; the model has 0 to {self._layers - 1}")
        self._keep(
            name,
            {int(layer): self._fitting(vector, f"{who}, layer {layer}") for layer, vector in sorted(source.items())},
        )
        self._made_for[name] = made_for

    def made_for(self, name: str) -> str:
        """Fingerprint of the model that a vector was made with; "" if not recorded."""
        return self._made_for.get(name, "")

    def _fitting(self, source: Source, who: str) -> Tensor:
        vector = checked_vector(source, who, (1, 2))
        if vector.shape[-1] not in self._widths:
            known = ", ".join(f"{width} ({setting})" for width, setting in sorted(self._widths.items()))
            raise ValueError(f"{who} has {vector.shape[-1]} values; the model's sites have {known}")
        return vector

    def __getitem__(self, name: str) -> Named:
        """A copy of the vector: a float32 tensor, or {layer: tensor}.
        Raises KeyError: an unknown name; the message lists similar ones."""
        found = super().__getitem__(name)
        return {layer: v.clone() for layer, v in found.items()} if isinstance(found, dict) else found.clone()
