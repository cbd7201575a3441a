"""A decoder layer of a decode pass on a CPU, in one call of the compiled kernels: the same kernels, without Python in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..attention.torch_backend import decode_rows_of
from ..core.cpu_dispatch import cpu_kernels_for
from ..core.forward_batch import ForwardBatch
from ..layers.activation import silu

if TYPE_CHECKING:
    from .llama import LlamaDecoderLayer


def decode_layer(
    layer: LlamaDecoderLayer,
    h: torch.Tensor,
    delta: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    batch: ForwardBatch,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`forward_fused` of a layer; None where the pass is no decode pass, has ops or captures, or lacks a kernel."""
    if not h.is_cpu or batch.site_ops is not None or batch.attention_cuts is not None:
        return None
    attention, mlp, pool = layer.self_attn, layer.mlp, batch.token_to_kv_pool
    rows = decode_rows_of(batch)
    if rows is None or pool is None or mlp._act[0] is not silu:
        return None
    caches = pool.get_kv(attention.layer_idx)
    norms = layer.input_layernorm, layer.post_attention_layernorm
    kernels = cpu_kernels_for(h, cos, sin, *caches, norms[0].weight, norms[1].weight)
    if kernels is None or not kernels.has_gemm(h.dtype) or attention.head_dim % kernels.ATTENTION_WIDTH:
        return None
    gemms = attention._qkv.gemm, attention.o_proj.gemm, mlp._gate_up.gemm, mlp.down_proj.gemm
    return kernels.decode_layer(
        h, delta, cos, sin, *caches, batch.out_cache_loc, *rows,
        norms=(norms[0].weight, norms[1].weight), head_norms=attention.head_norms(),
        products=[(gemm.weight, gemm.bias) for gemm in gemms],
        eps=norms[0].variance_epsilon, scale=attention.scaling, window=attention.attn.sliding_window,
        cap=attention.attn.logit_cap,
    )  # fmt: skip
