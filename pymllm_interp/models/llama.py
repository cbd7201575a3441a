"""Llama and its kin: one file, two forward passes.

`forward` goes module by module, under the names and with the tensors of the family's `transformers` class: it is what a
trace sees, and what runs when one is looking. `forward_fused` computes the same with the same kernels at the same shapes
and calls no module: it is what plain passes run. The two differ only in where Python may stand between kernels, hence
they are bit-equal (tests/test_models.py).

Module boundaries carry [1, tokens, hidden]; the batch is flat along dim 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ..attention.radix_attention import RadixAttention
from ..core.forward_batch import ForwardBatch
from ..layers.activation import SiLU, gated, silu
from ..layers.edits import Edited, added_site, edited, stream_site, total
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
        self.o_proj = Linear(q_size, config.hidden_size, o_bias, dtype, device)
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
        tokens = hidden_states.shape[1]
        cos, sin = rotation_of(forward_batch, *position_embeddings)
        with self._qkv.product(hidden_states):
            q = self.normed(self.q_proj(hidden_states), "q_norm")
            k = self.normed(self.k_proj(hidden_states), "k_norm")
            v = self.v_proj(hidden_states).reshape(tokens, -1, self.head_dim)
        z = self.attn(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, forward_batch)
        attn_out = self.o_proj(z.unsqueeze(0))
        return edited(attn_out, forward_batch.edits, added_site(2 * self.layer_idx + 1)), None

    def normed(self, projected: torch.Tensor, norm: str) -> torch.Tensor:
        """[1, tokens, heads * head_dim] -> [tokens, heads, head_dim], through the module `norm` in families that have one."""
        return projected.reshape(projected.shape[1], -1, self.head_dim)

    def forward_fused(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` without a call to a module. h [1, tokens, hidden]; cos, sin: a `rotation`."""
        qkv = self.normed_fused(self._qkv.gemm(h).view(h.shape[1], -1, self.head_dim))
        pool = batch.token_to_kv_pool
        if batch.fresh_kv_only or pool is None:  # k and v are not for the pool
            q, k = apply_rope(qkv[:, : -self.num_kv_heads], cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
            z = self.attn(q, k, qkv[:, -self.num_kv_heads :], batch)
        else:
            q = rope_and_write(qkv, cos, sin, pool, self.layer_idx, batch.out_cache_loc)
            z = self.attn.of_written(q, batch)
        return self.o_proj.gemm(z.unsqueeze(0))

    def normed_fused(self, qkv: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + 2 * kv_heads, head_dim]: q's heads, k's and v's."""
        return qkv


class LlamaMLP(Edited):
    """The gated feed-forward block: ``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: PretrainedConfig, layer_idx: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        sizes = [config.intermediate_size] * 2
        self._gate_up = MergedLinear(config.hidden_size, sizes, bias, dtype, device)
        self.gate_proj, self.up_proj = self._gate_up.projections
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias, dtype, device)
        is_silu = config.hidden_act == "silu"
        self.layer_idx = layer_idx
        self.act_fn = SiLU() if is_silu else ACT2FN[config.hidden_act]
        # The fused pass calls its own copy: `act_fn` is a module of the tree, and a trace may stand there.
        self._act = [silu if is_silu else ACT2FN[config.hidden_act]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._gate_up.product(x):
            # Operations are named by their calls and assignments (`.source`): as in transformers.
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return edited(down_proj, self.take_edits(), added_site(2 * self.layer_idx + 2))

    def forward_fused(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.gemm(gated(self._gate_up.gemm(x), self._act[0]))


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
        watch = forward_batch.watch
        if watch is not None and watch.nobody_inside(self.self_attn.layer_idx):
            turned = rotation_of(forward_batch, *position_embeddings)
            parts = self.forward_fused(hidden_states, None, *turned, forward_batch)
            return total(*parts, forward_batch.edits, 2 * self.self_attn.layer_idx + 2)
        kwargs |= {"position_embeddings": position_embeddings, "forward_batch": forward_batch}
        attn_out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        edits, place = forward_batch.edits, 2 * self.self_attn.layer_idx + 1
        hidden_states = edited(hidden_states + attn_out, edits, stream_site(place))
        self.mlp.edits = edits
        mlp_out = self.mlp(self.post_attention_layernorm(hidden_states))
        return edited(hidden_states + mlp_out, edits, stream_site(place + 1))

    def forward_fused(
        self, h: torch.Tensor, delta: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden state is the `total` of what goes in, and of what comes out: the next norm's kernel adds them up."""
        place = 2 * self.self_attn.layer_idx
        h, normed = self.input_layernorm.after_add(h, delta, batch.edits, place)
        delta = self.self_attn.forward_fused(normed, cos, sin, batch)
        h, normed = self.post_attention_layernorm.after_add(h, delta, batch.edits, place + 1)
        return h, self.mlp.forward_fused(normed)


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
        edits, last = forward_batch.edits, 2 * len(self.layers)
        self.embed_tokens.edits = self.norm.edits = edits
        h, delta = self.embed_tokens(input_ids), None
        lens = {"rope_lens": forward_batch.rope_lens} if self.rotary_emb.length_dependent else {}
        position_embeddings = self.rotary_emb(h, position_ids=position_ids, **lens)
        watch = forward_batch.watch
        kwargs = {
            "position_embeddings": position_embeddings,
            "position_ids": position_ids,
            "forward_batch": forward_batch,
        }
        for i, layer in enumerate(self.layers):
            if watch is not None and watch.nobody_at(i):
                turned = rotation_of(forward_batch, *position_embeddings)
                h, delta = layer.forward_fused(h, delta, *turned, forward_batch)  # pyright: ignore[reportCallIssue]
            else:
                h, delta = layer(total(h, delta, edits, 2 * i), **kwargs), None
        h = self.norm(total(h, delta, edits, last))
        return BaseModelOutputWithPast(last_hidden_state=h)  # pyright: ignore[reportArgumentType]

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        edits, delta = forward_batch.edits, None
        h = edited(F.embedding(input_ids, self.embed_tokens.weight), edits, stream_site(0))
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
        logits = self.lm_head(h if rows is None else h[:, rows])
        return CausalLMOutputWithPast(logits=logits)

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """`forward`'s logits, without a call to a module of the tree."""
        h = self.model.forward_fused(input_ids, position_ids, forward_batch)
        if forward_batch.return_hidden_states:
            forward_batch.hidden_states = h[0]
        rows = forward_batch.logits_indices
        return self.lm_head.gemm(h if rows is None else h[:, rows])


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
