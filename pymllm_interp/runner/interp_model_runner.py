"""InterpModelRunner: a ModelRunner whose requests may carry traces, interventions and captures.

It drives two stages, which own what is theirs: `DeclaredStage` (interventions and captures) and `NNsightRequestHelper` (traces)::

    execute_model   process_new_reqs      every traced request gets its rows; new blocks run to where they first wait
                    site_ops              the step's declared ops, as rows of tables or as functions
                    dispatch              does a block wait for a module that this pass reaches?
                    forward               plain (no module is called), or as `HookedPasses` says
    sample_tokens   unflatten             from token rows to sampled rows
                    logits, samples       offered to the blocks; each sees and changes its own row
                    capture_logits, send  captured states leave the device
    finish_nnsight  process_finished_reqs results, blocks that still wait, saves
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import nn

from ..config import ModelConfig, ServerConfig
from ..core.forward_batch import ForwardBatch
from ..core.model_spec import LOGITS
from ..core.step import DeclaredResult, LogitsProcessorOutput, ModelRunnerOutput, RequestEnd, SchedulerOutput
from ..hooks.captures.egress.ring import CaptureRing
from ..hooks.declarations import Declarations
from ..hooks.declared_stage import DeclaredStage, RowBuffers
from ..hooks.interventions.device_tables import DeviceTables
from ..hooks.saes.registry import SAERegistry
from ..hooks.traces.blocks.trace import RequestTrace
from ..hooks.traces.serving.batch_groups import NNsightRequestHelper
from ..hooks.traces.serving.interleaver import EngineInterleaver
from ..hooks.traces.serving.step_outputs import offer_tokens, serve_outputs
from ..hooks.traces.syntax.envoy import TracedModel
from ..layers.edits.base import apply_inner
from ..layers.edits.table import TableOps
from ..models.readout import ModelReadout
from ..sampling import SamplerOutput
from .async_output import AsyncOutput
from .graphs.segments import Segments
from .hooked_passes import HookedPasses
from .input_batch import ExecuteModelState, InputBatch
from .model_runner import ModelRunner
from .partition import BatchExecutionDescriptor, Execution


def _wrap(module: nn.Module, interleaver: EngineInterleaver) -> TracedModel:
    return TracedModel(module, interleaver=interleaver)


class RunnerCommand(Protocol):
    """What a client has a runner do between steps. A value that can be pickled: it finds all else in the runner."""

    def run(self, runner: InterpModelRunner) -> Any:
        """Do it on the runner's thread, without gradients. Returns the answer."""
        ...


