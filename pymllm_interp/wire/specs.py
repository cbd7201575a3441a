"""Interventions and captures as JSON, and back: the fields of the registered classes (hooks/registry.py). The op's name is under
"op", and a reduction's under "type".

    {"op": "steer", "site": "resid_post.12", "vector": "sea", "scale": 4, "positions": "generated"}

A vector is a name, a list of numbers, ``{"dtype", "shape", "data"}`` with base64, or ``{"layers": {"3": vector}}``. An SAE is a
name in the server's `lm.saes`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_args

import torch

from ..hooks.captures.lens_files import JacobianLens, TunedLens
from ..hooks.captures.spec import Capture, Project
from ..hooks.catalogue import ops, reductions
from ..hooks.interventions.knockout import Intervention
from ..hooks.interventions.op import Gate
from ..hooks.interventions.set_feature import MAX_FEATURES, FeatureTargets
from ..hooks.monitors.monitor import Monitor, Then
from ..hooks.monitors.probe import FeatureProbe, Probe, ProbeSource
from ..hooks.positions import Generated, Masked, Positions
from ..hooks.registry import json_name
from ..hooks.saes.sae import SAE
from ..hooks.site import Site
from ..hooks.spec import Argument, Spec, arguments_of, as_argument
from ..hooks.vectors.by_layer import LayerVectors
from ..hooks.vectors.files import Source
from ..utils.arguments import PromptError, shown
from ..utils.upload import flat_bytes

WIRE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Dtypes of inline vectors."""
MAX_DIMS = 4
"""Most dimensions of an inline vector."""
_OF_LENSES = "a server has the logit lens alone; capture the states, or use a local LM"
LOCAL = {
    SAE: "give the name of one that it has (`pymllm-interp serve --sae NAME=PATH`)",
    TunedLens: _OF_LENSES,
    JacobianLens: _OF_LENSES,
}
"""Classes with objects that stay in the program that made them -> what to do."""


class TaggedClasses(NamedTuple):
    """Classes that an object of JSON names under a key."""

    key: str
    classes: Callable[[], Mapping[str, type[Spec]]]
    """Name -> class."""
    default: str | None = None
    """Name that an object without the key has."""

    def class_of(self, value: Any) -> type[Spec] | None:
        """The class that an object names, or None."""
        name = value.get(self.key, self.default) if isinstance(value, Mapping) else None
        return self.classes().get(name) if isinstance(name, str) else None

    def made(self, value: Any, what: str) -> Any:
        """The spec of an object. Raises PromptError: an unknown name or field, or an error of the class."""
        cls = self.class_of(value)
        if cls is None:
            given = value.get(self.key) if isinstance(value, Mapping) else value
            near = get_close_matches(given[:40].lower(), self.classes(), n=1) if isinstance(given, str) else None
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(self.classes())}"
            raise PromptError(f"{what}: {self.key} is {shown(given)}; {hint}")
        return _made(cls, {name: part for name, part in value.items() if name != self.key}, what)


INTERVENTIONS = TaggedClasses("op", ops)
MONITORS = TaggedClasses("op", lambda: {json_name(Monitor): Monitor}, json_name(Monitor))
REDUCTIONS = TaggedClasses("type", reductions, json_name(Project))


def tag_of(cls: type[Spec]) -> dict[str, str] | None:
    """Key and name of a registered class in its JSON; {} for the default class, None for an unregistered one."""
    for tagged in (INTERVENTIONS, REDUCTIONS):
        if tagged.classes().get(name := json_name(cls)) is cls:
            return {} if name == tagged.default else {tagged.key: name}
    return None


def vector_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as ``{"dtype", "shape", "data"}``; data is base64 of its bytes, little-endian, in row order."""
    tensor = tensor.detach().cpu()
    raw = flat_bytes(tensor).numpy().tobytes()
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": base64.b64encode(raw).decode()}


def vector_of(value: Any, what: str) -> Any:
    """A vector of JSON: a name stays a string, all else becomes a tensor, or {layer: tensor}.
    Raises PromptError: it has no known form."""
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
    """Positions of JSON, as the Python objects take them. Raises PromptError: it has no known form."""
    if not isinstance(value, Mapping):
        return value  # checked by the object: a string, a number, or a list of numbers and words, or of booleans
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
        f"{what}: expected 'all', 'prompt', 'generated', 'image', 'image[0]', 'text', whole numbers, a mask, "
        "{'generated': {'start', 'stop', 'step'}}, {'slice': [start, stop, step]} or {'range': [start, stop, step]}"
    )


def to_json(spec: Spec) -> dict[str, Any]:
    """A spec as JSON. Fields that have their defaults are left out.
    Raises PromptError: it holds an SAE or a lens, or its class is not registered."""
    cls = type(spec)
    found: dict[str, Any] | None = {} if cls in (Capture, Gate, Probe, FeatureProbe) else tag_of(cls)
    if found is None:
        raise PromptError(f"{cls.__name__} is not registered (hooks/registry.py), so a server does not know it")
    for argument in arguments_of(cls):
        value = getattr(spec, argument.name)
        if argument.default is not MISSING and value is argument.default:
            continue
        if argument.hint == Then and callable(value):
            raise PromptError(f"{spec.name}: then: a function is not sent to a server; read the scores of a stream")
        if why := argument.metadata.get("local"):
            raise PromptError(f"{spec.name}: {argument.name}={value!r} needs the engine in this process: {why}")
        if (local := next((text for kind, text in LOCAL.items() if isinstance(value, kind)), None)) is not None:
            raise PromptError(f"{argument.name}: a {type(value).__name__} is not sent to a server; {local}")
        if argument.metadata.get("by_position"):
            value = as_argument(value, str(getattr(spec, "site", "")))
        written = _value_to_json(value)
        if argument.hint == FeatureTargets:
            written = {str(feature): target for feature, target in written}
        found[argument.name] = written
    return found


def _value_to_json(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return vector_to_json(value)
        case LayerVectors():
            vectors = value.vectors
            if isinstance(vectors, dict):
                return {"layers": {str(layer): vector_to_json(vector) for layer, vector in vectors.items()}}
            return vector_to_json(vectors)
        case Spec():
            return to_json(value)
        case Generated():
            return {"generated": {"start": value.start, "stop": value.stop, "step": value.step}}
        case slice():
            return {"slice": [value.start, value.stop, value.step]}
        case range():
            return {"range": [value.start, value.stop, value.step]}
        case Masked():
            return [place in value for place in range(value.length)]
        case tuple():
            return [_value_to_json(part) for part in value]
        case torch.dtype():
            return str(value)[6:]
        case Site():
            return str(value)
    return value


def intervention_of(value: Any, what: str = "interventions") -> Intervention:
    """An intervention from JSON. Raises PromptError: an unknown op or field, or an error of the op's class."""
    return INTERVENTIONS.made(value, what)


