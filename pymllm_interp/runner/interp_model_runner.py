"""InterpModelRunner: a ModelRunner for requests with traces, interventions and captures.

Its stages serve them (runner/stages): `TracedStage` the traces, `DeclaredStage` the interventions and captures.
This class makes the stages, and is the interface for engine and clients::

    load_model            the weights, and the envoy tree over them
    attach                a trace, before its first step
    execute_model         a step; the stages serve its hooks
    finish_declared       results of interventions and captures
    finish_nnsight        blocks that still wait; saves, which the engine delivers
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from ..config import ModelConfig, ServerConfig
from ..core.step import DeclaredResult, ModelRunnerOutput, RequestEnd, SchedulerOutput
from ..hooks.captures.egress.ring import CaptureRing
from ..hooks.declarations import Declarations
from ..hooks.interventions.device_tables import DeviceTables
from ..hooks.saes.encoders import Encoders
from ..hooks.saes.registry import SAERegistry
from ..hooks.traces.blocks.trace import RequestTrace
from ..hooks.traces.syntax.envoy import TracedModel, TreeMaker
from ..mem_cache.kv_connector import NO_CONNECTOR, KVConnector
from ..models.readout import ModelReadout
from ..speculative.drafter import SpeculativeConfig
from .drafting.draft_model import ModelDrafter
from .drafting.eagle import EagleDrafter
from .graphs.prompt_segments import PromptSegments
from .graphs.segments import DecodeSegments
from .invariant import invariant_kind
from .model_runner import ModelRunner
from .stages.connector_stage import ConnectorStage, make_kv_connector
from .stages.declared_stage import DeclaredStage
from .stages.invariant_stage import InvariantStage
from .stages.traced_stage import TracedStage


class RunnerCommand(Protocol):
    """Command of a client that a runner runs between steps. It is picklable, and finds all else in the runner."""

    def run(self, runner: InterpModelRunner) -> Any:
        """Do it on the runner's thread, without gradients. Returns the answer."""
        ...


