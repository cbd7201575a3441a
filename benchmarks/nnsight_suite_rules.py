"""How nnsight's tests are ported: text substitutions from GPT-2 to the demo model, and the tests that do not apply.

The substitutions name modules, sizes and texts. None of them touches what a test checks.
"""

from __future__ import annotations

import re

PROMPT = "The Brooklyn Bridge is located in the city of"
"""Stands for the tests' "Madison Square Garden is located in the city of": 9 tokens too, continued by " New York.\\n\\n"."""

BY_HAND: dict[str, list[tuple[str, str]]] = {
    "test_envoy.py": [
        ("model.transformer.h = nn.ModuleList(list(model.transformer._module.h)[:4])",
         "model.model.layers = nn.ModuleList(list(model.model._module.layers)[:4])"),
        ("assert len(list(model.transformer.h)) == 4", "assert len(list(model.model.layers)) == 4"),
        ("hidden = model.transformer.h[3].output.save()", "hidden = model.model.layers[3].output.save()"),
        ("model._module.config.n_embd", "model._module.config.hidden_size"),
    ],
    "test_modeling.py": [
        # The file also subclasses nnsight's class.
        ("from nnsight.modeling.transformers import TransformersModel", "import nnsight.modeling.transformers as _transformers"),
        ("class FakeTransformers(TransformersModel)", "class FakeTransformers(_transformers.TransformersModel)"),
        ("        model = TransformersModel(hf_gpt2", "        model = nnsight_suite_plugin.TransformersModel(hf_gpt2"),
        ("TransformersModel(module)", "_transformers.TransformersModel(module)"),
        ("TransformersModel(repo, task=task)", "_transformers.TransformersModel(repo, task=task)"),
    ],
    "test_language.py": [
        # Aliases: GPT-2's names of Llama's modules would collide with the modules' own.
        ('rename={"transformer": "model", "h.0": "first_layer", "1": "second_layer"}',
         'rename={"model": "body", "layers.0": "first_layer", "1": "second_layer"}'),
        ("cache.model.model.first_layer", "cache.model.body.first_layer"),
        ('cache.model.model.h["second_layer"]', 'cache.model.body.layers["second_layer"]'),
        ('cache["model.model.first_layer"]', 'cache["model.body.first_layer"]'),
        ('rename={".h": "layers"}', 'rename={".layers": "blocks"}'),
        ("transformer.layers[", "model.blocks["),
        ('rename = {"attn": "self_attn", "attn.c_proj": "attn.o_proj", "mlp.c_proj": "mlp.down_proj"}',
         'rename = {"attn": "attention", "attn.c_proj": "attn.out", "mlp.c_proj": "mlp.down"}'),
        ("block.attn.o_proj is block.attn.c_proj", "block.attn.out is block.attn.c_proj"),
        ("block.mlp.down_proj is block.mlp.c_proj", "block.mlp.down is block.mlp.c_proj"),
        ('{"self_attn": "attn"}', '{"attention": "self_attn"}'),
        ('{"o_proj": "c_proj"}', '{"out": "o_proj"}'),
        ('{"down_proj": "c_proj"}', '{"down": "down_proj"}'),
        ("model.transformer.h.0.self_attn.o_proj", "model.transformer.h.0.attention.out"),
        ("block.self_attn.o_proj.output", "block.attention.out.output"),
        ("block.mlp.down_proj.input", "block.mlp.down.input"),
        ('"attn": "self_attn", "mlp": "ffn"}', '"attn": "attention", "mlp": "ffn"}'),
        ('"layers.0.self_attn": Attn', '"layers.0.attention": Attn'),
        ("model.layers[0].self_attn) is Attn", "model.layers[0].attention) is Attn"),
        ("model.layers[1].self_attn) is Envoy", "model.layers[1].attention) is Envoy"),
        # transformers' GPT-2 prints these for its own weights; the demo model's are other words.
        ('"\\n-el Tower is a the middle centre Paris"', "nnsight_suite_plugin.lens_text()"),
    ],
    "vllm/test_tracing.py": [
        # Where GPT-2 goes on for ten tokens, the demo model ends.
        ("ET_prompt, max_tokens=10)", "ET_prompt, max_tokens=10, ignore_eos=True)"),
        # Without biases a zero state stays zero; and the demo model's last MLPs do not decide about Paris.
        ("h[3].output = torch.zeros_like(", "h[3].output = torch.ones_like("),
        ("h[-2].mlp", "h[0].mlp"),
    ],
    "vllm/test_requests.py": [
        ("tracer.invoke(ET_prompt, max_tokens=6)", "tracer.invoke(ET_prompt, max_tokens=6, ignore_eos=True)"),
        ("h[-2].mlp", "h[0].mlp"),
        ("et.shape[0] != msg.shape[0]", "et.shape[1] != msg.shape[1]"),
        ("rows[0].shape[0]", "rows[0].shape[1]"), ("rows[1].shape[0]", "rows[1].shape[1]"),
    ],
}  # fmt: skip
"""file -> exact texts, before the general rules."""

