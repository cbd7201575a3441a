# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
# As in triton_kernels.py.
"""Triton kernels for mixtures of experts: routing, and products of rows sorted by expert.

An *entry* is one choice of a token: entry ``token * top_k + choice``. `sort_by_expert` lays the entries out in tiles of one expert
each. Padding fills an expert's last tile. `expert_product` multiplies each tile by its expert's weight. The number of its tiles
follows from the number of tokens, so CUDA graphs can replay it. `combine` adds a token's entries in the order of its choices.
So a row's result depends neither on the other rows nor on the order of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import Launcher, grid_wait, launch_dependents

ENTRY_BLOCK, COMBINE_BLOCK = 1024, 1024
Product = Callable[..., torch.Tensor]


class Tiling(NamedTuple):
    """Sizes of an `expert_product`: entries and channels of a block, channels of x in a step, warps, and stages."""

    entries: int
    channels: int
    depth: int
    warps: int
    stages: int


WIDE_STAGES = 2
"""Stages in float32."""
TILINGS = (Tiling(16, 32, 256, 4, 3), Tiling(32, 128, 128, 8, 3), Tiling(64, 128, 64, 4, 4), Tiling(128, 128, 64, 8, 3))


@triton.jit
def _route(
    logits, correction, scores, ids, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    NORMALISE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    value = tl.load(logits + row * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == "sigmoid":
        weight = 1.0 / (1.0 + tl.exp(-value))
        rank = weight + tl.load(correction + expert, mask=inside, other=0.0)
    else:
        weight = tl.where(inside, tl.exp(value - tl.max(value)), 0.0)
        if SCORING == "softmax":
            weight = weight / tl.sum(weight)
        rank = weight if SCORING == "softmax" else value
    total = tl.sum(tl.where(inside, weight, 0.0))  # NaN, if any logit is: the row's scores are, too
    left = tl.where(inside, tl.where(rank > -3e38, rank, -3e38), float("-inf"))
    choice = tl.arange(0, CHOICES)
    best_of = tl.zeros((CHOICES,), tl.float32)
    id_of = tl.zeros((CHOICES,), tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(left)
        which = tl.min(tl.where(left == best, expert, BLOCK))
        best_of = tl.where(choice == k, tl.sum(tl.where(expert == which, weight, 0.0)), best_of)
        id_of = tl.where(choice == k, which, id_of)
        left = tl.where(expert == which, float("-inf"), left)
    if NORMALISE:
        best_of = best_of / (tl.sum(best_of) + 1e-20)
    best_of = best_of * SCALE + total * 0.0
    place = row * TOP_K + choice
    tl.store(scores + place, best_of.to(scores.dtype.element_ty), mask=choice < TOP_K)
    tl.store(ids + place, id_of, mask=choice < TOP_K)


@triton.jit(do_not_specialize=["num_entries"])
def _count(ids, counts, num_entries, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    grid_wait(PDL)
    expert = tl.program_id(0)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        count += (tl.load(ids + entry, mask=entry < num_entries, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count))


@triton.jit(do_not_specialize=["num_entries", "num_tiles"])
def _place(
    ids, counts, order, owners, num_entries, num_tiles, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERT_BLOCK)
    tiles = (tl.load(counts + others, mask=others < EXPERTS, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(others < expert, tiles, 0))
    end = first + tl.sum(tl.where(others == expert, tiles, 0))
    for tile in range(first, end):
        tl.store(owners + tile, expert)
    if expert == EXPERTS - 1:
        for tile in range(end, num_tiles):
            tl.store(owners + tile, -1)
    at = first * TILE
    for start in range(0, num_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        own = (tl.load(ids + entry, mask=entry < num_entries, other=-1) == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(own) - 1, entry, mask=own > 0)
        at += tl.sum(own)
    padding = at + tl.arange(0, TILE)
    tl.store(order + padding, num_entries, mask=padding < end * TILE)


@triton.jit
def gated(gate, up, alpha, limit, GATE: tl.constexpr, dtype: tl.constexpr):
    """The result of a first product in `dtype`, from float32 sums, rounded as the products of modules are."""
    gate = gate.to(dtype)
    if GATE == "silu":
        gate, up = gate.to(tl.float32), up.to(dtype).to(tl.float32)
        gate = ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)
    elif GATE == "clamped":
        gate, up = gate.to(tl.float32), up.to(dtype).to(tl.float32)
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        gate = ((up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))).to(dtype)
    return gate


@triton.jit(do_not_specialize=["num_entries", "alpha", "limit"])
def _product(
    x, weight, bias, scores, order, owners, out, num_entries, alpha, limit, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, ENTRIES: tl.constexpr,
    CHANNELS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    blocks: tl.constexpr = (N + CHANNELS - 1) // CHANNELS
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    entry = tl.load(order + tile * ENTRIES + tl.arange(0, ENTRIES)).to(tl.int64)
    real = entry < num_entries
    row = entry // TOP_K
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    depth = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * K + depth[None, :]
    # Rows of gate and up: next to each other, or all of gate before all of up.
    step: tl.constexpr = 2 if GATE == "clamped" else 1
    to_up: tl.constexpr = 1 if GATE == "clamped" else N
    first = expert * (N if GATE == "" else 2 * N) + channel * step
    weight_at = weight + first[None, :] * K + depth[:, None]
    known = real[:, None], (channel < N)[None, :]
    sums = tl.zeros((ENTRIES, CHANNELS), tl.float32)
    up_sums = tl.zeros((ENTRIES, CHANNELS), tl.float32)
    for start in range(0, K, DEPTH):
        here = start + depth < K
        rows = tl.load(x_at, mask=known[0] & here[None, :], other=0.0)
        columns = tl.load(weight_at, mask=known[1] & here[:, None], other=0.0)
        sums = tl.dot(rows, columns, sums, input_precision="ieee")
        if GATE != "":
            columns = tl.load(weight_at + to_up * K, mask=known[1] & here[:, None], other=0.0)
            up_sums = tl.dot(rows, columns, up_sums, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    if BIASED:
        sums += tl.load(bias + first, mask=channel < N, other=0.0).to(tl.float32)[None, :]
        if GATE != "":
            up_sums += tl.load(bias + first + to_up, mask=channel < N, other=0.0).to(tl.float32)[None, :]
    value = gated(sums, up_sums, alpha, limit, GATE, dtype)
    if SCALED:
        score = tl.load(scores + entry, mask=real, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * score[:, None]).to(dtype)
    tl.store(out + entry[:, None] * N + channel[None, :], value, mask=known[0] & known[1])


@triton.jit
def _combine(parts, out, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    grid_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(parts + (row * TOP_K + k) * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)


_route_launch = Launcher(_route, pdl=True, enable_fp_fusion=False)
_count_launch, _place_launch = Launcher(_count, pdl=True), Launcher(_place, pdl=True)
_product_launches = {
    stages: Launcher(_product, pdl=True, num_stages=stages) for stages in {WIDE_STAGES, *(t.stages for t in TILINGS)}
}
_combine_launch = Launcher(_combine, pdl=True)


def route(
    logits: torch.Tensor, top_k: int, normalise: bool, dtype: torch.dtype, scoring: str = "softmax",
    correction: torch.Tensor | None = None, scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(scores [tokens, top_k] in `dtype`, ids [tokens, top_k] int64) of logits [tokens, experts].

    Args:
        normalise: the scores of a token add up to 1.
        scoring: "softmax": the largest values of the softmax. "chosen": the largest logits, and their exponentials; with
            `normalise` the softmax of only these. "sigmoid": the largest sums of sigmoid and correction, and their sigmoids.
        correction: [experts] float32, with "sigmoid".
        scale: factor of the scores.
    """
    logits = logits.contiguous()
    tokens, experts = logits.shape
    scores = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        block, choices = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
        tensors = logits, logits if correction is None else correction, scores, ids
        _route_launch((tokens, 1, 1), tensors, (), (experts, top_k, scoring, normalise, scale, block, choices), 1)
    return scores, ids


