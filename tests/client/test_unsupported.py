"""Features that are not served: each is refused by its own name, with what serves instead (rows V2 to V53)."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_runner import make_runner
from transformers import (
    AlbertConfig,
    LlavaOnevisionConfig,
    MarianConfig,
    PaliGemmaConfig,
    PretrainedConfig,
    Qwen4ExpTextConfig,
    RoFormerConfig,
    WhisperConfig,
)

from pymllm_interp import LM, Capture, SamplingParams
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core import unsupported
from pymllm_interp.core.step import SchedulerOutput
from pymllm_interp.models.registry import UnsupportedModelError
from pymllm_interp.runner.model_runner import ModelRunner

OPTIONS = [
    ("V2", "calculate_kv_scales", True, "computing scales of K and V.*kv_cache_dtype='fp8'"),
    ("V2", "quantization", "awq", r"quantised weights.*\.gguf"),
    ("V6", "pipeline_parallel_size", 2, "pipeline parallelism.*one device holds the model"),
    ("V7", "data_parallel_size", 2, r"data parallelism.*cluster MODEL --replicas N.*an LM for each device"),
    ("V8", "decode_context_parallel_size", 2, "context parallelism.*max_model_len"),
    ("V8", "cp_kv_cache_interleave_size", 2, "context parallelism"),
    ("V9", "mm_processor_kwargs", {}, "images are read as the model's processor is configured"),
    ("V12", "draft_model", "tiny", "speculative decoding"),
    ("V14", "task", "embed", r"tasks and poolings.*lm\.encode\(prompts, pooling='mean'"),
    ("V14", "runner", "pooling", "any engine pools"),
    ("V21", "guided_decoding_backend", "xgrammar", "structured outputs, and xgrammar compiles them"),
    ("V23", "kv_transfer_config", {}, "KV transfer"),
    ("V24", "enable_eplb", True, "expert parallelism.*one device holds all experts"),
    ("V24", "enable_return_routed_experts", True, r"chosen experts.*capture=\['experts\.\*'\]"),
    ("V34", "enable_sleep_mode", True, r"sleep mode.*lm\.sleep\(\)"),
    ("V53", "speculative_model", "mtp", "speculative decoding"),
]
OF_REQUESTS = [
    ("V9", "videos", torch.zeros(1), "multimodal inputs"),
    ("V10", "assistant_model", "tiny", "speculative decoding"),
    ("V14", "pooling_params", {}, "tasks and poolings"),
    ("V21", "guided_decoding", {"json": {}}, "structured outputs, and xgrammar.*StructuredOutputs"),
    ("V21", "guided_json", {}, "use structured_outputs, with json"),
]
MODELS = [
    (
        "V9",
        PaliGemmaConfig(architectures=["PaliGemmaForConditionalGeneration"]),
        "PaliGemmaForConditionalGeneration is a multimodal model.*models with images: .*Llava",
    ),
    (
        "V9",
        LlavaOnevisionConfig(
            text_config={"model_type": "phi"}, architectures=["LlavaOnevisionForConditionalGeneration"]
        ),
        "Llava.* is a multimodal model over 'phi'.*models with images: .*Llava.*, over gemma3_text, llama, mistral",
    ),
    (
        "V14",
        AlbertConfig(architectures=["AlbertForSequenceClassification"]),
        "albert is an encoder: bidirectional attention",
    ),
    ("V14", RoFormerConfig(architectures=["RoFormerModel"]), "RoFormer.* is an encoder: bidirectional attention"),
    (
        "V49",
        MarianConfig(architectures=["MarianMTModel"]),
        "Marian.* is an encoder-decoder model of a family that is not served; those with generation of bart, t5, whisper are",
    ),
    (
        "V49",
        WhisperConfig(architectures=["WhisperForCausalLM"], is_encoder_decoder=False),
        "Whisper.* is a speech model's decoder without its encoder",
    ),
    ("qsa", Qwen4ExpTextConfig(), "Qwen4Exp.* is a model with sparse attention: its indexer selects blocks of keys"),
]


@pytest.mark.parametrize(("row", "name", "value", "message"), OPTIONS, ids=[f"{o[0]}-{o[1]}" for o in OPTIONS])
def test_an_option_that_is_not_supported_is_refused_by_its_name(row: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"LM\(\) has no argument '{name}': .*not supported.*") as refused:
        LM("demo", **{name: value})
    refused.match(message)


@pytest.mark.parametrize(("row", "name", "value", "message"), OF_REQUESTS, ids=[f"{o[0]}-{o[1]}" for o in OF_REQUESTS])
def test_a_request_for_what_is_not_supported_is_refused_by_its_name(
    row: str, name: str, value: Any, message: str, lm_of: Any
) -> None:
    with pytest.raises(TypeError, match=rf"SamplingParams\(\) has no argument '{name}': .*not supported") as refused:
        SamplingParams(**{name: value})
    refused.match(message)
    lm = lm_of("llama")
    with pytest.raises(TypeError, match=rf"lm\.generate\(\) has no argument '{name}': .*not supported") as refused:
        with lm.generate([1, 2], **{name: value}):
            lm.model.layers[0].output.save()
    refused.match(message)
    with pytest.raises(TypeError, match=rf"lm\.generate\(\) has no argument '{name}': .*not supported") as refused:
        lm.generate([1, 2], **{name: value})
    refused.match(message)


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw"])
def test_images_beside_a_prompt_name_the_place_for_them(name: str, lm_of: Any) -> None:
    """V9, F8: calls take them in a prompt; traces take transformers' arguments, of models with a vision tower."""
    lm, given = lm_of("llama"), {name: torch.zeros(1)}
    with pytest.raises(TypeError, match=rf"SamplingParams\(\) has no argument '{name}': .*part of it, lm\.generate"):
        SamplingParams(**given)
    with pytest.raises(TypeError, match=rf"lm\.generate\(\) has no argument '{name}': .*part of it, lm\.generate"):
        lm.generate([1, 2], **given)
    with pytest.raises(
        (TypeError, ValueError), match=r"the prompt has images, and .* takes text only|.*part of it, lm\.generate"
    ):
        with lm.generate([1, 2], **given):
            lm.model.layers[0].output.save()


