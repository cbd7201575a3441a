"""Implementation of each architecture: a native class, or its class in transformers with this engine's KV pool.

A new native family needs its class here, and a row in `core.families.FAMILIES`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from ..core.families import (
    CLASSIFIERS,
    ENCODER_DECODERS,
    FAMILIES,
    TRANSFORMERS_FAMILIES,
    is_encoder,
    lacks_head,
    num_labels_of,
)
from ..core.model_spec import ModelSpec, has_images
from ..core.unsupported import MULTIMODAL, UnsupportedModelError
from ..layers.quantization.unallocated import unallocated_weights
from .base import CausalLM
from .native.decoder import DecoderForCausalLM
from .native.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM, GemmaForCausalLM
from .native.gpt2 import GPT2LMHeadModel
from .native.gpt_neox import GPTNeoXForCausalLM
from .native.gpt_oss import GptOssForCausalLM
from .native.llama import LlamaForCausalLM, MistralForCausalLM
from .native.moe import Glm4MoeForCausalLM, MixtralForCausalLM, OlmoeForCausalLM, Qwen3MoeForCausalLM
from .native.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM
from .native.qwen3_5 import Qwen3_5ForCausalLM, Qwen3NextForCausalLM
from .transformers.encoder_decoder.spec import decoder_spec
from .transformers.structure import config_spec
from .vision.vision_model import TEXT_MODELS, Gemma3ForConditionalGeneration, VisionLanguageForCausalLM
from .weights.formats import METHODS, QuantizationFormat, method_of
from .weights.huge_pages import take_huge_pages
from .weights.loading import WeightsError, init_dummy_weights, iter_safetensors, load_weights
from .weights.quantized import init_dummy_quantized, load_quantized, round_rows

NATIVE: dict[str, type[DecoderForCausalLM]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "GemmaForCausalLM": GemmaForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "GPTNeoXForCausalLM": GPTNeoXForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "OlmoeForCausalLM": OlmoeForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
}
VISION: dict[str, type[DecoderForCausalLM]] = {
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "Idefics3ForConditionalGeneration": VisionLanguageForCausalLM,
    "InternVLForConditionalGeneration": VisionLanguageForCausalLM,
    "LlavaForConditionalGeneration": VisionLanguageForCausalLM,
    "LlavaOnevisionForConditionalGeneration": VisionLanguageForCausalLM,
    "Mistral3ForConditionalGeneration": VisionLanguageForCausalLM,
    "Qwen2_5_VLForConditionalGeneration": VisionLanguageForCausalLM,
    "Qwen3VLForConditionalGeneration": VisionLanguageForCausalLM,
    "SmolVLMForConditionalGeneration": VisionLanguageForCausalLM,
}
"""Vision-language models: their towers are transformers', and their language models are native."""
VISION_BY_CLASS = frozenset({"aya_vision", "internvl", "llava", "mistral3"})
"""Model types with a class that places images behind the embedding and runs the language model unchanged."""
SERVED = f"{', '.join(VISION)}, over {', '.join(TEXT_MODELS)}"
NATIVE |= VISION

DEQUANTISED = ("fp8", "mxfp4")
"""Methods of quantisation that transformers dequantises while it loads a model."""


def _quantised_class(architecture: str) -> str:
    """Reason that quantised weights of a class are refused."""
    return (
        f"{architecture} runs by its class in transformers, and quantised weights are not supported there, other than "
        f"{' and '.join(DEQUANTISED)} in the checkpoint: use the unquantised model with quantize=None. Native families read them: "
        f"{', '.join(sorted(NATIVE))}"
    )


def architecture_of(config: PretrainedConfig) -> str:
    """The class name in the config, or else the class of its model type in transformers. With a classification head, it is
    the class that generates, with another head.
    """
    if config.architectures and num_labels_of(config) is None:
        return config.architectures[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)


INDEXED = frozenset({"qwen4_exp", "qwen4_exp_text"})
"""Model types with indexers that are not served: they select blocks of keys, and give masks."""
NOT_GENERATIVE = (
    "ForQuestionAnswering", "ForMaskedLM", "EmbeddingModel",
    "BertModel", "RobertaModel", "EncoderModel", "ForAudioClassification",
)  # fmt: skip
"""Ends of the names of architectures that do not generate."""


