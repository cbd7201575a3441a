"""vLLM settings that this engine refuses. The client checks them before the load, and each rank again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..core.families import num_labels_of
from .recurrent import on_cpu, refused_states
from .structures import IMAGES

DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3")
"""Methods of speculation that are served."""

PRECISIONS = ("float32", "float16", "bfloat16")
"""Values of vLLM's `cache_dtype` that are dtypes of models, too."""

ANYRES = "anyres_max_9"
"""The number of tiles by which vLLM sizes images of LLaVA-OneVision."""
NORMALIZES = "mm_device_do_normalize"
"""vLLM's setting by which a vision tower normalises pixels. Here they come normalised."""


class VllmRefusalError(NotImplementedError):
    """vLLM can run it, and hooks cannot be served with it."""


def refuse_config(config: Any) -> None:
    """Refuse a `VllmConfig`. Raises VllmRefusalError: the message names each setting, and what to do."""
    found = list(_refused(config))
    if found:
        raise VllmRefusalError("LM(engine='vllm') does not serve " + "; ".join(found))


def without_full_graphs(config: Any) -> None:
    """Change the settings of an engine of this package where `_graphs_lose_kv`: attention is in no CUDA graph."""
    if _graphs_lose_kv(config):
        mode = config.compilation_config.cudagraph_mode
        config.compilation_config.cudagraph_mode = mode.mixed_mode() if mode.separate_routine() else type(mode)(0)


def _graphs_lose_kv(config: Any) -> bool:
    """Whether full CUDA graphs attend to a request's newest token only.

    With decode context parallelism vLLM captures them by requests without earlier tokens. It leaves attention to those out
    (`should_skip_dcp_context_attention`; its issue 41623). Seen with 0.26 on two H200, and in the source of 0.32.
    """
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    whole = mode is not None and mode.decode_mode().name == "FULL"
    return whole and getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1


def _refused(config: Any) -> Iterator[str]:
    for holds, what in (*_of_ranks(config), *_of_settings(config), *_of_images(config), *refused_states(config)):
        if holds:
            yield what


def _of_ranks(config: Any) -> Iterator[tuple[bool, str]]:
    """(whether it holds, reason) of each refusal of ranks."""
    parallel, model, drafts = config.parallel_config, config.model_config, config.speculative_config
    cpu = on_cpu(config)
    yield from (
        (
            parallel.pipeline_parallel_size > 1 and drafts is not None,
            "pipeline_parallel_size above 1 with speculative_config, whose drafts other ranks do not take back: leave one out",
        ),
        (
            parallel.pipeline_parallel_size > 1 and getattr(model, "runner_type", "generate") != "generate",
            "pipeline_parallel_size above 1 for a model with labels: raise tensor_parallel_size",
        ),
        (
            getattr(parallel, "data_parallel_external_lb", False)
            or getattr(parallel, "data_parallel_hybrid_lb", False),
            "data_parallel_external_lb and data_parallel_hybrid_lb, where other clients have the other engines: leave them out",
        ),
        (
            cpu and parallel.data_parallel_size > 1 and getattr(model, "is_moe", False),
            "data_parallel_size above 1 for a model with experts on a CPU, where vLLM's engines did not start: leave it out",
        ),
        (
            parallel.pipeline_parallel_size > 1 and _is_multimodal(model),
            "pipeline_parallel_size above 1 for a model with images: raise tensor_parallel_size",
        ),
        (getattr(parallel, "enable_elastic_ep", False), "enable_elastic_ep: ranks would come and go; leave it out"),
        (
            cpu and getattr(parallel, "enable_expert_parallel", False),
            "enable_expert_parallel on a CPU, where vLLM's kernels read one rank's experts by the numbers of all, and end with a "
            "segmentation fault: leave it out",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill_context_parallel_size above 1: leave it out",
        ),
        (
            cpu and getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "decode_context_parallel_size above 1 on a CPU, where vLLM's attention returns no sums of its softmax: leave it out",
        ),
        (
            _graphs_lose_kv(config),
            "decode_context_parallel_size above 1 with full CUDA graphs, which vLLM captures without attention to earlier "
            "tokens: compilation_config={'cudagraph_mode': 'PIECEWISE'}",
        ),
    )


