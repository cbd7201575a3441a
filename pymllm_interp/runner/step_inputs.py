"""Conversion of a step's schedule to the arrays of its forward pass.

`StepInputs` is the only place that turns a `SchedulerOutput` into arrays: another rank would need just its results. A
`BatchBuilder` makes the `ForwardBatch` of such arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch

from ..core.forward_batch import ForwardBatch, ForwardMode
from ..core.pass_parts import AdapterRows, EmbeddedMask, EmbeddedRows
from ..core.step import ScheduledRequest, SchedulerOutput
from ..mem_cache.cross_pool import CrossPool
from ..mem_cache.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from ..models.adapters.slots import AdapterSlots
from ..sampling import LogprobTensors, RejectionSampler, prompt_logprobs
from ..utils.upload import upload
from .input_batch import InputBatch, InputBuffers, PassLayout
from .parts import BatchBuilder
from .request_state import RequestState
from .step_encoders import StepEncoders
from .vision_inputs import VisionInputs

PAD_SLOT_ID = 0
"""KV slot of padding rows. Never handed out; unlike a negative one it can be written to."""


def dummy_attn(num_reqs: int, num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`StepInputs.prepare_attn` of padding rows: the dummy row [reqs], and the dummy slot [tokens]."""
    slots = torch.full((num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device)
    return torch.zeros(num_reqs, dtype=torch.int64, device=device), slots


class StepInputs:
    """Applies steps to the runner's tables, and lays their tokens out in the rows of a flat batch.

    Args:
        states: the request table.
        buffers: input memory of the passes.
        table: KV slots of the requests' positions.
        allocator: says which slots a page has.
        device: device of the passes.
        adapters: the loaded ones; None in a runner without.
        vision: images of the requests; None for models without a tower.
        cross_pool: pool of encoder outputs; None in a model without an encoder.
    """

    def __init__(
        self,
        states: RequestState,
        buffers: InputBuffers,
        table: ReqToTokenPool,
        allocator: TokenToKVPoolAllocator,
        device: str,
        adapters: AdapterSlots | None = None,
        vision: VisionInputs | None = None,
        cross_pool: CrossPool | None = None,
    ) -> None:
        self.adapters, self.vision = adapters, vision
        self.cross = None if cross_pool is None else StepEncoders(cross_pool)
        self.states, self.buffers, self.table, self.allocator, self.device = states, buffers, table, allocator, device

    # -- tables ----------------------------------------------------------------------------

    def finish_requests(self, step: SchedulerOutput) -> None:
        """Drop finished and preempted requests from the table, and freed images from the encoder cache."""
        for req_id in step.finished_req_ids | step.preempted_req_ids:
            self.states.remove_request(req_id)
            for part in (self.cross, self.vision):
                if part is not None:
                    part.drop(req_id)

        if self.vision is not None:
            self.vision.cache.free(step.free_encoder_mm_hashes)

    def add_requests(self, step: SchedulerOutput) -> None:
        """Note accepted tokens, and enter requests that are scheduled for the first time or resume."""
        if step.accepted:
            self.states.accept(step.accepted)
        for request in step.scheduled_new_reqs:
            self.table.claim(request.row)
            self.states.add_request(request)
            for part in (self.cross, self.vision):
                if part is not None:
                    part.enter(request)
            if self.adapters is not None:
                self.states.adapter_slots[request.row] = self.adapters.slot_of(request.adapter)
        if self.adapters is not None:
            self.adapters.write_pending()
        self.states.apply_staged_writes()
        if step.drafts:
            self.states.write_drafts(step)

    def update_requests(self, step: SchedulerOutput) -> None:
        """Write the KV slots of pages that requests were given since the last step."""
        size = self.allocator.page_size
        for row, first, pages in step.page_writes:
            start = first * size
            count = min(len(pages) * size, self.table.max_context_len - start)
            self.table.write(row, start, self.allocator.slots_of(pages, 0, count))
        self.table.apply_staged_writes()

    # -- arrays ----------------------------------------------------------------------------

    def prepare(self, step: SchedulerOutput, layout: PassLayout) -> InputBatch:
        """Lay the step's tokens out in batch rows: token ids, positions, KV slots, and rows of the head."""
        entries, states = step.scheduled, self.states
        req_ids, table_rows, num_tokens, first, samples, decoding, logit_rows, _ = zip(*entries, strict=True)
        index, starts = np.array(table_rows, dtype=np.int64), np.array(first, dtype=np.int32)
        sizes = np.array(num_tokens, dtype=np.int32)
        lens = starts + sizes
        states.set_computed(index, lens)
        loc = cumulated(sizes)
        if all(decoding):
            # Fed on the device: the host may not know that token yet.
            rows, positions, token_ids = index, starts.astype(np.int64), np.full(len(index), -1)
        else:
            rows = np.repeat(index, sizes)
            positions = np.arange(loc[-1], dtype=np.int64) - np.repeat(loc[:-1] - starts, sizes)
            token_ids = np.where(np.repeat(decoding, sizes), -1, states.all_token_ids[rows, positions])
        cu_num_logits, logits_indices = loc, np.arange(len(rows))
        if layout.decodes:
            lens = positions.astype(np.int32) + 1
        else:
            logit_counts = np.array(logit_rows, dtype=np.int32)
            cu_num_logits = cumulated(logit_counts)
            logits_indices = np.repeat(loc[1:] - cu_num_logits[1:], logit_counts) + np.arange(cu_num_logits[-1])
        padded = int(loc[-1]) if layout.padded_size is None else layout.padded_size
        self.buffers.lay_out(np.stack((token_ids, positions, rows)), states, self.table.req_to_token, padded)
        sampling = list(compress(entries, samples))
        sample_rows = list(compress((cu_num_logits[1:] - 1).tolist(), samples))
        verifier = None
        if step.drafts:
            verifier = RejectionSampler([step.drafts.get(e.request_id, ()) if e.samples else None for e in entries])
            counts = np.diff(verifier.starts)
            sampling = [entry for entry, count in zip(entries, counts.tolist(), strict=True) for _ in range(count)]
            sample_rows = (
                np.arange(len(sampling)) + np.repeat(cu_num_logits[1:] - verifier.starts[1:], counts)
            ).tolist()
        return InputBatch(
            req_ids=list(req_ids),
            entries=entries,
            idx_mapping_np=index,
            num_scheduled_tokens=sizes,
            query_start_loc=loc,
            input_ids=self.buffers.input_ids[: len(rows)],
            positions=self.buffers.positions[: len(rows)],
            seq_lens_cpu=torch.from_numpy(lens),
            logits_indices=logits_indices,
            cu_num_logits=cu_num_logits,
            sampling=sampling,
            sample_rows=sample_rows,
            decodes=layout.decodes,
            padded_size=padded,
            verifier=verifier,
            embeds=self._embedded_rows(entries, loc),
            depth=step.depth,
        )

    def _embedded_rows(
        self, entries: Sequence[ScheduledRequest], first_rows: np.ndarray
    ) -> tuple[np.ndarray, list[torch.Tensor]] | None:
        """The step's rows with vectors in place of embeddings, and these of each request; None: no row has one."""
        rows, vectors = list[np.ndarray](), list[torch.Tensor]()
        for entry, first in zip(entries, first_rows, strict=False):
            request = self.states.requests[entry.row]
            if request is not None and request.embeds is not None and entry.start < request.prompt_len:
                offsets, own = request.embeds.within(entry.start, entry.start + entry.num_tokens)
                rows.append(first + offsets)
                vectors.append(own)
        if not sum(map(len, rows)):
            return None
        return np.concatenate(rows), vectors

    def _uploaded(self, rows: np.ndarray, vectors: Sequence[torch.Tensor]) -> EmbeddedRows:
        """Rows with vectors, on the device. Vectors that are there do not leave it; the others come in one copy."""
        there, *others = upload(self.device, rows, *(own for own in vectors if not own.is_cuda))
        host = iter(others)
        for own in vectors:
            if own.is_cuda:
                own.record_stream(torch.cuda.current_stream())
        return EmbeddedRows(there, torch.cat([own if own.is_cuda else next(host) for own in vectors]))

    def prepare_attn(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of the requests in `req_to_token`, [reqs]; KV slot of each token row, [tokens]), both int64."""
        tokens = batch.num_tokens
        slots = self.buffers.out_cache_loc[:tokens]
        if batch.decodes:
            return self.buffers.rows[:tokens], slots
        return upload(self.device, batch.idx_mapping_np)[0], slots

    def forward_batch(self, batch: InputBatch, builder: BatchBuilder) -> ForwardBatch:
        """The step's `ForwardBatch`: DECODE where each request computes one token, else EXTEND or MIXED."""
        rows, slots = self.prepare_attn(batch)
        sizes, lens = batch.num_scheduled_tokens, batch.seq_lens_cpu
        if batch.decodes:
            found = builder.decode(
                batch.input_ids, rows, self.buffers.seq_lens[: batch.num_tokens], slots, positions=batch.positions,
                seq_lens_cpu=lens,
            )  # fmt: skip
        else:
            prefixes = lens.numpy() - sizes
            seq_lens, extend_lens, prefix_lens = upload(self.device, lens, sizes, prefixes)
            found = builder.extend(
                batch.input_ids, rows, seq_lens, extend_lens, prefix_lens, slots,
                extend_seq_lens_cpu=sizes.tolist(), extend_prefix_lens_cpu=prefixes.tolist(),
            )  # fmt: skip
            if any(entry.decodes for entry in batch.entries):
                found.forward_mode = ForwardMode.MIXED
            found.input_ids = self.buffers.input_ids[: batch.padded_size]
            found.out_cache_loc = self.buffers.out_cache_loc[: batch.padded_size]
        if batch.embeds is not None:
            found.input_embeds = self._uploaded(*batch.embeds)
        if self.vision is not None:
            self._place_images(found, batch, builder, self.vision)
        found.padded_size, found.depth = batch.padded_size, batch.depth
        found.positions = self.buffers.positions[: found.num_tokens]
        found.logits_indices = None
        if len(batch.logits_indices) != found.num_tokens:
            (found.logits_indices,) = upload(self.device, batch.logits_indices)
        if builder.model_spec.rope_depends_on_length:
            found.rope_lens = self._rope_lens(batch, builder.model_spec.rope_boundary)
        if self.cross is not None:
            found.cross = self.cross.rows_of(batch, rows)
        if self.adapters is not None and self.adapters.any_loaded:
            found.adapters = self._adapter_rows(batch, self.adapters.version)
        return found

    @torch.enable_grad()  # of blocks in the tower: cached states require none
    def _place_images(
        self, found: ForwardBatch, batch: InputBatch, builder: BatchBuilder, vision: VisionInputs
    ) -> None:
        """Add the positions that RoPE turns by, and the rows of images."""
        found.mrope_positions = self.buffers.rope_positions(found.num_tokens)
        if batch.decodes:
            return
        rows = list(zip(batch.entries, batch.query_start_loc.tolist(), strict=False))
        if found.mrope_positions is not None:
            prompts: list[tuple[int, torch.Tensor]] = []
            for entry, first in rows:
                request = self.states.requests[entry.row]
                if request is not None and request.rope_positions is not None and entry.start < request.prompt_len:
                    prompts.append((first, request.rope_positions[:, entry.start : entry.start + entry.num_tokens]))
            uploaded = upload(self.device, *(own for _, own in prompts)) if prompts else ()
            for (first, _), own in zip(prompts, uploaded, strict=True):
                found.mrope_positions[:, first : first + own.shape[1]] = own
        if parts := vision.parts(rows):
            if builder.model_spec.image_span:
                found.attention_cuts = vision.spans(rows)
            embedded, found.deepstack = vision.gather_mm_embeddings(parts)
            assert not isinstance(found.input_embeds, EmbeddedMask), "of captured passes"
            found.input_embeds = embedded.joined(found.input_embeds)

    def _adapter_rows(self, batch: InputBatch, version: int) -> AdapterRows | None:
        """The rows of requests with an adapter. On CUDA, and where passes are captured, they are also tiles."""
        rows = AdapterRows.of(self.states.adapter_slots[batch.idx_mapping_np], batch.num_scheduled_tokens, version)
        if rows is None or self.buffers.adapter_tiles is None:
            return rows
        return self.buffers.lay_out_adapters(rows, batch.padded_size if batch.decodes else None)

    def _rope_lens(self, batch: InputBatch, boundary: int | None) -> torch.Tensor:
        """[tokens]: a prompt is rotated for its whole length, however it is chunked; a generated token for its own.

        With a boundary (`ModelSpec.rope_boundary`), generated tokens that a request enters with count as its prompt. It is
        preempted at the boundary, and all of its keys are computed again.
        """
        lens = self.states.prompt_len if boundary is None else self.states.prefill_len
        least = np.repeat(lens[batch.idx_mapping_np], batch.num_scheduled_tokens)
        return torch.maximum(batch.positions + 1, upload(self.device, least)[0])

    def prompt_logprobs(
        self, logits: torch.Tensor, batch: InputBatch, as_logits: bool = False
    ) -> dict[str, LogprobTensors]:
        """Request id -> log probabilities of the prompt tokens after the positions of this step, where asked for.

        Args:
            logits: [logit rows, vocab].
            as_logits: logits in place of log probabilities (`logprobs_mode`).
        """
        found: dict[str, LogprobTensors] = {}
        if batch.decodes:
            return found
        states = self.states
        for entry, first in zip(batch.entries, batch.cu_num_logits.tolist(), strict=False):
            request = states.requests[entry.row]
            assert request is not None, "the step entered its requests"
            num = request.params.prompt_logprobs
            if num is not None and entry.start < request.prompt_len - 1:
                count = min(entry.logit_rows, request.prompt_len - 1 - entry.start)
                targets = states.all_token_ids[entry.row, entry.start + 1 : entry.start + 1 + count]
                (on_device,) = upload(logits.device, targets.astype(np.int64))
                found[entry.request_id] = prompt_logprobs(logits[first : first + count], on_device, num, as_logits)
        return found


def cumulated(counts: np.ndarray) -> np.ndarray:
    """counts [n] -> [n + 1] int32: start of each part, and the end of the last one."""
    ends = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=ends[1:])
    return ends