@pytest.mark.parametrize("name", ["enable_lora", "lora_modules", "max_cpu_loras", "fully_sharded_loras"])
def test_v22_options_of_lora_are_not_called_unsupported(name: str) -> None:
    """Adapters are served without an option (V22)."""
    with pytest.raises(TypeError, match=rf"LM\(\) has no argument '{name}': .*adapter") as refused:
        LM("demo", **{name: True})
    assert "not supported" not in str(refused.value)


@pytest.mark.parametrize("name", ["lora_request", "lora_name", "adapter"])
def test_v22_a_request_for_an_adapter_names_the_keyword(name: str, lm_of: Any) -> None:
    """V22."""
    with pytest.raises(TypeError, match=rf"has no argument '{name}': a call takes lora=name.*lm\.adapters\.load"):
        lm_of("llama").generate([1, 2], **{name: "style"})


METHODS = [
    ("embed", r"lm\.encode\(prompts\)"),
    ("reward", r"lm\.score\(prompts\)"),
    ("wake_up", r"lm\.wake\(tags\)"),
    ("beam_search", "n draws as many completions"),
    ("collective_rpc", "with lm.trace"),
    ("get_tokenizer", r"lm\.tokenizer"),
    ("llm_engine", r"lm\.engine"),
    ("get_metrics", r"lm\.engine\.stats\(\)"),
    ("n_layers", r"did you mean lm\.num_layers\?"),
    ("d_model", r"did you mean lm\.hidden_size\?"),
    ("n_ctx", r"did you mean lm\.limits\.max_model_len\?"),
    ("add_hook", r"lm\.run_with_hooks"),
    ("W_U", r"pymllm_interp\.lens\.Bridge"),
    ("ln_final", r"pymllm_interp\.lens\.Bridge"),
    ("contrast", r"pymllm_interp\.toolkit\.contrast\(lm"),
    ("logit_lens", r"lm\.generate_with_lens"),
    ("generat", r"did you mean .*lm\.generate\b"),
    ("run_with_hook", r"did you mean lm\.run_with_hooks\b"),
    ("to_token", r"did you mean lm\.to_tokens\b"),
]


