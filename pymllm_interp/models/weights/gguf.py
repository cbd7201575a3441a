"""Converts GGUF files, once each, into a folder of safetensors in the user's cache.

    folder = convert_gguf(Path("model-Q4_1.gguf"))   # takes seconds the first time, then it is cached

The folder has the layout of `save_pretrained`: config, weights, tokenizer. Weights are dequantised to float32, because bfloat16
cannot represent the values of most quantisations. A Q4_1 value, for example, is a 16-bit scale times a 4-bit integer plus a 16-bit
offset. A file with n parameters takes 4 n bytes. The folder's name includes a hash of the file, and the folder gets its name when
it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers import modeling_gguf_pytorch_utils as gguf_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from ...utils.files.cache_folder import CACHE_VARIABLE, default_cache_dir
from ...utils.files.checked_files import check_gguf
from .gguf_tokenizer import read_tokenizer
from .loading import SINGLE_FILE, WeightsError, load_weights

if TYPE_CHECKING:
    from gguf import GGUFReader

CONVERTER_VERSION = 1
"""Part of the folder's name. Increase it when the conversion changes."""
NOT_DECODERS = {"general", "tokenizer", "t5", "umt5"}
SUPPORTED_ARCHITECTURES = sorted(set(gguf_utils.GGUF_SUPPORTED_ARCHITECTURES) - NOT_DECODERS)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert_gguf(path: Path, cache_dir: Path | None = None) -> Path:
    """The folder with a GGUF file's config, float32 safetensors and tokenizer. Converts the file if it is not cached.

    Several processes may convert at once. A failed conversion leaves no files.

    Raises:
        FileNotFoundError: no such file.
        ImportError: the package `gguf` is missing.
        ValueError: not a GGUF file, a truncated file (WeightsError), or an architecture, RoPE scaling or quantisation without a
            faithful conversion.
        OSError: no space or no permission in the cache. The message has the size, and the variable that moves the cache.
    """
    path, cache = Path(path).absolute(), cache_dir or default_cache_dir()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a .gguf file is expected")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache / f"{path.stem}-{digest[:16]}-v{CONVERTER_VERSION}"
    if _is_complete(target):
        return target
    with _status(f"Converting {path.name} to safetensors in {cache} (once)"), _quiet_transformers():
        reader = _open_reader(path)
        _check_architecture(reader, path)
        space = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors) + 2**25
        with _explained_errors(cache, space):
            cache.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(cache).free < space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=cache))
            try:
                _convert(reader, path, staging)
                _publish(staging, target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return target


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / SINGLE_FILE).is_file()


def _open_reader(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"reading {path.name} needs the package gguf; run: pip install gguf") from error
    try:
        check_gguf(path)
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} is not a GGUF file, or it is truncated or corrupt ({error}); download it again"
        ) from error


def _field(reader: GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.fields.get(name)
    return default if field is None else field.contents()


def _check_architecture(reader: GGUFReader, path: Path) -> None:
    """Refuse files that transformers cannot read, before any conversion."""
    architecture = _field(reader, "general.architecture")
    known = {_squeeze(name) for name in SUPPORTED_ARCHITECTURES}
    if architecture is None or _squeeze(architecture) not in known:
        raise ValueError(
            f"{path.name} has the architecture {architecture!r}; GGUF files can be converted for "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. Use the model's safetensors instead (a folder or a hub id)"
        )
    if (parts := _field(reader, "split.count", 1)) > 1:
        raise ValueError(
            f"{path.name} is one of {parts} parts; merge them first: llama-gguf-split --merge {path.name} merged.gguf"
        )


def _squeeze(architecture: str) -> str:
    """The name without separators: GGUF writes "qwen2moe", transformers "qwen2_moe"."""
    return architecture.replace("-", "").replace("_", "")


def _convert(reader: GGUFReader, path: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of the open file into `folder`, and sync them to disk."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    _restore_rope_scaling(reader, config, path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    try:
        checkpoint = gguf_utils.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    except NotImplementedError as error:
        raise ValueError(f"{path.name} holds a quantisation that cannot be converted: {error}") from error
    tensors: dict[str, Tensor] = {name: tensor.float() for name, tensor in checkpoint["tensors"].items()}
    load_weights(model, tensors.items())  # on the meta device: checks names and shapes, copies nothing
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    read_tokenizer(reader, path).save_pretrained(folder)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    for file in folder.iterdir():
        _sync(file)


def _restore_rope_scaling(reader: GGUFReader, config: PretrainedConfig, path: Path) -> None:
    """Restore Llama 3's RoPE scaling in the config, and refuse all other scalings: transformers' reader drops them.

    llama.cpp stores this scaling as a divisor of each frequency. The parameters are inferred from the divisors, then checked.
    """
    architecture = _field(reader, "general.architecture")
    scaling = _field(reader, f"{architecture}.rope.scaling.type", "none")
    factors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_")}
    if _squeeze(architecture) == "gptoss" or (scaling == "none" and not factors):
        return
    if scaling == "none" and list(factors) == ["rope_freqs.weight"]:
        divisors = torch.tensor(factors["rope_freqs.weight"], dtype=torch.float32)
        exponents = torch.arange(len(divisors)) / len(divisors)
        expected = config.rope_parameters["rope_theta"] ** -exponents / divisors
        config.rope_parameters = {**config.rope_parameters, **LLAMA3_ROPE, "factor": divisors.max().item()}
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if torch.allclose(frequencies, expected, rtol=1e-3, atol=0):
            return
    raise ValueError(
        f"{path.name} scales RoPE ({scaling if scaling != 'none' else ', '.join(factors)}) in a way that would be lost "
        "in its conversion; use the model's safetensors instead (a folder or a hub id)"
    )


def _publish(staging: Path, target: Path) -> None:
    """Rename the complete folder. If another process was first, its folder stays."""
    if target.exists() and not _is_complete(target):
        shutil.rmtree(target)
    try:
        staging.rename(target)
    except OSError:
        if not _is_complete(target):
            raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Sync a file, or a folder's directory entry, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained_errors(cache: Path, space: int) -> Iterator[None]:
    """Explain errors of full disks and missing permissions: the space needed, and how to move the cache."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        in_text = re.search(r"os error (\d+)", str(error))  # a SafetensorError has no errno
        code = int(in_text[1]) if in_text else getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT):
            reason = f"{space / 1e9:.2g} GB are needed in {cache}, and there is less"
        elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"cannot write to {cache}"
        else:
            raise
        raise OSError(code, f"{reason}; set {CACHE_VARIABLE} to a folder elsewhere") from error


@contextmanager
def _status(text: str) -> Iterator[None]:
    """A spinner with `text` on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and the progress bar of its GGUF reader, which has no setting."""
    verbosity, bar = transformers_logging.get_verbosity(), gguf_utils.tqdm
    transformers_logging.set_verbosity_error()
    gguf_utils.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        gguf_utils.tqdm = bar
