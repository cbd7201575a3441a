"""Llama; the base of the families in mistral.py and qwen.py.

Both forward passes of models/base.py are here. They launch the same kernels at the same shapes, so they are bit-equal
(tests/test_models.py). Module boundaries carry [1, tokens, hidden]; the batch is flat along dim 1.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ..attention.attention_backend import RadixAttention
from ..core.current_pass import current_batch
from ..core.forward_batch import ForwardBatch
from ..core.model_spec import (
    EMBED_SITE,
    LOGITS,
    ModelSpec,
    attention_add,
    delta_site,
    input_add,
    mlp_add,
    residual_site,
)
from ..layers.activation import SiLU, gated, silu
from ..layers.edits.base import apply_and_capture, apply_at, apply_inner, capture_at, capture_inner
from ..layers.linear import Embedding, Linear, MergedLinear
from ..layers.norm import RMSNorm
from ..layers.rope import RotaryEmbedding, apply_rope, rope_and_write, rotation_of
from .base import CausalLM, ResidualBranch, Rotation, run_layers
from .cpu_layer import decode_layer
from .transformers_pass import set_transformers_forward


class LlamaAttention(ResidualBranch):
    """Grouped-query attention (Ainslie et al., 2023) over the paged KV cache."""

    name, last_projection, inner_kind = "self_attn", "o_proj", "z"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        self.head_dim = spec.head_dim
        self.num_heads, self.num_kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.output_site = delta_site(attention_add(layer_idx))
        set_transformers_forward(self, config, spec)
        qkv_bias, o_bias = self.biases(config)
        sizes = [spec.width(kind) for kind in "qkv"]
        sites = [(layer_idx, kind) for kind in "qkv"]
        self._qkv = MergedLinear(spec.hidden_size, sizes, qkv_bias, spec.dtype, device, output_sites=sites)
        self.q_proj, self.k_proj, self.v_proj = self._qkv.projections
        self.o_proj = Linear(spec.width("z"), spec.hidden_size, o_bias, spec.dtype, device, input_site=(layer_idx, "z"))
        self.attn = RadixAttention(
            layer_idx, self.num_heads, self.num_kv_heads, self.head_dim, self.scaling, spec.sliding_windows[layer_idx]
        )

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        """Whether q, k and v have a bias, and whether o has one."""
        return config.attention_bias, config.attention_bias

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        position_embeddings: Rotation,
        forward_batch: ForwardBatch,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([1, tokens, hidden], None), or with transformers' eager attention its weights [1, heads, queries, keys]."""
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        if transformers_pass is not None and transformers_pass.eager:
            kwargs |= {"hidden_states": hidden_states, "position_embeddings": position_embeddings}
            out, weights = transformers_pass.attend(self, **kwargs)
            return apply_at(out, site_ops, self.output_site), weights
        cos, sin = rotation_of(forward_batch, *position_embeddings)
        out = self.run_segments(forward_batch, x=hidden_states, cos=cos, sin=sin)
        if out is None:
            with self._qkv.product(hidden_states):
                q = self.normed(self._captured(self.q_proj(hidden_states), "q", forward_batch), "q_norm")
                k = self.normed(self._captured(self.k_proj(hidden_states), "k", forward_batch), "k_norm")
                v = self._captured(self.v_proj(hidden_states), "v", forward_batch)
            v = v.reshape(v.shape[1], -1, self.head_dim)
            z = self.attn(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, forward_batch).unsqueeze(0)
            out = self.o_proj(apply_inner(z, site_ops, self.layer_idx, "z"))
        return apply_at(out, site_ops, self.output_site), None

    def _captured(self, projected: torch.Tensor, kind: str, batch: ForwardBatch) -> torch.Tensor:
        capture_inner(projected, batch.site_ops, self.layer_idx, kind)
        return projected

    def normed(self, projected: torch.Tensor, norm: str) -> torch.Tensor:
        """[1, tokens, heads * head_dim] -> [tokens, heads, head_dim], through the module `norm` in families that have it."""
        return projected.reshape(projected.shape[1], -1, self.head_dim)

    def normed_fused(self, qkv: torch.Tensor) -> torch.Tensor:
        """`normed` for the heads of q, k and v together: [tokens, heads + 2 * kv_heads, head_dim]."""
        return qkv

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden], and the cosines and signed sines of a `rotation`."""
        x, cos, sin = inputs
        qkv = self._qkv.project(x, batch.site_ops).view(x.shape[1], -1, self.head_dim)
        qkv = self.normed_fused(qkv)
        pool = batch.token_to_kv_pool
        if batch.fresh_kv_only or pool is None:  # k and v do not go to the pool
            q, k = apply_rope(qkv[:, : -self.num_kv_heads], cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
            z = self.attn(q, k, qkv[:, -self.num_kv_heads :], batch)
        else:
            q = rope_and_write(qkv, cos, sin, pool, self.layer_idx, batch.out_cache_loc, batch.query_buffer)
            z = self.attn.of_written(q, batch)
        return apply_inner(z.unsqueeze(0), batch.site_ops, self.layer_idx, "z")


class LlamaMLP(ResidualBranch):
    """The gated MLP (Shazeer, 2020): ``down(act(gate(x)) * up(x))``."""

    name, last_projection, inner_kind = "mlp", "down_proj", "mlp_act"

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(layer_idx)
        bias, dtype = getattr(config, "mlp_bias", False), spec.dtype
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        self.output_site = delta_site(mlp_add(layer_idx))
        self._gate_up = MergedLinear(hidden, [intermediate] * 2, bias, dtype, device)
        self.gate_proj, self.up_proj = self._gate_up.projections
        self.down_proj = Linear(intermediate, hidden, bias, dtype, device, input_site=(layer_idx, "mlp_act"))
        self.is_silu = is_silu = config.hidden_act == "silu"
        self.act_fn = SiLU() if is_silu else ACT2FN[config.hidden_act]
        # The fused pass has its own copy: hooks may wait at the module `act_fn`.
        self._act = [silu if is_silu else ACT2FN[config.hidden_act]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = current_batch()
        out = None if batch is None else self.run_segments(batch, x=x)
        if out is None:
            with self._gate_up.product(x):
                # `.source` names operations by their calls and assignments: as in transformers.
                down_proj = self.down_proj(self._apply_ops(self.act_fn(self.gate_proj(x)) * self.up_proj(x), batch))
            out = down_proj
        return out if batch is None else apply_at(out, batch.site_ops, self.output_site)

    def inner_fused(self, *inputs: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`inputs` are x [1, tokens, hidden]."""
        (x,) = inputs
        return self._apply_ops(gated(self._gate_up.project(x, batch.site_ops), self._act[0]), batch)

    def _apply_ops(self, act: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        return act if batch is None else apply_inner(act, batch.site_ops, self.layer_idx, "mlp_act")


class LlamaDecoderLayer(nn.Module):
    """``h = h + attention(norm(h)); h = h + mlp(norm(h))``. Out of place, so that saved hidden states keep their values."""

    attention_cls: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = self.attention_cls(config, spec, layer_idx, device)
        self.mlp = LlamaMLP(config, spec, layer_idx, device)
        self.input_layernorm = RMSNorm(spec.hidden_size, config.rms_norm_eps, spec.dtype, device)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, config.rms_norm_eps, spec.dtype, device)
        self._input_add, self._attention_add = input_add(layer_idx), attention_add(layer_idx)
        self._resid_mid, self._resid_post = residual_site(attention_add(layer_idx)), residual_site(mlp_add(layer_idx))

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, forward_batch: ForwardBatch, **kwargs: Any
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same. Runs fused where no hook waits inside."""
        hook_query, layer_idx = forward_batch.hook_query, self.layer_idx
        if hook_query is not None and hook_query.try_fuse(layer_idx):
            return run_layers((self,), layer_idx, hidden_states, position_embeddings, forward_batch, served=True)
        kwargs |= {"position_embeddings": position_embeddings, "forward_batch": forward_batch}
        site_ops, transformers_pass = forward_batch.site_ops, forward_batch.transformers_pass
        # `.source` names operations by their calls and assignments: as in transformers.
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, weights = self.self_attn(hidden_states=hidden_states, **kwargs)
        if transformers_pass is not None:
            transformers_pass.end_attention(weights)
        capture_at(hidden_states, site_ops, self.self_attn.output_site)
        hidden_states = apply_and_capture(residual + hidden_states, site_ops, self._resid_mid)
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        capture_at(hidden_states, site_ops, self.mlp.output_site)
        hidden_states = apply_at(residual + hidden_states, site_ops, self._resid_post)
        return hidden_states

    def forward_fused(
        self, h: torch.Tensor, delta: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedLayer`. The next norm's kernel adds h and delta."""
        if h.is_cpu and (out := decode_layer(self, h, delta, cos, sin, batch)) is not None:
            return out
        h, normed = self.input_layernorm.after_add(h, delta, batch.site_ops, self._input_add)
        delta = self.self_attn.forward_fused(normed, cos, sin, batch=batch)
        h, normed = self.post_attention_layernorm.after_add(h, delta, batch.site_ops, self._attention_add)
        return h, self.mlp.forward_fused(normed, batch=batch)


