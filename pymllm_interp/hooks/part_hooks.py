"""Interventions and captures at the sites of a part of a model: `encoder.resid_post.3`, `vision.out`, `vision.deepstack.0`.

A part runs once, before the language model: an encoder, and a vision tower with its projector. Hooks are bound to it as to a model
with its input as prompt, and act as functions. The inputs are the encoder's tokens, the images' patches, and their placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..core.image_input import ImageInput
from ..core.model_spec import INNER_SITES, OF_ENCODER, OF_VISION, ModelSpec
from ..core.pass_parts import EncoderInput
from ..core.step import RequestHooks
from .bind import DeclaredLimits
from .bound_hooks import Bindings, BoundHooks
from .captures.spec import Capture
from .interventions.op import Op
from .site import bare, part_of


def part_limits(limits: DeclaredLimits) -> DeclaredLimits:
    """The limits at a part's sites: no kernels are needed."""
    return replace(limits, inner_sites=frozenset(INNER_SITES), device_tables=False, encoders=None)


class PartInput(NamedTuple):
    """The input of a request's part.

    Attributes:
        ids: token ids of the encoder's, or for each row of a tower the index of its image.
        images: rows of each image.
    """

    ids: list[int]
    images: list[range]

    @classmethod
    def of(cls, part: str, model: ModelSpec, encoder: EncoderInput | None, images: Sequence[ImageInput]) -> PartInput:
        """The input of a part by its key in `ModelSpec.parts`. Raises ValueError for a prompt without one."""
        if encoder is not None:
            return cls(encoder.token_ids, [])
        if not images:
            raise ValueError("the prompt has no image, and the vision tower does not run")
        assert model.vision is not None
        per_tile = model.vision.context_len
        sizes = [image.num_rows(per_tile) if part == OF_VISION else image.num_tokens for image in images]
        ends = list(accumulate(sizes, initial=0))
        return cls([i for i, size in enumerate(sizes) for _ in range(size)], [range(*own) for own in pairwise(ends)])


class PartBindings:
    """Binds hooks at the sites of a model's parts.

    Args:
        limits, only_captures: see `Bindings`.
    """

    def __init__(self, model: ModelSpec, limits: DeclaredLimits, only_captures: bool) -> None:
        self._model = model
        own = part_limits(limits)
        self._bindings = {part: Bindings(spec, own, None, only_captures) for part, spec in model.parts.items()}

    def split(
        self, specs: Sequence[Any], captures: Sequence[Capture]
    ) -> tuple[Sequence[Any], Sequence[Capture], dict[str, RequestHooks]]:
        """(specs and captures of the language model, hooks of each part that has some).
        Raises ValueError: a spec that does not act in a part."""
        if not self._bindings:
            return specs, captures, {}
        named = dict.fromkeys(
            part for spec in (*specs, *captures) if (part := part_of(str(spec.site))) in self._bindings
        )
        if not named:
            return specs, captures, {}
        found = {part: RequestHooks(_moved(specs, part), _moved(captures, part), max_tokens=1) for part in named}
        for part, own in found.items():
            what = _name_of(part)
            for spec in own.interventions:
                if not isinstance(spec, Op):
                    raise ValueError(f"{spec.name}: only ops and captures act at the sites of {what}")
                if spec.when is not None and spec.when.site is not None:
                    raise ValueError(f"{spec.name}: the gate of an op in {what} reads the op's site")
            if any(spec.stream for spec in own.captures):
                raise ValueError(f"captures at the sites of {what} do not stream: its rows come with the result")
            if any(spec.stays for spec in own.captures):
                raise ValueError(f"states of {what} come to the host: leave out device='engine'")
        return _others(specs, named), _others(captures, named), found

    def bind(
        self, parts: dict[str, RequestHooks], encoder: EncoderInput | None, images: Sequence[ImageInput]
    ) -> dict[str, RequestHooks]:
        """The hooks with positions of images as rows of the part. Raises ValueError for those that the part refuses."""
        found = dict[str, RequestHooks]()
        for part, own in parts.items():
            try:
                ids, places = PartInput.of(part, self._model, encoder, images)
                found[part] = replace(
                    own,
                    interventions=[spec.located(places, len(ids)) for spec in own.interventions],
                    captures=[spec.located(places, len(ids)) for spec in own.captures],
                )
                self._bindings[part].bound(found[part], len(ids))
            except ValueError as error:
                raise ValueError(f"at the sites of {_name_of(part)}: {error}") from None
        return found

    def close(self) -> None:
        """Let go of the model."""
        for bindings in self._bindings.values():
            bindings.close()


def bound_to(part: str, hooks: RequestHooks, num_rows: int, model: ModelSpec, limits: DeclaredLimits) -> BoundHooks:
    """The hooks of a part, bound in the worker."""
    return BoundHooks.of_request(hooks, num_rows, model.parts[part], part_limits(limits), None)


def _name_of(part: str) -> str:
    return "an encoder" if part == OF_ENCODER else "a vision tower"


def _moved(specs: Sequence[Any], part: str) -> list[Any]:
    return [replace(spec, site=bare(str(spec.site))) for spec in specs if part_of(str(spec.site)) == part]


def _others(specs: Sequence[Any], parts: dict[str, None]) -> list[Any]:
    return [spec for spec in specs if part_of(str(spec.site)) not in parts]
