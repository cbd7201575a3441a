"""Seconds from a new process to the first token, and from a sleeping engine to the first token, as JSON.

    python benchmarks/cold_start.py --config benchmarks/configs/llama8b --out FILE [--vllm COMMAND] [--write FOLDER] [--rounds 3]
    python benchmarks/cold_start.py --tiny --out FILE      # on a CPU, to try the script

Cases, each in processes of their own, by turns: "all graphs" (the default), "lazy graphs" (`EngineTuning(lazy_graphs=True)`), and,
with --vllm, vLLM by that command of a Python ("env PYTHONPATH=FOLDER python3"). Weights are random. With --write they are a
checkpoint in FOLDER, so that reading them counts, from the system's page cache from the second round on.

- `start`: import, `LM(...)` and its parts (`weights`, `pools` with the largest step, `attention`, `graphs`, `warm_up`), then the
  first token of a prompt, and of a second one. Parts of `LM(...)` that are not named: config, tokenizer, threads.
- `wake`, of ours: sleep; wake; the first token; milliseconds between tokens (`itl_ms`) of 32 requests right after the wake, and
  again when all graphs are captured; seconds of those captures in an idle engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 512,
}  # fmt: skip
PROMPT, MODEL_LEN, REQUESTS, NEW_TOKENS = list(range(1, 65)), 4096, 32, 128
CASES = ("all graphs", "lazy graphs")


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return round(time.perf_counter() - started, 4)


def counted(parts: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose seconds are added to a part."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            parts[name] = round(parts.get(name, 0.0) + time.perf_counter() - started, 4)

    return run


def ours(folder: str, dummy: bool, lazy: bool) -> dict[str, Any]:
    """Start, first token, sleep and wake of an `LM`."""
    found: dict[str, Any] = {"import": seconds(lambda: __import__("pymllm_interp.lm"))}
    import torch

    from pymllm_interp import LM, SamplingParams
    from pymllm_interp.config import EngineTuning
    from pymllm_interp.engine import engine
    from pymllm_interp.runner.interp_model_runner import InterpModelRunner

    parts: dict[str, float] = {}
    for name, method in (
        ("weights", "load"), ("pools", "init_memory_pool"), ("attention", "init_attention_backend"), ("graphs", "init_cuda_graphs"),
    ):  # fmt: skip
        setattr(InterpModelRunner, method, counted(parts, name, getattr(InterpModelRunner, method)))
    engine.warm_up = counted(parts, "warm_up", engine.warm_up)
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    lm = LM(
        folder, dtype="bfloat16", load_format="dummy" if dummy else "auto", max_model_len=MODEL_LEN,
        tuning=EngineTuning(lazy_graphs=lazy),
    )  # fmt: skip
    found["LM"], found["parts"] = round(time.perf_counter() - started, 4), dict(parts)
    found["first_token"] = seconds(lambda: lm.generate([PROMPT], greedy))
    found["total"] = round(found["import"] + found["LM"] + found["first_token"], 4)
    found["second_token"] = seconds(lambda: lm.generate([PROMPT[1:]], greedy))
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found["wake"] = [woken(lm, parts) for _ in range(3)]
    lm.shutdown()
    return found


def woken(lm: Any, parts: dict[str, float]) -> dict[str, Any]:
    """A sleep and a wake, and what requests see of them."""
    from pymllm_interp import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    parts.clear()
    found: dict[str, Any] = {"sleep": seconds(lm.sleep), "wake": seconds(lm.wake), "graphs": parts.get("graphs", 0.0)}
    found["first_token"] = seconds(lambda: lm.generate([PROMPT], greedy))
    found["graphs_at_first_token"] = lm.engine.stats()["graphs"]
    found["itl_ms"] = itl_ms(lm)
    found["graphs_after_traffic"] = lm.engine.stats()["graphs"]
    found["all_graphs"] = seconds(lambda: lm.wake(all_graphs=True))
    found["itl_ms_all_graphs"] = itl_ms(lm)
    return found


def itl_ms(lm: Any) -> dict[str, float]:
    """Milliseconds between tokens of requests that arrive at once."""
    from pymllm_interp import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [[(7 * i + j) % 500 + 1 for j in range(len(PROMPT))] for i in range(REQUESTS)]
    lm.reset_prefix_cache()

    def stream(prompt: list[int]) -> list[float]:
        return [time.perf_counter() for _ in lm.stream(prompt, params)]

    with ThreadPoolExecutor(REQUESTS) as pool:
        times = list(pool.map(stream, prompts))
    gaps = sorted(b - a for at in times for a, b in pairwise(at))
    return {
        "p50": round(statistics.median(gaps) * 1e3, 3), "p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 3),
        "max": round(gaps[-1] * 1e3, 3), "seconds": round(max(max(at) for at in times) - min(min(at) for at in times), 4),
    }  # fmt: skip


def theirs(folder: str, dummy: bool) -> dict[str, Any]:
    """Start and first token of vLLM."""
    found: dict[str, Any] = {"import": seconds(lambda: __import__("vllm"))}
    import vllm  # pyright: ignore[reportMissingImports]

    greedy = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    engine = vllm.LLM(
        folder, load_format="dummy" if dummy else "auto", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=MODEL_LEN,
    )  # fmt: skip
    found["LM"] = round(time.perf_counter() - started, 4)
    for name, prompt in (("first_token", PROMPT), ("second_token", PROMPT[1:])):
        given = [{"prompt_token_ids": prompt}]
        found[name] = seconds(lambda given=given: engine.generate(given, greedy, use_tqdm=False))
    found["total"] = round(found["import"] + found["LM"] + found["first_token"], 4)
    found["vllm"] = vllm.__version__
    return found


def written(config: Path, folder: Path) -> None:
    """A checkpoint of random weights, in shards of one layer each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").exists():
        return
    hf_config = AutoConfig.from_pretrained(config)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")


