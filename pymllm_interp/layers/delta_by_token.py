"""The gated delta rule token by token, for batch-invariant mode. The chunks of `delta.mix` begin where a pass does."""

from __future__ import annotations

import torch

from ..core.forward_batch import ForwardBatch
from . import invariant
from .delta import DeltaSizes, DeltaStates, DeltaWeights, PromptRows, heads_of_mixed, mix, prompt_rows
from .dispatch import triton_kernels_for


def mix_by_token(
    x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights, sizes: DeltaSizes, states: DeltaStates | None,
    batch: ForwardBatch | None,
) -> torch.Tensor:  # fmt: skip
    """`delta.mix` with a token's bits independent of the pass that computes it. Passes with gradients have one request."""
    if batch is None or torch.is_grad_enabled() or (x.is_cuda and states is None):
        return mix(x, b, a, weights, sizes, states, batch)
    if triton_kernels_for(x) is not None and states is not None:
        return _by_kernels(x, b, a, weights, states, batch)
    sizes_of_requests = [size for _, size in batch.batch_groups]
    prefixes = batch.extend_prefix_lens_cpu or [int(batch.forward_mode.is_decode())] * len(sizes_of_requests)
    outs, first = [], 0
    for request, (size, prefix) in enumerate(zip(sizes_of_requests, prefixes, strict=True)):
        own, slot = slice(first, first + size), batch.req_pool_indices[request : request + 1].to(torch.int64)
        outs.append(_sequence(x[own], b[own], a[own], weights, sizes, states, slot, prefix > 0))
        first += size
    outs.append(x.new_zeros(len(x) - first, sizes.heads, sizes.dim))
    return torch.cat(outs)


def _by_kernels(
    x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights, states: DeltaStates, batch: ForwardBatch
) -> torch.Tensor:
    from ..kernels import triton_delta

    slots, (conv, recurrent) = batch.req_pool_indices, states
    if batch.forward_mode.is_decode():
        mixed = triton_delta.conv_step(x, conv, weights.conv, slots)
        return triton_delta.delta_scan(mixed, b, a, weights.decay, weights.bias, recurrent, slots)
    rows, found = batch.num_request_tokens, batch.state_rows
    if not isinstance(found, PromptRows):  # made once for a pass; all its layers share it
        prefixes = batch.extend_prefix_lens_cpu or [0] * batch.batch_size
        has_state = [prefix > 0 for prefix in prefixes]
        found = batch.state_rows = prompt_rows([size for _, size in batch.batch_groups], has_state, slots)
    (mixed,) = triton_delta.conv_prompts(
        x[:rows], conv, weights.conv, found.starts, found.slots, found.continued, found.firsts, found.sources
    )[-1:]
    parts = weights.decay, weights.bias, recurrent, found.slots, found.starts, found.continued
    out = triton_delta.delta_scan(mixed, b[:rows], a[:rows], *parts)
    return out if rows == len(x) else torch.cat((out, out.new_zeros(len(x) - rows, *out.shape[1:])))


def _sequence(
    x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights, sizes: DeltaSizes, states: DeltaStates | None,
    slot: torch.Tensor, has_state: bool,
) -> torch.Tensor:  # fmt: skip
    """The next tokens of one request: [tokens, heads, dim]."""
    taps = weights.conv[:, 0].t().float()  # [taps, channels]
    kept = x.new_zeros(len(taps) - 1, x.shape[1])
    memory = x.new_zeros(sizes.heads, sizes.key_dim, sizes.dim, dtype=torch.float32)
    if states is not None and has_state:
        kept = states.conv.index_select(0, slot)[0].to(x.dtype)
        memory = states.recurrent.index_select(0, slot)[0].float()
    window = torch.cat((kept, x))
    wide, mixed = window.float(), torch.zeros(x.shape, dtype=torch.float32)
    for tap, factor in enumerate(taps):
        mixed = mixed + wide[tap : tap + len(x)] * factor
    q, k, v = heads_of_mixed(invariant.silu(mixed.to(x.dtype)), sizes)
    decay = (-weights.decay.float().exp() * invariant.softplus(a.float() + weights.bias.float())).exp()
    beta, outs = invariant.sigmoid(b.contiguous()).float(), []
    for token in range(len(x)):
        memory = memory * decay[token, :, None, None]
        correction = (v[token] - (memory * k[token, :, :, None]).sum(-2)) * beta[token, :, None]
        memory = memory + k[token, :, :, None] * correction[:, None]
        outs.append((memory * q[token, :, :, None]).sum(-2).to(x.dtype))
        if states is not None:
            memory = memory.to(states.recurrent.dtype).float()  # as it is stored between passes
    if states is not None:
        states.conv.index_copy_(0, slot, window[-len(kept) :].unsqueeze(0).to(states.conv.dtype))
        states.recurrent.index_copy_(0, slot, memory.unsqueeze(0).to(states.recurrent.dtype))
    return torch.stack(outs)