MODELS = [
    (r"from nnsight\.modeling\.transformers import TransformersModel\b", "from nnsight_suite_plugin import TransformersModel"),
    (r"from nnsight\.modeling\.vllm import VLLM", "from nnsight_suite_plugin import VLLM"),
    (r"from nnsight import (LanguageModel|TransformersModel)\b", r"from nnsight_suite_plugin import \1"),
    (r"nnsight\.LanguageModel\(", "nnsight_suite_plugin.LanguageModel("),
    (r"from transformers\.models\.gpt2\.modeling_gpt2 import GPT2(\w+)",
     r"from transformers.models.llama.modeling_llama import Llama\1 as GPT2\1"),
    (r"AutoModelForCausalLM\.from_pretrained\(\"gpt2\"\)", "nnsight_suite_plugin.hf_model()"),
    (r"(AutoTokenizer|AutoConfig)\.from_pretrained\(\"gpt2\"\)", r"\1.from_pretrained(nnsight_suite_plugin.demo_folder())"),
    (r"from transformers import GPT2Config, GPT2LMHeadModel\n\n    torch", "torch"),
    (r"GPT2LMHeadModel\(GPT2Config\(vocab_size=8, n_layer=1, n_head=2, n_embd=16\)\)",
     "nnsight_suite_plugin.causal_module(vocab_size=8)"),
]  # fmt: skip
"""Where a model comes from: `nnsight_suite_plugin` makes it nnsight's or ours."""

ARCHITECTURE = [
    (r"\btransformer\._module\.h\b", "model._module.layers"),
    (r"\btransformer\.h\b", "model.layers"),
    (r"\btransformer\.wte\b", "model.embed_tokens"),
    (r"\btransformer\.ln_f\b", "model.norm"),
    (r"(\"\*?\.?)h\"", r'\1layers"'),
    (r"(?<=[.\"])attn\b(?!_)(?!\":)", "self_attn"),
    (r"\"attn\":", '"self_attn":'),
    (r"self_attn\.c_attn\b", "self_attn.q_proj"),
    (r"self_attn\.c_proj\b", "self_attn.o_proj"),
    (r"mlp\.c_proj\b", "mlp.down_proj"),
    (r"\bc_fc\b", "up_proj"),
    (r"\bself_act_0\b", "self_act_fn_0"),
    (r"\b768\b", "576"),
    (r"n_heads = 12\b", "n_heads = 9"),
    (r"len\(model\.layers\) == 12", "len(model.layers) == 30"),
    (r"model\.layers\.11\b", "model.layers.29"),
    (r"\b50257\b", "49152"),
    (r"config\.n_layer\b", "config.num_hidden_layers"),
    (r"config\.n_head\b", "config.num_attention_heads"),
    (r"config\.n_embd\b", "config.hidden_size"),
]
"""GPT-2's modules and sizes -> SmolLM2-135M's."""

BARE = ("test_envoy.py", "test_interleaving.py")
"""Files with bare modules that have names of GPT-2's."""

TEXTS = [
    (r"Madison Square Garden is located in the city of", PROMPT),
    (r"Madison Square Garden", "The Brooklyn Bridge"),
    (r"New York City\.\\n", r"New York.\\n\\n"),
    (r" York City\b", " York."),
    (r"\" City\"", '"."'),
]
"""GPT-2's prompts and answers -> the demo model's."""

