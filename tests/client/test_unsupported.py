"""Features that are not served: each is refused by its own name, with what serves instead (rows V2 to V53)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_runner import make_runner
from transformers import BertConfig, LlavaConfig, PretrainedConfig, Qwen4ExpTextConfig, T5Config

from pymllm_interp import LM, SamplingParams
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core import unsupported
from pymllm_interp.core.step import SchedulerOutput
from pymllm_interp.models.registry import UnsupportedModelError
from pymllm_interp.runner.model_runner import ModelRunner

OPTIONS = [
    ("V2", "calculate_kv_scales", True, "computing scales of K and V.*kv_cache_dtype='fp8'"),
    ("V2", "quantization", "awq", r"quantised weights.*\.gguf"),
    ("V6", "pipeline_parallel_size", 2, "pipeline parallelism.*one device holds the model"),
    ("V7", "data_parallel_size", 2, "data parallelism.*an LM for each device"),
    ("V8", "decode_context_parallel_size", 2, "context parallelism.*max_model_len"),
    ("V8", "cp_kv_cache_interleave_size", 2, "context parallelism"),
    ("V9", "limit_mm_per_prompt", {"image": 1}, "multimodal inputs.*take text"),
    ("V9", "enable_prompt_embeds", True, "multimodal inputs.*token ids"),
    ("V12", "draft_model", "tiny", "speculative decoding"),
    ("V14", "task", "embed", r"pooling and embedding.*capture=\['final_norm'\]"),
    ("V14", "runner", "pooling", "pooling and embedding"),
    ("V21", "guided_decoding_backend", "xgrammar", "structured outputs, and xgrammar compiles them"),
    ("V22", "enable_lora", True, r"LoRA adapters.*lm\.load_adapter"),
    ("V22", "lora_modules", [], r"LoRA adapters.*lora=name"),
    ("V23", "kv_transfer_config", {}, "KV transfer"),
    ("V24", "enable_eplb", True, "expert parallelism"),
    ("V34", "enable_sleep_mode", True, r"sleep mode.*lm\.shutdown\(\)"),
    ("V53", "speculative_model", "mtp", "speculative decoding"),
]
OF_REQUESTS = [
    ("V9", "pixel_values", torch.zeros(1), "multimodal inputs"),
    ("F8", "image_grid_thw", torch.zeros(1), "multimodal inputs"),
    ("V9", "inputs_embeds", torch.zeros(1), "multimodal inputs"),
    ("V10", "assistant_model", "tiny", "speculative decoding"),
    ("V14", "pooling_params", {}, "pooling and embedding"),
    ("V21", "guided_decoding", {"json": {}}, "structured outputs, and xgrammar.*StructuredOutputs"),
    ("V21", "guided_json", {}, "use structured_outputs, with json"),
    ("V22", "lora_request", "name", "LoRA adapters"),
]
MODELS = [
    (
        "V9",
        LlavaConfig(architectures=["LlavaForConditionalGeneration"]),
        "LlavaForConditionalGeneration is a multimodal model.*take text",
    ),
    ("V14", BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM is not a generative model.*final_norm"),
    (
        "V49",
        T5Config(architectures=["T5ForConditionalGeneration"]),
        "T5.* is an encoder-decoder model.*cross-attention",
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


@pytest.mark.parametrize(("row", "config", "message"), MODELS, ids=[f"{m[0]}-{m[1].model_type}" for m in MODELS])
def test_a_kind_of_model_that_is_not_supported_is_refused_by_its_name(
    row: str, config: PretrainedConfig, message: str
) -> None:
    runner = ModelRunner(ServerConfig(device="cpu"), ModelConfig(model="dummy", load_format="dummy", hf_config=config))
    with pytest.raises(UnsupportedModelError, match=rf"{message}.*Decoder-only language models are served"):
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
