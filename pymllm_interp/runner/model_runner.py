"""ModelRunner runs the forward passes of the models: it owns the model, the memory pools and the attention backend.

Life cycle, by hand::

    runner = ModelRunner(server_config, model_config)
    runner.initialize()
    batch = runner.prepare_forward_batch_extend(input_ids, rows, seq_lens, extend_seq_lens, extend_prefix_lens, slots)
    next_token_ids = runner.sample(runner.forward(batch), batch)

An engine drives it by steps instead: `execute_model(scheduler_output)` runs the pass, `sample_tokens()` picks the tokens.
Nothing here knows of interpretability; `InterpModelRunner` is where the two meet.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from itertools import compress
from typing import Any

import numpy as np
import torch

from ..attention import create_attention_backend
from ..attention.attention_backend import AttentionBackend, RadixAttention
from ..config import ModelConfig, ServerConfig, resolve_device, resolve_dtype
from ..core.forward_batch import ForwardBatch, ForwardMode
from ..core.model_spec import ModelSpec
from ..core.out_of_memory import within_memory
from ..core.output import LogitsProcessorOutput, ModelRunnerOutput, SchedulerOutput
from ..core.upload import upload
from ..mem_cache.memory_pool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from ..models.base import CausalLM
from ..models.registry import build_model, model_class
from ..models.source import ModelSource, resolve_model
from ..models.weights import init_dummy_weights, iter_safetensors, load_weights
from ..sampling import (
    Sampler,
    SamplerOutput,
    SamplingBatch,
    apply_penalties,
    gather_logprobs,
    prompt_logprobs,
    sample_tokens,
)
from .async_output import AsyncOutput
from .cuda_graph_runner import CudaGraphRunner, capture_batch_sizes
from .input_batch import ExecuteModelState, InputBatch, InputBuffers
from .partition import BatchExecutionDescriptor, Execution, Partition
from .request_state import RequestState

logger = logging.getLogger(__name__)

DEFAULT_NUM_TOKENS = {"cpu": 2048, "cuda": 8192}
DEFAULT_CPU_KV_TOKENS = 4096
GRAPH_OVERHEAD_BYTES = 1 << 30
PAD_SLOT_ID = 0
"""The KV slot of rows that belong to nobody. Never handed out; unlike a negative one it can be written to."""


def get_available_gpu_memory(device: str = "cuda", gpu_id: int = 0) -> float:
    """Free memory of the device in GB; 0.0 off CUDA."""
    if device != "cuda" or not torch.cuda.is_available():
        return 0.0
    return torch.cuda.mem_get_info(gpu_id)[0] / 2**30


def get_total_gpu_memory(device: str = "cuda", gpu_id: int = 0) -> float:
    """Memory of the device in GB; 0.0 off CUDA."""
    if device != "cuda" or not torch.cuda.is_available():
        return 0.0
    return torch.cuda.mem_get_info(gpu_id)[1] / 2**30


class ModelRunner:
    """Runs the forward passes of one model on one device.

    Args:
        server_config, model_config: the defaults where None.
        gpu_id: the CUDA device, where the configuration's `device` names none.

    Attributes:
        model, req_to_token_pool, token_to_kv_pool, token_to_kv_pool_allocator, attn_backend: None before `initialize` and
            after `shutdown`.
        graph_runner: None where passes are not captured (a CPU, `disable_cuda_graph`).
        gdn_pool: of hybrid recurrent models, which are not served: always None.
        max_total_num_tokens: KV slots that requests can have.
        forward_pass_id: passes so far, idle ones included.
    """

    def __init__(
        self, server_config: ServerConfig | None = None, model_config: ModelConfig | None = None, gpu_id: int = 0
    ) -> None:
        self.server_config = server_config or ServerConfig()
        self.model_config = model_config or ModelConfig()
        self.device = resolve_device(self.server_config.device)
        self.gpu_id = int(self.device.partition(":")[2] or gpu_id)
        self.dtype = resolve_dtype(self.model_config.dtype, self.device)
        self.kv_cache_dtype = self.dtype
        self.source: ModelSource | None = None
        self.model: CausalLM | None = None
        self.req_to_token_pool: ReqToTokenPool | None = None
        self.token_to_kv_pool: KVPool | None = None
        self.token_to_kv_pool_allocator: TokenToKVPoolAllocator | None = None
        self.gdn_pool = None
        self.attn_backend: AttentionBackend | None = None
        self.graph_runner: CudaGraphRunner | None = None
        self.max_total_num_tokens = self.max_running_requests = self.max_num_tokens = 0
        self.num_hidden_layers = self.num_attention_heads = self.num_kv_heads = self.head_dim = 0
        self.hidden_size = self.vocab_size = self.context_len = 0
        self.forward_pass_id = 0
        self.model_memory_usage = 0.0
        self.partition = Partition(self.server_config.hook_execution)
        self.execute_model_state: ExecuteModelState | None = None
        self.sampler = Sampler()

    # -- life cycle --------------------------------------------------------------

    def initialize(self) -> None:
        """Load the model and set up memory, attention and graphs. A second call raises RuntimeError."""
        if self.model is not None:
            raise RuntimeError("this runner is initialised already; shut it down first, or make another")
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.gpu_id)
        self.source = resolve_model(self.model_config)
        model_class(self.source.hf_config, self.model_config.impl)  # raises if the architecture is not supported
        self._init_metadata(self.source.hf_config)
        self.load_model()
        self._init_kv_cache_dtype()
        self.init_memory_pool()
        self.init_attention_backend()
        self.init_cuda_graphs()

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
        model = within_memory(
            lambda: self._model(load_dummy_weights or self.model_config.load_format == "dummy"),
            f"the weights of {self.model_config.model!r} as {self.dtype} do not fit on {self.device}{self._memory_left()}; "
            f"what helps: {narrower}a smaller model, or to end what else holds the memory (an LM that was not shut down, "
            "another process)",
        )
        self.model = model.eval().requires_grad_(False)
        self.model_memory_usage = free - get_available_gpu_memory(kind, self.gpu_id)
        logger.info(
            "model loaded in %.1f s, %.2f GiB on the device", time.perf_counter() - started, self.model_memory_usage
        )

    @torch.no_grad()
    def _model(self, dummy: bool) -> CausalLM:
        assert self.source is not None
        model = build_model(
            self.source.hf_config, self.model_config.impl, self.model_spec, self.device, self.context_len
        )
        if dummy:
            init_dummy_weights(model, self.model_config.seed)
        else:
            assert self.source.folder is not None
            load_weights(model, iter_safetensors(self.source.folder))
        return model

    def _memory_left(self) -> str:
        if not self.device.startswith("cuda"):
            return ""
        free, total = torch.cuda.mem_get_info(self.gpu_id)
        return f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)"

    def _smaller_pool(self) -> str:
        config = self.server_config
        return (
            f"a lower kv_cache_tokens (now {config.kv_cache_tokens}), or, where that is None, a lower gpu_memory_utilization "
            f"(now {config.gpu_memory_utilization})"
        )

    def init_memory_pool(self) -> None:
        """Size and create the pools: request rows, KV slots, and the slots' allocator.

        Raises:
            ValueError: no room for a single page of KV.
            torch.OutOfMemoryError: the tables, the largest step or the KV pool do not fit.
        """
        config = self.server_config
        self.max_running_requests = config.max_running_requests
        # The tables first: what they take is not there for KV.
        within_memory(
            self._init_tables,
            f"the tables of {self.max_running_requests} requests of {self.context_len} tokens do not fit on "
            f"{self.device}{self._memory_left()}; what helps: a lower max_running_requests, or a lower max_model_len",
        )
        self.max_total_num_tokens = self._profile_kv_tokens() // config.page_size * config.page_size
        if self.max_total_num_tokens <= 0:
            raise ValueError(
                f"the KV pool would hold {self.max_total_num_tokens} tokens{self._memory_left()}: raise kv_cache_tokens to at "
                f"least page_size ({config.page_size}), raise gpu_memory_utilization (now {config.gpu_memory_utilization}), "
                f"lower max_num_tokens (now {self.max_num_tokens}), or take a smaller model"
            )
        self.token_to_kv_pool = within_memory(
            lambda: KVPool(
                num_layers=self.num_hidden_layers,
                size=self.max_total_num_tokens,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=self.kv_cache_dtype,
                device=self.device,
                page_size=config.page_size,
            ),
            f"the KV pool of {self.max_total_num_tokens} tokens ({self.max_total_num_tokens * self._kv_bytes() / 2**30:.1f} "
            f"GiB) does not fit on {self.device}{self._memory_left()}; what helps: {self._smaller_pool()}",
        )
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(self.max_total_num_tokens, config.page_size)

    def _init_tables(self) -> None:
        self.req_to_token_pool = ReqToTokenPool(self.max_running_requests, self.context_len, self.device)
        self.req_states = RequestState(self.max_running_requests, self.context_len, self.device)
        self.input_buffers = InputBuffers(max(self.max_num_tokens, self.max_running_requests), self.device)

    def init_attention_backend(self) -> None:
        """Create the attention backend that the configuration asks for.

        Raises:
            ValueError, ImportError: see `create_attention_backend`.
            torch.OutOfMemoryError: its workspace does not fit beside the pools.
        """
        name = self.server_config.attention_backend
        self.attn_backend = within_memory(
            lambda: create_attention_backend(name, self.device, self.dtype, self.head_dim),
            f"the workspace of attention does not fit on {self.device}{self._memory_left()}; what helps: {self._smaller_pool()}",
        )

    def init_cuda_graphs(self) -> None:
        """Capture decode passes. Skipped off CUDA, with `disable_cuda_graph`, and for models that do not generate."""
        self.graph_runner = None
        if self._why_no_graphs() is None:
            self.capture_model()

    def capture_model(self) -> int:
        """Capture the decode graphs; returns the device memory that they take, in bytes: 0, with a warning, where skipped."""
        why_not = self._why_no_graphs()
        if why_not is not None:
            logger.warning("no CUDA graphs are captured: %s", why_not)
            return 0
        self.graph_runner = CudaGraphRunner(self)
        return self.graph_runner.memory_usage

    def profile_cudagraph_memory(self) -> int:
        """Device memory to leave for the graphs when the KV pool is sized, in bytes: each keeps its logits."""
        if self._why_no_graphs() is not None:
            return 0
        rows = sum(capture_batch_sizes(self.max_running_requests))
        return rows * self.vocab_size * self.dtype.itemsize + GRAPH_OVERHEAD_BYTES

    def _why_no_graphs(self) -> str | None:
        if not self.device.startswith("cuda"):
            return f"device={self.device!r}"
        if self.server_config.disable_cuda_graph:
            return "disable_cuda_graph=True"
        if not self.is_generation:
            return "the model does not generate"
        return "its RoPE depends on the lengths in the batch" if self.model_spec.rope_depends_on_length else None

    def shutdown(self) -> None:
        """Release the model and all memory. A second call does nothing."""
        if self.graph_runner is not None:
            self.graph_runner.shutdown()
        self.model = None
        self.attn_backend = self.graph_runner = self.execute_model_state = None
        self.req_to_token_pool = self.token_to_kv_pool = self.token_to_kv_pool_allocator = None
        if hasattr(self, "req_states"):
            del self.req_states, self.input_buffers
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    @property
    def is_generation(self) -> bool:
        """Whether the model is a causal language model."""
        return self.model is None or isinstance(self.model, CausalLM)

    @property
    def sliding_window_size(self) -> int | None:
        """The widest sliding window of the layers, or None where some layer sees the whole context."""
        windows = [window for window in self.model_spec.sliding_windows if window]
        return max(windows) if len(windows) == self.num_hidden_layers else None

    def get_model(self) -> CausalLM:
        """The loaded model."""
        assert self.model is not None, "call initialize() first"
        return self.model

    def get_kv_cache_spec(self) -> dict[int, tuple[int, int, torch.dtype]]:
        """Layer -> (kv heads, head_dim, dtype) of its KV."""
        return {
            layer.layer_id: (layer.num_kv_heads, layer.head_dim, self.kv_cache_dtype)
            for layer in self.get_model().attention_layers()
        }

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Set the longest sequence that is served, here and in the request table.

        Raises:
            ValueError: above what the tables were made for.
        """
        assert self.req_to_token_pool is not None, "call initialize() first"
        limit = self.req_to_token_pool.max_context_len
        if not 1 <= max_model_len <= limit:
            raise ValueError(f"max_model_len={max_model_len}: the tables hold 1 to {limit} tokens")
        self.context_len = self.req_states.max_model_len = max_model_len

    def _init_metadata(self, config: Any) -> None:
        self.model_spec = spec = ModelSpec.of(config, self.dtype)
        self.num_hidden_layers, self.num_attention_heads = spec.num_hidden_layers, spec.num_attention_heads
        self.num_kv_heads, self.head_dim = spec.num_key_value_heads, spec.head_dim
        self.hidden_size, self.vocab_size = spec.hidden_size, spec.vocab_size
        asked = self.server_config.max_model_len
        if asked is not None and asked > spec.context_len:
            raise ValueError(f"max_model_len={asked}, but the model's positions end at {spec.context_len}")
        self.context_len = asked or spec.context_len
        device_default = DEFAULT_NUM_TOKENS[self.device.partition(":")[0]]
        self.max_num_tokens = self.server_config.max_num_tokens or device_default

    def _init_kv_cache_dtype(self) -> None:
        name = self.server_config.kv_cache_dtype
        self.kv_cache_dtype = self.dtype if name == "auto" else resolve_dtype(name, self.device)

    def _profile_kv_tokens(self) -> int:
        config, kv_bytes = self.server_config, self._kv_bytes()
        if config.kv_cache_tokens is not None:
            return config.kv_cache_tokens
        if not self.device.startswith("cuda"):
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return min(max(DEFAULT_CPU_KV_TOKENS, self.context_len), memory // 4 // kv_bytes)
        gc.collect()
        torch.cuda.empty_cache()  # what loading, or an engine before this one, has left cached is in no step's way
        within_memory(
            self.profile_run,
            f"the largest step does not fit on {self.device} beside the weights{self._memory_left()}; what helps: a lower "
            f"max_num_tokens (now {self.max_num_tokens}), a lower max_running_requests (now {self.max_running_requests}), or "
            "a smaller model",
        )
        # The allocator keeps the run's peak, so it counts as used; so does what others hold.
        free, total = torch.cuda.mem_get_info(self.gpu_id)
        room = total * config.gpu_memory_utilization - (total - free) - self.profile_cudagraph_memory()
        return int(room // kv_bytes)

    def _kv_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.num_hidden_layers * 2 * self.num_kv_heads * self.head_dim * self.kv_cache_dtype.itemsize

    # -- building batches ----------------------------------------------------------

    def prepare_forward_batch_extend(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        return_logprob: bool = False,
        top_logprobs_nums: list[int] | None = None,
        *,
        extend_seq_lens_cpu: list[int] | None = None,
        extend_prefix_lens_cpu: list[int] | None = None,
    ) -> ForwardBatch:
        """A batch that extends each request by `extend_seq_lens` tokens behind its `extend_prefix_lens` cached ones.

        Args:
            input_ids: [tokens], all new tokens, request by request.
            req_pool_indices, seq_lens, extend_seq_lens, extend_prefix_lens: [batch].
            out_cache_loc: [tokens], the KV slot of each new token.
            extend_seq_lens_cpu, extend_prefix_lens_cpu: the same on the host, so that nothing waits for the device.

        Raises:
            ValueError: lengths that do not add up, or a request without a new token.
        """
        sizes = extend_seq_lens_cpu if extend_seq_lens_cpu is not None else extend_seq_lens.tolist()
        prefixes = extend_prefix_lens_cpu if extend_prefix_lens_cpu is not None else extend_prefix_lens.tolist()
        if sum(sizes) != input_ids.shape[0]:
            raise ValueError(f"extend_seq_lens add up to {sum(sizes)}, but input_ids has {input_ids.shape[0]} tokens")
        if min(sizes, default=1) < 1:
            raise ValueError(f"request {sizes.index(min(sizes))} has no new token: extend_seq_lens={sizes}")
        device = input_ids.device
        ends = np.cumsum(sizes, dtype=np.int32) if sizes else np.zeros(0, dtype=np.int32)
        lens = np.array(prefixes, dtype=np.int32) + np.array(sizes, dtype=np.int32)
        positions = np.arange(sum(sizes), dtype=np.int64) - np.repeat(ends - lens, sizes)
        seq_lens_cpu = torch.from_numpy(lens)
        positions, starts, last_rows, rope_lens = upload(
            device, positions, ends - np.array(sizes, dtype=np.int32), ends.astype(np.int64) - 1,
            np.repeat(lens, sizes).astype(np.int64),
        )  # fmt: skip
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(sizes),
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=positions,
            extend_num_tokens=int(sum(sizes)),
            extend_seq_lens=extend_seq_lens,
            extend_prefix_lens=extend_prefix_lens,
            extend_start_loc=starts,
            extend_prefix_lens_cpu=list(prefixes),
            extend_seq_lens_cpu=list(sizes),
            return_logprob=return_logprob,
            top_logprobs_nums=top_logprobs_nums,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
            logits_indices=last_rows,
            rope_lens=rope_lens if self.model_spec.rope_depends_on_length else None,
        )

    def prepare_forward_batch_decode(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        return_logprob: bool = False,
        top_logprobs_nums: list[int] | None = None,
        mrope_position_deltas: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        seq_lens_cpu: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A batch of one new token for each request. All arguments are [batch]; `seq_lens` counts the new token.

        Args:
            positions: int64, `seq_lens` - 1.
            seq_lens_cpu: `seq_lens` on the host, so that nothing waits for the device.
        """
        lens = seq_lens_cpu if seq_lens_cpu is not None else seq_lens.cpu()
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=input_ids.shape[0],
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens,
            positions=seq_lens.to(torch.int64) - 1 if positions is None else positions,
            return_logprob=return_logprob,
            top_logprobs_nums=top_logprobs_nums,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
            mrope_position_deltas=mrope_position_deltas,
            rope_lens=seq_lens.to(torch.int64) if self.model_spec.rope_depends_on_length else None,
        )

    # -- forward and sample ---------------------------------------------------------

    @torch.no_grad()
    def forward(self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN) -> LogitsProcessorOutput:
        """Run one pass of the model.

        Args:
            execution: PLAIN runs the fused pass, a decode pass from its CUDA graph where there is one; MODULES goes module
                by module.

        Raises:
            ValueError: an unknown forward mode.
        """
        self.forward_pass_id += 1
        mode = forward_batch.forward_mode
        if mode == ForwardMode.IDLE:
            return LogitsProcessorOutput(torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device))
        if mode == ForwardMode.DECODE:
            return self.forward_decode(forward_batch, execution)
        if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return self.forward_extend(forward_batch, execution)
        raise ValueError(f"unknown forward mode {mode!r}: expected one of {[m.name for m in ForwardMode]}")

    def forward_decode(
        self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN
    ) -> LogitsProcessorOutput:
        """One new token for each request."""
        if execution is Execution.PLAIN and self._can_replay(forward_batch):
            execution = Execution.REPLAY
        return self._plan_and_call(forward_batch, execution)

    def forward_extend(
        self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN
    ) -> LogitsProcessorOutput:
        """New tokens behind cached ones, for each request."""
        return self._plan_and_call(forward_batch, execution)

    def _plan_and_call(self, batch: ForwardBatch, execution: Execution) -> LogitsProcessorOutput:
        if execution is Execution.REPLAY:
            assert self.graph_runner is not None
            return self.graph_runner.replay(batch)
        assert batch.attn_backend is not None
        batch.attn_backend.init_forward_metadata(batch)
        logits = self._call_model(batch, execution)[0]
        return LogitsProcessorOutput(logits, hidden_states=batch.hidden_states)

    def _call_model(self, batch: ForwardBatch, execution: Execution) -> torch.Tensor:
        """Logits [1, logit rows, vocab]."""
        assert batch.positions is not None
        model = self.get_model()
        input_ids, positions = batch.input_ids.unsqueeze(0), batch.positions.unsqueeze(0)
        if execution is Execution.PLAIN:
            return model.forward_fused(input_ids, positions, batch)
        return model(input_ids=input_ids, position_ids=positions, forward_batch=batch).logits  # pyright: ignore[reportReturnType]

    def sample(
        self,
        logits_output: LogitsProcessorOutput,
        forward_batch: ForwardBatch,
        temperatures: torch.Tensor | None = None,
        top_ps: torch.Tensor | None = None,
        top_ks: torch.Tensor | None = None,
        penalty_params: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Next token ids, int32 [batch]. Greedy without temperatures, or where they are 0.

        Args:
            temperatures, top_ps, top_ks: [batch]; a top_k of -1 or 0 keeps all tokens.
            penalty_params: `repetition_penalties`, `frequency_penalties`, `presence_penalties` ([batch] each) and
                `token_histories` (a list of token ids for each request).

        A batch with `return_logprob` gets `logits_output.next_token_logprobs`, under the raw logits.
        """
        logits = raw = logits_output.next_token_logits
        if penalty_params is not None:
            logits = apply_penalties(logits, **penalty_params)
        token_ids = sample_tokens(logits, temperatures, top_ps, top_ks)
        if forward_batch.return_logprob:
            top = forward_batch.top_logprobs_nums or [0] * forward_batch.batch_size
            logits_output.next_token_logprobs = [e for e in gather_logprobs(raw, token_ids, top) if e is not None]
        return token_ids

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
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output)
        self.update_requests(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput()
        input_batch = self.prepare_inputs(scheduler_output)
        forward_batch = self.make_forward_batch(input_batch)
        descriptor = self.dispatch(forward_batch)
        logits_output = self._run(forward_batch, descriptor)
        self.execute_model_state = ExecuteModelState(
            scheduler_output, input_batch, forward_batch, descriptor, logits_output
        )
        return None

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
        batch, all_logits = state.input_batch, state.logits_output.next_token_logits
        logits, rows = all_logits, self.input_buffers.rows[: batch.num_tokens]
        if len(batch.sample_rows) != batch.num_tokens:
            logit_rows, token_rows = upload(
                self.device, np.array(batch.sample_rows, dtype=np.int64), batch.last_token_rows
            )
            logits, rows = all_logits[logit_rows], rows[token_rows]
        sampled = self._sample(logits, state)
        self.req_states.feed(rows, sampled.token_ids)
        output = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={rid: i for i, rid in enumerate(batch.req_ids)},
            logprobs=batch.spread(sampled.logprobs),
            prompt_logprobs=self._prompt_logprobs(all_logits, state),
            execution=state.descriptor.execution.value,
        )
        self.req_states.advance(batch.idx_mapping_np, batch.num_scheduled_tokens)
        return AsyncOutput(output, batch, sampled.token_ids, self.postprocess)

    def dispatch(self, forward_batch: ForwardBatch) -> BatchExecutionDescriptor:
        """Decide how the batch runs."""
        return self._decide(forward_batch, hooked=0, can_replay=self._can_replay(forward_batch))

    def _decide(self, batch: ForwardBatch, hooked: int, can_replay: bool) -> BatchExecutionDescriptor:
        return self.partition.decide(
            batch.forward_mode, batch.num_tokens, batch.batch_size, hooked, can_replay=can_replay
        )

    def _can_replay(self, batch: ForwardBatch) -> bool:
        return self.graph_runner is not None and self.graph_runner.can_run(batch)

    def _run(self, forward_batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        if descriptor.execution is Execution.REPLAY:
            # Its logits are sampled from before the next replay: they need no memory of their own.
            assert self.graph_runner is not None
            self.forward_pass_id += 1
            return self.graph_runner.replay(forward_batch, in_place=True)
        return self.forward(forward_batch, descriptor.execution)

    def _sample(self, logits: torch.Tensor, state: ExecuteModelState) -> SamplerOutput:
        """logits [sampling requests, vocab]."""
        requests = [entry.request for entry in state.input_batch.sampling]
        return self.sampler(logits, SamplingBatch.from_requests(requests, self.vocab_size, self.device))

    def _prompt_logprobs(self, logits: torch.Tensor, state: ExecuteModelState) -> dict:
        """For each request that asks: log probabilities of the prompt tokens behind the positions of this step."""
        batch, found = state.input_batch, {}
        for entry, first in zip(batch.entries, batch.cu_num_logits.tolist(), strict=False):
            request = entry.request
            if request.params.prompt_logprobs is not None and entry.start < request.prompt_len - 1:
                count = min(entry.logit_rows, request.prompt_len - 1 - entry.start)
                targets = request.prompt_token_ids[entry.start + 1 : entry.start + 1 + count]
                found[request.request_id] = prompt_logprobs(
                    logits[first : first + count],
                    torch.tensor(targets, device=logits.device),
                    request.params.prompt_logprobs,
                )
        return found

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Take requests that are scheduled for the first time, or again after they gave way, into the table."""
        for request in scheduler_output.scheduled_new_reqs:
            assert request.req_pool_idx is not None
            self.req_states.add_request(
                request.request_id,
                request.req_pool_idx,
                request.prompt_len,
                request.all_token_ids,
                request.num_computed_tokens,
            )
        self.req_states.apply_staged_writes()

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Write the KV slots of pages that requests were given since their last step."""
        assert self.req_to_token_pool is not None and self.token_to_kv_pool_allocator is not None
        known = self.req_states.num_pages
        for request in scheduler_output.scheduled_new_reqs:
            assert request.req_pool_idx is not None
            known[request.req_pool_idx] = 0
        for request, *_ in scheduler_output.scheduled:
            row, pages = request.req_pool_idx, request.pages
            assert row is not None
            if known[row] != len(pages):
                size = self.token_to_kv_pool_allocator.page_size
                first, stop = known[row] * size, min(len(pages) * size, self.req_to_token_pool.max_context_len)
                slots = self.token_to_kv_pool_allocator.slots_of(pages, first, stop)
                self.req_to_token_pool.write(row, first, slots)
                known[row] = len(pages)
        self.req_to_token_pool.apply_staged_writes()

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Drop finished and preempted requests from the table."""
        for req_id in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
            self._remove_request(req_id)

    def _remove_request(self, req_id: str) -> bool:
        return self.req_states.remove_request(req_id)

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """Lay the step's tokens out in batch rows: token ids, positions, KV slots, and the rows that the head runs on."""
        assert self.req_to_token_pool is not None
        entries, states = scheduler_output.scheduled, self.req_states
        requests, num_tokens, _, samples, decoding = zip(*entries, strict=True)
        req_ids = [request.request_id for request in requests]
        index = np.array([states.req_id_to_index[rid] for rid in req_ids], dtype=np.int64)
        sizes, decodes = np.array(num_tokens, dtype=np.int32), all(decoding)
        starts = states.num_computed_tokens_np[index]
        loc = _cumulated(sizes)
        if decodes:
            # Fed on the device: the host may not know that token yet.
            rows, positions, token_ids = index, starts.astype(np.int64), np.full(len(index), -1)
            cu_num_logits, logits_indices = loc, np.arange(len(index))
        else:
            rows = np.repeat(index, sizes)
            positions = np.arange(loc[-1], dtype=np.int64) - np.repeat(loc[:-1] - starts, sizes)
            token_ids = np.where(np.repeat(decoding, sizes), -1, states.all_token_ids[rows, positions])
            logit_counts = np.array([e.logit_rows for e in entries], dtype=np.int32)
            cu_num_logits = _cumulated(logit_counts)
            logits_indices = np.repeat(loc[1:] - cu_num_logits[1:], logit_counts) + np.arange(cu_num_logits[-1])
        padded_size = int(loc[-1])
        if decodes and self.graph_runner is not None:
            padded_size = self.graph_runner.padded_size(padded_size)
        buffers = self.input_buffers
        buffers.lay_out(
            np.stack((token_ids, positions, rows)), states, self.req_to_token_pool.req_to_token, padded_size,
        )  # fmt: skip
        return InputBatch(
            req_ids=req_ids,
            entries=entries,
            idx_mapping_np=index,
            num_scheduled_tokens=sizes,
            query_start_loc=loc,
            input_ids=buffers.input_ids[: len(rows)],
            positions=buffers.positions[: len(rows)],
            seq_lens_cpu=torch.from_numpy(starts + sizes),
            logits_indices=logits_indices,
            cu_num_logits=cu_num_logits,
            sampling=list(compress(entries, samples)),
            sample_rows=list(compress((cu_num_logits[1:] - 1).tolist(), samples)),
            decodes=decodes,
            padded_size=padded_size,
        )

    def prepare_attn(self, input_batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of the requests in `req_to_token`, [reqs]; KV slot of each token row, [tokens]), both int64."""
        tokens = input_batch.num_tokens
        slots = self.input_buffers.out_cache_loc[:tokens]
        if input_batch.decodes:
            return self.input_buffers.rows[:tokens], slots
        return upload(self.device, input_batch.idx_mapping_np)[0], slots

    def prepare_dummy_attn(self, num_reqs: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for rows that belong to nobody: the dummy row, and the dummy slot."""
        slots = torch.full((num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=self.device)
        return torch.zeros(num_reqs, dtype=torch.int64, device=self.device), slots

    def make_forward_batch(self, input_batch: InputBatch) -> ForwardBatch:
        """The step's `ForwardBatch`: DECODE where each request computes one token, else EXTEND or MIXED."""
        rows, slots = self.prepare_attn(input_batch)
        sizes, lens = input_batch.num_scheduled_tokens, input_batch.seq_lens_cpu
        if input_batch.decodes:
            batch = self.prepare_forward_batch_decode(
                input_batch.input_ids, rows, self.input_buffers.seq_lens[: len(sizes)], slots,
                positions=input_batch.positions, seq_lens_cpu=lens,
            )  # fmt: skip
            batch.padded_size = input_batch.padded_size
        else:
            prefixes = lens.numpy() - sizes
            seq_lens, extend_lens, prefix_lens = upload(self.device, lens, sizes, prefixes)
            batch = self.prepare_forward_batch_extend(
                input_batch.input_ids, rows, seq_lens, extend_lens, prefix_lens, slots,
                extend_seq_lens_cpu=sizes.tolist(), extend_prefix_lens_cpu=prefixes.tolist(),
            )  # fmt: skip
            if any(entry.decodes for entry in input_batch.entries):
                batch.forward_mode = ForwardMode.MIXED
        batch.positions = input_batch.positions
        batch.logits_indices = None
        if len(input_batch.logits_indices) != batch.num_tokens:
            (batch.logits_indices,) = upload(self.device, input_batch.logits_indices)
        if self.model_spec.rope_depends_on_length:
            batch.rope_lens = self._rope_lens(input_batch)
        return batch

    def captured_site_ops(self, bs: int) -> Any:
        """`ForwardBatch.edits` of a decode pass that is captured for `bs` rows of the input buffers."""
        return None

    def _rope_lens(self, batch: InputBatch) -> torch.Tensor:
        """[tokens]: a prompt is rotated for its whole length, however it is chunked; a generated token for its own."""
        prompts = np.repeat([e.request.prompt_len for e in batch.entries], batch.num_scheduled_tokens)
        return torch.maximum(batch.positions + 1, upload(self.device, prompts)[0])

    def postprocess(self, input_batch: InputBatch, output: ModelRunnerOutput) -> None:
        """Take the step's sampled tokens, as they arrive on the host, into the table of requests.

        A request may have left the table since, and another have its row.
        """
        states = self.req_states
        drawn = [
            (row, token)
            for rid, row, token in zip(
                input_batch.req_ids, input_batch.idx_mapping_np.tolist(), output.sampled_token_ids, strict=True
            )
            if token is not None and states.req_id_to_index.get(rid) == row
        ]
        if drawn:
            rows, tokens = zip(*drawn, strict=True)
            states.append_sampled(np.array(rows), np.array(tokens))

    # -- dummy runs ---------------------------------------------------------------------

    @torch.no_grad()
    def _dummy_run(
        self, num_tokens: int, *, skip_attn: bool = False, uniform_decode: bool = False, is_profile: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a made-up batch that touches no request and no KV but the dummy page's.

        Returns:
            hidden states [num_tokens, hidden], and those that would be sampled from [requests, hidden].

        Raises:
            ValueError: `skip_attn` outside of profiling.
        """
        if skip_attn and not is_profile:
            raise ValueError("skip_attn is for the profile run alone: a pass without attention serves nobody")
        # As many requests as may be, so that none is longer than one can be.
        num_reqs = (
            num_tokens
            if uniform_decode
            else max(min(num_tokens, self.max_running_requests or 1), -(-num_tokens // self.context_len))
        )
        sizes = [num_tokens // num_reqs + (i < num_tokens % num_reqs) for i in range(num_reqs)]
        rows, slots = self.prepare_dummy_attn(num_reqs, num_tokens)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        lens = torch.tensor(sizes, dtype=torch.int32, device=self.device)
        batch = self.prepare_forward_batch_extend(
            ids, rows, lens, lens, torch.zeros_like(lens), slots,
            extend_seq_lens_cpu=sizes, extend_prefix_lens_cpu=[0] * num_reqs,
        )  # fmt: skip
        batch.return_hidden_states = True
        batch.rope_lens = torch.ones_like(ids)
        if skip_attn:
            batch.attn_backend = _NoAttention()
        else:
            batch.fresh_kv_only = True
        self.forward(batch, Execution.MODULES if is_profile else Execution.PLAIN)
        assert batch.hidden_states is not None and batch.logits_indices is not None
        return batch.hidden_states, batch.hidden_states[batch.logits_indices]

    @torch.no_grad()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sample from hidden states [rows, hidden] with every filter on, as the widest step would."""
        logits = self.get_model().lm_head(hidden_states.unsqueeze(0))[0]
        ones = torch.ones(logits.shape[0], device=logits.device)
        return sample_tokens(logits, ones, ones * 0.9, (ones * 50).to(torch.int64))

    def profile_run(self) -> None:
        """Run the largest step that there can be, so that its peak of memory is known."""
        _, sampled_from = self._dummy_run(self.max_num_tokens, skip_attn=True, is_profile=True)
        self._dummy_sampler_run(sampled_from)
        gc.collect()


def _cumulated(counts: np.ndarray) -> np.ndarray:
    """counts [n] -> [n + 1] int32: where each one's begin, and where the last one's end."""
    ends = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=ends[1:])
    return ends


class _NoAttention(AttentionBackend):
    """Attention of a pass that only measures memory: zeros."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to plan."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return torch.zeros_like(q).flatten(1)
