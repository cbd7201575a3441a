"""An `LM`'s settings as vLLM's arguments."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ...client.images.reader import max_images
from ...config import ModelConfig, ServerConfig
from ...core.families import lacks_head, num_labels_of
from ...core.model_spec import has_images
from ...core.sampling_params import MAX_LOGPROBS
from ...models.weights.source import ModelSource
from ...utils.device import DTYPES
from ..refusals import NORMALIZES

TAKEN = {
    "device", "max_model_len", "max_running_requests", "max_num_tokens", "kv_cache_tokens", "kv_cache_dtype", "page_size",
    "enable_prefix_caching", "async_scheduling", "disable_cuda_graph", "gpu_memory_utilization", "logprobs_mode", "lower_traces",
    "trace_step_warning", "trace_step_timeout",
    "max_interventions_per_site", "max_intervention_vectors", "max_capture_bytes", "capture_ring_bytes", "capture_kept_bytes",
    "inner_sites", "max_loras", "max_lora_rank", "limit_mm_per_prompt", "mm_processor_cache_gb",
}  # fmt: skip
"""Fields of `ServerConfig` that mean something to this engine. Others must have their defaults."""
OWN = ("model", "worker_cls", "additional_config", "tokenizer", "worker_extension_cls", NORMALIZES)
"""Arguments of vLLM that this package sets."""


def engine_arguments(
    model: ModelConfig, server: ServerConfig, source: ModelSource, given: dict[str, Any]
) -> dict[str, Any]:
    """Keywords of vLLM's `AsyncEngineArgs`.

    Args:
        given: vLLM's own, which come last.

    Raises:
        TypeError: a setting of the native engine, or an argument that this package sets.
        ValueError: weights that are not in a folder.
    """
    default = ServerConfig()
    for field in fields(ServerConfig):
        if field.name not in TAKEN and getattr(server, field.name) != getattr(default, field.name):
            raise TypeError(f"LM(engine='vllm', {field.name}=...): this is a setting of our own engine")
    for name in OWN:
        if name in given:
            raise TypeError(f"LM(engine='vllm', {name}=...): the engine sets it itself")
    if model.quantize is not None:
        raise TypeError(
            "LM(engine='vllm', quantize=...): this is a setting of our own engine; vLLM's is quantization='fp8'"
        )
    if model.hf_config is not None:
        raise TypeError("LM(engine='vllm', hf_config=...): vLLM reads config.json: save the config to a folder")
    if source.folder is None and model.load_format != "dummy":
        raise ValueError(f"{source.name}: vLLM reads a folder with config.json and safetensors")
    folder = source.folder or model.model
    found: dict[str, Any] = {
        "model": str(folder), "skip_tokenizer_init": True, "seed": model.seed, "disable_log_stats": True,
        "scheduling_policy": "priority", "max_logprobs": MAX_LOGPROBS, "generation_config": "vllm",
        "enable_prefix_caching": server.enable_prefix_caching, "logprobs_mode": server.logprobs_mode,
        "enforce_eager": server.disable_cuda_graph,
    }  # fmt: skip
    if num_labels_of(source.hf_config) is not None:
        found["runner"], found["convert"] = "pooling", "embed" if lacks_head(source.hf_config) else "classify"
    if has_images(source.hf_config):  # vLLM's processors want a tokenizer; images come to vLLM as they were read here
        found["skip_tokenizer_init"] = False
        found["limit_mm_per_prompt"] = {"image": max_images(server), "video": 0}
        if source.tokenizer_path is not None:
            found["tokenizer"] = str(source.tokenizer_path)
    if model.dtype != "auto":
        found["dtype"] = DTYPES[model.dtype] if isinstance(model.dtype, str) else model.dtype
    if model.load_format == "dummy":
        found["load_format"] = "dummy"
    renamed = {
        "max_model_len": "max_model_len", "max_running_requests": "max_num_seqs", "max_num_tokens": "max_num_batched_tokens",
        "async_scheduling": "async_scheduling", "kv_cache_dtype": "kv_cache_dtype",
        "gpu_memory_utilization": "gpu_memory_utilization",
    }  # fmt: skip
    for ours, theirs in renamed.items():
        if getattr(server, ours) != getattr(default, ours):
            found[theirs] = getattr(server, ours)
    if given.get("speculative_config"):
        found["async_scheduling"] = False  # the host must know the accepted drafts
    if given.get("enable_lora"):
        found["max_loras"], found["max_lora_rank"] = server.max_loras, server.max_lora_rank
    if server.kv_cache_tokens is not None:
        block = given.get("block_size", 32)
        found["block_size"], found["num_gpu_blocks_override"] = block, -(-server.kv_cache_tokens // block)
    return found | given
