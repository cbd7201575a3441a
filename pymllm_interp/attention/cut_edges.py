"""Attention with cut edges: some queries of a request do not attend to some of its keys.

Edges within an image may be open in both directions (Gemma 3). Captured patterns are computed here, too (patterns.py).

The kernels of the backends have no such mask. They compute all rows as usual, so that other requests keep their bits. Then the rows
and heads with cut edges are computed again here, in plain torch over the request's pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..core.forward_batch import ForwardBatch
from ..mem_cache.memory_pool import read_rows
from ..utils.upload import upload
from .attention_backend import RadixAttention
from .patterns import PatternFunction, PatternRead, attend_visible, hidden_keys, pattern_by_row, pattern_of

MAX_SCORES = 1 << 26
"""Most scores, and most values of K, that are computed with at once."""


class Cut(NamedTuple):
    """Edges of one request, from each of `queries` to each of `keys`."""

    layers: frozenset[int]
    heads: frozenset[int] | None
    """Query heads; None: all."""
    queries: np.ndarray
    """[rows of the request] bool."""
    keys: np.ndarray
    """[positions up to the request's last row] bool."""


class CutHeads(NamedTuple):
    """Heads with the same cut edges at a layer."""

    # fmt: off
    heads:  torch.Tensor  # [heads] int64, query heads
    rows:   torch.Tensor  # [queries] int64, rows of the flat batch with cut edges
    hidden: torch.Tensor  # [queries, keys] bool: cut edges, later positions, and positions before the sliding window
    # fmt: on


class RequestCuts:
    """The cut edges of one request in a pass, and the patterns that it captures.

    Args:
        index: position in the batch.
        first_row: first row in the flat batch.
        start: position of that row.
        cuts: cut edges, unordered.
        reads: layer -> the rows for which attention patterns are captured.
        spans: (start, stop) of positions that attend to each other in both directions, beyond a sliding window, too (Gemma 3).
    """

    def __init__(
        self, index: int, first_row: int, start: int, num_rows: int, cuts: list[Cut], reads: Mapping[int, PatternRead],
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.index, self.first_row, self.start, self.num_rows = index, first_row, start, num_rows
        self.cuts, self.reads, self.spans = cuts, reads, spans
        self.length = start + num_rows
        self._heads: dict[tuple[tuple[int, ...], int | None], list[CutHeads]] = {}
        self._slots: torch.Tensor | None = None

    def at(self, layer: int, num_heads: int, window: int | None, device: torch.device) -> list[CutHeads]:
        """The heads of a layer that have cut edges.

        Args:
            window: the layer's sliding window.
        """
        acting = tuple(i for i, cut in enumerate(self.cuts) if layer in cut.layers)
        if (acting, window) not in self._heads:
            self._heads[acting, window] = self._heads_with(acting, num_heads, window, device)
        return self._heads[acting, window]

    def _heads_with(
        self, acting: tuple[int, ...], num_heads: int, window: int | None, device: torch.device
    ) -> list[CutHeads]:
        heads_by_cuts: dict[tuple[int, ...], list[int]] = {}
        for head in range(num_heads):
            of_head = tuple(i for i in acting if (heads := self.cuts[i].heads) is None or head in heads)
            if of_head or self.spans:
                heads_by_cuts.setdefault(of_head, []).append(head)
        found, opened = [], self._opened()
        for of_head, heads in heads_by_cuts.items():
            cuts = [self.cuts[i] for i in of_head]
            (queries,) = np.logical_or.reduce([opened.any(1), *(cut.queries for cut in cuts)]).nonzero()
            back = (self.start + queries)[:, None] - np.arange(self.length)
            hidden = back < 0
            if window is not None:
                hidden |= back >= window
            hidden &= ~opened[queries]
            for cut in cuts:
                hidden |= cut.queries[queries, None] & cut.keys
            rows = self.first_row + queries
            found.append(CutHeads(*upload(device, np.array(heads, dtype=np.int64), rows, hidden)))
        return found

    def _opened(self) -> np.ndarray:
        """The edges within spans: [rows, keys] bool."""
        opened = np.zeros((self.num_rows, self.length), dtype=bool)
        for start, stop in self.spans:
            opened[max(start - self.start, 0) : stop - self.start, start:stop] = True
        return opened

    def opened(self, device: torch.device) -> torch.Tensor | None:
        """The edges within spans [rows, keys] bool; None without spans."""
        return upload(device, self._opened())[0] if self.spans else None

    def read_pattern(self, q: torch.Tensor, k: torch.Tensor, layer: RadixAttention, pattern: PatternFunction) -> None:
        """Compute the patterns that are captured at a layer.

        Args:
            q: [tokens, heads, head_dim] of the flat batch.
            k: [keys, kv_heads, head_dim] of the request.
            pattern: computes a pattern.
        """
        read = self.reads.get(layer.layer_id)
        if read is None:
            return
        all_heads = range(layer.num_heads) if read.heads is None else read.heads
        rows, heads = upload(q.device, read.rows, np.array(all_heads, dtype=np.int64))
        hidden = hidden_keys(self.start + rows, self.length, layer.sliding_window).unsqueeze(0)
        if (opened := self.opened(q.device)) is not None:
            hidden = hidden & ~opened[rows]
        cut = self.hidden(layer.layer_id, layer.num_heads, layer.sliding_window, q.device)
        if cut is not None:
            hidden = hidden | cut[0][heads][:, rows]
        read.keep(pattern(q[self.first_row + rows], k, hidden, heads, layer))

    def keep_pattern(self, layer: int, weights: torch.Tensor) -> None:
        """Keep the captured part of a layer's weights [1, heads, queries, keys] of the request, which its modules computed."""
        read = self.reads.get(layer)
        if read is not None:
            (rows,) = upload(weights.device, read.rows)
            heads = slice(None) if read.heads is None else list(read.heads)
            found = weights[0].detach()[heads][:, rows]
            read.keep(F.pad(found, (self.length - found.shape[-1], 0)))  # keys before a sliding window may be left out

    def hidden(self, layer: int, num_heads: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """The hidden edges of rows with cuts: [1, heads, queries, keys] bool; None without cuts."""
        found = self.at(layer, num_heads, window, device)
        if not found:
            return None
        hidden = torch.zeros(num_heads, self.num_rows, self.length, dtype=torch.bool, device=device)
        for cut in found:
            hidden[cut.heads.unsqueeze(1), cut.rows - self.first_row] = cut.hidden
        return hidden.unsqueeze(0)

    def place(self, slots: torch.Tensor) -> None:
        """Set `slots`, for K and V outside of a pool."""
        self._slots = slots

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        """Rows [keys] of K and V at the request's positions: rows of the pool, or of the pass."""
        if self._slots is None:
            if batch.fresh_kv_only:
                first = self.first_row - self.start
                self._slots = torch.arange(first, first + self.length, device=batch.input_ids.device)
            else:
                table = batch.req_to_token_pool
                assert table is not None, "prepare_forward_batch_* sets the pools"
                row = table.req_to_token.index_select(0, batch.req_pool_indices[self.index : self.index + 1])[0]
                self._slots = row[: self.length].to(torch.int64)
        return self._slots


@dataclass(frozen=True)
class PassCuts:
    """The cut edges and the captured patterns of a pass."""

    requests: list[RequestCuts]

    def act_at(self, layer: int) -> bool:
        """Whether a request cuts edges, or captures a pattern, at the layer."""
        return any(
            request.spans or layer in request.reads or any(layer in cut.layers for cut in request.cuts)
            for request in self.requests
        )

    def joined(self, others: PassCuts | None) -> PassCuts:
        """These cuts, and the spans of others."""
        known = {request.index: request for request in self.requests}
        for other in others.requests if others is not None else ():
            if (own := known.setdefault(other.index, other)) is not other:
                own.spans = other.spans
        return PassCuts(list(known.values()))

    def apply(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """A layer's attention, with the rows of cut edges computed again. Patterns that are captured are kept.

        Args:
            out: the backend's, [tokens, heads * head_dim].
            q: [tokens, heads, head_dim], rotated.
            k, v: [slots, kv_heads, head_dim] of the pool, or [tokens, ...] if a pass attends to its own K and V.
        """
        pool = None if batch.fresh_kv_only else batch.token_to_kv_pool
        assert batch.attn_backend is not None, "prepare_forward_batch_* sets the attention backend"
        by_row = batch.attn_backend.by_row and not torch.is_grad_enabled()
        attend = attend_by_row if by_row else _attend
        stored = tuple(zip((k, v), (1.0, 1.0) if pool is None else pool.scales(layer.layer_id), strict=True))
        for request in self.requests:
            for cut in request.at(layer.layer_id, layer.num_heads, layer.sliding_window, q.device):
                keys, values = (read_rows(x, request.slots(batch), q.dtype, scale) for x, scale in stored)
                z = attend(q[cut.rows], keys, values, cut, layer)
                shaped = out.view(-1, layer.num_heads, layer.head_dim)
                out = shaped.index_put((cut.rows.unsqueeze(1), cut.heads), z).view_as(out)
            if layer.layer_id in request.reads:
                with torch.no_grad():
                    keys = read_rows(k, request.slots(batch), q.dtype, stored[0][1])
                    request.read_pattern(q, keys, layer, pattern_by_row if by_row else pattern_of)
        return out

    def hidden(self, layer: int, num_heads: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """`RequestCuts.hidden` of the only request."""
        (request,) = self.requests
        return request.hidden(layer, num_heads, window, device)

    def opened(self, device: torch.device) -> torch.Tensor | None:
        """`RequestCuts.opened` of the only request."""
        (request,) = self.requests
        return request.opened(device)

    def keep_pattern(self, layer: int, weights: torch.Tensor) -> None:
        """`RequestCuts.keep_pattern` of the only request."""
        (request,) = self.requests
        request.keep_pattern(layer, weights)

    def of_request(self, index: int) -> PassCuts | None:
        """The cuts of one request."""
        return pass_cuts(request for request in self.requests if request.index == index)

    def rows_from(self, start: int, stop: int) -> PassCuts | None:
        """The cuts of a decode batch's requests `start` to `stop`, as their own batch."""
        return pass_cuts(
            RequestCuts(
                request.index - start,
                request.first_row - start,
                request.start,
                request.num_rows,
                request.cuts,
                request.reads,
                request.spans,
            )
            for request in self.requests
            if start <= request.index < stop
        )


def pass_cuts(requests: Iterable[RequestCuts]) -> PassCuts | None:
    """The cuts of a pass; None if no request has any."""
    found = list(requests)
    return PassCuts(found) if found else None


def _attend(
    q: torch.Tensor,  # [queries, heads, head_dim]
    k: torch.Tensor,  # [keys, kv_heads, head_dim]
    v: torch.Tensor,  # [keys, kv_heads, head_dim]
    cut: CutHeads,
    layer: RadixAttention,
) -> torch.Tensor:
    """[queries, cut heads, head_dim] in the dtype of q, computed in float32."""
    heads_at_once = max(1, MAX_SCORES // (k.shape[0] * layer.head_dim))
    of_heads = []
    for heads in cut.heads.split(heads_at_once):
        kv_heads = heads // (layer.num_heads // layer.num_kv_heads)
        keys, values = k[:, kv_heads].float().permute(1, 2, 0), v[:, kv_heads].float().transpose(0, 1)
        queries = q[:, heads].float().transpose(0, 1)  # [heads, queries, head_dim]
        parts = []
        step = max(1, MAX_SCORES // (len(heads) * k.shape[0]))
        for part, hidden in zip(queries.split(step, 1), cut.hidden.split(step), strict=True):
            scores = part @ keys * layer.scaling
            if layer.logit_cap is not None:
                scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
            parts.append(layer.softmax(scores.masked_fill(hidden, float("-inf")), heads) @ values)
        of_heads.append(torch.cat(parts, 1))
    return torch.cat(of_heads).transpose(0, 1).to(q.dtype)


def attend_by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: CutHeads, layer: RadixAttention
) -> torch.Tensor:
    """`_attend` with each row computed by itself (batch-invariant mode)."""
    return attend_visible(q, k, v, ~cut.hidden, layer)[:, cut.heads]
