"""Plain decoding on a CPU: this engine and vLLM's CPU build in turns, each in a process and an environment of its own.

python benchmarks/compare_vllm_cpu.py FOLDER --ours PYTHON --vllm PYTHON [--dtype bfloat16 float32] [--isa avx2] --out FILE

FOLDER has a config.json and safetensors. Prompts are random token ids; generation is greedy and ignores the end-of-sequence
token. Each process keeps its model loaded, and idles while the other generates.

`--isa` imitates a processor with fewer instructions on both sides: by the variables of `ISAS`, and by hiding instructions from
vLLM's look at the processor. An instruction keeps this processor's speed: on Intel's, AVX-512 BF16 multiplies at half the rate of
float32, on AMD's probably at twice the rate: none was measured.

On a busy machine `--threads 1` is what can be compared: the CPU time of one thread, which does not count the time of others.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 16
BATCHES = (1, 8, 32)
VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

ISAS = {
    "native": {},
    "avx512_bf16": {
        "PYMLLM_INTERP_MAX_CPU_ISA": "avx512_bf16",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "no_amx": {  # what each selects on this processor: ours uses no AVX-512 BF16 on Intel
        "PYMLLM_INTERP_MAX_CPU_ISA": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "avx512": {
        "PYMLLM_INTERP_MAX_CPU_ISA": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "avx2": {"PYMLLM_INTERP_MAX_CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
"""--isa -> the variables of both sides."""
HIDDEN = {
    "native": (),
    "avx512_bf16": ("amx",),
    "no_amx": ("amx",),
    "avx512": ("amx", "avx512_bf16"),
    "avx2": ("amx", "avx512"),
}
"""--isa -> how the names of instructions that vLLM does not see begin."""


def hide_instructions(isa: str) -> None:
    """What `torch.cpu` tells of this processor, without the instructions of `HIDDEN`."""
    import torch

    found = torch.cpu.get_capabilities()
    seen = {name: value and not name.startswith(HIDDEN[isa]) for name, value in found.items()} if HIDDEN[isa] else found
    torch.cpu.get_capabilities = lambda: seen


def generate_ours(folder: str, dtype: str) -> Any:
    """A function (prompts, new tokens) of this engine."""
    from pymllm_interp import LM, SamplingParams

    lm = LM(folder, dtype=dtype, device="cpu", enable_prefix_caching=False)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        handles = [lm.submit(prompt, params) for prompt in prompts]
        assert all(len(handle.result().token_ids) == new_tokens for handle in handles)

    return generate


def generate_vllm(folder: str, dtype: str) -> Any:
    """The same of vLLM."""
    from vllm import LLM, SamplingParams  # pyright: ignore

    llm = LLM(model=folder, dtype=dtype, max_model_len=1024, max_num_seqs=max(BATCHES), enable_prefix_caching=False)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)

    return generate


def products(side: str, dtype: str) -> str:
    """What multiplies in bfloat16, where this engine says it."""
    if side == "vllm" or dtype != "bfloat16":
        return ""
    from pymllm_interp.kernels.cpu.cpu_dispatch import cpu_kernels

    kernels = cpu_kernels()
    return f"({'torch' if kernels is None else kernels.BFLOAT16_ISA})"


def serve(side: str, folder: str, dtype: str, isa: str) -> None:
    """Answer each line "batch new_tokens" on stdin with the seconds that it took, and the process's CPU seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print
    if side == "vllm":
        hide_instructions(isa)
    generate = {"ours": generate_ours, "vllm": generate_vllm}[side](folder, dtype)
    package = {"ours": "pymllm-interp", "vllm": "vllm-cpu"}[side]
    print(package, importlib.metadata.version(package), products(side, dtype), file=answers, flush=True)
    for line in sys.stdin:
        batch, new_tokens = map(int, line.split())
        rng = random.Random(batch)
        prompts = [[rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        started, used = time.perf_counter(), time.process_time()
        generate(prompts, new_tokens)
        print(time.perf_counter() - started, time.process_time() - used, file=answers, flush=True)
    os._exit(0)


class Side:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, folder: str, dtype: str, threads: int | None, isa: str) -> None:
        command = [python, __file__, folder, "--serve", name, "--dtype", dtype, "--isa", isa]
        env = os.environ | (VLLM_VARIABLES if name == "vllm" else {}) | ISAS[isa]
        if threads is not None:
            env |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.version = self._answer()

    def seconds(self, batch: int, new_tokens: int) -> tuple[float, float]:
        """Wall time, and CPU time."""
        assert self.process.stdin is not None
        print(batch, new_tokens, file=self.process.stdin, flush=True)
        wall, used = map(float, self._answer().split())
        return wall, used

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended: {self.process.args}")
        return line.strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(sides: dict[str, Side], rounds: int, new_tokens: int) -> list[dict[str, Any]]:
    """Tokens a second, by wall time and by CPU time, of each batch and side: the best and the median of the rounds."""
    results = []
    for batch in BATCHES:
        for side in sides.values():
            side.seconds(batch, 8)  # warm
        result: dict[str, Any] = {"batch": batch}
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                runs[name].append(side.seconds(batch, new_tokens))
        for i, clock in enumerate(("wall", "cpu")):
            rates = {name: [round(batch * new_tokens / run[i], 1) for run in runs[name]] for name in sides}
            found = {name: {"best": max(values), "median": statistics.median(values)} for name, values in rates.items()}
            ratios = {kind: round(found["ours"][kind] / found["vllm"][kind], 3) for kind in ("best", "median")}
            result[f"tokens_per_{clock}_s"] = {**found, "ours_to_vllm": ratios, "runs": rates}
        results.append(result)
        print(results[-1], file=sys.stderr)
    return results


def processor() -> str:
    """Its model, and which of the instructions it has that `--isa` may hide."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    has = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'unknown')}, with {', '.join(has) or 'none of them'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--ours", default=sys.executable)
    parser.add_argument("--vllm")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--isa", choices=ISAS, default="native", help="imitate a processor with these instructions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, help="of each engine; default: its own choice")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder, args.dtype[0], args.isa)
    record: dict[str, Any] = {
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": args.new_tokens,
        "cpus": os.cpu_count(),
        "processor": processor(),
        "isa": args.isa,
        "variables": ISAS[args.isa],
        "threads": args.threads,
        "load_average_before": os.getloadavg(),
        "engines": {},
        "dtypes": {},
    }
    for dtype in args.dtype:
        given = args.folder, dtype, args.threads, args.isa
        sides = {name: Side(name, getattr(args, name), *given) for name in ("ours", "vllm")}
        record["engines"][dtype] = [side.version for side in sides.values()]
        record["dtypes"][dtype] = compare(sides, args.rounds, args.new_tokens)
        for side in sides.values():
            side.close()
    record["load_average_after"] = os.getloadavg()
    text = json.dumps(record, indent=2) + "\n"
    args.out.write_text(text) if args.out else print(text)


if __name__ == "__main__":
    main()
