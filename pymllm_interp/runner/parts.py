"""`RunnerParts`: the model, pools, buffers and numbers of a runner. `BatchBuilder` makes batches over the pools.

Code that sizes memory, captures graphs and runs passes takes a `RunnerParts`, and does not know `ModelRunner`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch

from ..attention.attention_backend import AttentionBackend
from ..config import ModelConfig, ServerConfig
from ..core.forward_batch import ForwardBatch, ForwardMode
from ..core.limits import tasks_of
from ..core.model_spec import ModelSpec
from ..core.step import LogitsProcessorOutput
from ..mem_cache.cross_pool import CrossPool
from ..mem_cache.memory_pool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from ..mem_cache.state_pool import StatePool
from ..models.adapters.slots import AdapterSlots
from ..models.base import CausalLM
from ..utils.device import resolve_device, resolve_dtype
from ..utils.upload import upload
from .input_batch import InputBuffers
from .partition import Execution
from .stages.stage import PassDemands, Stage

LONG_PASS = 512
"""Token rows from which the device takes longer for a layer than the host takes to launch it."""
MAX_DRAFTED_ROWS = 256
"""Most rows of a decode pass that are captured for drafts, where requests do not take more."""


@dataclass(frozen=True)
class BatchBuilder:
    """Makes batches over some pools."""

    model_spec: ModelSpec
    req_to_token_pool: ReqToTokenPool | None
    token_to_kv_pool: KVPool | None
    attn_backend: AttentionBackend | None
    gdn_pool: StatePool | None = None

    def extend(
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
        ends = np.cumsum(sizes, dtype=np.int32) if sizes else np.zeros(0, dtype=np.int32)
        lens = np.array(prefixes, dtype=np.int32) + np.array(sizes, dtype=np.int32)
        positions = np.arange(sum(sizes), dtype=np.int64) - np.repeat(ends - lens, sizes)
        seq_lens_cpu = torch.from_numpy(lens)
        positions, starts, last_rows, rope_lens = upload(
            input_ids.device, positions, ends - np.array(sizes, dtype=np.int32), ends.astype(np.int64) - 1,
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
            state_pool=self.gdn_pool,
            logits_indices=last_rows,
            rope_lens=rope_lens if self.model_spec.rope_depends_on_length else None,
        )

    def decode(
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
            mrope_position_deltas: [batch] int64, `ForwardBatch.mrope_position_deltas`; models with mrope turn by it.
            positions: int64, `seq_lens` - 1.
            seq_lens_cpu: `seq_lens` on the host, so that nothing waits for the device.
        """
        lens = seq_lens_cpu if seq_lens_cpu is not None else seq_lens.cpu()
        positions, rotated = seq_lens.to(torch.int64) - 1 if positions is None else positions, None
        if mrope_position_deltas is not None and self.model_spec.mrope_merge is not None:
            rotated = (positions + mrope_position_deltas).expand(3, -1)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=input_ids.shape[0],
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens,
            positions=positions,
            return_logprob=return_logprob,
            top_logprobs_nums=top_logprobs_nums,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
            state_pool=self.gdn_pool,
            mrope_position_deltas=mrope_position_deltas,
            mrope_positions=rotated,
            rope_lens=seq_lens.to(torch.int64) if self.model_spec.rope_depends_on_length else None,
        )


