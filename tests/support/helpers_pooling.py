"""Classifiers of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch
from conftest import CONFIGS
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel


def classifier(family: str, labels: int, tokens: bool = False, **settings: Any) -> PreTrainedModel:
    """transformers' classifier with random weights, float32."""
    config = CONFIGS[family]()
    config.num_labels, config.pad_token_id = labels, None
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    cls = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    model = cls.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0 if name.endswith("bias") or "gemma" in family else 1, 0.1)
            elif name == "score.weight":
                parameter.normal_(0, 0.3)
    return model
