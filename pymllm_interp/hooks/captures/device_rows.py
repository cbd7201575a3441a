"""Captured states that stay on the engine's device: from records to the rows of results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .group import Group
from .records import selected
from .reductions.reading import Pending


def keep_records(
    group: Group,
    runs: Sequence[torch.Tensor],
    first: int,
    sizes: np.ndarray,
    rows: torch.Tensor,
    pending: list[Pending],
) -> None:
    """Copy a group's states of records to its rows.

    Args:
        runs: [n, elements] each: the records of positions `first` and on that have a size, in order.
        sizes: [positions] of `CaptureProgress.record_sizes`.
        rows: [rows, sites, width] on the same device.
        pending: gets the later writes of `read_all`.
    """
    _, whole, ordinal = group.summed_and_whole(first, sizes)
    for records in selected(runs, whole):
        target = rows[ordinal : ordinal + len(records)]
        ordinal += len(records)
        if group.reading is not None:
            pending.append((group.reading, tuple(group.names), group.site_states(records), target))
            continue
        own = records[:, group.offset : group.offset_of(len(group.sites))]
        target.copy_(own.unflatten(1, (len(group.sites), -1)).view(group.stored_dtype)[..., : group.width])
