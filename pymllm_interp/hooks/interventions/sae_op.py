"""`SAEOp`, the base class of ops by an SAE, and their reads of states at other sites.

A transcoder reads one site and writes a later one. So its op has a `SAERead` at the site that is read, and acts on the result. A
`SetFeature` directly behind a `Reconstruct` by the same SAE has one, too: it changes the features that were decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ...core.model_spec import LOGITS, ModelSpec, inner_site
from ...kernels.edit_codes import FEATURE_COLUMNS
from ..saes.encoders import Encoders, SAEEncoder, read_of
from ..saes.registry import check_fits
from ..saes.sae import SAE
from ..site import NORMED, Site, expand, is_several, stream_of
from .gates import is_before
from .op import Op

AFTER_OPS = 1 << 20
"""Rank of reads that follow all ops of their request at a site."""


class SAEOp(Op):
    """An op at the site that an SAE writes: an autoencoder's own, or a transcoder's `site_out`.

    Attributes:
        output: index of its site among those that a cross-layer transcoder writes; None for an op at all of them.
    """

    sae: Any
    output: int | None = None
    reads: tuple[int, ...] | None = None
    """Features that a `SAERead` selects; None: it makes the reconstruction."""

    def __post_init__(self) -> None:
        if isinstance(self.sae, SAE):
            own = "site_out" if self.sae.transcoder else "site"
            if self.site is None:
                example = "site_out='mlp_out.12'" if self.sae.transcoder else "site='resid_post.12'"
                self._check(
                    "sae", getattr(self.sae, own) is not None, f"one that names its site: SAE.load(..., {example})"
                )
                self._set("site", getattr(self.sae, own))
        super().__post_init__()
        if isinstance(self.sae, SAE):
            self._check_sae(self.sae)
        else:
            self._check("sae", isinstance(self.sae, str) and bool(self.sae), "an SAE, or a name in lm.saes")
        written = self.sae.site_out if isinstance(self.sae, SAE) else None
        if self.site is not None and is_several(str(self.site)) and self.site != written:
            self._check("site", False, "one site, which the SAE writes")

    def _set_place(self) -> None:
        if self.site is not None:  # else a name says it, which is not resolved yet
            super()._set_place()

    def _check_sae(self, sae: SAE) -> None:
        if sae.site is not None and is_several(sae.site):
            raise ValueError(
                f"{self.name}: a crosscoder's features are known only behind the last site that it reads, {sae.site}; captures "
                "read them: Capture(sae.site, reduce=Features(sae))"
            )
        if sae.transcoder:
            self._check(
                "sae", sae.site is not None, "one that names the site that it reads: SAE.load(..., site='mlp_in.12')"
            )

    @property
    def name(self) -> str:
        """The spec's name in error messages."""
        of = self.sae if isinstance(self.sae, str) else self.site and str(self.site)
        return type(self).__name__ if of is None else f"{type(self).__name__}({of!r})"

    @property
    def columns(self) -> slice:
        """The part of the SAE's output at the op's site."""
        if self.output is None:
            return slice(None)
        width = self.sae.d_out // self.outputs
        return slice(self.output * width, (self.output + 1) * width)

    outputs = 1
    """Number of sites that the SAE writes."""

    def at(self, index: int, model: ModelSpec) -> Self:
        """The op at one of its sites in a model, with the part of the SAE's output there."""
        sites = self.sites_in(model)
        if len(sites) == 1:
            return self
        known = self.__dict__.get("_by_site")
        if known is None or known[0] is not model:
            known = model, [self._at(i, str(site), len(sites)) for i, site in enumerate(sites)]
            self._set("_by_site", known)
        return known[1][index]

    def _at(self, output: int, site: str, outputs: int) -> Self:
        made = replace(self)  # pyright: ignore[reportArgumentType]
        for name, value in (("site", site), ("output", output), ("outputs", outputs)):
            object.__setattr__(made, name, value)
        made.__dict__.pop("_arguments", None)
        return made

    def given(self, vectors: Sequence[Tensor]) -> Tensor | None:
        """Result of a `SAERead`, which follows the operands in `vectors`; None without one."""
        count = len(self.operands)
        return vectors[count] if len(vectors) > len(self.vectors) else None

    def _checked_sites(self, model: ModelSpec) -> tuple[Site, ...]:
        if isinstance(self.sae, str):
            raise ValueError(f"{self.name}: {self.sae!r} is a name, and only an LM's `saes` know whose")
        sites = super()._checked_sites(model)
        check_fits(
            replace(self.sae, **{"site_out" if self.sae.transcoder else "site": str(self.site)}), model, self.name
        )
        if self.sae.transcoder:
            (read,) = expand(self.sae.site, model.num_hidden_layers, model.family)
            try:
                read_of(self.sae, str(read), model, None)  # raises if it has no number
                stream = stream_of(read, model) if read.kind in NORMED else read
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            if not is_before(stream, sites[0], model):
                raise ValueError(f"{self.name}: the transcoder reads {read}, which is not before {sites[0]}")
        return sites


