"""The gated delta rule (Yang et al., 2025) behind a short causal convolution, over the slots of a pass's requests.

A head's state is a matrix S [key_dim, dim]. A token decays it, and corrects its value at the token's key::

    S = exp(g) * S
    S = S + k (beta * (v - S'k))'          g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b)
    out = S'q

Rows of requests that continue with one token are a *step*: each reads and writes its slot in place. The rows of each other
request are a *prompt*, computed in chunks of tokens; on CUDA by fla-core, if installed. The first chunk of a
prompt reads no slot.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..core.forward_batch import ForwardBatch
from ..utils.extras import install_command
from ..utils.upload import upload
from . import invariant
from .dispatch import triton_kernels_for
from .gemm import HALF

CHUNK = 64
"""Tokens of a chunk."""
FLA_VERSIONS = (0, 6), (0, 7)
"""Versions of fla-core from the first up to the second, which is not served."""
FLA_DIMS = range(16, 257)
"""Sizes of a head's keys that fla-core takes. It rounds products in float32, so that only half precision runs by it."""

logger = logging.getLogger(__name__)


class DeltaWeights(NamedTuple):
    """Parameters of a gated delta rule layer."""

    # fmt: off
    conv:  torch.Tensor  # [channels, 1, taps]
    decay: torch.Tensor  # [heads], `A_log`
    bias:  torch.Tensor  # [heads], `dt_bias`
    # fmt: on


class DeltaSizes(NamedTuple):
    """Heads and their sizes. The convolution has the channels of q, k and v."""

    key_heads: int
    heads: int
    key_dim: int
    dim: int

    @property
    def keys(self) -> int:
        """Channels of q, and of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of channels of v."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.keys + self.values


class DeltaStates(NamedTuple):
    """The memory of a layer's states, by slot."""

    # fmt: off
    conv:      torch.Tensor  # [slots, taps - 1, channels], the last inputs of the convolution
    recurrent: torch.Tensor  # [slots, heads, key_dim, dim]
    # fmt: on


@dataclass(frozen=True)
class PromptRows:
    """The prompts of a pass: which rows each has, and where its states are."""

    # fmt: off
    sizes:     list[int]
    has_state: list[bool]
    slots:     torch.Tensor  # [prompts] int64
    starts:    torch.Tensor  # [prompts + 1] int64: first rows, and the number of rows
    on_host:   torch.Tensor  # `starts` on the CPU
    continued: torch.Tensor  # [prompts] int32: `has_state`
    firsts:    torch.Tensor  # [rows] int64: the first row of the row's prompt
    sources:   torch.Tensor  # [rows] int64: the slot of the row's prompt; -1 without a state
    # fmt: on


@dataclass(frozen=True)
class StateRows:
    """Reads and writes of states by the rows of a pass: `num_steps` rows first, then the prompts, then padding."""

    num_steps: int
    prompts: PromptRows | None

    @classmethod
    def of(cls, batch: ForwardBatch, with_states: bool) -> StateRows:
        """Made once for a pass; all its layers share it."""
        found = batch.state_rows
        if not isinstance(found, StateRows):
            found = batch.state_rows = cls._of(batch, with_states)
        return found

    @classmethod
    def _of(cls, batch: ForwardBatch, with_states: bool) -> StateRows:
        sizes = [size for _, size in batch.batch_groups]
        prefixes = batch.extend_prefix_lens_cpu or [int(batch.forward_mode.is_decode())] * len(sizes)
        steps = 0
        while with_states and steps < len(sizes) and sizes[steps] == 1 and prefixes[steps] > 0:
            steps += 1
        if steps == len(sizes):
            return cls(steps, None)
        sizes, has_state = sizes[steps:], [with_states and prefix > 0 for prefix in prefixes[steps:]]
        return cls(steps, prompt_rows(sizes, has_state, batch.req_pool_indices[steps:]))


