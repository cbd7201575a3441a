"""Taps on a CPU, with ops and captures as functions."""

from __future__ import annotations

import torch

from ...core.model_spec import delta_site, residual_site
from ...layers.edits.base import apply_and_capture
from ...layers.edits.host import HostOps


def at_site(rows: torch.Tensor, site: int, ops: HostOps) -> None:
    """Ops and captures of rows [rows, width] at a site, in place."""
    if site in ops.by_site or site in ops.captures:
        after = apply_and_capture(rows[None], ops, site)[0]
        if after is not rows and site in ops.by_site:
            rows.copy_(after)


def pair_on_host(delta: torch.Tensor, stream: torch.Tensor, residual_add: int, ops: HostOps) -> None:
    """Edited rows become (0, the edited sum), which the norm adds exactly. Other rows keep all bits."""
    at_site(delta, delta_site(residual_add), ops)
    site = residual_site(residual_add)
    if site not in ops.by_site and site not in ops.captures:
        return
    total = stream + delta
    after = apply_and_capture(total[None], ops, site)[0]
    if site in ops.by_site:
        changed = (after != total).any(-1, keepdim=True)
        stream.copy_(torch.where(changed, after, stream))
        delta.copy_(torch.where(changed, torch.zeros_like(delta), delta))
