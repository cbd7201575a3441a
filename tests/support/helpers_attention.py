"""Paged batches built by hand, and a float64 attention to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pymllm_interp.attention import AttentionBackend, RadixAttention
from pymllm_interp.core.forward_batch import ForwardBatch, ForwardMode
from pymllm_interp.mem_cache import KVPool, ReqToTokenPool, TokenToKVPoolAllocator


@dataclass
class Sequences:
    """Whole sequences with random q, k and v, and a paged pool of which only the requests' own slots are written.

    Pages come shuffled. Every slot outside page 0 starts as NaN, so a read of a slot that is not the request's shows.
    """

    lengths: list[int]
    layer: RadixAttention
    pool: KVPool
    table: ReqToTokenPool
    slots: list[list[int]]
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        layer: RadixAttention,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        device: str = "cpu",
        seed: int = 0,
    ) -> Sequences:
        generator = torch.Generator().manual_seed(seed)

        def randn(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, layer.head_dim, generator=generator).to(device, dtype)

        pages = [-(-length // page_size) for length in lengths]
        size = (sum(pages) + 3) * page_size
        pool = KVPool(layer.layer_id + 1, size, layer.num_kv_heads, layer.head_dim, dtype, device, page_size)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[page_size:] = float("nan")
        allocator = TokenToKVPoolAllocator(size, page_size)
        free = allocator.alloc_pages(allocator.num_pages) or []
        free = [free[i] for i in torch.randperm(len(free), generator=generator).tolist()]
        table = ReqToTokenPool(len(lengths) + 2, max(lengths) + 3, device)
        slots = []
        for length, count in zip(lengths, pages, strict=True):
            row = table.alloc()
            assert row is not None and row == len(slots) + 1
            own, free = free[:count], free[count:]
            slots.append(allocator.slots_of(own, 0, length).tolist())
            table.write(row, 0, slots[-1])
        table.apply_staged_writes()
        q, k, v = (
            [randn(length, heads) for length in lengths]
            for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        return cls(list(lengths), layer, pool, table, slots, q, k, v)

    def batch(self, ranges: dict[int, tuple[int, int]], mode: ForwardMode | None = None) -> ForwardBatch:
        """A pass over positions ``[start, stop)`` of each request, in the order of `ranges`."""
        device = self.pool.device
        sizes = [stop - start for start, stop in ranges.values()]
        decode = all(size == 1 for size in sizes) if mode is None else mode.is_decode()
        lens = torch.tensor([stop for _, stop in ranges.values()], dtype=torch.int32)
        slots = [slot for i, (start, stop) in ranges.items() for slot in self.slots[i][start:stop]]
        return ForwardBatch(
            forward_mode=mode or (ForwardMode.DECODE if decode else ForwardMode.EXTEND),
            batch_size=len(ranges),
            input_ids=torch.zeros(sum(sizes), dtype=torch.int64, device=device),
            req_pool_indices=torch.tensor([i + 1 for i in ranges], dtype=torch.int64, device=device),
            seq_lens=lens.to(device),
            out_cache_loc=torch.tensor(slots, dtype=torch.int64, device=device),
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens,
            extend_num_tokens=None if decode else sum(sizes),
            extend_seq_lens_cpu=None if decode else sizes,
            extend_prefix_lens_cpu=None if decode else [start for start, _ in ranges.values()],
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
        )

    def rows(self, ranges: dict[int, tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The flat q, k and v of a pass."""
        q, k, v = (
            torch.cat([x[i][start:stop] for i, (start, stop) in ranges.items()]) for x in (self.q, self.k, self.v)
        )
        return q, k, v

    def run(
        self, backend: AttentionBackend, ranges: dict[int, tuple[int, int]], mode: ForwardMode | None = None
    ) -> dict[int, torch.Tensor]:
        """The outputs of a pass over `ranges`, by request: [stop - start, heads * head_dim]."""
        batch = self.batch(ranges, mode)
        backend.init_forward_metadata(batch)
        out = backend.forward(*self.rows(ranges), self.layer, batch)
        return dict(zip(ranges, out.split([stop - start for start, stop in ranges.values()]), strict=True))

    def fill(self, prefixes: dict[int, int]) -> None:
        """Write the K and V of the first positions of each request to the pool, without a backend."""
        for i, prefix in prefixes.items():
            slots = torch.tensor(self.slots[i][:prefix], dtype=torch.int64, device=self.pool.device)
            self.pool.set_kv(self.layer.layer_id, slots, self.k[i][:prefix], self.v[i][:prefix])

    def expected(self, i: int, start: int, stop: int) -> torch.Tensor:
        """What positions ``[start, stop)`` of request `i` give, in float64: [stop - start, heads * head_dim]."""
        return reference_attention(self.q[i][:stop], self.k[i][:stop], self.v[i][:stop], self.layer)[start:]


def make_layer(num_heads: int, num_kv_heads: int, head_dim: int, **options: object) -> RadixAttention:
    """The second layer of a model, so that a backend that writes to the first one fails."""
    layer = RadixAttention(1, num_heads, num_kv_heads, head_dim, scaling=head_dim**-0.5)
    return replace(layer, **options)  # pyright: ignore[reportArgumentType]


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
    """Causal attention of one whole sequence, one query at a time, in float64 on the CPU."""
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    kv_head = torch.arange(layer.num_heads) // (layer.num_heads // layer.num_kv_heads)
    k, v, rows = k[:, kv_head], v[:, kv_head], []
    for t in range(q.shape[0]):
        first = 0 if layer.sliding_window is None else max(0, t - layer.sliding_window + 1)
        scores = torch.einsum("jhd,hd->hj", k[first : t + 1], q[t]) * layer.scaling
        if layer.logit_cap is not None:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks[:, None].double().cpu()), 1)
        weights = torch.softmax(scores, 1)[:, : t + 1 - first]
        rows.append(torch.einsum("hj,jhd->hd", weights, v[first : t + 1]))
    return torch.stack(rows).flatten(1)
