"""Corpora for harvests."""

from __future__ import annotations

import random
from typing import Any

from conftest import VOCAB

ALONE: dict[str, Any] = {"max_running_requests": 1, "max_num_tokens": 16}
"""One document in a step, so that its bits do not depend on when it came."""


def corpus(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB - 2) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