def check_supported(config: PretrainedConfig) -> None:
    """Refuse kinds of models that are not served, before their config is read.

    Raises:
        UnsupportedModelError: an encoder-decoder, multimodal, recurrent or pooling model, by its name and kind.
    """
    architecture, kind = architecture_of(config), None
    if config.model_type == "whisper" and not config.is_encoder_decoder:
        kind = "a speech model's decoder without its encoder"
    elif getattr(config, "is_encoder_decoder", False):
        if config.model_type in ENCODER_DECODERS and not architecture.endswith((*NOT_GENERATIVE, *CLASSIFIERS)):
            return
        names = ", ".join(sorted(ENCODER_DECODERS))
        raise UnsupportedModelError(
            f"{architecture} is an encoder-decoder model of a family that is not served; those with generation of {names} are"
        )
    elif _is_multimodal(config) and not _reads_images(config):
        kind = f"a multimodal model over {config.get_text_config().model_type!r}: {MULTIMODAL}; models with images: {SERVED}"
    elif config.model_type in INDEXED:
        kind = "a model with sparse attention: its indexer selects blocks of keys"
    elif is_encoder(config):
        return
    elif num_labels_of(config) is not None and _is_encoder(config):
        kind = "an encoder: bidirectional attention is not supported for this type"
    elif architecture.endswith(NOT_GENERATIVE):
        kind = "not a generative model: it has no language modelling head"
    if kind is not None:
        raise UnsupportedModelError(f"{architecture} is {kind}. Decoder-only language models are served")


def _is_multimodal(config: PretrainedConfig) -> bool:
    return any(getattr(config, part, None) is not None for part in ("vision_config", "vq_config", "audio_config"))


def _reads_images(config: PretrainedConfig) -> bool:
    """Whether a model with images is served: over a native language model, or over one by its class."""
    architecture, text = architecture_of(config), config.get_text_config()
    if architecture in VISION and VISION[architecture].implements(config):
        return True
    return config.model_type in VISION_BY_CLASS and text.model_type in TRANSFORMERS_FAMILIES | FAMILIES


