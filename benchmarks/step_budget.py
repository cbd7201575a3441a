"""Where the time of a workload goes: each step's time beside the least that its arithmetic and its bytes allow.

    python benchmarks/step_budget.py --config benchmarks/configs/llama8b --workload mix --out benchmarks/results/NAME.json

A step's time is that between the arrivals of its tokens and of the step before. Steps are grouped by what they hold. Of each group
the table has: the limit, the time used, and the time in which the host had launched nothing. `--profile` adds kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from suites.own_engine import OurEngine
from suites.profile import StepProfile
from suites.serving.traffic import run
from suites.serving.workloads import Sizes, Workload, make_workload

from pymllm_interp import LM
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.core.step import SchedulerOutput

LIMITS = {"H200": (790e12, 4.54e12), "H100": (790e12, 3.0e12)}
"""FLOP a second of bfloat16 products, and bytes a second read, as measured on such devices."""


@dataclass
class Step:
    """A step, in seconds since the start."""

    rows: int
    prompt_tokens: int
    kv_tokens: int
    """Positions that its decode rows attend to."""
    launched: float
    idle: bool
    """The device had finished all launched steps."""
    ended: float = 0.0

    @property
    def group(self) -> str:
        if self.prompt_tokens:
            return f"prompts, up to {1 << (self.prompt_tokens - 1).bit_length()} tokens"
        return f"decode, up to {max(8, 1 << (self.rows - 1).bit_length())} rows"


class StepLog:
    """Notes the steps of an engine."""

    def __init__(self, lm: LM) -> None:
        self.steps: list[Step] = []
        self._engine = engine = lm.engine
        self._open: list[Step] = []
        self._launch, self._collect = engine._launch, engine._collect
        engine._launch, engine._collect = self.launch, self.collect

    def launch(self, step: SchedulerOutput) -> Any:
        idle = self._engine._in_flight is None or self._engine._in_flight[1].done
        launched = self._launch(step)
        if launched is not None:
            rows = sum(entry.decodes for entry in step.scheduled)
            kv = sum(entry.start for entry in step.scheduled if entry.decodes)
            prompt_tokens = step.total_num_scheduled_tokens - rows
            self._open.append(Step(rows, prompt_tokens, kv, time.perf_counter(), idle))
        return launched

    def collect(self, step: SchedulerOutput, launched: Any) -> None:
        launched.get_output()
        mine = self._open.pop(0)
        mine.ended = time.perf_counter()
        self.steps.append(mine)
        self._collect(step, launched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="benchmarks/configs/llama8b")
    parser.add_argument("--workload", nargs="+", default=["mix"])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--requests", type=int, help="of the workload at most")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an argument of LM, as JSON"
    )
    parser.add_argument("--profile", action="store_true", help="a second run, with kernels")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = {name: json.loads(value) for name, _, value in (option.partition("=") for option in args.option)}
    options = {"enable_prefix_caching": False, "dtype": "bfloat16", **options}
    record: dict[str, Any] = {"options": options, "workloads": {}}
    with LM(args.config, load_format="dummy", **with_tuning(**options)) as lm:
        log = StepLog(lm)
        record |= {"model": lm.backend.facts.name, "device": lm.backend.facts.device}
        for number, name in enumerate(args.workload):
            sizes = partial(
                Sizes,
                vocab_size=lm.limits.vocab_size,
                longest=min(args.longest, lm.limits.max_model_len),
                scale=args.scale,
            )
            warm = make_workload(name, sizes(run=10 * number)).head(64, 16)
            run(OurEngine(lm), warm)
            workload = make_workload(name, sizes(run=10 * number + 1))
            if args.requests:
                workload = workload.head(args.requests, 1 << 20)
            log.steps.clear()
            started = time.perf_counter()
            _, result = run(OurEngine(lm), workload)
            rows = budget(lm, log.steps, started)
            record["workloads"][name] = {
                "result": result.record(),
                "groups": rows,
                "steps": [asdict(s) for s in log.steps],
            }
            print(
                f"\n{name}: {result.tokens_per_s:,.0f} tokens a second, {result.seconds:.2f} s; between tokens {result.itl_ms}"
            )
            show(rows)
            if args.profile:
                record["workloads"][name]["profile"] = profiled(
                    lm, make_workload(name, sizes(run=10 * number + 2)), args.requests
                )
    if args.out:
        args.out.write_text(json.dumps(record, default=str))


def budget(lm: LM, steps: list[Step], started: float) -> list[dict[str, Any]]:
    """Seconds by group of steps: limit, used, and without work on the device."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    flops, bandwidth = next((limits for kind, limits in LIMITS.items() if kind in name), LIMITS["H100"])
    weights = sum(p.numel() for p in lm.model.parameters() if p.dim() == 2)
    embed = lm.model.embed_tokens.weight.numel()
    weights = (
        weights
        - embed
        + (
            lm.lm_head.weight.numel()
            if lm.lm_head.weight.data_ptr() != lm.model.embed_tokens.weight.data_ptr()
            else embed
        )
    )
    config = lm.config
    heads, head_dim = (
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    kv_bytes = 2 * config.num_hidden_layers * heads * head_dim * 2
    groups: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"steps": 0, "tokens": 0, "limit_s": 0.0, "used_s": 0.0, "idle_s": 0.0}
    )
    before = started
    for step in steps:
        tokens = step.rows + step.prompt_tokens
        products = max(2 * weights * tokens / flops, 2 * weights / bandwidth)
        attention = step.kv_tokens * kv_bytes / bandwidth
        group = groups[step.group]
        group["steps"] += 1
        group["tokens"] += tokens
        group["limit_s"] += products + attention
        idle = max(0.0, step.launched - before) if step.idle else 0.0
        group["idle_s"] += idle
        group["used_s"] += step.ended - before - idle
        before = step.ended
    return [{"group": name, **values} for name, values in sorted(groups.items(), key=lambda item: -item[1]["used_s"])]


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'group':34} {'steps':>6} {'tokens':>8} {'limit s':>8} {'used s':>8} {'idle s':>7} {'ms a step':>9} {'of limit':>8}"
    )
    total = {key: sum(row[key] for row in rows) for key in ("steps", "tokens", "limit_s", "used_s", "idle_s")}
    for row in [*rows, {"group": "all", **total}]:
        each = row["used_s"] / max(1, row["steps"]) * 1e3
        print(
            f"{row['group']:34} {row['steps']:6} {row['tokens']:8} {row['limit_s']:8.3f} {row['used_s']:8.3f} {row['idle_s']:7.3f} "
            f"{each:9.2f} {row['limit_s'] / row['used_s']:8.2f}"
        )


def profiled(lm: LM, workload: Workload, requests: int | None) -> dict[str, Any]:
    """Kernels of a whole run of the workload, microseconds a step."""
    profile = StepProfile(lm)
    lm.engine.call(profile.start)
    run(OurEngine(lm), workload.head(requests, 1 << 20) if requests else workload)
    lm.engine.call(profile.stop)
    found = profile.result()
    print(f"{found['steps']} steps, {found['us']:.0f} us a step, busy {found['busy_us']:.0f} us")
    for kernel in found["kernels"][:16]:
        print(f"  {kernel['us']:9.1f} us {kernel['launches']:7.2f} launches  {kernel['kernel'][:90]}")
    return found


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
