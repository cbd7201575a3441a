"""Attention in plain torch: for CPUs, for float32 on CUDA, and as the reference of the other backends."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from ..core.forward_batch import ForwardBatch
from ..kernels.cpu.cpu_dispatch import cpu_kernels_for
from ..mem_cache.memory_pool import read_rows
from .attention_backend import AttentionBackend, RadixAttention, softmax_with_sinks
from .torch_plan import (
    AttnGroup,
    AttnMetadata,
    AttnPlan,
    DecodeRows,
    PlanKey,
    StaticDecode,
    build_plan,
    build_static_plan,
    decode_rows,
    effective_window,
    make_chunks,
    token_rows,
)

# Below this many scores one fused call is faster than two matmuls and a softmax.
FUSED_SCORES = 8192
# Captured decode passes gather K and V up to a fixed length: as much as fits in this, at most the context.
STATIC_KV_BYTES = 512 << 20


class TorchAttnBackend(AttentionBackend):
    """Padded groups of requests over gathered K and V (see `torch_plan`).

    A request's rows depend on its own KV slots, its own rows and the lengths in the batch. No value of another request is
    read for them, so that its NaN does not spread.

    Raises (from `init_forward_metadata`):
        ValueError: `fresh_kv_only` with a prefix, or contradictory lengths.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        chunks = make_chunks(forward_batch)
        on_cpu = forward_batch.input_ids.is_cpu
        forward_batch.attn_metadata = AttnMetadata(chunks, decode_rows(chunks, forward_batch) if on_cpu else None)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        scales = 1.0, 1.0
        if forward_batch.fresh_kv_only:
            k, v = k.contiguous(), v.contiguous()
        else:
            pool = forward_batch.token_to_kv_pool
            assert pool is not None, "prepare_forward_batch_* sets the pools"
            if save_kv_cache:
                pool.set_kv(layer.layer_id, forward_batch.out_cache_loc[: len(k)], k, v)
            k, v = pool.get_kv(layer.layer_id)
            scales = pool.scales(layer.layer_id)
        if (rows := decode_rows_of(forward_batch)) is not None and (
            kernels := cpu_kernels_of(q, k, v, layer)
        ) is not None:
            return attend_rows(kernels, q, k, v, layer, rows)
        plan = self._plan(layer, forward_batch, q.dtype)
        outs = [_attend_group(q, k, v, layer, group, scales) for group in plan.groups]
        if not outs:
            return q.new_zeros(q.shape[0], layer.num_heads * layer.head_dim)
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if plan.inverse is None else out.index_select(0, plan.inverse)

    def can_replay(self, forward_batch: ForwardBatch, bs: int) -> bool:
        """Captured passes read up to a fixed length. Longer batches run eagerly."""
        lens = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
        return int(lens.max()) <= self._static_lens[bs]

    def init_cuda_graph_state(self, max_bs: int) -> None:
        self._static_lens: dict[int, int] = {}

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """The captured pass includes its planning, from the lengths on the device."""
        pool, table, bs = forward_batch.token_to_kv_pool, forward_batch.req_to_token_pool, forward_batch.batch_size
        assert pool is not None and table is not None, "prepare_forward_batch_* sets the pools"
        per_token = 2 * bs * pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize
        self._static_lens[bs] = kv_len = max(1, min(table.max_context_len, STATIC_KV_BYTES // per_token))
        forward_batch.attn_metadata = StaticDecode(kv_len)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: the captured pass plans itself."""

    def forget_plan(self, forward_batch: ForwardBatch) -> None:
        assert isinstance(forward_batch.attn_metadata, StaticDecode)
        forward_batch.attn_metadata.plans.clear()

    def _plan(self, layer: RadixAttention, forward_batch: ForwardBatch, dtype: torch.dtype) -> AttnPlan:
        metadata = forward_batch.attn_metadata
        if isinstance(metadata, StaticDecode):
            key = PlanKey.of(layer, layer.sliding_window)
            if key not in metadata.plans:
                metadata.plans[key] = build_static_plan(metadata.kv_len, layer, forward_batch, dtype)
            return metadata.plans[key]
        assert isinstance(metadata, AttnMetadata), "init_forward_metadata plans the pass before its first layer"
        key = PlanKey.of(layer, effective_window(metadata.chunks, layer))
        if key not in metadata.plans:
            metadata.plans[key] = build_plan(metadata.chunks, layer, forward_batch, dtype)
        return metadata.plans[key]


def decode_rows_of(forward_batch: ForwardBatch) -> DecodeRows | None:
    """Place of the KV of a planned pass. None: this backend did not plan the pass, or a request has several queries."""
    metadata = forward_batch.attn_metadata
    return metadata.decode if isinstance(metadata, AttnMetadata) else None


class InvariantTorchBackend(TorchAttnBackend):
    """Each query by itself, over its positions in order: a prompt's rows are computed as decode passes compute them.

    So their bits do not depend on the other rows of the pass, nor on how a prompt is cut. Passes with gradients have one request,
    and run as usual.
    """

    by_row = True

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        metadata = forward_batch.attn_metadata
        assert isinstance(metadata, AttnMetadata)
        if not torch.is_grad_enabled():
            metadata.tokens = token_rows(metadata.chunks, forward_batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        metadata, pool = forward_batch.attn_metadata, forward_batch.token_to_kv_pool
        assert isinstance(metadata, AttnMetadata)
        if metadata.tokens is None:
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache)
        if not forward_batch.fresh_kv_only:
            assert pool is not None, "prepare_forward_batch_* sets the pools"
            if save_kv_cache:
                pool.set_kv(layer.layer_id, forward_batch.out_cache_loc[: len(k)], k, v)
            k, v = pool.get_kv(layer.layer_id)
        kernels = cpu_kernels_for(q, k, v)
        assert kernels is not None, "runner/invariant.py has checked the model"
        return attend_rows(kernels, q.contiguous(), k.contiguous(), v.contiguous(), layer, metadata.tokens)

    def can_replay(self, forward_batch: ForwardBatch, bs: int) -> bool:
        return True

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """The captured pass reads rows and lengths where they are."""
        assert forward_batch.req_to_token_pool is not None, "prepare_forward_batch_* sets the pools"
        rows = DecodeRows(
            forward_batch.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens
        )
        forward_batch.attn_metadata = AttnMetadata([], None, rows)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Do nothing, as for a capture."""

    def forget_plan(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: no layer computes data for later ones."""


def cpu_kernels_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention) -> ModuleType | None:
    """The kernels that compute attention of one query each; None: none does."""
    kernels = cpu_kernels_for(q, k, v)
    return None if kernels is None or layer.head_dim % kernels.ATTENTION_WIDTH else kernels


def attend_rows(
    kernels: ModuleType, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, rows: DecodeRows
) -> torch.Tensor:
    """Attention of one query for each entry of `rows`, over the pool's K and V."""
    sinks = None if layer.sinks is None else layer.sinks.float()
    return kernels.decode_attention(q, k, v, *rows, layer.scaling, layer.sliding_window, layer.logit_cap, sinks)


def _attend_group(
    q: torch.Tensor,  # [tokens, heads, head_dim]
    k: torch.Tensor,  # [slots, kv_heads, head_dim]
    v: torch.Tensor,  # [slots, kv_heads, head_dim]
    layer: RadixAttention,
    group: AttnGroup,
    scales: tuple[float, float],  # dequantization scales (k, v)
) -> torch.Tensor:
    """The group's outputs, [size * q_len, heads * head_dim], padding included."""
    size, kv_heads, heads_per_kv = group.size, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
    keys, values = (
        read_rows(x.view(-1, layer.head_dim), group.kv_index, q.dtype, scale).view(size * kv_heads, -1, layer.head_dim)
        for x, scale in zip((k, v), scales, strict=True)
    )
    if group.q_index is not None:
        q = q.index_select(0, group.q_index)
    # The query heads of a KV head count as further queries, so that K and V are not repeated. Not einops: it takes 30 us more.
    q = q.view(size, group.q_len, kv_heads, heads_per_kv, layer.head_dim).permute(0, 2, 3, 1, 4)
    if group.mask is None:
        shared = (-1, heads_per_kv, -1, -1)
        out = F.scaled_dot_product_attention(
            q.flatten(0, 1),
            keys.unsqueeze(1).expand(shared),
            values.unsqueeze(1).expand(shared),
            is_causal=True,
            scale=layer.scaling,
        )
    else:
        out = _attend(q.reshape(size * kv_heads, -1, layer.head_dim), keys, values, group.mask, layer)
    return (
        out.view(size, kv_heads, heads_per_kv, group.q_len, -1).permute(0, 3, 1, 2, 4).reshape(size * group.q_len, -1)
    )


def _attend(
    q: torch.Tensor,  # [size * kv_heads, heads_per_kv * q_len, head_dim]
    k: torch.Tensor,  # [size * kv_heads, kv_len, head_dim]
    v: torch.Tensor,  # [size * kv_heads, kv_len, head_dim]
    mask: torch.Tensor,
    layer: RadixAttention,
) -> torch.Tensor:
    if layer.logit_cap is not None:
        scores = torch.bmm(q.float(), k.float().transpose(1, 2)) * layer.scaling
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap) + mask
        return torch.bmm(_softmax(scores, layer), v.float()).to(q.dtype)
    if layer.sinks is None and q.shape[0] * q.shape[1] * k.shape[1] < FUSED_SCORES:
        q, k, v, mask = (x.unsqueeze(0) for x in (q, k, v, mask))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling).squeeze(0)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=layer.scaling)
    return torch.bmm(_softmax(scores, layer), v)


def _softmax(scores: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
    """The weights of scores [size * kv_heads, heads_per_kv * q_len, kv_len]."""
    if layer.sinks is None:
        return torch.softmax(scores, -1)
    rows, queries, _ = scores.shape
    heads_per_kv = layer.num_heads // layer.num_kv_heads
    sinks = layer.sinks.view(layer.num_kv_heads, heads_per_kv, 1).repeat(
        rows // layer.num_kv_heads, 1, queries // heads_per_kv
    )
    return softmax_with_sinks(scores, sinks.flatten(1)[..., None])