class RunnerParts(ABC):
    """Parts of a runner, and calls for use by hand.

    Args:
        server_config, model_config: configuration; None: the defaults.
        gpu_id: the CUDA device, if the configuration's `device` names none.

    Attributes:
        model, req_to_token_pool, token_to_kv_pool, token_to_kv_pool_allocator, attn_backend: None before `initialize` and
            after `shutdown`.
        gdn_pool: the recurrent states of requests; None if no layer has any.
        cross_pool: cross keys and values of encoder inputs; None in a model without an encoder.
        input_buffers: memory of inputs, made with the pools.
        adapters: loaded LoRA adapters, and their slots; None if no model is loaded.
        stages: stages that serve hooks; empty in a runner without hooks.
        demands: demands of the stages on the current step's pass.
        rows_of_request: most rows of a request in a decode pass: with drafts, one more than these.
        draft: the runner of a draft model, or None. Its memory counts with this runner's.
        kernels: hash of the kernels in batch-invariant mode; "" in the default mode.
        max_total_num_tokens: KV slots that requests can have.
        forward_pass_id: passes so far, idle ones included.
        is_capturing: CUDA graphs of this runner are being captured right now.
        meanwhile: called between the layers of passes of `LONG_PASS` rows, while the device computes; None: nothing.
    """

    model_spec: ModelSpec
    input_buffers: InputBuffers

    def __init__(self, server_config: ServerConfig | None, model_config: ModelConfig | None, gpu_id: int) -> None:
        self.server_config = server_config or ServerConfig()
        self.model_config = model_config or ModelConfig()
        self.device = resolve_device(self.server_config.device)
        self.gpu_id = int(self.device.partition(":")[2] or gpu_id)
        self.dtype = resolve_dtype(self.model_config.dtype, self.device)
        self.kv_cache_dtype = self.dtype
        self.model: CausalLM | None = None
        self.req_to_token_pool: ReqToTokenPool | None = None
        self.token_to_kv_pool: KVPool | None = None
        self.token_to_kv_pool_allocator: TokenToKVPoolAllocator | None = None
        self.gdn_pool: StatePool | None = None
        self.cross_pool: CrossPool | None = None
        self.attn_backend: AttentionBackend | None = None
        self.adapters: AdapterSlots | None = None
        self.draft: RunnerParts | None = None
        self.rows_of_request = 1
        self.max_total_num_tokens = self.max_running_requests = self.max_num_tokens = 0
        self.num_hidden_layers = self.num_kv_layers = self.num_attention_heads = self.num_kv_heads = self.head_dim = 0
        self.hidden_size = self.vocab_size = self.context_len = self.forward_pass_id = 0
        self.is_capturing, self.kernels = False, ""
        self.stages: Sequence[Stage] = ()
        self.demands = PassDemands()
        self.meanwhile: Callable[[], None] | None = None

    def get_model(self) -> CausalLM:
        """The loaded model."""
        assert self.model is not None, "call initialize() first"
        return self.model

    @property
    def is_generation(self) -> bool:
        """Whether the model is a causal language model."""
        return self.model is None or isinstance(self.model, CausalLM)

    def get_kv_cache_spec(self) -> dict[int, tuple[int, int, torch.dtype]]:
        """Layer -> (kv heads, head_dim, dtype) of its KV. The last ones may hold keys of indexers."""
        model = self.get_model()
        heads = [(layer.num_kv_heads, layer.head_dim) for layer in model.attention_layers()]
        heads += [(model.spec.num_key_value_heads, model.spec.head_dim)] * model.num_index_layers
        return {layer: (*sizes, self.kv_cache_dtype) for layer, sizes in enumerate(heads)}

    @property
    def max_model_len(self) -> int:
        """Longest sequence that is served, in tokens."""
        return self.context_len

    @property
    def sliding_window_size(self) -> int | None:
        """`ModelSpec.sliding_window_size`."""
        return self.model_spec.sliding_window_size

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Tasks that the model can be asked for, by vLLM's names."""
        return tasks_of(self.get_model().config) if self.model_spec.source is None else ("generate",)

    @property
    def is_pooling_model(self) -> bool:
        """Whether its requests generate nothing, as the model has no language modelling head."""
        return "generate" not in self.get_supported_tasks()

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest decode pass: of all requests, and of as many drafts as `MAX_DRAFTED_ROWS` leaves room for."""
        drafted = min(self.max_running_requests * self.rows_of_request, self.max_num_tokens, MAX_DRAFTED_ROWS)
        return max(self.max_running_requests, drafted)

    @property
    def batches(self) -> BatchBuilder:
        """Builder of batches over this runner's pools."""
        pools = self.req_to_token_pool, self.token_to_kv_pool
        return BatchBuilder(self.model_spec, *pools, self.attn_backend, self.gdn_pool)

    @wraps(BatchBuilder.extend)
    def prepare_forward_batch_extend(self, *args: Any, **kwargs: Any) -> ForwardBatch:
        return self.batches.extend(*args, **kwargs)

    @wraps(BatchBuilder.decode)
    def prepare_forward_batch_decode(self, *args: Any, **kwargs: Any) -> ForwardBatch:
        return self.batches.decode(*args, **kwargs)

    def captured_site_ops(self, bs: int) -> Any:
        """`ForwardBatch.site_ops` of a decode pass that is captured for `bs` rows of the input buffers."""
        found = (stage.captured_site_ops(bs) for stage in self.stages)
        return next((ops for ops in found if ops is not None), None)

    # -- calls -----------------------------------------------------------------------------

    @abstractmethod
    def forward(self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN) -> LogitsProcessorOutput:
        """Run one pass of the model."""

    @abstractmethod
    def sample(
        self,
        logits_output: LogitsProcessorOutput,
        forward_batch: ForwardBatch,
        temperatures: torch.Tensor | None = None,
        top_ps: torch.Tensor | None = None,
        top_ks: torch.Tensor | None = None,
        penalty_params: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Next token ids, int32 [batch]."""

    @abstractmethod
    def profile_run(self) -> None:
        """Run the largest step, so that its peak of memory is known."""

    @abstractmethod
    def profile_cudagraph_memory(self) -> int:
        """Device memory to leave for the graphs when the KV pool is sized, in bytes."""