def _is_encoder(config: PretrainedConfig) -> bool:
    """Whether models of this type predict masked tokens, and are not set up as decoders."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def is_native(config: PretrainedConfig, impl: str) -> bool:
    """Whether a native class runs the model; else transformers' class does.

    Raises:
        UnsupportedModelError: `impl` is "native", and the architecture has no native implementation.
    """
    if is_encoder(config) and impl != "native":
        return False
    architecture, text_type = architecture_of(config), (getattr(config, "text_config", None) or config).model_type
    if impl == "native" and architecture not in NATIVE:
        raise UnsupportedModelError(
            f"{architecture} has no native implementation: impl='transformers' runs it by its class in transformers; native "
            f"families: {', '.join(sorted(NATIVE))}"
        )
    if impl == "transformers" and architecture in VISION and VISION[architecture].implements(config):
        raise UnsupportedModelError(f"{architecture} has a native language model: impl='transformers' is refused")
    if impl == "transformers" or architecture not in NATIVE or getattr(config, "use_bidirectional_attention", False):
        return False
    cls = NATIVE[architecture]
    stored = method_of(config)
    if not cls.implements(config) or (stored in METHODS and stored not in cls.quantised_methods):
        if impl == "native":
            raise UnsupportedModelError(f"{architecture} has no native implementation for this config: use impl='auto'")
        return False
    return text_type in FAMILIES or impl == "native"


def spec_of(config: PretrainedConfig, impl: str, dtype: torch.dtype) -> ModelSpec:
    """Spec according to the config. The `spec` of a loaded model may have more.

    Raises:
        UnsupportedModelError: see `is_native`.
    """
    if getattr(config, "is_encoder_decoder", False):
        is_native(config, impl)  # which refuses impl="native"
        return decoder_spec(config, dtype)
    return ModelSpec.of(config, dtype) if is_native(config, impl) else config_spec(config, dtype)


@torch.no_grad()
def load_model(
    config: PretrainedConfig,
    impl: str,
    spec: ModelSpec,
    device: str,
    max_positions: int,
    folder: Path | None,
    seed: int,
    quantize: str | None = None,
) -> CausalLM:
    """The model with its weights.

    Args:
        spec: `spec_of` the config.
        max_positions: positions of the longest sequence to serve.
        folder: folder of safetensors; None: random weights.
        seed: seed of random weights.
        quantize: format in which unquantised linear weights are stored; None: unchanged.

    Raises:
        UnsupportedModelError: see `is_native`, or transformers' class cannot be served.
        WeightsError: weights that are missing, unexpected, misshapen or unreadable.
    """
    stored = QuantizationFormat.of(config)
    if not is_native(config, impl):
        if quantize is not None or (stored is not None and stored.method not in DEQUANTISED):
            raise WeightsError(_quantised_class(architecture_of(config)))
        if stored is not None:
            config = copy.deepcopy(config)
            config.quantization_config = {**stored.settings, "dequantize": True}
        from .transformers.transformers_model import load_transformers_model  # which imports transformers' models

        if has_images(config):
            from .vision.by_class import VisionByClass

            return load_transformers_model(config, spec, device, folder, seed, VisionByClass)
        if spec.source is None:
            return load_transformers_model(config, spec, device, folder, seed)
        from .transformers.encoder_decoder.model import EncoderDecoderModel

        return load_transformers_model(config, spec, device, folder, seed, EncoderDecoderModel)
    cls = NATIVE[architecture_of(config)]
    if quantize is not None and not cls.quantises:
        raise WeightsError(
            f"quantize={quantize!r}: {architecture_of(config)} has experts or states, and is not quantised"
        )
    if stored is None and quantize is None:
        model = cls(config, spec, device, max_positions)
        take_huge_pages(model)
        if folder is None:
            init_dummy_weights(model, seed)
        else:
            load_weights(model, model.parameters_of(named_tensors(model, iter_safetensors(folder))))
        return model
    with unallocated_weights():
        model = cls(config, spec, device, max_positions)
    if folder is None:
        init_dummy_quantized(model, stored, device, seed)
        init_dummy_weights(model, seed)
    else:
        load_quantized(
            model, model.parameters_of(named_tensors(model, iter_safetensors(folder))), stored, quantize, device
        )
    if quantize == "fp8-w8a8":
        round_rows(model)
    return model


def named_tensors(
    model: DecoderForCausalLM, weights: Iterable[tuple[str, torch.Tensor]], whole: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by the names of the class that generates. Classifiers name the head otherwise; decoders without a head have
    neither it nor the decoder's prefix. With `whole` they get a head of zeros.
    """
    decoder: torch.nn.Module = getattr(model, model.decoder_name)
    own = set[str]()
    if lacks_head(model.config):
        own = {name for name, _ in decoder.named_children()}
        if whole:
            yield "lm_head.weight", torch.zeros_like(model.lm_head.weight, device="cpu")
    for name, tensor in weights:
        if model.spec.num_labels is not None and name.startswith("score."):
            name = f"lm_head.{name.removeprefix('score.')}"
        elif model.tower is None and name.partition(".")[0] in own:
            name = f"{model.decoder_name}.{name}"
        yield name, tensor


def described(config: PretrainedConfig, impl: str = "auto") -> str:
    """Description of how a model with this config runs, and the reason.

    Raises:
        UnsupportedModelError, WeightsError: an unsupported model. Some are refused by their first pass only, when they are
            loaded.
    """
    check_supported(config)
    architecture, model_type = architecture_of(config), config.get_text_config().model_type
    stored = QuantizationFormat.of(config)
    if is_native(config, impl):
        weights = "" if stored is None else f"; {stored}"
        return f"native: {architecture} has a native implementation, with fused kernels and CUDA graphs{weights}"
    if stored is not None and stored.method not in DEQUANTISED:
        raise WeightsError(_quantised_class(architecture))
    from .transformers.transformers_model import check_has_class

    check_has_class(config)
    sites = (
        "sites by its row in core/families.py"
        if model_type in TRANSFORMERS_FAMILIES
        else "sites of the residual stream only"
    )
    weights = "" if stored is None else f"its {stored.method} weights are dequantised at load; "
    why = "as asked for" if architecture in NATIVE else f"there is no native {architecture}"
    return (
        f"transformers: {why}; its own class runs over the KV pool, with {sites}; {weights}"
        "loading it shows whether its attention can be served, and decode passes captured in CUDA graphs"
    )
