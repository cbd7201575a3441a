"""Mixture of experts (Shazeer et al., 2017): a router, and expert MLPs with gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..core.current_pass import current_batch
from ..core.forward_batch import ForwardBatch
from .activation import Activation, activation, activation_module, gated, silu
from .dispatch import triton_kernels_for
from .edits.base import apply_inner, capture_inner
from .gemm import Gemm

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [tokens, experts], scores [tokens, top_k] and ids [tokens, top_k] int64 of the chosen experts, best first."""


class TopKRouter(nn.Module):
    """The softmax of a product, and its `top_k` largest values.

    Args:
        normalise: the scores of a token add up to 1.
        score_dtype: of the scores.
    """

    def __init__(
        self, layer_idx: int, experts: int, hidden: int, top_k: int, normalise: bool, dtype: torch.dtype,
        score_dtype: torch.dtype, device: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer_idx = layer_idx
        self.top_k, self.num_experts, self.hidden_dim, self.norm_topk_prob = top_k, experts, hidden, normalise
        self._score_dtype = score_dtype
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype, device=device), False)
        self._gemm = Gemm([self.weight], self.weight.detach(), None)

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        return self.route(hidden_states, current_batch())

    def route(self, x: torch.Tensor, batch: ForwardBatch | None) -> Routed:
        """x [..., hidden], flattened to tokens. Declared ops at the logits come before the choice."""
        logits = self._gemm(x.reshape(-1, self.hidden_dim))
        if batch is not None:
            logits = apply_inner(logits[None], batch.site_ops, self.layer_idx, "router")[0]
            capture_inner(logits[None], batch.site_ops, self.layer_idx, "router")
        return (logits, *self.choose(logits))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of logits [tokens, experts]."""
        if triton_kernels_for(logits) is not None:
            from ..kernels.products import moe

            return moe.route(logits, self.top_k, self.norm_topk_prob, self._score_dtype)
        scores, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), self.top_k, dim=-1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return scores.to(self._score_dtype), ids


class Experts(nn.Module):
    """MLPs with gates; the weights of all of them are two tensors.

    On CUDA, Triton kernels multiply rows sorted by expert (kernels/products/moe.py). Otherwise each chosen expert multiplies its
    rows: on a CPU, with gradients, and where a hook waits at `act_fn`.

    Args:
        act: the name of the activation function.
    """

    def __init__(
        self, layer_idx: int, experts: int, hidden: int, intermediate: int, act: str, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.layer_idx, self.num_experts = layer_idx, experts
        self.hidden_dim, self.intermediate_dim = hidden, intermediate
        gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        self.gate_up_proj = nn.Parameter(gate_up, False)
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate, dtype=dtype, device=device), False)
        self.act_fn = activation_module(act)
        # The fused pass has its own copy: hooks may wait at the module `act_fn`.
        self._act: list[Activation] = [activation(act)]
        self._gemms = [self._gemms_of(self.gate_up_proj), self._gemms_of(self.down_proj)]

    @staticmethod
    def _gemms_of(weights: nn.Parameter) -> list[Gemm]:
        return [Gemm([weights], weight, None) for weight in weights.detach()]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        batch = current_batch()
        query = None if batch is None else batch.hook_query
        # A block may have written the ids. The row of an unknown expert becomes NaN; other requests share the pass.
        known = (top_k_index >= 0) & (top_k_index < self.num_experts)
        top_k_index = top_k_index.clamp(0, self.num_experts - 1)
        top_k_weights = top_k_weights.masked_fill(~known, torch.nan)
        if query is None or query.try_fuse(self.layer_idx, "mlp.experts"):
            return self.fused(hidden_states, top_k_index, top_k_weights)
        query.runs_eagerly(self.layer_idx, "mlp.experts", but="")

        def act(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up

        return self._one_by_one(hidden_states, top_k_index, top_k_weights, act)

    def fused(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] through the experts `ids`, weighted by `scores`, both [tokens, top_k]; no call to a module."""
        (act,) = self._act
        if act is silu and triton_kernels_for(x) is not None:
            from ..kernels.products import moe

            return moe.experts(x.contiguous(), ids, scores, self.gate_up_proj, self.down_proj)
        return self._one_by_one(x, ids, scores, lambda gate_up: gated(gate_up, act))

    def _one_by_one(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """A token's choices are added in their order, whichever expert runs first. So a row's bits depend on no other row."""
        tokens, entries, weights = len(x), ids.t().reshape(-1), scores.t().reshape(-1)
        order = torch.argsort(entries, stable=True)  # an expert's rows: by choice, then by token, as in transformers
        parts: list[torch.Tensor] = []
        start, (first, last) = 0, self._gemms
        for expert, count in enumerate(torch.bincount(entries, minlength=self.num_experts).tolist()):
            if count:
                own = order[start : start + count]
                out = last[expert](act(first[expert](x[own % tokens])))
                parts.append((out * weights[own, None]).to(x.dtype))
                start += count
        if not parts:
            return torch.empty_like(x)
        by_choice = torch.cat(parts)[torch.argsort(order)].view(-1, *x.shape).float()
        total = by_choice[0]
        for part in by_choice[1:]:
            total = total + part
        return total.to(x.dtype)
