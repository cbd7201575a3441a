"""Both devices as test parameters, and the executions of an LM's steps."""

from __future__ import annotations

from collections import Counter

import pytest

from pymllm_interp import LM

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ways(lm: LM) -> Counter[str]:
    """Steps so far, by how they ran."""
    counts: Counter[str] = Counter()
    for (way, _), n in lm.runner.partition.counts.items():
        counts[way] += n
    return counts
