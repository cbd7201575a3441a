"""A step's inputs, laid out in the rows of its flat batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.forward_batch import ForwardBatch
from ..core.pass_parts import AdapterRows, RowTiles, max_tiles, tiles_of
from ..core.step import LogitsProcessorOutput, ScheduledRequest, SchedulerOutput
from ..kernels.edit_codes import MAX_SCORES
from ..layers.edits.table import TableOps
from ..sampling import RejectionSampler, SamplingBatch, TokenMasks
from ..utils.upload import upload
from .partition import BatchExecutionDescriptor
from .request_state import RequestState


class PassLayout(NamedTuple):
    """Layout of a step's tokens in rows."""

    decodes: bool
    """Whether it is a decode pass. Each draft is a separate row there: all K and V are written before any are read."""
    padded_size: int | None
    """Rows of the captured pass that serves the step; None without such a pass."""


@dataclass
class InputBatch:
    """Inputs that `ModelRunner.prepare_inputs` makes from a step's schedule.

    Attributes:
        sampling: the request of each sampled row, in batch order: with drafts once for each of its rows.
        sample_rows: the logit row of each of them.
        verifier: compares the sampled tokens with the drafts of the step; None without drafts.
        embeds: rows with vectors in place of embeddings, and the vectors of each request; None: no row has one.
    """

    # fmt: off
    req_ids:              list[str]
    entries:              Sequence[ScheduledRequest]
    idx_mapping_np:       np.ndarray    # [reqs] int64, rows of the request table
    num_scheduled_tokens: np.ndarray    # [reqs] int32
    query_start_loc:      np.ndarray    # [reqs + 1] int32, first token row of each request
    input_ids:            torch.Tensor  # [tokens] int64
    positions:            torch.Tensor  # [tokens] int64
    seq_lens_cpu:         torch.Tensor  # [reqs] int32; in a decode pass [tokens], of each row
    logits_indices:       np.ndarray    # [logit rows] int64
    cu_num_logits:        np.ndarray    # [reqs + 1] int32, first logit row of each request
    sampling:             list[ScheduledRequest]
    sample_rows:          list[int]
    decodes:              bool = False  # a decode pass: each row reads the KV up to its own position
    padded_size:          int = 0       # rows of the input buffers that are laid out, padding included
    verifier:             RejectionSampler | None = None
    embeds:               tuple[np.ndarray, list[torch.Tensor]] | None = None
    depth:                int | None = None  # `SchedulerOutput.depth`
    # fmt: on

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def last_token_rows(self) -> np.ndarray:
        """[sampling] int64: the last token row of each request that samples."""
        return self.query_start_loc[1:][[e.samples for e in self.entries]].astype(np.int64) - 1

    def spread(self, sampled: list[list[Any]]) -> list[list[Any]]:
        """Values of sampling requests, spread over all requests: [] for the others."""
        if len(sampled) == self.num_reqs:
            return sampled
        values = iter(sampled)
        return [next(values) if entry.samples else [] for entry in self.entries]


MAX_KERNEL_ROWS = 4
"""Most rows of an adapter's span, in a pass with prompts, that kernels serve. Longer spans are matrix products."""
PAD_SEQ_LEN = 1
"""The length of a padded row: one token of the dummy row."""