@dataclass(frozen=True, eq=False)
class SAERead:
    """A read of a state for an op: features, or a reconstruction.

    Attributes:
        features: the features, with `SAE.output_scale` behind their values; None: the reconstruction.
        rank: its place among the ops of its request there.
        norm: norm of the states; None for none.
        column: first column in a row's memory, for kernels.
        encoder: the encoder that finds it for kernels, or None.
    """

    sae: SAE
    features: tuple[int, ...] | None
    site: int
    rank: float
    norm: Callable[[Tensor], Tensor] | None
    column: int = 0
    encoder: SAEEncoder | None = None

    def of(self, states: Tensor) -> Tensor:
        """[rows, features + 1] or [rows, d_out] float32 of states [rows, width]."""
        sae = self.sae.to(states.device)
        x = states if self.norm is None else self.norm(states)
        if self.features is None:
            return sae.reconstruct(x)
        found = sae.encode_float32(x)[:, list(self.features)]
        return torch.cat((found, sae.output_scale(x)), -1)

    def wanted(self) -> list[tuple[int, int]]:
        """(column, entry of `OpTables.wanted`) of all features."""
        if self.features is None or self.encoder is None:
            return []
        entries = [self.encoder.entry(feature) for feature in (*self.features, None)]
        return [(self.column + i, entry) for i, entry in enumerate(entries)]


class RequestReads:
    """The reads of one request's ops.

    Args:
        model: its sites.
        readout: its norms, or None.
        encoders: encoders of the passes; None where ops are functions.
    """

    def __init__(self, model: ModelSpec, readout: Any, encoders: Encoders | None) -> None:
        self._model, self._readout, self._encoders = model, readout, encoders
        self._known: dict[Any, SAERead] = {}
        self._used = 0  # columns

    @property
    def all(self) -> list[SAERead]:
        """All reads, each once."""
        return list(self._known.values())

    def of(self, ops: Sequence[Op], site: int) -> list[SAERead | None]:
        """The read of each op of a request at a site, in the order in which they act.
        Raises ValueError: no pass encodes the SAE for kernels, or it encodes another state than the op would change."""
        return [self._of(ops, i, site) if isinstance(op, SAEOp) else None for i, op in enumerate(ops)]

    def _of(self, ops: Sequence[Op], index: int, site: int) -> SAERead | None:
        op: Any = ops[index]
        sae, before = op.sae, ops[index - 1] if index else None
        behind = op.reads is not None and isinstance(before, SAEOp) and before.reads is None
        behind = behind and before.sae.fingerprint == sae.fingerprint  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        if not (op.encodes or behind):
            return None
        if sae.transcoder:
            number, norm = read_of(sae, sae.site, self._model, self._readout)
            return self._read(op, number, AFTER_OPS, norm, site)
        if site == inner_site(self._model.num_hidden_layers, 0, LOGITS):
            return None  # ops there are functions everywhere
        if self._encoders is not None and index - behind > 0:
            raise ValueError(
                f"{op.name}: {ops[0].name} changes the state before it, and on CUDA the SAE encodes what comes to the site: give "
                "it first, with all features in one"
            )
        if self._encoders is None and not behind:
            return None  # it reads the rows that it changes
        return self._read(op, site, index - behind - 0.5, None, site)

    def _read(self, op: Any, number: int, rank: float, norm: Any, site: int) -> SAERead:
        key = op.sae.fingerprint, op.reads, number, rank
        if key not in self._known:
            found = SAERead(op.sae, op.reads, number, rank, norm)
            self._known[key] = found if self._encoders is None else self._in_memory(op, found, site, self._encoders)
        return self._known[key]

    def _in_memory(self, op: Any, read: SAERead, site: int, encoders: Encoders) -> SAERead:
        encoder = encoders.of(op.sae, site)
        if op.sae.pursuit is not None:
            raise ValueError(
                f"{op.name}: a matching pursuit chooses features one after the other, which captured passes cannot: on CUDA "
                "captures read them (Features)"
            )
        if encoder is None or (op.reads is None and encoder.column is None):
            raise ValueError(f"{op.name}: {_unencoded(op, encoders)}")
        if op.reads is None:
            return replace(read, encoder=encoder, column=encoder.column)
        column, self._used = self._used, self._used + len(op.reads) + 1
        if self._used > FEATURE_COLUMNS:
            raise ValueError(
                f"{op.name}: of the SAEs that passes encode, a request has up to {FEATURE_COLUMNS} features and SetFeatures in "
                "all: set fewer"
            )
        return replace(read, encoder=encoder, column=column)


def _unencoded(op: Any, encoders: Encoders) -> str:
    """Reason that kernels cannot do an op, and advice."""
    sae, rebuilds = op.sae, op.reads is None
    why, more = f"a top-k SAE has to encode all {sae.d_sae} features to know one", ""
    if rebuilds:
        why, more = f"a reconstruction takes all {sae.d_sae} features", ", reconstruct=['name']"
    elif sae.transcoder:
        why = f"a transcoder reads {sae.site}, and writes later"
    elif sae.normalization != "none":
        why = f"the SAE normalizes its input ({sae.normalization})"
    found = ", ".join(str(other.sae.site) for other in encoders.all if other.column is not None or not rebuilds)
    hint = ". An SAE with the threshold of its training (batch-top-k, converted to jumprelu) needs no more"
    return (
        f"{why}; on CUDA the engine must be built with it: LM(..., saes={{'name': sae}}{more}). This one has "
        f"{f'others, at {found}' if found else 'none'}{hint if sae.architecture == 'topk' and not rebuilds else ''}"
    )
