"""`Declared`: the interventions and captures of one request, bound and checked before it is scheduled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..core.model_spec import INNER_SITES, LOGITS, ModelSpec, site_index
from .binding import Bound, at_logits, bind
from .captures.activations import Activations
from .captures.captures import Captures
from .captures.spec import Capture
from .interventions.reference import vectors_of
from .interventions.specs import Intervention
from .positions import Window
from .receipt import Applied, Captured
from .site import Site


@dataclass(frozen=True)
class Limits:
    """What tables and results hold; the names are those of the settings."""

    max_interventions_per_site: int
    max_intervention_vectors: int
    max_capture_bytes: int
    inner_sites: frozenset[str] = frozenset(INNER_SITES)
    """Kinds that passes have kernels for."""

    def check(self, site: Site) -> None:
        """Raise ValueError where passes have no kernels for the site."""
        if site.kind in INNER_SITES and site.kind not in self.inner_sites:
            raise ValueError(
                f"{site}: on CUDA the passes of this engine have no kernels for {site.kind!r}; build it with "
                f"LM(..., inner_sites={tuple(sorted({*self.inner_sites, site.kind}))})"
            )


def _captures(
    specs: Sequence[Capture], model: ModelSpec, prompt_len: int, limits: Limits, longest: int, logits_from: int
) -> Captures | None:
    if not specs:
        return None

    def bounds() -> Iterator[tuple[int, Bound, tuple[int, ...]]]:
        for spec in specs:
            found = bind(spec, model, prompt_len)
            limits.check(found[0].site)
            shape = model.shape(found[0].site.kind)  # a spec's sites are of one kind
            for bound in found:
                if bound.site.kind == LOGITS:
                    bound = at_logits(bound, logits_from)
                yield site_index(bound.site, model.num_hidden_layers), bound, shape

    captures = Captures(bounds(), model.dtype, prompt_len, longest, model.num_hidden_layers)
    if captures.num_bytes > limits.max_capture_bytes:
        raise ValueError(
            f"the captures of a request of {longest} positions may take {captures.num_bytes / 2**20:.0f} MiB; a request's results "
            f"hold {limits.max_capture_bytes / 2**20:.0f} (max_capture_bytes): raise it, or capture fewer sites or positions"
        )
    return captures


Fires = dict[tuple[int, int], int | torch.Tensor]
"""(site, place among its ops) -> how often an op's gate let it act; where functions count, a tensor on their device."""


class Op(NamedTuple):
    """An intervention at one site, at the positions of its windows."""

    spec: Intervention
    site: Site
    windows: tuple[Window, ...]


@dataclass
class Declared:
    """The interventions and captures of one request.

    Attributes:
        ops: by site, in the order in which they act.
        captures: None where nothing is captured.
        logits_from: the first position that has logits.
        vectors: rows of the pool that it holds, until `VectorPool.release`.
    """

    ops: dict[int, list[Op]]
    captures: Captures | None
    prompt_len: int
    logits_from: int = 0
    vectors: dict[int, int] = field(default_factory=dict)
    """id of a tensor -> its first row."""
    held: list[bytes] = field(default_factory=list)
    fires: Fires = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        specs: Sequence[Intervention],
        model: ModelSpec,
        prompt_len: int,
        limits: Limits,
        captures: Sequence[Capture] = (),
        longest: int = 0,
        logits_from: int = 0,
    ) -> Declared:
        """What `specs` and `captures` come to for a prompt of that length, in a request of at most `longest` positions, which has
        logits at those from `logits_from` on.

        Raises:
            ValueError: what `bind` refuses, a site that no op can act at, too many ops at one, a site that is captured twice, or
                captures that may take more memory than a request's results are allowed.
        """
        placed: list[tuple[int, bool, Op]] = []
        for spec in specs:
            for bound in bind(spec, model, prompt_len):
                assert isinstance(bound.spec, Intervention)
                # resid_pre.i is the state that resid_post.i-1 left, and comes after it; so does resid_pre.0 after embed.
                later = bound.site.kind == "resid_pre"
                limits.check(bound.site)
                site = site_index(bound.site, model.num_hidden_layers)
                placed.append((site, later, Op(bound.spec, bound.site, bound.windows)))
        ops: dict[int, list[Op]] = {}
        for site, _, op in sorted(placed, key=lambda entry: entry[:2]):  # stable: the order given
            if not op.spec.identity:
                ops.setdefault(site, []).append(op)
        for found in ops.values():
            count = sum(len(op.windows) for op in found)
            if count > limits.max_interventions_per_site:
                raise ValueError(
                    f"{found[0].site} has {count} interventions, counting each run of evenly spaced positions; at most "
                    f"{limits.max_interventions_per_site} are held (max_interventions_per_site): raise it, or use fewer runs"
                )
        captured = _captures(captures, model, prompt_len, limits, longest, logits_from)
        return cls(ops, captured, prompt_len, logits_from)

    @property
    def edits_logits(self) -> bool:
        """Whether an op acts at the logits."""
        return any(found[0].site.kind == LOGITS for found in self.ops.values())

    def activations(self, token_ids: list[int]) -> Activations | None:
        """What was captured of a request that computed the positions of `token_ids`; None where nothing was asked for."""
        return None if self.captures is None else self.captures.activations(token_ids)

    def captured(self, num_positions: int) -> list[Captured]:
        """How many rows were captured, of a request whose first `num_positions` were computed."""
        if self.captures is None or self.captures.error is not None:
            return []
        return [Captured(*counted) for counted in self.captures.counts(num_positions)]

    def applied(self, num_positions: int) -> list[Applied]:
        """What became of each op, of a request whose first `num_positions` were computed."""

        def rows(op: Op, first: int, stop: int) -> int:
            return sum([window.among(first, min(stop, num_positions)) for window in op.windows])

        return [
            Applied(
                intervention=type(op.spec).__name__,
                site=str(op.site),
                prompt_rows=rows(op, self.logits_from if op.site.kind == LOGITS else 0, self.prompt_len),
                generated_rows=rows(op, self.prompt_len, num_positions),
                gate_fires=None if op.spec.when is None else int(self.fires.get((site, i), 0)),
            )
            for site, found in sorted(self.ops.items())
            for i, op in enumerate(found)
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The vectors that the tables hold for it."""
        for op in self:
            yield from vectors_of(op.spec)
        for group in () if self.captures is None else self.captures.groups:
            if group.probes is not None:
                yield group.probes

    def __iter__(self) -> Iterator[Op]:
        return (op for found in self.ops.values() for op in found)
