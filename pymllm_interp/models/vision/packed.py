"""Parts of towers that read the patches of all images as one sequence (Qwen2.5-VL, Qwen3-VL).

Patches of an image, or of one of its windows, attend to each other. Without flash attention, transformers calls attention once
for each of these segments. An image of one megapixel has 100 of them, and the host waits for the device in each layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from ...core.current_pass import current_batch
from ...layers.activation import gated, silu
from ...layers.norm import rms_norm
from ...layers.rope import apply_rope, rotation

NAME = "packed_flash"
"""Name of the implementation in a config. With "flash" in it, transformers passes the bounds of segments."""


class PatchProjection(nn.Conv3d):
    """Convolution of patches with a kernel of one patch, as a matrix product. cuDNN's may take seconds (transformers #45750)."""

    def forward(self, input: Tensor) -> Tensor:
        """[patches, channels, frames, height, width] -> [patches, width of the tower, 1, 1, 1]."""
        return linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


class AlignedMLP:
    """Base of a gated MLP with SiLU, in front of transformers' class.

    cuBLAS takes kernels for Ampere where rows are no multiple of 16 bytes. Qwen2.5-VL has 3,420 hidden units in bfloat16:
    on an H200 these kernels took half of its tower's time.
    """

    def forward(self: Any, hidden_state: Tensor) -> Tensor:
        """[patches, width] -> the same."""
        if not _is_served_by_kernels(hidden_state):
            return super().forward(hidden_state)  # pyright: ignore[reportAttributeAccessIssue]
        return aligned_mlp(self, hidden_state)


def aligned_mlp(mlp: Any, states: Tensor) -> Tensor:
    """Output [..., width] of a gated MLP. Zeros fill the hidden units up to a multiple of 16 bytes."""
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    fill = -gate.out_features % (16 // states.element_size())
    weight = torch.cat([pad(layer.weight, (0, 0, 0, fill)) for layer in (gate, up)])
    bias = None if gate.bias is None else torch.cat([pad(layer.bias, (0, fill)) for layer in (gate, up)])
    return linear(gated(linear(states, weight, bias), silu), pad(down.weight, (0, fill)), down.bias)


class RotatedAttention:
    """Base of an attention of packed patches, in front of transformers' class: rotary embeddings by one kernel."""

    def forward(self: Any, hidden_states: Tensor, cu_seqlens: Tensor, *rest: Any, **named: Any) -> Tensor:
        """[patches, width] -> the same."""
        turned = named.get("position_embeddings")
        if rest or turned is None or not _is_served_by_kernels(hidden_states):
            return super().forward(hidden_states, cu_seqlens, *rest, **named)  # pyright: ignore[reportAttributeAccessIssue]
        cos, sin = turned
        return rotated_attention(self, hidden_states, cu_seqlens, cos, sin, named.get("max_seqlen"))


def rotated_attention(
    attention: Any, states: Tensor, cu_seqlens: Tensor, cos: Tensor, sin: Tensor, longest: int | None
) -> Tensor:
    """Output of an attention of packed patches.

    Args:
        states: [patches, width].
        cu_seqlens: [segments + 1] int32, bounds of the segments.
        cos, sin: [patches, head_dim] float32.
        longest: patches of the longest segment; None: it is looked up.
    """
    heads, most = attention.num_heads, int(cu_seqlens.diff().max()) if longest is None else longest
    qkv = attention.qkv(states).view(len(states), 3 * heads, -1)
    turned = apply_rope(qkv[:, : 2 * heads], *rotation(cos[None].float(), sin[None].float())).to(states.dtype)
    q, k, v = (x.transpose(0, 1)[None] for x in (*turned.split(heads, 1), qkv[:, 2 * heads :]))
    found, _ = packed_attention(
        attention, q, k, v, None, scaling=attention.scaling, cu_seq_lens_q=cu_seqlens, max_length_q=most
    )
    return attention.proj(found.reshape(len(states), -1))


class KernelNorm:
    """Base of an RMSNorm, in front of transformers' class: one kernel in place of seven."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """[patches, width] -> the same."""
        if not _is_served_by_kernels(hidden_states):
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _is_served_by_kernels(states: Tensor) -> bool:
    """Whether a pass without hooks in the tower computes it on CUDA."""
    return states.is_cuda and states.dtype in (torch.bfloat16, torch.float16) and current_batch() is None


def precomputed(tower: Any, grid: Tensor) -> dict[str, Any]:
    """Arguments of transformers' tower that it else computes from the grid on the device, waiting for it: on the CPU.

    Args:
        tower: transformers' tower.
        grid: [images, 3] on the CPU.
    """
    from transformers import vision_utils as vision

    merge = tower.spatial_merge_size
    bounds = vision.get_vision_cu_seqlens(grid)
    found: dict[str, Any] = {
        "position_ids": vision.get_vision_position_ids(grid, merge),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }
    if hasattr(tower, "window_size"):
        index, bounds = vision.get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": bounds, "max_window_seqlen": int(bounds.diff().max())}
    if hasattr(tower, "pos_embed"):
        found["interp_indices"], found["interp_weights"] = vision.get_vision_interpolation_indices_and_weights(
            grid, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
    return found


def _put_in_front(module: nn.Module, base: type) -> None:
    module.__class__ = type(type(module).__name__, (base, type(module)), {})


def use_packed_parts(tower: Any) -> None:
    """Give transformers' tower the parts of this file. Its parameters stay."""
    from transformers import AttentionInterface  # which imports transformers' models

    AttentionInterface.register(NAME, packed_attention)
    tower.config._attn_implementation_internal = NAME
    projection = tower.patch_embed.proj
    if projection.kernel_size == projection.stride:
        projection.__class__ = PatchProjection
    for block in tower.blocks:
        _put_in_front(block.attn, RotatedAttention)
        if hasattr(block.mlp, "gate_proj") and tower.config.hidden_act == "silu":
            _put_in_front(block.mlp, AlignedMLP)
        for norm in (block.norm1, block.norm2):
            if hasattr(norm, "variance_epsilon"):
                _put_in_front(norm, KernelNorm)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention within each segment.

    Args:
        query, key, value: [1, heads, patches, head_dim].
        scaling: factor of the scores, head_dim ** -0.5.
        cu_seq_lens_q: [segments + 1] int32, bounds of the segments.
        max_length_q: patches of the longest segment.

    Returns:
        [1, patches, heads, head_dim], and None, in the place of weights.
    """
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    size = query.shape[-1]
    # FlashAttention takes sizes of heads that eight divides; torch 2.11's call of it has its own scaling.
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not size % 8 and scaling == size**-0.5:
        from torch.nn.attention.varlen import varlen_attn

        longest = int(max_length_q)
        out: Any = varlen_attn(rows[0], rows[1], rows[2], cu_seq_lens_q, cu_seq_lens_q, longest, longest)
        return out[None], None
    out, lengths = torch.empty_like(rows[0]), cu_seq_lens_q.diff()
    for length in lengths.unique().tolist():
        firsts = cu_seq_lens_q[:-1][lengths == length]
        index = firsts[:, None] + torch.arange(length, device=firsts.device)  # [segments, length]
        q, k, v = (x[index].transpose(1, 2) for x in rows)
        out[index] = scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2)
    return out[None], None
