"""Device memory of a runner: how many KV slots and requests it has room for. Dummy passes measure that.

The KV pool gets what `gpu_memory_utilization` leaves after the weights, the largest step, the attention workspace and CUDA graphs.
In models with images it leaves room for the encoder cache, too. The largest step is run once, without attention, and its peak
stays with the allocator.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from ..attention import attention_workspace_bytes
from ..attention.attention_backend import AttentionBackend
from ..attention.torch_backend import TorchAttnBackend
from ..config import ServerConfig
from ..core.model_spec import ModelSpec
from ..core.unsupported import UnsupportedModelError
from ..mem_cache.cross_pool import CrossPool
from ..mem_cache.memory_pool import KVPool
from ..mem_cache.state_pool import StatePool, slot_bytes
from ..models.base import CausalLM
from ..utils.device import resolve_dtype
from ..utils.out_of_memory import within_memory
from .parts import RunnerParts
from .vision_inputs import image_tokens

logger = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_NUM_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Token rows of one step at most, by kind of device."""
DEFAULT_CPU_KV_TOKENS = 4096
GRAPH_OVERHEAD_BYTES = 1 << 30
"""Left to the CUDA graphs beside their outputs."""
TOKENS_PER_REQUEST = 512
"""Expected KV tokens of a request, if the number of running requests is derived."""
MAX_DERIVED_REQUESTS = 1024
MAX_STATE_SHARE = 0.5
"""Largest part of the memory for KV and recurrent states that states may take."""
SNAPSHOTS_OF_A_REQUEST = 4
"""Snapshots of states to keep, at most, for each request that may run."""
MAX_TOKENS_WITHOUT_KV = 1 << 20
"""Tokens of all requests in a model without attention: slots without memory."""


# -- memory of the device ------------------------------------------------------------------


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
    free, total = get_available_gpu_memory(gpu_id=gpu_id), get_total_gpu_memory(gpu_id=gpu_id)
    return f" ({free:.1f} of {total:.1f} GiB are free)"


def fitting(runner: RunnerParts, make: Callable[[], T], what: str, helps: str) -> T:
    """Call `make`. A lack of memory becomes a `torch.OutOfMemoryError`, with what does not fit and advice."""
    where = f"{runner.device}{memory_left(runner.device, runner.gpu_id)}"
    return within_memory(make, f"{what} on {where}; what helps: {helps}")


def smaller_pool(config: ServerConfig) -> str:
    """Advice about a smaller KV pool, for error messages."""
    return (
        f"a lower kv_cache_tokens (now {config.kv_cache_tokens}), or, where that is None, a lower gpu_memory_utilization "
        f"(now {config.gpu_memory_utilization})"
    )


def _host_memory() -> int:
    """Physical memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _within_utilization(runner: RunnerParts) -> float:
    """Bytes that `gpu_memory_utilization` leaves on a CUDA device now. Memory that others hold counts as used.

    Memory that torch's allocator keeps and no tensor has, as after an earlier engine, counts as free.
    """
    free, total = torch.cuda.mem_get_info(runner.gpu_id)
    return total * runner.server_config.gpu_memory_utilization - (total - free) + _unused_by_tensors(runner)


def _unused_by_tensors(runner: RunnerParts) -> int:
    """Bytes that torch's allocator keeps for later tensors."""
    return torch.cuda.memory_reserved(runner.gpu_id) - torch.cuda.memory_allocated(runner.gpu_id)


def free_bytes(device: str) -> int:
    """Bytes that tensors may take now."""
    if device.startswith("cuda"):
        gpu = torch.device(device)
        return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def keeps_scores(model: CausalLM, attention: AttentionBackend) -> bool:
    """Whether attention keeps all scores of a pass in memory."""
    return isinstance(attention, TorchAttnBackend) and any(
        layer.sliding_window or layer.logit_cap or layer.sinks is not None for layer in model.attention_layers()
    )


def long_pass_bytes(spec: ModelSpec, tokens: int, keeps_scores: bool) -> int:
    """Estimated bytes of a pass of one prompt, module by module, with the head on all rows."""
    qkv = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    row = spec.dtype.itemsize * (2 * spec.vocab_size + 8 * spec.hidden_size + 4 * spec.intermediate_size + 4 * qkv)
    return tokens * (row + (3 * 4 * spec.num_attention_heads * tokens if keeps_scores else 0))


# -- sizes ---------------------------------------------------------------------------------


def kv_bytes_per_token(runner: RunnerParts) -> int:
    """K and V of one token in all layers, and in the layers of a draft model."""
    own = sum(2 * heads * head_dim * dtype.itemsize for heads, head_dim, dtype in runner.get_kv_cache_spec().values())
    return own + (0 if runner.draft is None else kv_bytes_per_token(runner.draft))