VLLM = [
    (r"pytest\.importorskip\(\"vllm\"\)", "import nnsight_suite_plugin"),
    (r"torch\.cuda\.device_count\(\)", "1"),
    (r"vllm_gpt2(_\w+)?\.trace\(", r"vllm_gpt2\1.generate("),
    (r"\b(model|starved_gpt2)\.trace\(", r"\1.generate("),
    # The batch axis: vLLM's modules give [tokens, hidden].
    (r"(\.output|\.output\[0\]|\bh|hs|hidden|\"hidden\"\]|outputs\[\d\])\.shape\[0\]", r"\1.shape[-2]"),
    # vLLM's engine, another process, wraps an error of a block; here it is raised itself.
    (r"pytest\.raises\(RuntimeError, match=\"(ZeroDivisionError|ValueError)\"\)", r"pytest.raises(\1)"),
    (
        r"pytest\.raises\(RuntimeError, match=\"already ran past\"\)",
        "pytest.raises(nnsight_suite_plugin.OutOfOrderError)",
    ),
    (r"pytest\.raises\(RuntimeError\)", "pytest.raises(ZeroDivisionError)"),
    (r"except RuntimeError", "except ZeroDivisionError"),
    (r"from vllm import SamplingParams", "from pymllm_interp import SamplingParams"),
    (r"from vllm import TokensPrompt", "TokensPrompt = dict"),
    (r"def _request_state\(model\):\n.*\n", "from nnsight_suite_plugin import request_state as _request_state\n"),
    (r"^def _preemptions\(model\)(.|\n)*?\n\n\n", "from nnsight_suite_plugin import preemptions as _preemptions\n\n\n"),
    # The prompts share their prefix here, and have fewer tokens: 40 blocks hold all four.
    (r"num_gpu_blocks_override=40\b", "num_gpu_blocks_override=20"),
]
"""For tests/vllm, whose `trace` generates."""


def port(name: str, text: str) -> str:
    """One test file's text, for the demo model.

    Args:
        name: of the file, relative to nnsight's tests.
    """
    for old, new in BY_HAND.get(name, []):
        if old not in text:
            raise ValueError(f"{name} has no {old!r}: the rules are for nnsight 0.8.1")
        text = text.replace(old, new)
    rules = MODELS + ([] if name in BARE else ARCHITECTURE) + TEXTS + (VLLM if name.startswith("vllm/") else [])
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text.replace("import pytest\n", "import nnsight_suite_plugin\nimport pytest\n", 1)


FILES_LEFT_OUT = {
    "test_diffusion.py": "image generation",
    "test_vision.py": "image models",
    "test_vlm.py": "image and text models",
    "test_encoder.py": "encoders: no generation, no causal attention",
    "test_encoder_decoder.py": "encoder-decoders",
    "test_chunked_tasks.py": "pipelines of other tasks",
    "test_ndif.py": "NDIF, nnsight's remote service",
    "test_login.py": "NDIF, nnsight's remote service",
    "test_remote_backend.py": "NDIF, nnsight's remote service",
    "test_quantization.py": "nnsight's names of bitsandbytes' formats",
    "test_tensor_parallel_rules.py": "tensor parallelism of transformers",
    "tp/": "tensor parallelism of transformers",
    "performance/": "nnsight's own timings, no tests",
    "vllm/redteam_repros.py": "scripts, no tests",
    "vllm/test_async.py": "vLLM's asynchronous engine, a class of its own",
    "vllm/test_async_ray.py": "Ray",
    "vllm/test_ray.py": "Ray",
    "vllm/test_deepseek.py": "a mixture of experts",
    "vllm/test_moe_batching.py": "mixtures of experts",
    "vllm/test_lora.py": "LoRA",
    "vllm/test_serve.py": "nnsight-serve",
    "vllm/test_taps.py": "taps: nnsight's declaration of what leaves vLLM's graphs; here nothing is declared",
    "vllm/test_tensor_parallel.py": "tensor parallelism",
}
"""Files, or folders with a slash -> why no test of theirs applies."""

