"""A model's fingerprint: a hash of all its weights, their dtypes, and the config.

Each tensor is reduced to a checksum: a weighted sum of its bits modulo 2**64. The sum does not depend on the order of its
terms, so the fingerprint is equal on every device. A gigabyte takes about half a second on a CPU. The fingerprint is not
cryptographic: it does not protect against deliberate collisions.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Device -> elements per step: as many as fit in a CPU's cache, or saturate a GPU."""
LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Element size in bytes -> integer dtype for the same bits, narrow enough that products keep the top bits."""
NOT_THE_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings that may differ between copies of one model. The weights' own dtypes are hashed."""
FACTOR = 0x9E3779B97F4A7C15 - 2**64


@torch.no_grad()
def model_fingerprint(model: nn.Module, config: PretrainedConfig) -> str:
    """64 hexadecimal digits, equal for equal weights, dtype and config."""
    settings = {
        key: value for key, value in config.to_diff_dict().items() if key not in NOT_THE_MODEL and key[0] != "_"
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"|{name} {tensor.dtype} {list(tensor.shape)} {checksum(tensor)}".encode())
    return digest.hexdigest()


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
