"""Two replicas against one, and a front against `serve`: on CPU engines of one thread, or on GPUs. Tokens do not pass Ray.

    python benchmarks/cluster_cpu.py [--streams 32] [--tokens 64] [--repeats 5] [--device cuda --model FOLDER] [--out FILE]

Without --model, the model is random, with four layers. All set-ups are measured in turns. Prints the time to the first token of
single streams, tokens a second of many streams, and the hit rate of the prefix cache on prompts with shared beginnings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from pymllm_interp.bench.common import describe_machine

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
VOCAB = 1000


def save_model(folder: Path) -> None:
    """A random model, without a tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextlib.contextmanager
def served(folder: Path, replicas: int, device: str, pin: bool, kv_cache_tokens: int) -> Iterator[str]:
    """HOST:PORT of `serve` (0 replicas), or of a front over so many."""
    main = ["-m", "pymllm_interp.cli"] if not replicas else [str(SUPPORT / "replicated_server.py"), str(replicas)]
    command = [sys.executable, *main, "serve", str(folder), "--port", "0", "--device", device]
    command += ["--option", f"kv_cache_tokens={kv_cache_tokens}"]
    environment = {
        **os.environ,
        "REPLICA_GPUS": "1" if device == "cuda" else "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "is served at" in line, line
            host = line.split("http://")[1].split()[0]
            while _metric(host, "replica_up") < replicas:
                time.sleep(0.1)
            for number, child in enumerate(_children(process.pid) if pin else ()):
                os.sched_setaffinity(child, {sorted(os.sched_getaffinity(0))[number % os.cpu_count()]})  # pyright: ignore
            yield host
        finally:
            process.terminate()


def _children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def _metric(host: str, name: str, **labels: str) -> float:
    connection = HTTPConnection(host, timeout=60)
    connection.request("GET", "/metrics")
    total = 0.0
    for line in connection.getresponse().read().decode().splitlines():
        if line.startswith(f"pymllm_interp_{name}") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def stream(host: str, prompt: list[int], tokens: int) -> tuple[float, int]:
    """(seconds to the first token, tokens) of a stream."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection = HTTPConnection(host, timeout=600)
    started, first, count = time.perf_counter(), 0.0, 0
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - started
            count += 1
    return first, count


def tokens_per_second(host: str, streams: int, tokens: int, rng: random.Random) -> float:
    """Of so many streams at once, with prompts of their own."""
    threads = [
        threading.Thread(target=stream, args=(host, [rng.randrange(VOCAB) for _ in range(64)], tokens))
        for _ in range(streams)
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return streams * tokens / (time.perf_counter() - started)


def hit_rate(host: str, rng: random.Random) -> float:
    """Cached share of the prompts' tokens: 24 beginnings of 256 tokens, each with 8 endings, in random order, 8 at a time."""
    beginnings = [[rng.randrange(VOCAB) for _ in range(256)] for _ in range(24)]
    prompts = [[*begin, *(rng.randrange(VOCAB) for _ in range(16))] for begin in beginnings for _ in range(8)]
    rng.shuffle(prompts)
    before = [_metric(host, f"prefix_cache_{name}_tokens_total") for name in ("cached", "asked")]
    for start in range(0, len(prompts), 8):
        threads = [threading.Thread(target=stream, args=(host, prompt, 2)) for prompt in prompts[start : start + 8]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    after = [_metric(host, f"prefix_cache_{name}_tokens_total") for name in ("cached", "asked")]
    cached, asked = (b - a for a, b in zip(before, after, strict=True))
    return cached / asked


def main() -> None:
    """Measure all set-ups in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", type=Path, help="a folder")
    parser.add_argument("--kv-cache-tokens", type=int, default=65536, help="of each engine: several may share a device")
    parser.add_argument("--pin", action="store_true", help="a core for each engine process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = random.Random(0)
    names = {"serve": 0, "one replica": 1, "two replicas": 2}
    record: dict[str, Any] = {
        "suite": "cluster-cpu", "machine": describe_machine(), "load": [os.getloadavg()[0]], "streams": args.streams,
        "tokens": args.tokens, "results": {},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = args.model or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.model is None:
            save_model(folder)
        hosts = {
            name: stack.enter_context(served(folder, count, args.device, args.pin, args.kv_cache_tokens))
            for name, count in names.items()
        }
        found: dict[str, dict[str, list[float]]] = {name: {"ttft_ms": [], "tokens_per_second": []} for name in names}
        for name, host in hosts.items():
            tokens_per_second(host, args.streams, 8, rng)
            found[name]["hit_rate"] = [hit_rate(host, rng)]
        for _ in range(args.repeats):
            for name, host in hosts.items():
                single = [stream(host, [rng.randrange(VOCAB) for _ in range(16)], 4)[0] for _ in range(30)]
                found[name]["ttft_ms"].append(1000 * statistics.median(single))
                found[name]["tokens_per_second"].append(tokens_per_second(host, args.streams, args.tokens, rng))
            record["load"].append(os.getloadavg()[0])
    for name, values in found.items():
        record["results"][name] = {what: statistics.median(each) for what, each in values.items()} | {"all": values}
        shown = ", ".join(f"{what} {statistics.median(each):.3g}" for what, each in values.items())
        print(f"{name:14} {shown}")
    print(f"load: {min(record['load']):.1f} to {max(record['load']):.1f}")
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
