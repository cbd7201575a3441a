"""Drafts on CUDA in float32: the texts without them, from draft models and EAGLE heads with graphs of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB
from helpers_declared import vector
from helpers_drafts import Told, checked_steps, drafted_by, drawn, greedy, replayed
from helpers_eagle import checkpoint
from helpers_runner import random_ids
from transformers import LlamaConfig

from pymllm_interp import LM, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning

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
    method: str, graphs: bool, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, steered or not; the model's own drafts are all accepted."""
    folder = model_folder("llama")
    steer = [Steer("resid_post.1", vector(CONFIGS["llama"]().hidden_size, 1), scale=3.0)]
    options = {**OPTIONS, "disable_cuda_graph": not graphs}
    told = Told("partly", "right")
    with LM(folder, **with_tuning(**options)) as lm:
        wanted, steered = texts(lm), texts(lm, interventions=steer)
        told.tell(out for params in (greedy(), drawn()) for out in lm.generate(PROMPTS, params))
    checkpoint(tmp_path)
    speculative = {"told": told, "draft_model": drafted_by(folder), "eagle3": drafted_by(tmp_path, method="eagle3")}[
        method
    ]
    with LM(folder, **with_tuning(speculative=speculative, **options)) as lm:
        replays = replayed(lm, monkeypatch) if graphs and method != "told" else [1]
        with checked_steps(lm):
            assert texts(lm) == wanted
            counts = lm.engine.stats()["speculation"]
            assert texts(lm, interventions=steer) == steered
        assert counts["drafted"] > 50 and replays
        if method == "draft_model":
            assert counts["accepted"] > 0.95 * counts["drafted"]
            assert (lm.runner.drafter.runner.graph_runner is not None) is graphs  # pyright: ignore
        if method == "eagle3":
            stage: Any = lm.runner.drafter.stage  # pyright: ignore
            assert torch.isfinite(stage.aux.states).all() and stage.aux.states[:6].abs().sum() > 0


@pytest.mark.parametrize("count", [1, 5, 32])
def test_graphs_of_drafts_in_half_precision(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of one seed: model and draft are one. The kernels of half precision run at the lengths that tables say."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    prompts = [random_ids(5 + 9 * i, seed=i) for i in range(count)]
    options = OPTIONS | {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_running_requests": 32,
        "kv_cache_tokens": 16384,
    }
    with LM(tmp_path, **with_tuning(speculative=drafted_by(tmp_path), **options)) as lm:
        replays = replayed(lm, monkeypatch)
        for params in (greedy(), drawn()):
            lm.generate(prompts, params)
        counts = lm.engine.stats()["speculation"]
        assert counts["accepted"] > 0.9 * counts["drafted"] > 10 and replays and max(replays) == count
