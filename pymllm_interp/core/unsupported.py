"""Features of other servers that are not supported: keywords of their users, and what to use in their place."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model's architecture has no implementation."""


SPECULATION = (
    "speculative decoding is not supported here, nor with given drafts: LM(..., speculative={'method': 'draft_model', "
    "'model': folder, 'num_speculative_tokens': 4}) sets a draft model for all, and 'ngram' drafts from the prompt and the output"
)
LORA = (
    "it is not supported: LoRA adapters are loaded by lm.load_adapter(name, folder), and a request names one, lora=name; over "
    "HTTP it is the model"
)
PIPELINE = "pipeline parallelism is not supported: one device holds the model; dtype='bfloat16' halves what float32 weights take"
DATA_PARALLEL = "data parallelism is not supported: make an LM for each device, device='cuda:0', device='cuda:1', ..."
CONTEXT_PARALLEL = "context parallelism is not supported: one device holds the KV cache, within max_model_len"
EXPERT_PARALLEL = "expert parallelism is not supported: the models here are dense, and one device holds them"
KV_TRANSFER = "KV transfer between engines is not supported: each LM computes the KV of its own requests"
SLEEP = (
    "sleep mode is not supported: lm.shutdown() releases the device's memory, and a new LM(...) loads the model again"
)
POOLING = (
    "pooling and embedding tasks are not supported: capture hidden states with lm.generate(prompts, "
    "SamplingParams(max_tokens=0), capture=['final_norm']) and pool them"
)
STRUCTURED = (
    "it is not supported: a request sets its structured outputs, and xgrammar compiles them: "
    "SamplingParams(structured_outputs=StructuredOutputs(json=...)), or regex, choice, grammar, json_object, structural_tag"
)
PROCESSORS = (
    "logits processors are not supported: use SamplingParams(constraint=...), logit_bias or allowed_token_ids, or a trace "
    "that edits lm.logits"
)
_FORMS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json_object": "json_object", "structural_tag": "structural_tag", "grammar": "grammar",
}  # fmt: skip
"""Names of structured outputs in older versions of vLLM, and elsewhere -> the field."""
MULTIMODAL = "multimodal inputs are not supported: the models here take text, or token ids"
KV_QUANTISATION = (
    "computing scales of K and V is not supported: kv_cache_dtype='fp8' takes those of the checkpoint, else 1"
)
QUANTISATION = (
    "quantised weights are not supported as an option: config.json says how a checkpoint is quantised, quantize='fp8' rounds "
    "weights at load, and a .gguf file is dequantised"
)

OPTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "speculative_model", "draft_model", "num_lookahead_slots", "speculative_draft_tensor_parallel_size",
            "spec_decoding_acceptance_method",
        ),
        SPECULATION,
    ),
    **dict.fromkeys(
        ("enable_lora", "lora_modules", "max_cpu_loras", "fully_sharded_loras"), LORA
    ),
    **dict.fromkeys(("pipeline_parallel_size", "distributed_executor_backend"), PIPELINE),
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank", "data_parallel_size_local"), DATA_PARALLEL),
    **dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size", "cp_kv_cache_interleave_size"),
        CONTEXT_PARALLEL,
    ),
    **dict.fromkeys(("enable_expert_parallel", "enable_eplb", "eplb_config", "num_redundant_experts"), EXPERT_PARALLEL),
    **dict.fromkeys(("kv_transfer_config", "kv_events_config", "kv_connector"), KV_TRANSFER),
    "enable_sleep_mode": SLEEP,
    **dict.fromkeys(("task", "runner", "convert", "pooler_config", "override_pooler_config"), POOLING),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config"), STRUCTURED),
    "logits_processors": PROCESSORS,
    "reasoning_parser": "an LM returns the text as it is: pymllm-interp serve --reasoning-parser splits reasoning off",
    **dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs", "mm_encoder_tp_mode", "enable_prompt_embeds"), MULTIMODAL),
    "calculate_kv_scales": KV_QUANTISATION,
    **dict.fromkeys(("quantization", "quantization_config", "load_in_8bit", "load_in_4bit"), QUANTISATION),
}  # fmt: skip
"""Keywords of an engine -> why not, and what serves instead."""

OF_REQUESTS: dict[str, str] = {
    **{name: f"it is not supported: use structured_outputs, with {field}" for name, field in _FORMS.items()},
    **dict.fromkeys(("guided_decoding", "response_format"), STRUCTURED),
    **dict.fromkeys(("logits_processors", "logits_processor", "prefix_allowed_tokens_fn"), PROCESSORS),
    **dict.fromkeys(("adapter", "lora_request", "lora_name"), LORA),
    **dict.fromkeys(("assistant_model", "num_assistant_tokens"), SPECULATION),
    "prompt_lookup_num_tokens": "it is set for all requests: LM(..., speculative={'method': 'ngram', 'num_speculative_tokens': k})",
    "pooling_params": POOLING,
    **dict.fromkeys(
        (
            "pixel_values", "image_grid_thw", "images", "videos", "audios", "multi_modal_data", "mm_processor_kwargs",
            "inputs_embeds", "prompt_embeds",
        ),
        MULTIMODAL,
    ),
}  # fmt: skip
"""Keywords of a request or of its sampling parameters -> why not, and what serves instead."""
