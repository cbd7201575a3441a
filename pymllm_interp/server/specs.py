"""Interventions and captures as JSON, and back: the same fields as the Python objects, with the op's name under "op".

    {"op": "steer", "site": "resid_post.12", "vector": "sea", "scale": 4, "positions": "generated"}

A vector is a name, a list of numbers, ``{"dtype", "shape", "data"}`` with base64, or ``{"layers": {"3": vector}}``. An SAE is a
name in the server's `lm.saes`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..core.arguments import PromptError, shown
from ..core.device import DTYPES
from ..hooks.captures.features import Features
from ..hooks.captures.lens import Lens
from ..hooks.captures.reduction import Reduction
from ..hooks.captures.spec import Capture, Project
from ..hooks.interventions.knockout import Knockout
from ..hooks.interventions.op import Gate, Op
from ..hooks.interventions.projections import Ablate, Clamp
from ..hooks.interventions.set_feature import MAX_FEATURES, SetFeature
from ..hooks.interventions.specs import Patch, Scale, Steer
from ..hooks.layer_vectors import LayerVectors
from ..hooks.positions import Generated, Masked
from ..hooks.site import Site
from ..hooks.spec import Spec, as_argument
from .request_sizes import VECTORS

OPS: dict[str, type[Op] | type[Knockout]] = {
    cls.__name__.lower(): cls for cls in (Steer, Ablate, Clamp, Scale, Patch, SetFeature, Knockout)
}
"""Names of the interventions in JSON."""
WIRE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Dtypes of inline vectors."""
REDUCTIONS: dict[str, type[Reduction]] = {cls.__name__.lower(): cls for cls in (Project, Features, Lens)}
"""Reductions by their `type` in JSON; without one it is a projection."""
MAX_DIMS = 4
"""Most dimensions of an inline vector."""


LOCAL = {
    "sae": "give the name of one that it has (`pymllm-interp serve --sae NAME=PATH`)",
    "transport": "capture the states, or use a local LM",
}
"""Fields whose objects stay in the program that made them -> what to do."""


def vector_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as ``{"dtype", "shape", "data"}``; data is base64 of its bytes, little-endian, in row order."""
    tensor = tensor.detach().cpu().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": base64.b64encode(raw).decode()}


def vector_of(value: Any, what: str) -> Any:
    """A vector of JSON: a name stays a string, all else becomes a tensor, or {layer: tensor}.

    Raises:
        PromptError: it is none of the forms.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        try:
            return torch.tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise PromptError(f"{what}: not a list of numbers, nor equally long lists of them ({error})") from None
    if isinstance(value, Mapping) and len(value) == 1 and "layers" in value:
        try:
            return {int(layer): vector_of(vector, f"{what}[{layer}]") for layer, vector in value["layers"].items()}
        except (AttributeError, ValueError) as error:
            raise PromptError(f"{what}: layers is an object from layer to vector ({error})") from None
    if not isinstance(value, Mapping) or len(value) != 3 or set(value) != {"dtype", "shape", "data"}:
        raise PromptError(
            f"{what}: expected a name, a list of numbers, {{'dtype', 'shape', 'data'}} with base64, or {{'layers': {{...}}}}"
        )
    return _inline(value, what)


