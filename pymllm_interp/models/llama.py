"""Llama and its kin: one file, two forward passes.

`forward` goes module by module, under the names and with the tensors of the family's `transformers` class: it is what a
trace sees, and what runs when one is looking. `forward_fused` computes the same with the same kernels at the same shapes
and calls no module: it is what plain passes run. The two differ only in where Python may stand between kernels, hence
they are bit-equal (tests/test_models.py).

Module boundaries carry [1, tokens, hidden]; the batch is flat along dim 1.
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
from ..core.forward_batch import ForwardBatch, Registers
from ..layers.activation import SiLU, gated, silu
from ..layers.edits.base import (
    LOGITS,
    SiteModule,
    SiteOps,
    apply_at,
    apply_inner,
    capture_at,
    capture_inner,
    delta_site,
    edited,
    residual_site,
    total,
)
from ..layers.linear import Embedding, Linear, MergedLinear
from ..layers.norm import RMSNorm
from ..layers.rope import RotaryEmbedding, apply_rope, rope_and_write, rotation_of

Rotation = tuple[torch.Tensor, torch.Tensor]


class LlamaAttention(nn.Module):
    """Multi-head attention with grouped keys and values, over the paged KV cache."""

    def __init__(self, config: PretrainedConfig, layer_idx: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = head_dim_of(config)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        qkv_bias, o_bias = self.biases(config)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self._qkv = MergedLinear(config.hidden_size, [q_size, kv_size, kv_size], qkv_bias, dtype, device)
        self.q_proj, self.k_proj, self.v_proj = self._qkv.projections
        for projection, kind in zip(self._qkv.projections, "qkv", strict=True):
            projection.makes = layer_idx, kind
        self.o_proj = Linear(q_size, config.hidden_size, o_bias, dtype, device)
        self.o_proj.reads = layer_idx, "z"
        self.attn = RadixAttention(
            layer_idx, self.num_heads, self.num_kv_heads, self.head_dim, self.scaling, self.window(config, layer_idx)
        )

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        """Whether q, k and v have a bias, and whether o has."""
        return config.attention_bias, config.attention_bias

    @staticmethod
    def window(config: PretrainedConfig, layer_idx: int) -> int | None:
        """The layer's sliding window."""
        return None

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        position_embeddings: Rotation,
        forward_batch: ForwardBatch,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """([1, tokens, hidden], None): transformers returns the attention weights in the second place, when it has them."""
        out = self._stretch(hidden_states, position_embeddings, forward_batch)
        if out is None:
            cos, sin = rotation_of(forward_batch, *position_embeddings)
            with self._qkv.product(hidden_states):
                q = self.normed(self._projected(hidden_states, "q", forward_batch), "q_norm")
                k = self.normed(self._projected(hidden_states, "k", forward_batch), "k_norm")
                v = self._projected(hidden_states, "v", forward_batch).reshape(*q.shape[:1], -1, self.head_dim)
            z = self.attn(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, forward_batch).unsqueeze(0)
            out = self._output(apply_inner(z, forward_batch.site_ops, self.layer_idx, "z"), forward_batch)
        return apply_at(out, forward_batch.site_ops, delta_site(2 * self.layer_idx + 1)), None

    def _stretch(self, x: torch.Tensor, rotary: Rotation, batch: ForwardBatch) -> torch.Tensor | None:
        """`forward` as far as nobody waits inside; None where someone waits for the first of it."""
        watch, layer = batch.hook_query, self.layer_idx
        if watch is None:
            return None

        def whole(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Registers:
            return {"delta": self.forward_fused(x, cos, sin, batch)}

        def heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Registers:
            return {"z": self.heads_fused(x, cos, sin, batch)}

        cos, sin = rotation_of(batch, *rotary)
        if watch.try_fuse(layer, "self_attn"):
            return batch.run_segment(("attn", layer), whole, x=x, cos=cos, sin=sin)["delta"]
        if watch.try_fuse(layer, "self_attn", but="self_attn.o_proj"):
            return self._output(batch.run_segment(("heads", layer), heads, x=x, cos=cos, sin=sin)["z"], batch)
        if batch.segments is not None:
            watch.runs_eagerly(layer, "self_attn", but="self_attn.o_proj")
        return None

    def _projected(self, x: torch.Tensor, kind: str, batch: ForwardBatch) -> torch.Tensor:
        """`q_proj`, `k_proj` or `v_proj` of x, captured."""
        projection = getattr(self, f"{kind}_proj")
        projection.batch = batch
        out = projection(x)
        capture_inner(out, batch.site_ops, self.layer_idx, kind)
        return out

    def _output(self, z: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        self.o_proj.batch = batch
        return self.o_proj(z)

    def normed(self, projected: torch.Tensor, norm: str) -> torch.Tensor:
        """[1, tokens, heads * head_dim] -> [tokens, heads, head_dim], through the module `norm` in families that have one."""
        return projected.reshape(projected.shape[1], -1, self.head_dim)

    def forward_fused(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` without a call to a module, and without ops at its output. x [1, tokens, hidden]; cos, sin: a `rotation`."""
        z = self.heads_fused(x, cos, sin, batch)
        capture_inner(z, batch.site_ops, self.layer_idx, "z")
        return self.o_proj.gemm(z)

    def heads_fused(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """What `o_proj` reads, [1, tokens, heads * head_dim], after its ops."""
        qkv = self._qkv.gemm(x).view(x.shape[1], -1, self.head_dim)
        if batch.site_ops is not None and batch.site_ops.inner:
            self._edit(qkv, batch.site_ops)
        qkv = self.normed_fused(qkv)
        pool = batch.token_to_kv_pool
        if batch.fresh_kv_only or pool is None:  # k and v are not for the pool
            q, k = apply_rope(qkv[:, : -self.num_kv_heads], cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
            z = self.attn(q, k, qkv[:, -self.num_kv_heads :], batch)
        else:
            q = rope_and_write(qkv, cos, sin, pool, self.layer_idx, batch.out_cache_loc)
            z = self.attn.of_written(q, batch)
        return apply_inner(z.unsqueeze(0), batch.site_ops, self.layer_idx, "z")

    def _edit(self, qkv: torch.Tensor, edits: SiteOps) -> None:
        """Ops and captures of the projections' outputs, in place; qkv [tokens, heads + 2 * kv_heads, head_dim]."""
        first = 0
        for kind, heads in (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            if kind in edits.inner:
                part = qkv[:, first : first + heads]
                value = part.reshape(1, len(qkv), -1)
                edited_value = apply_inner(value, edits, self.layer_idx, kind)
                capture_inner(edited_value, edits, self.layer_idx, kind)
                if edited_value is not value:
                    part.copy_(edited_value.view(part.shape))
            first += heads

    def normed_fused(self, qkv: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + 2 * kv_heads, head_dim]: q's heads, k's and v's."""
        return qkv


class LlamaMLP(SiteModule):
    """The gated feed-forward block: ``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: PretrainedConfig, layer_idx: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        sizes = [config.intermediate_size] * 2
        self._gate_up = MergedLinear(config.hidden_size, sizes, bias, dtype, device)
        self.gate_proj, self.up_proj = self._gate_up.projections
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias, dtype, device)
        self.down_proj.reads = layer_idx, "mlp_act"
        is_silu = config.hidden_act == "silu"
        self.layer_idx = layer_idx
        self.act_fn = SiLU() if is_silu else ACT2FN[config.hidden_act]
        # The fused pass calls its own copy: `act_fn` is a module of the tree, and a trace may stand there.
        self._act = [silu if is_silu else ACT2FN[config.hidden_act]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = self.take_batch()
        out = self._stretch(x, batch)
        if out is None:
            with self._gate_up.product(x):
                # Operations are named by their calls and assignments (`.source`): as in transformers.
                self.down_proj.batch = batch
                down_proj = self.down_proj(self._op(self.act_fn(self.gate_proj(x)) * self.up_proj(x), batch))
            out = down_proj
        return apply_at(out, None if batch is None else batch.site_ops, delta_site(2 * self.layer_idx + 2))

    def _stretch(self, x: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor | None:
        """`forward` as far as nobody waits inside; None where someone waits for the first of it."""
        watch, layer = None if batch is None else batch.hook_query, self.layer_idx
        if batch is None or watch is None:
            return None
        if watch.try_fuse(layer, "mlp"):
            return batch.run_segment(("mlp", layer), lambda x: {"delta": self.forward_fused(x, batch)}, x=x)["delta"]
        if watch.try_fuse(layer, "mlp", but="mlp.down_proj"):
            act = batch.run_segment(("act", layer), lambda x: {"act": self.neurons_fused(x, batch)}, x=x)["act"]
            self.down_proj.batch = batch
            return self.down_proj(act)
        if batch.segments is not None:
            watch.runs_eagerly(layer, "mlp", but="mlp.down_proj")
        return None

    def forward_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` without a call to a module, and without the ops at its output."""
        act = self.neurons_fused(x, batch)
        capture_inner(act, batch.site_ops, self.layer_idx, "mlp_act")
        return self.down_proj.gemm(act)

    def neurons_fused(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """What `down_proj` reads, after its ops."""
        return self._op(gated(self._gate_up.gemm(x), self._act[0]), batch)

    def _op(self, act: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        return act if batch is None else apply_inner(act, batch.site_ops, self.layer_idx, "mlp_act")


class LlamaDecoderLayer(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, out of place: a saved hidden state stays what it was."""

    attention_cls: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: PretrainedConfig, layer_idx: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.self_attn = self.attention_cls(config, layer_idx, dtype, device)
        self.mlp = LlamaMLP(config, layer_idx, dtype, device)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, forward_batch: ForwardBatch, **kwargs: Any
    ) -> torch.Tensor:
        """[1, tokens, hidden]. Where nobody waits inside of the layer, it runs fused: the bits are the same."""
        watch, layer_idx = forward_batch.hook_query, self.self_attn.layer_idx
        if watch is not None and watch.try_fuse(layer_idx):

            def whole(h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Registers:
                parts = self.forward_fused(h, None, cos, sin, forward_batch)
                return {"h": total(*parts, forward_batch.site_ops, 2 * layer_idx + 2, served=True)}

            cos, sin = rotation_of(forward_batch, *position_embeddings)
            return forward_batch.run_segment(("layer", layer_idx), whole, h=hidden_states, cos=cos, sin=sin)["h"]
        kwargs |= {"position_embeddings": position_embeddings, "forward_batch": forward_batch}
        attn_out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        edits, place = forward_batch.site_ops, 2 * layer_idx + 1
        capture_at(attn_out, edits, delta_site(place))
        hidden_states = edited(hidden_states + attn_out, edits, residual_site(place))
        self.mlp.batch = forward_batch
        mlp_out = self.mlp(self.post_attention_layernorm(hidden_states))
        capture_at(mlp_out, edits, delta_site(place + 1))
        return apply_at(hidden_states + mlp_out, edits, residual_site(place + 1))

    def forward_fused(
        self, h: torch.Tensor, delta: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden state is the `total` of what goes in, and of what comes out: the next norm's kernel adds them up."""
        place = 2 * self.self_attn.layer_idx
        h, normed = self.input_layernorm.after_add(h, delta, batch.site_ops, place)
        delta = self.self_attn.forward_fused(normed, cos, sin, batch)
        h, normed = self.post_attention_layernorm.after_add(h, delta, batch.site_ops, place + 1)
        return h, self.mlp.forward_fused(normed, batch)


class LlamaModel(nn.Module):
    """The decoder without its head."""

    layer_cls: type[LlamaDecoderLayer] = LlamaDecoderLayer

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: str, max_positions: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList([self.layer_cls(config, i, dtype, device) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.rotary_emb = RotaryEmbedding(config, head_dim_of(config), max_positions, dtype, device)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> BaseModelOutputWithPast:
        """input_ids and position_ids [1, tokens]."""
        edits, watch = forward_batch.site_ops, forward_batch.hook_query
        self.embed_tokens.batch = self.norm.batch = forward_batch
        h = self.embed_tokens(input_ids)
        capture_at(h, edits, residual_site(0))
        lens = {"rope_lens": forward_batch.rope_lens} if self.rotary_emb.length_dependent else {}
        rotary = self.rotary_emb(h, position_ids=position_ids, **lens)
        kwargs = {"position_embeddings": rotary, "position_ids": position_ids, "forward_batch": forward_batch}
        i, last = 0, len(self.layers)
        while i < last:
            first, waits = i, "within"
            while watch is not None and i < last and (waits := watch.hook_position(i)) == "nowhere":
                i += 1
            at_output = waits == "at output"
            if first < i or at_output:
                h = self._stretch(h, rotary, forward_batch, first, i + at_output, at_output)
            if i < last:
                h = self.layers[i](h, **kwargs) if not at_output else watch.at_output(i, h)  # pyright: ignore[reportOptionalMemberAccess]
                i += 1
                capture_at(h, edits, residual_site(2 * i))
        h = self.norm(h)
        if edits is not None:
            edits.capture(edits.final_site, h)
        return BaseModelOutputWithPast(last_hidden_state=h)  # pyright: ignore[reportArgumentType]

    def _stretch(
        self, h: torch.Tensor, rotary: Rotation, batch: ForwardBatch, first: int, stop: int, served: bool
    ) -> torch.Tensor:
        """h after the layers from `first` to `stop`; `served` to a trace next, or not."""

        def run(h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Registers:
            delta = None
            for layer in islice(self.layers, first, stop):  # a slice of them would be a module anew
                h, delta = layer.forward_fused(h, delta, cos, sin, batch)  # pyright: ignore[reportCallIssue]
            return {"h": total(h, delta, batch.site_ops, 2 * stop, served)}

        cos, sin = rotation_of(batch, *rotary)
        return batch.run_segment(("layers", first, stop, served), run, h=h, cos=cos, sin=sin)["h"]

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        edits, delta = forward_batch.site_ops, None
        h = edited(F.embedding(input_ids, self.embed_tokens.weight), edits, residual_site(0))
        cos, sin = self.rotary_emb.rotation(position_ids, forward_batch.rope_lens)
        for layer in self.layers:
            h, delta = layer.forward_fused(h, delta, cos, sin, forward_batch)  # pyright: ignore[reportCallIssue]
        return self.norm.after_add(h, delta, edits, 2 * len(self.layers))[1]


class LlamaForCausalLM(nn.Module):
    """A decoder with its head.

    Args:
        config: the family's transformers config.
        max_positions: the longest sequence that will be served.
    """

    model_cls: type[LlamaModel] = LlamaModel

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: str, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_cls(config, dtype, device, max_positions)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, device)
        self.lm_head.makes = 0, LOGITS
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.lm_head.bind()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        """input_ids and position_ids [1, tokens] -> logits [1, logit rows, vocab].

        The head runs on the rows that `forward_batch.logits_indices` names.
        """
        outputs = self.model(input_ids=input_ids, position_ids=position_ids, forward_batch=forward_batch)
        h = outputs.last_hidden_state
        if forward_batch.return_hidden_states:
            forward_batch.hidden_states = h[0]
        rows = forward_batch.logits_indices
        self.lm_head.batch = forward_batch
        return CausalLMOutputWithPast(logits=self.lm_head(h if rows is None else h[:, rows]))

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """`forward`'s logits, without a call to a module of the tree."""
        h = self.model.forward_fused(input_ids, position_ids, forward_batch)
        if forward_batch.return_hidden_states:
            forward_batch.hidden_states = h[0]
        rows = forward_batch.logits_indices
        return apply_inner(self.lm_head.gemm(h if rows is None else h[:, rows]), forward_batch.site_ops, 0, LOGITS)


class MistralAttention(LlamaAttention):
    """Llama's, without biases, every layer with the config's sliding window."""

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        return False, False

    @staticmethod
    def window(config: PretrainedConfig, layer_idx: int) -> int | None:
        return getattr(config, "sliding_window", None)


class MistralDecoderLayer(LlamaDecoderLayer):
    attention_cls = MistralAttention


class MistralModel(LlamaModel):
    layer_cls = MistralDecoderLayer


class MistralForCausalLM(LlamaForCausalLM):
    model_cls = MistralModel


def head_dim_of(config: PretrainedConfig) -> int:
    """The width of an attention head: the config's, else hidden over heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
