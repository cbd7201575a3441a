"""Prompts with vectors in place of token embeddings, and what transformers makes of them."""

from __future__ import annotations

import random
from typing import Any

import torch
from conftest import VOCAB
from transformers import PreTrainedModel


def vectors_of(model: PreTrainedModel, count: int, seed: int) -> torch.Tensor:
    """Random embeddings of about the size of the model's."""
    table = model.get_input_embeddings().weight.detach()
    return torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed)) * table.std()


def mixed(model: PreTrainedModel, length: int, seed: int, share: float = 0.4) -> tuple[dict[str, Any], torch.Tensor]:
    """A prompt with vectors at some positions, and transformers' `inputs_embeds` [1, tokens, width] of it."""
    chance = random.Random(seed)
    ids = [chance.randrange(VOCAB - 2) for _ in range(length)]
    places = sorted(chance.sample(range(length), max(1, int(share * length))))
    vectors = vectors_of(model, len(places), seed)
    whole = model.get_input_embeddings()(torch.tensor(ids)).detach().clone()
    whole[places] = vectors
    return {"prompt_token_ids": ids, "embeds": dict(zip(places, vectors, strict=True))}, whole[None]


@torch.no_grad()
def generated(model: PreTrainedModel, embeds: torch.Tensor, count: int) -> list[int]:
    """transformers' greedy tokens behind `inputs_embeds`, each by a pass over everything before it."""
    found = list[int]()
    for _ in range(count):
        found.append(int(model(inputs_embeds=embeds, use_cache=False).logits[0, -1].argmax()))
        embeds = torch.cat((embeds, model.get_input_embeddings()(torch.tensor([[found[-1]]]))), 1)
    return found
