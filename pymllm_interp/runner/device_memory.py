"""Device memory of a runner: how many KV slots and requests it has room for, and the dummy passes that measure that.

The KV pool gets what `gpu_memory_utilization` leaves after the weights, the largest step, the attention workspace and the
CUDA graphs. The largest step is run once, without attention, and its peak stays with the allocator.
"""

from __future__ import annotations

import gc
import logging
import os
from typing import Any, Protocol

import torch
from torch import nn

from ..attention import attention_workspace_bytes
from ..attention.attention_backend import AttentionBackend, RadixAttention
from ..config import ServerConfig
from ..core.forward_batch import ForwardBatch
from ..core.out_of_memory import within_memory
from ..mem_cache.memory_pool import KVPool
from ..sampling import sample_tokens
from .partition import Execution

logger = logging.getLogger(__name__)

DEFAULT_NUM_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Token rows of one step at most, by kind of device."""
DEFAULT_CPU_KV_TOKENS = 4096
GRAPH_OVERHEAD_BYTES = 1 << 30
"""Left to the CUDA graphs beside their outputs."""
TOKENS_PER_REQUEST = 512
"""KV tokens that a request is expected to take, where the number of running requests is derived."""
MAX_DERIVED_REQUESTS = 1024


class PoolOwner(Protocol):
    """What sizing reads of a `ModelRunner`."""

    server_config: ServerConfig
    device: str
    gpu_id: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    num_hidden_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    max_num_tokens: int
    max_running_requests: int
    max_total_num_tokens: int

    def profile_run(self) -> None: ...

    def profile_cudagraph_memory(self) -> int: ...


class DummyRunner(Protocol):
    """What a dummy pass needs of a `ModelRunner`."""

    device: str
    context_len: int
    max_running_requests: int

    def get_model(self) -> nn.Module: ...

    def prepare_dummy_attn(self, num_reqs: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def prepare_forward_batch_extend(self, *args: Any, **kwargs: Any) -> ForwardBatch: ...

    def forward(self, forward_batch: ForwardBatch, execution: Execution = ...) -> Any: ...


# -- what the device has -----------------------------------------------------------------


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


def memory_left(device: str, gpu_id: int) -> str:
    """ " (x of y GiB are free)", for error messages; empty off CUDA."""
    if not device.startswith("cuda"):
        return ""
    free, total = torch.cuda.mem_get_info(gpu_id)
    return f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)"


def smaller_pool(config: ServerConfig) -> str:
    """How to get a smaller KV pool, for error messages."""
    return (
        f"a lower kv_cache_tokens (now {config.kv_cache_tokens}), or, where that is None, a lower gpu_memory_utilization "
        f"(now {config.gpu_memory_utilization})"
    )


def _host_memory() -> int:
    """Physical memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _within_utilization(runner: PoolOwner) -> float:
    """Bytes that `gpu_memory_utilization` leaves on a CUDA device now. Memory that others hold counts as used."""
    free, total = torch.cuda.mem_get_info(runner.gpu_id)
    return total * runner.server_config.gpu_memory_utilization - (total - free)


# -- sizes ---------------------------------------------------------------------------------


def kv_bytes_per_token(runner: PoolOwner) -> int:
    """K and V of one token in all layers."""
    return runner.num_hidden_layers * 2 * runner.num_kv_heads * runner.head_dim * runner.kv_cache_dtype.itemsize


