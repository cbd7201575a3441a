"""Saved values as JSON and safetensors, and back. No pickle: a client need not trust its server.

A value becomes a tree. Its tensors are named by their place in it, and travel beside it::

    {"h": tensor, "tokens": [1, 2]}   ->   {"dict": [[{"v": "h"}, {"t": 0}], [{"v": "tokens"}, {"list": [...]}]]}, {"0": tensor}
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..core.receipt import Applied, Captured, Receipt
from ..hooks.captures.activations import Activations
from ..hooks.monitors.scores import MonitorScores
from ..hooks.traces.nnsight_compat import Cache, CacheEntry, CacheView

PLAIN = (bool, int, float, str, type(None))
MAX_DEPTH = 64
DICTS: dict[str, type[dict[Any, Any]]] = {cls.__name__: cls for cls in (defaultdict, Counter, OrderedDict)}
BUILTINS: dict[Any, Any] = {
    cls.__name__: cls for cls in (list, dict, set, int, float, str, tuple, Counter, OrderedDict)
}
"""Factories of values of a `defaultdict` that are sent. With another one, it comes without."""


class ValueEncoder:
    """Turns values into trees, and collects their tensors. One tensor is sent once, whatever its names."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}

    def encode(self, value: Any, what: str, depth: int = 0) -> Any:
        """The tree of a value. Raises TypeError: a value that cannot be sent; the message names it and its place."""
        if depth > MAX_DEPTH:
            raise TypeError(f"{what} is nested more than {MAX_DEPTH} deep, or holds itself: it cannot be sent")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, what)
        if isinstance(value, torch.dtype | torch.device):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, np.ndarray | np.generic):
            return {"numpy": self._tensor(_tensor_of(value, what), what), "scalar": isinstance(value, np.generic)}
        if isinstance(value, PLAIN):
            return {"v": value}
        if isinstance(value, complex):
            return {"number": [value.real, value.imag]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, Receipt):
            return {"receipt": receipt_to_json(value)}
        if isinstance(value, MonitorScores):
            return {"scores": value.to_json()}
        if isinstance(value, Activations):
            sites = {site: self._activations(value, site, what) for site in value}
            return {"activations": value._num_layers, "sites": sites}
        if isinstance(value, CacheView):
            cache: Any = value._cache
            entries = {
                path: [(entry.output, entry.inputs) for entry in visits] for path, visits in cache.entries.items()
            }
            return {"cache": self.encode(entries, what, depth + 1), "path": CacheView._node_path(value)}
        if isinstance(value, ModelOutput):
            return {"output": type(value).__name__, "items": self._items(value, what, depth)}
        if isinstance(value, Mapping):
            return {"dict": self._items(value, what, depth)} | _kind_of(value)
        for kind in (torch.Size, tuple, list, set, frozenset):
            if isinstance(value, kind):
                items = [self.encode(item, f"{what}[{i}]", depth + 1) for i, item in enumerate(value)]
                return {kind.__name__: items} | _names_of(value)
        raise TypeError(
            f"{what} is a {type(value).__name__}, which cannot be sent to the client: save tensors, numbers, strings, and lists, "
            "tuples, sets and dicts of them"
        )

    def _activations(self, found: Activations, site: str, what: str) -> list[Any]:
        parts = [found[site], found.positions[site], found.token_ids[site]]
        others = {name: self._tensor(part, what) for name, part in found.others(site).items()}
        return [*(self._tensor(part, what) for part in parts), others]

    def _items(self, value: Mapping[Any, Any], what: str, depth: int) -> list[Any]:
        return [
            [self.encode(k, f"a key of {what}", depth + 1), self.encode(v, f"{what}[{k!r}]", depth + 1)]
            for k, v in value.items()
        ]

    def _tensor(self, tensor: torch.Tensor, what: str) -> dict[str, Any]:
        if id(tensor) not in self._known:
            if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
                raise TypeError(
                    f"{what} is a tensor of {tensor.dtype} with the layout {tensor.layout} on {tensor.device}: save a dense one"
                )
            found, number = tensor.detach().to("cpu"), str(len(self.tensors))
            tree: dict[str, Any] = {"t": number}
            if found.is_complex():
                found, tree["complex"] = torch.view_as_real(found.resolve_conj()), True
            self.tensors[number] = found.clone(memory_format=torch.contiguous_format)
            self._known[id(tensor)] = tensor, tree  # held, so that its id is not reused
        return self._known[id(tensor)][1]