def monitor_of(value: Any, what: str = "monitors") -> Monitor:
    """A monitor from JSON; "op" may be left out. Raises PromptError: another op, an unknown field, or an error of `Monitor`."""
    return MONITORS.made(value, what)


def capture_of(value: Any, what: str = "capture") -> Capture:
    """A capture from JSON: a site, or an object with the fields of `Capture`.
    Raises PromptError: an unknown field, or an error of `Capture`."""
    return _made(Capture, {"site": value} if isinstance(value, str) else value, what)


def part_class(part: type[Spec], value: Any) -> type[Spec] | None:
    """The class of a spec within another, from its annotation and JSON; None if the JSON names none."""
    return part if is_dataclass(part) else REDUCTIONS.class_of(value)


def _made(cls: type[Any], given: Any, what: str) -> Any:
    if not isinstance(given, Mapping):
        raise PromptError(f"{what}: {cls.__name__} is an object, not {shown(given)}")
    known = _fields_of(cls)
    for name in given:
        if name not in known:
            raise PromptError(f"{what}: {cls.__name__} has no field {shown(name)}; it has {', '.join(known)}")
    for name, field in known.items():
        if field.argument.default is MISSING and name not in given:
            raise PromptError(f"{what}: {cls.__name__} needs {name!r}")
    try:
        return cls(**{name: _value_of(known[name], value, f"{what}.{name}") for name, value in given.items()})
    except PromptError:
        raise
    except (ValueError, TypeError) as error:
        raise PromptError(f"{what}: {error}") from error


class _Field(NamedTuple):
    """An argument's reader of JSON."""

    argument: Argument
    reader: Callable[[Any, str], Any] | None
    local: str | None
    """Advice for objects that cannot be sent."""
    takes_names: bool


@cache
def _fields_of(cls: type) -> dict[str, _Field]:
    found = {}
    for argument in arguments_of(cls):
        if "local" in argument.metadata:
            continue
        types = get_args(argument.hint)
        local = next((LOCAL[kind] for kind in types if kind in LOCAL), None)
        found[argument.name] = _Field(argument, READERS.get(argument.hint), local, str in types)
    return found


def _value_of(field: _Field, value: Any, what: str) -> Any:
    """The value of an argument. Values without their own form in JSON are checked by the class."""
    if field.reader is not None:
        return field.reader(value, what)
    part = field.argument.part
    if part is not None and isinstance(value, Mapping):
        return _made(part, value, what) if is_dataclass(part) else REDUCTIONS.made(value, what)
    if field.local is not None and value is not None and not (isinstance(value, str) and field.takes_names):
        raise PromptError(f"{what}: {field.local}")
    return value


def _targets_of(value: Any, what: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_FEATURES:
        raise PromptError(f"{what} has {len(value)} features; at most {MAX_FEATURES}: use several interventions")
    wrong = [feature for feature in value if not str(feature).isdecimal()]
    if wrong:
        raise PromptError(f"{what}: {shown(wrong[0])} is not the number of a feature")
    return {int(feature): target for feature, target in value.items()}


def probe_from_json(value: Any, what: str) -> Any:
    """A probe of JSON: a vector, or an object with the fields of `Probe` or of `FeatureProbe`.
    Raises PromptError: it has no known form."""
    cls = probe_class(value)
    return vector_of(value, what) if cls is None else _made(cls, value, what)


def probe_class(value: Any) -> type[Spec] | None:
    """The class of a probe of JSON; None for a vector."""
    if not isinstance(value, Mapping):
        return None
    return FeatureProbe if "sae" in value else Probe if "weight" in value else None


def _then_of(value: Any, what: str) -> Any:
    if isinstance(value, Mapping):
        if INTERVENTIONS.class_of(value) is Monitor:
            raise PromptError(f"{what}: a monitor cannot be behind a monitor")
        return intervention_of(value, what)
    if isinstance(value, list):
        if any(isinstance(one, list) for one in value):
            raise PromptError(f"{what}: expected interventions, not lists of them")
        if len(value) > MAX_THEN:
            raise PromptError(f"{what} has {len(value)} interventions; at most {MAX_THEN}")
        return [_then_of(one, f"{what}[{i}]") for i, one in enumerate(value)]
    return value


MAX_THEN = 16
"""Most interventions behind a monitor, in JSON."""
READERS: dict[Any, Callable[[Any, str], Any]] = {
    Source: vector_of,
    Positions: positions_of,
    FeatureTargets: _targets_of,
    ProbeSource: probe_from_json,
    Then: _then_of,
}
"""Annotation -> reader of such a field."""
