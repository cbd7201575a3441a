"""Whether torch-memory-saver pauses a whole engine, with its graphs, and gives the same tokens afterwards, as JSON.

pip install torch-memory-saver==0.0.10
python benchmarks/memory_saver.py            # the 8B shape, on a GPU

It starts itself again with the library preloaded: only so can graphs be paused. All memory that the engine's thread takes is then
mapped anew at its old address, with its bytes from host memory, and no graph is captured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.engine.callbacks import EngineThread

PRELOADED = "PYMLLM_INTERP_MEMORY_SAVER"
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def again() -> None:
    """Start this script with the library preloaded."""
    from torch_memory_saver import configure_subprocess

    with configure_subprocess():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, PRELOADED: "1"})


def used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 2)


def timed(function: Any) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return round(time.perf_counter() - started, 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    if PRELOADED not in os.environ:
        again()
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver._ensure_initialized()
    saver: Any = torch_memory_saver._impl
    run = EngineThread.run

    def within(self: EngineThread) -> None:
        # not `region`, whose pool a capture may not be in
        with saver._with_region_config(tag="engine", enable_cpu_backup=True, cpu_backup_backend=None):
            run(self)

    EngineThread.run = within  # type: ignore[method-assign]
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=args.layers, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    lm = LM(hf_config=config, load_format="dummy", device="cuda", dtype=torch.bfloat16, kv_cache_tokens=65536)
    prompts = [[1, 2, 3], list(range(5, 300)), [7] * 40]
    tokens = [out.token_ids for out in lm.generate(prompts, PARAMS)]
    found: dict[str, Any] = {"awake_gb": used_gb(), "pause_s": [], "asleep_gb": [], "resume_s": [], "equal": []}
    for _ in range(3):
        found["pause_s"].append(lm.engine.call(lambda: timed(torch_memory_saver.pause)))
        found["asleep_gb"].append(used_gb())
        found["resume_s"].append(lm.engine.call(lambda: timed(torch_memory_saver.resume)))
        lm.reset_prefix_cache()
        found["equal"].append([out.token_ids for out in lm.generate(prompts, PARAMS)] == tokens)
    found["steps"] = lm.engine.stats()["execution"]  # replays: the graphs are those from before
    lm.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
