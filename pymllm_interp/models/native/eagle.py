"""EAGLE-3 heads (Li et al., 2025): one decoder layer that drafts from a model's own hidden states.

Position i of a head has the embedding of token i + 1, and a state. The state is made of three hidden states of the model by `fc`.
In drafts behind drafts it is the head's own output. Attention reads [embedding, state]. The layout is the one of SafeAILab's
checkpoints and of `speculators`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ...layers.linear import Embedding, Linear, MergedLinear
from ...layers.norm import RMSNorm
from ...layers.rope import RotaryEmbedding
from ..base import CausalLM
from .decoder import logit_rows
from .llama import LlamaAttention, LlamaMLP
from .qwen import Qwen3Attention


class EagleOptions(NamedTuple):
    """Options of an EAGLE-3 checkpoint's config beside its layer's."""

    draft_vocab_size: int
    layers: tuple[int, ...]
    """Layers of the model, ascending: their inputs are read."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    """The concatenated states are normalised as one."""
    fc_norm: bool = False
    """Each of them is normalised apart."""
    norm_output: bool = False
    """Drafts behind drafts read the output after the final norm."""


class EagleAttention(LlamaAttention):
    """Attention over [embedding, state] concatenated."""

    def __init__(self, config: PretrainedConfig, spec: ModelSpec, layer_idx: int, device: str) -> None:
        super().__init__(config, spec, layer_idx, device)
        sizes, bias = [spec.width(kind) for kind in "qkv"], self.biases(config)[0]
        self._qkv = MergedLinear(2 * spec.hidden_size, sizes, bias, spec.dtype, device)
        self.q_proj, self.k_proj, self.v_proj = self._qkv.projections()


class Qwen3EagleAttention(EagleAttention, Qwen3Attention):
    """The same with norms of the heads."""


class EagleLayer(nn.Module):
    """The decoder layer of a head."""

    def __init__(self, config: PretrainedConfig, options: EagleOptions, spec: ModelSpec, device: str) -> None:
        super().__init__()
        attention = Qwen3EagleAttention if config.model_type == "qwen3" else EagleAttention
        self.self_attn = attention(config, spec, 0, device)
        self.mlp = LlamaMLP(config, spec, 0, device)
        norms = (RMSNorm(spec.hidden_size, config.rms_norm_eps, spec.dtype, device) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self._norm_before_residual = options.norm_before_residual

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, rotation: tuple[torch.Tensor, ...], batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded and states [1, tokens, hidden] -> (h, delta). Their sum is the output."""
        normed = self.hidden_norm.normalize(states)
        x = torch.cat((self.input_layernorm.normalize(embedded), normed), dim=-1)
        attended = self.self_attn.forward_fused(x, *rotation, batch=batch)
        h = normed if self._norm_before_residual else states
        h, normed = self.post_attention_layernorm.after_add(h, attended)
        return h, self.mlp.forward_fused(normed, batch=batch)


class Eagle3Head(CausalLM):
    """An EAGLE-3 head. Its logits have the model's vocabulary; tokens outside of the draft vocabulary have -inf.

    Args:
        config: config of the layer.
        embedding: [vocab, hidden], the model's, for a checkpoint without its own; None: with its own.
        max_positions: positions of the longest sequence.

    Attributes:
        states: [rows, hidden], the states of a pass's rows. The pass replaces them by its outputs. `open_states` allocates it.
        d2t: [draft vocab] int64, offsets from draft tokens to token ids; None if both vocabularies are one.
    """

    states: torch.Tensor
    d2t: torch.Tensor | None

    def __init__(
        self, config: PretrainedConfig, options: EagleOptions, spec: ModelSpec, device: str, max_positions: int,
        embedding: torch.Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.spec, self.options = config, spec, options
        hidden, dtype = spec.hidden_size, spec.dtype
        self._shared = [embedding]  # not a parameter of the head
        if embedding is None:
            self.embed_tokens = Embedding(spec.vocab_size, hidden, dtype, device, has_site=False)
        width = len(options.layers) * hidden
        self.fc = Linear(width, hidden, False, dtype, device)
        if options.norm_before_fc:
            self.input_norm = RMSNorm(width, config.rms_norm_eps, dtype, device)
        if options.fc_norm:
            norms = [RMSNorm(hidden, config.rms_norm_eps, dtype, device) for _ in options.layers]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList([EagleLayer(config, options, spec, device)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype, device)
        self.lm_head = Linear(hidden, options.draft_vocab_size, False, dtype, device)
        shift = torch.zeros(options.draft_vocab_size, dtype=torch.int64, device=device)
        self.register_buffer("d2t", shift if options.draft_vocab_size != spec.vocab_size else None)
        self.rotary_emb = RotaryEmbedding(config, spec.head_dim, max_positions, dtype, device)

    def open_states(self, rows: int) -> None:
        """Allocate `states`, before a pass."""
        self.states = torch.zeros(rows, self.spec.hidden_size, dtype=self.spec.dtype, device=self.lm_head.weight.device)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of the model [tokens, layers * hidden] -> states of the head [tokens, hidden]."""
        if self.options.norm_before_fc:
            states = self.input_norm.normalize(states)
        if self.options.fc_norm:
            parts: Any = zip(self.fc_norm, states.chunk(len(self.options.layers), dim=-1), strict=True)
            states = torch.cat([norm.normalize(part.contiguous()) for norm, part in parts], dim=-1)
        return self.fc.project(states)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        logits: Any = self.forward_fused(input_ids, position_ids, forward_batch)
        return CausalLMOutputWithPast(logits=logits)

    def decoder_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        weight, states = self._shared[0], self.states[: input_ids.shape[1]]
        embedded = self.embed_tokens.embed(input_ids) if weight is None else nn.functional.embedding(input_ids, weight)
        rotation = self.rotary_emb.rotation(position_ids, forward_batch.rope_lens)
        h, delta = self.layers[0](embedded, states.unsqueeze(0), rotation, forward_batch)
        h, normed = self.norm.after_add(h, delta)
        states.copy_((normed if self.options.norm_output else h)[0])
        return normed

    def head_fused(self, h: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        logits = self.lm_head.project(logit_rows(h, forward_batch))
        if self.d2t is None:
            return logits
        ids = self.d2t + torch.arange(len(self.d2t), device=logits.device)
        full = logits.new_full((*logits.shape[:-1], self.spec.vocab_size), float("-inf"))
        return full.index_copy_(-1, ids, logits)