class ValueDecoder:
    """Turns trees into values again.

    Args:
        device: device of the tensors; None: the CPU.
        model: the tree that caches are read by.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: Any = None, model: Any = None) -> None:
        self._model = model
        self._tensors = {name: tensor if device is None else tensor.to(device) for name, tensor in tensors.items()}

    def decode(self, tree: Any) -> Any:
        """The value of a tree. Raises ValueError: the tree has a part that is not known."""
        match tree:
            case {"t": number}:
                if tree.get("complex") and not self._tensors[number].is_complex():
                    self._tensors[number] = torch.view_as_complex(self._tensors[number])
                return self._tensors[number]
            case {"v": value}:
                return value
            case {"list": items}:
                return [self.decode(item) for item in items]
            case {"number": [real, imag]}:
                return complex(real, imag)
            case {"tuple": items, "of": name, "fields": names}:
                return _named(name, *names)(*map(self.decode, items))
            case {"tuple": items, "of": name} if isinstance(cls := getattr(torch.return_types, name, None), type):
                return cls(map(self.decode, items))
            case {"tuple": items}:
                return tuple(self.decode(item) for item in items)
            case {"Size": items}:
                return torch.Size(self.decode(item) for item in items)
            case {"set": items} | {"frozenset": items}:
                return ({*()} if "set" in tree else frozenset()).union(self.decode(item) for item in items)
            case {"dict": items, "of": name} if name in DICTS:
                factory = BUILTINS.get(tree.get("factory"))
                found = defaultdict(factory) if name == "defaultdict" else DICTS[name]()
                for k, v in items:  # a Counter's `update` would count
                    found[self.decode(k)] = self.decode(v)
                return found
            case {"dict": items}:
                return {self.decode(k): self.decode(v) for k, v in items}
            case {"output": name, "items": items}:
                return _output(name, {self.decode(k): self.decode(v) for k, v in items})
            case {"numpy": tensor, "scalar": scalar}:
                array = self.decode(tensor).numpy()
                return array[()] if scalar else array
            case {"dtype": name}:
                return getattr(torch, name)
            case {"device": name}:
                return torch.device(name)
            case {"bytes": data}:
                return base64.b64decode(data)
            case {"receipt": receipt}:
                return receipt_of(receipt)
            case {"scores": scores}:
                return MonitorScores.from_json(scores)
            case {"activations": num_layers, "sites": sites}:
                found = Activations(num_layers)
                for site, (rows, positions, tokens, others) in sites.items():
                    further = {name: self.decode(part) for name, part in others.items()}
                    found.add(site, self.decode(rows), self.decode(positions), self.decode(tokens), further)
                return found
            case {"cache": content, "path": path}:
                cache = Cache(self._model, modules=[])
                for name, visits in self.decode(content).items():
                    cache.entries[name] = [CacheEntry(output=output, inputs=inputs) for output, inputs in visits]
                return CacheView(cache, None, path)
        raise ValueError(f"the server sent a value that this version does not know: {sorted(tree)}")


def _tensor_of(value: np.ndarray | np.generic, what: str) -> torch.Tensor:
    """A copy of an array in this machine's byte order: torch takes none that is read backwards."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, which cannot be sent to the client: save its data and its mask")
    try:
        return torch.as_tensor(np.array(value, value.dtype.newbyteorder("=")))
    except TypeError as error:
        raise TypeError(f"{what} is an array of {value.dtype}, which cannot be sent to the client: {error}") from None


def _kind_of(value: Any) -> dict[str, Any]:
    """Class of a dict, of `DICTS`, and the factory of its values. {} for a plain one."""
    name = next((name for name, cls in DICTS.items() if isinstance(value, cls)), None)
    factory = next((name for name, cls in BUILTINS.items() if cls is getattr(value, "default_factory", None)), None)
    return {} if name is None else {"of": name} | ({} if factory is None else {"factory": factory})


def _names_of(value: Any) -> dict[str, Any]:
    """Class and fields of a named tuple; only the class of torch's own, such as of `topk`. {} otherwise."""
    if type(value).__module__ == torch.return_types.__name__:
        return {"of": type(value).__name__}
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    return {} if names is None else {"of": type(value).__name__, "fields": list(names)}


@lru_cache(64)
def _named(name: str, *fields: str) -> Any:
    """A class of tuples with these fields."""
    return namedtuple(name, fields)


def _output(name: str, fields: dict[str, Any]) -> Any:
    """A transformers output class by name, filled; a dict if no class has this name."""
    cls = getattr(modeling_outputs, name, None)
    return cls(**fields) if isinstance(cls, type) and issubclass(cls, ModelOutput) else fields


def pack(header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, bytes]:
    """A frame's two parts: the header as JSON, and the tensors as safetensors."""
    return json.dumps(header, separators=(",", ":")).encode(), save(dict(tensors)) if tensors else b""


def tensors_of(body: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a frame."""
    return load(body) if body else {}


_ENTRIES = {"interventions": Applied, "captures": Captured}


def receipt_to_json(receipt: Receipt) -> dict[str, Any]:
    """All fields of a receipt; `replica` only in a cluster. Its lists leave out entries with their defaults (None, 0 and "")."""
    found: dict[str, Any] = {}
    for field in fields(receipt):
        value = getattr(receipt, field.name)
        if field.name in _ENTRIES:
            value = [{f.name: v for f in fields(e) if (v := getattr(e, f.name)) not in (None, 0, "")} for e in value]
        found[field.name] = dict(value) if isinstance(value, Counter) else value
    if not receipt.replica:
        del found["replica"]
    return found


def receipt_of(value: Mapping[str, Any]) -> Receipt:
    """The receipt from its JSON."""
    found = dict(value)
    for name, cls in _ENTRIES.items():
        found[name] = [cls(**entry) for entry in found.get(name, ())]
    for name in ("steps", "eager_parts"):
        found[name] = Counter(found.get(name, {}))
    return Receipt(**found)