class InputBuffers:
    """Input memory that keeps its address over the steps, as captured graphs need it.

    A step's tensors are slices of it, valid until the next step is laid out. Padded rows hold the dummy row, the dummy slot and
    a sequence of one token.

    Attributes:
        input_ids, positions, out_cache_loc: [max_num_tokens] int64, of each token row.
        rows: [max_num_tokens] int64, the request table's row of each token row.
        op_rows: the same, -1 for requests without interventions and captures.
        blocks: [2, max_num_tokens] int64, where each token row's captured states go (`TableOps`); written in steps with captures.
        flags: [max_num_tokens] int64, memory for the flags of gates, which passes write.
        scores: [MAX_SCORES, max_num_tokens] float32, dot products of monitors, which passes write.
        seq_lens: [max_num_tokens] int32, position + 1: the lengths of the requests in a decode pass.
        seq_lens_cpu: the same on the host; written for replayed passes.
        mrope_positions: [3, max_num_tokens] int64, positions that RoPE turns by, in models with mrope; else None.
        adapter_tiles: rows of requests with adapters, on CUDA, and where passes are captured, from the first adapter on.
    """

    adapter_tiles: RowTiles | None = None
    max_loras = 0

    def __init__(self, max_num_tokens: int, device: str, mrope: bool = False) -> None:
        self.mrope_positions: torch.Tensor | None = None
        if mrope:
            self.mrope_positions = torch.zeros(3, max_num_tokens, dtype=torch.int64, device=device)
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.out_cache_loc = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.rows = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.op_rows = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(2, max_num_tokens, dtype=torch.int64, device=device)
        self.flags = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.scores = torch.zeros(MAX_SCORES, max_num_tokens, device=device)
        self.seq_lens = torch.full((max_num_tokens,), PAD_SEQ_LEN, dtype=torch.int32, device=device)
        self.seq_lens_cpu = torch.full((max_num_tokens,), PAD_SEQ_LEN, dtype=torch.int32)
        self._lay_out = _lay_out
        if self.input_ids.is_cuda:
            from ..kernels.triton_inputs import lay_out

            self._lay_out = lay_out

    def clear(self) -> None:
        """Fill every row with padding. A pass that runs to be captured would act for the requests of the step before."""
        pad = (self.input_ids, self.positions, self.out_cache_loc, self.rows, self.blocks, self.flags, self.scores)
        more = () if self.mrope_positions is None else (self.mrope_positions,)
        for zeros in (*pad, *more) if self.adapter_tiles is None else (*pad, *more, *self.adapter_tiles):
            zeros.zero_()
        self.op_rows.fill_(-1)
        for lengths in (self.seq_lens, self.seq_lens_cpu):
            lengths.fill_(PAD_SEQ_LEN)

    def lay_out(
        self, tokens: np.ndarray, states: RequestState, req_to_token: torch.Tensor, padded_size: int
    ) -> torch.Tensor:
        """Write the rows of a step, on the device's side of things: nothing waits for the step before.

        Args:
            tokens: [3, rows] int64: token id (-1: the last one sampled for the request), position, row of the request table.
            states: the request table.
            req_to_token: [table rows, positions] int32, KV slots.
            padded_size: rows up to here belong to the dummy row.

        Returns:
            `tokens` on the device, padded.
        """
        padded = np.zeros((3, max(padded_size, tokens.shape[1])), dtype=np.int64)
        padded[:, : tokens.shape[1]] = tokens
        (uploaded,) = upload(self.input_ids.device, padded)
        self.place(uploaded, states, req_to_token)
        return uploaded

    def place(self, tokens: torch.Tensor, states: RequestState, req_to_token: torch.Tensor) -> None:
        """Write the first rows from `tokens` [3, rows] on the device, as `lay_out` returns them. A graph may capture it."""
        self._lay_out(self, tokens, states.last_sampled_tokens, states.edited, req_to_token)
        if self.mrope_positions is not None and states.mrope_deltas is not None:
            _, positions, rows = tokens
            self.mrope_positions[:, : tokens.shape[1]] = positions + states.mrope_deltas[rows]

    def rope_positions(self, rows: int) -> torch.Tensor | None:
        """`ForwardBatch.mrope_positions` of the first rows."""
        return None if self.mrope_positions is None else self.mrope_positions[:, :rows]

    def advance(self, laid_out: torch.Tensor, count: int, states: RequestState, req_to_token: torch.Tensor) -> None:
        """Write the first `count` rows of a decode pass again, one position later.

        Args:
            laid_out: result of `lay_out`; changed in place.
        """
        laid_out[1, :count] += 1
        self.place(laid_out, states, req_to_token)

    def open_adapters(self, max_loras: int) -> None:
        """Allocate `adapter_tiles`, unless they are there."""
        if self.adapter_tiles is None:
            rows, device = len(self.input_ids), self.input_ids.device
            self.max_loras = max_loras
            self.adapter_tiles = RowTiles(
                torch.zeros(rows, dtype=torch.int32, device=device),
                torch.zeros(max_tiles(rows, max_loras), 3, dtype=torch.int32, device=device),
            )

    def adapter_memory(self, rows: int) -> RowTiles:
        """Memory of the tiles of a decode pass with this many rows."""
        assert self.adapter_tiles is not None, "the first adapter opens them"
        order, tiles = self.adapter_tiles
        return RowTiles(order[:rows], tiles[: max_tiles(rows, self.max_loras)])

    def lay_out_adapters(self, found: AdapterRows, decode_rows: int | None) -> AdapterRows:
        """Write the rows' tiles.

        Args:
            decode_rows: rows of a decode pass, padding included; None: another pass, in which products serve the longer spans.
        """
        by_kernels, products = found.spans, ()
        if decode_rows is None:
            by_kernels = [span for span in found.spans if span.stop - span.start <= MAX_KERNEL_ROWS]
            products = tuple(span for span in found.spans if span.stop - span.start > MAX_KERNEL_ROWS)
        if not by_kernels:
            return found
        order, tiles = tiles_of(by_kernels)
        own = self.adapter_memory(len(order) if decode_rows is None else decode_rows)
        padded = np.zeros((len(own.tiles), 3), dtype=np.int32)
        padded[: len(tiles)] = tiles
        for memory, values in zip(own, upload(self.input_ids.device, order, padded), strict=True):
            memory[: len(values)].copy_(values)
        return replace(found, tiles=own, products=products)

    def populate(self, forward_batch: ForwardBatch, bs: int) -> None:
        """Copy a decode batch in and pad it up to `bs` rows. A step that was laid out with its padding is there already."""
        n, lens_cpu = forward_batch.batch_size, forward_batch.seq_lens_cpu
        assert forward_batch.positions is not None
        fills = [(self.seq_lens_cpu, forward_batch.seq_lens if lens_cpu is None else lens_cpu, PAD_SEQ_LEN)]
        if forward_batch.padded_size < bs:
            ops = forward_batch.site_ops if isinstance(forward_batch.site_ops, TableOps) else None
            fills += [
                (self.input_ids, forward_batch.input_ids, 0),
                (self.positions, forward_batch.positions, 0),
                (self.rows, forward_batch.req_pool_indices, 0),
                (
                    self.op_rows,
                    torch.full_like(forward_batch.req_pool_indices, -1) if ops is None else ops.token_rows.owners,
                    -1,
                ),
                (self.out_cache_loc, forward_batch.out_cache_loc, 0),
                (self.seq_lens, forward_batch.seq_lens, PAD_SEQ_LEN),
            ]
            if self.mrope_positions is not None and forward_batch.mrope_positions is not None:
                fills += [(*both, 0) for both in zip(self.mrope_positions, forward_batch.mrope_positions, strict=True)]
            if ops is not None:  # blocks matter only to rows with declared ops
                fills += [(own, given, 0) for own, given in zip(self.blocks, ops.token_rows.records, strict=True)]
        for buffer, rows, padding in fills:
            buffer[:n].copy_(rows, non_blocking=rows.device == buffer.device)
            buffer[n:bs].fill_(padding)


