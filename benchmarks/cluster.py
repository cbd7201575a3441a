"""Replicas behind fronts against one, and against `serve`: on a GPU each, or on CPU engines of one thread. Needs no Ray.

    python benchmarks/cluster.py [--model FOLDER [--load-format dummy]] [--device cuda] [--streams 32 128] [--out FILE]

Ray starts the same processes in a cluster, and no token passes it. Three set-ups run at once, and are measured in turns:

- "serve": `pymllm-interp serve`, on the first device;
- "one": a front over the replica r0, on the first device;
- "all": fronts over all replicas, r0 among them, each on a device of its own where there are enough.

Throughput is that of a closed loop of streams, as many for each replica in all set-ups: "all" gets `--replicas` times as many. The
first token is that of single streams. The hit rate is of prompts with shared beginnings. Without --model, the model is random.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from http_traffic import Answer, Client

from pymllm_interp.bench import describe_machine
from pymllm_interp.server.engines.replica_process import ReplicaProcess, ReplicaSettings
from pymllm_interp.server.engines.roster import LinkKeys, Replica
from pymllm_interp.server.front import greeting, roster_line
from pymllm_interp.server.settings import ServeLimits, ServeSettings

NAME = "model"
START_SECONDS = 400.0
WARM_SECONDS = 1.5
"""Of each closed loop, before its window."""
PROMPT, SHORT_PROMPT = 64, 16
AIMS = {"all/one": 1.9, "one/serve": 0.97, "ttft_ms one-serve": 1.0, "hit rate all/one": 0.9}


def save_model(folder: Path) -> None:
    """A random model, without a tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


# -- set-ups -------------------------------------------------------------------------------------


async def announced(process: asyncio.subprocess.Process) -> str:
    """The URL that a server's process prints.

    Raises:
        RuntimeError: it ended before.
    """
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if found := re.search(rb"is served at (https?://\S+)", line):
            return found[1].decode()
    raise RuntimeError(f"a server ended with status {await process.wait()} before it served: its log is above")


@contextlib.asynccontextmanager
async def process_of(
    *command: str, first: bytes = b"", **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process, until the end of the body. `first` is written to its standard input."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env
    )
    assert process.stdin is not None
    process.stdin.write(first)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 60)
            except TimeoutError:
                process.kill()
                await process.wait()


