"""Both devices as test parameters, and the executions of an LM's steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pymllm_interp import LM
from pymllm_interp.client.calls.lm_arguments import with_tuning

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ways(lm: LM) -> Counter[str]:
    """Steps so far, by how they ran."""
    counts: Counter[str] = Counter()
    for (way, _), n in lm.runner.partition.counts.items():
        counts[way] += n
    return counts


def lm_on(device: str, folder: Any, **settings: Any) -> LM:
    """An LM in float32 on a device, whose pools and ring leave memory to others there."""
    ring = {} if device == "cpu" else {"capture_ring_bytes": 128 << 20}
    return LM(
        folder, **with_tuning(**{"dtype": "float32", "device": device, "kv_cache_tokens": 2048, **ring, **settings})
    )
