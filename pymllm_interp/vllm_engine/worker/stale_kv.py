"""Blocks of vLLM's KV cache that a request gets from a former one, on a CPU.

vLLM's CPU kernel reads whole blocks: V behind a request's last position has a weight of zero. NaN times zero is NaN.
So NaN of one request would be in the tokens of a block's next owner. Kernels of CUDA leave these rows out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def clear_new_blocks(runner: Any, scheduled: Any) -> None:
    """Zero the blocks that a step's requests get, before its pass.

    Args:
        runner: vLLM's runner of the rank.
        scheduled: vLLM's `SchedulerOutput`.
    """
    if runner.device.type != "cpu":
        return
    cache = runner.kv_cache_config
    found = sorted(set(_new_blocks(scheduled, [group.kv_cache_spec.block_size for group in cache.kv_cache_groups])))
    if not found:
        return
    seen = set[int]()  # layers of several groups may share memory
    for kept in runner.kv_caches:
        # States of Mamba layers are no tensors, and vLLM's to clear.
        if isinstance(kept, torch.Tensor) and kept.data_ptr() not in seen:
            seen.add(kept.data_ptr())
            blocks = 0 if kept.shape[0] % cache.num_blocks == 0 else 1  # older versions have K and V in front
            kept.unflatten(blocks, (cache.num_blocks, -1)).movedim(blocks, 0)[found] = 0


def _new_blocks(scheduled: Any, sizes: list[int]) -> Iterator[int]:
    """Blocks of positions that are not computed yet. Others hold cached prefixes.

    Args:
        sizes: positions of a block, of each group.
    """
    cached = scheduled.scheduled_cached_reqs
    for new in scheduled.scheduled_new_reqs:
        for blocks, size in zip(new.block_ids, sizes, strict=True):
            yield from blocks[new.num_computed_tokens // size :]
    for one, groups, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        if groups is not None:
            for blocks, size in zip(groups, sizes, strict=True):
                yield from blocks[computed // size :] if one in cached.resumed_req_ids else blocks