class SetUps:
    """All processes.

    Attributes:
        urls: of the set-ups' HTTP processes.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.urls: dict[str, list[str]] = {}
        self._args, self._keys = args, LinkKeys.new()
        self._limits = ServeLimits(max_concurrent=1 << 16, replica_silence_seconds=30.0)
        self._model = {"model": str(folder), "dtype": args.dtype, "load_format": args.load_format}
        self._server = {"device": args.device, "kv_cache_tokens": args.kv_cache_tokens}
        self._gpus = torch.cuda.device_count() if args.device == "cuda" else 0
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> SetUps:
        try:
            async with asyncio.timeout(START_SECONDS):
                replicas, serve = await asyncio.gather(self._replicas(), self._serve())
                self.urls["serve"] = [serve]
                self.urls["one"] = [await self._front(replicas[:1])]
                self.urls["all"] = [await self._front(replicas) for _ in range(self._args.fronts)]
                for name, count in (("one", 1), ("all", len(replicas))):
                    for url in self.urls[name]:
                        while await asyncio.to_thread(metric, url, "replica_up") < count:
                            await asyncio.sleep(0.1)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _replicas(self) -> list[Replica]:
        settings = ReplicaSettings(
            model=self._model, server=self._server, keys=self._keys, limits=self._limits, log_level="warning"
        )
        processes = [ReplicaProcess(settings, f"r{i}", self._args.host) for i in range(self._args.replicas)]
        for process in processes:
            self._stack.push_async_callback(process.close)

        async def start(number: int, process: ReplicaProcess) -> Replica:
            os.environ |= {"OMP_NUM_THREADS": "1", **self._device(number)}  # read before `start` first waits
            return await process.start()

        found = await asyncio.gather(*(start(number, process) for number, process in enumerate(processes)))
        for number, process in enumerate(processes if self._args.pin else ()):
            assert process.process is not None
            os.sched_setaffinity(process.process.pid, {number % (os.cpu_count() or 1)})
        return found

    def _device(self, number: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": str(number % self._gpus)} if self._gpus else {}

    async def _serve(self) -> str:
        options = {**self._server, **self._model}
        command = ["-m", "pymllm_interp.cli", "serve", options.pop("model"), "--port", "0", "--served-model-name", NAME]
        command += ["--device", options.pop("device"), "--dtype", options.pop("dtype"), "--log-level", "warning"]
        command += [f"--option={name}={value}" for name, value in options.items()]
        command += [f"--max-concurrent={self._limits.max_concurrent}"]
        process = await self._stack.enter_async_context(process_of(*command, **self._device(0)))
        return await announced(process)

    async def _front(self, replicas: Sequence[Replica]) -> str:
        settings = ServeSettings(model={}, server={}, name=NAME, port=0, limits=self._limits, log_level="warning")
        first = greeting(settings, self._keys) + roster_line(list(replicas))
        process = await self._stack.enter_async_context(process_of("-m", "pymllm_interp.server.front", first=first))
        return await announced(process)


def metric(url: str, name: str) -> float:
    """The sum over its labels."""
    with urlopen(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^pymllm_interp_{name}(?:{{.*}})? ([\d.e+-]+)$", text, re.M))


# -- loads, each in processes of their own -------------------------------------------------------


def prompt_of(rng: random.Random, vocab: int, length: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(vocab) for _ in range(length)]


def closed_loop(urls: list[str], streams: int, new_tokens: int, vocab: int, end: float, seed: int) -> list[Answer]:
    """So many streams, each with its next request when the last has ended, until `end` (`time.monotonic`)."""
    rng, answers = random.Random(seed), list[Answer]()

    async def one(url: str) -> None:
        client = Client(url, NAME)
        while (now := time.monotonic()) < end:
            answers.append(await client.ask(prompt_of(rng, vocab, PROMPT), new_tokens, now))

    async def run() -> None:
        await asyncio.gather(*(one(urls[i % len(urls)]) for i in range(streams)))

    asyncio.run(run())
    return answers


def within(answer: Answer, begin: float, end: float) -> float:
    """Tokens of a stream in a window, its tokens being spread evenly."""
    overlap = max(0.0, min(answer.last, end) - max(answer.first, begin))
    return answer.tokens * overlap / max(answer.last - answer.first, 1e-9)


def single_streams(url: str, count: int, vocab: int, seed: int) -> list[float]:
    """Milliseconds to the first token, one request after the other."""
    rng = random.Random(seed)

    async def run() -> list[float]:
        client, found = Client(url, NAME), []
        for _ in range(count):
            answer = await client.ask(prompt_of(rng, vocab, SHORT_PROMPT), 4, time.monotonic())
            found.append(1000 * (answer.first - answer.due))
        return found

    return asyncio.run(run())


def shared_beginnings(urls: list[str], vocab: int, seed: int) -> None:
    """24 beginnings of 256 tokens, each with 8 endings, in random order, 8 at a time."""
    rng = random.Random(seed)
    beginnings = [prompt_of(rng, vocab, 256) for _ in range(24)]
    prompts = [begin + prompt_of(rng, vocab, 16) for begin in beginnings for _ in range(8)]
    rng.shuffle(prompts)

    async def one(url: str) -> None:
        client = Client(url, NAME)
        while prompts:
            await client.ask(prompts.pop(), 2, time.monotonic())

    async def run() -> None:
        await asyncio.gather(*(one(urls[i % len(urls)]) for i in range(8)))

    asyncio.run(run())


# -- measurements --------------------------------------------------------------------------------


class Measurements:
    """Loads over set-ups, and what they gave, by set-up and quantity: a value a repeat."""

    def __init__(
        self, args: argparse.Namespace, urls: dict[str, list[str]], vocab: int, pool: ProcessPoolExecutor
    ) -> None:
        self._args, self._urls, self._vocab, self._pool = args, urls, vocab, pool
        self._seeds = iter(range(1, 1 << 30))
        self.found: dict[str, dict[str, list[float]]] = {name: {} for name in urls}

    async def _run(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def _add(self, name: str, what: str, value: float) -> None:
        self.found[name].setdefault(what, []).append(value)

    async def throughput(self, name: str, streams: int, seconds: float) -> None:
        """Tokens a second, and the first token's time under this load. `streams` are those of a replica."""
        urls, processes = self._urls[name], self._args.processes
        total = streams * (self._args.replicas if name == "all" else 1)
        shares = [len(range(part, total, processes)) for part in range(processes)]
        begin = time.monotonic() + 0.3 + WARM_SECONDS
        end = begin + seconds
        turned = [urls[i % len(urls) :] + urls[: i % len(urls)] for i in range(processes)]
        work = [
            self._run(closed_loop, own, share, self._args.tokens, self._vocab, end, next(self._seeds))
            for own, share in zip(turned, shares, strict=True) if share
        ]  # fmt: skip
        answers = [answer for part in await asyncio.gather(*work) for answer in part]
        self._add(name, f"tokens/s at {streams}", sum(within(answer, begin, end) for answer in answers) / seconds)
        first = [1000 * (answer.first - answer.due) for answer in answers if answer.due >= begin]
        if first:
            self._add(name, f"ttft ms at {streams}", statistics.median(first))

    async def first_tokens(self, name: str) -> None:
        """The median of single streams, in milliseconds."""
        found = await self._run(single_streams, self._urls[name][0], self._args.singles, self._vocab, next(self._seeds))
        self._add(name, "ttft ms", statistics.median(found))

    async def hit_rate(self, name: str) -> None:
        """The cached share of prompts' tokens."""
        url, counts = self._urls[name][0], []
        for load in (False, True):
            if load:
                await self._run(shared_beginnings, self._urls[name], self._vocab, next(self._seeds))
            names = [f"prefix_cache_{what}_tokens_total" for what in ("cached", "asked")]
            counts.append([await asyncio.to_thread(metric, url, one) for one in names])
        cached, asked = (after - before for before, after in zip(*counts, strict=True))
        self._add(name, "hit rate", cached / asked)

    def compared(self) -> dict[str, float]:
        """Medians over repeats: what the aims are about."""
        median = {n: {what: statistics.median(v) for what, v in found.items()} for n, found in self.found.items()}
        serve, one, every = median["serve"], median["one"], median["all"]
        result = {
            "ttft_ms one-serve": one["ttft ms"] - serve["ttft ms"],
            "hit rate all/one": every["hit rate"] / one["hit rate"],
        }
        for streams in self._args.streams:
            what = f"tokens/s at {streams}"
            result[f"all/one at {streams} a replica"] = every[what] / one[what]
            result[f"one/serve at {streams}"] = one[what] / serve[what]
        return result