def prompt_rows(sizes: list[int], has_state: list[bool], slots: torch.Tensor) -> PromptRows:
    """The `PromptRows` of requests with these numbers of rows."""
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
    continued = np.array(has_state, dtype=np.int32)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    on_host, slots = torch.from_numpy(starts), slots.to(torch.int64)
    starts, continued, firsts, owners = upload(slots.device, starts, continued, starts[:-1][owners], owners)
    sources = torch.where(continued.bool(), slots, -1)[owners]
    return PromptRows(sizes, has_state, slots, starts, on_host, continued, firsts, sources)


def mix(
    x: torch.Tensor,  # [tokens, channels], the projections to q, k and v
    b: torch.Tensor,  # [tokens, heads]
    a: torch.Tensor,  # [tokens, heads]
    weights: DeltaWeights,
    sizes: DeltaSizes,
    states: DeltaStates | None,
    batch: ForwardBatch | None,
) -> torch.Tensor:
    """The convolution and the delta rule: [tokens, heads, dim] in the dtype of x, in fresh memory. Rows of padding are zeros.

    Args:
        states: None if no state is read or kept.
        batch: batch of the pass; None: the rows are one sequence.
    """
    if batch is None:
        return _prompts(
            x, b, a, weights, sizes, None, prompt_rows([len(x)], [False], torch.zeros(1, dtype=torch.int64))
        )
    if states is not None and batch.forward_mode.is_decode():
        return _steps(x, b, a, weights, sizes, states, batch.req_pool_indices)
    rows = StateRows.of(batch, states is not None)
    first, stop, outs = rows.num_steps, batch.num_request_tokens, []
    if first:
        assert states is not None
        outs.append(_steps(x[:first], b[:first], a[:first], weights, sizes, states, batch.req_pool_indices[:first]))
    if rows.prompts is not None:
        outs.append(_prompts(x[first:stop], b[first:stop], a[first:stop], weights, sizes, states, rows.prompts))
    if stop < len(x):
        outs.append(x.new_zeros(len(x) - stop, sizes.heads, sizes.dim))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


# -- steps -------------------------------------------------------------------------------


