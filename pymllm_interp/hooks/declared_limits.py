"""`DeclaredLimits`: what an engine takes of interventions and captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core.model_spec import INNER_SITES, LOGITS
from ..kernels.edit_codes import MAX_HEADS
from .interventions.op import Op
from .kv_edits import ActingOp
from .saes.sae import SAE
from .site import Site


@dataclass(frozen=True)
class DeclaredLimits:
    """Limits on what a request declares, named as the settings."""

    max_interventions_per_site: int
    max_intervention_vectors: int
    max_capture_bytes: int
    inner_sites: frozenset[str] = frozenset(INNER_SITES)
    """Kinds of inner sites that passes have kernels for."""
    device_tables: bool = False
    """Whether ops run as kernels, from device tables; only the ops at the logits run as functions."""
    encoders: Mapping[int, Sequence[SAE]] = field(default_factory=dict)
    """By site number, the top-k SAEs that each pass encodes for the device tables."""

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

    def encoder_number(self, sae: SAE, site: int) -> int | None:
        """The index of an SAE, or of an equal one, among the encoders of a site; None without one."""
        for i, known in enumerate(self.encoders.get(site, ())):
            if known is sae or known.fingerprint == sae.fingerprint:
                known.refresh()
                return i
        return None

    def check_encoders(self, ops: Sequence[ActingOp], site: int) -> None:
        """Raise ValueError for features if no pass encodes their SAE at that site, or if it encodes another state.

        Args:
            ops: of a request at a site, in the order in which they act.
            site: number of the site.
        """
        for i, op in enumerate(ops if self.device_tables else ()):
            sae = op.spec.encodes
            if sae is None:
                continue
            if self.encoder_number(sae, site) is None:
                known = ", ".join(str(other.site) for found in self.encoders.values() for other in found)
                raise ValueError(
                    f"{op.spec.name}: a top-k SAE has to encode all {sae.d_sae} features to know one; on CUDA the engine must be "
                    f"built with it: LM(..., saes={{'name': sae}}). This one has {f'others, at {known}' if known else 'none'}. An "
                    "SAE with the threshold of its training (batch-top-k, converted to jumprelu) needs no more"
                )
            if i:
                raise ValueError(
                    f"{op.spec.name}: {ops[0].spec.name} changes the state before it, and on CUDA a top-k SAE encodes what comes "
                    "to the site: give it first, with all features in one"
                )
