"""`Adapter`: a LoRA adapter in host memory, read from a folder of PEFT's and checked against a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...utils.files.checked_files import check_safetensors
from ...utils.upload import flat_bytes
from ..base import CausalLM
from ..registry import architecture_of
from .peft_config import MERGE, AdapterError, PeftConfig
from .targets import Target, unsupported_reason

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
MAX_LISTED = 6


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter.

    Attributes:
        name: name in requests.
        folder: folder that it was loaded from.
        weights: module path -> A [rank, in] and B [out, rank], in the model's dtype. B includes the scaling.
        digest: hash of weights and paths. Adapters with one digest are equal.
    """

    name: str
    folder: str
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    digest: str = field(repr=False)

    @property
    def rank(self) -> int:
        """Largest rank of its modules."""
        return max(a.shape[0] for a, _ in self.weights.values())


@torch.no_grad()
def read_adapter(
    name: str, folder: str | Path, model: CausalLM, targets: Mapping[str, Target], max_rank: int
) -> Adapter:
    """The adapter in a folder with adapter_config.json and adapter_model.safetensors.

    Args:
        targets: `targets_of` the model.
        max_rank: `max_lora_rank`.

    Raises:
        AdapterError: an unsupported or unfitting adapter; the message has the fix.
    """
    path = Path(folder)
    config = PeftConfig.read(path)
    architecture = architecture_of(model.config)
    if config.base_class and config.base_class != architecture:
        raise AdapterError(
            f"{path} is an adapter of {config.base_class}{_base(config)}, and this model is {architecture}: load the adapter's base"
        )
    tensors = _tensors(path)
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in sorted({_module_of(path, key) for key in tensors}):
        weights[module] = _pair(path, module, tensors, config, model, targets)
    missing = [module for module in targets if config.targets(module) and module not in weights]
    if missing:
        raise AdapterError(
            f"{path}: {WEIGHTS_FILE} has no weights for {_listed(missing)}, which adapter_config.json targets: save the adapter "
            "again; or it is an adapter of a smaller base"
        )
    found = Adapter(name, str(folder), weights, _digest(weights))
    if found.rank > max_rank:
        raise AdapterError(
            f"{path} has rank {found.rank}, and max_lora_rank is {max_rank}: LM(..., max_lora_rank={found.rank})"
        )
    return found


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    file = path / WEIGHTS_FILE
    if not file.is_file():
        pickled = " (adapter_model.bin is a pickle: save it with safe_serialization=True)"
        raise AdapterError(f"{path} has no {WEIGHTS_FILE}{pickled if (path / 'adapter_model.bin').is_file() else ''}")
    try:
        check_safetensors(file)
        found = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise AdapterError(f"{file} cannot be read: {error}: download it again") from error
    if not found:
        raise AdapterError(f"{file} has no tensors")
    return found


def _module_of(path: Path, key: str) -> str:
    """The path of a tensor's module in transformers."""
    if not key.startswith(PREFIX) or not key.endswith((A, B)):
        what = "an embedding's" if ".lora_embedding" in key else "DoRA's" if "magnitude" in key else "not LoRA's A or B"
        raise AdapterError(f"{path}: the tensor {key} is {what}, and only lora_A and lora_B are supported: {MERGE}")
    return key[len(PREFIX) : -len(A)]


def _pair(
    path: Path, module: str, tensors: Mapping[str, torch.Tensor], config: PeftConfig, model: CausalLM,
    targets: Mapping[str, Target],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A and B of a module, B with the scaling."""
    target = targets.get(module)
    if target is None:
        why = unsupported_reason(model, module)
        raise AdapterError(f"{path} targets {module}: {why}{_base(config)}; {MERGE}")
    a, b = tensors.get(f"{PREFIX}{module}{A}"), tensors.get(f"{PREFIX}{module}{B}")
    if a is None or b is None:
        raise AdapterError(
            f"{path}: {WEIGHTS_FILE} has no {'lora_A' if a is None else 'lora_B'} for {module}: save the adapter again"
        )
    rank = config.rank(module)
    shapes = {"lora_A": (a, (rank, target.in_features)), "lora_B": (b, (target.out_features, rank))}
    for what, (tensor, expected) in shapes.items():
        if tuple(tensor.shape) != expected:
            raise AdapterError(
                f"{path}: {what} of {module} has shape {list(tensor.shape)}, and this model with rank {rank} takes "
                f"{list(expected)}: it is an adapter of another base{_base(config)}, or its config is another adapter's"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{path}: {what} of {module} holds no finite numbers: train or save the adapter again")
    dtype, scaling = target.weight.dtype, config.scaling(module)
    pair = a.to(dtype), (b.float() * scaling).to(dtype)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in pair):
        raise AdapterError(
            f"{path}: lora_A or lora_B of {module}, multiplied by alpha / rank = {scaling:g}, has no finite numbers in {dtype}: "
            f"correct lora_alpha, or train the adapter again"
        )
    return pair


def _digest(weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for module, pair in sorted(weights.items()):
        digest.update(f"|{module} {pair[0].shape[0]}".encode())
        for tensor in pair:
            digest.update(flat_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()


def _base(config: PeftConfig) -> str:
    return f" ({config.base})" if config.base else ""


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return ", ".join(found[:MAX_LISTED]) + more
