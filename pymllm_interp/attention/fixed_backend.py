"""Attention for batch-invariant mode on CUDA: one Triton kernel for decode rows and prompts (kernels/fixed_attention.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..core.forward_batch import ForwardBatch
from ..mem_cache.memory_pool import FP8
from ..utils.upload import upload
from .attention_backend import AttentionBackend, RadixAttention
from .torch_backend import TorchAttnBackend


class Tiles(NamedTuple):
    """Tiles of a pass, for layers with one number of heads.

    Attributes:
        firsts, counts: [tiles] int32, first row and number of rows of each.
    """

    firsts: torch.Tensor
    counts: torch.Tensor


@dataclass
class FixedPass:
    """A planned pass.

    Attributes:
        owners: [rows] int64, row of the request table of each row.
        lens: [rows] int32, keys that each row sees.
        groups: (first row, rows) of each request; None for a decode pass.
        tiles: most rows of a tile -> the tiles.
    """

    owners: torch.Tensor
    lens: torch.Tensor
    groups: list[tuple[int, int]] | None
    tiles: dict[int, Tiles]


class FixedAttnBackend(AttentionBackend):
    """Paged attention with one partition of the keys for all passes. Passes with gradients run on the torch backend.

    Args:
        device: the device; on a CPU the kernels run under Triton's interpreter.
    """

    by_row = True

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._torch_backend = TorchAttnBackend()
        self._num_sms = 1
        if self.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._kept: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.fresh_kv_only:
            self._torch_backend.init_forward_metadata(forward_batch)
            return
        if forward_batch.forward_mode.is_decode() and forward_batch.batch_size == forward_batch.num_request_tokens:
            self.init_forward_metadata_capture_cuda_graph(forward_batch)
            return
        groups = [(row, size) for row, size in forward_batch.batch_groups if size]
        lens = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
        sizes = np.array([size for _, size in forward_batch.batch_groups], dtype=np.int64)
        ends = np.repeat(np.cumsum(sizes) - lens.cpu().numpy(), sizes)  # row - position
        seen = np.arange(1, int(sizes.sum()) + 1, dtype=np.int64) - ends
        requests, on_device = upload(self.device, np.repeat(np.arange(len(sizes)), sizes), seen.astype(np.int32))
        owners = forward_batch.req_pool_indices.to(torch.int64).index_select(0, requests)
        forward_batch.attn_metadata = FixedPass(owners, on_device, groups, {})

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if forward_batch.fresh_kv_only:
            return self._torch_backend.forward(q, k, v, layer, forward_batch, save_kv_cache)
        pool = forward_batch.token_to_kv_pool
        assert pool is not None, "prepare_forward_batch_* sets the pools"
        if save_kv_cache and len(k):
            pool.set_kv(layer.layer_id, forward_batch.out_cache_loc[: len(k)], k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.attend_in_place(q, out, forward_batch)(layer)
        return out.flatten(1)

    def attend_in_place(
        self, q: torch.Tensor, out: torch.Tensor, forward_batch: ForwardBatch
    ) -> Callable[[RadixAttention], None]:
        from ..kernels.fixed_attention import attention, tokens_of_tile

        metadata, pool, table = (
            forward_batch.attn_metadata, forward_batch.token_to_kv_pool, forward_batch.req_to_token_pool,
        )  # fmt: skip
        assert isinstance(metadata, FixedPass), "init_forward_metadata plans the pass before its first layer"
        assert pool is not None and table is not None, "prepare_forward_batch_* sets the pools"

        def attend(layer: RadixAttention) -> None:
            most, tiles, width = tokens_of_tile(layer.num_heads, layer.num_kv_heads), None, table.req_to_token.shape[1]
            if metadata.groups is not None:
                if most not in metadata.tiles:
                    metadata.tiles[most] = _tiles_of(metadata.groups, most, self.device)
                tiles = metadata.tiles[most]
            attention(
                q, pool.get_kv(layer.layer_id), tiles, metadata.owners, metadata.lens, table.req_to_token, out, layer.scaling,
                self._num_sms, layer.logit_cap, layer.sinks, self._memory(layer, len(q), width), pool.scales(layer.layer_id),
                layer.sliding_window,
            )  # fmt: skip

        return attend

    def _memory(self, layer: RadixAttention, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Memory for parts, which layers of one shape share: one kernel runs at a time. None: parts are not divided."""
        from ..kernels.fixed_attention import num_programs, parts_memory

        most = 2 * self._num_sms
        if rows > most or num_programs(rows, layer.num_kv_heads, width, self._num_sms) == 1:
            return None
        shape = layer.num_heads, layer.num_kv_heads, layer.head_dim, width
        if shape not in self._kept:
            rows = next(n for n in range(most, 0, -1) if num_programs(n, layer.num_kv_heads, width, self._num_sms) > 1)
            self._kept[shape] = parts_memory(rows, *shape, self.device)
        return self._kept[shape]

    # -- CUDA graphs ---------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Do nothing: a decode pass has no plan."""

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """The captured kernels read the lengths on the device."""
        forward_batch.attn_metadata = FixedPass(forward_batch.req_pool_indices, forward_batch.seq_lens, None, {})

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: the captured kernels read the lengths on the device."""


def check_fixed_kv(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Raise ValueError if a model of `dtype` cannot have K and V in `kv_dtype`."""
    if kv_dtype not in (dtype, FP8):
        raise ValueError(f"kv_cache_dtype={kv_dtype}: batch_invariant=True wants the model's dtype, {dtype}, or 'fp8'")


def _tiles_of(groups: list[tuple[int, int]], most: int, device: torch.device) -> Tiles:
    """Tiles of at most as many rows, each of one request."""
    found = [(row + at, min(most, size - at)) for row, size in groups for at in range(0, size, most)]
    firsts, counts = np.array(found, dtype=np.int32).reshape(-1, 2).T.copy()
    return Tiles(*upload(device, firsts, counts))
