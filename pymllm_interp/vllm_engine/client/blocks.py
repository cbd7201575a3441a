"""Refusals of blocks that vLLM's passes cannot serve, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...client.facts import ModelFacts
from ...config import DTYPE_NAMES
from ...core.request import Request
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.syntax.pass_options import NONE
from ..refusals import VllmRefusalError
from ..scheduler import scheduler_name
from ..settings import OURS
from ..structures import why_without_blocks


def check_blocks(facts: ModelFacts, traces: Sequence[RequestTrace], config: Any) -> None:
    """Refuse traces that cannot run.

    Args:
        config: vLLM's `VllmConfig`.

    Raises:
        VllmRefusalError: the message names the reason.
    """
    if (why := why_without_blocks(facts.hf_config)) is not None:
        raise VllmRefusalError(why)
    for holds, what in (
        (config.model_config.runner_type != "generate", "classification heads: they run by vLLM's pooler"),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "pipeline ranks: one rank runs its modules, and has the layers of one stage: raise tensor_parallel_size",
        ),
        (
            getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1,
            "decode_context_parallel_size above 1 beside it: leave it out",
        ),
        (
            config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe,
            "data parallel engines with experts, which wait for each other in all layers: data_parallel_size is to be 1",
        ),
        (
            config.scheduler_config.scheduler_cls != scheduler_name(config),
            "scheduler of vLLM's own, which may cut its prompt: start vLLM by LM(model, engine='vllm')",
        ),
        (any(trace.grad for trace in traces), "gradients: vLLM's kernels have no derivatives"),
        (any(trace.options is not NONE for trace in traces), "transformers' own attention, and its attention weights"),
        (
            any(trace.gang or trace.padded for trace in traces),
            "prompts that run in the same steps (a barrier, names of another invoke, padding, or an invoke without a prompt): "
            "vLLM's scheduler decides which requests share a step",
        ),
        (
            any(trace.on_step is not None for trace in traces),
            "on_step: saved values leave the ranks when a request ends",
        ),
    ):
        if holds:
            raise VllmRefusalError(f"with engine='vllm' a block has no {what}. {OURS}")


def why_uncut(hf_config: Any, config: Any) -> str:
    """Reason that edges of attention cannot be cut, which takes passes by modules; "" for none.

    Args:
        hf_config, config: the model's config, and vLLM's `VllmConfig`.
    """
    for holds, what in (
        (why_without_blocks(hf_config) is not None, "in this model, in which no block runs either"),
        (config.model_config.runner_type != "generate", "beside classification heads"),
        (config.parallel_config.pipeline_parallel_size > 1, "on pipeline ranks: raise tensor_parallel_size"),
        (
            getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1,
            "with decode_context_parallel_size above 1: leave it out",
        ),
        (
            config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe,
            "in data parallel engines with experts: data_parallel_size is to be 1",
        ),
        (
            config.speculative_config is not None and config.scheduler_config.scheduler_cls != scheduler_name(config),
            "beside drafts of an attached vLLM: leave out speculative_config",
        ),
        (config.model_config.enable_prompt_embeds, "beside embeddings: leave out enable_prompt_embeds"),
        (
            config.cache_config.cache_dtype not in ("auto", *DTYPE_NAMES),
            "beside a quantised KV cache, which their own K and V would not be: leave out kv_cache_dtype",
        ),
    ):
        if holds:
            return what
    return ""


def check_traced(request: Request) -> None:
    """Refuse a traced request that only our own engine serves. Raises VllmRefusalError: the message names the reason."""
    trace: Any = request.trace
    if len(trace.request_ids) > 1:
        raise VllmRefusalError(f"with engine='vllm' a block sees one prompt: give each an invoke. {OURS}")
    if request.stop_checker is not None:
        raise VllmRefusalError(
            f"with engine='vllm' a request with a block ends at stop_token_ids, not at texts (stop=...). {OURS}"
        )
    if request.monitors is not None and request.monitors.stops:
        raise VllmRefusalError(f"with engine='vllm' monitors do not end a request with a block. {OURS}")
