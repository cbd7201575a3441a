"""Pairs of engines over the same tiny random weights: one under pressure, and one that serves a request at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from family_configs import tiny_config
from helpers_graphs import use_eager_graphs
from registry_configs import registry_config
from transformers import PretrainedConfig

from pymllm_interp import LM
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.runner.stages.declared_stage import DeclaredStage

RECURRENT = ("qwen3_next", "jamba", "lfm2")
"""Families with recurrent states."""
FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "mistral", "gpt_oss", "olmo2", "deepseek_v3", *RECURRENT)
"""From OLMo 2 on by transformers' classes."""
PRESSURE: dict[str, Any] = {
    "kv_cache_tokens": 72, "page_size": 4, "max_num_tokens": 24, "max_running_requests": 8, "trace_step_timeout": None,
}  # fmt: skip
SOLO: dict[str, Any] = {
    "kv_cache_tokens": 2048, "enable_prefix_caching": False, "async_scheduling": False, "trace_step_timeout": None,
    "lower_traces": "off",
}  # fmt: skip
"""Its blocks run in the passes, which is what lowered ones are compared with."""


@dataclass(frozen=True)
class Way:
    """How an engine runs its steps and hooks."""

    options: dict[str, Any] = field(default_factory=dict)
    tables: bool = False
    """Interventions and captures run by device tables and kernels, as on CUDA, in place of functions."""
    graphs: bool = False
    """Decode passes are captured, as on CUDA; off CUDA, functions stand for graphs."""


INNER = ("q", "k", "v", "z", "mlp_act")
WAYS = {
    "fused": Way(),
    "ahead": Way({"async_scheduling": True}),
    "split": Way({"hook_execution": "split", "async_scheduling": True, "queue_order": "lpm"}),
    "eager": Way({"hook_execution": "eager", "prefill_policy": "prefill_first"}),
    "segments": Way({"hook_execution": "segments", "async_scheduling": True}, graphs=True),
    "tables": Way({"async_scheduling": True, "inner_sites": INNER}, tables=True),
    "replays": Way({"hook_execution": "segments", "inner_sites": INNER}, tables=True, graphs=True),
}


def config_of(family: str) -> PretrainedConfig:
    if family in RECURRENT:
        return registry_config(family)
    config = CONFIGS[family]() if family in CONFIGS else tiny_config(family)
    config.initializer_range = 0.2  # logits that are far apart
    return config


def folder_of(family: str, parent: Path) -> Path:
    """The family's weights and a tokenizer of words "w0" to "w94"."""
    folder = parent / family
    if not folder.exists():
        random_model(config_of(family)).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def engines(folder: Path, way: Way, exact: dict[str, Any] | None = None) -> Iterator[tuple[LM, LM]]:
    """(an LM under pressure that runs in `way`, an LM for single requests).

    Args:
        exact: settings of both, for equal bits: then both have device tables, if one has; None: results differ by roundings.
    """
    given = {"dtype": "float32", "device": "cpu"} | (exact or {})
    pressure = PRESSURE | given.pop("pressure", {})
    with pytest.MonkeyPatch.context() as built:
        built.setattr(DeclaredStage, "has_tables", way.tables and exact is not None)
        solo = LM(folder, **given, **SOLO | ({"inner_sites": INNER} if way.tables and exact is not None else {}))
    with solo, pytest.MonkeyPatch.context() as patch:
        if way.graphs and not torch.cuda.is_available():
            use_eager_graphs(patch)
        with pytest.MonkeyPatch.context() as built:
            built.setattr(DeclaredStage, "has_tables", way.tables)
            pressed = LM(folder, **with_tuning(**given, **pressure, **way.options))
        with pressed:
            yield pressed, solo


def weights_of(lm: LM) -> list[torch.Tensor]:
    """The weights that an edit may change: matrices, and the persistent buffers of routers."""
    module: Any = lm._module
    buffers = [buffer for name, buffer in module.named_buffers() if name.endswith("correction_bias")]
    return buffers + [weight for weight in module.parameters() if weight.dim() > 1]
