"""Decode steps with ops by SAEs that passes encode: do they cost the same for one request and for all?

    python benchmarks/sae_ops.py --out benchmarks/results/gpu-sae-ops.json

Milliseconds a decode step, the difference of a long and a short generation, of a batch in which some requests have the op:

- plain: an engine without SAEs. `steered`: the same, with a `Steer` in the first request.
- setfeature, transcoder, reconstruct: an engine that encodes one SAE, with the op in 1, a quarter and all of the requests.
- idle: that engine, with a `Steer` in the first request: the encoding that nobody asked for.

The model has random weights in the shape of Llama 3 8B, the SAE has 32,768 features in bfloat16. --tiny is a small one, for a CPU,
where steps have no kernels and times are CPU seconds: it only shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from by_turns import LARGE, TINY
from transformers import LlamaConfig

from pymllm_interp import LM, SAE, SamplingParams, Steer
from pymllm_interp.bench import describe_machine
from pymllm_interp.interventions import Reconstruct, SetFeature

SITE, READ, WRITTEN = "resid_post.16", "mlp_in.16", "mlp_out.16"
SHORT = 8


def sae_of(kind: str, width: int, features: int, dtype: torch.dtype) -> SAE:
    """A random one: a top-k autoencoder, a JumpReLU transcoder, or a JumpReLU autoencoder."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {
        "W_enc": torch.randn(width, features, generator=generator) / width**0.5,
        "W_dec": torch.randn(features, width, generator=generator) / features**0.5,
        "b_enc": torch.zeros(features), "b_dec": torch.zeros(width),
    }  # fmt: skip
    if kind == "setfeature":
        tensors |= {"architecture": "topk", "k": min(64, features // 2), "site": SITE}
    else:
        tensors |= {"architecture": "jumprelu", "threshold": torch.ones(features), "site": SITE}
    if kind == "transcoder":
        tensors |= {"transcoder": True, "site": READ, "site_out": WRITTEN, "subtract_b_dec": False}
    return SAE(**tensors).to(dtype=dtype)


def milliseconds(lm: LM, ops: list[Any], batch: int, steps: int, rounds: int) -> float:
    """Milliseconds a decode step of `batch` requests; `ops` has an entry for each."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    prompts = [[(7 * i + j) % 400 + 1 for j in range(32)] for i in range(batch)]

    def seconds(tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        begin = clock()
        lm.generate(prompts, params, interventions=ops)
        return clock() - begin

    seconds(SHORT)
    return statistics.median((seconds(SHORT + steps) - seconds(SHORT)) / steps * 1e3 for _ in range(rounds))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The times of all engines, by case and number of requests with the op."""
    shape = TINY if args.tiny else LARGE
    dtype = torch.float32 if args.tiny else torch.bfloat16
    config, features = LlamaConfig(**shape, dtype=dtype), 128 if args.tiny else 32768
    batch, found = args.batch, dict[str, Any]()
    steer = [[Steer(SITE, torch.ones(config.hidden_size))]] + [None] * (batch - 1)
    common: dict[str, Any] = {
        "hf_config": config, "load_format": "dummy", "dtype": dtype, "kv_cache_tokens": batch * 512, "max_running_requests": batch,
    }  # fmt: skip
    for kind in ("plain", "setfeature", "transcoder", "reconstruct"):
        if kind == "plain":
            with LM(**common) as lm:
                found[kind] = {
                    "plain": milliseconds(lm, [None] * batch, batch, args.steps, args.rounds),
                    "steered": milliseconds(lm, steer, batch, args.steps, args.rounds),
                }
            continue
        sae = sae_of(kind, config.hidden_size, features, dtype)
        named = ("sae",) if kind == "reconstruct" else ()
        with LM(**common, saes={"sae": sae}, reconstruct=named) as lm:
            op: Any = Reconstruct("sae") if named else SetFeature("sae", {0: 1.0, 1: 2.0}, "add")
            found[kind] = {"idle": milliseconds(lm, steer, batch, args.steps, args.rounds)}
            for some in sorted({1, max(1, batch // 4), batch}):
                ops = [[op]] * some + [None] * (batch - some)
                found[kind][str(some)] = milliseconds(lm, ops, batch, args.steps, args.rounds)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {"machine": describe_machine(), "batch": args.batch, "milliseconds": measure(args)}
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
