"""Layers without KV: the gated delta net of Qwen3.5 and Qwen3-Next, and their attention with a gate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import skip_init
from transformers import PretrainedConfig

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec, attention_add, delta_site
from ...layers.delta import DeltaSizes, DeltaStates, DeltaWeights, GatedRMSNorm, mix
from ...layers.dispatch import triton_kernels_for
from ...layers.edits.base import apply_inner
from ...layers.linear import Linear, MergedLinear
from ...layers.norm import OffsetRMSNorm, rms_norm
from ...mem_cache.state_pool import StateLayout
from ..base import ProjectedBranch
from .qwen import Qwen3Attention


class Projected(NamedTuple):
    """The projections of a gated delta net, of each token."""

    # fmt: off
    mixed: torch.Tensor  # [tokens, channels], q, k and v before the convolution
    gate:  torch.Tensor  # [tokens, heads, dim], `z` of transformers
    b:     torch.Tensor  # [tokens, heads]
    a:     torch.Tensor  # [tokens, heads]
    # fmt: on


class GatedDeltaNet(ProjectedBranch):
    """The gated delta rule, with a norm and a gate behind it.

    `norm` gets [tokens, heads, dim], for the rows of the pass. In transformers, heads and tokens are one dim.

    Attributes:
        state_layouts: of the convolution, and of the delta rule.
        first_state: number of the first of them in the pool.
    """

    name, last_projection, inner_kind = "linear_attn", "out_proj", "delta_out"

    def __init__(
        self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str, first_state: int
    ) -> None:
        super().__init__(layer_idx)
        self.output_site = delta_site(attention_add(layer_idx))
        self.sizes = sizes = DeltaSizes(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        channels, taps, dtype = sizes.channels, config.linear_conv_kernel_dim, spec.dtype
        conv: Any = {"groups": channels, "padding": taps - 1, "bias": False, "device": device, "dtype": dtype}
        self.conv1d: Any = skip_init(nn.Conv1d, channels, channels, taps, **conv)  # passes read its weight only
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads, dtype=dtype, device=device), False)
        self.A_log = nn.Parameter(torch.empty(sizes.heads, dtype=dtype, device=device), False)
        self.make_projections(spec.hidden_size, dtype, device)
        self.norm = GatedRMSNorm(sizes.dim, config.rms_norm_eps, dtype, device)
        self.out_proj = Linear(sizes.values, spec.hidden_size, False, dtype, device)
        self.first_state = first_state
        self.state_layouts = (
            StateLayout("conv", (taps - 1, channels), dtype),
            StateLayout("recurrent", (sizes.heads, sizes.key_dim, sizes.dim), torch.float32),
        )

    @abstractmethod
    def make_projections(self, hidden: int, dtype: torch.dtype, device: str) -> None:
        """Set the modules that read the layer's input."""

    @abstractmethod
    def projected(self, x: torch.Tensor) -> Projected:
        """Of x [1, tokens, hidden], module by module."""

    @abstractmethod
    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> Projected:
        """`projected` without a call to a module; views of one product."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Outside of a pass, the tokens are one sequence."""
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=hidden_states)
        if out is None:
            projected = self.projected(hidden_states)
            core_attn_out = self.norm(self._mixed(projected, batch), projected.gate)
            out = self.out_proj(core_attn_out.reshape(1, -1, self.sizes.values))
        return self.after_ops(out, batch)

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden]."""
        projected = self.projected_fused(inputs[0], batch)
        return self.norm.normalize(self._mixed(projected, batch), projected.gate).view(1, -1, self.sizes.values)

    def _mixed(self, projected: Projected, batch: ForwardBatch | None) -> torch.Tensor:
        """[tokens, heads, dim] behind the delta rule. Reads and writes the states of the pass's requests."""
        pool = None if batch is None or batch.fresh_kv_only else batch.state_pool
        first, states = self.first_state, None
        if pool is not None:
            states = DeltaStates(pool.memory(first), pool.memory(first + 1))
        weights = DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias)
        return mix(projected.mixed, projected.b, projected.a, weights, self.sizes, states, batch)