class LlamaModel(nn.Module):
    """The decoder without its head."""

    layer_cls: type[LlamaDecoderLayer] = LlamaDecoderLayer

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.dtype, device)
        self.layers = nn.ModuleList([self.layer_cls(config, spec, i, device) for i in range(spec.num_hidden_layers)])
        self.norm = RMSNorm(spec.hidden_size, config.rms_norm_eps, spec.dtype, device, final=True)
        self.rotary_emb = RotaryEmbedding(config, spec.head_dim, max_positions, spec.dtype, device)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> BaseModelOutputWithPast:
        """input_ids and position_ids [1, tokens] -> hidden states [1, tokens, hidden] after the final norm."""
        site_ops, hook_query = forward_batch.site_ops, forward_batch.hook_query
        h = self.embed_tokens(input_ids)
        capture_at(h, site_ops, EMBED_SITE)
        lens = {"rope_lens": forward_batch.rope_lens} if self.rotary_emb.length_dependent else {}
        rotary = self.rotary_emb(h, position_ids=position_ids, **lens)
        kwargs = {"position_embeddings": rotary, "position_ids": position_ids, "forward_batch": forward_batch}
        i, num_layers = 0, len(self.layers)
        while i < num_layers:
            first, waits = i, "within"
            while hook_query is not None and i < num_layers and (waits := hook_query.hook_position(i)) == "nowhere":
                i += 1
            at_output = waits == "at output"
            if first < i or at_output:
                layers: Any = list(islice(self.layers, first, i + at_output))  # a slice would be a new module
                h = run_layers(layers, first, h, rotary, forward_batch, served=at_output)
            if i < num_layers:
                if forward_batch.transformers_pass is not None:
                    kwargs |= forward_batch.transformers_pass.layer_inputs(i, h)
                h = self.layers[i](h, **kwargs) if not at_output else hook_query.at_output(i, h)  # pyright: ignore[reportOptionalMemberAccess]
                i += 1
                capture_at(h, site_ops, residual_site(input_add(i)))
        h = self.norm(h)
        if site_ops is not None:
            site_ops.capture(site_ops.final_site, h)
        transformers_pass = forward_batch.transformers_pass
        collected: Any = {} if transformers_pass is None else transformers_pass.end_layers(h)
        return BaseModelOutputWithPast(last_hidden_state=h, **collected)  # pyright: ignore[reportArgumentType]

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The hidden states of `forward`, without a call to a module."""
        site_ops, delta = forward_batch.site_ops, None
        h = apply_and_capture(F.embedding(input_ids, self.embed_tokens.weight), site_ops, EMBED_SITE)
        cos, sin = self.rotary_emb.rotation(position_ids, forward_batch.rope_lens)
        for layer in self.layers:
            h, delta = layer.forward_fused(h, delta, cos, sin, forward_batch)  # pyright: ignore[reportCallIssue]
        return self.norm.after_add(h, delta, site_ops, input_add(len(self.layers)))[1]


class LlamaForCausalLM(CausalLM):
    """A decoder with its head.

    Args:
        config: the family's transformers config.
        spec: `ModelSpec.of` the config.
        max_positions: positions of the longest sequence to serve.
    """

    model_cls: type[LlamaModel] = LlamaModel

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, device: str, max_positions: int) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.model = self.model_cls(config, spec, device, max_positions)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, False, spec.dtype, device, output_site=(0, LOGITS))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.lm_head.bind()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids=input_ids, position_ids=position_ids, forward_batch=forward_batch)
        logits = self.lm_head(_logit_rows(outputs.last_hidden_state, forward_batch))
        return CausalLMOutputWithPast(logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def decoder_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self.model.forward_fused(input_ids, position_ids, forward_batch)

    def head_fused(self, h: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        return self.lm_head.project(_logit_rows(h, forward_batch), forward_batch.site_ops)


def _logit_rows(h: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """The rows of h [1, tokens, hidden] that the head runs on. Stores the hidden states if the batch asks for them."""
    if batch.return_hidden_states:
        batch.hidden_states = h[0, : batch.num_request_tokens]
    return h if batch.logits_indices is None else h[:, batch.logits_indices]
