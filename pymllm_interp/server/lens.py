"""The logit lens that the page at `/` shows."""

from __future__ import annotations

from typing import Any

import torch

from .served_model import ServedModel
from .trace_payload import envoy_at


def logit_lens(model: ServedModel, token_ids: list[int], top: int) -> list[list[list[tuple[int, float]]]]:
    """What each layer would say next, through the model's own final norm and head.

    Args:
        top: tokens of each layer and position.

    Returns:
        [layers][positions][top] of (token id, probability).

    Raises:
        ValueError: the prompt cannot be traced, or the model's modules are not known by name.
    """
    family, layers = model.model_spec.family, range(model.model_spec.num_hidden_layers)
    if "final_norm" not in family.points:
        raise ValueError(f"{family.name} models have no table of modules, which a lens needs")
    norm, head = (
        envoy_at(model, f"Envoy:model.{family.points['final_norm'].module}"),
        envoy_at(model, f"Envoy:model.{family.head}"),
    )
    blocks = [envoy_at(model, f"Envoy:model.{family.points['resid_post'].module.format(layer)}") for layer in layers]
    with model.trace(token_ids):
        found = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for block in blocks:
            state: Any = block.output
            h = state if isinstance(state, torch.Tensor) else state[0]
            found.append(torch.softmax(head(norm(h))[0].float(), dim=-1).topk(top))
    return [
        [
            list(zip(ids, probs, strict=True))
            for ids, probs in zip(tops.indices.tolist(), tops.values.tolist(), strict=True)
        ]
        for tops in found
    ]
