"""Features of other servers that are not supported: keywords of their users, and the alternatives."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model's architecture has no implementation."""


SPECULATION = (
    "speculative decoding is not supported here, nor with given drafts: LM(..., speculative={'method': 'draft_model', "
    "'model': folder, 'num_speculative_tokens': 4}) sets a draft model for all, and 'ngram' drafts from the prompt and the output"
)
LORA = (
    "it is not needed: every engine serves LoRA adapters, max_loras at a time. lm.adapters.load(name, folder) loads one, and "
    "over HTTP serve --lora-modules NAME=FOLDER"
)
LORA_OF_REQUESTS = (
    "a call takes lora=name, of an adapter that lm.adapters.load(name, folder) loaded; over HTTP its name is the model"
)
PIPELINE = "pipeline parallelism is not supported: one device holds the model; dtype='bfloat16' and quantize='fp8' take less of it"
DATA_PARALLEL = (
    "data parallelism is not supported within an engine: replicas serve it, `pymllm-interp cluster MODEL --replicas N` "
    "(docs/engine/cluster.md); in a program, an LM for each device, device='cuda:0', device='cuda:1', ..."
)
CONTEXT_PARALLEL = "context parallelism is not supported: one device holds the KV cache, within max_model_len"
EXPERT_PARALLEL = "expert parallelism is not supported: one device holds all experts of a model"
ROUTED_EXPERTS = (
    "it is not supported: captures have the chosen experts, capture=['experts.*'], in native families with experts"
)
KV_TRANSFER = "KV transfer between engines is not supported: each LM computes the KV of its own requests"
SLEEP = "sleep mode as an option is not supported: lm.sleep() gives memory back, and lm.wake() takes it again"
POOLING = (
    "tasks and poolings of an engine are not supported as options: any engine pools, lm.encode(prompts, pooling='mean', "
    "normalize=True), by default as the model's modules.json says"
)
BEAMS = "there is no beam search; n draws as many completions"
PROFILE = "torch.profiler works around calls, and `benchmarks/suite.py profile` says where the time of steps goes"
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
PROCESSOR = "it is not supported: images are read as the model's processor is configured, by preprocessor_config.json in its folder"
IMAGE_STATES = (
    "states of images go with edits of the weights, with a cache_salt, and the least recently used first; a local LM drops all by "
    "lm.runner.reset_encoder_cache()"
)
MULTIMODAL = "multimodal inputs are not supported: the models here take text, or token ids"
IMAGES = (
    "images beside a prompt are not supported: they are part of it, lm.generate({'prompt': text, 'multi_modal_data': {'image': "
    "[...]}}); over HTTP they are parts of a message, of type image_url"
)
KV_QUANTISATION = (
    "computing scales of K and V is not supported: kv_cache_dtype='fp8' takes those of the checkpoint, else 1"
)
QUANTISATION = (
    "quantised weights are not supported as an option: config.json says how a checkpoint is quantised, quantize='fp8' or "
    "'fp8-w8a8' rounds weights at load, and a .gguf file is dequantised"
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
        ("enable_lora", "lora_modules"), LORA
    ),
    "max_cpu_loras": "all loaded adapters are in host memory; max_loras is how many of them are on the device",
    "fully_sharded_loras": "one device holds an adapter: LoRA is not sharded",
    **dict.fromkeys(("pipeline_parallel_size", "distributed_executor_backend"), PIPELINE),
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank", "data_parallel_size_local"), DATA_PARALLEL),
    **dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size", "cp_kv_cache_interleave_size"),
        CONTEXT_PARALLEL,
    ),
    **dict.fromkeys(("enable_expert_parallel", "enable_eplb", "eplb_config", "num_redundant_experts"), EXPERT_PARALLEL),
    "enable_return_routed_experts": ROUTED_EXPERTS,
    **dict.fromkeys(("kv_transfer_config", "kv_events_config", "kv_connector"), KV_TRANSFER),
    "enable_sleep_mode": SLEEP,
    **dict.fromkeys(("task", "runner", "convert", "pooler_config", "override_pooler_config"), POOLING),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config"), STRUCTURED),
    "logits_processors": PROCESSORS,
    "reasoning_parser": "an LM returns the text as it is: pymllm-interp serve --reasoning-parser splits reasoning off",
    **dict.fromkeys(("mm_processor_kwargs", "mm_encoder_tp_mode"), PROCESSOR),
    "enable_prompt_embeds": "an LM takes them in any case, in a prompt",
    "calculate_kv_scales": KV_QUANTISATION,
    **dict.fromkeys(("quantization", "quantization_config", "load_in_8bit", "load_in_4bit"), QUANTISATION),
}  # fmt: skip
"""Keywords of an engine -> reason and alternative."""