@pytest.mark.parametrize(("name", "instead"), METHODS, ids=[name for name, _ in METHODS])
def test_a_method_of_other_projects_says_what_serves_instead(name: str, instead: str, lm_of: Any) -> None:
    """V14, V34: an AttributeError, so that `hasattr` holds."""
    lm = lm_of("llama")
    assert not hasattr(lm, name)
    with pytest.raises(AttributeError, match=rf"LM has no attribute '{name}': .*{instead}"):
        getattr(lm, name)


def test_a_module_that_does_not_exist_names_those_that_do(lm_of: Any) -> None:
    lm = lm_of("llama")
    with pytest.raises(AttributeError, match=r"LM has no attribute 'modle': did you mean .*lm\.model\?"):
        lm.modle  # noqa: B018
    with pytest.raises(AttributeError, match=r"'transformer': .*modules: model, lm_head, generator"):
        lm.transformer  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"`model.model` has no module or attribute `layer`; did you mean `layers`"
    ):
        lm.model.layer  # noqa: B018


@pytest.mark.parametrize(("row", "config", "message"), MODELS, ids=[f"{m[0]}-{m[1].model_type}" for m in MODELS])
def test_a_kind_of_model_that_is_not_supported_is_refused_by_its_name(
    row: str, config: PretrainedConfig, message: str
) -> None:
    runner = ModelRunner(ServerConfig(device="cpu"), ModelConfig(model="dummy", load_format="dummy", hf_config=config))
    with pytest.raises(UnsupportedModelError, match=message):
        runner.initialize()


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8", "nvfp4"])
def test_v02_a_quantised_kv_cache_is_refused_by_its_name(dtype: str) -> None:
    """V2."""
    with pytest.raises(ValueError, match=rf"kv_cache_dtype='{dtype}': expected 'auto', 'fp8' \(E4M3\) or one of"):
        ServerConfig(kv_cache_dtype=dtype)


def test_v06_tensors_of_another_pipeline_stage_are_refused() -> None:
    """V6."""
    runner = make_runner(CONFIGS["llama"]())
    with pytest.raises(NotImplementedError, match="pipeline parallelism is not supported"):
        runner.execute_model(SchedulerOutput(), intermediate_tensors={})  # pyright: ignore[reportArgumentType]


def test_no_keyword_of_ours_is_called_unsupported() -> None:
    ours = {*ServerConfig.__dataclass_fields__, *ModelConfig.__dataclass_fields__, *SamplingParams.__dataclass_fields__}
    assert not ours & {*unsupported.OPTIONS, *unsupported.OF_REQUESTS}


def test_no_attribute_of_ours_is_called_unsupported_and_hints_name_ours(lm_of: Any) -> None:
    lm, tables = lm_of("llama"), {**unsupported.METHODS, **unsupported.ATTRIBUTES}
    assert not {name for name in tables if hasattr(lm, name)}
    for name in unsupported.ATTRIBUTES.values():
        assert isinstance(operator.attrgetter(name)(lm), int), name
    reasons = " ".join(
        [*unsupported.METHODS.values(), *unsupported.OPTIONS.values(), *unsupported.OF_REQUESTS.values()]
    )
    for name in set(re.findall(r"\blm\.(\w+)", reasons)):
        assert hasattr(LM, name) or hasattr(lm, name), name


def test_what_serves_instead_of_pooling_serves(lm_of: Any) -> None:
    """The calls that the messages name."""
    lm = lm_of("llama")
    params = SamplingParams(max_tokens=0)
    (rows,) = lm.generate([[1, 2, 3]], params, capture=["final_norm"])
    (pooled,) = lm.generate([[1, 2, 3]], params, capture=[Capture("final_norm", reduce="mean")])
    mean = rows.activations["final_norm"].float().mean(0)
    torch.testing.assert_close(pooled.activations["final_norm"].float().view(-1), mean, rtol=1e-5, atol=1e-6)
    (scored,) = lm.generate([[1, 2, 3]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 3
