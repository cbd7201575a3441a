"""Attention over paged KV: the contract, and its implementations."""

from __future__ import annotations

import torch

from .attention_backend import AttentionBackend
from .radix_attention import RadixAttention
from .torch_backend import TorchAttnBackend

__all__ = ["AttentionBackend", "RadixAttention", "TorchAttnBackend", "create_attention_backend"]


def create_attention_backend(name: str, device: str | torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend that `name` ("auto", "torch" or "flashinfer") stands for on `device` with `dtype`.

    Raises:
        ValueError: an unknown name, or a backend that cannot serve this device or dtype.
        NotImplementedError: a backend that is not there yet.
    """
    if name in ("auto", "torch"):
        return TorchAttnBackend()
    if name != "flashinfer":
        raise ValueError(f"attention_backend={name!r}: expected 'auto', 'torch' or 'flashinfer'")
    if torch.device(device).type != "cuda":
        raise ValueError(f"attention_backend='flashinfer' needs a CUDA device, not {device}; use 'torch'")
    if dtype == torch.float32:
        raise ValueError(
            "attention_backend='flashinfer' has no float32 kernels; use dtype='bfloat16', or attention_backend='torch'"
        )
    raise NotImplementedError(
        "attention_backend='flashinfer' is not there yet (it will come with the extra pymllm-interp[cuda]); use 'torch'"
    )
