"""Attention over paged KV: the contract, and its implementations."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from ..utils.extras import install_command
from .attention_backend import AttentionBackend, RadixAttention
from .fixed_backend import FixedAttnBackend, check_fixed_kv
from .flashinfer_backend import (
    DTYPES,
    HEAD_DIMS,
    WORKSPACE_BYTES,
    FlashInferAttnBackend,
    check_head_dim,
    check_kv_dtype,
)
from .torch_backend import InvariantTorchBackend, TorchAttnBackend

__all__ = [
    "AttentionBackend",
    "FlashInferAttnBackend",
    "RadixAttention",
    "TorchAttnBackend",
    "attention_workspace_bytes",
    "create_attention_backend",
]

logger = logging.getLogger(__name__)


def create_attention_backend(
    name: str,
    device: str | torch.device,
    dtype: torch.dtype,
    head_dim: int | None = None,
    kv_cache_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """The backend `name` ("auto", "torch" or "flashinfer") for `device` and `dtype`. None: K and V have the dtype, too.

    With `batch_invariant` it computes each row by itself, on either device.

    "auto" is FlashInfer for half precision on CUDA, if it is installed and has kernels for `head_dim`; otherwise torch.

    Raises:
        ValueError: an unknown name, or a backend without support for the device, dtype or head size.
        ImportError: FlashInfer is requested and not installed.
    """
    if name not in ("auto", "torch", "flashinfer"):
        raise ValueError(f"attention_backend={name!r}: expected 'auto', 'torch' or 'flashinfer'")
    on_cuda = torch.device(device).type == "cuda"
    if batch_invariant and on_cuda:
        check_fixed_kv(kv_cache_dtype or dtype, dtype)
        return FixedAttnBackend(device)
    if name == "auto":
        name = "torch"
        if on_cuda and dtype in DTYPES:
            why_not = _why_no_flashinfer(head_dim)
            if why_not is None:
                name = "flashinfer"
            else:
                logger.warning("attention runs on the torch backend, which is slower: %s", why_not)
    if name == "torch":
        return InvariantTorchBackend() if batch_invariant else TorchAttnBackend()
    if not on_cuda:
        raise ValueError(f"attention_backend='flashinfer' needs a CUDA device, not {device}; use 'torch'")
    if head_dim is not None:
        check_head_dim(head_dim)
    if kv_cache_dtype is not None:
        check_kv_dtype(kv_cache_dtype, dtype)
    return FlashInferAttnBackend(device, dtype)


def attention_workspace_bytes(
    name: str, device: str | torch.device, dtype: torch.dtype, head_dim: int | None = None
) -> int:
    """Device memory that the backend of `create_attention_backend` with the same arguments takes when it is made."""
    on_cuda = torch.device(device).type == "cuda"
    auto = name == "auto" and on_cuda and dtype in DTYPES and _why_no_flashinfer(head_dim) is None
    return WORKSPACE_BYTES if auto or name == "flashinfer" else 0


def _why_no_flashinfer(head_dim: int | None) -> str | None:
    if find_spec("flashinfer") is None:
        return f"FlashInfer is not installed ({install_command('cuda')})"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"FlashInfer has kernels for head sizes {HEAD_DIMS}, not {head_dim}"
    return None
