"""What an engine can take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    """What the engine can take.

    Attributes:
        max_model_len: tokens of a request, prompt and new ones.
        max_num_tokens: tokens of a step. A longer traced prompt has a step for itself.
        kv_tokens: slots of the KV pool.
        max_running: requests of a step.
    """

    vocab_size: int
    max_model_len: int
    max_num_tokens: int
    kv_tokens: int
    max_running: int
