"""The torch backend's division of a pass into padded attention problems.

The requests of a flat batch differ in length, while torch's kernels take rectangles. `build_plan` packs requests of similar
lengths into groups. A group is one batched matmul for the scores and one for the values. All layers share its index tensors
and masks:

    4 decode rows (kv 70, 65, 80, 77) and prompts of 9, 16, 2000 tokens
        -> [4 x 1 query, 80 kv]   [2 x 16 queries, 16 kv]   [1 x 2000 queries, causal, no mask]

Padding keys repeat the request's own first key. Masked values are multiplied with zero. Zero times a NaN or an infinity, of another
request or of the dummy slot, would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..core.forward_batch import ForwardBatch
from .attention_backend import RadixAttention

# Lengths are rounded up: oneDNN compiles a matmul for each new shape, which takes about a millisecond.
QUERY_MULTIPLE, KV_MULTIPLE = 8, 16
# The scores of a group should fit in the CPU's cache.
MAX_SCORE_BYTES = 4 << 20
# A group may have as many padding scores as real ones. Below this many scores, padding costs less than another group.
SMALL_PAIRS = 4096


@dataclass(frozen=True)
class QueryChunk:
    """Consecutive query rows of one request, and the KV positions ``[start, end)`` that they may attend to."""

    request: int  # index in the batch
    row: int  # row of the first query, in the flat batch
    num: int
    prefix: int  # position of the first query
    start: int = 0

    @property
    def end(self) -> int:
        return self.prefix + self.num

    @property
    def kv_len(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class AttnGroup:
    """Query chunks that are computed as one padded problem."""

    # fmt: off
    size:     int                  # chunks
    q_len:    int                  # queries of each, padded
    kv_len:   int                  # keys of each, padded
    q_index:  torch.Tensor | None  # [size * q_len] rows of the flat batch; None: all of them, in order
    kv_index: torch.Tensor         # [size * kv_heads * kv_len] rows of K and V seen as [slots * kv_heads, head_dim]
    mask:     torch.Tensor | None  # added to scores [size * kv_heads, heads_per_kv * q_len, kv_len]; None: causal
    # fmt: on


@dataclass(frozen=True)
class AttnPlan:
    """The groups of a pass, and each token's row in their concatenated outputs (None: in order)."""

    groups: list[AttnGroup]
    inverse: torch.Tensor | None  # [tokens]


class DecodeRows(NamedTuple):
    """KV locations of a pass with one query for each request."""

    # fmt: off
    table: torch.Tensor  # [rows, positions] int32, slots
    rows:  torch.Tensor  # [requests] int64, rows of `table`
    lens:  torch.Tensor  # [requests] int32
    # fmt: on


def decode_rows(chunks: list[QueryChunk], forward_batch: ForwardBatch) -> DecodeRows | None:
    """The pass's `DecodeRows`; None if a request has several queries, or K and V are not in the pool."""
    table = forward_batch.req_to_token_pool
    if forward_batch.fresh_kv_only or table is None or any(chunk.num != 1 for chunk in chunks):
        return None
    if not len(chunks) == forward_batch.batch_size == forward_batch.num_tokens:  # another number of queries, or padding
        return None
    rows, lens = forward_batch.req_pool_indices.to(torch.int64), forward_batch.seq_lens.to(torch.int32)
    return DecodeRows(table.req_to_token, rows.contiguous(), lens.contiguous())


def token_rows(chunks: list[QueryChunk], forward_batch: ForwardBatch) -> DecodeRows:
    """The `DecodeRows` of a pass with each token row as a request of its own."""
    if (found := decode_rows(chunks, forward_batch)) is not None:
        return found
    device, owners, lens = forward_batch.input_ids.device, list[int](), list[int]()
    for chunk in chunks:
        owners += [chunk.request] * chunk.num
        lens += range(chunk.prefix + 1, chunk.end + 1)
    rows = torch.tensor(owners, dtype=torch.int64, device=device)
    ends = torch.tensor(lens, dtype=torch.int32, device=device)
    if forward_batch.fresh_kv_only:  # rows of the pass itself
        firsts = torch.zeros(forward_batch.batch_size, 1, dtype=torch.int32)
        for chunk in chunks:
            firsts[chunk.request] = chunk.row
        longest = torch.arange(max((chunk.end for chunk in chunks), default=0), dtype=torch.int32)
        return DecodeRows((firsts + longest).to(device), rows, ends)
    assert forward_batch.req_to_token_pool is not None, "prepare_forward_batch_* sets the pools"
    return DecodeRows(
        forward_batch.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.to(torch.int64)[rows], ends
    )


class PlanKey(NamedTuple):
    """The parameters of a layer that its plan depends on."""

    window: int | None
    capped: bool
    has_sinks: bool

    @classmethod
    def of(cls, layer: RadixAttention, window: int | None) -> PlanKey:
        """The key of a layer with this sliding window."""
        return cls(window, layer.logit_cap is not None, layer.sinks is not None)