def _inline(value: Mapping[str, Any], what: str) -> torch.Tensor:
    dtype, shape = WIRE_DTYPES.get(value["dtype"]), value["shape"]
    if dtype is None:
        raise PromptError(f"{what}: dtype {shown(value['dtype'])}; expected one of {', '.join(WIRE_DTYPES)}")
    sizes = isinstance(shape, Sequence) and all(
        isinstance(size, int) and 0 < size < 1 << 40 for size in shape[:MAX_DIMS]
    )
    if not sizes or isinstance(shape, str) or len(shape) > MAX_DIMS:
        raise PromptError(f"{what}: shape {shown(shape)}; expected a list of 1 to {MAX_DIMS} whole numbers above 0")
    try:
        raw = base64.b64decode(value["data"], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise PromptError(f"{what}: data is not base64 ({error})") from None
    count = 1
    for size in shape:
        count *= size
    if len(raw) != count * dtype.itemsize:
        raise PromptError(
            f"{what}: data has {len(raw)} bytes; {value['dtype']} {list(shape)} takes {count * dtype.itemsize}"
        )
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(tuple(shape)) if raw else torch.zeros(tuple(shape))


def positions_of(value: Any, what: str) -> Any:
    """Positions of JSON, as the Python objects take them.

    Raises:
        PromptError: it is none of the forms.
    """
    if not isinstance(value, Mapping):
        return value  # checked by the object: a string, a number, or a list of numbers or booleans
    try:
        if set(value) == {"generated"}:
            return Generated(**value["generated"])
        if set(value) == {"slice"}:
            return slice(*value["slice"])
        if set(value) == {"range"}:
            return range(*value["range"])
    except (TypeError, ValueError) as error:
        raise PromptError(f"{what}: {error}") from None
    raise PromptError(
        f"{what}: expected 'all', 'prompt', 'generated', whole numbers, a mask, {{'generated': {{'start', 'stop', 'step'}}}}, "
        "{'slice': [start, stop, step]} or {'range': [start, stop, step]}"
    )


def positions_to_json(positions: Any) -> Any:
    """Positions of a checked spec."""
    match positions:
        case Generated():
            return {"generated": {"start": positions.start, "stop": positions.stop, "step": positions.step}}
        case slice():
            return {"slice": [positions.start, positions.stop, positions.step]}
        case range():
            return {"range": [positions.start, positions.stop, positions.step]}
        case Masked():
            return [place in positions for place in range(positions.length)]
        case tuple():
            return list(positions)
    return positions


def to_json(spec: Spec) -> dict[str, Any]:
    """A spec as JSON. Fields that have their defaults are left out.

    Raises:
        PromptError: it holds an SAE.
    """
    kind = type(spec).__name__.lower()
    found: dict[str, Any] = {"op": kind} if isinstance(spec, Op | Knockout) else {}
    if isinstance(spec, Reduction) and not isinstance(spec, Project):
        found["type"] = kind
    for field in fields(spec):  # pyright: ignore[reportArgumentType]
        value = getattr(spec, field.name)
        if not field.init or (field.default is not MISSING and value is field.default):
            continue
        if isinstance(spec, Steer):
            value = as_argument(value, str(spec.site))
        found[field.name] = _value_to_json(field.name, value)
    return found


def _value_to_json(name: str, value: Any) -> Any:
    if name == "features":
        return {str(feature): list(target) if isinstance(target, tuple) else target for feature, target in value}
    if isinstance(value, torch.Tensor):
        return vector_to_json(value)
    if isinstance(value, LayerVectors):
        if isinstance(value.vectors, dict):
            return {"layers": {str(layer): vector_to_json(vector) for layer, vector in value.vectors.items()}}
        return vector_to_json(value.vectors)
    if name in LOCAL and value is not None and not isinstance(value, str):
        raise PromptError(f"{name}: a {type(value).__name__} is not sent to a server; {LOCAL[name]}")
    if isinstance(value, Spec):
        return to_json(value)
    if isinstance(value, torch.dtype):
        return str(value)[6:]
    if name in ("positions", "from_", "to"):
        return positions_to_json(value)
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Site) else value


def intervention_of(value: Any, what: str = "interventions") -> Op | Knockout:
    """An intervention from JSON.

    Raises:
        PromptError: an unknown op or field, or what the op's class refuses.
    """
    given = value.get("op") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not isinstance(given, str) or given not in OPS:
        raise PromptError(f"{what}: op is {shown(given)}; expected one of {', '.join(OPS)}")
    return _made(OPS[value["op"]], {name: part for name, part in value.items() if name != "op"}, what)


def capture_of(value: Any, what: str = "capture") -> Capture:
    """A capture from JSON: a site, or an object with the fields of `Capture`.

    Raises:
        PromptError: an unknown field, or what `Capture` refuses.
    """
    return _made(Capture, {"site": value} if isinstance(value, str) else value, what)


def _made(cls: type[Any], given: Any, what: str) -> Any:
    if not isinstance(given, Mapping):
        raise PromptError(f"{what}: {cls.__name__} is an object, not {shown(given)}")
    known = {field.name: field for field in fields(cls) if field.init}
    for name in given:
        if name not in known:
            raise PromptError(f"{what}: {cls.__name__} has no field {shown(name)}; it has {', '.join(known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in given:
            raise PromptError(f"{what}: {cls.__name__} needs {name!r}")
    try:
        return cls(**{name: _value_of(name, value, f"{what}.{name}") for name, value in given.items()})
    except PromptError:
        raise
    except (ValueError, TypeError) as error:
        raise PromptError(f"{what}: {error}") from error


def _value_of(name: str, value: Any, what: str) -> Any:
    if name in VECTORS:
        return vector_of(value, what)
    if name == "when" and isinstance(value, Mapping):
        return _made(Gate, value, what)
    if name == "reduce" and isinstance(value, Mapping):
        kind = value.get("type", "project")
        if not isinstance(kind, str) or kind not in REDUCTIONS:
            raise PromptError(f"{what}: type is {shown(kind)}; expected one of {', '.join(REDUCTIONS)}")
        return _made(REDUCTIONS[kind], {name: part for name, part in value.items() if name != "type"}, what)
    if name in LOCAL and not isinstance(value, str | None):
        raise PromptError(f"{what}: {LOCAL[name]}")
    if name == "transport" and value is not None:
        raise PromptError(f"{what}: a server has the logit lens alone; {LOCAL[name]}")
    if name in ("positions", "from_", "to"):
        return positions_of(value, what)
    if name == "features" and isinstance(value, Mapping):
        if len(value) > MAX_FEATURES:
            raise PromptError(f"{what} has {len(value)} features; at most {MAX_FEATURES}: use several interventions")
        wrong = [feature for feature in value if not str(feature).isdecimal()]
        if wrong:
            raise PromptError(f"{what}: {shown(wrong[0])} is not the number of a feature")
        return {int(feature): target for feature, target in value.items()}
    if name == "dtype" and value is not None and value not in DTYPES:
        raise PromptError(f"{what}: {shown(value)}; expected one of {', '.join(sorted(DTYPES))}")
    return value