class Sorted(NamedTuple):
    """Entries in tiles of one expert each.

    Attributes:
        order: [tiles * tiling.entries] int32, entries; the number of entries at padding.
        owners: [tiles] int32, the expert of a tile; -1: no entry is in it.
    """

    order: torch.Tensor
    owners: torch.Tensor
    tiling: Tiling


def stages_of(tiling: Tiling, dtype: torch.dtype) -> int:
    """Steps of a product that are on their way at once. Those in float32 take twice the shared memory."""
    return tiling.stages if dtype.itemsize < 4 else WIDE_STAGES


def tiling_of(entries: int, experts: int, tilings: Sequence[Tiling] = TILINGS) -> Tiling:
    """The tiling for this many entries: if they are spread evenly, half a tile for each expert."""
    return next((tiling for tiling in tilings if 2 * entries <= tiling.entries * experts), tilings[-1])


def sort_by_expert(ids: torch.Tensor, experts: int, tilings: Sequence[Tiling] = TILINGS) -> Sorted:
    """Lay the entries of ids [tokens, top_k] out by expert."""
    entries = ids.numel()
    tiling = tiling_of(entries, experts, tilings)
    tiles = min(entries, experts + entries // tiling.entries)  # each expert pads one tile at most
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(tiles * tiling.entries, dtype=torch.int32, device=ids.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    grid, block = (experts, 1, 1), min(ENTRY_BLOCK, triton.next_power_of_2(entries))
    _count_launch(grid, (ids, counts), (entries,), (block,), 4)
    sizes = experts, triton.next_power_of_2(experts), tiling.entries, block
    _place_launch(grid, (ids, counts, order, owners), (entries, tiles), sizes, 4)
    return Sorted(order, owners, tiling)


def expert_product(
    x: torch.Tensor, weight: torch.Tensor, by_expert: Sorted, entries: int, gate: str, scores: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, clamp: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:  # fmt: skip
    """Each entry's row of x times the weight of its expert: [entries, out].

    Args:
        x: [tokens, in], or a row for each entry [entries, in]; contiguous.
        weight: [experts, out, in]; with a `gate` [experts, 2 * out, in].
        gate: "": none. "silu": ``silu(gate) * up``, all rows of gate before all of up. "clamped": `layers.moe.clamped_swiglu`.
        scores: [tokens, top_k], factors of the entries; None: 1.
        bias: [experts, rows of weight].
        clamp: alpha and limit of a "clamped" gate.
    """
    channels = weight.shape[1] // 2 if gate else weight.shape[1]
    out = torch.empty(entries, channels, dtype=x.dtype, device=x.device)
    tiling = by_expert.tiling
    grid = (len(by_expert.owners) * triton.cdiv(channels, tiling.channels), 1, 1)
    constants = channels, weight.shape[2], entries // len(x), gate, bias is not None, scores is not None, *tiling[:3]
    others = x if bias is None else bias, x if scores is None else scores
    tensors = x, weight, *others, by_expert.order, by_expert.owners, out
    _product_launches[stages_of(tiling, x.dtype)](grid, tensors, (entries, *clamp), constants, tiling.warps)
    return out


def combine(parts: torch.Tensor, top_k: int) -> torch.Tensor:
    """The sum of each token's entries, parts [tokens * top_k, size] -> [tokens, size], in float32 inside."""
    entries, size = parts.shape
    out = torch.empty(entries // top_k, size, dtype=parts.dtype, device=parts.device)
    block = min(COMBINE_BLOCK, triton.next_power_of_2(size))
    _combine_launch((entries // top_k, triton.cdiv(size, block), 1), (parts, out), (), (size, top_k, block), 4)
    return out


def experts(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, num_experts: int, first: Product, last: Product,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None, clamp: tuple[float, float] | None = None,
    tilings: Sequence[Tiling] = TILINGS,
) -> torch.Tensor:  # fmt: skip
    """x [tokens, hidden] through the experts that ids [tokens, top_k] name, weighted by scores [tokens, top_k].

    Args:
        first, last: `expert_product` with the weights of gate and up, and of down.
        biases: biases of both products, [experts, rows].
        clamp: alpha and limit of a "clamped" gate; None: the gate is "silu" (`expert_product`).
    """
    if not len(x):
        return torch.empty_like(x)
    first_bias, last_bias = biases or (None, None)
    found = {"by_expert": sort_by_expert(ids, num_experts, tilings), "entries": ids.numel()}
    gate = "silu" if clamp is None else "clamped"
    inner = first(x, **found, gate=gate, bias=first_bias, clamp=clamp or (0.0, 0.0))
    return combine(last(inner, **found, gate="", scores=scores, bias=last_bias), ids.shape[1])
