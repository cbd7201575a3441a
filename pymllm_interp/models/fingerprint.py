"""A model's fingerprint: which weights, read whole, in which dtype, under which config.

Weights are summed up as whole numbers with a factor for each place, modulo 2**64: such a sum does not depend on the order of its
terms, so a model has the same fingerprint on every device. A gigabyte takes about half a second on a CPU. It tells models
apart; it does not protect from somebody who wants two of them to look the same.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements at a time: what a CPU's cache holds, and what keeps a GPU busy."""
LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Size of an element -> whole numbers of the same bits, short enough that their top bits are not lost in the products."""
NOT_THE_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings that the same model may have differently; the weights' dtypes count as they are."""
FACTOR = 0x9E3779B97F4A7C15 - 2**64


@torch.no_grad()
def model_fingerprint(model: nn.Module, config: PretrainedConfig) -> str:
    """64 hexadecimal digits; equal for equal weights, dtype and config."""
    settings = {
        key: value for key, value in config.to_diff_dict().items() if key not in NOT_THE_MODEL and key[0] != "_"
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"|{name} {tensor.dtype} {list(tensor.shape)} {checksum(tensor)}".encode())
    return digest.hexdigest()


def checksum(tensor: Tensor) -> int:
    """Of the bits of all elements and their places, below 2**64."""
    lanes = tensor.detach().contiguous().view(-1).view(LANES[tensor.itemsize])
    size = CHUNK.get(tensor.device.type, CHUNK["cpu"])
    places = torch.arange(min(size, len(lanes)), device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(lanes), size):
        part = lanes[start : start + size].to(torch.int64)
        factors = (places[: len(part)] + (start + 1)) * FACTOR
        total += ((factors ^ (factors >> 29)) * part).sum()
    return int(total) % 2**64
