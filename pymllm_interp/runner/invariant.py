"""Batch-invariant mode of a runner: checks before a model is loaded, and the hash of its kernels (docs/batch-invariance.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from ..core.unsupported import UnsupportedModelError
from ..kernels.cpu.cpu_build import max_isa, processor
from ..kernels.cpu.cpu_dispatch import cpu_kernels
from ..layers.invariant import batch_invariant
from ..models.registry import VISION, architecture_of, is_native

if TYPE_CHECKING:
    from .parts import RunnerParts

COMPUTES = ("attention", "kernels", "layers", "models", "sampling")
"""Folders with the code that computes a request's values."""


def invariant_kind(runner: RunnerParts) -> str | None:
    """Kind of the device in batch-invariant mode; None in the default mode."""
    return runner.device.partition(":")[0] if runner.server_config.batch_invariant else None


def mode(runner: RunnerParts, config: PretrainedConfig | None = None) -> AbstractContextManager[None]:
    """Context for parts of a runner: they have the mode of its settings.

    Args:
        config: a model to be loaded. Batch-invariant mode checks it, and sets `RunnerParts.kernels`.

    Raises:
        UnsupportedModelError: a model or a setting without batch-invariant kernels, with its name and advice.
    """
    if config is not None and runner.server_config.batch_invariant:
        for reason in _reasons(runner, config):
            raise UnsupportedModelError(f"batch_invariant=True: {reason}")
        runner.kernels = _fingerprint(runner.device, runner.dtype)
    return batch_invariant(invariant_kind(runner))


def _reasons(runner: RunnerParts, config: PretrainedConfig) -> Iterator[str]:
    server, model = runner.server_config, runner.model_config
    architecture = architecture_of(config)
    if architecture in VISION:
        yield f"{architecture} has an image encoder of transformers, and is not served so"
    if not is_native(config, model.impl):
        yield f"{architecture} runs by its class in transformers; models with a native implementation are served so"
    if server.attention_backend == "flashinfer":
        yield "attention_backend='flashinfer' divides keys by the batch: leave it out"
    if model.quantize == "fp8-w8a8":
        yield "quantize='fp8-w8a8' rounds inputs of large steps only: use quantize='fp8'"
    if server.enable_torch_compile:
        yield "enable_torch_compile=True has other kernels for each batch size: leave it out"
    if runner.device == "cpu":
        kernels = cpu_kernels()
        if kernels is None or not kernels.has_gemm(runner.dtype):
            yield f"on a CPU it needs the compiled kernels (a C++ compiler) for {runner.dtype}, and there are none"
        if server.kv_cache_dtype not in ("auto", str(runner.dtype)[6:]):
            yield f"on a CPU kv_cache_dtype is the model's, and not {server.kv_cache_dtype!r}"
    elif runner.dtype not in (torch.bfloat16, torch.float16):
        yield f"on CUDA models run in bfloat16 or float16, and not in {runner.dtype}"


def _fingerprint(device: str, dtype: torch.dtype) -> str:
    """SHA-256 of the package's code for passes, the versions, the processor or GPU, and the dtype: 64 hexadecimal digits."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(
        file for part in COMPUTES for file in (package / part).rglob("*") if file.suffix in (".py", ".cpp", ".h")
    ):
        digest.update(f"|{file.relative_to(package)}|".encode() + file.read_bytes())
    parts: list[Any] = [torch.__version__, str(dtype)]
    if device == "cpu":
        parts += [processor(), max_isa()]
    else:
        parts += [
            torch.version.cuda,
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
            version("triton"),
        ]
    digest.update(repr(parts).encode())
    return digest.hexdigest()
