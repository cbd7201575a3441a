"""`SplitRows`: rows of inner sites, of which each tensor-parallel rank has its own heads or neurons."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.model_spec import INNER_SITES, ModelSpec, final_norm_site

SPLIT = ("q", "k", "v", "z", "mlp_act")
"""Kinds of inner sites with columns that are split over the ranks."""


class SplitRows:
    """The columns of a rank at inner sites.

    Ops, gates and reductions see whole rows, so that they are the same on any number of ranks. Ranks gather a site's rows where a
    request of the step asks for it. In captured graphs they gather always: the same graph serves all steps.

    Args:
        model: spec of the whole model.
        ranks: number of tensor-parallel ranks.
        rank: this one.
    """

    def __init__(self, model: ModelSpec, ranks: int = 1, rank: int = 0) -> None:
        self.model, self.ranks, self.rank = model, ranks, rank
        self._first = final_norm_site(model.num_hidden_layers) + 1

    def repeats(self, kind: str) -> int:
        """Number of ranks with the same columns. vLLM repeats heads of k and v for further ranks."""
        return max(1, self.ranks // self.model.num_key_value_heads) if kind in ("k", "v") else 1

    def width(self, kind: str) -> int:
        """Columns of a rank."""
        whole = self.model.width(kind)
        return whole * self.repeats(kind) // self.ranks if kind in SPLIT else whole

    def whole(self, rows: torch.Tensor, site: int, act: Callable[[torch.Tensor], None]) -> None:
        """Let `act` change whole rows in place, contiguous and in the model's dtype; `rows` get the outcome.

        Args:
            rows: [rows, a rank's columns] of an inner site. Values that `act` leaves keep all bits.
        """
        kind = INNER_SITES[(site - self._first) % len(INNER_SITES)]
        split = self.ranks > 1 and kind in SPLIT
        full = self._gathered(rows, kind) if split else rows
        state = full.to(self.model.dtype).contiguous()
        before = state.clone() if state.dtype != full.dtype else None
        act(state)
        if state is rows:
            return
        if before is not None:
            state = torch.where(state == before, full, state.to(full.dtype))
        if split:
            width = self.width(kind)
            first = self.rank // self.repeats(kind) * width
            state = state[:, first : first + width]
        rows.copy_(state)

    def _gathered(self, rows: torch.Tensor, kind: str) -> torch.Tensor:
        from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

        found = get_tp_group().all_gather(rows.contiguous(), -1)
        if (repeats := self.repeats(kind)) > 1:
            found = found.unflatten(-1, (self.ranks, -1))[:, ::repeats].flatten(1)
        return found
