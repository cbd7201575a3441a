"""Helpers to apply declared ops and to capture states inside a forward pass.

`SiteOps` (core/forward_batch.py) is a pass's declared interventions and captures. `TableOps` reads them from device tables,
`HostOps` has them as Python functions. Both act in the same order: at the delta, at the sum, then at the norm. At each site the ops
come first, and a capture stores the state that the model continues with.

A module with a traceable output applies the ops inside (`apply_at`). The pass captures the state after the module (`capture_at`),
so that the capture includes a trace's edit. Without a module in between, both are one call (`apply_and_capture`).

In all functions `value` is [1, tokens, width], and `site_ops` is None in passes without declared ops.
"""

from __future__ import annotations

import torch

from ...core.forward_batch import Delta, ParallelDelta, SiteOps
from ...core.model_spec import delta_site, final_norm_site, inner_site, input_add, residual_site
from ...core.norm_kind import Norm


def apply_at(value: torch.Tensor, site_ops: SiteOps | None, site: int) -> torch.Tensor:
    """`value` after the ops at `site`."""
    return value if site_ops is None else site_ops.at(site, value)


def apply_inner(value: torch.Tensor, site_ops: SiteOps | None, layer: int, kind: str) -> torch.Tensor:
    """`apply_at` for an inner site or the logits."""
    if site_ops is None or kind not in site_ops.inner:
        return value
    return site_ops.at(inner_site(site_ops.num_layers, layer, kind), value)


def capture_at(value: torch.Tensor, site_ops: SiteOps | None, site: int) -> None:
    """Capture `value` for the requests that capture `site`."""
    if site_ops is not None:
        site_ops.capture(site, value)


def capture_inner(value: torch.Tensor, site_ops: SiteOps | None, layer: int, kind: str) -> None:
    """`capture_at` for an inner site."""
    if site_ops is not None and kind in site_ops.inner:
        site_ops.capture(inner_site(site_ops.num_layers, layer, kind), value)


def apply_and_capture(value: torch.Tensor, site_ops: SiteOps | None, site: int) -> torch.Tensor:
    """`value` after the ops at `site`, captured."""
    value = apply_at(value, site_ops, site)
    capture_at(value, site_ops, site)
    return value


def residual_sum(
    h: torch.Tensor, delta: Delta | None, site_ops: SiteOps | None, residual_add: int, served: bool = False
) -> torch.Tensor:
    """``h + delta`` at a residual add, with the ops and captures of its two sites.

    A fused layer returns its hidden state as (h, delta), because the next norm's kernel adds them.

    Args:
        delta: None if h is the sum already, with its ops applied.
        served: a hook sees the sum next. The caller captures the sum after the hook.

    Of a `ParallelDelta`, `residual_add` is the MLP's.
    """
    if delta is None:
        return h
    at_sum, site = apply_at if served else apply_and_capture, delta_site(residual_add)
    if isinstance(delta, ParallelDelta):
        attention = apply_and_capture(delta.attention, site_ops, site - 2)
        delta = apply_and_capture(delta.mlp, site_ops, site) + attention
    else:
        delta = apply_and_capture(delta, site_ops, site)
    return at_sum(h + delta, site_ops, residual_site(residual_add))


def add_norm_apart(
    site_ops: SiteOps, residual_add: int, h: torch.Tensor, delta: Delta, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Site-by-site implementation of `SiteOps.add_norm`."""
    h = residual_sum(h, delta, site_ops, residual_add)
    normed, last = norm.normalize(h), final_norm_site(site_ops.num_layers)
    return h, apply_and_capture(normed, site_ops, last) if residual_add == input_add(site_ops.num_layers) else normed


def sites_of(residual_add: int, delta: Delta, num_layers: int) -> set[int]:
    """The sites of a residual add: the deltas' sites, the sum's, and after the last layer the final norm's."""
    sites = {delta_site(residual_add), residual_site(residual_add)}
    if isinstance(delta, ParallelDelta):
        sites.add(delta_site(residual_add) - 2)
    return sites | {final_norm_site(num_layers)} if residual_add == input_add(num_layers) else sites
