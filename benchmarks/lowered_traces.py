"""What blocks cost: lowered, in the forward passes, and without blocks. All in one run, and a table at its end.

    python benchmarks/lowered_traces.py --out benchmarks/results/NAME.json

- steps: milliseconds a decode step in which every request has a block.
- sweep: seconds of one trace of many invokes that save a layer, against plain generation.
- first: the time to the first token of plain requests, with a tenth of all requests traced in the passes. The requests and their
  arrivals are the same in each run. "modules" runs every step with prompts and a waiting block without graphs.

The model has random weights in the shape of Llama 3 8B; --tiny is a small one, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams, __version__
from pymllm_interp.bench.own_engine import OurEngine
from pymllm_interp.bench.serving.traffic import Percentiles
from pymllm_interp.bench.serving.traffic import run as run_traffic
from pymllm_interp.bench.serving.workloads import DURATION, Sizes, make_workload

LAYERS = (3, 7, 11, 15, 19, 23, 27, 31)
LARGE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY = LARGE | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
PROMPT_TOKENS = 32


def prompts_of(count: int) -> list[list[int]]:
    return [[1 + (7 * i + 3 * j) % 500 for j in range(PROMPT_TOKENS)] for i in range(count)]


def plain(lm: LM, count: int, steps: int, vectors: list[torch.Tensor]) -> Any:
    return lm.generate(prompts_of(count), SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))


def one_layer(lm: LM, count: int, steps: int, vectors: list[torch.Tensor]) -> Any:
    with lm.generate(max_new_tokens=steps, ignore_eos=True) as tracer:
        for prompt in prompts_of(count):
            with tracer.invoke(prompt):
                kept = list().save()
                for _ in tracer.iter[:]:
                    kept.append(lm.model.layers[15].output[0, -1])
    assert len(kept) == steps
    return tracer


def eight_layers(lm: LM, count: int, steps: int, vectors: list[torch.Tensor]) -> Any:
    with lm.generate(max_new_tokens=steps, ignore_eos=True) as tracer:
        for prompt in prompts_of(count):
            with tracer.invoke(prompt):
                kept = list().save()
                for _ in tracer.iter[:]:
                    for layer in LAYERS:
                        kept.append(lm.model.layers[layer].output[0, -1])
    assert len(kept) == steps * len(LAYERS)
    return tracer


def own_vector(lm: LM, count: int, steps: int, vectors: list[torch.Tensor]) -> Any:
    with lm.generate(max_new_tokens=steps, ignore_eos=True) as tracer:
        for i, prompt in enumerate(prompts_of(count)):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    lm.model.layers[15].output[:] += vectors[i]
                out = tracer.result.save()
    assert out.shape == (1, PROMPT_TOKENS + steps)
    return tracer


BLOCKS = {"saves one layer": one_layer, "saves eight layers": eight_layers, "adds its own vector": own_vector}


def step_ms(
    run: Callable[..., Any], lm: LM, count: int, vectors: list[torch.Tensor], steps: int, repeats: int
) -> dict[str, Any]:
    """Milliseconds a decode step: the difference of a long and a short generation, over the steps between them."""
    short, found, tracer = 8, [], None
    for _ in range(repeats + 1):
        times = []
        for length in (short, short + steps):
            began = time.perf_counter()
            tracer = run(lm, count, length, vectors)
            times.append(time.perf_counter() - began)
        found.append((times[1] - times[0]) / steps * 1e3)
    receipts = getattr(tracer, "receipts", [])
    return {
        "ms": statistics.median(found[1:]),
        "runs": found[1:],
        "lowered": bool(receipts) and all(r.lowered for r in receipts),
    }


Row = dict[str, Any]
PARTS = ("steps", "sweep", "first")


def steps_rows(lm: LM, args: argparse.Namespace) -> Iterator[Row]:
    """Decode steps, by batch size."""
    noise = torch.Generator().manual_seed(0)
    size = max(args.batches), lm.hidden_size
    vectors = list(0.01 * torch.randn(size, generator=noise).to(lm.device, lm.dtype))
    for count in args.batches:
        base = step_ms(plain, lm, count, vectors, args.steps, args.repeats)
        yield {"batch": count, "what": "plain", **base}
        for what, run in BLOCKS.items():
            for mode in ("auto", "off"):
                set_mode(lm, mode)
                steps = args.steps if mode == "auto" else min(args.steps, 16)
                found = step_ms(run, lm, count, vectors, steps, args.repeats if mode == "auto" else 1)
                yield {"batch": count, "what": what, "mode": mode, **found, "ratio": found["ms"] / base["ms"]}
        set_mode(lm, "auto")
        again = step_ms(plain, lm, count, vectors, args.steps, args.repeats)
        yield {"batch": count, "what": "plain, again", **again, "ratio": again["ms"] / base["ms"]}


def sweep_rows(lm: LM, args: argparse.Namespace) -> Iterator[Row]:
    """One trace of many invokes that save a layer, in turns with plain generation of the same prompts."""
    prompts, params = prompts_of(args.invokes), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def plain_sweep() -> None:
        lm.generate(prompts, params)

    def traced_sweep() -> None:
        with lm.generate(max_new_tokens=1, ignore_eos=True) as tracer:
            states = list().save()
            for prompt in prompts:
                with tracer.invoke(prompt):
                    states.append(lm.model.layers[15].output[0, -1])
        assert len(states) == args.invokes

    sides: dict[str, tuple[str, Callable[[], None]]] = {
        "plain": ("auto", plain_sweep), "auto": ("auto", traced_sweep), "off": ("off", traced_sweep),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats + 1):
        for name, (mode, run) in sides.items():
            set_mode(lm, mode)
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    set_mode(lm, "auto")
    base = statistics.median(seconds["plain"][1:])
    for name, found in seconds.items():
        middle = statistics.median(found[1:])
        row = {"what": "sweep", "batch": args.invokes, "mode": name, "ms": middle * 1e3, "runs": found[1:]}
        yield row | {"ratio": middle / base}


def first_rows(lm: LM, args: argparse.Namespace) -> Iterator[Row]:
    """Plain requests beside traced ones that arrive at random."""
    executions = lm.runner.executions
    graphs = executions.prompt_segments
    base = None
    for number, how in enumerate(("warm-up", "warm-up", "plain", "traced", "modules", "plain, again")):
        sizes = Sizes(
            vocab_size=lm.limits.vocab_size,
            longest=96 if args.tiny else 1024,
            scale=(min(5, args.seconds) if how == "warm-up" else args.seconds) / DURATION,
            run=number,
        )
        workload = make_workload(f"poisson-{args.rate:g}", sizes)
        chosen = range(1, len(workload.prompts), 10)
        traced = {index: LAYERS[i % len(LAYERS)] for i, index in enumerate(chosen)} if "plain" not in how else {}
        set_mode(lm, "off")
        executions.prompt_segments = None if how == "modules" else graphs
        streams, result = run_traffic(OurEngine(lm, traced=traced), workload)
        executions.prompt_segments = graphs
        set_mode(lm, "auto")
        if how == "warm-up":
            continue
        beside = [stream for stream in streams if stream.index not in chosen]
        found = Percentiles.of(stream.times[0] - stream.due for stream in beside)
        base = base or found
        yield {
            "what": "first token", "batch": len(streams), "mode": how, "ms": found.p50, "ratio": found.p50 / base.p50,
            "ttft_ms": found._asdict(), "itl_ms": result.itl_ms._asdict(), "execution": result.execution,
        }  # fmt: skip


def set_mode(lm: LM, mode: str) -> None:
    """Lower blocks ("auto"), or run them in the passes ("off")."""
    lm.backend.lowered.mode = mode  # pyright: ignore[reportAttributeAccessIssue]


def shown(row: Row) -> str:
    ratio = f"x {row['ratio']:.3f}" if "ratio" in row else ""
    what = f"{row['what']:20} {row.get('mode', ''):12} lowered={row.get('lowered', '')!s:5}"
    p90 = f"  p90 {row['ttft_ms']['p90']:.1f} ms" if "ttft_ms" in row else ""
    return f"{row['batch']:5} {what} {row['ms']:10.3f} ms {ratio}{p90}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--invokes", type=int, default=1024)
    parser.add_argument(
        "--rate", type=float, default=10.0, help="requests a second, of which the first tokens are timed"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals, in each run of these")
    args = parser.parse_args()
    size = (
        {"kv_cache_tokens": 131072, "capture_ring_bytes": 1 << 30}
        if torch.cuda.is_available()
        else {"kv_cache_tokens": 16384}
    )
    config = LlamaConfig(**(TINY if args.tiny else LARGE))
    lm = LM("dummy", load_format="dummy", hf_config=config, max_running_requests=256, **size)
    makers = {"steps": steps_rows, "sweep": sweep_rows, "first": first_rows}
    rows: list[Row] = []
    for part in args.parts:
        for row in makers[part](lm, args):
            rows.append(row)
            print(shown(row), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {
        "suite": "lowered traces", "device": device, "torch": torch.__version__, "pymllm_interp": __version__,
        "argv": [part for part in sys.argv[1:] if part != str(args.out)], "rows": rows,
        "prompt_segments": lm.engine.stats()["prompt_segments"],
    }  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    lm.shutdown()
    print("\n" + "\n".join(map(shown, rows)))


if __name__ == "__main__":
    main()
