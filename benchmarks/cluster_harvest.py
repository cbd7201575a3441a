"""Harvests by one worker on Ray and by several, each on a device of its own: tokens a second, and what coordination costs.

    python benchmarks/cluster_harvest.py [--model FOLDER [--load-format dummy]] [--device cuda] [--workers 1 2] [--out FILE]

Starts a Ray cluster of this process. The time is that between the first records of units and the last ones: without the start of
Ray and of the workers' models. Coordination is the part of one worker's time in which it computes no unit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cluster import save_model

from pymllm_interp import LM
from pymllm_interp.bench import describe_machine
from pymllm_interp.harvest.folder import FORMAT
from pymllm_interp.harvest.on_ray.ray_version import NAMESPACE, load_ray
from pymllm_interp.harvest.on_ray.workers import WorkerPool
from pymllm_interp.harvest.plan import UNITS, make_plan
from pymllm_interp.harvest.run import asked_of
from pymllm_interp.harvest.units import UnitRecord, run_unit, settle


def measure(ray: Any, lm: LM, args: argparse.Namespace, workers: int, folder: Path) -> dict[str, float]:
    """One harvest of `--units` units for each worker."""
    rng, units = random.Random(workers), args.units * workers
    vocab = lm.runner.vocab_size
    corpus = folder / "documents.jsonl"
    with open(corpus, "w") as file:
        for _ in range(units * args.unit_documents):
            file.write(json.dumps({"input_ids": [rng.randrange(vocab) for _ in range(args.length)]}) + "\n")
    asked = asked_of(lm, args.capture, None, shard_bytes=1 << 29, max_length=None, too_long="error", on_error="raise")
    out = folder / "out"
    plan = make_plan(out, asked.identity, asked.description, [corpus], None, args.unit_documents, FORMAT)
    compute = partial(run_unit, captures=asked.captures, interventions=asked.interventions, skip=False)
    pool = WorkerPool(ray, lm._model_maker(), compute, out, plan, float(args.device == "cuda"), workers)
    started = time.perf_counter()
    try:
        pool.run(False)
    finally:
        pool.close()
    settle(out)
    seconds = time.perf_counter() - started
    paths = sorted((out / UNITS).glob("??????.json"), key=lambda path: path.stat().st_mtime_ns)
    times = [path.stat().st_mtime_ns / 1e9 for path in paths]
    first, last = workers - 1, len(paths) - workers  # each worker has made one; each is still at work
    tokens = sum(UnitRecord.read(path).tokens for path in paths[first + 1 : last + 1])
    found = {
        "workers": workers, "units": units, "seconds_in_all": seconds, "unit_seconds": statistics.median(pool.unit_seconds),
        "tokens_per_second": tokens / (times[last] - times[first]),
    }  # fmt: skip
    if workers == 1:
        span = times[-1] - times[0]
        found["coordination"] = (span - sum(pool.unit_seconds[1:])) / span
    return found


def main() -> None:
    """Measure each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, from config.json alone")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kv-cache-tokens", type=int, default=32768, help="of each model: two are on the first device")
    parser.add_argument("--capture", nargs="+", default=["resid_post.2"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--units", type=int, default=6, help="for each worker; at least 4")
    parser.add_argument("--unit-documents", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where states are written, for a while; None: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    record: dict[str, Any] = {
        "suite": "cluster-harvest", "machine": describe_machine(), "gpus": torch.cuda.device_count(), "results": [],
        "arguments": {name: value for name, value in vars(args).items() if name not in ("model", "out", "folder")},
    }  # fmt: skip
    ray = load_ray()
    ray.init(
        num_cpus=max(4, *args.workers), num_gpus=record["gpus"], include_dashboard=False, namespace=NAMESPACE, log_to_driver=True,
        object_store_memory=100 << 20,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = args.model or Path(scratch) / "model"
        if args.model is None:
            save_model(folder)
        options = {"dtype": args.dtype, "load_format": args.load_format, "kv_cache_tokens": args.kv_cache_tokens}
        with LM(str(folder), device=args.device, **options) as lm:
            for _ in range(args.repeats):
                for workers in args.workers:
                    with tempfile.TemporaryDirectory(dir=scratch) as own:
                        record["results"].append(measure(ray, lm, args, workers, Path(own)))
                    print(record["results"][-1], flush=True)
                    if args.out is not None:
                        args.out.write_text(json.dumps(record, indent=1) + "\n")
    ray.shutdown()
    rates = {
        n: statistics.median(one["tokens_per_second"] for one in record["results"] if one["workers"] == n)
        for n in args.workers
    }
    record["compared"] = {
        f"{n} workers / {args.workers[0]}": rate / rates[args.workers[0]] for n, rate in rates.items()
    }
    print(record["compared"], flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
