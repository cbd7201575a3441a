"""What vLLM as the engine of an LM costs on the host: on a rank for each step, and in the client for each request.

    PYTHONPATH=. PYTHON_OF_VLLM_ENVIRONMENT benchmarks/vllm_engine_cpu.py --out FILE

"rank": `RankStage` by itself, with device tables and the ring, as on CUDA, without the kernels. Microseconds of a decode step
with so many requests, and of a request's begin and end. `--turns 2` has that many batches of the requests by turns, as pipeline
ranks have, and the time of a step of one. "client": CPU time of the client's process for each request of a tiny model, beside a
plain vLLM client's. The least of the repeats counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

CASES = ("idle", "one site", "all layers", "captured")
LAYERS, WIDTH = 32, 64
PROMPT, NEW = 64, 32
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": WIDTH, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def prompts_of(count: int) -> list[list[int]]:
    """Random prompts, different for each request."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1000, (count, PROMPT), generator=generator).tolist()


def specs_of(case: str, layers: int) -> tuple[list[Any], list[str]]:
    """Interventions and captured sites of a request."""
    from pymllm_interp import Steer

    unit = torch.nn.functional.normalize(torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)), dim=0)
    if case == "one site":
        return [Steer(f"resid_post.{layers // 2}", unit, 0.1)], []
    if case == "all layers":
        return [Steer("resid_post.*", unit, 0.1)], []
    return [], ["resid_post.*"] if case == "captured" else []


# -- a rank ----------------------------------------------------------------------------------


def rank_part(count: int, steps: int, turns: int) -> dict[str, dict[str, float]]:
    """Microseconds of `RankStage` by case: of a step with `count` requests, and of one request's begin and end."""
    os.environ["PYMLLM_INTERP_VLLM_TABLES"] = "1"
    return {case: _rank(case, count, steps, turns) for case in CASES}


