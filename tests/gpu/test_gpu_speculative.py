"""Drafts on CUDA in float32: the texts without them, from draft models and EAGLE heads with graphs of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_declared import vector
from helpers_drafts import Told, checked_steps, drafted_by, drawn, greedy
from helpers_eagle import checkpoint
from helpers_runner import random_ids

from pymllm_interp import LM, Steer

pytestmark = pytest.mark.gpu
PROMPTS = [random_ids(3 + 7 * i, seed=i) for i in range(6)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cuda", "kv_cache_tokens": 4096, "max_running_requests": 8, "capture_ring_bytes": 64 << 20,
}  # fmt: skip


def texts(lm: LM, **given: Any) -> list[list[int]]:
    return [out.token_ids for params in (greedy(), drawn()) for out in lm.generate(PROMPTS, params, **given)]


@pytest.mark.parametrize("method", ["told", "draft_model", "eagle3"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_texts_are_those_without_drafts(
    method: str, graphs: bool, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Greedy and sampled, steered or not; the model's own drafts are all accepted."""
    folder = model_folder("llama")
    steer = [Steer("resid_post.1", vector(CONFIGS["llama"]().hidden_size, 1), scale=3.0)]
    options = {**OPTIONS, "disable_cuda_graph": not graphs}
    told = Told("partly", "right")
    with LM(folder, **options) as lm:
        wanted, steered = texts(lm), texts(lm, interventions=steer)
        told.tell(out for params in (greedy(), drawn()) for out in lm.generate(PROMPTS, params))
    checkpoint(tmp_path)
    speculative = {"told": told, "draft_model": drafted_by(folder), "eagle3": drafted_by(tmp_path, method="eagle3")}[
        method
    ]
    with LM(folder, speculative=speculative, **options) as lm:
        with checked_steps(lm):
            assert texts(lm) == wanted
            counts = lm.engine.stats()["speculation"]
            assert texts(lm, interventions=steer) == steered
        assert counts["drafted"] > 50
        if method == "draft_model":
            assert counts["accepted"] > 0.95 * counts["drafted"]
            assert (lm.runner.drafter.runner.graph_runner is not None) is graphs  # pyright: ignore
        if method == "eagle3":
            stage: Any = lm.runner.drafter.stage  # pyright: ignore
            assert torch.isfinite(stage._aux.states).all() and stage._aux.states[:6].abs().sum() > 0
