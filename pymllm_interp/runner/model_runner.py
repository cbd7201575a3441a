"""ModelRunner runs the forward passes of the models: it owns the model, the memory pools and the attention backend.

Life cycle, by hand::

    runner = ModelRunner(server_config, model_config)
    runner.initialize()
    batch = runner.prepare_forward_batch_extend(input_ids, rows, seq_lens, extend_seq_lens, extend_prefix_lens, slots)
    next_token_ids = runner.sample(runner.forward(batch), batch)

An engine drives it by steps instead: `execute_model(scheduler_output)` runs the pass, `sample_tokens()` picks the tokens.
Nothing here knows of interpretability; `InterpModelRunner` connects the two.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import numpy as np
import torch

from ..attention import create_attention_backend
from ..config import ModelConfig, ServerConfig
from ..core.forward_batch import ForwardBatch, ForwardMode
from ..core.model_spec import ModelSpec
from ..core.step import LogitsProcessorOutput as LogitsProcessorOutput
from ..core.step import ModelRunnerOutput, SchedulerOutput
from ..mem_cache.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator, resolve_kv_dtype
from ..models.adapters.slots import AdapterSlots
from ..models.base import CausalLM
from ..models.registry import check_supported, load_model, spec_of
from ..models.weights.model_state import ModelState
from ..models.weights.source import ModelSource, resolve_model
from ..sampling import RejectionSampler, Sampler, SamplerOutput, SamplingBatch, TokenMasks
from ..utils.upload import upload
from . import device_memory, dummy_run, invariant
from .async_output import AsyncOutput
from .device_memory import get_available_gpu_memory, return_freed_memory
from .device_memory import get_total_gpu_memory as get_total_gpu_memory
from .executions import Executions
from .graphs.captured_passes import CapturedPasses
from .graphs.cuda_graph_runner import CudaGraphRunner
from .input_batch import ExecuteModelState, InputBatch, InputBuffers
from .partition import BatchExecutionDescriptor, Execution, Partition
from .parts import LONG_PASS, RunnerParts
from .request_state import RequestState
from .stages.stage import PassDemands
from .step_inputs import StepInputs, dummy_attn
from .vision_inputs import VisionInputs

logger = logging.getLogger(__name__)


class ModelRunner(RunnerParts):
    """Runs the forward passes of one model on one device. `RunnerParts` has its other attributes.

    Args:
        server_config, model_config: configuration; None: the defaults.
        gpu_id: the CUDA device, if the configuration's `device` names none.

    Attributes:
        model_state: version and fingerprint of the model; None while `model` is.
        graphs, executions: CUDA graphs of its passes, and what runs passes by their execution.
        execute_model_state: the step between `execute_model` and `sample_tokens`; None outside of a step.
    """

    def __init__(
        self, server_config: ServerConfig | None = None, model_config: ModelConfig | None = None, gpu_id: int = 0
    ) -> None:
        super().__init__(server_config, model_config, gpu_id)
        self.source: ModelSource | None = None
        self.model_state: ModelState | None = None
        self.model_memory_usage = 0.0
        self.graphs = CapturedPasses(self)
        self.executions = Executions(self, self.graphs)
        self.partition = Partition(self.server_config.hook_execution)
        self.execute_model_state: ExecuteModelState | None = None
        self.sampler = Sampler(self.server_config.logprobs_mode)
        self._as_logits = self.sampler.as_logits

    # -- life cycle --------------------------------------------------------------

    def initialize(self) -> None:
        """Load the model and set up memory, attention and graphs. A second call raises RuntimeError."""
        self.load()
        self.open()

    def load(self) -> None:
        """The first half of `initialize`: the weights."""
        if self.model is not None:
            raise RuntimeError("this runner is initialised already; shut it down first, or make another")
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.gpu_id)
        self.source = resolve_model(self.model_config)
        check_supported(self.source.hf_config)
        self._init_metadata(spec_of(self.source.hf_config, self.model_config.impl, self.dtype))
        with invariant.mode(self, self.source.hf_config):
            self.load_model()

    def open(self) -> None:
        """The second half: memory, attention and graphs."""
        self.init_memory_pool()
        self.init_attention_backend()
        self.init_cuda_graphs(self.server_config.lazy_graphs)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Build the architecture's class and write its weights.

        Args:
            load_dummy_weights: make seeded random ones, whatever `load_format` says.

        Raises:
            UnsupportedModelError: an architecture that has no implementation.
            WeightsError: weights that are missing, unexpected, misshapen or unreadable.
            torch.OutOfMemoryError: the weights do not fit.
        """
        assert self.source is not None, "initialize() resolves the model first"
        kind = self.device.partition(":")[0]
        started, free = time.perf_counter(), get_available_gpu_memory(kind, self.gpu_id)
        narrower = "dtype='bfloat16', " if self.dtype.itemsize > 2 else ""
        model = device_memory.fitting(
            self, lambda: self._model(load_dummy_weights or self.model_config.load_format == "dummy"),
            f"the weights of {self.model_config.model!r} as {self.dtype} do not fit",
            f"{narrower}a smaller model, or to end what else holds the memory (an LM that was not shut down, another process)",
        )  # fmt: skip
        self.model = model.eval().requires_grad_(False)
        self.partition.can_split = self.model.fuses_ops
        self._init_metadata(self.model.spec)  # of the loaded model
        self.kv_cache_dtype = resolve_kv_dtype(self.server_config.kv_cache_dtype, self.dtype, self.device)
        self.num_kv_layers = len(self.model.attention_layers()) + self.model.num_index_layers
        self.model_state = ModelState(self.model, self.source.hf_config)
        config = self.server_config
        self.adapters = AdapterSlots(self.model, config.max_loras, config.max_lora_rank, self.model_state.adapters)
        self.model_memory_usage = free - get_available_gpu_memory(kind, self.gpu_id)
        logger.info(
            "model loaded in %.1f s, %.2f GiB on the device", time.perf_counter() - started, self.model_memory_usage
        )

    @torch.no_grad()
    def _model(self, dummy: bool) -> CausalLM:
        assert self.source is not None and (dummy or self.source.folder is not None)
        folder = None if dummy else self.source.folder
        return load_model(
            self.source.hf_config, self.model_config.impl, self.model_spec, self.device, self.context_len, folder,
            self.model_config.seed, self.model_config.quantize,
        )  # fmt: skip

    def init_memory_pool(self) -> None:
        """Size and create the pools: request rows, KV slots, and the slots' allocator.

        Raises:
            ValueError: no room for a single page of KV.
            torch.OutOfMemoryError: the tables, the largest step or the KV pool do not fit.
        """
        self.max_running_requests = device_memory.num_served_requests(self)
        # The tables first: the KV pool gets the rest.
        device_memory.fitting(
            self, self._init_tables,
            f"the tables of {self.max_running_requests} requests of {self.context_len} tokens do not fit",
            "a lower max_running_requests, or a lower max_model_len",
        )  # fmt: skip
        self.max_total_num_tokens = device_memory.num_kv_tokens(self)
        if (longest := device_memory.num_served_tokens(self)) < self.context_len:
            self.update_max_model_len(longest)
        self.token_to_kv_pool = device_memory.make_kv_pool(self)
        tokens, page = self.max_total_num_tokens, self.server_config.page_size
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(tokens, page)
        assert self.req_to_token_pool is not None and self.model_state is not None
        self.step_inputs = StepInputs(
            self.req_states, self.input_buffers, self.req_to_token_pool, self.token_to_kv_pool_allocator, self.device,
            self.adapters, VisionInputs.of(self, self.req_states, self.model_state), self.cross_pool,
        )  # fmt: skip

    def _init_tables(self) -> None:
        self.req_to_token_pool = ReqToTokenPool(self.max_running_requests, self.context_len, self.device)
        self.gdn_pool, self.cross_pool = device_memory.make_state_pool(self), device_memory.make_cross_pool(self)
        merge = self.model_spec.mrope_merge
        self.req_states = RequestState(self.max_running_requests, self.context_len, self.device, merge)
        # A traced prompt may be longer than all other steps.
        rows = max(self.max_num_tokens, self.max_decode_rows, self.context_len) + self.model_spec.image_span
        self.input_buffers = InputBuffers(rows, self.device, merge is not None)
        for stage in self.stages:
            stage.init_tables(self.req_states, self.input_buffers)

    def init_attention_backend(self) -> None:
        """Create the attention backend that the configuration asks for.

        Raises:
            ValueError, ImportError: see `create_attention_backend`.
            torch.OutOfMemoryError: its workspace does not fit beside the pools.
        """
        name, by_row = self.server_config.attention_backend, self.server_config.batch_invariant
        self.attn_backend = device_memory.fitting(
            self, lambda: create_attention_backend(name, self.device, self.dtype, self.head_dim, self.kv_cache_dtype, by_row),
            "the workspace of attention does not fit", device_memory.smaller_pool(self.server_config),
        )  # fmt: skip

    def init_cuda_graphs(self, lazily: bool = False) -> None:
        """Capture passes, see `CapturedPasses.capture`. Skipped off CUDA, with `disable_cuda_graph`, and without generation."""
        self.graphs.clear()
        if self.graphs.why_none() is None:
            self.capture_model(lazily)

    def capture_model(self, lazily: bool = False) -> int:
        """Capture decode passes and small prefills; returns the graphs' memory in bytes: 0, with a warning, where skipped."""
        with invariant.mode(self):  # passes with hooks ask for it
            return self.graphs.capture(lazily)

    def shutdown(self) -> None:
        """Release the model and all memory. A second call does nothing."""
        self.graphs.release()
        for part in (self.model_state, self.adapters, *self.stages):
            if part is not None:
                part.close()
        self.model = self.model_state = self.adapters = self.attn_backend = self.execute_model_state = None
        for pool in filter(None, (self.req_to_token_pool, self.token_to_kv_pool, self.gdn_pool, self.cross_pool)):
            pool.close()  # the engine's scheduler holds it, too
        self.req_to_token_pool = self.token_to_kv_pool = self.token_to_kv_pool_allocator = None
        self.gdn_pool = self.cross_pool = None
        for name in ("req_states", "input_buffers", "step_inputs"):  # as many as there came to be
            vars(self).pop(name, None)
        return_freed_memory(self.device)

    def _init_metadata(self, spec: ModelSpec) -> None:
        self.model_spec = spec
        self.num_hidden_layers, self.num_attention_heads = spec.num_hidden_layers, spec.num_attention_heads
        self.num_kv_heads, self.head_dim = spec.num_key_value_heads, spec.head_dim
        self.hidden_size, self.vocab_size = spec.hidden_size, spec.vocab_size
        if (asked := self.server_config.max_model_len) is not None and asked > spec.context_len:
            raise ValueError(f"max_model_len={asked}, but the model's positions end at {spec.context_len}")
        device_default = device_memory.DEFAULT_NUM_TOKENS[self.device.partition(":")[0]]
        self.max_num_tokens = self.server_config.max_num_tokens or device_default
        most = self.max_num_tokens if spec.bidirectional else spec.context_len
        self.context_len = min(asked or spec.context_len, most)
        if self.model is not None and self.model.largest_step is not None:
            self.max_num_tokens = min(self.max_num_tokens, self.model.largest_step[1])

    # -- steps ------------------------------------------------------------------------

    @torch.no_grad()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        """Run a step's forward pass; `sample_tokens` has the result. A step without tokens returns an empty output.

        Raises:
            NotImplementedError: `intermediate_tensors` (pipeline parallelism) is given.
            RuntimeError: the last step's tokens were not sampled yet, or a block calls it in the middle of a pass.
        """
        if self.execute_model_state is not None:
            raise RuntimeError("a step is under way: call sample_tokens() before the next execute_model()")
        if intermediate_tensors is not None:
            raise NotImplementedError("intermediate_tensors: pipeline parallelism is not supported")
        try:
            return self._execute(scheduler_output)
        except BaseException:
            self.abandon()
            raise

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        self.finish_requests(step)
        self.add_requests(step)
        self.update_requests(step)
        self._execute_mm_encoder(step)
        self.demands = PassDemands()
        for stage in self.stages:
            stage.begin(step, self.demands)
        if self.step_inputs.vision is not None:
            self.step_inputs.vision.run_hooked(step.scheduled, self.demands.query)
        if step.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput()
        input_batch = self.prepare_inputs(step)
        forward_batch = self.make_forward_batch(input_batch)
        descriptor = self.dispatch(forward_batch)
        logits_output = self.executions.run(forward_batch, descriptor)
        for stage in self.stages:
            stage.ran(forward_batch, logits_output)
        self.execute_model_state = ExecuteModelState(step, input_batch, forward_batch, descriptor, logits_output)
        return None

    def abandon(self) -> None:
        """Forget a step that failed, so that the next one can run."""
        self.execute_model_state = None
        for stage in self.stages:
            stage.abandon()

    def constrain(self, masks: TokenMasks) -> None:
        """Sample the step under way by these masks of its constrained requests."""
        assert self.execute_model_state is not None
        self.execute_model_state.token_masks = masks

    @torch.no_grad()
    def sample_tokens(self) -> ModelRunnerOutput | None:
        """Pick the next token of each request that computed its last known one. None: no pass ran before."""
        output = self.sample_tokens_async()
        return None if output is None else output.get_output()

    @torch.no_grad()
    def sample_tokens_async(self) -> AsyncOutput | None:
        """`sample_tokens` without waiting for the device: the next step may be executed before the output is read."""
        state, self.execute_model_state = self.execute_model_state, None
        if state is None:
            return None
        try:
            return self._sample_step(state)
        except BaseException:
            self.abandon()
            raise

    def _sample_step(self, state: ExecuteModelState) -> AsyncOutput:
        batch, all_logits = state.input_batch, state.logits_output.next_token_logits
        logits, rows = all_logits, self.input_buffers.rows[: batch.num_tokens]
        if len(batch.sample_rows) != batch.num_tokens or batch.verifier is not None:
            logit_rows, token_rows = upload(
                self.device, np.array(batch.sample_rows, dtype=np.int64), batch.last_token_rows
            )
            rows = rows[token_rows]
            if len(batch.sample_rows) != len(all_logits):
                logits = all_logits[logit_rows]
        of_prompts = self.step_inputs.prompt_logprobs(all_logits, batch, self._as_logits)
        output = ModelRunnerOutput(req_ids=batch.req_ids, execution=state.descriptor.execution.value)
        for stage in self.stages:
            logits = stage.sample_from(batch, all_logits, logits)
        sampled = self._sample(logits, state)
        for stage in self.stages:
            sampled.token_ids = stage.sampled(batch, sampled.token_ids)
        verified, fed = None, sampled.token_ids
        if batch.verifier is not None:
            verified = batch.verifier(sampled.token_ids)
            fed, samples = verified.last, [entry.samples for entry in batch.entries]
            if not all(samples):
                fed = fed[upload(self.device, np.flatnonzero(samples))[0]]
        # The copy to the host is queued first: it waits for nothing that follows.
        scores = [found for stage in self.stages if stage.monitored and (found := stage.scores(batch)) is not None]
        on_the_way = AsyncOutput(output, batch, sampled, of_prompts, verified, *scores)
        self.req_states.feed(rows, fed)
        for stage in self.stages:
            stage.end(output)
        if self.step_inputs.vision is not None:
            output.errors |= self.step_inputs.vision.take_errors()
        return on_the_way

    def dispatch(self, forward_batch: ForwardBatch) -> BatchExecutionDescriptor:
        """Decide how the batch runs."""
        demands, cuts = self.demands, forward_batch.attention_cuts is not None
        whole = not demands.num_hooked and not cuts
        return self.partition.decide(
            forward_batch.forward_mode, forward_batch.num_request_tokens, forward_batch.batch_size, demands.num_hooked,
            can_replay=self.executions.can(Execution.REPLAY if whole else Execution.SEGMENTS, forward_batch),
            modules_for=demands.modules_for, cuts=cuts, missing=self.graphs.num_missing > 0,
        )  # fmt: skip

    def _sample(self, logits: torch.Tensor, state: ExecuteModelState) -> SamplerOutput:
        """Sample from logits [sampled rows, vocab]."""
        return self.sampler(logits, state.sampling_batch(self.req_states, self.model_spec.num_logits, self.device))

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Enter requests that are scheduled for the first time, or resume, into the table."""
        self.step_inputs.add_requests(scheduler_output)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Write the KV slots of pages that requests were given since the last step."""
        self.step_inputs.update_requests(scheduler_output)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Drop finished and preempted requests from the table."""
        self.step_inputs.finish_requests(scheduler_output)

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """Lay the step's tokens out in batch rows: token ids, positions, KV slots, and rows of the head."""
        return self.step_inputs.prepare(scheduler_output, self.executions.layout(scheduler_output))

    def make_forward_batch(self, input_batch: InputBatch) -> ForwardBatch:
        """The step's `ForwardBatch`: DECODE where each request computes one token, else EXTEND or MIXED."""
        batch = self.step_inputs.forward_batch(input_batch, self.batches)
        for stage in self.stages:
            stage.prepare(batch, input_batch)
        batch.meanwhile = self.meanwhile if batch.num_tokens >= LONG_PASS else None
        return batch

    # -- names of SGLang's and vLLM's runners, over what does run ---------------------------

    def update_max_model_len(self, max_model_len: int) -> None:
        """Set the longest sequence that is served, here and in the request table. Raises ValueError above the tables' size."""
        assert self.req_to_token_pool is not None, "call initialize() first"
        limit = self.req_to_token_pool.max_context_len
        if not 1 <= max_model_len <= limit:
            raise ValueError(f"max_model_len={max_model_len}: the tables hold 1 to {limit} tokens")
        self.context_len = self.req_states.max_model_len = max_model_len

    @property
    def draft_tokens_handler(self) -> RejectionSampler | None:
        """Verifier of the current step's drafts; None without drafts."""
        state = self.execute_model_state
        return None if state is None else state.input_batch.verifier

    def take_draft_token_ids(self) -> dict[str, list[int]] | None:
        """Request -> its drafts in the step under way, between `execute_model` and `sample_tokens`; None without drafts."""
        state = self.execute_model_state
        return None if state is None or not state.scheduler_output.drafts else dict(state.scheduler_output.drafts)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of the requests in `req_to_token`, [reqs]; KV slot of each token row, [tokens]), both int64."""
        return self.step_inputs.prepare_attn(input_batch)

    def prepare_dummy_attn(self, num_reqs: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for padding rows: the dummy row, and the dummy slot."""
        return dummy_attn(num_reqs, num_tokens, self.device)

    def _execute_mm_encoder(self, scheduler_output: SchedulerOutput) -> None:
        """Run the vision tower for images of a step without states. Raises ImageError, with the requests that are the reason."""
        if (vision := self.step_inputs.vision) is not None:
            vision.execute_mm_encoder(vision.parts([(entry, 0) for entry in scheduler_output.scheduled]))

    def reset_encoder_cache(self) -> None:
        """Drop the vision tower's states of images."""
        if self.step_inputs.vision is not None:
            self.step_inputs.vision.cache.reset()

    reset_mm_cache = reset_encoder_cache

    @property
    def graph_runner(self) -> CudaGraphRunner | None:
        """Captured decode passes; None where passes are not captured (a CPU, `disable_cuda_graph`)."""
        return self.graphs.decode

    def profile_cudagraph_memory(self) -> int:
        """Device memory to leave for the graphs when the KV pool is sized, in bytes."""
        return self.graphs.expected_bytes()

    def profile_run(self) -> None:
        """Run the largest step, so that its peak of memory is known."""
        _, sampled_from = self._dummy_run(self.max_num_tokens, skip_attn=True, is_profile=True)
        self._dummy_sampler_run(sampled_from)
        gc.collect()

    _dummy_run = dummy_run.dummy_run
    _dummy_sampler_run = dummy_run.dummy_sampler_run

    # -- passes by hand -----------------------------------------------------------------

    @torch.no_grad()
    def forward(self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN) -> LogitsProcessorOutput:
        """Run one pass of the model.

        Args:
            execution: PLAIN runs the fused pass, from its CUDA graphs if captured; MODULES goes module by module.

        Raises:
            ValueError: an unknown forward mode.
        """
        self.forward_pass_id += 1
        mode = forward_batch.forward_mode
        if mode == ForwardMode.IDLE:
            return LogitsProcessorOutput(
                torch.empty(0, self.model_spec.num_logits, dtype=self.dtype, device=self.device)
            )
        if mode == ForwardMode.DECODE:
            return self.forward_decode(forward_batch, execution)
        if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return self.forward_extend(forward_batch, execution)
        raise ValueError(f"unknown forward mode {mode!r}: expected one of {[m.name for m in ForwardMode]}")

    def forward_decode(
        self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN
    ) -> LogitsProcessorOutput:
        """One new token for each request."""
        if execution is Execution.REPLAY or (
            execution is Execution.PLAIN and self.executions.runs_padded(forward_batch)
        ):
            return self.executions.replay(forward_batch)
        return self.executions.plan_and_call(forward_batch, execution)

    forward_extend = forward_decode
    """New tokens behind cached ones, for each request."""

    def sample(
        self,
        logits_output: LogitsProcessorOutput,
        forward_batch: ForwardBatch,
        temperatures: torch.Tensor | None = None,
        top_ps: torch.Tensor | None = None,
        top_ks: torch.Tensor | None = None,
        penalty_params: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Next token ids, int32 [batch], by the sampler of the engine's steps. Greedy without temperatures, or if they are 0.

        See `SamplingBatch.of_tensors` for the arguments. A batch with `return_logprob` gets
        `logits_output.next_token_logprobs`, under the raw logits.
        """
        logits = logits_output.next_token_logits
        batch = SamplingBatch.of_tensors(logits, temperatures, top_ps, top_ks, penalty_params)
        if forward_batch.return_logprob:
            batch.num_logprobs = list(forward_batch.top_logprobs_nums or [0] * len(logits))
        output = self.sampler(logits, batch)
        if output.logprobs is not None:
            logits_output.next_token_logprobs = [entry for entry in output.logprobs.tolists() if entry is not None]
        return output.token_ids
