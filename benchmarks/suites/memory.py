"""What requests leave behind: the suite "memory".

Rounds of requests of all kinds run on one engine; some are cancelled or fail. After each round, the memory of process and device
and the number of Python objects are recorded.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pymllm_interp import LM
from pymllm_interp.bench.common import Prompts, greedy, random_prompts
from pymllm_interp.bench.suites import BenchSettings, Model, facts
from pymllm_interp.hooks.interventions.specs import Steer

REQUESTS, ROUND = 10_000, 1_000
KINDS = ("plain", "steered, a vector each", "captured", "cancelled", "traced")
PROMPT_TOKENS, NEW_TOKENS = 16, 8
STATM = Path("/proc/self/statm")
"""Linux: page counts of the process."""


def memory_suite(model: Model) -> Iterator[dict[str, Any]]:
    """Memory after each round of requests. Yields the growing record."""
    settings = model.settings
    requests, size = (REQUESTS, ROUND) if settings.repeats > 1 else (40, 20)
    with model.load() as lm:
        found: dict[str, Any] = facts(lm) | {"kinds": KINDS, "rows": []}
        for done in range(size, requests + 1, size):
            for part in range(0, size, len(KINDS) * max(settings.batches)):
                run_requests(lm, min(max(settings.batches), (size - part) // len(KINDS)), settings)
            stats = lm.engine.stats()
            found["rows"].append({"requests": done, **held_memory(), "free_kv_tokens": stats["free_kv_tokens"]})
            found["execution"] = stats["execution"]
            yield found


def run_requests(lm: LM, count: int, settings: BenchSettings) -> None:
    """`count` requests of each kind at once. The last block of the trace fails."""
    prompts = random_prompts(lm, len(KINDS) * count, min(PROMPT_TOKENS, settings.prompt_tokens))
    plain, steered, captured, cancelled, traced = (prompts[kind :: len(KINDS)] for kind in range(len(KINDS)))
    new_tokens, middle = min(NEW_TOKENS, settings.new_tokens), lm.num_layers // 2
    params = greedy(new_tokens)
    vectors = torch.randn(count, lm.hidden_size)
    handles = [
        *(lm.submit(prompt, params) for prompt in plain),
        *(
            lm.submit(prompt, params, interventions=[Steer(f"resid_post.{middle}", vector, scale=1e-3)])
            for prompt, vector in zip(steered, vectors, strict=True)
        ),
        *(lm.submit(prompt, params, capture=["resid_post.*"]) for prompt in captured),
    ]
    for handle in [lm.submit(prompt, params) for prompt in cancelled]:
        handle.cancel()
        handle.wait()
    with contextlib.suppress(ZeroDivisionError):
        _trace(lm, traced, new_tokens, middle)
    for handle in handles:
        assert len(handle.result().token_ids) == new_tokens


def _trace(lm: LM, prompts: Prompts, new_tokens: int, layer: int) -> None:
    with lm.generate(max_new_tokens=new_tokens, ignore_eos=True) as tracer:
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
                for _ in tracer.iter[:]:
                    kept.append(lm.model.layers[layer].output[0, -1])
                    lm.model.layers[layer].output[0, -1] += 1e-3
                if number == len(prompts) - 1:
                    raise ZeroDivisionError


def held_memory() -> dict[str, float]:
    """Memory of process and device in MB, and the number of Python objects."""
    for _ in range(2):  # what the first one finalises is freed by the second
        gc.collect()
    found: dict[str, float] = {"objects": len(gc.get_objects())}
    if STATM.is_file():
        found["resident_mb"] = int(STATM.read_text().split()[1]) * mmap.PAGESIZE / 1e6
    if torch.cuda.is_available():
        found |= {"device_mb": torch.cuda.memory_allocated() / 1e6, "reserved_mb": torch.cuda.memory_reserved() / 1e6}
    return found
