"""What the server of forks imports once, for all engines of a test run. An engine core forks its ranks, as vLLM does on GPUs."""

from __future__ import annotations

import multiprocessing

import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor as executor
import vllm.v1.worker.cpu_worker
from vllm.model_executor.models import gemma2, llama, mixtral, qwen3  # noqa: F401

import pymllm_interp.vllm_engine.worker.worker  # noqa: F401

executor.get_mp_context = lambda: multiprocessing.get_context("fork")
