"""`VllmModel`: what clients know of a model that vLLM has loaded, in the words of a runner of ours.

`client.request_factory.RequestFactory` checks requests against these values, as it does against a runner's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from ...config import ModelConfig, ServerConfig
from ...core.model_spec import ModelSpec
from ...hooks.saes.registry import SAERegistry
from ...models.weights.model_state import NOT_THE_MODEL
from ...models.weights.source import ModelSource
from .declarations import VllmDeclarations


class VllmWeights:
    """What weights vLLM serves: a hash of each rank's parameters, and of the config. They do not change while it runs.

    Args:
        checksums: of the ranks' weights, in their order.
    """

    version = 0

    def __init__(self, config: Any, checksums: list[int]) -> None:
        settings = {k: v for k, v in config.to_diff_dict().items() if k not in NOT_THE_MODEL and k[0] != "_"}
        text = json.dumps([settings, checksums], sort_keys=True, default=str)
        self._hash = hashlib.sha256(f"vllm {text}".encode()).hexdigest()

    def fingerprint(self, adapter: str | None = None) -> str:
        """64 hexadecimal digits. Another layout of the same weights, such as our own engine's, has another one."""
        return self._hash


@dataclass
class VllmModel:
    """See the module. Names are as in `runner.InterpModelRunner`."""

    source: ModelSource
    model_config: ModelConfig
    server_config: ServerConfig
    model_spec: ModelSpec
    saes: SAERegistry
    declarations: VllmDeclarations
    model_state: VllmWeights
    dtype: torch.dtype
    device: str
    context_len: int
    max_num_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    attn_backend: Any = None

    @property
    def sliding_window_size(self) -> int | None:
        """The widest sliding window of the layers, or None where some layer sees the whole context."""
        windows = [window for window in self.model_spec.sliding_windows if window]
        return max(windows) if len(windows) == self.model_spec.num_hidden_layers else None

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What requests may ask for."""
        return ("generate",)

    @property
    def vocab_size(self) -> int:
        """Token ids end below it."""
        return self.model_spec.vocab_size