def _steps(
    x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights, sizes: DeltaSizes, states: DeltaStates,
    slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    if triton_kernels_for(x) is not None:
        from ..kernels import triton_delta

        mixed = triton_delta.conv_step(x, states.conv, weights.conv, slots)
        return triton_delta.delta_step(mixed, b, a, weights.decay, weights.bias, states.recurrent, slots)
    window = torch.cat((states.conv.index_select(0, slots).to(x.dtype), x.unsqueeze(1)), 1)
    states.conv.index_copy_(0, slots, window[:, 1:].to(states.conv.dtype))
    taps = weights.conv[:, 0].t().float()
    q, k, v = heads_of_mixed(F.silu((window.float() * taps).sum(1).to(x.dtype)), sizes)
    g, beta = _gates(b, a, weights)
    memory = states.recurrent.index_select(0, slots).float() * g.exp()[..., None, None]
    delta = (v - (memory * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
    memory = memory + k.unsqueeze(-1) * delta.unsqueeze(-2)
    states.recurrent.index_copy_(0, slots, memory.to(states.recurrent.dtype))
    return (memory * q.unsqueeze(-1)).sum(-2).to(x.dtype)


def heads_of_mixed(mixed: torch.Tensor, sizes: DeltaSizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [rows, heads, size] float32. q and k are normalised, with as many heads as v."""
    q, k, v = mixed.float().split([sizes.keys, sizes.keys, sizes.values], dim=-1)
    q, k = (_normalised(part.unflatten(-1, (sizes.key_heads, sizes.key_dim))) for part in (q, k))
    times = sizes.heads // sizes.key_heads
    q, k = (part.repeat_interleave(times, dim=-2) if times > 1 else part for part in (q * sizes.key_dim**-0.5, k))
    return q, k, v.unflatten(-1, (sizes.heads, sizes.dim))


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _gates(b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the decay, and beta: [rows, heads] float32 each."""
    # Contiguous: the last bit of exp depends on the alignment of the CPU's vectors.
    b, a = b.contiguous(), a.contiguous()
    g = -weights.decay.float().exp() * F.softplus(a.float() + weights.bias.float())
    return g, b.sigmoid().float()


# -- prompts -----------------------------------------------------------------------------


def _prompts(
    x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights, sizes: DeltaSizes, states: DeltaStates | None,
    rows: PromptRows,
) -> torch.Tensor:  # fmt: skip
    """The rows of `rows`, and no others."""
    g, beta = _gates(b, a, weights)
    by_fla = triton_kernels_for(x) is not None and x.dtype in HALF and sizes.key_dim in FLA_DIMS
    if by_fla and (rule := fla_rule()) is not None:
        return _by_fla(rule, _convolve(x, weights.conv, states, rows, sizes.keys), g, beta, sizes, states, rows)
    q, k, v = heads_of_mixed(_convolve(x, weights.conv, states, rows)[-1], sizes)
    outs, first = [], 0
    for prompt, (size, has_state) in enumerate(zip(rows.sizes, rows.has_state, strict=True)):
        own, slot = slice(first, first + size), rows.slots[prompt : prompt + 1]
        before = states.recurrent.index_select(0, slot)[0].float() if states is not None and has_state else None
        out, memory = chunked_rule(q[own], k[own], v[own], g[own], beta[own], before)
        if states is not None:
            states.recurrent.index_copy_(0, slot, memory.unsqueeze(0).to(states.recurrent.dtype))
        outs.append(out.to(x.dtype))
        first += size
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, states: DeltaStates | None, rows: PromptRows, keys: int = 0
) -> list[torch.Tensor]:
    """The convolution and silu of all prompts: q, k and v [rows, channels]. Their last inputs are kept.

    Args:
        keys: channels of q, and of k; 0: v has them.
    """
    if states is not None and triton_kernels_for(x) is not None:
        from ..kernels import triton_delta

        return triton_delta.conv_prompts(
            x, states.conv, weight, rows.starts, rows.slots, rows.continued, rows.firsts, rows.sources, keys
        )
    outs, first, before = [], 0, weight.shape[-1] - 1
    for prompt, (size, has_state) in enumerate(zip(rows.sizes, rows.has_state, strict=True)):
        slot, own = rows.slots[prompt : prompt + 1], x[first : first + size]
        if states is not None and has_state:
            kept = states.conv.index_select(0, slot)[0].to(x.dtype)
        else:
            kept = x.new_zeros(before, x.shape[1])
        window = torch.cat((kept, own))
        if states is not None:
            states.conv.index_copy_(0, slot, window[-before:].unsqueeze(0).to(states.conv.dtype))
        outs.append(F.conv1d(window.t().unsqueeze(0), weight, groups=len(weight))[0].t())
        first += size
    mixed = F.silu((outs[0] if len(outs) == 1 else torch.cat(outs)).contiguous())
    return list(mixed.split([keys, keys, len(weight) - 2 * keys], dim=-1))


def chunked_rule(
    q: torch.Tensor,  # [tokens, heads, key_dim] float32, normalised and scaled
    k: torch.Tensor,  # [tokens, heads, key_dim] float32, normalised
    v: torch.Tensor,  # [tokens, heads, dim] float32
    g: torch.Tensor,  # [tokens, heads] float32
    beta: torch.Tensor,  # [tokens, heads] float32
    before: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule over one sequence, in chunks of tokens.

    Args:
        before: the state [heads, key_dim, dim] float32; None: zeros.

    Returns:
        ([tokens, heads, dim], the state behind them), in float32.
    """
    tokens, heads, key_dim = q.shape
    padding = -tokens % CHUNK
    q, k, v = (F.pad(part, (0, 0, 0, 0, 0, padding)) for part in (q, k, v))
    g, beta = (F.pad(part, (0, 0, 0, padding)).unflatten(0, (-1, CHUNK)).transpose(1, 2) for part in (g, beta))
    q, k, v = (part.unflatten(0, (-1, CHUNK)).transpose(1, 2) for part in (q, k, v))  # [chunks, heads, tokens, size]
    total = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    weighted = k * beta.unsqueeze(-1)
    # A token's correction depends on the corrections of earlier tokens in the chunk: a triangular system.
    system = (weighted @ k.transpose(-1, -2)) * between
    right = torch.cat((v * beta.unsqueeze(-1), weighted * total.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    corrections, reads = solved.split([v.shape[-1], key_dim], dim=-1)
    inside = (q @ k.transpose(-1, -2)) * between
    q = q * total.exp().unsqueeze(-1)
    k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    ends = total[..., -1].exp()[..., None, None]
    memory = v.new_zeros(heads, key_dim, v.shape[-1]) if before is None else before
    outs = []
    for chunk in range(len(q)):
        new = corrections[chunk] - reads[chunk] @ memory
        outs.append(q[chunk] @ memory + inside[chunk] @ new)
        memory = memory * ends[chunk] + k[chunk].transpose(-1, -2) @ new
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[:tokens], memory


# -- fla-core ----------------------------------------------------------------------------


@cache
def fla_rule() -> Any:
    """fla-core's `chunk_gated_delta_rule`; None if no version of `FLA_VERSIONS` can be imported."""
    try:
        found = tuple(int(part) for part in version("fla-core").split(".")[:2])
        if FLA_VERSIONS[0] <= found < FLA_VERSIONS[1]:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

            return chunk_gated_delta_rule
        why = f"its version {version('fla-core')} is not supported"
    except (ImportError, ValueError) as error:  # also of a package that is not installed
        why = str(error)
    logger.warning(
        "prompts are computed one by one: fla-core cannot be used (%s); %s installs it", why, install_command("fla")
    )
    return None


def _by_fla(
    rule: Any, mixed: list[torch.Tensor], g: torch.Tensor, beta: torch.Tensor, sizes: DeltaSizes, states: DeltaStates | None,
    rows: PromptRows,
) -> torch.Tensor:  # fmt: skip
    """All prompts at once. `mixed` are q, k and v behind the convolution."""
    q, k = (part.unflatten(-1, (sizes.key_heads, sizes.key_dim)).unsqueeze(0) for part in mixed[:2])
    v = mixed[2].unflatten(-1, (sizes.heads, sizes.dim)).unsqueeze(0)
    before = None
    if states is not None and any(rows.has_state):
        fresh = (rows.continued == 0)[:, None, None, None]
        before = states.recurrent.index_select(0, rows.slots).float().masked_fill(fresh, 0.0)
    out, memory = rule(
        q, k, v, g=g.unsqueeze(0), beta=beta.unsqueeze(0), initial_state=before, output_final_state=states is not None,
        use_qk_l2norm_in_kernel=True, cu_seqlens=rows.starts, cu_seqlens_cpu=rows.on_host,
    )  # fmt: skip
    if states is not None:
        states.recurrent.index_copy_(0, rows.slots, memory.to(states.recurrent.dtype))
    return out[0].to(mixed[2].dtype)


# -- norm with a gate --------------------------------------------------------------------


class GatedRMSNorm(nn.Module):
    """RMSNorm of each head, times silu of a gate."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), False)
        self.variance_epsilon = eps
        self._silu = invariant.silu if invariant.invariant_device() == "cpu" else F.silu

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Both [tokens, heads, size] -> the same shape, in fresh memory."""
        return self.normalize(hidden_states, gate)

    def normalize(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`forward` without a call to a module."""
        if x.ndim == 3 and triton_kernels_for(x) is not None:
            from ..kernels import triton_delta

            return triton_delta.gated_norm(x, gate, self.weight, self.variance_epsilon)
        normed = self.weight * F.rms_norm(x.float(), x.shape[-1:], None, self.variance_epsilon).to(x.dtype)
        return (normed * self._silu(gate.contiguous().float())).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"