class InterpModelRunner(ModelRunner):
    """A ModelRunner that lets each request's hooks read and change its own hidden states, logits and samples.

    Args:
        wrap: makes the envoy tree over the loaded weights; None where a client brings its own (`attach_model`), as `LM` does.

    Attributes:
        interleaver: serves the blocks of traces.
        nnsight_request_helper: traces in flight, and their rows.
        declared_stage: interventions and captures; None before `initialize`.
        declarations: the checks of them, for clients; None before `initialize`.
        saes: by name, of `ModelConfig.saes` and later ones; None before `initialize`.
        passes: how passes with traces run.
        kept: by key, what a command keeps for later ones.
    """

    def __init__(
        self,
        server_config: ServerConfig | None = None,
        model_config: ModelConfig | None = None,
        gpu_id: int = 0,
        *,
        wrap: Callable[[nn.Module, EngineInterleaver], TracedModel] | None = _wrap,
    ) -> None:
        super().__init__(server_config, model_config, gpu_id)
        self._wrap = wrap
        self.interleaver = EngineInterleaver()
        self.nnsight_request_helper = NNsightRequestHelper(self.interleaver)
        self.declared_stage: DeclaredStage | None = None
        self.declarations: Declarations | None = None
        self.saes: SAERegistry | None = None
        self.passes = HookedPasses(self, self.interleaver, self.nnsight_request_helper)
        self.kept: dict[str, Any] = {}
        self._own_model: TracedModel | None = None
        self._model_of_client: weakref.ref[TracedModel] | None = None

    # -- life cycle ------------------------------------------------------------------

    @property
    def nnsight_model(self) -> TracedModel | None:
        """The envoy tree over the served module, which it does not copy; None before `load_model`.

        The runner's own, or that of a client (`attach_model`).
        """
        return self._own_model if self._model_of_client is None else self._model_of_client()

    def attach_model(self, tree: TracedModel) -> None:
        """Serve traces that are written against `tree`, an envoy tree over this runner's model and interleaver."""
        self._model_of_client = weakref.ref(tree)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights, then wrap the module."""
        super().load_model(*args, **kwargs)
        self._own_model = None if self._wrap is None else self._wrap(self.get_model(), self.interleaver)

    def init_memory_pool(self) -> None:
        """The pools, and the tables of declared interventions."""
        self.saes = SAERegistry(self.model_spec, self.device)
        for name, source in self.model_config.saes.items():
            self.saes[name] = source
        readout = ModelReadout(self.get_model(), self.model_spec)
        self.declared_stage = DeclaredStage(
            self.server_config, self.model_spec, self.device, readout, self.saes.encoders()
        )
        super().init_memory_pool()

    def _init_tables(self) -> None:
        super()._init_tables()
        stage = self.declared
        stage.init_tables(self.req_states.edited)
        self.declarations = Declarations(stage.limits, stage.model, stage.readout, stage.capture_ring)

    @property
    def wants_plain_graphs(self) -> bool:
        """Also where declared ops include encoders."""
        return super().wants_plain_graphs or bool(self.declared.limits.encoders)

    def capture_model(self) -> int:
        """Capture the decode graphs; graph segments between blocks are captured as they come."""
        taken = super().capture_model()
        if self.graph_runner is not None:
            self.passes.segments = Segments(self.graph_runner, self.server_config.max_segments)
        return taken

    def shutdown(self) -> None:
        """Release the model and all memory. A second call does nothing."""
        if self.segments is not None:
            self.segments.shutdown()
            self.passes.segments = None
        if self.declared_stage is not None:
            self.declared_stage.close()
        if self.saes is not None:
            self.saes.close()
        if self.declarations is not None:
            self.declarations.close()
        self._own_model = self.saes = None
        self.kept.clear()
        super().shutdown()

    @property
    def declared(self) -> DeclaredStage:
        """The declared stage of an initialised runner."""
        assert self.declared_stage is not None, "call initialize() first"
        return self.declared_stage

    @property
    def device_tables(self) -> DeviceTables | None:
        """Declared ops and captures that kernels read; None on a CPU."""
        return None if self.declared_stage is None else self.declared_stage.device_tables

    @property
    def capture_ring(self) -> CaptureRing | None:
        """Ring that captured states leave the device through; None on a CPU."""
        return None if self.declared_stage is None else self.declared_stage.capture_ring

    @property
    def segments(self) -> Segments | None:
        """CUDA graphs of what lies between blocks; None where passes are not captured."""
        return self.passes.segments

    @torch.no_grad()
    def run(self, command: RunnerCommand) -> Any:
        """Run a command between steps. Returns its answer."""
        return command.run(self)

    # -- requests in and out ------------------------------------------------------------

    def attach(self, trace: RequestTrace) -> None:
        """Make a trace known, before the first step that names it by its key."""
        self.nnsight_request_helper.register(trace)

    def finish_declared(self, end: RequestEnd) -> Future[DeclaredResult]:
        """Release what a finished request's interventions hold; its results, when all captured states have arrived."""
        return self.declared.finish(end)

    def finish_nnsight(self, ends: Sequence[RequestEnd]) -> ModelRunnerOutput:
        """Wind up the traces of finished requests.

        Returns:
            their saves and errors, by request.
        """
        helper, traces = self.nnsight_request_helper, self.nnsight_request_helper.traces_of(ends)
        if any(trace.in_pass for trace in traces.values()):
            self.drop_finished(traces)
        helper.process_finished_reqs([end for end in ends if end.request_id in traces])
        output = ModelRunnerOutput(req_ids=list(traces))
        for rid, trace in traces.items():
            output.saves[rid] = trace.saved_names()
            if trace.error is not None:
                output.errors[rid] = trace.error
        return output

    def drop_finished(self, finished_req_ids: Collection[str]) -> None:
        """Take finished requests' traces out of the pass under way: no block sees a step that did not happen."""
        for trace in self.nnsight_request_helper.drop_finished(finished_req_ids):
            self.interleaver.leave(trace)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Drop finished and preempted requests from the tables."""
        for request_id in scheduler_output.preempted_req_ids:
            self.declared.leave_tables(request_id)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Enter requests into the tables."""
        super().add_requests(scheduler_output)
        self.declared.enter(scheduler_output.scheduled_new_reqs)
        self.declared.lose(scheduler_output.lost_captures)

    # -- a step ----------------------------------------------------------------------

    @torch.no_grad()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        """Run a step's forward pass with the blocks of its traced requests. What a block raises stays with its request.

        Raises:
            RuntimeError: a pass of this runner is under way, or its CUDA graphs are being captured.
        """
        if self.is_capturing:
            raise RuntimeError(
                "this runner captures CUDA graphs: no pass can start, and no hook be registered, before the capture has ended"
            )
        if self.interleaver.interleaving:
            raise RuntimeError("a pass is under way: sample_tokens() comes before the next execute_model()")
        helper = self.nnsight_request_helper
        helper.enter(scheduler_output.scheduled_new_reqs)
        if not helper.traced(scheduler_output.scheduled):
            return super().execute_model(scheduler_output, intermediate_tensors)
        helper.process_new_reqs(scheduler_output.scheduled)
        self.interleaver.begin_pass(helper.traces)
        try:
            if self.partition.hook_execution == "split":
                self._put_hooked_last(scheduler_output)
            return super().execute_model(scheduler_output, intermediate_tensors)
        except BaseException:
            self.interleaver.end_pass()
            raise

    def _put_hooked_last(self, step: SchedulerOutput) -> None:
        """In a decode step, move requests whose blocks wait for a module to the end: each half is then one slice."""
        if all(entry.decodes for entry in step.scheduled):
            hooked, attached = self.interleaver.hooked(), self.nnsight_request_helper.attached
            step.scheduled.sort(key=lambda e: e.request_id in attached and attached[e.request_id][1] in hooked)
            self.nnsight_request_helper.process_new_reqs(step.scheduled)

    def _padded_size(self, step: SchedulerOutput) -> int | None:
        """Passes with gradients, and as transformers runs them, are not padded: their values are served whole."""
        as_it_is = self.interleaver.pass_options.alone or self.passes.with_gradients
        return None if self.interleaver.traces and as_it_is else super()._padded_size(step)

    def make_forward_batch(self, input_batch: InputBatch) -> ForwardBatch:
        """The step's `ForwardBatch`, with its declared ops."""
        batch = super().make_forward_batch(input_batch)
        self.declared.begin_step()
        if not self.declared.declares(input_batch.entries):
            return batch
        rows = self._row_buffers(batch.num_tokens)
        batch.site_ops = self.declared.site_ops(input_batch, rows, self.passes.with_gradients)
        batch.attention_cuts = self.declared.attention_cuts(input_batch)
        return batch

    def captured_site_ops(self, bs: int) -> TableOps | None:
        """`ForwardBatch.site_ops` of a decode pass that is captured for `bs` rows of the input buffers."""
        return self.declared.captured_site_ops(self._row_buffers(bs))

    def _row_buffers(self, rows: int) -> RowBuffers:
        buffers = self.input_buffers
        return RowBuffers(
            buffers.op_rows[:rows], buffers.positions[:rows], buffers.blocks[:, :rows], buffers.flags[:rows]
        )

    def dispatch(self, forward_batch: ForwardBatch) -> BatchExecutionDescriptor:
        """Decide how the batch runs, by the blocks that wait for a module of this pass."""
        hooked = self.nnsight_request_helper.count_requests(self.interleaver.hooked())
        if forward_batch.forward_mode.is_extend() or self.segments is None:
            can_replay = not hooked and self.can_replay(forward_batch)
        else:
            can_replay = self.graph_runner is not None and self.graph_runner.can_run(forward_batch)
        return self._decide(forward_batch, hooked, can_replay, self.interleaver.pass_options.modules_for)

    def _run(self, forward_batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        if not self.interleaver.traces:
            run = self.passes.run if descriptor.execution is Execution.SEGMENTS else super()._run
            return run(forward_batch, descriptor)
        output = self.passes.run(forward_batch, descriptor)
        serve_outputs(self.interleaver.traces, output.next_token_logits, forward_batch.transformers_pass)
        return output

    def replay(self, batch: ForwardBatch, in_place: bool = False) -> LogitsProcessorOutput:
        """Run a pass from its CUDA graphs. That of a decode pass ends before the ops at the logits."""
        output = super().replay(batch, in_place)
        if batch.site_ops is None or batch.forward_mode.is_extend():
            return output
        logits = apply_inner(output.next_token_logits.unsqueeze(0), batch.site_ops, 0, LOGITS)[0]
        return LogitsProcessorOutput(logits, output.hidden_states)

    @torch.no_grad()
    def sample_tokens_async(self) -> AsyncOutput | None:
        """`sample_tokens` without waiting for the device, with blocks served that wait for logits or samples."""
        if self.execute_model_state is None or not self.interleaver.interleaving:
            return super().sample_tokens_async()
        try:
            sampled = super().sample_tokens_async()
            self.interleaver.sync_once()  # a pass counts for those that were alive
        finally:
            self.interleaver.end_pass()
        assert sampled is not None
        self.nnsight_request_helper.report(sampled.output)
        return sampled

    def _sample(self, logits: torch.Tensor, state: ExecuteModelState) -> SamplerOutput:
        interleaver, sampling = self.interleaver, state.input_batch.sampling
        traced = interleaver.interleaving
        if traced:
            self.nnsight_request_helper.unflatten(sampling)
            logits = interleaver.handle(interleaver.logits, logits)
        self.declared.capture_logits(state.input_batch, state.logits_output.next_token_logits, logits)
        self.declared.send()
        sampled = super()._sample(logits, state)
        if traced and interleaver.awaits_token():
            interleaver.sync_once()
            sampled.token_ids = offer_tokens(interleaver, sampled.token_ids, sampling, self.vocab_size)
        elif traced:
            interleaver.pass_token()
        return sampled
