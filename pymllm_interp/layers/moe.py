"""Mixture of experts (Shazeer et al., 2017): a router, and expert MLPs with gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.current_pass import current_batch
from ..core.forward_batch import ForwardBatch
from ..core.model_spec import EXPERTS
from .activation import Activation, activation, activation_module, gated, silu
from .dispatch import triton_kernels_for
from .edits.base import apply_inner, capture_inner
from .gemm import Gemm
from .invariant import sigmoid_of_mode
from .quantization.expert_tiles import ExpertTiles
from .quantization.experts import ExpertWeight, QuantizableExperts

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [tokens, experts], scores [tokens, top_k] and ids [tokens, top_k] int64 of the chosen experts, best first."""


class TopKRouter(nn.Module):
    """The softmax of a product, and its `top_k` largest values.

    Args:
        normalise: the scores of a token add up to 1.
        score_dtype: dtype of the scores.
        bias: the product has a bias.

    Attributes:
        scoring: see `kernels.products.moe.route`.
    """

    scoring = "softmax"

    def __init__(
        self, layer_idx: int, experts: int, hidden: int, top_k: int, normalise: bool, dtype: torch.dtype,
        score_dtype: torch.dtype, device: str, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer_idx = layer_idx
        self.top_k, self.num_experts, self.hidden_dim, self.norm_topk_prob = top_k, experts, hidden, normalise
        self._score_dtype = score_dtype
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.empty(experts, dtype=dtype, device=device), False) if bias else None
        self._gemm = Gemm([self.weight], self.weight.detach(), None if self.bias is None else self.bias.detach())

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        return self.route(hidden_states, current_batch())

    def route(self, x: torch.Tensor, batch: ForwardBatch | None) -> Routed:
        """x [..., hidden], flattened to tokens. Declared ops at the logits come before the choice."""
        logits = self.logits_of(x.reshape(-1, self.hidden_dim))
        site_ops = None if batch is None else batch.site_ops
        if site_ops is not None and "router" in site_ops.inner:
            state = logits.to(x.dtype)  # of sites
            edited = apply_inner(state[None], site_ops, self.layer_idx, "router")[0]
            capture_inner(edited[None], site_ops, self.layer_idx, "router")
            logits = edited if state is logits else torch.where(edited == state, logits, edited.to(logits.dtype))
        return (logits, *self.choose(logits))

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, experts] of x [tokens, hidden]."""
        return self._gemm(x)

    def capture(self, ids: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype, batch: ForwardBatch | None) -> None:
        """Capture the choice at the site `experts`: ids and scores, in the dtype of states (`Capture` checks it)."""
        if batch is not None and batch.site_ops is not None and EXPERTS in batch.site_ops.inner:
            state = torch.cat((ids.to(dtype), scores.to(dtype)), -1)
            capture_inner(state[None], batch.site_ops, self.layer_idx, EXPERTS)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of logits [tokens, experts]."""
        if triton_kernels_for(logits) is not None:
            from ..kernels.products import moe

            return moe.route(logits, self.top_k, self.norm_topk_prob, self._score_dtype, self.scoring)
        scores, ids = self.chosen(logits)
        return scores.to(self._score_dtype), ids

    def chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose` in plain torch, with scores in float32."""
        scores, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), self.top_k, dim=-1)
        return (scores / scores.sum(dim=-1, keepdim=True) if self.norm_topk_prob else scores), ids


class LogitRouter(TopKRouter):
    """gpt-oss' router: the `top_k` largest logits, and the softmax of only these."""

    scoring = "chosen"

    def __init__(self, layer_idx: int, experts: int, hidden: int, top_k: int, dtype: torch.dtype, device: str) -> None:
        super().__init__(layer_idx, experts, hidden, top_k, True, dtype, dtype, device, bias=True)

    def chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top, ids = torch.topk(logits, self.top_k, dim=-1)
        return F.softmax(top, dim=-1, dtype=torch.float32), ids


class SigmoidRouter(TopKRouter):
    """GLM-4.5's router. Experts are ranked by the sigmoid of their logit plus a correction, in groups; scores have no correction.

    Logits are float32, as in transformers.

    Args:
        groups, top_groups: number of groups of experts, and of used ones, which have the highest sums of two ranks.
        scaling: factor of the scores.
    """

    scoring = "sigmoid"
    e_score_correction_bias: torch.Tensor
    """[experts] float32."""

    def __init__(
        self, layer_idx: int, experts: int, hidden: int, top_k: int, normalise: bool, dtype: torch.dtype, device: str,
        groups: int, top_groups: int, scaling: float,
    ) -> None:  # fmt: skip
        super().__init__(layer_idx, experts, hidden, top_k, normalise, dtype, torch.float32, device)
        self.num_group, self.topk_group, self.routed_scaling_factor = groups, top_groups, scaling
        self._sigmoid = sigmoid_of_mode()
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32, device=device))

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.detach().float()
        return type(self._gemm)([weight], weight, None)(x.float())

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if triton_kernels_for(logits) is not None and self.topk_group == self.num_group:
            from ..kernels.products import moe

            correction = self.e_score_correction_bias, self.routed_scaling_factor
            return moe.route(logits, self.top_k, self.norm_topk_prob, torch.float32, self.scoring, *correction)
        return self.chosen(logits)

    def chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._sigmoid(logits.float())
        ranks = scores + self.e_score_correction_bias
        if self.topk_group < self.num_group:
            grouped = ranks.unflatten(-1, (self.num_group, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
            left = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, False)
            ranks = grouped.masked_fill(left[..., None], float("-inf")).flatten(1)
        ids = ranks.topk(self.top_k, dim=-1).indices
        scores = scores.gather(1, ids)
        if self.norm_topk_prob:
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return scores * self.routed_scaling_factor, ids


CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss' gate: gate_up [..., 2 * size], gate and up next to each other -> [..., size]. In float32, rounded once."""
    pairs = gate_up.unflatten(-1, (-1, 2))
    pairs = pairs if pairs.dtype is torch.float64 else pairs.float()
    gate, up = pairs[..., 0].clamp(max=CLAMP_LIMIT), pairs[..., 1].clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    # By the native `silu`: the last bit of torch's exp depends on the place of a row among the others.
    return ((up + 1) * (silu(CLAMP_ALPHA * gate) / CLAMP_ALPHA)).to(gate_up.dtype)


class Experts(QuantizableExperts):
    """MLPs with gates; the weights of all of them are two tensors.

    On CUDA, Triton kernels multiply rows sorted by expert (kernels/products/moe.py). Otherwise each chosen expert multiplies its
    rows: on a CPU, with gradients, and if a hook waits at `act_fn`.

    Args:
        act: the name of the activation function. No hook waits at `act_fn` where weights are `elsewhere`.
    """

    def __init__(
        self, layer_idx: int, experts: int, hidden: int, intermediate: int, act: str, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__(experts, hidden, intermediate, dtype, device)
        self.layer_idx, self.hidden_dim, self.intermediate_dim = layer_idx, hidden, intermediate
        self.act_fn = activation_module(act)
        # The fused pass has its own copy: hooks may wait at the module `act_fn`.
        self._act: list[Activation] = [activation(act)]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        batch = current_batch()
        query = None if batch is None else batch.hook_query
        top_k_index, top_k_weights = known_experts(top_k_index, top_k_weights, self.num_experts)
        if query is None or query.try_fuse(self.layer_idx, "mlp.experts"):
            return self.fused(hidden_states, top_k_index, top_k_weights)
        if self.elsewhere is not None:
            raise NotImplementedError(
                "`mlp.experts.act_fn` is inside of a kernel here: read `mlp.experts.input` or `.output`"
            )
        query.runs_eagerly(self.layer_idx, "mlp.experts", but="")

        def act(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up

        return one_by_one(hidden_states, top_k_index, top_k_weights, self._gemms, act)

    def fused(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] through the experts `ids`, weighted by `scores`, both [tokens, top_k]; no call to a module."""
        (act,) = self._act
        if self.elsewhere is not None:
            return self.elsewhere(x, ids, scores)
        if act is silu and triton_kernels_for(x) is not None:
            return multiplied(x, ids, scores, self._weights, self.num_experts, one_tiling=self.one_tiling)
        return one_by_one(x, ids, scores, self._gemms, lambda gate_up: gated(gate_up, act))


class ClampedExperts(QuantizableExperts):
    """gpt-oss' experts: with biases, and `clamped_swiglu`."""

    transposed = interleaved = True

    def __init__(
        self, layer_idx: int, experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__(experts, hidden, intermediate, dtype, device, biased=True)
        self.layer_idx, self.hidden_size, self.intermediate_size = layer_idx, hidden, intermediate
        self.alpha, self.limit = CLAMP_ALPHA, CLAMP_LIMIT

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.fused(hidden_states, *known_experts(router_indices, routing_weights, self.num_experts))

    def fused(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Run the experts, see `Experts.fused`."""
        if self.elsewhere is not None:
            return self.elsewhere(x, ids, scores)
        if triton_kernels_for(x) is not None:
            clamp = self.alpha, self.limit
            return multiplied(x, ids, scores, self._weights, self.num_experts, self._biases, clamp, self.one_tiling)
        return one_by_one(x, ids, scores, self._gemms, clamped_swiglu)


def multiplied(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, weights: Sequence[ExpertWeight], experts: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None, clamp: tuple[float, float] | None = None, one_tiling: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`kernels.products.moe.experts` with weights that may be quantised. `one_tiling`: of 64 entries, for any rows."""
    from ..kernels.products import fp4_experts, moe, quantized_experts

    def product_of(weight: ExpertWeight) -> Any:
        if isinstance(weight, torch.Tensor):
            return partial(moe.expert_product, weight=weight)
        if isinstance(weight, ExpertTiles):
            tiles = {"words": weight.words, "scales": weight.scales, "shift": weight.shift, "rows": weight.rows}
            return partial(fp4_experts.expert_product, **tiles)
        codes = {"codes": weight.codes, "scales": weight.scales, "group_size": weight.group_size}
        return partial(quantized_experts.expert_product, experts=experts, **codes)

    first, last = weights
    if isinstance(first, ExpertTiles):
        tilings = fp4_experts.TILINGS
    else:
        plain = isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor)
        tilings = moe.TILINGS if plain else quantized_experts.TILINGS
    tilings = tilings[2:3] if one_tiling else tilings
    return moe.experts(
        x.contiguous(), ids, scores, experts, product_of(first), product_of(last), biases, clamp, tilings
    )


def known_experts(ids: torch.Tensor, scores: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, scores), with NaN as the score of an expert that does not exist.

    A block may have written the ids. Its row becomes NaN; other requests share the pass.
    """
    known = (ids >= 0) & (ids < experts)
    return ids.clamp(0, experts - 1), scores.masked_fill(~known, torch.nan)


def one_by_one(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, gemms: Sequence[Sequence[Callable[[torch.Tensor], torch.Tensor]]],
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Experts one after the other: x [tokens, hidden] -> [tokens, hidden].

    A token's choices are added in their order, whichever expert runs first. So a row's bits depend on no other row.

    Args:
        ids, scores: [tokens, top_k].
        gemms: the first and the last products, by expert.
        act: activation between both products.
    """
    tokens, entries, weights = len(x), ids.t().reshape(-1), scores.t().reshape(-1)
    order = torch.argsort(entries, stable=True)  # an expert's rows: by choice, then by token, as in transformers
    parts: list[torch.Tensor] = []
    start, (first, last) = 0, gemms
    for expert, count in enumerate(torch.bincount(entries, minlength=len(first)).tolist()):
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
