"""Decoder layers with frozen attention patterns and norm scales: linear maps of the stream, and their transposes.

A frozen layer is affine in the stream. The pattern weighs values, and each norm multiplies by the run's scale. So the transpose
needs no autograd, and no copy of the run for each row of a batch::

    attention^T(g) = norm^T (W_v^T (P^T (W_o^T g)))

Patterns are made again from q and k for each batch of gradients. They cost little beside the products with the batch.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ...core.norm_kind import RMS_OFFSET
from ...layers.activation import gated, gelu, gelu_tanh, silu, softcap
from ...layers.rope import apply_rope, heads_of
from ...models.native.gemma import Gemma2DecoderLayer

QUERY_ROWS = 1024
"""Queries of a pattern at once."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""Families with layers that `FrozenLayer` reads."""

PLAIN: dict[Any, Any] = {silu: F.silu, gelu: F.gelu, gelu_tanh: partial(F.gelu, approximate="tanh")}
"""Functions with kernels -> the same with gradients."""


class FrozenNorm:
    """An RMS norm with the scale of a run.

    Args:
        norm: the module.
        x: [tokens, hidden], its input in the run.

    Attributes:
        gain: [hidden] float32.
        scale: [tokens, 1] float32.
    """

    def __init__(self, norm: Any, x: Tensor) -> None:
        weight = norm.weight.float()
        self.gain = 1.0 + weight if norm.kind == RMS_OFFSET else weight
        self.scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)

    def back(self, grad: Tensor) -> Tensor:
        """Transpose for gradients [batch, rows, hidden] of the first rows."""
        return (grad * (self.gain * self.scale[: grad.shape[1]])).to(grad.dtype)


