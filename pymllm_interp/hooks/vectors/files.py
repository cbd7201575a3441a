"""Vectors in files: safetensors, torch, and GGUF control vectors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...utils.files.checked_files import MAX_VALUES, check_gguf, check_safetensors, check_zip
from ...utils.upload import flat_bytes
from ..by_name import listed, nearest

Source = Annotated[Any, "vector"]
"""Anything that `checked_vector` converts: a tensor, lists of numbers, a list of tensors, or an array."""
Named = Tensor | dict[int, Tensor]
"""A named vector: one tensor for all layers, or one per layer."""
ARCHITECTURE = "controlvector"
"""Architecture of GGUF files with control vectors."""
GGUF_FLOATS = ("F32", "F16", "BF16", "F64")
"""Types of the tensors of control vectors. Quantised ones would take twenty times the file's size in memory."""
ORIGIN = ("model_hint", "model_fingerprint")
"""Names of model metadata in files."""
TORCH_INFLATION = 2
"""Largest ratio of tensors to their .pt file, which torch does not compress. Two names may share a tensor, as tied weights do."""
_LAYER_NAME = re.compile(r"(?:layer|direction)\.(\d+)")


def checked_vector(source: Source, who: str, dims: Sequence[int] = (1,)) -> Tensor:
    """A contiguous copy of `source` as float32 on the CPU.

    Args:
        source: numbers of any floating dtype, on any device; lists may hold integers too.
        who: the vector's name in error messages.
        dims: allowed numbers of dimensions.

    Raises:
        ValueError: another dtype, NaN, Inf, values beyond float32, or a tensor on the meta device. So is a sparse tensor, another
            number of dimensions, and no elements.
    """
    try:
        tensor = source if isinstance(source, Tensor) else _as_tensor(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{who}: {type(source).__name__} is not a tensor of numbers ({error})") from None
    if not tensor.is_floating_point():
        raise ValueError(
            f"{who}: dtype {tensor.dtype} cannot be converted to float32; give a floating tensor, as .float() makes"
        )
    if tensor.is_meta:
        raise ValueError(f"{who}: a tensor on the device 'meta' has no values; give one on the CPU or an accelerator")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{who}: the layout is {tensor.layout}; give a dense tensor, as .to_dense() makes")
    if tensor.ndim not in dims or not tensor.numel():
        allowed = " or ".join(f"{n}-dimensional" for n in dims)
        hint = ""
        if tensor.ndim - 1 in dims and len(tensor) == 1:
            hint = "; it is [1, ...], as a trace gives states: take [0] of it"
        raise ValueError(f"{who}: the shape is {list(tensor.shape)}; expected {allowed}, and not empty{hint}")
    tensor = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
    if not tensor.isfinite().all():
        kind = "NaN" if tensor.isnan().any() else "Inf, or a number beyond float32"
        raise ValueError(f"{who}: it holds {kind}")
    return tensor


def content_hash(tensor: Tensor) -> bytes:
    """SHA-256 of the bytes of a tensor's numbers, of any dtype and on any device."""
    return hashlib.sha256(flat_bytes(tensor.detach().cpu()).numpy().data).digest()


def _as_tensor(source: Any) -> Tensor:
    if not isinstance(source, Sequence):
        return torch.tensor(source)
    if source and all(isinstance(row, Tensor) for row in source):
        return torch.stack(list(source))
    tensor = torch.tensor(source)
    return tensor.double() if tensor.dtype == torch.int64 else tensor  # [1, 0, 0] means floats


def load_vector(path: str | Path, name: str | None = None) -> Tensor:
    """Read one vector from a file.

    Args:
        path: file in one of the formats above.
        name: name of the tensor; required if the file holds several.

    Returns:
        [width] float32, on the CPU.

    Raises:
        FileNotFoundError: no such file.
        ImportError: a .gguf file without the package `gguf`.
        ValueError: an unknown suffix, a damaged file, several tensors and no `name`, or no tensor of that name.
    """
    tensors = _read(Path(path))
    if name is None and len(tensors) > 1:
        raise ValueError(
            f"{path} holds {len(tensors)} tensors ({listed(tensors)}): give the name of one, or use load_layer_vectors"
        )
    if name is None:
        name = next(iter(tensors))
    elif name not in tensors:
        raise ValueError(f"{path} has no tensor {name!r}; {nearest(name, tensors)}")
    return checked_vector(tensors[name], f"{path}, {name}")


def load_layer_vectors(path: str | Path) -> dict[int, Tensor]:
    """Read the vectors of a file by layer.

    Returns:
        layer -> [width] float32 on the CPU, in the order of the layers.

    Raises:
        FileNotFoundError, ImportError: as `load_vector`.
        ValueError: an unknown suffix, a damaged file, a tensor name without a layer, two vectors a layer, or different widths.
    """
    vectors: dict[int, Tensor] = {}
    for name, tensor in _read(Path(path)).items():
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{path}: {name!r} is not of a layer; expected layer.<i> or direction.<i>")
        layer = int(match[1])
        if layer in vectors:
            raise ValueError(f"{path} holds two vectors for layer {layer}")
        vectors[layer] = checked_vector(tensor, f"{path}, {name}")
    widths = {len(vector) for vector in vectors.values()}
    if len(widths) > 1:
        raise ValueError(f"{path}: the layers' vectors have different widths, {sorted(widths)}")
    return dict(sorted(vectors.items()))


def origin_of(path: str | Path) -> tuple[str, str]:
    """The model's type and fingerprint, as a file of `save_layer_vectors`, llama.cpp or repeng records them; "" for neither."""
    path = Path(path)
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
    elif path.suffix == ".gguf":
        fields = _gguf(path).GGUFReader(path).fields
        found = {name: fields[key].contents() for name in ORIGIN if (key := f"{ARCHITECTURE}.{name}") in fields}
    else:
        found = {}
    hint, fingerprint = (str(found.get(name, "")) for name in ORIGIN)
    return hint, fingerprint


def save_layer_vectors(
    path: str | Path, vectors: Mapping[int, Source], model_hint: str = "", model_fingerprint: str = ""
) -> None:
    """Write vectors by layer to a file for `load_layer_vectors`. repeng and llama.cpp read the .gguf format too.

    Args:
        path: ends in .safetensors or .gguf.
        vectors: layer -> [width].
        model_hint: the model's type ("llama").
        model_fingerprint: fingerprint of the model that they were made with.

    Raises:
        ImportError: a .gguf file without the package `gguf`.
        ValueError: another suffix, no vectors, a layer that is not an integer >= 0, or layer 0 in a .gguf file. Also errors
            of `checked_vector`.
    """
    path = Path(path)
    if not vectors:
        raise ValueError(f"{path}: there are no vectors to save")
    for layer in vectors:
        if not isinstance(layer, Integral) or isinstance(layer, bool) or layer < 0:
            raise ValueError(f"{path}: a layer is a whole number from 0 on, not {layer!r}")
    tensors = {layer: checked_vector(vector, f"layer {layer}") for layer, vector in sorted(vectors.items())}
    if path.suffix == ".safetensors":
        origin = {name: text for name, text in zip(ORIGIN, (model_hint, model_fingerprint), strict=True) if text}
        save_file({f"layer.{layer}": tensor for layer, tensor in tensors.items()}, path, origin)
    elif path.suffix == ".gguf":
        _check_gguf_layers(path, tensors)
        writer = _gguf(path).GGUFWriter(path, ARCHITECTURE)
        writer.add_string(f"{ARCHITECTURE}.model_hint", model_hint)
        if model_fingerprint:
            writer.add_string(f"{ARCHITECTURE}.model_fingerprint", model_fingerprint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(tensors))
        for layer, tensor in tensors.items():
            writer.add_tensor(f"direction.{layer}", tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        raise ValueError(f"{path}: vectors are saved as .safetensors or .gguf")


def _of_file(path: Path) -> Named:
    """The file's vectors by layer if its names are layers, else its only vector."""
    by_layer = all(_LAYER_NAME.fullmatch(name) for name in _read(path))
    return load_layer_vectors(path) if by_layer else load_vector(path)


def _read(path: Path) -> dict[str, Any]:
    """name -> tensor, of a file in any format; at least one."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a .safetensors, .gguf or .pt file is expected")
    readers = {".safetensors": _read_safetensors, ".gguf": _read_gguf, ".pt": _read_torch, ".pth": _read_torch}
    if path.suffix not in readers:
        raise ValueError(f"{path}: vectors are read from {', '.join(readers)} files")
    tensors = readers[path.suffix](path)
    if not tensors:
        raise ValueError(f"{path} holds no vectors")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    check_safetensors(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or it is damaged ({error})") from error


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        content = load_torch(path)
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} does not hold tensors alone, or it is damaged ({error})") from error
    if not isinstance(content, dict):
        return {"vector": content}
    return {f"layer.{name}" if isinstance(name, int) else str(name): tensor for name, tensor in content.items()}


def load_torch(path: Path) -> Any:
    """The content of a .pt or .pth file, on the CPU. Pickles are not run.

    Raises:
        Exception: whatever a damaged pickle makes torch raise.
        ValueError: tensors and items of more than twice the file's bytes. A tensor may repeat its bytes, or many may share them.
    """
    check_zip(path, TORCH_INFLATION)
    content = torch.load(path, map_location="cpu", weights_only=True)
    left, waiting = TORCH_INFLATION * path.stat().st_size, [content]
    while waiting:
        item = waiting.pop()
        left -= item.numel() * item.element_size() if isinstance(item, Tensor) else 1
        if left < 0:
            raise ValueError(f"{path} holds tensors of more than {TORCH_INFLATION} times its own size; save clones")
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set):
            waiting.extend(item)
    return content


def _read_gguf(path: Path) -> dict[str, Any]:
    gguf = _gguf(path)
    check_gguf(path, MAX_VALUES)
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a GGUF file, or it is truncated or corrupt ({error})") from error
    field = reader.fields.get("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture != ARCHITECTURE:
        raise ValueError(f"{path} has the architecture {architecture!r}; a control vector has {ARCHITECTURE!r}")
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name.startswith("direction."):
            if tensor.tensor_type.name not in GGUF_FLOATS:
                raise ValueError(
                    f"{path}: {tensor.name} is {tensor.tensor_type.name}; expected {', '.join(GGUF_FLOATS)}"
                )
            tensors[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    _check_gguf_layers(path, [int(name.split(".")[1]) for name in tensors if name.split(".")[1].isdecimal()])
    return tensors


def _gguf(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"{path.name} needs the package gguf; run: pip install gguf") from error
    return gguf


def _check_gguf_layers(path: Path, layers: Mapping[int, Tensor] | list[int]) -> None:
    if 0 in layers:
        raise ValueError(f"{path}: direction.0 does not exist in GGUF control vectors, whose layers start at 1")
