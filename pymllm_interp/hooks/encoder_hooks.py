"""Interventions and captures at the sites of an encoder: `encoder.resid_post.3`.

They are bound to the encoder as to a model with the encoder's input as prompt. They act in its one pass, as functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..core.model_spec import INNER_SITES, ModelSpec
from ..core.step import RequestHooks
from .bind import DeclaredLimits
from .bound_hooks import Bindings, BoundHooks
from .captures.spec import Capture
from .interventions.op import Op
from .site import OF_ENCODER
from .spec import PlacedSpec

SpecT = TypeVar("SpecT", bound=PlacedSpec)


def encoder_limits(limits: DeclaredLimits) -> DeclaredLimits:
    """The limits at an encoder's sites: no kernels are needed."""
    return replace(limits, inner_sites=frozenset(INNER_SITES), device_tables=False, encoders=None)


class EncoderBindings:
    """Binds hooks at an encoder's sites.

    Args:
        model: spec of the encoder.
        limits, only_captures: see `Bindings`.
    """

    def __init__(self, model: ModelSpec, limits: DeclaredLimits, only_captures: bool) -> None:
        self._bindings = Bindings(model, encoder_limits(limits), None, only_captures)

    def split(
        self, specs: Sequence[Any], captures: Sequence[Capture]
    ) -> tuple[Sequence[Any], Sequence[Capture], RequestHooks | None]:
        """(specs and captures of the decoder, hooks of the encoder or None).

        Raises:
            ValueError: a spec that does not act in an encoder.
        """
        if not any(map(_is_of_encoder, (*specs, *captures))):
            return specs, captures, None
        own = RequestHooks(_moved(specs), _moved(captures), max_tokens=1)
        for spec in own.interventions:
            if not isinstance(spec, Op):
                raise ValueError(f"{spec.name}: only ops and captures act at the sites of an encoder")
            if spec.when is not None and spec.when.site is not None:
                raise ValueError(f"{spec.name}: the gate of an op in an encoder reads the op's site")
        return _others(specs), _others(captures), own

    def bind(self, hooks: RequestHooks, source_len: int) -> BoundHooks:
        """The hooks bound, for an input of this length. Raises ValueError for those that the encoder refuses."""
        try:
            return self._bindings.bound(hooks, source_len)
        except ValueError as error:
            raise ValueError(f"at the encoder's sites: {error}") from None

    def close(self) -> None:
        """Let go of the model."""
        self._bindings.close()


def _is_of_encoder(spec: Any) -> bool:
    return str(spec.site).startswith(OF_ENCODER)


def _moved(specs: Sequence[SpecT]) -> list[SpecT]:
    return [
        replace(spec, site=str(spec.site).removeprefix(OF_ENCODER))  # pyright: ignore[reportArgumentType]
        for spec in specs
        if _is_of_encoder(spec)
    ]


def _others(specs: Sequence[SpecT]) -> list[SpecT]:
    return [spec for spec in specs if not _is_of_encoder(spec)]