@dataclass
class AttnMetadata:
    """A pass's query chunks, and their plans: one for each kind of layer."""

    chunks: list[QueryChunk]
    decode: DecodeRows | None = None
    """Rows for the CPU's decode kernel, if each request has one query over the KV pool."""
    tokens: DecodeRows | None = None
    """One entry for each token row, in batch-invariant mode."""
    plans: dict[PlanKey, AttnPlan] = field(default_factory=dict)


@dataclass
class StaticDecode:
    """A decode pass with shapes that do not depend on lengths: each row gathers `kv_len` positions, and masks unused ones."""

    kv_len: int
    plans: dict[PlanKey, AttnPlan] = field(default_factory=dict)


def make_chunks(forward_batch: ForwardBatch) -> list[QueryChunk]:
    """One query chunk for each request with rows in the pass.
    Raises ValueError: contradictory lengths, or `fresh_kv_only` with a prefix."""
    seq_lens = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
    chunks = []
    for request, ((row, num), length) in enumerate(zip(forward_batch.batch_groups, seq_lens.tolist(), strict=True)):
        if length < num:
            raise ValueError(f"request {request} of the batch has seq_len {length}, but {num} new tokens")
        if forward_batch.fresh_kv_only and length > num:
            raise ValueError(
                f"request {request} of the batch has {length - num} tokens in the KV pool, but fresh_kv_only attends to "
                "this pass's own K and V alone; compute the whole sequence in one pass"
            )
        if num:
            chunks.append(QueryChunk(request, row, num, length - num))
    return chunks


def build_plan(
    chunks: list[QueryChunk], layer: RadixAttention, forward_batch: ForwardBatch, dtype: torch.dtype
) -> AttnPlan:
    """The plan for layers with the window, soft cap, sinks and heads of `layer`. Masks are `dtype`, or float32 with a soft cap."""
    window = effective_window(chunks, layer)
    capped = layer.logit_cap is not None
    dtype = torch.float32 if capped else dtype
    max_pairs = MAX_SCORE_BYTES // (layer.num_heads * dtype.itemsize)
    lone, pieces = [], []
    for chunk in chunks:
        if chunk.num * chunk.kv_len <= max_pairs:
            pieces.append(_narrow(chunk, window))
        elif chunk.prefix == 0 and window is None and not capped and layer.sinks is None:
            lone.append([chunk])
        else:
            pieces.extend(_split(chunk, window, max_pairs))
    packed = _pack([p for p in pieces if p.num == 1], max_pairs) + _pack([p for p in pieces if p.num > 1], max_pairs)
    groups = [_build_group(group, layer, forward_batch, window, dtype, causal=False) for group in packed]
    groups += [_build_group(group, layer, forward_batch, window, dtype, causal=True) for group in lone]
    if len(groups) == 1 and all(chunk.num == groups[0].q_len for chunk in chunks):
        return AttnPlan([replace(groups[0], q_index=None)], None)
    return AttnPlan(groups, _inverse(packed + lone, groups, forward_batch))


def effective_window(chunks: list[QueryChunk], layer: RadixAttention) -> int | None:
    """The layer's sliding window; None if it hides no position of this pass."""
    window = layer.sliding_window
    return window if window is not None and any(chunk.end > window for chunk in chunks) else None


def _narrow(chunk: QueryChunk, window: int | None) -> QueryChunk:
    return chunk if window is None else replace(chunk, start=max(0, chunk.prefix - window + 1))


