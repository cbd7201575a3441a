"""The JSON schema of interventions and captures, made of the Python objects' own fields (specs.py reads the same JSON).

The engine process makes it, and tells the HTTP process, which has no torch and so not the objects. The objects check requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING
from functools import cache, reduce
from inspect import getdoc, isclass
from itertools import filterfalse
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from pydantic import Field, StrictBool, StrictInt, TypeAdapter, create_model
from torch import Tensor

from ..core.limits import MAX_NAMED
from ..hooks.captures.lens_files import JacobianLens, TunedLens
from ..hooks.captures.reductions.reduction import Reduction
from ..hooks.captures.spec import Capture
from ..hooks.catalogue import ops, reductions
from ..hooks.image_words import WORD
from ..hooks.interventions.set_feature import MAX_FEATURES, FeatureTargets
from ..hooks.monitors.monitor import Monitor, Then
from ..hooks.monitors.probe import FeatureProbe, Probe, ProbeSource
from ..hooks.positions import Positions
from ..hooks.registry import is_spelled
from ..hooks.saes.sae import SAE
from ..hooks.site import Site
from ..hooks.spec import Spec, arguments_of
from ..hooks.vectors.files import Source
from ..utils.device import DTYPES
from .specs import LOCAL, MAX_DIMS, WIRE_DTYPES, tag_of
from .strict import Strict


class InlineVector(Strict):
    """A tensor's values in the request."""

    dtype: Literal[tuple(WIRE_DTYPES)]  # pyright: ignore[reportInvalidTypeForm]
    shape: list[Annotated[StrictInt, Field(ge=1, le=1 << 32)]] = Field(min_length=1, max_length=MAX_DIMS)
    data: str = Field(description="base64 of the values, little-endian, in row order")


VectorValues = list[float] | list[list[float]] | list[list[list[float]]]


class LayersVector(Strict):
    """A vector for each layer that the site selects."""

    layers: dict[str, InlineVector | VectorValues] = Field(min_length=1, max_length=MAX_NAMED)


class GeneratedRange(Strict):
    """Positions after the prompt, counted from its end; see `Generated`."""

    start: StrictInt = 0
    stop: StrictInt | None = None
    step: StrictInt = 1


class GeneratedPositions(Strict):
    """Some of the positions after the prompt."""

    generated: GeneratedRange


class SlicePositions(Strict):
    """Positions of the prompt, as Python slices a list: [start, stop, step]."""

    slice: Annotated[list[StrictInt | None], Field(min_length=1, max_length=3)]


class RangePositions(Strict):
    """Positions of the prompt: [start, stop, step]."""

    range: Annotated[list[StrictInt], Field(min_length=1, max_length=3)]


Vector = Annotated[
    str | InlineVector | LayersVector | VectorValues,
    Field(description="the name of a stored vector, or values: inline as base64, by layer, or as lists of numbers"),
]
ImageWord = Annotated[str, Field(pattern=f"^({WORD.pattern})$")]
PositionsField = Annotated[
    Literal["all", "prompt", "generated"]
    | ImageWord
    | StrictInt
    | list[StrictInt | ImageWord]
    | list[StrictBool]
    | GeneratedPositions
    | SlicePositions
    | RangePositions,
    Field(
        description="positions of input tokens; numbers address the prompt, negative ones from its end; booleans are a mask; "
        "image, image[0] and text are the positions of the prompt's images, of its first one, and of all else in it"
    ),
]


FORMS: dict[Any, Any] = {
    Source: Vector,
    Positions: PositionsField,
    Site | str: Annotated[
        str, Field(description="resid_post.12, resid_post.*, resid_post.{0,4}, blocks.12.hook_resid_post, ...")
    ],
    SAE | str: Annotated[str, Field(description="the name of an SAE that the server has (--sae NAME=PATH)")],
    TunedLens | JacobianLens | None: Annotated[None, Field(description="null: a server has the logit lens alone")],
    FeatureTargets: Annotated[
        dict[str, float | list[float | None]],
        Field(min_length=1, max_length=MAX_FEATURES, description="feature -> value, or [low, high] with clamp"),
    ],
    Then: Annotated[
        Literal["record", "stop"] | dict[str, Any] | list[dict[str, Any]],
        Field(
            description="record, stop, or interventions that act at the generated positions after the one that fired"
        ),
    ],
    torch.dtype | str | None: Literal[tuple(DTYPES)] | None,  # pyright: ignore
    int: StrictInt,
    Sequence[int]: Annotated[list[StrictInt], Field(max_length=MAX_NAMED)],
}
"""Annotation of a field, or a part of it -> its type in JSON. Numbers, strings and choices are unchanged."""


def _type_of(hint: Any) -> Any:
    """The type in JSON of a field with this annotation."""
    if hint == ProbeSource:
        return Vector | _model(Probe) | _model(FeatureProbe)
    if hint in FORMS:
        return FORMS[hint]
    if get_origin(hint) not in (Union, UnionType):
        return _model(hint) if isclass(hint) and issubclass(hint, Spec) else hint
    parts = [part for part in get_args(hint) if part not in _WITHOUT_FORM]
    if Reduction in parts:
        parts = [Literal[tuple(name for name, cls in reductions().items() if is_spelled(cls))]]  # pyright: ignore
        parts += [*filterfalse(is_spelled, reductions().values()), type(None)]
    return Union[tuple(map(_type_of, parts))]  # noqa: UP007  # of a computed tuple


_WITHOUT_FORM = (Tensor, Site, *LOCAL)


@cache
def _model(cls: type[Spec]) -> Any:
    """A pydantic model with the fields of a class of specs, and the tag that names it."""
    parts: dict[str, Any] = {name: (Literal[tag], ...) for name, tag in (tag_of(cls) or {}).items()}  # pyright: ignore[reportInvalidTypeForm]
    for argument in arguments_of(cls):
        if "local" in argument.metadata:
            continue
        found, description = _type_of(argument.hint), argument.metadata.get("description")
        found = found if description is None else Annotated[found, Field(description=description)]
        parts[argument.name] = found, ... if argument.default is MISSING else argument.default
    doc = (getdoc(cls) or "").partition("\n\nRaises")[0]
    return create_model(cls.__name__, __base__=Strict, __doc__=doc, **parts)


OP_MODELS: dict[str, Any] = {name: _model(cls) for name, cls in ops().items()}


def components() -> dict[str, Any]:
    """Schemas of the OpenAPI document: `Intervention`, `MonitorSpec`, `CaptureSpec`, and the types that these refer to."""
    intervention: Any = Annotated[reduce(or_, OP_MODELS.values()), Field(discriminator="op")]
    capture: Any = str | _model(Capture)
    monitor = create_model("MonitorSpec", __base__=_model(Monitor), op=(Literal["monitor"], "monitor"))
    specs = {"Intervention": intervention, "MonitorSpec": monitor, "CaptureSpec": capture}
    adapters = {name: TypeAdapter(spec) for name, spec in specs.items()}
    schemas, shared = TypeAdapter.json_schemas(
        [(name, "validation", adapter) for name, adapter in adapters.items()],
        ref_template="#/components/schemas/{model}",
    )
    return {name: schema for (name, _), schema in schemas.items()} | shared["$defs"]