class Qwen3_5GatedDeltaNet(GatedDeltaNet):
    """Four projections, computed as one product: q, k and v together, the gate, b, and a."""

    def make_projections(self, hidden: int, dtype: torch.dtype, device: str) -> None:
        sizes = self.sizes
        widths = [sizes.channels, sizes.values, sizes.heads, sizes.heads]
        self._in = MergedLinear(hidden, widths, False, dtype, device)
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = self._in.projections()

    def projected(self, x: torch.Tensor) -> Projected:
        with self._in.product(x):
            parts = [part(x)[0] for part in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)]
        return self._split(*parts)

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> Projected:
        return self._split(*self._in.project(x, batch)[0].split(self._in.sizes, dim=-1))

    def _split(self, mixed: torch.Tensor, gate: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Projected:
        return Projected(mixed, gate.unflatten(-1, (self.sizes.heads, self.sizes.dim)), b, a)


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    """Two projections, one of them for b and a. Each head of keys has its q, k, v and gate side by side."""

    def make_projections(self, hidden: int, dtype: torch.dtype, device: str) -> None:
        sizes = self.sizes
        self._in = MergedLinear(hidden, [sizes.channels + sizes.values, 2 * sizes.heads], False, dtype, device)
        self.in_proj_qkvz, self.in_proj_ba = self._in.projections()

    def projected(self, x: torch.Tensor) -> Projected:
        with self._in.product(x):
            return self._split(self.in_proj_qkvz(x)[0], self.in_proj_ba(x)[0])

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> Projected:
        return self._split(*self._in.project(x, batch)[0].split(self._in.sizes, dim=-1))

    def _split(self, qkvz: torch.Tensor, ba: torch.Tensor) -> Projected:
        sizes = self.sizes
        each = sizes.heads // sizes.key_heads
        widths = [sizes.key_dim, sizes.key_dim, each * sizes.dim, each * sizes.dim]
        q, k, v, gate = qkvz.unflatten(-1, (sizes.key_heads, -1)).split(widths, dim=-1)
        b, a = ba.unflatten(-1, (sizes.key_heads, -1)).split([each, each], dim=-1)
        mixed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=-1)
        gate = gate.reshape(len(gate), sizes.heads, sizes.dim)
        return Projected(mixed, gate, b.reshape(len(b), -1), a.reshape(len(a), -1))


class GatedAttention(Qwen3Attention):
    """Attention with a gate for each channel of z. `q_proj` gives each head of q, and its gate behind it."""

    norm_cls = OffsetRMSNorm

    @staticmethod
    def sizes_of(spec: ModelSpec) -> list[int]:
        q, k, v = Qwen3Attention.sizes_of(spec)
        return [2 * q, k, v]

    def heads_output(self, x: torch.Tensor, rotation: Sequence[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        tokens, size = x.shape[1], self.head_dim
        with self._qkv.product(x):
            query, gate = self.q_proj(x).view(1, tokens, -1, 2 * size).chunk(2, dim=-1)
            q = self.q_norm(query.contiguous())[0]
            k = self.k_norm(self.k_proj(x).view(1, tokens, -1, size))[0]
            v = self.v_proj(x).view(tokens, -1, size)
        return self._opened(self.attend(q, k, v, rotation, batch), gate[0])

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden], and the cosines and signed sines of a `rotation`."""
        x, *rotation = inputs
        product = self._qkv.project(x, batch)[0]
        gate = product[:, : self._qkv.sizes[0]].unflatten(-1, (self.num_heads, 2, self.head_dim))[:, :, 1]
        z = self._opened(self.attend_fused(self._split(product), rotation, batch), gate)
        return apply_inner(z, batch.site_ops, self.layer_idx, "z")

    def projected_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._split(self._qkv.project(x, batch)[0])

    def _split(self, product: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + 2 * kv_heads, head_dim], q and k normalised."""
        q_norm, k_norm, heads, kv_heads = self.q_norm, self.k_norm, self.num_heads, self.num_kv_heads
        if triton_kernels_for(product) is not None:
            from ...kernels import triton_delta

            return triton_delta.split_gated(
                product, q_norm.weight, k_norm.weight, heads, kv_heads, q_norm.eps, q_norm.kind
            )
        parts = product.unflatten(-1, (-1, self.head_dim)).split([2 * heads, kv_heads, kv_heads], dim=1)
        q, k = (
            rms_norm(part.contiguous(), norm.weight, norm.eps, norm.kind)
            for part, norm in ((parts[0][:, ::2], q_norm), (parts[1], k_norm))
        )
        return torch.cat((q, k, parts[2]), dim=1)

    def _opened(self, z: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """z [1, tokens, heads * head_dim] times the sigmoid of gate [tokens, heads, head_dim]."""
        if triton_kernels_for(z) is not None:
            from ...kernels import triton_delta

            return triton_delta.open_gate(z[0], gate).unsqueeze(0)
        return z * torch.sigmoid(gate.contiguous()).flatten(1)
