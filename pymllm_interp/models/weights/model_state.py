"""`ModelState`: identity of a served model at a moment, for the prefix cache, fingerprints and receipts.

It covers parameters, persistent buffers, and the adapter of a request. `version` grows with every edit; the prefix cache is then
emptied. `namespace` keeps the KV of adapters apart. `fingerprint` hashes all tensors, their dtypes, the config, and the
weights of the adapter.

Each tensor is reduced to a checksum: a weighted sum of its bits modulo 2**64. The sum does not depend on the order of its
terms, so the fingerprint is equal on every device. A gigabyte takes about half a second on a CPU. The fingerprint is not
cryptographic: it does not protect against deliberate collisions.

`ModelState` notices edits by torch's version counters. They count in-place operations on a weight, on its views, and on
``weight.data`` and ``weight.detach()`` of a served model (layers/seal.py). In `torch.inference_mode` they do so too. They do not
count writes through ``weight.numpy()``, DLPack, ``weight.untyped_storage()``, ``weight.data.data``, or kernels of your own that
take an address. After such a write, count it: ``torch.autograd.graph.increment_version(weight)``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ...core.events import EngineSleepingError
from ...layers.seal import persistent_buffers
from ...utils.arguments import shown

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Device -> elements per step: as many as fit in a CPU's cache, or saturate a GPU."""
LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Element size in bytes -> integer dtype for the same bits, narrow enough that products keep the top bits."""
NOT_THE_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings that may differ between copies of one model. The weights' own dtypes are hashed."""
FACTOR = 0x9E3779B97F4A7C15 - 2**64


def model_fingerprint(model: nn.Module, config: PretrainedConfig) -> str:
    """64 hexadecimal digits, equal for equal weights, dtype and config."""
    return ModelState(model, config).fingerprint()


def settings_of(config: PretrainedConfig) -> dict[str, Any]:
    """The settings of a config that are part of the model."""
    return {k: v for k, v in config.to_diff_dict().items() if k not in NOT_THE_MODEL and k[0] != "_"}


class ModelState:
    """Version, namespace and fingerprint of a model with weights that may be edited. Only edited weights are summed again.

    Args:
        model: module with parameters and persistent buffers that are edited in place, never replaced.
        config: transformers config that the model was built from. Later edits of it do not count.

    Attributes:
        adapters: name -> digest of the weights of each loaded adapter (models/adapters/slots.py).
        closed: the model was released.
        asleep: the weights have no memory.
    """

    def __init__(self, model: nn.Module, config: PretrainedConfig) -> None:
        self._settings = json.dumps(settings_of(config), sort_keys=True, default=str).encode()
        self._named = sorted([*model.named_parameters(), *persistent_buffers(model)])
        self._checksums: dict[str, tuple[int, int]] = {}  # name -> (version, checksum)
        self._last: tuple[int, str] | None = None  # (version, fingerprint)
        self.adapters: dict[str, str] = {}
        self.closed = self.asleep = False

    @property
    def version(self) -> int:
        """Grows with every edit that torch counts; equal numbers mean equal weights. Takes about 50 us for 270 weights."""
        return sum([tensor._version for _, tensor in self._named])

    def namespace(self, adapter: str | None = None) -> Hashable:
        """Key of KV beside `version`, for requests with this adapter; None for the model itself.
        Raises ValueError: no such adapter is loaded."""
        if adapter is None:
            return None
        digest = self.adapters.get(adapter)
        if digest is None:
            raise ValueError(f"there is no adapter {shown(adapter)}: lm.adapters.load(name, folder) loads one")
        return digest

    def fingerprint(self, adapter: str | None = None) -> str:
        """`model_fingerprint` of the weights as they are now. An edit that is undone restores the earlier value.
        Raises ValueError: as `namespace`."""
        namespace = self.namespace(adapter)
        if self.asleep:
            raise EngineSleepingError("the weights are asleep: lm.wake() wakes them")
        version = self.version  # before the sums: an edit meanwhile leads to another sum
        if self._last is None or self._last[0] != version:
            digest = hashlib.sha256(self._settings)
            for name, tensor in self._named:
                value = self._checksum(name, tensor)
                digest.update(f"|{name} {tensor.dtype} {list(tensor.shape)} {value}".encode())
            self._last = version, digest.hexdigest()
        found = self._last[1]
        return found if namespace is None else hashlib.sha256(f"{found}|{namespace}".encode()).hexdigest()

    def close(self) -> None:
        """Let go of the model's tensors."""
        self.closed = True
        self._named.clear()

    def _checksum(self, name: str, tensor: Tensor) -> int:
        version = tensor._version  # before the sum: an edit meanwhile leads to another sum
        known, value = self._checksums.get(name, (-1, 0))
        if known != version:
            value = checksum(tensor)
            self._checksums[name] = version, value
        return value


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A checksum of all elements' bits and positions, below 2**64."""
    lanes = tensor.detach().contiguous().view(-1).view(LANES[tensor.itemsize])
    size = CHUNK.get(tensor.device.type, CHUNK["cpu"])
    places = torch.arange(min(size, len(lanes)), device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(lanes), size):
        part = lanes[start : start + size].to(torch.int64)
        factors = (places[: len(part)] + (start + 1)) * FACTOR
        total += ((factors ^ (factors >> 29)) * part).sum()
    return int(total) % 2**64
