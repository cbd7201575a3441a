"""`WeightUpdate`: new weights of a served model, in whole or in part, written in place.

    update = WeightUpdate(model, hf_config, model_config)
    update.add(trainer.named_parameters())      # or a folder; nothing is written
    update.check()                              # names, shapes, dtypes
    update.write()                              # between two steps

Tensors keep their memory, which captured graphs read. Names, fused and quantised layouts are the loader's. So the model then
equals one that is loaded from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..config import ModelConfig
from ..layers.quantization.expert_tiles import ExpertTiles, shift_of
from ..layers.quantization.experts import QuantizableExperts, StoredExperts
from ..layers.quantization.gemm import laid_out
from ..layers.quantization.readable import QuantizableModule
from ..layers.quantization.weight import QuantizedWeight, quantized
from ..layers.seal import quantised_names
from .base import CausalLM
from .native.decoder import DecoderForCausalLM
from .native.eagle import Eagle3Head
from .registry import load_model, named_tensors
from .weights.experts import load_experts
from .weights.formats import LEAVES, WORDS, QuantizationFormat
from .weights.loading import MAX_NAMES_LISTED, WeightsError, check_readable, is_harmless, iter_safetensors
from .weights.model_state import settings_of
from .weights.quantized import KV_SCALE, SCALES_OF_STATES, Part, own_weight, part_of
from .weights.source import ModelSource, resolve_model

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightUpdate:
    """New weights that are collected and checked before the first of them is written.

    Args:
        model: the served model.

    Attributes:
        any_quantised: whether folders with weights of any quantisation are read.
    """

    any_quantised = False

    def __init__(self, model: CausalLM, hf_config: PretrainedConfig, config: ModelConfig) -> None:
        self.model, self._hf_config, self._config = model, hf_config, config
        self._given: dict[str, Tensor] = {}
        self._writes: list[Callable[[], object]] = []
        self._seen: dict[int, Tensor] = {}
        self._problems: dict[str, list[str]] = {}
        self._casts = False

    def __len__(self) -> int:
        return len(self._given)

    @property
    def num_bytes(self) -> int:
        """Size of the given tensors."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self._given.values())

    def add(self, weights: NamedTensors | str | Path) -> None:
        """Collect tensors. They are held, not copied, until `write`.

        Args:
            weights: tensors by their names in the module tree, or in a checkpoint of a native model. Or a folder with all.

        Raises:
            TypeError: something else.
            WeightsError: a name that was given before, a tensor without values in memory, or a folder of another model.
        """
        if isinstance(weights, str | Path):
            weights = self._of_folder(Path(weights))
        for entry in weights.items() if isinstance(weights, Mapping) else weights:
            name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(f"new weights are a folder, or tensors by name; got {type(tensor or name).__name__}")
            if name in self._given:
                raise WeightsError(f"{name} is given twice")
            check_readable(name, tensor)
            self._given[name] = tensor.detach()

    def _of_folder(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self.model, Eagle3Head):
            raise WeightsError("an EAGLE-3 head takes named tensors, with the names of its module tree, and no folder")
        source, config = self._source_of(folder)
        assert source.folder is not None
        self._casts = True  # as the loader does
        if isinstance(self.model, DecoderForCausalLM):
            return iter_safetensors(source.folder)
        # transformers' own conversions, in host memory
        spec = self.model.spec
        loaded = load_model(source.hf_config, config.impl, spec, "cpu", spec.context_len, source.folder, config.seed)
        return iter(loaded.state_dict().items())

    def _source_of(self, folder: Path) -> tuple[ModelSource, ModelConfig]:
        """The model in a folder, and its configuration. Raises WeightsError: another model."""
        config = replace(self._config, model=str(folder), load_format="auto", hf_config=None, saes={})
        source = resolve_model(config, self.any_quantised)
        ours, theirs = settings_of(self._hf_config), settings_of(source.hf_config)
        other = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if other:
            raise WeightsError(f"{folder} has another config than the served model: {', '.join(other)}")
        return source, config

    # -- checks ----------------------------------------------------------------------------

    @torch.no_grad()
    def check(self, whole: bool = False) -> None:
        """Find the place of each tensor.

        Args:
            whole: whether a weight without a tensor is an error, as it is of a folder.

        Raises:
            WeightsError: unknown, misshapen or missing tensors, or other dtypes, all in one message. Nothing was written.
        """
        if not self._given:
            raise WeightsError("no weights were given")
        self._writes, self._seen, self._problems = [], {}, {}
        whole = whole or self._casts
        codes = {
            f"{path}.{name}_{part}".lstrip(".")
            for path, module in self.model.named_modules()
            for name in quantised_names(module)
            for part in ("codes", "scales", "zeros")
        }
        targets = {k: v for k, v in self.model.state_dict(keep_vars=True).items() if k not in codes}
        own = {target.untyped_storage().data_ptr() for target in targets.values()}
        for name, tensor in self._given.items():
            if tensor.untyped_storage().data_ptr() in own:
                self._given[name] = tensor.clone()  # of a weight that another write may change first
        quantised = bool(codes)
        for name, tensor in self._by_target(whole):
            if name in targets:
                self._plan(name, targets[name], tensor)
            elif (at := KV_SCALE.search(name)) is not None and quantised:
                self._check_kv_scale(name, int(at[1]), at[2], tensor)
            elif not self._may_ignore(name, quantised):
                self._problem("unknown", name)
        if whole:
            for name, target in targets.items():
                if id(target) not in self._seen:
                    self._problem("missing", name)
            for module_name, module in self.model.named_modules():
                for name in quantised_names(module):
                    held: Any = module.quantized
                    if id(held[name] if isinstance(held, dict) else held) not in self._seen:
                        self._problem("missing", f"{module_name}.{name}")
        if self._problems:
            raise WeightsError(self._message())

    def _may_ignore(self, name: str, quantised: bool) -> bool:
        tied = getattr(self._hf_config, "tie_word_embeddings", False) and name == "lm_head.weight"
        return is_harmless(name) or tied or (quantised and name.endswith(SCALES_OF_STATES))

    def _by_target(self, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """The tensors by their names in the module tree, without quantised products, which are planned here."""
        if not isinstance(self.model, DecoderForCausalLM):
            yield from self._given.items()
            return
        tensors = self.model.parameters_of(named_tensors(self.model, self._given.items(), whole))
        stored, quantize = QuantizationFormat.of(self._hf_config), self._config.quantize
        if stored is None and quantize is None:
            yield from tensors
            return
        modules: dict[str, Any] = {p: m for p, m in self.model.named_modules() if isinstance(m, QuantizableModule)}
        own: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_experts(self.model, tensors, stored, self._put_experts, set()):
            path, _, leaf = name.rpartition(".")
            if path in modules and leaf in LEAVES:
                own.setdefault(path, {})[leaf] = tensor
            else:
                yield name, tensor
        for path, parts in own.items():
            module, weight = modules[path], parts.get("weight")
            if (
                weight is not None
                and weight.dtype.itemsize > 1
                and not self._has_dtype(f"{path}.weight", weight, own_weight(module))
            ):
                continue
            if parts.keys() & WORDS:
                parts = {leaf: tensor.cpu() for leaf, tensor in parts.items()}  # where they are unpacked
            part = part_of(path, module, parts, stored)
            if part is None:
                self._problem("incomplete", f"{path} ({', '.join(sorted(parts))})")
            elif module.quantized is None:
                rows = part.dequantize() if isinstance(part, QuantizedWeight) else part
                yield f"{path}.weight", rows.t() if module.transposed else rows
            else:
                self._plan_codes(path, module, part, quantize is not None)

    def _plan(self, name: str, target: Tensor, tensor: Tensor) -> None:
        if target.shape != tensor.shape:
            self._problem("misshapen", f"{name} is {list(tensor.shape)}, the model's is {list(target.shape)}")
        elif self._has_dtype(name, tensor, target):
            known = self._seen.setdefault(id(target), tensor)
            if known is not tensor and not torch.equal(known.to(target), tensor.to(target)):
                self._problem("contradictory", f"{name} differs from the weight that the config ties it to")
            elif known is tensor:
                self._writes.append(partial(_copy, target, tensor))

    def _has_dtype(self, name: str, tensor: Tensor, target: Tensor) -> bool:
        ok = tensor.dtype == target.dtype or (self._casts and tensor.dtype.itemsize > 1)
        if not ok:
            advice = "" if tensor.dtype.itemsize == 1 else f"; give tensor.to({target.dtype})"
            self._problem("of another dtype", f"{name} is {tensor.dtype}, the model's is {target.dtype}{advice}")
        return ok

    def _plan_codes(self, path: str, module: QuantizableModule, part: Part, rounds: bool) -> None:
        held = module.quantized
        assert held is not None
        self._seen[id(held)] = held.codes
        if rounds and isinstance(part, Tensor):
            self._writes.append(lambda: write_codes(held, quantized(part.to(held.dtype).contiguous())))
        elif isinstance(part, Tensor):
            self._problem("unquantised", f"{path} is served as {held.kind} codes: give these, and their scales")
        elif reason := other_form(held, part):
            self._problem("quantised otherwise", f"{path}: {reason}")
        else:
            self._writes.append(lambda: write_codes(held, part))

    def _put_experts(self, whole: str, module: QuantizableExperts, kind: str, weight: Tensor | QuantizedWeight) -> None:
        held = module.quantized.get(kind)
        if held is None:
            if isinstance(weight, QuantizedWeight):
                rows = weight.dequantize()
                weight = rows.view(module.num_experts, -1, rows.shape[1])
            target: Any = module._parameters[kind]
            self._plan(whole, target, weight.transpose(1, 2) if module.transposed else weight)
            return
        self._seen[id(held)] = held.tensors["codes"]
        if isinstance(weight, Tensor):
            self._problem("unquantised", f"{whole} is served as codes: give these, and their scales")
        elif reason := other_experts(held, weight):
            self._problem("quantised otherwise", f"{whole}: {reason}")
        else:
            self._writes.append(lambda: write_experts(held, weight, module, kind))

    def _check_kv_scale(self, name: str, layer: int, kind: str, tensor: Tensor) -> None:
        scales: Any = getattr(self.model, "kv_scales", None) or {}
        if tensor.numel() != 1 or float(tensor) != scales.get(layer, (1.0, 1.0))["kv".index(kind)]:
            self._problem("unchangeable", f"{name}: scales of K and V stay as they were loaded")

    def _problem(self, kind: str, text: str) -> None:
        self._problems.setdefault(kind, []).append(text)

    def _message(self) -> str:
        lines = [f"these weights are not those of the served {type(self.model).__name__}; nothing was written:"]
        for kind, found in self._problems.items():
            more = f" and {len(found) - MAX_NAMES_LISTED} more" if len(found) > MAX_NAMES_LISTED else ""
            lines.append(f"  {len(found)} {kind}: {', '.join(found[:MAX_NAMES_LISTED])}{more}")
        return "\n".join(lines)

    # -- writing ----------------------------------------------------------------------------

    @torch.no_grad()
    def write(self) -> None:
        """Write the checked tensors, and wait for the device: the given ones may be freed afterwards."""
        for write in self._writes:
            write()
        parameter = next(self.model.parameters())
        if parameter.is_cuda:
            torch.cuda.synchronize(parameter.device)
        self.drop()

    def drop(self) -> None:
        """Let go of the given tensors."""
        self._given, self._writes, self._seen = {}, [], {}


def _copy(target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor, non_blocking=tensor.is_pinned())


def other_form(held: QuantizedWeight, given: QuantizedWeight) -> str:
    """Difference of two quantised weights' forms; "" for equal ones."""
    for name, ours, theirs in (
        ("kind", held.kind, given.kind),
        ("group size", held.group_size, given.group_size),
        ("shape", list(held.shape), list(given.shape)),
        ("zero points", held.zeros is not None, given.zeros is not None),
        ("scales", list(held.scales.shape), list(given.scales.shape)),
    ):
        if ours != theirs:
            return f"its {name} is {theirs}, the model's is {ours}"
    dtype = held.scale_dtype or held.scales.dtype
    if given.scales.dtype != dtype != torch.float32:  # which has all of them exactly
        return f"its scales are {given.scales.dtype}, the model's are {dtype}"
    return ""


def write_codes(held: QuantizedWeight, given: QuantizedWeight) -> None:
    """Write a weight of the same form into the memory of `held`."""
    new = laid_out(given.to(held.device))
    for name, tensor in held.tensors.items():
        tensor.copy_(new.tensors[name])


def other_experts(held: StoredExperts, given: QuantizedWeight) -> str:
    """`other_form` of experts' weights."""
    if isinstance(held, QuantizedWeight):
        return other_form(held, given)
    if given.kind != "fp4" or given.shape != held.shape:
        return f"it is {given.kind} {list(given.shape)}, the model's is fp4 {list(held.shape)}"
    try:
        shift = shift_of(given.scales)
    except ValueError as error:
        return str(error)
    return "" if shift == held.shift else f"its scales need the factor 2^{shift}, captured passes have 2^{held.shift}"


def write_experts(held: StoredExperts, given: QuantizedWeight, module: QuantizableExperts, kind: str) -> None:
    """`write_codes` of the experts' weight `kind` of a module."""
    if isinstance(held, QuantizedWeight):
        new: StoredExperts = given.to(held.device)
    else:
        new = ExpertTiles.of(given.to(held.words.device), held.experts, kind == "gate_up_proj", module.interleaved)
    for name, tensor in held.tensors.items():
        tensor.copy_(new.tensors[name])
