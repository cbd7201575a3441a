"""`QuantizableExperts`: the weights of all experts of a layer, as parameters or quantised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.products.quantized_blocks import has_expert_kernel
from ..gemm import Gemm
from ..invariant import invariant_device
from .expert_tiles import ExpertTiles
from .gemm import QuantizedGemm
from .readable import DequantizedWeight
from .unallocated import weight_device
from .weight import QuantizedWeight

StoredExperts = QuantizedWeight | ExpertTiles
"""[experts * out, in]."""
ExpertWeight = torch.Tensor | StoredExperts
"""[experts, out, in], or quantised [experts * out, in]."""


class QuantizableExperts(nn.Module):
    """The first and the last weights of a layer's experts, `gate_up_proj` and `down_proj`.

    Attributes:
        transposed: the parameters are [experts, in, out], views of memory that lies [experts, out, in].
        interleaved: gate and up are every other row of `gate_up_proj`.
        quantized: name -> the weight as it is stored; without an entry it is a parameter.
        dtype: dtype of unquantised weights.
        one_tiling: kernels have one tiling for any number of rows (batch-invariant mode).
        elsewhere: (x, ids, scores) -> the outcome, by weights that are elsewhere; None: by these.
    """

    NAMES: ClassVar = ("gate_up_proj", "down_proj")
    elsewhere: Callable[..., torch.Tensor] | None = None
    transposed = interleaved = False

    def __init__(
        self, experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str, biased: bool = False
    ) -> None:
        super().__init__()
        self.num_experts, self.dtype = experts, dtype
        self.one_tiling = invariant_device() is not None
        self.quantized: dict[str, StoredExperts] = {}
        sizes = (2 * intermediate, hidden), (hidden, intermediate)
        for name, (rows, width) in zip(self.NAMES, sizes, strict=True):
            self._set_rows(name, torch.empty(experts, rows, width, dtype=dtype, device=weight_device(device)))
            if biased:
                bias = torch.empty(experts, rows, dtype=dtype, device=device)
                self.register_parameter(f"{name}_bias", nn.Parameter(bias, False))
        self.bind()

    def bind(self) -> None:
        """Rebuild the products after a weight was replaced."""
        self._weights: list[ExpertWeight] = [self._rows_of(name) for name in self.NAMES]
        biases = [self._parameters.get(f"{name}_bias") for name in self.NAMES]
        self._biases: Any = None if biases[0] is None else tuple(bias.detach() for bias in biases if bias is not None)
        self._gemms = [
            gemms_of(weight, self.num_experts, None if bias is None else bias.detach())
            for weight, bias in zip(self._weights, biases, strict=True)
        ]

    def _rows_of(self, name: str) -> ExpertWeight:
        if name in self.quantized:
            return self.quantized[name]
        weight = self._parameters[name]
        assert weight is not None
        return weight.detach().transpose(1, 2) if self.transposed else weight.detach()

    def _set_rows(self, name: str, weight: torch.Tensor) -> None:
        self.register_parameter(name, nn.Parameter(weight.transpose(1, 2) if self.transposed else weight, False))

    def shape_of(self, name: str) -> tuple[int, int, int]:
        """[experts, out, in] of a weight."""
        rows = self._rows_of(name)
        return (
            self.num_experts,
            rows.shape[-2] // (1 if isinstance(rows, torch.Tensor) else self.num_experts),
            rows.shape[-1],
        )

    def set_plain(self, name: str, weight: torch.Tensor, device: str) -> None:
        """Store a weight [experts, out, in] as a parameter."""
        self._set_rows(name, weight.to(device, self.dtype).contiguous())
        self.bind()

    def set_quantized(self, name: str, weight: QuantizedWeight, device: str) -> bool:
        """Store a quantised weight [experts * out, in] in place of the parameter. Its tensors become buffers.
        Returns False if no kernel of the device takes it: it is stored dequantised."""
        weight = weight.to(device)
        if weight.is_cuda and not _has_kernel(weight):
            rows = weight.dequantize()
            self.set_plain(name, rows.view(self.num_experts, -1, rows.shape[1]), device)
            return False
        stored: StoredExperts = weight
        if weight.is_cuda and weight.kind == "fp4":
            stored = ExpertTiles.of(weight, self.num_experts, name == "gate_up_proj", self.interleaved)
        self._parameters[name] = None
        self.quantized[name] = stored
        for part, tensor in stored.tensors.items():
            self.register_buffer(f"{name}_{part}", tensor)
        self.bind()
        return True

    def __getattr__(self, name: str) -> Any:
        if name in QuantizableExperts.NAMES and name in (quantized := self.__dict__.get("quantized", {})):
            rows = quantized[name].dequantize()
            weight = rows.view(self.num_experts, -1, rows.shape[1])
            path = f"{vars(self).get('sealed_path', '')}.{name}".lstrip(".")
            return DequantizedWeight.of(weight.transpose(1, 2) if self.transposed else weight, path)
        return super().__getattr__(name)


def _has_kernel(weight: QuantizedWeight) -> bool:
    """Whether the weight's device multiplies sorted rows with its codes."""
    reads_fp8 = weight.kind != "fp8" or torch.cuda.get_device_capability(weight.device) >= (8, 9)
    return reads_fp8 and has_expert_kernel(weight.kind, weight.shape[1], weight.group_size)


def gemms_of(weight: ExpertWeight, experts: int, biases: torch.Tensor | None = None) -> Sequence[Gemm | QuantizedGemm]:
    """The product of each expert.

    Args:
        biases: [experts, out].
    """
    found: list[Gemm | QuantizedGemm] = []
    for i in range(experts):
        bias = None if biases is None else biases[i]
        if isinstance(weight, torch.Tensor):
            found.append(Gemm([weight], weight[i], bias))
        elif isinstance(weight, ExpertTiles):
            found.append(_TiledGemm(weight, i, bias))
        else:
            rows = weight.shape[0] // experts
            found.append(QuantizedGemm(weight.rows(i * rows, (i + 1) * rows), bias))
    return found


class _TiledGemm(QuantizedGemm):
    """The product of an expert in tiles. Its codes are brought into rows for each product, and not kept."""

    def __init__(self, tiles: ExpertTiles, index: int, bias: torch.Tensor | None) -> None:
        super().__init__(None, bias)
        self._tiles, self._index = tiles, index

    @property
    def weight(self) -> QuantizedWeight:
        return self._tiles.expert(self._index)
