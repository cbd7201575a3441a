"""`RemoteVectors`: named vectors that a server keeps for this key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import load, save

from ...hooks.vectors.files import Named, Source, checked_vector, load_layer_vectors, load_vector
from .remote_engine import RemoteEngine, ServerError


class RemoteVectors(MutableMapping[str, Named]):
    """Vectors by name, as `VectorRegistry`: a tensor, tensors by layer, or a file's content."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def __setitem__(self, name: str, source: Source | Mapping[int, Source] | str | Path) -> None:
        """Store a vector on the server. Raises ValueError: an error of `checked_vector` or the server."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"a vector's name is a string that is not empty, not {name!r}")
        self._engine.ask("PUT", _path(name), content=_body(source, f"vector {name!r}"))

    def __getitem__(self, name: str) -> Named:
        """A copy of the vector. Raises KeyError: an unknown name."""
        try:
            response = self._engine.ask("GET", _path(name))
        except ServerError as error:
            raise (
                KeyError(f"no vector {name!r}; there are {', '.join(self) or 'none'}") if error.status == 404 else error
            ) from None
        if response.headers.get("x-format") == "gguf":
            raise NotImplementedError(f"{name!r} was uploaded as a GGUF file: read your copy of it")
        found = {key: tensor.float() for key, tensor in load(response.content).items()}
        if len(found) == 1 and "vector" in found:
            return found["vector"]
        return dict(sorted((int(key.partition(".")[2]), tensor) for key, tensor in found.items()))

    def __delitem__(self, name: str) -> None:
        """Forget a vector. Raises KeyError for an unknown name."""
        try:
            self._engine.ask("DELETE", _path(name))
        except ServerError as error:
            raise (KeyError(name) if error.status == 404 else error) from None

    def __iter__(self) -> Iterator[str]:
        return iter([entry["name"] for entry in self._engine.ask("GET", "/v1/interp/vectors").json()["vectors"]])

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(list(iter(self)))


def _path(name: str) -> str:
    return f"/v1/interp/vectors/{quote(name)}"


def _body(source: Any, who: str) -> bytes:
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix in (".safetensors", ".gguf") and path.is_file():
            return path.read_bytes()
        try:
            source = load_layer_vectors(path)
        except ValueError:
            source = load_vector(path)
    if isinstance(source, Mapping):
        tensors = {
            f"layer.{layer}": checked_vector(vector, f"{who}, layer {layer}", (1, 2))
            for layer, vector in source.items()
        }
    else:
        tensors: dict[str, torch.Tensor] = {"vector": checked_vector(source, who, (1, 2))}
    return save(tensors)
