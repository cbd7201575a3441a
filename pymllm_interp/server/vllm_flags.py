"""Flags of `vllm serve` that have another name here, or none."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import unsupported

_ONE_DEVICE = "one device holds the model; --device cuda:N chooses it"
_LOG = "--log-level sets what is logged; prompts and texts never are"

SAME: dict[str, str] = {
    "max_model_len": "", "seed": "", "kv_cache_dtype": "", "enable_prefix_caching": "True",
    "gpu_memory_utilization": "", "async_scheduling": "True", "generation_config": "", "load_format": "",
    "logprobs_mode": "", "mm_processor_cache_gb": "", "attention_backend": "", "max_loras": "", "max_lora_rank": "",
}  # fmt: skip
"""Arguments of LM with vLLM's name, which `--option` sets -> the value of a flag without one."""
RENAMED: dict[str, str] = {
    "block_size": "page_size", "max_num_batched_tokens": "max_num_tokens", "max_num_seqs": "max_running_requests",
    "model_impl": "impl", "scheduling_policy": "queue_order", "speculative_config": "speculative",
}  # fmt: skip
"""vLLM's name -> the argument of LM."""
OTHERS: dict[str, str] = {
    "all2all_backend": unsupported.EXPERT_PARALLEL,
    "api_server_count": "one process serves HTTP; `pymllm-interp cluster MODEL --fronts N` starts several",
    "chat_template_content_format": "templates get the text of a message",
    "compilation_config": "use --option enable_torch_compile=True",
    "cpu_offload_gb": "weights stay on the device: --dtype bfloat16 or --option quantize=fp8 makes them smaller",
    "disable_log_requests": _LOG,
    "disable_log_stats": "/metrics has the counters, and nothing of them is logged",
    "disable_uvicorn_access_log": _LOG,
    "download_dir": "the environment variable HF_HOME says where models are",
    "enable_auto_tool_choice": "--tool-call-parser NAME says how the model writes tool calls, and that they are parsed",
    "enable_chunked_prefill": "long prompts always run in chunks; --option prefill_policy=NAME says beside what",
    "enable_lora": "it is not needed: --lora-modules NAME=FOLDER loads adapters, and --option max_loras=N says how many at a time",
    "enable_log_requests": _LOG,
    "enable_server_load_tracking": "/load is always there",
    "enforce_eager": "use --option disable_cuda_graph=True",
    "headless": "one process serves HTTP, and one the engine",
    "max_logprobs": "at most 64 log probabilities are given, whatever the options",
    "model": "the model is the first argument: pymllm-interp serve MODEL",
    "no_enable_prefix_caching": "use --option enable_prefix_caching=False",
    "revision": "give the folder of a revision: hf download MODEL --revision R prints it",
    "served_model_names": "use --served-model-name",
    "swap_space": "swapped KV takes what host memory it needs",
    "tensor_parallel_size": f"our own engine has no tensor parallelism: {_ONE_DEVICE}; with --engine vllm the option is known",
    "tokenizer": "the tokenizer is the model's: put its files into the model's folder",
    "trust_remote_code": "code of a model's folder is not run: its architecture must be one of transformers'",
    "uvicorn_log_level": _LOG,
}
"""vLLM's name -> alternative."""
SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
}


def hint_of(arguments: Sequence[str]) -> str | None:
    """Advice for the first flag that is vLLM's, or None."""
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        name = SHORT.get(flag, flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else "")
        following = arguments[i + 1] if i + 1 < len(arguments) and not arguments[i + 1].startswith("-") else ""
        if hint := _hint(name, value if equals else following):
            return f"{flag}: {hint}"
    return None


def _hint(name: str, value: str) -> str | None:
    if name in SAME or name in RENAMED:
        return f"here it is --option {RENAMED.get(name, name)}={value or SAME.get(name) or 'VALUE'}"
    return OTHERS.get(name) or unsupported.OPTIONS.get(name)