class InterpModelRunner(ModelRunner):
    """A ModelRunner that lets each request's hooks read and change its own hidden states, logits and samples.

    Args:
        wrap: makes the envoy tree over the loaded weights, such as `TracedModel._tree_maker()`; None for a worker without traces.

    Attributes:
        interleaver: serves the blocks of traces.
        nnsight_request_helper: traces in flight, and their rows.
        traced_stage: serves traces, through the two above.
        declared_stage: interventions and captures; None before `initialize`.
        declarations: the checks of them, for clients; None before `initialize`.
        drafter: the draft model, or the EAGLE head, of speculative decoding; None without.
        kv_connector: keeper of KV pages that leave the pool; `NO_CONNECTOR` keeps none.
        saes: SAEs by name, from `ModelConfig.saes` and later ones; None before `initialize`.
        kept: key -> object that a command keeps for later ones.
    """

    def __init__(
        self,
        server_config: ServerConfig | None = None,
        model_config: ModelConfig | None = None,
        gpu_id: int = 0,
        *,
        wrap: TreeMaker | None = TracedModel,
    ) -> None:
        super().__init__(server_config, model_config, gpu_id)
        self._wrap = wrap
        self.traced_stage = TracedStage(self.server_config.hook_execution)
        self.interleaver, self.nnsight_request_helper = self.traced_stage.interleaver, self.traced_stage.helper
        self.declared_stage: DeclaredStage | None = None
        self.kv_connector: KVConnector = NO_CONNECTOR
        self.declarations: Declarations | None = None
        self.saes: SAERegistry | None = None
        self.drafter: ModelDrafter | None = None
        self.kept: dict[str, Any] = {}
        self._tree: TracedModel | weakref.ref[TracedModel] | None = None

    # -- life cycle ------------------------------------------------------------------

    @property
    def nnsight_model(self) -> TracedModel | None:
        """The envoy tree over the served module, which it does not copy. None before `load_model`, and without `wrap`."""
        return self._tree() if isinstance(self._tree, weakref.ref) else self._tree

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights, and the weights of a draft model. Then wrap the module."""
        super().load_model(*args, **kwargs)
        speculative = SpeculativeConfig.of(self.server_config.speculative)
        if speculative is not None:
            self.rows_of_request = 1 + speculative.num_speculative_tokens
        if speculative is not None and speculative.model:
            self.drafter = (EagleDrafter if speculative.method == "eagle3" else ModelDrafter)(speculative, self)
            self.draft = self.drafter.runner
        self.traced_stage.model_spec = self.model_spec
        self.traced_stage.has_experts = any(
            "experts" in name.split(".") for name, _ in self.get_model().named_modules()
        )
        self._tree = None if self._wrap is None else self._wrap(self.get_model(), self.interleaver)

    def adopt(self, tree: TracedModel) -> None:
        """Take a tree over the served module as `nnsight_model`, unless `load_model` has made one. It is held weakly."""
        if self.nnsight_model is None:
            self._tree = weakref.ref(tree)

    def init_memory_pool(self) -> None:
        """The pools, and the tables of declared interventions."""
        self.saes = SAERegistry(self.model_spec, self.device)
        for name, source in self.model_config.saes.items():
            self.saes[name] = source
        readout = ModelReadout(self.get_model(), self.model_spec)
        encoders = Encoders(self.saes, self.model_spec, readout, self.server_config.reconstruct)
        self.declared_stage = DeclaredStage(self.server_config, self.model_spec, self.device, readout, encoders)
        own = (self.drafter.stage,) if isinstance(self.drafter, EagleDrafter) else ()
        mode = (InvariantStage(invariant_kind(self) or ""),) if self.kernels else ()
        self.stages = self.traced_stage, self.declared_stage, *own, *mode
        super().init_memory_pool()
        assert self.token_to_kv_pool is not None and self.model_state is not None
        connector = make_kv_connector(
            self.server_config, self.model_spec, self.token_to_kv_pool, self.model_state, self.kernels
        )
        if connector is not NO_CONNECTOR:
            self.kv_connector, self.stages = connector, (*self.stages, ConnectorStage(connector))
        stage = self.declared_stage
        if self.step_inputs.cross is not None:
            self.step_inputs.cross.site_ops_of = stage.part_ops
        if self.step_inputs.vision is not None:
            self.step_inputs.vision.site_ops_of = stage.part_ops
        self.declarations = Declarations(
            stage.limits, stage.model, stage.readout, stage.capture_ring, device_memory=stage.device_memory
        )
        if self.drafter is not None:
            self.drafter.open(self)

    def shutdown(self) -> None:
        """Release the model and all memory. A second call does nothing."""
        if self.saes is not None:
            self.saes.close()
        if self.declarations is not None:
            self.declarations.close()
        if self.drafter is not None:
            self.drafter.close()
        self._tree = self.saes = self.drafter = self.draft = None
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
    def segments(self) -> DecodeSegments | None:
        """CUDA graphs of the parts between blocks in decode passes; None if they are not captured."""
        return self.graphs.segments

    @property
    def prompt_segments(self) -> PromptSegments | None:
        """The same of passes with prompts."""
        return self.graphs.prompt_segments

    def get_mtp_target_hidden_states(self) -> torch.Tensor | None:
        """[rows, width], the states of the last pass that an EAGLE-3 head reads; None without a head.

        Passes overwrite them. A pass that ends early keeps the states of later layers as they were.
        """
        return self.drafter.stage.aux.states if isinstance(self.drafter, EagleDrafter) else None

    @torch.no_grad()
    def run(self, command: RunnerCommand) -> Any:
        """Run a command between steps. Returns its answer."""
        return command.run(self)

    # -- requests in and out ------------------------------------------------------------

    def attach(self, trace: RequestTrace) -> None:
        """Make a trace known, before the first step that names it by its key."""
        self.nnsight_request_helper.register(trace)

    def finish_declared(self, end: RequestEnd) -> Future[DeclaredResult]:
        """Release the resources of a finished request's interventions, and its results, when all captured states have arrived."""
        return self.declared.finish(end)

    def finish_nnsight(self, finished_requests: Sequence[RequestEnd]) -> ModelRunnerOutput:
        """Wind up the traces of finished requests.

        Returns:
            saves of their blocks by request; saves of blocks without their own request by trace.
        """
        helper, traces = self.nnsight_request_helper, self.nnsight_request_helper.traces_of(finished_requests)
        if any(trace.in_pass for trace in traces.values()):
            self.drop_finished(traces)
        wholes = {whole for trace in traces.values() for whole in trace.whole_batch}
        helper.process_finished_reqs([end for end in finished_requests if end.request_id in traces])
        return ModelRunnerOutput(
            req_ids=list(traces),
            saves={rid: trace.saves.saved_names() for rid, trace in traces.items()},
            shared_saves={whole.key: whole.saves.saved_names() for whole in wholes if whole.over},
        )

    def drop_finished(self, finished_req_ids: Collection[str]) -> None:
        """Take finished requests' traces out of the pass under way: no block sees a step that did not happen."""
        for trace in self.nnsight_request_helper.drop_finished(finished_req_ids):
            self.interleaver.leave(trace)

    # -- a step ----------------------------------------------------------------------

    @torch.no_grad()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        """Run a step's forward pass with the blocks of its traced requests. An error of a block affects only its request.

        Raises:
            RuntimeError: a pass of this runner is under way, or its CUDA graphs are being captured.
        """
        if self.is_capturing:
            raise RuntimeError(
                "this runner captures CUDA graphs: no pass can start, and no hook be registered, before the capture has ended"
            )
        if self.interleaver.thread is not None:
            raise RuntimeError("a pass is under way: sample_tokens() comes before the next execute_model()")
        return super().execute_model(scheduler_output, intermediate_tensors)
