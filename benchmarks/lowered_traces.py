"""Milliseconds a decode step of requests with blocks: lowered, in the forward passes, and without blocks. All in one run.

    python benchmarks/lowered_traces.py --out benchmarks/results/NAME.json

The model has random weights in the shape of Llama 3 8B; --tiny is a small one, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams, __version__

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    size = (
        {"kv_cache_tokens": 65536, "capture_ring_bytes": 1 << 30}
        if torch.cuda.is_available()
        else {"kv_cache_tokens": 8192}
    )
    lm = LM(
        "dummy",
        load_format="dummy",
        hf_config=LlamaConfig(**(TINY if args.tiny else LARGE)),
        max_running_requests=256,
        **size,
    )
    noise = torch.Generator().manual_seed(0)
    width = lm.hidden_size
    vectors = [0.01 * torch.randn(width, generator=noise).to(lm.device, lm.dtype) for _ in range(max(args.batches))]
    rows: list[dict[str, Any]] = []
    for count in args.batches:
        base = step_ms(plain, lm, count, vectors, args.steps, args.repeats)
        rows.append({"batch": count, "what": "plain", **base})
        for what, run in BLOCKS.items():
            for mode in ("auto", "off"):
                lm.backend.lowered.mode = mode  # pyright: ignore[reportAttributeAccessIssue]
                steps = args.steps if mode == "auto" else min(args.steps, 16)
                found = step_ms(run, lm, count, vectors, steps, args.repeats if mode == "auto" else 1)
                rows.append({"batch": count, "what": what, "mode": mode, **found, "ratio": found["ms"] / base["ms"]})
        lm.backend.lowered.mode = "auto"  # pyright: ignore[reportAttributeAccessIssue]
        again = step_ms(plain, lm, count, vectors, args.steps, args.repeats)
        rows.append({"batch": count, "what": "plain, again", **again, "ratio": again["ms"] / base["ms"]})
        for row in rows:
            if row["batch"] == count:
                ratio = f"x {row['ratio']:.3f}" if "ratio" in row else ""
                what = f"{row['what']:20} {row.get('mode', ''):5} lowered={row['lowered']!s:5}"
                print(f"bs {count:4} {what} {row['ms']:8.3f} ms {ratio}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {
        "suite": "lowered traces", "device": device, "torch": torch.__version__, "pymllm_interp": __version__,
        "argv": [part for part in sys.argv[1:] if part != str(args.out)], "rows": rows,
    }  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    lm.shutdown()


if __name__ == "__main__":
    main()