EMBEDS = (
    'embeddings are a prompt, lm.generate({"prompt_embeds": embeds}); over HTTP they are a field of /v1/completions'
)
OF_REQUESTS: dict[str, str] = {
    **{name: f"it is not supported: use structured_outputs, with {field}" for name, field in _FORMS.items()},
    **dict.fromkeys(("guided_decoding", "response_format"), STRUCTURED),
    **dict.fromkeys(("logits_processors", "logits_processor", "prefix_allowed_tokens_fn"), PROCESSORS),
    **dict.fromkeys(("adapter", "lora_request", "lora_name"), LORA_OF_REQUESTS),
    **dict.fromkeys(("assistant_model", "num_assistant_tokens"), SPECULATION),
    "prompt_lookup_num_tokens": "it is set for all requests: LM(..., speculative={'method': 'ngram', 'num_speculative_tokens': k})",
    "pooling_params": POOLING,
    **dict.fromkeys(
        ("pixel_values", "image_grid_thw", "images", "multi_modal_data"),
        IMAGES,
    ),
    **dict.fromkeys(("videos", "audios"), MULTIMODAL),
    "mm_processor_kwargs": PROCESSOR,
    **dict.fromkeys(("inputs_embeds", "prompt_embeds"), EMBEDS),
}  # fmt: skip
"""Keywords of a request or of its sampling parameters -> reason and alternative."""

_IN_PROCESS = (
    "a trace runs code on the model, `with lm.trace(prompt):`; lm.runner.model is the module of a local engine"
)
METHODS: dict[str, str] = {
    "embed": "here it is lm.encode(prompts)",
    "reward": "here it is lm.score(prompts)",
    "wake_up": "here it is lm.wake(tags)",
    "beam_search": BEAMS,
    **dict.fromkeys(("collective_rpc", "apply_model"), _IN_PROCESS),
    "init_weight_transfer_engine": "lm.update_weights(named_tensors) does all; over HTTP the server has vLLM's four routes",
    **dict.fromkeys(("start_profile", "stop_profile"), PROFILE),
    "reset_mm_cache": IMAGE_STATES,
    # here by another name
    "get_tokenizer": "here it is lm.tokenizer",
    "set_tokenizer": "the tokenizer is the model's: put its files into the model's folder",
    "get_default_sampling_params": "here it is lm.default_sampling_params",
    "get_metrics": "here it is lm.engine.stats()",
    "get_world_size": PIPELINE,
    "llm_engine": "here it is lm.engine",
    "model_config": "here it is lm.cfg, transformers' config",
    "preprocess_chat": "lm.chat(messages) renders and generates; lm.tokenizer.apply_chat_template renders alone",
    "close": "lm.shutdown() ends the engine; so does `with LM(model) as lm:`",
    "enqueue": "here it is lm.submit(prompt, ...), which returns a handle",
    "wait_for_completion": "here it is handle.result(), of lm.submit(prompt, ...)",
    # functions here
    **{name: f"it is a function: pymllm_interp.toolkit.{name}(lm, ...)" for name in ("contrast", "loss_recovered")},
    "logit_lens": "lm.generate_with_lens(prompt, params) has the tokens of each layer, and Capture(site, reduce=Lens()) of one",
    # TransformerLens'
    **dict.fromkeys(("hooks", "add_hook", "add_perma_hook"), "use lm.run_with_hooks(prompt, fwd_hooks), or lm.edit(), which lasts"),
    "reset_hooks": "hooks last for one call; lm.clear_edits() removes edits",
    "blocks": "the decoder layers are modules of the tree, such as lm.model.layers; print(lm) shows their names",
    **dict.fromkeys(
        ("W_E", "W_U", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "unembed", "ln_final", "hook_dict"),
        "pymllm_interp.lens.Bridge(lm) has TransformerLens' names; the modules have their weights, lm.lm_head.weight",
    ),
}  # fmt: skip
"""Methods and attributes of vLLM's `LLM` and TransformerLens' models that an `LM` lacks -> alternative."""

ATTRIBUTES: dict[str, str] = {
    "n_layers": "num_layers", "n_layer": "num_layers", "num_hidden_layers": "num_layers", "n_heads": "num_heads",
    "n_head": "num_heads", "num_attention_heads": "num_heads", "d_model": "hidden_size", "d_hidden": "hidden_size",
    "n_embd": "hidden_size", "d_head": "model_spec.head_dim", "d_vocab": "vocab_size", "n_ctx": "limits.max_model_len",
    "context_length": "limits.max_model_len", "d_mlp": "model_spec.intermediate_size",
}  # fmt: skip
"""Names of sizes in TransformerLens' and transformers' configs -> the attribute of an `LM`."""
