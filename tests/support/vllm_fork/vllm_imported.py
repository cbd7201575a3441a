"""What the server of forks imports once, for all engines of a test run. An engine core forks its ranks, as vLLM does on GPUs."""

from __future__ import annotations

import importlib
import multiprocessing

MODULES = (
    "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama", "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.mixtral", "vllm.model_executor.models.gemma2", "pymllm_interp.vllm_engine.worker.worker",
)  # fmt: skip
for name in MODULES:
    importlib.import_module(name)
executor = importlib.import_module("vllm.v1.executor.multiproc_executor")
executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # pyright: ignore[reportAttributeAccessIssue]
