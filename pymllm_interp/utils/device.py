"""Dtypes and devices, as torch knows them, of the names that callers write."""

from __future__ import annotations

import torch

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def resolve_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    """The torch dtype that `dtype` names. "auto" is float32 on the CPU and bfloat16 on CUDA. Raises ValueError: an unknown name."""
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype {dtype} is not supported; use one of {sorted(DTYPES)} or 'auto'")
        return dtype
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; use one of {sorted(DTYPES)} or 'auto'")
    return DTYPES[dtype]


def resolve_device(device: str) -> str:
    """Device name "cpu" or "cuda[:n]"; "auto" is CUDA if available.
    Raises ValueError: CUDA is asked for and not available, or has no such device; or another kind of device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = device.partition(":")
    if device != "cpu" and (kind != "cuda" or (colon and not index.isdecimal())):
        raise ValueError(f"device={device!r} is not supported; use 'cpu', 'cuda', 'cuda:N' or 'auto'")
    if kind == "cuda" and not torch.cuda.is_available():
        cause = (
            "look for the driver (nvidia-smi) and at CUDA_VISIBLE_DEVICES"
            if torch.version.cuda
            else "install a CUDA build of torch"
        )
        raise ValueError(
            f"device={device!r}, but torch sees no CUDA device (torch {torch.__version__}); use device='cpu', or {cause}"
        )
    if index and int(index) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}, but the last CUDA device is 'cuda:{torch.cuda.device_count() - 1}'")
    return device
