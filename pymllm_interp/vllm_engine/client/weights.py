"""`VllmWeights`: the `ModelState` of a model that vLLM has loaded."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from ...models.weights.model_state import ModelState, settings_of


class VllmWeights(ModelState):
    """State of the served weights: a hash of each rank's parameters, and of the config. They do not change.

    Args:
        checksums: checksums of the ranks' weights, in rank order.
    """

    def __init__(self, config: Any, checksums: list[int]) -> None:
        super().__init__(nn.Module(), config)
        text = json.dumps([settings_of(config), checksums], sort_keys=True, default=str)
        self._hash = hashlib.sha256(f"vllm {text}".encode()).hexdigest()

    def fingerprint(self, adapter: str | None = None) -> str:
        """64 hexadecimal digits. They differ for another layout of the same weights, such as the native engine's."""
        namespace = self.namespace(adapter)
        return self._hash if namespace is None else hashlib.sha256(f"{self._hash}|{namespace}".encode()).hexdigest()
