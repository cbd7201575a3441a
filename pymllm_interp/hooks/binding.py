"""Declared specs, bound to a model and to a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.model_spec import ModelSpec
from .captures.spec import Capture
from .interventions.specs import (
    Clamp,
    Intervention,
    Patch,
    Steer,
)
from .positions import (
    Window,
    _absolute,
    windows_of,
)
from .site import Site, expand
from .vectors import Named

_PlacedSpec = TypeVar("_PlacedSpec", bound=Intervention | Capture)


def for_each_prompt(given: Any, prompts: int) -> list[list[Intervention]]:
    """A list of interventions for each of so many prompts: `given` for all of them, or a list of lists.

    Raises:
        ValueError: neither, or a list of another length.
    """
    found = _lists(given, prompts, "interventions")
    for spec in (spec for entry in found for spec in entry):
        if not isinstance(spec, Intervention):
            raise ValueError(f"interventions: {spec!r} is not one; expected Steer, Ablate, Clamp, Scale or Patch")
    return found


def captures_for_each_prompt(given: Any, prompts: int) -> list[list[Capture]]:
    """The same of captures; a string is a `Capture` of that site.

    Raises:
        ValueError: neither, or a list of another length.
    """
    found = [
        [_whole(spec) if isinstance(spec, str | Site) else spec for spec in entry]
        for entry in _lists(given, prompts, "capture")
    ]
    for spec in (spec for entry in found for spec in entry):
        if not isinstance(spec, Capture):
            raise ValueError(f"capture: {spec!r} is not one; expected a site, or Capture(site, ...)")
    return found


@lru_cache
def _whole(site: str | Site) -> Capture:
    return Capture(site)


def _lists(given: Any, prompts: int, what: str) -> list[list[Any]]:
    specs = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    lists = [isinstance(spec, list | tuple) for spec in specs]
    if not any(lists):
        return [specs] * prompts
    if all(lists) and len(specs) == prompts:
        return [list(entry) for entry in specs]
    others = len(specs) - sum(lists)
    got = f"{sum(lists)} of them" + (f" and {others} that are not in one" if others else "")
    raise ValueError(f"{what}: expected one list for all prompts, or a list for each of the {prompts}; got {got}")


def resolved(
    lists: Sequence[Sequence[_PlacedSpec]], vectors: Mapping[str, Named], model: ModelSpec
) -> list[list[_PlacedSpec]]:
    """Each request's specs with vectors in place of their names. One whose vectors differ by layer becomes one for each layer.

    Raises:
        ValueError: a name that is not there, a layer that has no vector, or a vector that the spec refuses.
    """
    done: dict[int, list[_PlacedSpec]] = {}  # by id: as a rule all requests have the same specs
    for spec in (spec for specs in lists for spec in specs):
        if id(spec) not in done:
            done[id(spec)] = _resolved(spec, vectors, model) if any(spec.names()) else [spec]
    return [[made for spec in specs for made in done[id(spec)]] for specs in lists]


def _resolved(spec: _PlacedSpec, vectors: Mapping[str, Named], model: ModelSpec) -> list[_PlacedSpec]:
    try:
        found = {name: vectors[name] for name in spec.names()}
        if all(isinstance(vector, Tensor) for vector in found.values()):
            return [spec.filled(found)]  # pyright: ignore[reportArgumentType]
        sites = expand(spec.site, model.num_hidden_layers, model.family)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{spec.name}: {error.args[0]}") from None
    return [replace(spec, site=str(site)).filled(_of_layer(found, site, spec.name)) for site in sites]


def _of_layer(vectors: Mapping[str, Named], site: Site, who: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, vector in vectors.items():
        if isinstance(vector, dict):
            if site.layer not in vector:
                have = ", ".join(map(str, vector))
                raise ValueError(f"{who}: vector {name!r} has none for {site}; it has the layers {have}")
            vector = vector[site.layer]
        found[name] = vector
    return found


def fingerprint_of(interventions: Sequence[Intervention], captures: Sequence[Capture]) -> str:
    """A hash of all that a request declares, in its order, vectors included: 64 hexadecimal digits."""
    parts = [spec.fingerprint for spec in (*interventions, *captures)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Bound:
    """A spec at one site of one model, for a prompt of one length: what a table can hold."""

    spec: Intervention | Capture
    site: Site
    windows: tuple[Window, ...]
    """Of `windows_of`. A `Patch` has its values in their order: row i is for ordinal i."""


def bind(spec: Intervention | Capture, model: ModelSpec, prompt_len: int) -> list[Bound]:
    """`spec` at each of its sites, in the order of the layers.

    Raises:
        ValueError: a layer or a kind of site that the model does not have, a vector that is only named (`resolved` comes
            first), one whose width is not the site's or whose values the model's dtype cannot hold, positions beyond the
            prompt, or a `Patch` whose rows are not as many as its positions. The message names the spec, the limit, and the
            setting that it comes from.
    """
    sites = sites_in(spec, model)
    try:
        windows = windows_of(spec.positions, prompt_len)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    if isinstance(spec, Patch) and spec.values.ndim == 2:
        spec = _in_order(spec, windows, prompt_len)
    return [Bound(spec, site, windows) for site in sites]


def sites_in(spec: Intervention | Capture, model: ModelSpec) -> tuple[Site, ...]:
    """The spec's sites in the order of the layers. Checked once for each model: as a rule many requests share a spec.

    Raises:
        ValueError: what `bind` refuses whatever the prompt.
    """
    found = spec.__dict__.get("_found")
    if found is None or found[0] is not model:
        found = model, _sites_of(spec, model)
        spec._set("_found", found)
    return found[1]


def _sites_of(spec: Intervention | Capture, model: ModelSpec) -> tuple[Site, ...]:
    """The sites of `bind`, of a spec that the model can take."""
    for name in spec.names():
        raise ValueError(f"{spec.name}: {name!r} is a name, and only an LM's `vectors` know whose")
    try:
        sites = expand(spec.site, model.num_hidden_layers, model.family)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    kind = sites[0].kind
    width = model.width(kind)
    for name, tensor in spec.tensors():
        if tensor.shape[-1] != width:
            raise ValueError(
                f"{spec.name}: {name} has {tensor.shape[-1]} values; at {kind} the model has {width} "
                f"({' * '.join(model.settings(kind))})"
            )
    for name, number in _written(spec):
        if abs(number) > (limit := torch.finfo(model.dtype).max):
            raise ValueError(
                f"{spec.name}: {name} reaches {abs(number):.3g}, which {model.dtype}, the model's dtype, cannot hold; its "
                f"largest number is {limit:.3g}"
            )
    return tuple(sites)


def _written(spec: Intervention | Capture) -> Iterator[tuple[str, float]]:
    """(what, the largest of its numbers) of what comes into a state whatever the state is. Directions and probes do not."""
    match spec:
        case Steer(norm="none"):
            yield "scale * vector", spec.scale * spec.vector.abs().max().item()
        case Clamp():
            yield from ((name, bound) for name, bound in (("low", spec.low), ("high", spec.high)) if bound is not None)
        case Patch():
            yield "values", spec.values.abs().max().item()


def at_logits(bound: Bound, first: int) -> Bound:
    """A capture at the logits, in a request that has them at the positions from `first` on.

    Raises:
        ValueError: it names positions that have none.
    """
    if bound.spec.positions == "all":
        return replace(bound, windows=(Window(first),))
    if any(window.start < first for window in bound.windows):
        raise ValueError(
            f"{bound.spec.name}: positions={bound.spec.positions!r}; this request has logits where its tokens are drawn, from "
            f"position {first} on, the prompt's last: name -1, 'generated' or 'all', which means all of those. Logits of the whole "
            "prompt come with SamplingParams(prompt_logprobs=0), and in a trace of one pass (`with lm.trace(...)`)"
        )
    return bound


def _in_order(patch: Patch, windows: tuple[Window, ...], prompt_len: int) -> Patch:
    """The patch with its rows in the order of its positions."""
    sizes = [window.size for window in windows]
    count = None if None in sizes else sum(size or 0 for size in sizes)
    if count != len(patch.values):
        wanted = "positions without end, which take one [width]" if count is None else f"{count} positions"
        raise ValueError(f"{patch.name}: values has {len(patch.values)} rows for {wanted}")
    if not isinstance(patch.positions, tuple | range):
        return patch
    indexes = _absolute(patch.positions, prompt_len)
    order = sorted(range(len(indexes)), key=indexes.__getitem__)
    positions = tuple(indexes[row] for row in order)
    return replace(patch, values=patch.values[order], positions=positions)
