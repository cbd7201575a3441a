"""Limits of an engine and of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .families import lacks_head, num_labels_of

MAX_POSITION = (1 << 30) - 1
"""Largest position that a spec may name: positions are int32 on the device."""
MAX_LISTED = 1 << 20
"""Most positions in one list or mask. Ranges and slices have no such limit."""
MAX_SPECS = 1024
"""Most interventions, and most captures, of one prompt."""
MAX_CALL_SPECS = 16384
"""Interventions and captures of a call, at most. Each counts once for each prompt, with one more for each layer of vectors."""
MAX_NAMED = 1024
"""Most heads, layers or tokens in one list, and most layers of one object of vectors."""
MAX_SITE_LENGTH = 1024
"""Most characters of a site's name or pattern."""
MAX_CALL_TOKEN_IDS = 1 << 22
"""Most token ids in `allowed_token_ids` of a call. Each counts once for each prompt."""
MAX_KNOCKOUTS = 128
"""Most knockouts of a request."""
MAX_KNOCKOUT_RUNS = 1024
"""Most runs of evenly spaced positions in the knockouts of a request."""


@dataclass(frozen=True)
class EngineLimits:
    """Sizes and counts that the engine accepts.

    Attributes:
        max_model_len: tokens of a request, prompt and new ones.
        max_num_tokens: tokens of a step. A longer traced prompt runs in a step without others.
        kv_tokens: slots of the KV pool.
        max_running: requests of a step.
        generates: whether the model has a language modelling head.
        max_source_len: positions of an encoder's input; 0 in a model without an encoder.
    """

    vocab_size: int
    max_model_len: int
    max_num_tokens: int
    kv_tokens: int
    max_running: int
    generates: bool = True
    max_source_len: int = 0


def tasks_of(config: Any) -> tuple[str, ...]:
    """Tasks that a model without an encoder can be asked for, by vLLM's names."""
    pooled = ("embed", "token_embed", "score")
    if num_labels_of(config) is None:
        return ("generate", *pooled)
    return pooled if lacks_head(config) else ("classify", "token_classify", *pooled)