async def measure(args: argparse.Namespace, folder: Path, record: dict[str, Any]) -> None:
    """Fill the record; it is written after each repeat."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    context = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    async with SetUps(args, folder) as set_ups:
        record["start_seconds"] = time.perf_counter() - started
        print(f"all processes serve after {record['start_seconds']:.0f} s", flush=True)
        with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
            for warm in (True, *[False] * args.repeats):
                if warm:  # compilers, graphs, and the pool's processes
                    found = Measurements(args, set_ups.urls, vocab, pool)
                    for name in set_ups.urls:
                        await found.throughput(name, max(args.streams), 1.0)
                        await found.first_tokens(name)
                    found = Measurements(args, set_ups.urls, vocab, pool)
                    continue
                for name in set_ups.urls:
                    await found.first_tokens(name)
                for streams in args.streams:
                    for name in set_ups.urls:
                        await found.throughput(name, streams, args.seconds)
                for name in set_ups.urls:
                    await found.hit_rate(name)
                record |= {"results": found.found, "compared": found.compared(), "aims": AIMS}
                record["load_average"].append(os.getloadavg()[0])
                if args.out is not None:
                    args.out.write_text(json.dumps(record, indent=1) + "\n")
                print(f"after {time.perf_counter() - started:.0f} s: {found.compared()}", flush=True)
    for name, values in record["results"].items():
        print(f"{name:6} " + ", ".join(f"{what} {statistics.median(each):.4g}" for what, each in values.items()))
    for what, value in record["compared"].items():
        print(f"{what:28} {value:.3f}")


def main() -> None:
    """Measure all set-ups in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, from config.json alone")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--kv-cache-tokens", type=int, default=65536, help="of each engine: two are on the first device"
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--fronts", type=int, default=2, help='of the set-up "all"')
    parser.add_argument("--host", default="127.0.0.1", help="address that replicas listen on")
    parser.add_argument("--streams", type=int, nargs="+", default=[32], help="for each replica")
    parser.add_argument("--tokens", type=int, default=128, help="of a stream")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measured window")
    parser.add_argument("--singles", type=int, default=40, help="single streams, of each set-up and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4, help="that send requests")
    parser.add_argument("--pin", action="store_true", help="a core for each replica")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "suite": "cluster", "machine": describe_machine(), "gpus": torch.cuda.device_count(), "load_average": [os.getloadavg()[0]],
        "arguments": {name: value for name, value in vars(args).items() if name not in ("model", "out")},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = args.model or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.model is None:
            save_model(folder)
        asyncio.run(measure(args, folder, record))


if __name__ == "__main__":
    main()
