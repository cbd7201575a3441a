"""Checkpoint formats of quantised weights: from a module's tensors to a `QuantizedWeight`.

`fp8` has `weight`, and `weight_scale_inv` or `weight_scale`: for a tensor, a channel, or a block such as 128 x 128.

`compressed-tensors` has `weight_scale`, and `weight` in FP8. Integers are in `weight_packed`, with `weight_shape`. Asymmetric ones
have `weight_zero_point`, too. Scales in uint8 are exponents: MXFP4.

`awq` has `qweight`, `qzeros` and `scales` in the "gemm" layout. So has `gptq`, with a `g_idx` in the order of the inputs.

Scales keep the checkpoint's dtype. Scales of activations (`input_scale`) are left: activations stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import PretrainedConfig

from ...kernels.products.quantized_blocks import block_of
from ...layers.quantization.weight import BITS, QuantizedWeight, packed
from .loading import MARKS, WeightsError

Tensors = Mapping[str, torch.Tensor]
METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
LEAVES = MARKS | {"weight", "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx", "input_scale",
                  "activation_scale", "input_zero_point"}  # fmt: skip
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place, in four bits, of each of the eight columns in a word."""
WORDS = frozenset({"qweight", "qzeros", "weight_packed"})
SCALES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class QuantizationFormat:
    """Contents of a config's `quantization_config`.

    Attributes:
        method: the `quant_method`.
        kind, group_size: kind and group size of the weights, for random ones. Real weights are read by their tensors.
    """

    method: str
    kind: str
    group_size: int | None
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, config: PretrainedConfig, name: str = "the model") -> QuantizationFormat | None:
        """The format of a config; None: unquantised. Raises WeightsError: a method or a scheme that is not read."""
        settings, method = _settings(config), method_of(config)
        if method is None:
            return None
        if method not in METHODS:
            raise WeightsError(
                f"{name} is quantised by {method!r}, which is not supported ({', '.join(METHODS)} are): use the unquantised model"
            )
        problem = _problem(method, settings)
        if problem is not None:
            raise WeightsError(f"{name} is quantised by {method}: {problem}")
        kind, group_size = _scheme(method, settings)
        return cls(method, kind, group_size, settings)

    def __str__(self) -> str:
        """The codes, and the kernels for them."""
        if self.method == "mxfp4":
            return (
                "the weights of its experts are quantised (mxfp4): on CUDA by our Triton kernel, which dequantises in registers, "
                "or dequantised at load where their inputs are no multiple of 64; on a CPU dequantised for each product"
            )
        groups = "a scale for each channel or tensor" if self.group_size is None else f"groups of {self.group_size}"
        bits = BITS[self.kind]
        kernels = "on CUDA few rows by our Triton kernels, more by cuBLAS from dequantised weights"
        if self.group_size is not None and block_of(bits, 2 * self.group_size, self.group_size) is None:
            kernels = "on CUDA by cuBLAS, from dequantised weights: groups of this size have no kernel"
        return (
            f"its weights are quantised ({self.method}: {self.kind}, {groups}): {kernels}; on a CPU "
            "dequantised for each product"
        )

    def read(self, path: str, tensors: Tensors, dtype: torch.dtype) -> QuantizedWeight:
        """A module's weight.

        Args:
            path: names the module in errors.
            tensors: tensors by leaf name.
            dtype: dtype of the dequantised weight.

        Raises:
            WeightsError: tensors that are missing, or do not fit each other.
        """
        for name in WORDS & tensors.keys():
            if tensors[name].is_floating_point():
                raise WeightsError(f"{path}.{name} is {tensors[name].dtype}; codes are integers")
        if "qweight" in tensors:
            return self._words(path, tensors, dtype)
        if "weight_packed" in tensors:
            return _packed(path, tensors, dtype, self.settings)
        return _float8(path, tensors, dtype, self.settings)

    def _words(self, path: str, tensors: Tensors, dtype: torch.dtype) -> QuantizedWeight:
        """AWQ and GPTQ: codes of 4 or 8 bits in 32-bit words, [in, out] as a whole."""
        bits = int(self.settings.get("bits", 4))
        qweight, qzeros, scales = (_needed(path, tensors, name) for name in ("qweight", "qzeros", "scales"))
        scales, groups = _scales(path, scales).t().contiguous(), scales.shape[0]
        if self.method == "awq":
            codes, zeros = (_unpacked(words, 4, AWQ_ORDER).t() for words in (qweight, qzeros))
        else:
            codes, zeros = _unpacked(qweight.t(), bits), _unpacked(qzeros, bits).t()
            if self.settings.get("checkpoint_format", "gptq") != "gptq_v2":
                zeros = (zeros + 1) & ((1 << bits) - 1)  # stored less 1
        width = codes.shape[1]
        group_size = self.group_size or width
        if "g_idx" in tensors and (order := tensors["g_idx"]).numel():
            if not torch.equal(order.long(), torch.arange(width, device=order.device) // group_size):
                _refuse(path, "its g_idx reorders the inputs (desc_act)", "quantise it with desc_act=False")
        _check_groups(path, width, groups, group_size)
        return _integers(codes, bits, scales, zeros, group_size, dtype)


def method_of(config: PretrainedConfig) -> str | None:
    """The `quant_method` of a config; None: unquantised."""
    method = (settings := _settings(config)).get("quant_method")
    return str(getattr(method, "value", method)) if settings else None


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    given = getattr(config, "quantization_config", None) or {}
    return dict(given) if isinstance(given, Mapping) else given.to_dict()


def _problem(method: str, settings: Mapping[str, Any]) -> str | None:
    """Reason that a scheme is not supported, and the fix; None if it is."""
    if method == "gptq":
        if settings.get("desc_act"):
            return "desc_act=True (act-order) reorders the inputs; use a checkpoint made with desc_act=False"
        if settings.get("bits") not in (4, 8):
            return f"{settings.get('bits')} bits are not read; use a checkpoint of 4 or 8 bits"
    if method == "awq":
        if settings.get("bits", 4) != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
            return "only 4 bits in the 'gemm' version are read; convert it, or use another checkpoint"
    if method == "compressed-tensors":
        for group in _groups(settings):
            weights = group.get("weights") or {}
            if weights.get("actorder") in ("group", True):
                return "actorder='group' reorders the inputs; use a checkpoint with actorder='static' or none"
            if (weights.get("type", "int"), weights.get("num_bits", 8)) not in (
                ("int", 4),
                ("int", 8),
                ("float", 8),
                ("float", 4),
            ):
                return f"weights of {weights.get('num_bits')} bits ({weights.get('type')}) are not read; use FP8, W4A16 or W8A16"
            formats = {str(group.get("format") or settings.get("format"))}
            if formats - {
                "pack-quantized",
                "float-quantized",
                "mxfp4-pack-quantized",
                "naive-quantized",
                "mixed-precision",
                "None",
            }:
                return (
                    f"the format {formats.pop()!r} is not read; float-quantized (FP8), pack-quantized (W4A16, W8A16) and "
                    "mxfp4-pack-quantized are"
                )
            if weights.get("type") == "int" and group.get("input_activations"):
                return "integer activations (W8A8) are not supported; use a W8A16 or an FP8 checkpoint"
        sparsity = (settings.get("sparsity_config") or {}).get("format")
        if sparsity not in (None, "dense"):
            return f"sparse weights ({sparsity}) are not read; use a dense checkpoint"
    return None


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [dict(group) for group in (settings.get("config_groups") or {}).values()]


def _scheme(method: str, settings: Mapping[str, Any]) -> tuple[str, int | None]:
    """(kind of codes, group size; None: a scale for each channel)."""
    if method == "fp8":
        block = settings.get("weight_block_size")
        return "fp8", block[1] if block else None
    if method == "mxfp4":
        return "fp4", 32
    if method in ("awq", "gptq"):
        size = settings.get("group_size", 128)
        return f"uint{settings.get('bits', 4)}", None if size in (None, -1) else int(size)
    for group in _groups(settings)[:1]:
        weights = group.get("weights") or {}
        block, size = weights.get("block_structure"), weights.get("group_size")
        if weights.get("type") == "float":
            return ("fp4", size or 32) if weights.get("num_bits") == 4 else ("fp8", block[1] if block else size)
        return f"uint{weights.get('num_bits', 4)}", None if size in (None, -1) else int(size)
    return "fp8", None


def _float8(path: str, tensors: Tensors, dtype: torch.dtype, settings: Mapping[str, Any]) -> QuantizedWeight:
    weight = _needed(path, tensors, "weight")
    if weight.dtype is not torch.float8_e4m3fn:
        _refuse(path, f"its codes are {weight.dtype}", "float8_e4m3fn is read; use another checkpoint")
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    if scale is None:
        _refuse(path, "weight_scale is missing", "use a checkpoint with the scales of its FP8 weights")
    if bool((weight.view(torch.uint8) & 0x7F == 0x7F).any()):
        _refuse(path, "some of its codes are NaN", "use another checkpoint")
    scale = _scales(path, scale)
    rows, width = weight.shape
    if scale.numel() == 1:
        return QuantizedWeight("fp8", weight, scale.reshape(1, 1).expand(rows, 1).contiguous(), None, width, dtype)
    if scale.ndim == 1:
        scale = scale[:, None]
    block = settings.get("weight_block_size")
    for group in _groups(settings):
        block = block or (group.get("weights") or {}).get("block_structure")
    high, wide = _block_of(scale.shape, (rows, width), block)
    if scale.shape != (-(-rows // high), -(-width // wide)):
        _refuse(
            path,
            f"its scales are {list(scale.shape)}, and the weight is {[rows, width]}",
            "check the checkpoint's config",
        )
    return QuantizedWeight("fp8", weight, scale.repeat_interleave(high, 0)[:rows].contiguous(), None, wide, dtype)


def _block_of(scales: torch.Size, shape: tuple[int, int], block: Any) -> tuple[int, int]:
    """(rows, columns) that share a scale."""
    if block and (scales[1] != 1 or (shape[1] <= block[1] and scales[0] == -(-shape[0] // block[0]))):
        return int(block[0]), int(block[1])
    return 1, -(-shape[1] // scales[1])


def _packed(path: str, tensors: Tensors, dtype: torch.dtype, settings: Mapping[str, Any]) -> QuantizedWeight:
    """compressed-tensors' packed weights: MXFP4 if the scales are exponents, else integers."""
    words, scale = _needed(path, tensors, "weight_packed"), _needed(path, tensors, "weight_scale")
    if words.dtype is torch.uint8:
        if scale.dtype is not torch.uint8:
            _refuse(path, f"its scales are {scale.dtype} (NVFP4)", "MXFP4, FP8 and integers are read")
        scales = torch.ldexp(torch.ones(scale.shape), scale.int() - 127).bfloat16()
        width = words.shape[1] * 2
        _check_groups(path, width, scale.shape[1], 32)
        return QuantizedWeight("fp4", words, scales, None, 32, dtype)
    rows, width = (int(size) for size in _needed(path, tensors, "weight_shape"))
    bits = 8 if words.shape[1] * 4 - width in range(4) else 4
    scale = _scales(path, scale)
    scale = scale.reshape(1, 1).expand(rows, 1).contiguous() if scale.numel() == 1 else scale
    codes = _unpacked(words, bits)[:, :width]
    groups = scale.shape[1]
    given = next(
        (int(size) for group in _groups(settings) if (size := (group.get("weights") or {}).get("group_size"))), -1
    )
    group_size = width if groups == 1 else given if given > 0 else -(-width // groups)
    if "weight_g_idx" in tensors and not torch.equal(tensors["weight_g_idx"].long(), torch.arange(width) // group_size):
        _refuse(
            path, "its weight_g_idx reorders the inputs (actorder)", "use a checkpoint with actorder='static' or none"
        )
    _check_groups(path, width, groups, group_size)
    zeros = None
    if (zero_words := tensors.get("weight_zero_point")) is not None:
        if zero_words.dtype is torch.int32:
            zeros = _unpacked(zero_words.t(), bits)[:, :rows].t()
        else:
            zeros = (zero_words.int() + (1 << (bits - 1))).to(torch.uint8)
    return _integers(codes, bits, scale, zeros, group_size, dtype)


def _integers(
    codes: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, dtype: torch.dtype
) -> QuantizedWeight:  # fmt: skip
    """Codes [out, in] and zeros [out, groups], uint8, as a weight."""
    codes = packed(codes) if bits == 4 else codes.contiguous()
    if zeros is not None:
        middle = bool((zeros == 1 << (bits - 1)).all())
        zeros = None if middle else zeros.contiguous()
    return QuantizedWeight(f"uint{bits}", codes, scales, zeros, group_size, dtype)


def _unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words [rows, n] int32 -> codes [rows, n * 32 / bits] uint8. `order`: the place of each code in a word."""
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    return ((words[:, :, None] >> places) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def _needed(path: str, tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        _refuse(
            path,
            f"{name} is missing (there are {', '.join(sorted(tensors))})",
            "download the checkpoint again, or use another",
        )
    return tensors[name]


def _scales(path: str, scales: torch.Tensor) -> torch.Tensor:
    """Scales in a dtype that kernels read."""
    scales = scales if scales.dtype in SCALES else scales.float()
    if not bool(torch.isfinite(scales.float()).all()):
        _refuse(path, "its scales are not finite", "use another checkpoint")
    return scales


def _check_groups(path: str, width: int, groups: int, group_size: int) -> None:
    if groups != -(-width // group_size):
        _refuse(
            path,
            f"{groups} groups of {group_size} do not make {width} inputs",
            "check group_size in quantization_config",
        )


def _refuse(path: str, what: str, fix: str) -> NoReturn:
    raise WeightsError(f"{path} is quantised: {what}; {fix}")