def _of_settings(config: Any) -> Iterator[tuple[bool, str]]:
    """(whether it holds, reason) of each other refusal."""
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    drafts = config.speculative_config
    yield from (
        (getattr(parallel, "enable_dbo", False), "enable_dbo: a step would be split; leave it out"),
        (getattr(parallel, "ubatch_size", 0) > 1, "ubatch_size above 1: a step would be split; leave it out"),
        (
            parallel.distributed_executor_backend == "external_launcher",
            "distributed_executor_backend='external_launcher': use 'mp' or 'ray'",
        ),
        (
            drafts is not None and drafts.method not in DRAFTERS,
            f"speculative_config with method {getattr(drafts, 'method', None)!r}: {', '.join(DRAFTERS)} are served",
        ),
        (
            drafts is not None and config.scheduler_config.async_scheduling,
            "speculative_config with async_scheduling, where a step begins before drafts are accepted: leave async_scheduling out",
        ),
        (
            str(getattr(cache, "cache_dtype", "auto")) in PRECISIONS
            and f"torch.{cache.cache_dtype}" != str(getattr(model, "dtype", "")),
            "kv_cache_dtype with another precision than the model's, by which vLLM's kernels read the cache: leave it out, or "
            "set dtype, too",
        ),
        (getattr(config, "kv_transfer_config", None) is not None, "kv_transfer_config: leave it out"),
        (
            getattr(cache, "kv_sharing_fast_prefill", False),
            "kv_sharing_fast_prefill: prompts would skip layers; leave it out",
        ),
        (_passes(config, "enable_sp"), "pass_config.enable_sp: norms would see a part of the rows; leave it out"),
        (_passes(config, "enable_sequence_parallelism"), "pass_config.enable_sequence_parallelism: leave it out"),
        (
            getattr(parallel, "use_sequence_parallel_moe", False) is True,
            "expert parallelism with sequence-parallel MoE: leave out enable_expert_parallel",
        ),
        (
            getattr(model, "runner_type", "generate") != "generate"
            and num_labels_of(getattr(model, "hf_config", None)) is None,
            "runner='pooling': leave it out; lm.encode pools the states of a generating model",
        ),
        (getattr(model, "is_encoder_decoder", False), "encoder-decoder models"),
        (
            os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1",
            "VLLM_USE_BREAKABLE_CUDAGRAPH: such graphs were not tested with hooks; unset it",
        ),
        (
            _is_multimodal(model) and getattr(config, "lora_config", None) is not None,
            "enable_lora for a model with images: leave it out",
        ),
        (
            _is_multimodal(model) and getattr(model, "enable_prompt_embeds", False),
            "enable_prompt_embeds for a model with images: leave it out",
        ),
        (
            str(getattr(model, "dtype", "")) == "torch.float16"
            and "Deepseek" in str(getattr(model, "architectures", "")),
            "DeepSeek models in float16, where vLLM scales the stream: use bfloat16",
        ),
        (
            str(getattr(model, "model_impl", "auto")) == "transformers",
            "model_impl='transformers': layers have no pair norms",
        ),
    )


def _of_images(config: Any) -> Iterator[tuple[bool, str]]:
    """(whether it holds, reason) of each refusal of models with images."""
    model, drafts = config.model_config, config.speculative_config
    yield from (
        (
            _is_multimodal(model) and not IMAGES.keys() & set(getattr(model, "architectures", None) or ()),
            f"multimodal models other than {', '.join(IMAGES)}: their language model by itself is served",
        ),
        (
            _turns_in_sections(getattr(model, "hf_text_config", None)),
            "Qwen3-VL without mrope_interleaved in its rope_parameters, where vLLM turns other channels: set it to true",
        ),
        (
            getattr(getattr(model, "hf_config", None), "vision_aspect_ratio", ANYRES) != ANYRES,
            f"LLaVA-OneVision with another vision_aspect_ratio than {ANYRES}, which vLLM does not read",
        ),
        (
            _is_multimodal(model) and getattr(model.multimodal_config, NORMALIZES, False),
            f"{NORMALIZES}, as images come normalised: {NORMALIZES}=False",
        ),
        (
            _is_multimodal(model) and getattr(model.multimodal_config, "mm_processor_cache_gb", 0) > 0,
            "mm_processor_cache_gb above 0, as vLLM would lose a user's images beside those of an LM: mm_processor_cache_gb=0",
        ),
        (_is_multimodal(model) and drafts is not None, "speculative_config for a model with images: leave it out"),
    )


def _passes(config: Any, name: str) -> bool:
    found = getattr(getattr(config.compilation_config, "pass_config", None), name, False)
    return found is True


def _turns_in_sections(text: Any) -> bool:
    """Whether vLLM turns channels of Qwen3-VL in the order of Qwen2.5-VL, where channels of an axis follow each other."""
    rope = getattr(text, "rope_parameters", None) or {}
    return getattr(text, "model_type", "") == "qwen3_vl_text" and not rope.get("mrope_interleaved")


def _is_multimodal(model: Any) -> bool:
    return getattr(model, "multimodal_config", None) is not None
