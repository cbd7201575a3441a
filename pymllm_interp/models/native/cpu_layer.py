"""A decoder layer of a decode pass on a CPU, in one call of the compiled kernels."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...attention.torch_backend import decode_rows_of
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import input_add
from ...kernels.cpu.cpu_dispatch import cpu_kernels_for
from ...layers.edits.base import residual_sum
from ...layers.edits.host import HostOps
from ...layers.gemm import Gemm


class GatedLayer(Protocol):
    """`LlamaDecoderLayer`, or a layer of the same parts."""

    in_one_call: bool
    """Whether the compiled layer has its activation and norms."""
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any


def decode_layer(
    layer: GatedLayer,
    h: torch.Tensor,
    delta: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    batch: ForwardBatch,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`FusedLayer.forward_fused` on a CPU. Returns None outside of decode passes, with cut edges or adapters, or without a kernel.
    None also for a layer with ops or captures behind its input."""
    rows, pool, attention, mlp = decode_rows_of(batch), batch.token_to_kv_pool, layer.self_attn, layer.mlp
    if (
        rows is None
        or pool is None
        or batch.attention_cuts is not None
        or batch.adapters is not None
        or not layer.in_one_call
    ):
        return None
    site_ops = batch.site_ops
    if site_ops is not None:
        if not isinstance(site_ops, HostOps) or site_ops.acts_within(attention.layer_idx):
            return None
    caches = pool.get_kv(attention.layer_idx)
    norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    kernels = cpu_kernels_for(h, cos, sin, *caches, *norms)
    if kernels is None or not kernels.has_gemm(h.dtype) or attention.head_dim % kernels.ATTENTION_WIDTH:
        return None
    gemms: Any = attention._qkv.gemm, attention.o_proj.gemm, mlp._gate_up.gemm, mlp.down_proj.gemm
    if not all(isinstance(gemm, Gemm) for gemm in gemms):  # quantised
        return None
    add = input_add(attention.layer_idx)
    if isinstance(site_ops, HostOps) and delta is not None and site_ops.acts_at(add, delta):
        h, delta = residual_sum(h, delta, site_ops, add), None
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return kernels.decode_layer(
        h, delta, cos, sin, *caches, batch.out_cache_loc, *rows,
        norms=norms, head_norms=None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight),
        products=[(gemm.weight, gemm.bias) for gemm in gemms], eps=layer.input_layernorm.variance_epsilon,
        scale=attention.scaling, window=attention.attn.sliding_window, cap=attention.attn.logit_cap,
    )  # fmt: skip
