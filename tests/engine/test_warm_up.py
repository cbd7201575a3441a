"""Steps before the first request: they leave nothing behind, and later steps compile nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.engine.warm_up import warm_up

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"kv_cache_tokens": 32}, {"max_num_tokens": 9}, {"max_running_requests": 1}, {"prefill_graph_tokens": 0}],
)
def test_a_warm_engine_is_as_it_was_before(model_folder: Callable[[str], Path], sizes: dict[str, Any]) -> None:
    with LM(
        model_folder("llama"), **with_tuning(device="cpu", dtype="float32", **{"kv_cache_tokens": 256, **sizes})
    ) as lm:
        before, seen = lm.engine.stats(), []
        execute = lm.runner.execute_model
        lm.runner.execute_model = lambda step: seen.append(step) or execute(step)
        lm.engine.call(lambda: warm_up(lm.runner))
        del lm.runner.execute_model
        assert bool(seen) == (sizes.get("max_running_requests") != 1), "one request at a time needs no more kernels"
        assert lm.engine.stats() == before
        lm.engine.call(lm.engine.scheduler.check_integrity)
        warm = [out.token_ids for out in lm.generate([[1, 2, 3, 4], [5, 6]], GREEDY)]
    with LM(model_folder("llama"), device="cpu", dtype="float32", kv_cache_tokens=256) as fresh:
        assert warm == [out.token_ids for out in fresh.generate([[1, 2, 3, 4], [5, 6]], GREEDY)]


COMPILED_LATER = """
import random, sys
import triton
from pymllm_interp import LM, SamplingParams, Steer

lm = LM(sys.argv[1], load_format="dummy", device="cuda", dtype="bfloat16", prefill_graph_tokens=64, kv_cache_tokens=8192)
compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **found: compiled.append(str(found["repr"]))
rng = random.Random(0)
vector = [rng.gauss(0, 1) for _ in range(lm.hf_config.hidden_size)]
for count in (1, 2, 5, 16, 33, 64, 150):
    prompts = [[rng.randrange(99) for _ in range(rng.choice([1, 3, 16, 40, 90]))] for _ in range(count)]
    lm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    lm.generate(prompts, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=3, logprobs=2, ignore_eos=True))
    hooked = {"interventions": [Steer("resid_post.0", vector)], "capture": ["resid_post.1"]}
    lm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), **hooked)
print("COMPILED", sorted(set(compiled)))
lm.shutdown()
"""


@pytest.mark.gpu
def test_requests_compile_no_kernel(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=70_000, max_position_embeddings=1024,
    ).save_pretrained(tmp_path)  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", COMPILED_LATER, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert "COMPILED []" in found.stdout, found.stdout[-3000:] + found.stderr[-3000:]