def num_running_requests(runner: RunnerParts) -> int:
    """Requests in one step at most: `max_running_requests`, or derived where that is None.

    The derived number is the KV tokens that fit, over 512 tokens a request, between 1 and 1024.
    """
    config = runner.server_config
    if config.max_running_requests is not None:
        return config.max_running_requests
    if config.kv_cache_tokens is not None:
        tokens = config.kv_cache_tokens
    elif not kv_bytes_per_token(runner):
        return MAX_DERIVED_REQUESTS
    elif runner.device.startswith("cuda"):
        tokens = int(_within_utilization(runner) // kv_bytes_per_token(runner))
    else:
        tokens = _default_cpu_kv_tokens(runner)
    return max(1, min(MAX_DERIVED_REQUESTS, tokens // min(TOKENS_PER_REQUEST, runner.context_len)))


def pool_room(runner: RunnerParts) -> float:
    """Bytes for KV and states."""
    return _within_utilization(runner) if runner.device.startswith("cuda") else _host_memory() / 4


def num_kv_tokens(runner: RunnerParts) -> int:
    """Slots of the KV pool, in whole pages: `kv_cache_tokens`, or as many as fit if that is None.

    Raises:
        ValueError: no room for a single page of KV.
        torch.OutOfMemoryError: the largest step does not fit, or `kv_cache_tokens` exceeds the device's memory.
    """
    config = runner.server_config
    if config.kv_cache_tokens is not None:
        _check_kv_tokens(runner, config.kv_cache_tokens)
        tokens = config.kv_cache_tokens
    elif not kv_bytes_per_token(runner):
        tokens = min(runner.max_running_requests * runner.context_len, MAX_TOKENS_WITHOUT_KV)
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


def num_served_tokens(runner: RunnerParts) -> int:
    """The longest sequence that is served: `context_len`, or a derived KV pool's length where that is shorter."""
    config, longest = runner.server_config, runner.max_total_num_tokens
    if config.max_model_len is not None or config.kv_cache_tokens is not None or longest >= runner.context_len:
        return runner.context_len
    logger.warning(
        "max_model_len is %d, what the KV pool has room for; the model's positions end at %d",
        longest,
        runner.context_len,
    )
    return longest


def make_kv_pool(runner: RunnerParts) -> KVPool:
    """The KV pool of `max_total_num_tokens` slots. Raises torch.OutOfMemoryError: it does not fit."""
    tokens = runner.max_total_num_tokens
    return fitting(
        runner,
        lambda: KVPool(
            num_layers=runner.num_kv_layers,
            size=tokens,
            num_kv_heads=runner.num_kv_heads,
            head_dim=runner.head_dim,
            dtype=runner.kv_cache_dtype,
            device=runner.device,
            page_size=runner.server_config.page_size,
            scales=None if runner.model is None else runner.model.kv_scales,
        ),
        f"{_described_pool(runner, tokens)} does not fit",
        smaller_pool(runner.server_config),
    )


def _described_pool(runner: RunnerParts, tokens: int) -> str:
    return f"the KV pool of {tokens} tokens ({tokens * kv_bytes_per_token(runner) / 2**30:.1f} GiB)"


def _default_cpu_kv_tokens(runner: RunnerParts) -> int:
    return min(max(DEFAULT_CPU_KV_TOKENS, runner.context_len), _host_memory() // 4 // kv_bytes_per_token(runner))


def _check_kv_tokens(runner: RunnerParts, tokens: int) -> None:
    """Refuse a pool that exceeds the memory that is there; warn of one that exceeds `gpu_memory_utilization`."""
    kv_bytes, config, on_cuda = kv_bytes_per_token(runner), runner.server_config, runner.device.startswith("cuda")
    if not kv_bytes:
        return
    if on_cuda:
        room = (torch.cuda.mem_get_info(runner.gpu_id)[0] + _unused_by_tensors(runner)) // kv_bytes
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


def _profiled_kv_tokens(runner: RunnerParts) -> int:
    gc.collect()
    torch.cuda.empty_cache()  # memory that loading, or an earlier engine, left cached is free for the pool
    within_memory(
        lambda: _profile(runner),
        f"the largest step does not fit on {runner.device} beside the weights{memory_left(runner.device, runner.gpu_id)}; "
        f"what helps: a lower max_num_tokens (now {runner.max_num_tokens}), a lower max_running_requests (now "
        f"{runner.max_running_requests}), or a smaller model",
    )
    # The allocator keeps the peak of the run for later steps.
    room = _within_utilization(runner) - _unused_by_tensors(runner) - _bytes_beside_kv(runner)
    room -= runner.server_config.device_capture_bytes
    return int(room // kv_bytes_per_token(runner))


def _profile(runner: RunnerParts) -> None:
    """Run the most images that are computed at once, then the largest step."""
    if (tower := runner.get_model().tower) is not None:
        tower.profile_run(image_tokens(runner)[0])
    runner.profile_run()


def _bytes_beside_kv(runner: RunnerParts) -> int:
    """Bytes allocated after the KV pool, for a draft model, too: the workspace of attention, graphs, and states of images."""
    name = runner.server_config.attention_backend
    own = attention_workspace_bytes(name, runner.device, runner.dtype, runner.head_dim)
    own += runner.profile_cudagraph_memory()
    if (tower := runner.get_model().tower) is not None:
        own += image_tokens(runner)[1] * tower.row_bytes
    if runner.draft is not None:
        runner.draft.max_running_requests = runner.max_running_requests
        own += _bytes_beside_kv(runner.draft)
    return own


# -- recurrent states ---------------------------------------------------------------------


def state_dtype(config: ServerConfig) -> torch.dtype:
    """The dtype of recurrent states in the pool."""
    return resolve_dtype(config.state_dtype, "cpu")


def num_served_requests(runner: RunnerParts) -> int:
    """Requests in one step at most: `num_running_requests`, or as many as have room for their states."""
    asked, largest = num_running_requests(runner), runner.get_model().largest_step
    if largest is not None:
        asked = min(asked, largest[0])
    state_bytes = slot_bytes(runner.get_model().state_layouts, state_dtype(runner.server_config))
    if not state_bytes:
        return asked
    fit = max(1, int(pool_room(runner) * MAX_STATE_SHARE // state_bytes) - 1)  # slot 0 comes on top
    if fit < asked:
        logger.warning(
            "max_running_requests is %d in place of %d: the recurrent states of a request take %.1f MiB",
            fit, asked, state_bytes / 2**20,
        )  # fmt: skip
    return min(asked, fit)


def make_state_pool(runner: RunnerParts) -> StatePool | None:
    """The states of `max_running_requests` requests; None if no layer has any.

    Raises:
        UnsupportedModelError: speculative decoding is asked for.
        torch.OutOfMemoryError: they do not fit.
    """
    layouts, config, size = runner.get_model().state_layouts, runner.server_config, runner.max_running_requests
    dtype = state_dtype(config)
    if not layouts:
        return None
    if config.speculative is not None:
        raise UnsupportedModelError(
            f"speculative={config.speculative!r}: {runner.get_model().spec.family.name} models have recurrent states, which cannot "
            "take drafts back: use speculative=None"
        )
    return fitting(
        runner,
        lambda: StatePool(layouts, size, dtype, runner.device, num_snapshots(runner, slot_bytes(layouts, dtype))),
        f"the recurrent states of {size} requests do not fit",
        "a lower max_running_requests, a lower state_cache_bytes, or state_dtype='bfloat16'",
    )


def make_cross_pool(runner: RunnerParts) -> CrossPool | None:
    """The cross keys and values of encoder inputs; None in a model without an encoder.

    It holds `cross_cache_tokens`. By default it holds an input of full length for each running request, within
    `MAX_STATE_SHARE` of the memory for KV.

    Raises:
        UnsupportedModelError: speculative decoding.
        ValueError: `cross_cache_tokens` holds no audio, of a model that reads audio.
        torch.OutOfMemoryError: it does not fit.
    """
    model, config = runner.get_model(), runner.server_config
    encoder, layers = model.spec.source, model.cross_layers
    if encoder is None:
        return None
    if config.speculative is not None:
        raise UnsupportedModelError(
            f"speculative={config.speculative!r}: drafts are not supported in encoder-decoder models"
        )
    (_, heads, size), page = layers[0], config.page_size
    longest, tokens = encoder.context_len, config.cross_cache_tokens
    if tokens is None:
        row_bytes = 2 * len(layers) * heads * size * runner.dtype.itemsize
        fit = int(pool_room(runner) * MAX_STATE_SHARE // row_bytes)
        whole = -(-longest // page) * page
        tokens = max(min(runner.max_running_requests * whole, fit), page)
    room, rows = tokens // page * page, runner.max_running_requests
    if encoder.family.hears and room < longest:
        raise ValueError(f"cross_cache_tokens={tokens}: audio has {longest} positions, which do not fit")
    longest = min(longest, room)
    return fitting(
        runner,
        lambda: CrossPool(len(layers), tokens, heads, size, runner.dtype, runner.device, page, rows, longest),
        f"the cross keys and values of {tokens} encoder positions do not fit",
        "a lower cross_cache_tokens",
    )


def num_snapshots(runner: RunnerParts, slot: int) -> int:
    """Snapshots of states that `state_cache_bytes` hold, at most `SNAPSHOTS_OF_A_REQUEST` for each running request.

    Args:
        slot: bytes of each.
    """
    config = runner.server_config
    if not config.enable_prefix_caching:
        return 0
    room = min(config.state_cache_bytes, int(pool_room(runner) / 8))
    return min(room // slot, SNAPSHOTS_OF_A_REQUEST * runner.max_running_requests)


def return_freed_memory(device: str) -> None:
    """Return the memory of freed tensors to the device; on a CPU with glibc, to the system.

    glibc has tensors below 32 MiB in its heap (mallopt(3)). It keeps the pages of freed ones until `malloc_trim`.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