def _rank(case: str, count: int, steps: int, turns: int) -> dict[str, float]:
    from transformers import LlamaConfig

    from pymllm_interp import Capture
    from pymllm_interp.config import ServerConfig
    from pymllm_interp.core.model_spec import ModelSpec
    from pymllm_interp.core.step import RequestEnd, RequestHooks
    from pymllm_interp.hooks.bound_hooks import BoundHooks
    from pymllm_interp.hooks.declared import Declared
    from pymllm_interp.hooks.interventions.vector_pool import VectorPool
    from pymllm_interp.vllm_engine.settings import limits_of
    from pymllm_interp.vllm_engine.worker.split_rows import SplitRows
    from pymllm_interp.vllm_engine.worker.stage import RankStage

    config = ServerConfig(capture_ring_bytes=1 << 28, max_capture_bytes=1 << 30)
    llama = LlamaConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, vocab_size=50)
    spec = ModelSpec.of(llama, torch.float32)
    stage = RankStage(config, spec, torch.device("cpu"), count * PROMPT, count, 0, SplitRows(spec), None)  # pyright: ignore
    pool, (ops, sites) = VectorPool(config.max_intervention_vectors, WIDTH), specs_of(case, LAYERS)
    names = [f"vllm-{i}" for i in range(count)]
    limits = limits_of(config, "cpu")

    captures = [Capture(site) for site in sites]

    def hooks() -> RequestHooks:
        made = RequestHooks(ops, captures, steps + 1, PROMPT - 1)
        made.vector_rows = pool.acquire(Declared(BoundHooks.of_request(made, PROMPT, spec, limits, None)))
        return made

    declared = [hooks() for _ in names] if ops or sites else []
    if sites:
        stage.stage.capture_ring.open()  # pyright: ignore[reportOptionalMemberAccess]
    seconds: dict[str, float] = {}
    start = time.thread_time()
    for name, made in zip(names, declared, strict=False):
        stage.add(name, name, made, PROMPT)
    seconds["add"] = (time.thread_time() - start) / count
    starts = np.arange(count + 1, dtype=np.int32)
    start = time.thread_time()
    stage.begin(names, starts * PROMPT, np.zeros(count, dtype=np.int32), "cpu")
    stage.end()
    seconds["prefill step"] = time.thread_time() - start
    times = []
    share = -(-count // turns)
    for step in range(steps):
        for first in range(0, count, share):
            own = names[first : first + share]
            start = time.thread_time()
            stage.begin(own, starts[: len(own) + 1], np.full(len(own), PROMPT + step, dtype=np.int32), "cpu")
            stage.end()
            times.append(time.thread_time() - start)
    seconds["decode step"] = sorted(times)[len(times) // 2]
    start = time.thread_time()
    computed = PROMPT + steps
    tokens = [0] * PROMPT, [0] * (steps + 1)
    if declared:
        ends = [RequestEnd(name, *tokens, computed, computed, 0, RequestHooks()) for name in names]
        for future in stage.finish(ends):
            future.result(60)
    for name in names:
        stage.remove(name)
    seconds["finish"] = (time.thread_time() - start) / count
    stage.close()
    return {what: round(value * 1e6, 1) for what, value in seconds.items()}


# -- the client ------------------------------------------------------------------------------


def client_part(which: str, folder: str, count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Of one process of a client, by case: microseconds of CPU time and of wall time for each request."""
    return (asyncio.run(_plain(folder, count, repeats))) if which == "plain" else _ours(folder, count, repeats)


def _best(runs: list[tuple[float, float]], count: int) -> dict[str, float]:
    cpu, wall = (min(one) / count * 1e6 for one in zip(*runs, strict=True))
    return {"cpu": round(cpu, 1), "wall": round(wall, 1)}


OPTIONS: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 128, "gpu_memory_utilization": 0.05}


async def _plain(folder: str, count: int, repeats: int) -> dict[str, dict[str, float]]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    arguments = AsyncEngineArgs(
        folder, dtype="float32", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=count, enforce_eager=True,
        disable_log_stats=True, num_gpu_blocks_override=count * 4 + 64, block_size=32, scheduling_policy="priority", **OPTIONS,
    )  # fmt: skip
    llm, prompts, number = AsyncLLM.from_engine_args(arguments), prompts_of(count), 0
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, output_kind=kind)

    async def one(ids: list[int]) -> None:
        nonlocal number
        number += 1
        async for _ in llm.generate({"prompt_token_ids": ids}, params, str(number)):
            pass

    runs = []
    for _ in range(repeats + 1):
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    llm.shutdown()
    return {"plain": _best(runs[1:], count)}


def _ours(folder: str, count: int, repeats: int) -> dict[str, dict[str, float]]:
    from pymllm_interp import LM, SamplingParams

    found, prompts = {}, prompts_of(count)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with LM(
        folder, engine="vllm", dtype="float32", load_format="dummy", max_running_requests=count, disable_cuda_graph=True,
        kv_cache_tokens=count * 128 + 2048, **OPTIONS,
    ) as lm:  # fmt: skip
        for case in CASES:
            ops, sites = specs_of(case, 2)
            own = {"interventions": ops} if ops else {"capture": sites} if sites else {}
            runs = []
            for _ in range(repeats + 1):
                cpu, wall = time.process_time(), time.perf_counter()
                lm.generate(prompts, params, **own)
                runs.append((time.process_time() - cpu, time.perf_counter() - wall))
            found[case] = _best(runs[1:], count)
    return found


def main() -> None:
    """Run what the options name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--part", choices=["rank", "plain", "ours"], default=None)
    parser.add_argument("--folder", default="")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.part == "rank":
        print(json.dumps(rank_part(args.requests, args.steps, args.turns)), flush=True)
        return
    if args.part:
        print(json.dumps(client_part(args.part, args.folder, args.requests, args.repeats)), flush=True)
        return
    found: dict[str, Any] = {"requests": args.requests, "prompt": PROMPT, "new": NEW, "unit": "microseconds"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        for part in ("rank", "plain", "ours"):
            command = [sys.executable, __file__, "--part", part, "--folder", folder, f"--requests={args.requests}"]
            done = subprocess.run(
                [*command, f"--repeats={args.repeats}", f"--steps={args.steps}", f"--turns={args.turns}"],
                capture_output=True, text=True,
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found[part] = json.loads(lines[-1]) if lines else {"error": (done.stdout + done.stderr)[-3000:]}
            print(part, json.dumps(found[part], indent=1), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