def worker(case: str, folder: str, dummy: bool) -> None:
    found = theirs(folder, dummy) if case == "vllm" else ours(folder, dummy, case == CASES[1])
    print("RECORD " + json.dumps(found), flush=True)
    os._exit(0)  # `measured` ends vLLM's other processes


def measured(python: str, case: str, folder: Path, dummy: bool) -> dict[str, Any]:
    """The record of a case, from a new process."""
    started = time.perf_counter()
    call = [*shlex.split(python), __file__, "--worker", case, "--config", str(folder), *(["--dummy"] if dummy else [])]
    with tempfile.TemporaryFile("w+") as file:  # a pipe would stay open as long as vLLM's other processes
        with subprocess.Popen(call, stdout=file, stderr=subprocess.STDOUT, start_new_session=True) as process:
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # they would hold the device's memory for another minute
            os.killpg(process.pid, signal.SIGKILL)
        file.seek(0)
        text = file.read()
    records = [line for line in text.splitlines() if line.startswith("RECORD ")]
    if not records:
        return {"error": text[-2000:]}
    return json.loads(records[-1][7:]) | {"process": round(time.perf_counter() - started, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("benchmarks/configs/llama8b"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="read a checkpoint, which is written there")
    parser.add_argument("--vllm", metavar="COMMAND", help="a Python with vLLM, as the shell would start it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--dummy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, str(args.config), args.dummy)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.config
        if args.tiny:
            folder = Path(temporary)
            config = json.loads((args.config / "config.json").read_text()) | TINY
            config.pop("head_dim", None)
            (folder / "config.json").write_text(json.dumps(config))
        if args.write:
            written(folder, args.write)
        record: dict[str, Any] = {"config": args.config.name, "written": args.write is not None, "cases": {}}
        cases = [
            *((shlex.quote(sys.executable), case) for case in CASES),
            *([(args.vllm, "vllm")] if args.vllm else []),
        ]
        for _ in range(args.rounds):
            for python, case in cases:
                found = measured(python, case, args.write or folder, args.write is None)
                record["cases"].setdefault(case, []).append(found)
                print(case, {name: found.get(name) for name in ("LM", "parts", "total", "error")}, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
