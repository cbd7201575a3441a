"""The JSON schema of interventions and captures, made of the Python objects' own fields (specs.py reads the same JSON).

The engine process makes it, and tells the HTTP process, which has no torch and so not the objects. The objects check requests.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import reduce
from inspect import getdoc
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, TypeAdapter, create_model

from ..core.device import DTYPES
from ..hooks.captures.spec import Capture
from ..hooks.interventions.op import SCOPES, Gate
from ..hooks.interventions.set_feature import MODES, SetFeature
from ..hooks.interventions.specs import NORMS
from ..hooks.spec import MISSING as MISSING_POSITIONS
from .protocol import Strict
from .specs import OPS, REDUCTIONS, WIRE_DTYPES


class InlineVector(Strict):
    """A tensor's values in the request."""

    dtype: Literal[tuple(WIRE_DTYPES)]  # pyright: ignore[reportInvalidTypeForm]
    shape: list[Annotated[StrictInt, Field(ge=0, le=1 << 32)]]
    data: str = Field(description="base64 of the values, little-endian, in row order")


Values = list[float] | list[list[float]] | list[list[list[float]]]


class LayersVector(Strict):
    """A vector for each layer that the site selects."""

    layers: dict[str, InlineVector | Values] = Field(min_length=1)


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
    str | InlineVector | LayersVector | Values,
    Field(description="the name of a stored vector, or values: inline as base64, by layer, or as lists of numbers"),
]
PositionsField = Annotated[
    Literal["all", "prompt", "generated"]
    | StrictInt
    | list[StrictInt]
    | list[StrictBool]
    | GeneratedPositions
    | SlicePositions
    | RangePositions,
    Field(
        description="positions of input tokens; numbers address the prompt, negative ones from its end; booleans are a mask"
    ),
]


def _model(cls: type[Any], known: dict[str, Any], **tags: str) -> Any:
    """A pydantic model with the fields of a dataclass, and tags that name it."""
    parts: dict[str, Any] = {name: (Literal[tag], ...) for name, tag in tags.items()}  # pyright: ignore[reportInvalidTypeForm]
    for field in fields(cls):
        if field.init:
            default = ... if field.default is MISSING else field.default
            parts[field.name] = known[field.name], default
    doc = (getdoc(cls) or "").partition("\n\nRaises")[0]
    return create_model(cls.__name__, __base__=Strict, __doc__=doc, **parts)


_HEADS = StrictInt | list[StrictInt] | None
_KNOWN: dict[str, Any] = {
    "site": Annotated[
        str, Field(description="resid_post.12, resid_post.*, resid_post.{0,4}, blocks.12.hook_resid_post, ...")
    ],
    **dict.fromkeys(("vector", "directions", "direction", "values", "probe"), Vector),
    **dict.fromkeys(("positions", "from_", "to"), PositionsField),
    **dict.fromkeys(("scale", "factor", "threshold"), float),
    **dict.fromkeys(("low", "high"), float | None),
    "norm": Literal[tuple(NORMS)],  # pyright: ignore[reportInvalidTypeForm]
    "missing": Literal[MISSING_POSITIONS],  # pyright: ignore[reportInvalidTypeForm]
    "scope": Literal[SCOPES],  # pyright: ignore[reportInvalidTypeForm]
    "features": Annotated[
        dict[str, float | list[float | None]],
        Field(min_length=1, description="feature -> value, or [low, high] with clamp"),
    ],
    "mode": Literal[MODES],  # pyright: ignore[reportInvalidTypeForm]
    "heads": _HEADS,
    "layer": StrictInt | list[StrictInt] | Literal["*"],
    "top_k": StrictInt | None,  # pyright: ignore[reportOperatorIssue]
    "sae": Annotated[str, Field(description="the name of an SAE that the server has (--sae NAME=PATH)")],
    "tokens": list[StrictInt] | None,
    "transport": Annotated[str | None, Field(description="null: a server has the logit lens alone")],
    "dtype": Literal[tuple(DTYPES)] | None,  # pyright: ignore
}
"""Types of the fields, by name. A field that is not here fails at import: a new one must be given its type."""

_GATE_SITE = Annotated[str | None, Field(description="one site, earlier in the pass than those of the intervention")]
GateModel: Any = _model(Gate, _KNOWN | {"site": _GATE_SITE})
ReductionModel: Any = reduce(or_, [
    _model(cls, _KNOWN, **({} if name == "project" else {"type": name})) for name, cls in REDUCTIONS.items()
])  # fmt: skip
_KNOWN |= {"when": GateModel | None, "reduce": Literal["mean", "last"] | ReductionModel | None}
_OF_SAE = {"site": Annotated[str | None, Field(description="the site; null: the one that the SAE reads")]}
OP_MODELS: dict[str, Any] = {
    name: _model(cls, _KNOWN | (_OF_SAE if cls is SetFeature else {}), op=name) for name, cls in OPS.items()
}
CaptureModel: Any = _model(Capture, _KNOWN)


def components() -> dict[str, Any]:
    """Schemas of the OpenAPI document: `Intervention`, `CaptureSpec`, and what these refer to."""
    intervention = Annotated[reduce(or_, OP_MODELS.values()), Field(discriminator="op")]
    adapters = {"Intervention": TypeAdapter[Any](intervention), "CaptureSpec": TypeAdapter[Any](str | CaptureModel)}
    schemas, shared = TypeAdapter.json_schemas(
        [(name, "validation", adapter) for name, adapter in adapters.items()],
        ref_template="#/components/schemas/{model}",
    )
    return {name: schema for (name, _), schema in schemas.items()} | shared["$defs"]