def _split(chunk: QueryChunk, window: int | None, max_pairs: int) -> list[QueryChunk]:
    """Parts of a long chunk, each with at most `max_pairs` scores, but at least `QUERY_MULTIPLE` queries."""
    step = max(max_pairs // chunk.end // QUERY_MULTIPLE, 1) * QUERY_MULTIPLE
    return [
        _narrow(
            replace(
                chunk,
                row=chunk.row + done,
                num=min(step, chunk.num - done),
                prefix=chunk.prefix + done,
            ),
            window,
        )
        for done in range(0, chunk.num, step)
    ]


def _pack(chunks: list[QueryChunk], max_pairs: int) -> list[list[QueryChunk]]:
    """Groups of chunks with similar lengths. Each group has at most `max_pairs` scores, and at most half of them padding."""
    groups: list[list[QueryChunk]] = []
    q_len = kv_len = real = 0
    for chunk in sorted(chunks, key=lambda chunk: ((chunk.num - 1).bit_length(), chunk.kv_len)):
        q_len, kv_len = max(q_len, chunk.num), max(kv_len, chunk.kv_len)
        real += chunk.num * chunk.kv_len
        padded = q_len * kv_len * (len(groups[-1]) + 1 if groups else 1)
        if groups and padded <= max_pairs and padded <= max(2 * real, SMALL_PAIRS):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
            q_len, kv_len, real = chunk.num, chunk.kv_len, chunk.num * chunk.kv_len
    return [sorted(group, key=lambda chunk: chunk.row) for group in groups]


def _build_group(
    chunks: list[QueryChunk],
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    window: int | None,
    dtype: torch.dtype,
    causal: bool,
) -> AttnGroup:
    device = forward_batch.input_ids.device
    q_len = max(chunk.num for chunk in chunks)
    kv_len = max(chunk.kv_len for chunk in chunks)
    if not causal:
        q_len = q_len if q_len == 1 else _round_up(q_len, QUERY_MULTIPLE)
        kv_len = _round_up(kv_len, KV_MULTIPLE)
    fields = torch.tensor([[s.request, s.row, s.num, s.prefix, s.start] for s in chunks], dtype=torch.int64)
    request, row, num, prefix, start = fields.to(device, non_blocking=True).unsqueeze(2).unbind(1)  # [size, 1] each
    queries = torch.arange(q_len, device=device)
    kv_positions = start + torch.arange(kv_len, device=device)  # [size, kv_len]
    slots = _slots(forward_batch, request, row - prefix, kv_positions)
    slots = torch.where(kv_positions < prefix + num, slots, slots[:, :1])
    heads = torch.arange(layer.num_kv_heads, device=device).unsqueeze(1)
    kv_index = slots.unsqueeze(1) * layer.num_kv_heads + heads  # [size, kv_heads, kv_len]
    mask = None
    if not causal:
        same = len({(chunk.prefix, chunk.start) for chunk in chunks}) == 1
        rows = slice(0, 1) if same else slice(None)
        mask = _mask(prefix[rows] + queries, kv_positions[rows], layer, window, dtype)
    q_index = row + torch.minimum(queries, num - 1)  # padding repeats the last row
    return AttnGroup(len(chunks), q_len, kv_len, q_index.flatten(), kv_index.flatten(), mask)


def build_static_plan(kv_len: int, layer: RadixAttention, forward_batch: ForwardBatch, dtype: torch.dtype) -> AttnPlan:
    """The plan of a decode pass. It is made from tensors on the device only, so that a CUDA graph can capture it."""
    bs, device = forward_batch.batch_size, forward_batch.input_ids.device
    last = forward_batch.seq_lens.to(torch.int64).unsqueeze(1) - 1  # [bs, 1], the query's position
    rows = torch.arange(bs, device=device).unsqueeze(1)
    positions = torch.arange(kv_len, device=device).expand(bs, -1)
    slots = _slots(forward_batch, rows, last, positions)
    slots = torch.where(positions <= last, slots, slots[:, :1])
    heads = torch.arange(layer.num_kv_heads, device=device).unsqueeze(1)
    kv_index = slots.unsqueeze(1) * layer.num_kv_heads + heads  # [bs, kv_heads, kv_len]
    dtype = torch.float32 if layer.logit_cap is not None else dtype
    mask = _mask(last, positions, layer, layer.sliding_window, dtype)
    return AttnPlan([AttnGroup(bs, 1, kv_len, None, kv_index.flatten(), mask)], None)


def _slots(
    forward_batch: ForwardBatch, request: torch.Tensor, first_row: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Row of K and V for each of `positions` [size, kv_len]. Arbitrary after the end of a request."""
    if forward_batch.fresh_kv_only:
        return first_row + positions
    assert forward_batch.req_to_token_pool is not None, "prepare_forward_batch_* sets the pools"
    table = forward_batch.req_to_token_pool.req_to_token
    return table[forward_batch.req_pool_indices[request], positions.clamp(max=table.shape[1] - 1)]


def _mask(
    q_positions: torch.Tensor,  # [size or 1, q_len]
    kv_positions: torch.Tensor,  # [size or 1, kv_len]
    layer: RadixAttention,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """0 where a query may attend, -inf elsewhere: [size * kv_heads or 1, heads_per_kv * q_len or 1, kv_len].

    Padding queries have positions after the request's last query. They see at least one key, so no row is all -inf (NaN).
    """
    back = q_positions.unsqueeze(2) - kv_positions.unsqueeze(1)  # [size, q_len, kv_len]
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    if mask.shape[1] > 1:
        mask = mask.repeat(1, layer.num_heads // layer.num_kv_heads, 1)
    return mask if mask.shape[0] == 1 else mask.repeat_interleave(layer.num_kv_heads, 0)


def _inverse(packed: list[list[QueryChunk]], groups: list[AttnGroup], forward_batch: ForwardBatch) -> torch.Tensor:
    inverse = torch.empty(forward_batch.num_request_tokens, dtype=torch.int64)
    base = 0
    for chunks, group in zip(packed, groups, strict=True):
        for chunk in chunks:
            inverse[chunk.row : chunk.row + chunk.num] = torch.arange(base, base + chunk.num)
            base += group.q_len
    return inverse.to(forward_batch.input_ids.device, non_blocking=True)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
