"""Lenses: maps from a layer's state to the state that the final norm reads.

TunedLens.load("gpt2")                       # a folder of tuned-lens 0.2.0: config.json, params.pt
JacobianLens.load("gpt2_jacobian_lens.pt")   # {"J": {layer: [d, d]}, "source_layers", "d_model"}, or safetensors
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...core.model_spec import ModelSpec
from ...layers.invariant import product
from ...utils.cached_properties import version_of, versioned_property
from ...utils.files.checked_files import read_json
from ..saes.formats import read_tensors
from ..site import Site
from ..vectors.files import checked_vector

_LAYER = re.compile(r"(?:J|layer)[._]?(\d+)")


@dataclass(frozen=True, eq=False)
class _Transport:
    """Maps by layer. Raises ValueError: no layers, or tensors that do not fit each other."""

    matrices: Mapping[int, Tensor] = field(repr=False)
    """layer -> [width, width]"""
    biases: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    """layer -> [width]"""

    def __post_init__(self) -> None:
        who, widths = type(self).__name__, set()
        for name, dims in (("matrices", 2), ("biases", 1)):
            found = {
                int(i): checked_vector(part, f"{who}: layer {i}", (dims,)) for i, part in getattr(self, name).items()
            }
            widths |= {size for part in found.values() for size in part.shape}
            object.__setattr__(self, name, dict(sorted(found.items())))
        if len(widths) != 1:
            raise ValueError(
                f"{who}: expected a matrix [width, width] for each layer; there are the sizes {sorted(widths)}"
            )

    @property
    def width(self) -> int:
        """Width of the states."""
        return next(iter(self.matrices.values())).shape[0]

    @property
    def version(self) -> int:
        """Grows with every edit of its maps in place that torch counts."""
        return version_of((*self.matrices.values(), *self.biases.values()))

    @versioned_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, as it is now: 64 hexadecimal digits."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for parts in (self.matrices, self.biases):
            for layer, tensor in parts.items():
                digest.update(f"|{layer}".encode())
                digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def check(self, site: Site, model: ModelSpec) -> None:
        """Raise ValueError if it has no map for a site, or is for another model."""
        who = type(self).__name__
        if self.width != model.hidden_size:
            raise ValueError(
                f"the {who} is for another model: its width is {self.width}, and hidden_size {model.hidden_size}"
            )
        layer = self._layer(site)
        if layer == self._last(model.num_hidden_layers) or site.kind == "final_norm":
            return
        if layer not in self.matrices:
            raise ValueError(f"the {who} has no map for {site}; it has the layers {', '.join(map(str, self.matrices))}")

    def transported(self, site: Site, rows: Tensor) -> Tensor:
        """The rows [n, width] of a site, mapped, in their dtype. Rows of the last layer are unchanged."""
        layer = self._layer(site)
        if layer is None or layer not in self.matrices:
            return rows
        matrix, bias = self._on(rows.device)[layer]
        return self._mapped(rows.float(), matrix, bias).to(rows.dtype)

    def _layer(self, site: Site) -> int | None:
        raise NotImplementedError

    def _last(self, num_layers: int) -> int:
        raise NotImplementedError

    def _mapped(self, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    @versioned_property
    def _on_devices(self) -> dict[torch.device, dict[int, tuple[Tensor, Tensor | None]]]:
        """The maps on devices, cached: device -> layer -> (matrix, bias)."""
        return {}

    def _on(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor | None]]:
        kept = self._on_devices
        if device not in kept:
            biases = {layer: bias.to(device) for layer, bias in self.biases.items()}
            kept[device] = {layer: (matrix.to(device), biases.get(layer)) for layer, matrix in self.matrices.items()}
        return kept[device]


class TunedLens(_Transport):
    """A tuned lens: ``h + matrix @ h + bias``, for each layer's input and the last layer's output is left as it is.

    Translator i of tuned-lens reads the input of layer i, `resid_pre.i`, which is `resid_post.{i-1}`.
    """

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a folder of tuned-lens 0.2.0: config.json, and params.pt with "0.weight", "0.bias" and so on. No pickle is run.

        Raises:
            FileNotFoundError: no such files.
            ValueError: another kind of lens, or tensors that are not a translator's.
        """
        folder = Path(path)
        files = [folder / "config.json", folder / "params.pt"]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"{file}: no such file; a tuned lens is a folder with config.json and params.pt"
                )
        config, tensors = read_json(files[0]), read_tensors(files[1])
        if config.get("lens_type", "linear_tuned_lens") != "linear_tuned_lens":
            raise ValueError(f"{folder}: lens_type {config['lens_type']!r} is not supported; linear_tuned_lens is")
        parts: dict[str, dict[int, Any]] = {"weight": {}, "bias": {}}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(?:layer_translators\.)?(\d+)\.(weight|bias)", name)
            if match is not None:
                parts[match[2]][int(match[1])] = tensor
            elif not name.startswith("unembed"):
                raise ValueError(f"{files[1]}: {name!r} is not of a translator, such as 0.weight or 0.bias")
        return cls(parts["weight"], parts["bias"])

    def _layer(self, site: Site) -> int | None:
        match site.kind:
            case "embed":
                return 0
            case "resid_pre":
                return site.layer
            case "resid_post":
                return None if site.layer is None else site.layer + 1
            case _:
                return None

    def _last(self, num_layers: int) -> int:
        return num_layers

    def _mapped(self, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        moved = rows + product(rows, matrix.T)
        return moved if bias is None else moved + bias


class JacobianLens(_Transport):
    """A Jacobian lens: ``J @ h`` for the output of each layer, `resid_post.i` (Gurnee et al. 2026, Transformer Circuits). The last
    layer's output is left as it is."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read ``{"J": {layer: [d, d]}, "source_layers", "d_model"}`` of a .pt file, or "J.0", "J.1" and so on of a .safetensors
        file. No pickle is run.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another content, or matrices that do not fit `d_model`.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a Jacobian lens is a .pt or .safetensors file")
        content = read_tensors(path)
        matrices = content.get("J")
        if path.suffix == ".safetensors":
            found = {name: _LAYER.fullmatch(name) for name in content}
            matrices = {int(match[1]): content[name] for name, match in found.items() if match is not None}
        if not isinstance(matrices, Mapping) or not matrices:
            raise ValueError(
                f"{path} has no J, the matrices by layer; it has {', '.join(map(str, content)) or 'nothing'}"
            )
        made, width = cls(matrices), content.get("d_model")
        if isinstance(width, int) and width != made.width:
            raise ValueError(f"{path}: the matrices are for a width of {made.width}, and d_model is {width}")
        return made

    def _layer(self, site: Site) -> int | None:
        match site.kind:
            case "resid_post":
                return site.layer
            case "resid_pre":
                return None if not site.layer else site.layer - 1
            case _:
                return None

    def _last(self, num_layers: int) -> int:
        return num_layers - 1

    def _mapped(self, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return product(rows, matrix.T)
