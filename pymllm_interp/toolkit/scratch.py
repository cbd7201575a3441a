"""Memory of a sweep's passes: the K and V of one layer, and the slots of each cell's positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.forward_batch import ForwardBatch
from ..mem_cache.memory_pool import write_rows
from ..runner.interp_model_runner import InterpModelRunner
from ..runner.parts import BatchBuilder

Span = tuple[int, int]
"""(first, stop): consecutive positions of the prompt."""


class LayerKV:
    """K and V of the layer that runs: a `PagedKV` that gives every layer the same memory.

    A cell generates nothing, so its KV is dead once its layer has run. Pages have one slot. A cell shares each position before its
    own with the base run, at any page size of the engine.

    Args:
        num_slots: number of slots without slot 0, which is for padding.
    """

    page_size = 1

    def __init__(self, runner: InterpModelRunner, num_slots: int) -> None:
        self.dtype, self.num_kv_heads, self.head_dim = runner.kv_cache_dtype, runner.num_kv_heads, runner.head_dim
        assert runner.token_to_kv_pool is not None, "call initialize() first"
        self._scales = runner.token_to_kv_pool.scales
        shape = (num_slots + 1, self.num_kv_heads, self.head_dim)
        self._kv = torch.zeros(2, *shape, dtype=self.dtype, device=runner.device)

    def get_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [slots, kv_heads, head_dim]."""
        return self._kv[0], self._kv[1]

    def paged(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [slots, 1, kv_heads, head_dim]."""
        return self._kv[0].unsqueeze(1), self._kv[1].unsqueeze(1)

    def set_kv(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] to `slots` [tokens]."""
        for stored, rows, scale in zip(self._kv, (k, v), self.scales(layer_id), strict=True):
            write_rows(stored, slots, rows, scale)

    def scales(self, layer_id: int) -> tuple[float, float]:
        """The scales of the engine's pool."""
        return self._scales(layer_id)

    def saved(self, count: int) -> torch.Tensor:
        """A copy of slots 1 to `count`: [2, count, kv_heads, head_dim]."""
        return self._kv[:, 1 : count + 1].clone()

    def restore(self, kv: torch.Tensor) -> None:
        """Write rows returned by `saved` to the same slots."""
        self._kv[:, 1 : kv.shape[1] + 1] = kv


@dataclass
class SlotTable:
    """A `RequestTable`: the slot of each position of each sequence of a pass."""

    req_to_token: torch.Tensor  # [rows, positions] int32

    @property
    def max_context_len(self) -> int:
        """Number of positions in a row."""
        return self.req_to_token.shape[1]


def batch_of(
    runner: InterpModelRunner, kv: LayerKV, token_ids: torch.Tensor, spans: list[Span], first_slot: int
) -> ForwardBatch:
    """A planned pass over sequences of one prompt: sequence i computes the positions of ``spans[i]``.

    Position p of the base run is in slot p + 1. Sequences read the positions before their spans there, and write their own to
    slots from `first_slot` on.

    Args:
        token_ids: [tokens] int64, the prompt, on the device.
    """
    device = token_ids.device
    starts, lens = torch.tensor(spans).unbind(1)
    sizes = lens - starts
    ends = sizes.cumsum(0)
    positions = torch.arange(len(token_ids))
    own = first_slot + (ends - sizes - starts).unsqueeze(1) + positions
    table = torch.where(positions < starts.unsqueeze(1), positions + 1, own)
    rows = torch.cat([torch.arange(*span) for span in spans])
    sequence = torch.repeat_interleave(torch.arange(len(spans)), sizes)
    kept = SlotTable(table.to(torch.int32).to(device))
    return _planned(runner, kv, kept, token_ids[rows.to(device)], starts, lens, table[sequence, rows].to(device))


def last_rows_of(runner: InterpModelRunner, kv: LayerKV, batch: ForwardBatch) -> tuple[ForwardBatch, torch.Tensor]:
    """Planned pass of the last rows of a `batch_of`'s sequences, over all their KV; and these rows, [batch]."""
    sizes, prefixes = torch.tensor(batch.extend_seq_lens_cpu), torch.tensor(batch.extend_prefix_lens_cpu)
    lens, rows = prefixes + sizes, (sizes.cumsum(0) - 1).to(batch.input_ids.device)
    table: Any = batch.req_to_token_pool
    last = _planned(runner, kv, table, batch.input_ids[rows], lens - 1, lens, batch.out_cache_loc[rows])
    return last, rows


def _planned(
    runner: InterpModelRunner,
    kv: Any,
    table: Any,
    input_ids: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
) -> ForwardBatch:
    """The pass of sequences that compute positions `starts` up to `lens`, [batch] on the host each."""
    sizes, device = lens - starts, input_ids.device
    on_device = [numbers.to(torch.int32).to(device) for numbers in (lens, sizes, starts)]
    batch = BatchBuilder(runner.model_spec, table, kv, runner.attn_backend).extend(
        input_ids,
        torch.arange(len(sizes), device=device),
        seq_lens=on_device[0],
        extend_seq_lens=on_device[1],
        extend_prefix_lens=on_device[2],
        out_cache_loc=slots,
        extend_seq_lens_cpu=sizes.tolist(),
        extend_prefix_lens_cpu=starts.tolist(),
    )
    if batch.rope_lens is not None:
        batch.rope_lens.fill_(table.max_context_len)  # the prompt's length, whatever a sequence computes of it
    assert batch.attn_backend is not None
    batch.attn_backend.init_forward_metadata(batch)
    return batch
