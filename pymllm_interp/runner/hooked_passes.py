"""Forward passes in which blocks of traces are served: module by module, in segments, or split."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ..core.forward_batch import ForwardBatch, HookQuery, Waits
from ..core.pass_parts import AttentionCuts
from ..core.step import LogitsProcessorOutput
from ..hooks.traces.serving.batch_groups import NNsightRequestHelper
from ..hooks.traces.serving.interleaver import EngineInterleaver
from ..layers.edits.table import TableOps
from ..models.transformers.transformers_pass import TransformersPass
from .graphs.segments import Segments
from .model_runner import ModelRunner
from .partition import BatchExecutionDescriptor, Execution


class CutQuery:
    """The `HookQuery` of a pass in segments with cut edges: attention with cut edges runs kernel by kernel.

    Args:
        cuts: of the pass.
        attention: attribute of a decoder layer.
        hooks: where the blocks of traces wait; None without traces.
    """

    def __init__(self, cuts: AttentionCuts, attention: str, hooks: HookQuery | None) -> None:
        self.cuts, self.attention, self.hooks = cuts, attention, hooks

    def hook_position(self, layer: int) -> Waits:
        if self.cuts.act_at(layer):
            return "within"
        return "nowhere" if self.hooks is None else self.hooks.hook_position(layer)

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


class HookedPasses:
    """The ways in which a pass with traces runs: a table from `Execution` to function.

    Args:
        runner: runs the parts of a pass.
        interleaver: serves the blocks.
        helper: the traces of the pass, and their rows.

    Attributes:
        segments: CUDA graphs of what lies between blocks; None where passes are not captured.
    """

    def __init__(self, runner: ModelRunner, interleaver: EngineInterleaver, helper: NNsightRequestHelper) -> None:
        self.runner: ModelRunner = weakref.proxy(runner)  # which holds this object
        self.interleaver, self.helper = interleaver, helper
        self.segments: Segments | None = None

    def run(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """Run the pass as the descriptor says. The logits are in fresh memory: blocks may keep them."""
        return WAYS[descriptor.execution](self, batch, descriptor)

    def _forward(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """A pass in which no block waits for a module."""
        if self.with_gradients:
            return self._differentiable(batch, descriptor.execution)
        return self.runner.forward(batch, descriptor.execution)

    def _by_modules(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """The whole batch, module by module."""
        # Blocks may save what modules read: not the input buffers, which the next step overwrites.
        assert batch.positions is not None
        batch.input_ids, batch.positions = batch.input_ids.clone(), batch.positions.clone()
        batch.hook_query, options = self.interleaver, self.interleaver.pass_options
        if batch.num_tokens > batch.num_request_tokens:
            self.helper.pad_prompts_to(batch.num_tokens)
        if options.alone:
            batch.transformers_pass = TransformersPass(
                batch,
                self.runner.model_spec,
                eager=options.eager_attention,
                attentions=options.output_attentions,
                states=options.output_hidden_states,
            )
        if self.with_gradients:
            return self._differentiable(batch, Execution.MODULES)
        return self.runner.forward(batch, Execution.MODULES)

    @property
    def with_gradients(self) -> bool:
        return any(trace.grad for trace in self.interleaver.traces)

    def _differentiable(self, batch: ForwardBatch, execution: Execution) -> LogitsProcessorOutput:
        """A pass with gradients: it attends to its own K and V, not the pool's."""
        self.runner.forward_pass_id += 1
        batch.fresh_kv_only = True
        with torch.enable_grad():
            return self.runner.plan_and_call(batch, execution)

    def _in_segments(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """A decode pass module by module, but for what lies between its blocks, which is replayed."""
        assert self.segments is not None
        self.runner.forward_pass_id += 1
        padded = self.segments.begin(batch)
        traced = bool(self.interleaver.traces)
        padded.hook_query = self.interleaver if traced else None
        if batch.attention_cuts is not None:
            padded.attention_cuts = batch.attention_cuts
            attention = self.runner.model_spec.family.attention
            padded.hook_query = CutQuery(batch.attention_cuts, attention, padded.hook_query)
        if batch.site_ops is None:
            padded.site_ops = None
        elif isinstance(batch.site_ops, TableOps) and batch.site_ops.logits is not None:
            assert isinstance(padded.site_ops, TableOps)
            padded.site_ops = padded.site_ops.with_logits(batch.site_ops.logits)
        if traced:
            self.helper.pad_to(padded.batch_size)
        try:
            logits = self.runner.call_model(padded, Execution.MODULES)[0]
        finally:
            self.segments.end()
        return LogitsProcessorOutput(logits[: batch.batch_size])

    def _split(self, batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        """A decode pass as two: requests without a waiting block, then the last `num_hooked` ones module by module.

        The device computes the first half while the host runs the blocks of the second.
        """
        hooked = descriptor.num_hooked
        plain, rows = batch.batch_size - hooked, batch.req_pool_indices.clone()
        halves = self._rows(batch, 0, plain), self._rows(batch, plain, batch.batch_size)
        output = self.runner.forward(halves[0])
        self.helper.narrow_to_last(hooked)
        halves[1].hook_query = self.interleaver
        hooked_output = self.runner.forward(halves[1], Execution.MODULES)
        batch.req_pool_indices.copy_(rows)  # the input buffers', which the replay wrote to; sampling reads them
        return LogitsProcessorOutput(torch.cat((output.next_token_logits, hooked_output.next_token_logits)))

    def _rows(self, batch: ForwardBatch, start: int, stop: int) -> ForwardBatch:
        """Rows of a decode batch as a batch of their own, in fresh memory."""
        assert batch.positions is not None and batch.seq_lens_cpu is not None
        half = self.runner.prepare_forward_batch_decode(
            batch.input_ids[start:stop].clone(),
            batch.req_pool_indices[start:stop].clone(),
            batch.seq_lens[start:stop].clone(),
            batch.out_cache_loc[start:stop].clone(),
            positions=batch.positions[start:stop].clone(),
            seq_lens_cpu=batch.seq_lens_cpu[start:stop],
        )
        half.site_ops = None if batch.site_ops is None else batch.site_ops.rows_from(start, stop)
        half.attention_cuts = None if batch.attention_cuts is None else batch.attention_cuts.rows_from(start, stop)
        half.rope_lens = None if batch.rope_lens is None else batch.rope_lens[start:stop].clone()
        return half


WAYS: dict[Execution, Callable[[HookedPasses, ForwardBatch, BatchExecutionDescriptor], LogitsProcessorOutput]] = {
    Execution.IDLE: HookedPasses._forward,
    Execution.PLAIN: HookedPasses._forward,
    Execution.REPLAY: HookedPasses._forward,
    Execution.MODULES: HookedPasses._by_modules,
    Execution.SEGMENTS: HookedPasses._in_segments,
    Execution.SPLIT: HookedPasses._split,
}
