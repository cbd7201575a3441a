"""Binding and checks: declared specs, resolved to a model's vectors and sites and to a prompt's positions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..core.model_spec import INNER_SITES, LOGITS, STATE, ModelSpec
from ..kernels.edit_codes import MAX_HEADS
from .interventions.op import Op
from .monitors.monitor import Monitor
from .positions import MAX_POSITION, Window, missing_of, windows_of
from .saes.encoders import Encoders
from .site import Site, expand_in
from .spec import PlacedSpec
from .vectors.by_layer import LayerVectors
from .vectors.files import Named

SpecT = TypeVar("SpecT", bound=PlacedSpec)


def resolved(lists: Sequence[Sequence[SpecT]], vectors: Mapping[str, Named], model: ModelSpec) -> list[list[SpecT]]:
    """Each request's specs with vectors in place of names. A spec with per-layer vectors becomes one spec per layer.
    Raises ValueError: an unknown name, a layer without a vector, or a vector that the spec refuses."""
    done: dict[int, list[SpecT]] = {}  # by id: requests usually share their specs
    for spec in (spec for specs in lists for spec in specs):
        if id(spec) not in done:
            done[id(spec)] = _resolved(spec, vectors, model)
    return [[made for spec in specs for made in done[id(spec)]] for specs in lists]


def _resolved(spec: SpecT, vectors: Mapping[str, Named], model: ModelSpec) -> list[SpecT]:
    spec = _with_gate(spec, vectors, model)
    if isinstance(spec, Monitor):
        spec = spec.with_ops(lambda op: _resolved(op, vectors, model))
    if not any(spec.names()):
        return [spec]
    try:
        sites = expand_in(spec.site, model)
        found = {name: vectors[name] if isinstance(name, str) else name.at(sites) for name in spec.names()}
    except (KeyError, ValueError) as error:
        raise ValueError(f"{spec.name}: {error.args[0]}") from None
    if all(isinstance(vector, Tensor) for vector in found.values()):
        return _resolved(spec.filled(found), vectors, model)  # pyright: ignore[reportArgumentType]  # a name's rows may be by layer
    return [
        replace(spec, site=str(site)).filled(_of_layer(found, site, spec.name))  # pyright: ignore[reportArgumentType]
        for site in sites
    ]


def _with_gate(spec: SpecT, vectors: Mapping[str, Named], model: ModelSpec) -> SpecT:
    """The spec with the probe of its gate resolved, if the gate has its own site."""
    for name, part in spec._content().specs:
        if part.own_site is not None and any(part.names()):
            try:
                (site,) = expand_in(part.own_site, model)
                found = {key: vectors[key] if isinstance(key, str) else key.at([site]) for key in part.names()}
            except (KeyError, ValueError) as error:
                raise ValueError(f"{spec.name}: {name}: {error.args[0]}") from None
            changes: dict[str, Any] = {name: part.filled(_of_layer(found, site, f"{spec.name}: {name}"))}
            spec = replace(spec, **changes)  # pyright: ignore[reportArgumentType]
    return spec


def _of_layer(vectors: Mapping[str | LayerVectors, Named], site: Site, who: str) -> dict[str | LayerVectors, Tensor]:
    found: dict[str | LayerVectors, Tensor] = {}
    for name, vector in vectors.items():
        if isinstance(vector, dict):
            if site.layer not in vector:
                what = f"vector {name!r} has none" if isinstance(name, str) else "there is no vector"
                raise ValueError(f"{who}: {what} for {site}; it has the layers {', '.join(map(str, vector))}")
            vector = vector[site.layer]
        found[name] = vector
    return found


def fingerprint_of(interventions: Sequence[PlacedSpec], captures: Sequence[PlacedSpec]) -> str:
    """SHA-256 of a request's specs in their order, vectors included: 64 hexadecimal digits."""
    return _joined(tuple(spec.fingerprint for spec in (*interventions, *captures)))


@lru_cache(maxsize=256)
def _joined(fingerprints: tuple[str, ...]) -> str:
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()


@dataclass(frozen=True)
class Bound(Generic[SpecT]):
    """A spec at one site of one model, for a prompt of one length."""

    spec: SpecT
    site: Site
    windows: tuple[Window, ...]
    """The selected positions, ascending; see `windows_of`. Rows of a `Patch` are in this order."""
    missing: int = 0
    """Positions that the prompt does not have, skipped."""


