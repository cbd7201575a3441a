"""Classification heads in the place of language modelling heads, on transformers' classes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ....core.families import has_head_bias, lacks_head
from ....core.model_spec import ModelSpec
from ....core.unsupported import UnsupportedModelError

NEUTRAL = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0}
"""Settings that scale the logits of a language modelling head -> values that leave a classification head's as they are."""


def model_of(config: PretrainedConfig, spec: ModelSpec, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The class that generates, with the head of the spec, without weights."""
    if spec.num_labels is None:
        return auto.from_config(config, dtype=spec.dtype)
    config = copy.deepcopy(config)
    for name in NEUTRAL.keys() & vars(config).keys():
        setattr(config, name, NEUTRAL[name])
    config.tie_word_embeddings = False
    served = AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
    head = torch.nn.Linear(
        config.get_text_config().hidden_size, spec.num_labels, bias=has_head_bias(config), dtype=spec.dtype
    )
    served.set_output_embeddings(head)
    return served


def classifier_class(config: PretrainedConfig) -> Any:
    """transformers' auto class of a config with a classification head, or without a head."""
    if lacks_head(config):
        return AutoModel
    return AutoModelForTokenClassification if has_head_bias(config) else AutoModelForSequenceClassification


def with_head(classifier: Any, config: PretrainedConfig, spec: ModelSpec) -> PreTrainedModel:
    """The class that generates, with decoder and head of a classifier.
    Raises UnsupportedModelError: the classifier has other parts than a decoder and its head `score`."""
    if lacks_head(config):
        with torch.device("meta"):
            served = model_of(config, spec)
        setattr(served, served.base_model_prefix, classifier)
        head = torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False, dtype=spec.dtype)
        torch.nn.init.zeros_(head.weight)
        served.set_output_embeddings(head)
        return served
    parts = {name for name, child in classifier.named_children() if not isinstance(child, torch.nn.Dropout)}
    if parts != {classifier.base_model_prefix, "score"} or not isinstance(classifier.score, torch.nn.Linear):
        raise UnsupportedModelError(f"{type(classifier).__name__} cannot be served: its head is not the module score")
    with torch.device("meta"):
        served = model_of(config, spec)
    setattr(served, served.base_model_prefix, getattr(classifier, classifier.base_model_prefix))
    served.set_output_embeddings(classifier.score)
    return served