NOT_OURS = {
    "NDIF: keys of deployments, serialized traces, environments": (
        "test_serialization.py::", "::TestEditSerialization::", "test_get_env_carries", "test_set_env", "test_same_implementation",
        "test_unknown_implementation", "test_a_switch_that_does_not_take",
    ),
    "an LM's weights are always loaded: no meta model, no dispatch": (
        "::TestScan::test_scan_reads_shapes_without_weights", "test_scan_does_not_dispatch", "test_parent_links_survive_dispatch",
        "test_dtype_auto_builds_on_meta", "test_explicit_dtype_still_reaches",
        "test_implementation_kwargs_reach", "::TestLazyDispatch::",
    ),
    "LM has its own arguments, and a folder in place of a module": (
        "test_tokenizer_kwargs_reach", "test_meta_config_unchanged", "kwarg_loads_the_checkpoint",
        "test_explicit_task_and_tokenizer",
    ),
    "tasks and processors: an LM generates text": (
        "test_task_is_text_generation", "test_transformers_model_from_module_traces", "test_a_tensor_outside_the_table",
        "test_conversation_is_one_row",
    ),
    "the module is this engine's, not transformers': called alone it has no forward": (
        "test_inputs_embeds_trace_and_batch_like_ids", "test_generate_from_inputs_embeds", "test_no_mask_is_assumed_beside_a_cache",
        "test_a_mask_wider_than_the_input", "test_unbatched_ids_take_unbatched_fields",
    ),
    "vLLM's plugin refuses what works here": (
        "test_rejects_multiple_prompts_per_invoke", "test_empty_invoke_with_interventions_raises", "::TestBarrierIsRefused::",
        "test_barrier_across_invokes_surfaces", "vllm_tracing.py::TestScan::",
    ),
    "vLLM's classes: edits installed in the engine with handles, RequestOutputs as results, lists of equally named saves": (
        "vllm_registration.py::", "::TestSeveralSequences::", "::TestSameNameAcrossInvokes::test_each_invoke_keeps_its_own",
        "::TestPerInvokeSampling::", "test_an_inplace_logits_edit_reaches_the_sampler",
    ),
    "vLLM's stop needs an end-of-sequence token; here a stop ends the request at once": (
        "test_stop_finishes_the_request_under_min_tokens", "test_stop_under_ignore_eos",
    ),
    "vLLM's own message for a prompt of several chunks; here a PromptError": ("test_a_chunked_prompt_is_refused",),
    "prompts of unequal lengths need no pad token here": ("test_equal_length_rows_batch_without_a_pad_token",),
    "beam search": ("test_beam_search", "test_beams_from"),
}  # fmt: skip
"""Why -> parts of the ids of tests about something else than the trace of an LM."""

DIFFERENCES = {
    "a call without `with` takes SamplingParams and returns RequestOutputs": ("test_called_directly_without_a_block",),
    "a traced generation has one sequence: no num_return_sequences, no n": ("test_num_return_sequences_stacks",),
    "lm.generator is not deprecated: no warning": (
        "test_generator_output_matches_result", "TestInventory::test_language_model", "TestInventory::test_generator_output",
    ),
    "invokes are requests of their own: not padded to one length; a stop ends its own": (
        "test_each_invoke_sees_its_own_rows", "test_a_stop_in_one_invoke_serves_its_siblings",
    ),
    "after a loop that was cut short the block goes on": ("test_iter_past_the_end_is_cut_short",),
    "labels, positions, embeddings and float ids are refused, or read from the mask alone": (
        "test_an_unlabelled_invoke_is_ignored", "test_positions_are_d", "test_default_positions_count",
    ),
    "no tokenizer keywords: pass token ids": ("test_per_invoke_truncation",),
    "an envoy without a class in envoys= has this engine's subclass of Envoy": (
        "test_class_key_alias_does_not_spell", "test_multi_component_alias_matches", "test_type_key_maps_module",
        "test_wildcard_",
    ),
    "modules cannot be replaced, and torch's hooks are refused": (
        "test_gpt2_truncated_blocks", "test_an_edit_by_the_last_statement",
    ),
    "a model goes when its engine's thread has ended, a moment after the last reference": (
        "test_transformers_model_freed_with_tracer_held",
    ),
    "flags such as output_hidden_states are options of the pass, and no inputs of the model; a single prompt has no padding": (
        "test_a_flag_beside_keyword_ids",
    ),
}  # fmt: skip
"""Why -> parts of the ids of tests that an LM answers otherwise. Also in docs/use/trace.md, "What differs"."""


def reason_in(reasons: dict[str, tuple[str, ...]], test: str) -> str | None:
    """The reason that names the test, if one does."""
    return next((reason for reason, parts in reasons.items() if any(part in test for part in parts)), None)
