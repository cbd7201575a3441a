"""Attention of one query per request over paged KV: the Triton kernel with its memory on CUDA, plain torch elsewhere."""

from __future__ import annotations

import torch

from ..core.forward_batch import ForwardBatch
from ..mem_cache.memory_pool import read_rows
from .attention_backend import RadixAttention, softmax_with_sinks

MAX_PROGRAMS = 8
"""Upper bound of the parts of all requests and KV heads, per multiprocessor, where requests are divided at all."""


class DecodeAttention:
    """Computes decode rows in half precision, without a plan.

    Args:
        device: CUDA device of the passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        self._memory: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        out: torch.Tensor,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write the attention of the batch's leading requests to `out`.

        Args:
            q, out: [requests, heads, head_dim], one row of each request.
            kv: K and V of the layer, each [slots, kv_heads, head_dim], in the dtype of q or in FP8.
            kv_scales: dequantization scales of K and V.
        """
        table = forward_batch.req_to_token_pool
        assert table is not None, "prepare_forward_batch_* sets the pools"
        requests = q.shape[0]
        rows, lens = forward_batch.req_pool_indices[:requests], forward_batch.seq_lens[:requests]
        window = layer.sliding_window or 0
        if not q.is_cuda:
            decode_attention_torch(
                q, *kv, rows, lens, table.req_to_token, out, layer.scaling, window, layer.logit_cap, layer.sinks, kv_scales,
            )  # fmt: skip
            return
        from ..kernels.triton_decode import decode_attention

        decode_attention(
            q, *kv, rows, lens, table.req_to_token, out, *self._memory_for(layer, q.device), self._num_sms,
            layer.scaling, window, layer.logit_cap or 0.0, layer.sinks, kv_scales,
        )  # fmt: skip

    def _memory_for(self, layer: RadixAttention, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(partial results, counters) that the layers of one shape share: one kernel runs at a time."""
        shape = layer.num_heads, layer.num_kv_heads, layer.head_dim
        if shape not in self._memory:
            programs = MAX_PROGRAMS * self._num_sms
            size = programs * (layer.num_heads // layer.num_kv_heads) * (layer.head_dim + 1)
            parts = torch.empty(size, dtype=torch.float32, device=device)
            self._memory[shape] = parts, torch.zeros(programs, dtype=torch.int32, device=device)
        return self._memory[shape]


def decode_attention_torch(
    q: torch.Tensor,  # [requests, heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    rows: torch.Tensor,  # [requests] int64
    seq_lens: torch.Tensor,  # [requests] int32
    req_to_token: torch.Tensor,  # [table rows, positions] int32
    out: torch.Tensor,  # [requests, heads, head_dim]
    scale: float,
    window: int,
    cap: float | None,
    sinks: torch.Tensor | None = None,  # [heads]
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Plain-torch reference of `triton_decode.decode_attention`."""
    queries = q.shape[1] // k_cache.shape[1]
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, max(0, length - window) if window else 0 : length].long()
        k, v = (
            read_rows(cache, slots, torch.float32, kv_scale).repeat_interleave(queries, 1).transpose(0, 1)
            for cache, kv_scale in zip((k_cache, v_cache), kv_scales, strict=True)
        )
        scores = torch.bmm(k, q[i].float().unsqueeze(2)).squeeze(2) * scale  # [heads, positions]
        if cap:
            scores = cap * torch.tanh(scores / cap)
        weights = torch.softmax(scores, -1) if sinks is None else softmax_with_sinks(scores, sinks[:, None])
        out[i] = torch.bmm(weights.unsqueeze(1), v).squeeze(1)
