"""What batch-invariant mode costs: decode steps, prefills and a mix, by those of the default mode, two engines by turns.

    python benchmarks/batch_invariant_gpu.py --out benchmarks/results/NAME.json
    python benchmarks/batch_invariant_gpu.py --vllm --out FILE    # the same cases of vLLM's batch-invariant mode, by vLLM's Python
    python benchmarks/batch_invariant_gpu.py --tilings            # the products alone: times of all tilings, and whether bits agree

A number is milliseconds: of a decode step the difference of a long and a short generation. A ratio is the median over the rounds.
The models have random weights in the shape of Llama 3 8B; --tiny is a small one, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import product as pairs
from pathlib import Path
from typing import Any, NamedTuple

import torch
from by_turns import LARGE, TINY, machine
from transformers import LlamaConfig

SHORT = 8
WEIGHTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}


def prompts(count: int, size: int, seed: int) -> list[list[int]]:
    return [[1 + (7 * i + 3 * j + 11 * seed) % 500 for j in range(size)] for i in range(count)]


class VLLM(NamedTuple):
    """An engine of vLLM."""

    llm: Any


def of_ours(lm: Any, texts: list[list[int]], tokens: list[int]) -> Callable[[], Any]:
    from pymllm_interp import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in tokens]
    return lambda: lm.generate(texts, params, progress=False)


def of_vllm(engine: VLLM, texts: list[list[int]], tokens: list[int]) -> Callable[[], Any]:
    import vllm  # pyright: ignore[reportMissingImports]

    params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in tokens]
    inputs = [{"prompt_token_ids": text} for text in texts]
    return lambda: engine.llm.generate(inputs, params, use_tqdm=False)


def vllms(args: argparse.Namespace) -> None:
    """The cases of vLLM with VLLM_BATCH_INVARIANT=1."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import vllm  # pyright: ignore[reportMissingImports]

    config = Path(__file__).resolve().parent / "configs" / "llama8b"
    llm = vllm.LLM(
        str(config), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
        max_num_seqs=256, max_model_len=8192,
    )  # fmt: skip
    rows = []
    for case, run in cases(args.steps, args.prompt, args.batches).items():
        times = [run(VLLM(llm)) for _ in range(args.rounds + 1)][1:]
        rows.append({"case": case, "vllm": vllm.__version__, "ms": statistics.median(times), "rounds": times})
        print(f"{case:12} {rows[-1]['ms']:10.3f} ms", flush=True)
        write(args.out, rows)
    os._exit(0)  # its processes take a minute to end


def cases(steps: int, prompt: int, batches: list[int]) -> dict[str, Callable[[Any], float]]:
    """Name -> milliseconds of it in an engine."""
    seed = iter(range(1 << 30))

    def seconds(lm: Any, batch: int, size: int, tokens: int | list[int]) -> float:
        each = [tokens] * batch if isinstance(tokens, int) else tokens
        texts = prompts(batch, size, next(seed))
        run = of_vllm(lm, texts, each) if isinstance(lm, VLLM) else of_ours(lm, texts, each)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def decode(lm: Any, batch: int) -> float:
        return (seconds(lm, batch, 64, SHORT + steps) - seconds(lm, batch, 64, SHORT)) / steps * 1e3

    def mix(lm: Any) -> float:
        most = max(batches)
        return seconds(lm, most, prompt // 4, [8 + 5 * i % steps for i in range(most)]) * 1e3

    found: dict[str, Callable[[Any], float]] = {f"decode {n}": lambda lm, n=n: decode(lm, n) for n in batches}
    found["prefill"] = lambda lm: seconds(lm, 4, prompt, 1) * 1e3
    found["mix"] = mix
    return found


def engines(args: argparse.Namespace) -> None:
    from pymllm_interp import LM

    config = LlamaConfig(**(TINY if args.tiny else LARGE))
    size: dict[str, Any] = {"kv_cache_tokens": 16384, "dtype": "float32"}
    if torch.cuda.is_available():
        size = {"kv_cache_tokens": 163840, "dtype": "bfloat16"}
    made = {
        name: LM("dummy", load_format="dummy", hf_config=config, max_running_requests=256, enable_prefix_caching=False,
                 batch_invariant=name == "invariant", **size)
        for name in ("default", "invariant")
    }  # fmt: skip
    rows = []
    for case, run in cases(args.steps, args.prompt, args.batches).items():
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(args.rounds + 1):  # the first one warms up
            for name in list(made)[:: 1 if number % 2 else -1]:
                took = run(made[name])
                if number:
                    times[name].append(took)
        ratios = [own / plain for own, plain in zip(times["invariant"], times["default"], strict=True)]
        row = {"case": case, "ratio": statistics.median(ratios), "ratios": ratios}
        row |= {f"{name}_ms": statistics.median(times[name]) for name in made}
        rows.append(row)
        print(
            f"{case:12} {row['default_ms']:10.3f} ms {row['invariant_ms']:10.3f} ms  x {row['ratio']:.3f}"
            f"  ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
        write(args.out, rows)
    for lm in made.values():
        lm.shutdown()


def milliseconds(run: Callable[[], Any], times: int = 20) -> float:
    """Median, with a cold L2 cache."""
    cold = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    found = []
    for _ in range(times + 3):
        cold.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found[3:])


def tilings(args: argparse.Namespace) -> None:
    """Products by all tilings, beside cuBLAS."""
    from pymllm_interp.kernels.products import fixed

    tried = [*fixed.FEW, *fixed.MANY]
    tried += [
        fixed.ProductTiling(c, r, d, 4 * (c * r > 8192) + 4, s)
        for c, r, d, s in pairs((64, 128), (16, 32, 64, 128, 256), (64, 128), (3, 4, 6))
    ]
    rows = []
    for name, (n, k) in WEIGHTS.items():
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        for count in (1, 32, 256, 2048):
            x = torch.randn(count, k, device="cuda", dtype=torch.bfloat16)
            wanted, library = fixed.product(x, weight), milliseconds(lambda x=x, w=weight: torch.mm(x, w.t()))
            chosen = milliseconds(lambda x=x, w=weight: fixed.product(x, w))
            best: list[Any] = []
            for tiling in dict.fromkeys(tried):
                try:
                    equal = torch.equal(fixed.product(x, weight, tiling=tiling), wanted)
                    took = milliseconds(lambda x=x, w=weight, t=tiling: fixed.product(x, w, tiling=t), 8)
                except Exception:  # too much shared memory
                    continue
                best.append((took, tuple(tiling), equal))
            best.sort(key=lambda found: found[0])
            rows.append({"weight": name, "rows": count, "library_ms": library, "chosen_ms": chosen, "best": best[:5],
                         "all_equal": all(equal for *_, equal in best)})  # fmt: skip
            print(
                f"{name:8} {count:5} library {library:.4f}  chosen {chosen:.4f}  best {best[:2]}  equal {rows[-1]['all_equal']}",
                flush=True,
            )
            write(args.out, rows)


def write(out: Path | None, rows: list[dict[str, Any]]) -> None:
    if out is not None:
        known = {**machine(Path(__file__).resolve().parent.parent)}
        known["commits"] = known["commits"]["new"]
        out.write_text(json.dumps({"suite": "batch_invariant", **known, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tilings", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    (tilings if args.tilings else vllms if args.vllm else engines)(args)


if __name__ == "__main__":
    main()