class FrozenLayer:
    """One decoder layer of a run, and the transposes of its parts.

    Args:
        layer: a native decoder layer of `FAMILIES`.
        h: [tokens, hidden], the stream before it.
        rotation: rotation of its queries and keys.

    Attributes:
        h: likewise.
        resid_mid, mlp_in, mlp_out: [tokens, hidden], states of the run, until `settle`.
    """

    def __init__(self, layer: Any, h: Tensor, rotation: tuple[Tensor, ...]) -> None:
        self._attention, self._mlp, self._rotation, self.h = layer.self_attn, layer.mlp, rotation, h
        sandwich = isinstance(layer, Gemma2DecoderLayer)
        attention = self._attention
        self.attn_norm = FrozenNorm(layer.input_layernorm, h)
        attn_in = layer.input_layernorm.normalize(h)
        qkv = heads_of(attention.projected_fused(attn_in[None], None), attention.num_kv_heads, False)
        # v is no view: that would keep all three alive
        self.q, self.k, self.v = apply_rope(qkv[0], *rotation), apply_rope(qkv[1], *rotation), qkv[2].clone()
        out = attention.o_proj.project(self._attend().flatten(1))
        self.attn_out_norm = FrozenNorm(layer.post_attention_layernorm, out) if sandwich else None
        out = layer.post_attention_layernorm.normalize(out) if sandwich else out
        self.resid_mid = h + out
        norm = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        self.mlp_norm = FrozenNorm(norm, self.resid_mid)
        self.mlp_in = norm.normalize(self.resid_mid)
        out = self._mlp.down_proj.project(gated(self._mlp._gate_up.project(self.mlp_in), self._mlp._act[0]))
        self.mlp_out_norm = FrozenNorm(layer.post_feedforward_layernorm, out) if sandwich else None
        self.mlp_out = layer.post_feedforward_layernorm.normalize(out) if sandwich else out

    def settle(self, jacobian: bool) -> None:
        """Drop the states that backward passes do not read.

        Args:
            jacobian: whether `mlp_back` is called.
        """
        del self.resid_mid, self.mlp_out
        if not jacobian:
            del self.mlp_in

    # -- attention ---------------------------------------------------------------------------

    def pattern(self, first: int, stop: int) -> Tensor:
        """Attention weights [kv_heads, group, queries, stop] float32 of the queries from `first` to `stop`."""
        radix = self._attention.attn
        scores = self.scores(first, stop)
        query, key = torch.arange(first, stop, device=scores.device)[:, None], torch.arange(stop, device=scores.device)
        hidden = key > query
        if radix.sliding_window is not None:
            hidden |= key <= query - radix.sliding_window
        return scores.masked_fill_(hidden, -torch.inf).softmax(-1)

    def scores(self, first: int, stop: int) -> Tensor:
        """Attention scores [kv_heads, group, queries, stop] float32, with a soft cap, without a mask."""
        radix = self._attention.attn
        q = rearrange(self.q[first:stop], "q (kv group) dim -> kv (group q) dim", kv=radix.num_kv_heads)
        k = rearrange(self.k[:stop], "k kv dim -> kv dim k")
        scores = (q @ k).float() * radix.scaling
        scores = scores if radix.logit_cap is None else softcap(scores, radix.logit_cap)
        return rearrange(scores, "kv (group q) k -> kv group q k", q=stop - first)

    def _attend(self) -> Tensor:
        """z [tokens, heads, head_dim]."""
        count, found = len(self.q), list[Tensor]()
        for first in range(0, count, QUERY_ROWS):
            stop = min(first + QUERY_ROWS, count)
            pattern = self.pattern(first, stop).to(self.v.dtype)
            found.append(torch.einsum("xgqk,kxd->qxgd", pattern, self.v[:stop]).flatten(1, 2))
        return torch.cat(found)

    def attention_back(self, grad: Tensor) -> Tensor:
        """Transpose of norm, values, pattern and output: [batch, rows, hidden] -> the same, of the first rows."""
        grad = grad if self.attn_out_norm is None else self.attn_out_norm.back(grad)
        z = (grad @ self._attention.o_proj.weight).unflatten(-1, (self.v.shape[1], -1, self.v.shape[2]))
        v = torch.zeros(*grad.shape[:2], *self.v.shape[1:], dtype=grad.dtype, device=grad.device)
        for first in range(0, grad.shape[1], QUERY_ROWS):
            stop = min(first + QUERY_ROWS, grad.shape[1])
            pattern = self.pattern(first, stop).to(grad.dtype)
            v[:, :stop] += torch.einsum("xgqk,bqxgd->bkxd", pattern, z[:, first:stop])
        del z, grad
        return self.attn_norm.back(v.flatten(2) @ self._attention.v_proj.weight)

    def head_reader(self, head: int, position: int, keys: bool) -> tuple[Tensor, Tensor]:
        """The affine map of the stream at a position to a head's rotated query or key.

        Args:
            head: number of the head of queries.

        Returns:
            vectors [head_dim, hidden] and constants [head_dim], float32, with the run's norm scales.
        """
        attention = self._attention
        width, norm = attention.head_dim, getattr(attention, "k_norm" if keys else "q_norm", None)
        part = head * attention.num_kv_heads // attention.num_heads if keys else head
        rows, projection = slice(part * width, (part + 1) * width), attention.k_proj if keys else attention.q_proj
        vectors = projection.weight[rows].float() * (self.attn_norm.gain * self.attn_norm.scale[position])
        bias = projection.bias
        constants = torch.zeros_like(vectors[:, 0]) if bias is None else bias[rows].float()
        if norm is not None:
            own = FrozenNorm(norm, (vectors @ self.h[position].float() + constants)[None])
            gain = own.gain * own.scale[0]
            vectors, constants = vectors * gain[:, None], constants * gain
        cos, sin = (part[position, 0].float() for part in self._rotation)
        both = torch.cat((vectors.T, constants[None]))[:, None]  # a map is turned as its results are
        turned = apply_rope(both, *(part.expand(len(both), 1, -1).contiguous() for part in (cos, sin)))[:, 0]
        return turned[:-1].T.contiguous(), turned[-1]

    def head_score(self, head: int, query: int, key: int) -> tuple[float, float, float]:
        """A head's score without a soft cap, its attention weight, and the scale of its scores."""
        radix, group = self._attention.attn, self._attention.num_heads // self._attention.num_kv_heads
        score = (self.q[query, head].float() @ self.k[key, head // group].float()).item() * radix.scaling
        return score, self.pattern(query, query + 1).flatten(0, 1)[head, 0, key].item(), radix.scaling

    def head_effects(self, grad: Tensor, vector: Tensor, key: int) -> Tensor:
        """Effects [heads, rows] of a part of the stream at a position, by each head and query, on one gradient.

        Args:
            grad: gradient [rows, hidden] behind the attention.
            vector: [hidden] float32, the part.
        """
        attention = self._attention
        grad = grad if self.attn_out_norm is None else self.attn_out_norm.back(grad[None])[0]
        z = (grad @ attention.o_proj.weight).unflatten(-1, (self.v.shape[1], -1, self.v.shape[2]))
        read = (vector * self.attn_norm.gain * self.attn_norm.scale[key]).to(self.v.dtype)
        v = (attention.v_proj.weight @ read).view(self.v.shape[1:])
        found = torch.einsum("qxgd,xd->xgq", z, v).float()
        for first in range(0, len(grad), QUERY_ROWS):
            stop = min(first + QUERY_ROWS, len(grad))
            pattern = self.pattern(first, stop)
            found[..., first:stop] *= pattern[..., key] if key < stop else 0.0
        return found.flatten(0, 1)

    @property
    def attn_constant(self) -> Tensor | None:
        """[tokens, hidden] that biases of values and output add to the stream, whatever the states are; None without biases."""
        attention = self._attention
        constant = attention.o_proj.bias
        if (bias := attention.v_proj.bias) is not None:  # weights of a query sum to 1
            values = rearrange(bias, "(kv dim) -> kv 1 dim", dim=attention.head_dim)
            own = (
                values.expand(-1, attention.num_heads // attention.num_kv_heads, -1).flatten()
                @ attention.o_proj.weight.T
            )
            constant = own if constant is None else own + constant
        if constant is None:
            return None
        constant = constant[None, None].expand(1, len(self.q), -1)
        return (constant if self.attn_out_norm is None else self.attn_out_norm.back(constant))[0]

    # -- MLP -----------------------------------------------------------------------------------

    def _slopes(self) -> tuple[Tensor, Tensor]:
        """Derivatives [tokens, intermediate] of the MLP's neurons by its gates, and by its second projection."""
        act = PLAIN.get(self._mlp._act[0], self._mlp._act[0])
        gate, up = self._mlp._gate_up.project(self.mlp_in).chunk(2, dim=-1)
        with torch.enable_grad():
            x = gate.detach().requires_grad_()
            value = act(x)
            (slope,) = torch.autograd.grad(value.sum(), x)
        return slope * up, value.detach()

    def mlp_back(self, grad: Tensor) -> Tensor:
        """Transpose of the MLP's Jacobian at the run: [batch, rows, hidden] at `mlp_out` -> the same at `mlp_in`."""
        rows, mlp = grad.shape[1], self._mlp
        grad = grad if self.mlp_out_norm is None else self.mlp_out_norm.back(grad)
        neurons = grad @ mlp.down_proj.weight
        by_gate, by_up = (slope[:rows] for slope in self._slopes())
        return (neurons * by_gate) @ mlp.gate_proj.weight + (neurons * by_up) @ mlp.up_proj.weight

    def mlp_linear(self) -> Tensor:
        """The Jacobian's product with `mlp_in`: [tokens, hidden] at `mlp_out`."""
        mlp = self._mlp
        gate, up = self.mlp_in @ mlp.gate_proj.weight.T, self.mlp_in @ mlp.up_proj.weight.T
        by_gate, by_up = self._slopes()
        out = (gate * by_gate + up * by_up) @ mlp.down_proj.weight.T
        return out if self.mlp_out_norm is None else self.mlp_out_norm.back(out[None])[0]


def rotations_of(decoder: Any, positions: Tensor, length_dependent: bool) -> Any:
    """The rotation of each `rotary` of a decoder's layers, for one sequence at positions [tokens]."""
    lens = torch.full_like(positions, len(positions)) if length_dependent else None
    return decoder.rotations(positions[None], SimpleNamespace(rope_lens=lens))
