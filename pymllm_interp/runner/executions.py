"""Table of executions of a pass: from `Execution` to two functions, which run it and tell whether they can."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core.forward_batch import ForwardBatch, HookQuery, Waits
from ..core.model_spec import LOGITS
from ..core.pass_parts import AttentionCuts
from ..core.step import LogitsProcessorOutput, SchedulerOutput
from ..layers.edits.base import apply_inner
from ..layers.edits.table import TableOps
from .graphs.captured_passes import CapturedPasses
from .input_batch import PassLayout
from .partition import BatchExecutionDescriptor, Execution
from .parts import RunnerParts

MAX_ROW_POSITIONS = 1 << 16
"""Most positions that the rows of a decode pass with drafts read. Each row reads its request's K and V on its own."""


class CutQuery:
    """The `HookQuery` of a pass in segments with cut edges: attention with cut edges runs kernel by kernel.

    Args:
        cuts: cut edges of the pass.
        attention: attribute of a decoder layer.
        hooks: locations at which traces' blocks wait; None without traces.
    """

    def __init__(self, cuts: AttentionCuts, attention: str, hooks: HookQuery | None) -> None:
        self.cuts, self.attention, self.hooks = cuts, attention, hooks

    def first_hook(self, first: int, stop: int) -> tuple[int, Waits]:
        cut = next((layer for layer in range(first, stop) if self.cuts.act_at(layer)), stop)
        found: tuple[int, Waits] = (cut, "nowhere") if self.hooks is None else self.hooks.first_hook(first, cut)
        return (cut, "within") if found[0] == cut < stop else found

    def try_fuse(self, layer: int, module: str = "", but: str = "") -> bool:
        if self.cuts.act_at(layer) and module in ("", self.attention):
            return False
        return self.hooks is None or self.hooks.try_fuse(layer, module, but)

    def runs_eagerly(self, layer: int, module: str, but: str) -> None:
        if self.hooks is not None:
            self.hooks.runs_eagerly(layer, module, but)

    def is_own_call(self) -> bool:
        return self.hooks is not None and self.hooks.is_own_call()

    def at_output(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.hooks is None else self.hooks.at_output(layer, hidden)


class Executions:
    """Runs the passes of a runner's steps.

    Args:
        runner: runs the parts of a pass.

    Attributes:
        depths: number of layers -> passes that ended after them.
    """

    def __init__(self, runner: RunnerParts, graphs: CapturedPasses) -> None:
        self.runner: RunnerParts = weakref.proxy(runner)  # which holds this object
        self.graphs = graphs
        self.depths: Counter[int] = Counter()

    def can(self, execution: Execution, batch: ForwardBatch) -> bool:
        """Whether the pass can run so."""
        return WAYS[execution].can(self, batch)

    def run(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """Run the pass as the descriptor says."""
        if batch.depth is not None:
            self.depths[batch.depth] += 1
        if self.graphs.num_missing and descriptor.execution is Execution.PLAIN:
            self.graphs.ran_without(batch)
        return WAYS[descriptor.execution].run(self, batch, descriptor)

    def layout(self, step: SchedulerOutput) -> PassLayout:
        """Layout of the step's tokens."""
        decodes, rows = self._is_decode(step), step.total_num_scheduled_tokens
        if self.runner.demands.unpadded or not self.graphs.decoders:
            return PassLayout(decodes, None)
        if decodes:
            graphs = self.graphs.decode
            return PassLayout(True, None if graphs is None or rows > graphs.max_bs else graphs.padded_size(rows))
        prefill = self.graphs.prefill
        return PassLayout(False, None if prefill is None else prefill.padded_size(rows))

    def _is_decode(self, step: SchedulerOutput) -> bool:
        """Whether the step is a decode pass. With drafts it is one where that is faster than a pass with prompts."""
        if all(entry.decodes for entry in step.scheduled):
            return True
        if not step.by_row or self.runner.demands.grouped:
            return False
        graphs = self.graphs.decode
        if graphs is not None and step.total_num_scheduled_tokens > graphs.max_bs:
            return False
        positions = sum(entry.num_tokens * (entry.start + entry.num_tokens) for entry in step.scheduled)
        return positions <= MAX_ROW_POSITIONS

    # -- the parts of a pass ------------------------------------------------------------

    def replay(self, batch: ForwardBatch, in_place: bool = False) -> LogitsProcessorOutput:
        """Run a pass from its CUDA graphs, or as they would (`runs_padded`).

        Args:
            in_place: return a decode graph's own output, which the next replay overwrites.
        """
        if batch.forward_mode.is_extend():
            assert self.graphs.prefill is not None
            return self.graphs.prefill.replay(batch)
        graphs = self.graphs.for_decode(batch)
        assert graphs is not None
        output = graphs.replay(batch, in_place)
        if batch.site_ops is not None:  # captured decode passes end before the ops at the logits
            logits = apply_inner(output.next_token_logits.unsqueeze(0), batch.site_ops, 0, LOGITS)[0]
            output = LogitsProcessorOutput(logits, output.hidden_states)
        return output

    def plan_and_call(self, batch: ForwardBatch, execution: Execution) -> LogitsProcessorOutput:
        """Plan attention for the pass, and run it: PLAIN fused, MODULES module by module."""
        assert batch.attn_backend is not None
        batch.attn_backend.init_forward_metadata(batch)
        logits = self.call_model(batch, execution)[0]
        return LogitsProcessorOutput(logits, hidden_states=batch.hidden_states)

    def call_model(self, batch: ForwardBatch, execution: Execution) -> torch.Tensor:
        """Logits [1, logit rows, vocab] of a planned pass."""
        assert batch.positions is not None
        model = self.runner.get_model()
        input_ids, positions = batch.input_ids.unsqueeze(0), batch.positions.unsqueeze(0)
        if execution is Execution.PLAIN:
            return model.forward_fused(input_ids, positions, batch)
        return model(input_ids=input_ids, position_ids=positions, forward_batch=batch).logits  # pyright: ignore[reportReturnType]

    def _enter(self, batch: ForwardBatch, first: int = 0) -> None:
        """Have the stages serve the modules of a pass. See `Stage.enter_pass`."""
        for stage in self.runner.stages:
            stage.enter_pass(batch, first)

    # -- whether it can -----------------------------------------------------------------

    def _always(self, batch: ForwardBatch) -> bool:
        return True

    def _is_captured(self, batch: ForwardBatch) -> bool:
        """Whether CUDA graphs serve the whole pass."""
        if not self.graphs.decoders:
            return False
        graphs = self.graphs.prefill if batch.forward_mode.is_extend() else self.graphs.for_decode(batch)
        return graphs is not None and batch.attention_cuts is None and graphs.can_run(batch)

    def runs_padded(self, batch: ForwardBatch) -> bool:
        """Whether `replay` serves the pass. Where its graph is missing, a decode pass runs over the padded rows of that graph."""
        if batch.forward_mode.is_extend() or not self.graphs.decoders:
            return self._is_captured(batch)
        graphs = self.graphs.for_decode(batch)
        return graphs is not None and batch.attention_cuts is None and graphs.fits(batch)

    def _has_segments(self, batch: ForwardBatch) -> bool:
        graphs = self.graphs
        if batch.forward_mode.is_extend():
            return graphs.prompt_segments is not None and graphs.prompt_segments.graphs.fits(batch)
        return graphs.segments is not None and graphs.segments.graph_runner.fits(batch) and graphs.is_laid_out(batch)

    def _decodes(self, batch: ForwardBatch) -> bool:
        return batch.forward_mode.is_decode()

    # -- how it runs --------------------------------------------------------------------

    def _forward(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """The whole batch in one pass; with gradients if it attends to its own K and V only."""
        if not batch.fresh_kv_only:
            return self.runner.forward(batch, descriptor.execution)
        self.runner.forward_pass_id += 1
        with torch.enable_grad():
            return self.plan_and_call(batch, descriptor.execution)

    def _replay(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """The whole batch from its CUDA graphs. Logits sampled before the next replay need no fresh memory."""
        self.runner.forward_pass_id += 1
        return self.replay(batch, in_place=not self.runner.demands.keeps_logits)

    def _by_modules(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """The whole batch, module by module."""
        # Blocks may save inputs of modules: not the input buffers, which the next step overwrites.
        assert batch.positions is not None
        batch.input_ids, batch.positions = batch.input_ids.clone(), batch.positions.clone()
        self._enter(batch)
        return self._forward(batch, descriptor)

    def _in_segments(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """The whole batch, module by module. The parts between its blocks are replayed."""
        if batch.forward_mode.is_extend():
            return self._prompts_in_segments(batch)
        segments = self.graphs.segments
        assert segments is not None
        self.runner.forward_pass_id += 1
        padded = segments.begin(batch)
        padded.adapters = batch.adapters
        self._enter(padded)
        if batch.attention_cuts is not None:
            padded.attention_cuts = batch.attention_cuts
            attention = self.runner.model_spec.family.attention
            padded.hook_query = CutQuery(batch.attention_cuts, attention, padded.hook_query)
        if batch.site_ops is None:
            padded.site_ops = None
        elif isinstance(batch.site_ops, TableOps) and batch.site_ops.logits is not None:
            assert isinstance(padded.site_ops, TableOps)
            padded.site_ops = padded.site_ops.with_logits(batch.site_ops.logits)
        try:
            logits = self.call_model(padded, Execution.MODULES)[0]
        finally:
            segments.end()
        return LogitsProcessorOutput(logits[: batch.batch_size])

    def _prompts_in_segments(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        segments = self.graphs.prompt_segments
        assert segments is not None
        self.runner.forward_pass_id += 1
        self._enter(batch)
        try:
            output = self.plan_and_call(segments.begin(batch), Execution.SEGMENTS)
        finally:
            segments.end()
        if output.hidden_states is not None:
            output.hidden_states = batch.hidden_states = output.hidden_states[: batch.num_request_tokens]
        return output

    def _split(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """A decode pass as two: requests without a waiting block, then the last `num_hooked` ones module by module.

        The device computes the first half while the host runs the blocks of the second.
        """
        plain, rows = batch.batch_size - descriptor.num_hooked, batch.req_pool_indices.clone()
        halves = self._rows(batch, 0, plain), self._rows(batch, plain, batch.batch_size)
        output = self.runner.forward(halves[0])
        self._enter(halves[1], plain)
        hooked_output = self.runner.forward(halves[1], Execution.MODULES)
        batch.req_pool_indices.copy_(rows)  # the input buffers', which the replay wrote to; sampling reads them
        return LogitsProcessorOutput(torch.cat((output.next_token_logits, hooked_output.next_token_logits)))

    def _rows(self, batch: ForwardBatch, start: int, stop: int) -> ForwardBatch:
        """Rows of a decode batch as a separate batch, in fresh memory."""
        assert batch.positions is not None and batch.seq_lens_cpu is not None
        half = self.runner.batches.decode(
            batch.input_ids[start:stop].clone(),
            batch.req_pool_indices[start:stop].clone(),
            batch.seq_lens[start:stop].clone(),
            batch.out_cache_loc[start:stop].clone(),
            positions=batch.positions[start:stop].clone(),
            seq_lens_cpu=batch.seq_lens_cpu[start:stop],
        )
        half.site_ops = None if batch.site_ops is None else batch.site_ops.rows_from(start, stop)
        half.adapters = None if batch.adapters is None else batch.adapters.rows_from(start, stop)
        half.attention_cuts = None if batch.attention_cuts is None else batch.attention_cuts.rows_from(start, stop)
        if batch.mrope_positions is not None:
            half.mrope_positions = batch.mrope_positions[:, start:stop].clone()
        half.rope_lens = None if batch.rope_lens is None else batch.rope_lens[start:stop].clone()
        return half


class Way(NamedTuple):
    """A row of the table."""

    run: Callable[[Executions, ForwardBatch, BatchExecutionDescriptor], LogitsProcessorOutput]
    can: Callable[[Executions, ForwardBatch], bool]


WAYS = {
    Execution.IDLE: Way(Executions._forward, Executions._always),
    Execution.PLAIN: Way(Executions._forward, Executions._always),
    Execution.REPLAY: Way(Executions._replay, Executions._is_captured),
    Execution.MODULES: Way(Executions._by_modules, Executions._always),
    Execution.SEGMENTS: Way(Executions._in_segments, Executions._has_segments),
    Execution.SPLIT: Way(Executions._split, Executions._decodes),
}