def num_running_requests(runner: PoolOwner) -> int:
    """Requests in one step at most: `max_running_requests`, or derived where that is None.

    The derived number is the KV tokens that fit, over 512 tokens a request (over the context's length where that is
    shorter): at least 1, at most 1024.
    """
    config = runner.server_config
    if config.max_running_requests is not None:
        return config.max_running_requests
    if config.kv_cache_tokens is not None:
        tokens = config.kv_cache_tokens
    elif runner.device.startswith("cuda"):
        tokens = int(_within_utilization(runner) // kv_bytes_per_token(runner))
    else:
        tokens = _default_cpu_kv_tokens(runner)
    return max(1, min(MAX_DERIVED_REQUESTS, tokens // min(TOKENS_PER_REQUEST, runner.context_len)))


def num_kv_tokens(runner: PoolOwner) -> int:
    """Slots of the KV pool, in whole pages: `kv_cache_tokens`, or what fits where that is None.

    Raises:
        ValueError: no room for a single page of KV.
        torch.OutOfMemoryError: the largest step does not fit, or `kv_cache_tokens` is more than the device holds.
    """
    config = runner.server_config
    if config.kv_cache_tokens is not None:
        _check_kv_tokens(runner, config.kv_cache_tokens)
        tokens = config.kv_cache_tokens
    elif runner.device.startswith("cuda"):
        tokens = _profiled_kv_tokens(runner)
    else:
        tokens = _default_cpu_kv_tokens(runner)
    tokens = tokens // config.page_size * config.page_size
    if tokens <= 0:
        raise ValueError(
            f"the KV pool would hold {tokens} tokens{memory_left(runner.device, runner.gpu_id)}: raise kv_cache_tokens to at "
            f"least page_size ({config.page_size}), raise gpu_memory_utilization (now {config.gpu_memory_utilization}), "
            f"lower max_num_tokens (now {runner.max_num_tokens}), or take a smaller model"
        )
    return tokens


def make_kv_pool(runner: PoolOwner) -> KVPool:
    """The KV pool of `max_total_num_tokens` slots.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    tokens = runner.max_total_num_tokens
    return within_memory(
        lambda: KVPool(
            num_layers=runner.num_hidden_layers,
            size=tokens,
            num_kv_heads=runner.num_kv_heads,
            head_dim=runner.head_dim,
            dtype=runner.kv_cache_dtype,
            device=runner.device,
            page_size=runner.server_config.page_size,
        ),
        f"{_described_pool(runner, tokens)} does not fit on {runner.device}{memory_left(runner.device, runner.gpu_id)}; what "
        f"helps: {smaller_pool(runner.server_config)}",
    )


def _described_pool(runner: PoolOwner, tokens: int) -> str:
    return f"the KV pool of {tokens} tokens ({tokens * kv_bytes_per_token(runner) / 2**30:.1f} GiB)"


def _default_cpu_kv_tokens(runner: PoolOwner) -> int:
    return min(max(DEFAULT_CPU_KV_TOKENS, runner.context_len), _host_memory() // 4 // kv_bytes_per_token(runner))


def _check_kv_tokens(runner: PoolOwner, tokens: int) -> None:
    """Refuse a pool that exceeds the memory that is there; warn of one that exceeds `gpu_memory_utilization`."""
    kv_bytes, config, on_cuda = kv_bytes_per_token(runner), runner.server_config, runner.device.startswith("cuda")
    if on_cuda:
        cached = torch.cuda.memory_reserved(runner.gpu_id) - torch.cuda.memory_allocated(runner.gpu_id)
        room = (torch.cuda.mem_get_info(runner.gpu_id)[0] + cached) // kv_bytes
    else:
        room = _host_memory() // kv_bytes
    if tokens > room:
        raise torch.OutOfMemoryError(
            f"{_described_pool(runner, tokens)} does not fit on {runner.device}, which has memory for {room} tokens"
            f"{memory_left(runner.device, runner.gpu_id)}; what helps: {smaller_pool(config)}. torch was not asked to allocate "
            "it"
        )
    if on_cuda and tokens > (allowed := int(_within_utilization(runner) // kv_bytes)):
        logger.warning(
            "kv_cache_tokens=%d, but gpu_memory_utilization=%s leaves room for %d tokens: steps may run out of memory",
            tokens, config.gpu_memory_utilization, max(allowed, 0),
        )  # fmt: skip


def _profiled_kv_tokens(runner: PoolOwner) -> int:
    gc.collect()
    torch.cuda.empty_cache()  # memory that loading, or an earlier engine, left cached is free for the pool
    within_memory(
        runner.profile_run,
        f"the largest step does not fit on {runner.device} beside the weights{memory_left(runner.device, runner.gpu_id)}; "
        f"what helps: a lower max_num_tokens (now {runner.max_num_tokens}), a lower max_running_requests (now "
        f"{runner.max_running_requests}), or a smaller model",
    )
    name = runner.server_config.attention_backend
    workspace = attention_workspace_bytes(name, runner.device, runner.dtype, runner.head_dim)
    # The allocator keeps the peak of the run, so the peak counts as used.
    room = _within_utilization(runner) - workspace - runner.profile_cudagraph_memory()
    return int(room // kv_bytes_per_token(runner))


# -- dummy passes -----------------------------------------------------------------------------


@torch.no_grad()
def dummy_run(
    runner: DummyRunner,
    num_tokens: int,
    *,
    skip_attn: bool = False,
    uniform_decode: bool = False,
    is_profile: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a made-up batch that touches no request and no KV but the dummy page's.

    Args:
        is_profile: run module by module with the head on all rows, as a traced pass of whole prompts does.

    Returns:
        hidden states [num_tokens, hidden], and those of each request's last token [requests, hidden].

    Raises:
        ValueError: `skip_attn` outside of profiling.
    """
    if skip_attn and not is_profile:
        raise ValueError("skip_attn is for the profile run alone: a pass without attention serves nobody")
    # As many requests as possible, so that none is longer than the context.
    num_reqs = (
        num_tokens
        if uniform_decode
        else max(min(num_tokens, runner.max_running_requests or 1), -(-num_tokens // runner.context_len))
    )
    sizes = [num_tokens // num_reqs + (i < num_tokens % num_reqs) for i in range(num_reqs)]
    rows, slots = runner.prepare_dummy_attn(num_reqs, num_tokens)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=runner.device)
    lens = torch.tensor(sizes, dtype=torch.int32, device=runner.device)
    batch = runner.prepare_forward_batch_extend(
        ids, rows, lens, lens, torch.zeros_like(lens), slots,
        extend_seq_lens_cpu=sizes, extend_prefix_lens_cpu=[0] * num_reqs,
    )  # fmt: skip
    last_rows = batch.logits_indices
    batch.return_hidden_states = True
    batch.rope_lens = torch.ones_like(ids)
    if is_profile:
        batch.logits_indices = None
    if skip_attn:
        batch.attn_backend = _NoAttention()
    else:
        batch.fresh_kv_only = True
    runner.forward(batch, Execution.MODULES if is_profile else Execution.PLAIN)
    assert batch.hidden_states is not None and last_rows is not None
    return batch.hidden_states, batch.hidden_states[last_rows]


@torch.no_grad()
def dummy_sampler_run(runner: DummyRunner, hidden_states: torch.Tensor) -> torch.Tensor:
    """Sample from hidden states [rows, hidden] with every filter on, as the widest step would.

    Returns:
        token ids [rows] int32.
    """
    model: Any = runner.get_model()
    logits = model.lm_head(hidden_states.unsqueeze(0))[0]
    ones = torch.ones(logits.shape[0], device=logits.device)
    return sample_tokens(logits, ones, ones * 0.9, (ones * 50).to(torch.int64))


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
