"""`Capture`: a declared read of a site, and its reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from ...core.model_spec import EXPERTS, LOGITS, ModelSpec
from ...utils.arguments import is_whole
from ...utils.device import DTYPES
from ..heads import Heads
from ..interventions.projections import MAX_RANK
from ..positions import Positions
from ..registry import REDUCTIONS, is_spelled, json_name, reduction
from ..site import Site
from ..spec import PlacedSpec
from ..vectors.files import Source
from .reductions.pools import STATES
from .reductions.reduction import Reduced, Reduction


@reduction
@dataclass(frozen=True, eq=False)
class Project(Reduction):
    """A capture's reduction: the dot products of each row with some directions, in place of the row.

    Raises:
        ValueError: directions are not finite numbers of shape [n, width], or top_k is not from 1 to n.
    """

    directions: Source = field(repr=False, metadata={"rows": True})
    """[n, width], or [width] for one; not normalised. Kept as [n, width] float32 on the CPU."""
    top_k: int | None = None
    """Keep only the `top_k` largest, with their indexes; None keeps all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k is not None and not self.named:
            count = len(self.directions)
            self._check("top_k", is_whole(self.top_k) and 1 <= self.top_k <= count, f"from 1 to {count}, or None")

    on_device = False

    @property
    def probes(self) -> torch.Tensor | None:
        return self.directions if len(self.directions) <= MAX_RANK else None

    def results(self, values: torch.Tensor, dtype: torch.dtype | None, states: bool) -> Reduced:
        if states:
            values = values.float() @ self.directions.T
        if self.top_k is None:
            return Reduced(values.to(dtype or torch.float32))
        values, indexes = values.topk(self.top_k, dim=-1)
        return Reduced(values.to(dtype or torch.float32), {"indexes": indexes})

    def row_bytes(self, dtype: torch.dtype | None) -> int:
        count = self.top_k or len(self.directions)
        return count * (dtype or torch.float32).itemsize + (8 * count if self.top_k else 0)


@dataclass(frozen=True, eq=False)
class Capture(PlacedSpec):
    """Read the state, after all interventions at its site. At `logits` these are the logits for sampling, before penalties
    and filters.

    Args:
        site: A site's name, a pattern of sites such as "resid_post.*", or a `Site`.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        dtype: Floating dtype of the rows after the reduction, or its name. None: the model's, or float32 for a `Reduction`.
        reduce: "mean" or "max" over the positions, "last" for the last one, or a `Project`, `Features` or `Lens` of each. None
            keeps the rows, [positions, width].
        heads: Attention heads to read, at `q`, `k`, `v` and `z`: [positions, len(heads), head_dim]. None: all.
        missing: "error", or "skip" to leave out positions that a prompt does not have; the receipt counts them.
        stream: Whether the pieces of a stream have the rows, too, as they are computed (`StreamPiece.captures`). The one row of
            "mean", "max" and "last" comes with the last piece. Without a stream it changes nothing.
        device: "cpu", or "engine" to leave the states on the engine's device, in memory of `device_capture_bytes`. A local `LM`
            gives them so; all captures of a request are then on it, without reductions and streams.

    Raises:
        ValueError: an unknown site, positions, dtype or reduction.
    """

    site: Site | str
    positions: Positions = "all"
    dtype: torch.dtype | str | None = None
    reduce: Literal["mean", "max", "last"] | Reduction | None = None
    heads: Heads = None
    missing: Literal["error", "skip"] = "error"
    stream: bool = False
    device: Literal["cpu", "engine"] = field(default="cpu", metadata={"local": "a server's states come as bytes"})
    reduction: Reduction = field(init=False, repr=False)
    """`reduce` as an object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dtype, str):
            self._check("dtype", self.dtype in DTYPES, f"one of {sorted(DTYPES)}")
            self._set("dtype", DTYPES[self.dtype])
        elif self.dtype is not None:
            self._check("dtype", self.dtype in DTYPES.values(), f"one of {sorted(DTYPES)}")
        self._check("stream", isinstance(self.stream, bool), "True or False")
        self._check("device", self.device in ("cpu", "engine"), "'cpu' or 'engine'")
        if self.stays and (self.reduce is not None or self.stream):
            raise ValueError(
                f"{self.name}: device='engine' keeps whole states, and they come with the result: leave out reduce and stream"
            )
        self._set("reduction", self._reduction())
        if is_spelled(type(self.reduction)):
            self._set("reduce", json_name(type(self.reduction)))

    @property
    def stays(self) -> bool:
        """Whether the states stay on the engine's device."""
        return self.device == "engine"

    def _reduction(self) -> Reduction:
        """The object that `reduce` means."""
        if self.reduce is None:
            return STATES
        named: Any = REDUCTIONS.get(self.reduce) if isinstance(self.reduce, str) else None
        if named is not None and is_spelled(named):
            return named()
        if not isinstance(self.reduce, Reduction):
            spelled = [repr(name) for name, cls in REDUCTIONS.items() if is_spelled(cls)]
            others = sorted(cls.__name__ for cls in REDUCTIONS.values() if not is_spelled(cls))
            expected = f"{', '.join(spelled)}, a Project or another reduction ({', '.join(others)}), or None"
            self._check("reduce", False, expected)
        return cast(Reduction, self.reduce)

    def _checked_sites(self, model: ModelSpec) -> tuple[Site, ...]:
        sites, reduction = super()._checked_sites(model), self.reduction
        try:
            if reduction.on_device and self.heads is not None:
                raise ValueError(f"it reads whole states, and heads={self.heads}: leave heads out")
            for site in sites:
                if reduction.on_device and site.kind == LOGITS:
                    raise ValueError("it reads states before the head; capture the logits without it")
                reduction.check(site, model)
            reduction.check_joined(sites, model)
        except ValueError as error:
            raise ValueError(f"{self.name}: {reduction.name}: {error}") from None
        if sites[0].kind == EXPERTS:
            self._check_ids(model)
        return sites

    def _check_ids(self, model: ModelSpec) -> None:
        """Raise ValueError if a dtype rounds the largest id of an expert."""
        for dtype in (model.dtype, cast(torch.dtype, self.dtype) or model.dtype):
            exact = int(2 / torch.finfo(dtype).eps)
            if model.num_experts - 1 > exact:
                raise ValueError(
                    f"{self.name}: {str(dtype)[6:]} holds ids up to {exact} exactly, and the model has {model.num_experts} "
                    "experts: capture router.i, or use a model and a capture in float16 or float32"
                )


def check_devices(captures: Sequence[Capture], by_layer: Sequence[Capture]) -> None:
    """Raise ValueError for captures on two devices, and for patterns, recurrent states, keys and values on the engine's."""
    for spec in by_layer:
        if spec.stays:
            raise ValueError(
                f"{spec.name}: patterns, recurrent states, keys and values come to the host: leave out device='engine'"
            )
    if len({spec.stays for spec in captures}) > 1:
        raise ValueError(
            "some captures of a request have device='engine' and some have not: ask for all of them on one device, or send two "
            "requests"
        )