def bind(spec: SpecT, model: ModelSpec, prompt_len: int) -> list[Bound[SpecT]]:
    """`spec` at each of its sites, in the order of the layers.

    Raises:
        ValueError: the model refuses the spec (`PlacedSpec.sites_in`), positions are beyond the prompt, or it does not fit them
            (`PlacedSpec.fit`). The message names the spec, the limit, and the setting behind the limit.
    """
    sites = spec.sites_in(model)
    try:
        windows = windows_of(spec.positions, prompt_len, spec.missing)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    fitted = spec.fit(windows, prompt_len).whole(model)
    missing = missing_of(spec.positions, prompt_len)
    return [Bound(fitted, site, windows, missing) for site in sites]


def after_prompt(bound: Bound[Op], prompt_len: int) -> Bound[Op]:
    """An op of a monitor, at the generated positions among its own.
    Raises ValueError: it has none, a vector for each position, or replaces recurrent states."""
    spec, windows = bound.spec, []
    words = spec.words()
    if words is not None and words.row_per_position:
        raise ValueError(f"{spec.name}: an op of a monitor has one vector, not one for each position")
    if bound.site.kind == STATE:
        raise ValueError(f"{spec.name}: an op of a monitor cannot replace a recurrent state")
    for window in bound.windows:
        skipped = window.among(0, prompt_len)
        if window.among(prompt_len, MAX_POSITION):
            windows.append(replace(window, start=window.start + skipped * window.step))
    if not windows:
        raise ValueError(
            f"{spec.name}: an op of a monitor acts at generated positions, and positions={spec.positions!r} has none"
        )
    return replace(bound, windows=tuple(windows))


def at_logits(bound: Bound[SpecT], first: int) -> Bound[SpecT]:
    """A capture at the logits, for a request with logits at the positions from `first` on.
    Raises ValueError: positions without logits."""
    if bound.spec.positions == "all":
        return replace(bound, windows=(Window(first),))
    if any(window.start < first for window in bound.windows):
        raise ValueError(
            f"{bound.spec.name}: positions={bound.spec.positions!r}; this request has logits where its tokens are drawn, from "
            f"position {first} on, the prompt's last: name -1, 'generated' or 'all', which means all of those. Logits of the whole "
            "prompt come with SamplingParams(prompt_logprobs=0), and in a trace of one pass (`with lm.trace(...)`)"
        )
    return bound


@dataclass(frozen=True)
class DeclaredLimits:
    """Limits of interventions and captures, named as the settings."""

    max_interventions_per_site: int
    max_intervention_vectors: int
    max_capture_bytes: int
    inner_sites: frozenset[str] = frozenset(INNER_SITES)
    """Kinds of inner sites that passes have kernels for."""
    device_tables: bool = False
    """Whether ops run as kernels, from device tables; only the ops at the logits run as functions."""
    encoders: Encoders | None = None
    """The SAEs that each pass encodes for the device tables; None for none."""

    def check(self, site: Site) -> None:
        """Raise ValueError for a site without kernels."""
        if site.kind in INNER_SITES and site.kind not in self.inner_sites:
            raise ValueError(
                f"{site}: on CUDA the passes of this engine have no kernels for {site.kind!r}; build it with "
                f"LM(..., inner_sites={tuple(sorted({*self.inner_sites, site.kind}))})"
            )

    def check_count(self, site: Site, count: int) -> None:
        """Raise ValueError for more interventions at a site than are held."""
        if count > self.max_interventions_per_site:
            raise ValueError(
                f"{site} has {count} interventions, counting each run of evenly spaced positions and gates; at most "
                f"{self.max_interventions_per_site} are held (max_interventions_per_site): raise it, or use fewer runs"
            )

    def check_op(self, op: Op, site: Site) -> None:
        """Raise ValueError for an op or a site without kernels."""
        self.check(site)
        if self.device_tables and site.kind == LOGITS and op.when is not None and op.when.site is not None:
            raise ValueError(
                f"{op.name}: on CUDA a gate at an earlier site ends before the logits; put it on an earlier op"
            )
        if self.device_tables and site.kind != LOGITS and op.words() is None:
            raise ValueError(f"{op.name}: there is no kernel for it; on CUDA it can act at logits only")
        if self.device_tables and max(op.heads or (0,)) >= MAX_HEADS:
            raise ValueError(f"{op.name}: heads={op.heads}; on CUDA, ops have the first {MAX_HEADS} heads")
