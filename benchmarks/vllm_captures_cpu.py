"""Where the time of captured steps goes on the host, when vLLM is the engine: by stage, at an 8B model's sizes, without vLLM.

    PYTHONPATH=. python benchmarks/vllm_captures_cpu.py --requests 256 --out FILE

A process has rank 0's stage, with device tables and the ring, as on CUDA, and its egress. Between the begin and the end of a step
nothing runs. The copy from the device ring to the host ring is one in memory ("step: send"). This process is the client. Each round
is a prefill, `--new` decode steps and the results of all requests. Blocks of results are fresh in the first round, and reused
after it. See `utils.stage_times` for what is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


def rank(args: argparse.Namespace, key: bytes, pipe: Any) -> None:
    """Rank 0: says where its egress is, and runs a round for each number that it reads."""
    os.environ["PYMLLM_INTERP_VLLM_TABLES"] = "1"
    from transformers import LlamaConfig

    from pymllm_interp import Capture
    from pymllm_interp.config import ServerConfig
    from pymllm_interp.core.model_spec import ModelSpec
    from pymllm_interp.core.step import RequestHooks
    from pymllm_interp.hooks.bound_hooks import BoundHooks
    from pymllm_interp.hooks.declared import Declared
    from pymllm_interp.hooks.interventions.vector_pool import VectorPool
    from pymllm_interp.utils.stage_times import TIMES
    from pymllm_interp.vllm_engine.settings import limits_of
    from pymllm_interp.vllm_engine.worker.egress.egress import Egress
    from pymllm_interp.vllm_engine.worker.split_rows import SplitRows
    from pymllm_interp.vllm_engine.worker.stage import RankStage

    config = ServerConfig(capture_ring_bytes=args.ring, max_capture_bytes=1 << 32, capture_kept_bytes=1 << 34)
    llama = LlamaConfig(hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=32, vocab_size=50)
    spec, count = ModelSpec.of(llama, torch.bfloat16), args.requests
    stage = RankStage(config, spec, torch.device("cpu"), count * args.prompt, count, 0, SplitRows(spec), None)  # pyright: ignore
    egress = Egress(key, stage.finish, stage.rows, stage.arena)
    pool, limits = VectorPool(16, args.width), limits_of(config, "cpu")
    ring = stage.stage.capture_ring
    assert ring is not None
    ring.open()
    ring.memory.view(torch.int16).fill_(7)
    gc.freeze()  # as vLLM does
    pipe.send(egress.address)
    while (turn := pipe.recv()) is not None:
        TIMES.taken()
        names = [f"{turn} {i}" for i in range(count)]
        captures = [Capture("resid_post.*")]
        start, own = time.perf_counter(), time.thread_time()
        for name in names:
            hooks = RequestHooks([], captures, args.new + 1, args.prompt - 1)
            hooks.vector_rows = pool.acquire(Declared(BoundHooks.of_request(hooks, args.prompt, spec, limits, None)))
            stage.add(name, name, hooks, args.prompt)
        starts = np.arange(count + 1, dtype=np.int32)
        stage.begin(names, starts * args.prompt, np.zeros(count, dtype=np.int32), "cpu")
        stage.end()
        begun = time.perf_counter()
        for step in range(args.new):
            stage.begin(names, starts, np.full(count, args.prompt + step, dtype=np.int32), "cpu")
            time.sleep(args.step_seconds)
            stage.end()
        launched, own = time.perf_counter(), time.thread_time() - own
        pipe.send(None)  # the client asks for the results
        assert pipe.recv() is not None
        for name in names:
            stage.remove(name)
        memory = {"kept": stage.arena.kept, "live": stage.arena.live}
        took = {"prefill": begun - start, "decode": launched - begun, "launching thread": own}
        pipe.send(took | {"memory": memory, "stages": TIMES.taken()})


def rounds(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each round took."""
    from pymllm_interp.core.step import RequestEnd, RequestHooks
    from pymllm_interp.utils.stage_times import TIMES
    from pymllm_interp.vllm_engine.client.results_link import ResultsLink

    context, key = multiprocessing.get_context("spawn"), secrets.token_bytes(32)
    pipe, other = context.Pipe()
    process = context.Process(target=rank, args=(args, key, other), daemon=True)
    process.start()
    link = ResultsLink(tuple(pipe.recv()), key, lambda function, *given: function(*given))
    found, computed = [], args.prompt + args.new
    for turn in range(args.rounds):
        TIMES.taken()
        pipe.send(turn)
        pipe.recv()
        start = time.perf_counter()
        outcomes: list[Any] = []
        arrived = threading.Event()

        def take(outcome: Any, outcomes: list[Any] = outcomes, arrived: threading.Event = arrived) -> None:
            outcomes.append(outcome)
            if len(outcomes) == args.requests:
                arrived.set()

        with link._lock:  # so that they are one message, as on the client's loop
            for i in range(args.requests):
                end = RequestEnd(
                    f"{turn} {i}", [0] * args.prompt, [0] * (args.new + 1), computed, computed, 0, RequestHooks()
                )
                link._asked.append(end)
                link._waiting[end.request_id] = take
        link._send()
        assert arrived.wait(120)
        results = time.perf_counter() - start
        start = time.perf_counter()
        sites = [one.declared.activations.as_arrived(f"resid_post.{args.layers - 1}") for one in outcomes]
        assert all(len(rows) == computed for rows in sites) and float(sites[-1][-1, -1]) != 0
        looked = time.perf_counter() - start
        del sites
        outcomes.clear()
        pipe.send(turn)
        told = pipe.recv()
        found.append(told | {"results": results, "look": looked, "client stages": TIMES.taken()})
        link._send()  # what was freed
    pipe.send(None)
    link.close()
    process.join(20)
    return found


def main() -> None:
    """Run what the options name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=4)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--ring", type=int, default=600 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="how long a pass takes, in which this process is idle"
    )
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    os.environ["PYMLLM_INTERP_STAGES"] = "1"
    found = rounds(args)
    for turn in found:
        stages = {"rank 0": turn.pop("stages"), "client": turn.pop("client stages")}
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in turn.items()}))
        for process, own in stages.items():
            for name, totals in own.items():
                print(f"    {process:7} {name:55}", *(f"{key} {value:<11g}" for key, value in totals.items()))
        turn["stages"] = stages
    if args.out is not None:
        args.out.write_text(json.dumps(vars(args) | {"out": None, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
