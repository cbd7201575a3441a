"""Weights: loaded from safetensors and checked name by name, or drawn from a seed.

    load_weights(model, iter_safetensors(folder))   # real ones
    init_dummy_weights(model, seed=0)               # random ones: config.json is enough

Parameters without a tensor and tensors without a parameter are errors that list the names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAMES_LISTED = 10
MARKS = frozenset({"weight_scale", "weight_scale_inv", "weight_packed", "qweight"})
"""Tensors that only quantised modules have."""
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
CPU_DRAW_LIMIT = 2**20
"""Parameters of up to this many elements are drawn on the CPU, so that they are equal on every device."""


NO_FORMAT = (
    " Some are quantised, and config.json has no quantization_config for this: download both from the same place."
)


class WeightsError(ValueError):
    """Weights that are unreadable or do not fit the model."""


def safetensors_files(folder: Path) -> dict[Path, set[str]]:
    """The weight files of `folder`, each with the tensor names that the index lists for it (none without an index).

    Raises:
        WeightsError: no weight files, only pickled files, a broken index, or an index that names a missing file.
    """
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: set()}
    if not (folder / INDEX_FILE).is_file():
        raise WeightsError(_no_safetensors(folder))
    files: dict[Path, set[str]] = {}
    for name, shard in _weight_map(folder / INDEX_FILE).items():
        files.setdefault(folder / shard, set()).add(name)
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        raise WeightsError(
            f"{folder}: {INDEX_FILE} names {len(files)} files, and {len(missing)} of them are not there: "
            f"{_listed(missing)}; download the folder again"
        )
    return dict(sorted(files.items()))


def iter_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a folder's safetensors, on the CPU and memory-mapped.

    Reads `model.safetensors`, or the shards in `model.safetensors.index.json`. Missing files are reported before the first
    tensor is read.

    Raises:
        WeightsError: a file is missing, truncated or corrupt, or lacks a tensor that the index lists.
    """
    return _read(safetensors_files(Path(folder)))


def is_harmless(name: str) -> bool:
    """Whether the name is a buffer of old checkpoints (frequencies, masks) that follows from the config, and can be ignored."""
    return name.endswith(HARMLESS_SUFFIXES)


def check_readable(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with no values to copy. A copy that fails ends the engine, and one of freed memory the process.

    Raises:
        WeightsError: a DTensor, a sparse or a meta tensor, or freed memory, as FSDP leaves it between passes.
    """
    steps = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    end = (1 + tensor.storage_offset() + sum((n - 1) * step for n, step in steps)) if tensor.numel() else 0
    try:
        storage = tensor.untyped_storage()
        held = 0 if tensor.is_meta else storage.nbytes()
        storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        held = -1
    if held < end * tensor.itemsize:
        raise WeightsError(
            f"{name}: a {type(tensor).__name__} of {tensor.layout} on {tensor.device} has no values in memory: give a plain, "
            "dense tensor, such as full_tensor() of a DTensor; nothing was written"
        )


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], *, ignore: Callable[[str], bool] = is_harmless
) -> None:
    """Copy `weights` into the parameters (and saved buffers) of `model`, cast to their dtypes, on their devices.

    Parameters may be views of merged storage: they are written in place. A shared parameter, such as a tied `lm_head.weight`, needs
    one of its names. Tensors for several of its names must be equal.

    Args:
        ignore: whether an unexpected name is skipped.

    Raises:
        WeightsError: missing, unexpected or misshapen tensors, all in one message. The model is then partly loaded and must
            not be used.
    """
    targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
    tied_head = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    seen: set[int] = set()
    unexpected, misfits = [], []
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            if not ignore(name) and not (tied_head and name == "lm_head.weight"):
                unexpected.append(name)
        elif target.shape != tensor.shape:
            misfits.append(f"{name} is {list(tensor.shape)}, the model's is {list(target.shape)}")
            seen.add(id(target))
        elif tensor.dtype.itemsize == 1 != target.dtype.itemsize:
            misfits.append(f"{name} is {tensor.dtype}: quantised, without scales")
            seen.add(id(target))
        elif target.is_floating_point() and not tensor.is_floating_point():
            misfits.append(f"{name} is {tensor.dtype}, the model's is {target.dtype}")
            seen.add(id(target))
        elif id(target) not in seen:
            target.copy_(tensor)
            seen.add(id(target))
        elif not torch.equal(target, tensor.to(target)):
            misfits.append(f"{name} differs from the weight that the config ties it to")
    missing = [name for name, target in targets.items() if id(target) not in seen]
    problems = {"missing": missing, "unexpected": unexpected, "unfit": misfits}
    if any(problems.values()):
        lines = [f"  {len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names]
        raise WeightsError(
            "\n".join([f"these weights are not those of this {type(model).__name__}:", *lines])
            + "\nCheck that config.json and the weight files belong together."
            + (
                NO_FORMAT
                if any(name.rpartition(".")[2] in MARKS or name.endswith("_blocks") for name in unexpected)
                else ""
            )
        )


@torch.no_grad()
def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill the parameters of `model` with random values that keep activations bounded at any depth.

    Matrices and embeddings are N(0, 1/sqrt(last dimension)). Vectors named `weight` (norms) are 1 + 0.1 N(0, 1), and other vectors
    are 0.02 N(0, 1). Values depend only on `seed`, the parameter's name and its shape. They are drawn in float32 and then cast.
    Parameters above `CPU_DRAW_LIMIT` are drawn on their device, and also depend on the kind of device.
    """
    drawn: set[int] = set()
    for name, param in sorted(model.named_parameters(remove_duplicate=False)):
        if id(param) not in drawn:
            drawn.add(id(param))
            draw(param, name, seed)


@torch.no_grad()
def draw(param: Tensor, name: str, seed: int) -> None:
    """Fill one parameter as `init_dummy_weights` does."""
    if param.ndim >= 2:
        mean, std = 0.0, 1 / math.sqrt(param.shape[-1])
    else:
        mean, std = (1.0, 0.1) if name.endswith("weight") else (0.0, 0.02)
    device = param.device if param.numel() > CPU_DRAW_LIMIT else torch.device("cpu")
    values = torch.randn(param.shape, generator=generator_of(name, seed, device), device=device, dtype=torch.float32)
    param.copy_(values.mul_(std).add_(mean))


def generator_of(name: str, seed: int, device: str | torch.device) -> torch.Generator:
    """The random numbers of a parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)


def _read(files: dict[Path, set[str]]) -> Iterator[tuple[str, Tensor]]:
    for path, promised in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                lacking = sorted(promised - set(names))
                if lacking:
                    raise WeightsError(f"{path} lacks tensors that {INDEX_FILE} promises: {_listed(lacking)}")
                for name in names:
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(
                f"{path} is truncated or corrupt ({error}); delete it, and download or save it again"
            ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index."""
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors ({error!r}); download it again") from error


def _no_safetensors(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return (
            f"{folder} has pickled weights only ({_listed(pickled)}), and those are not read, because unpickling runs "
            "code. Where you trust them, convert them once: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(folder)"
        )
    return f"{folder} has no weights: {SINGLE_FILE} or {INDEX_FILE} is expected; load_format='dummy' makes random ones"


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_LISTED
    return ", ".join(names[:MAX_NAMES_LISTED]) + (f" and {more} more" if more > 0 else "")