def _lay_out(
    buffers: InputBuffers,
    tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    edited: torch.Tensor,
    req_to_token: torch.Tensor,
) -> None:
    """The plain torch of `triton_inputs.lay_out`."""
    (ids, positions, rows), count = tokens, tokens.shape[1]
    buffers.input_ids[:count] = torch.where(ids < 0, last_sampled_tokens[rows], ids)
    buffers.positions[:count] = positions
    buffers.rows[:count] = rows
    buffers.op_rows[:count] = torch.where(edited[rows] != 0, rows, -1)
    buffers.seq_lens[:count] = positions + 1
    buffers.out_cache_loc[:count] = req_to_token[rows, positions]


@dataclass
class ExecuteModelState:
    """Carried from `execute_model` to `sample_tokens`."""

    scheduler_output: SchedulerOutput
    input_batch: InputBatch
    forward_batch: ForwardBatch
    descriptor: BatchExecutionDescriptor
    logits_output: LogitsProcessorOutput
    token_masks: TokenMasks | None = None
    """Token masks of constrained requests (`ModelRunner.constrain`)."""

    def sampling_batch(self, table: RequestState, vocab_size: int, device: str) -> SamplingBatch:
        """Sampling parameters of the step's sampled rows."""
        sampling, drafted = self.input_batch.sampling, self.input_batch.verifier is not None
        rows = table.sampled_rows(sampling) if drafted else [table.requests[entry.row] for entry in sampling]
        batch = SamplingBatch.from_requests(rows, vocab_size, device)  # pyright: ignore[reportArgumentType]
        if self.token_masks is not None:
            batch.constrained = self.token_masks.for_rows([entry.request_id for entry in sampling], device)
        if editing := table.editing:
            batch.checked = [i for i, entry in enumerate(sampling) if entry.request_id in editing]
        return batch
