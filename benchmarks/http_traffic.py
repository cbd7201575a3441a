"""Traffic over HTTP against any server with OpenAI's completions: time to the first token, between tokens, a token, throughput.

    python benchmarks/http_traffic.py --url http://127.0.0.1:8000 --name ours --load poisson-10 clients-32 --out FILE

`poisson-R`: R requests a second. `clients-N`: N clients, each with its next request when the last has ended. `mix` and
`interference`: the workloads (benchmarks/results/README.md), whose background requests do not count. Other lengths are those of
`mix`; prompts are random token ids, answers are streamed. The requests are sent by `--processes` processes, so that reading
streams does not slow them down. Run it once for each server, one after the other on one machine: the seeds make the traffic the
same. `serving_turns.py` starts servers, and measures them by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from suites.serving.workloads import Sizes, Workload, make_workload, mix

PERCENTILES = (50, 90, 99)


@dataclass
class Answer:
    """Of a request, in seconds of `time.monotonic`, which all processes share."""

    due: float
    first: float
    last: float
    tokens: int
    gaps: list[float]
    """Between the parts of the stream. A part has one token, or several where the server was late."""


class Client:
    """A connection that is kept between requests."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._model = parts.hostname or "127.0.0.1", parts.port or 80, model
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, prompt: list[int], new_tokens: int, due: float) -> Answer:
        """Stream a completion. Raises RuntimeError where the server refuses it or ends too early."""
        asked = {
            "model": self._model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        for _ in range(2):  # a server may have closed a connection that had nothing to do
            if self._stream is None:
                self._stream = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
            (reader, writer), status = self._stream, b""
            with contextlib.suppress(ConnectionError):
                writer.write(head.encode() + body)
                status = await reader.readline()
            if status:
                break
            self._stream = None
        while (await reader.readline()).strip():
            pass
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {(await reader.read(2000))!r}")
        usage, times = 0, list[float]()
        while True:
            line = await reader.readline()
            if not line:
                raise RuntimeError("the server closed the connection in the midst of a stream")
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            if line.startswith(b"data: [DONE]"):
                break
            if b'"usage":{' in line.replace(b" ", b""):
                found = json.loads(line[6:])
                usage = (found.get("usage") or {}).get("completion_tokens", usage)
            if not usage:
                times.append(now)
        while (await reader.readline()).strip() != b"0":  # the end of the chunked body
            pass
        await reader.readline()
        if usage != new_tokens:
            raise RuntimeError(f"{usage} tokens of {new_tokens}")
        return Answer(due, times[0], times[-1], new_tokens, [b - a for a, b in pairwise(times)])


def part_of(workload: Workload, index: int, processes: int) -> list[tuple[list[int], int, float]]:
    """The requests that one of the processes sends."""
    everything = list(zip(workload.prompts, workload.new_tokens, workload.arrivals, strict=True))
    return everything[index::processes]


def serve_part(
    url: str, model: str, requests: list[tuple[list[int], int, float]], clients: int | None, start: float
) -> list[Answer]:
    """One process: `clients` connections in a closed loop, or a connection for each request at its time, in their order."""

    async def open_loop() -> list[Answer]:
        idle: list[Client] = []

        async def one(prompt: list[int], new: int, arrival: float) -> Answer:
            await asyncio.sleep(max(0.0, start + arrival - time.monotonic()))
            client = idle.pop() if idle else Client(url, model)
            answer = await client.ask(prompt, new, start + arrival)
            idle.append(client)
            return answer

        return list(await asyncio.gather(*(one(*request) for request in requests)))

    async def closed_loop(count: int) -> list[Answer]:
        queue, answers = list(reversed(requests)), []

        async def one() -> None:
            client = Client(url, model)
            while queue:
                prompt, new, _ = queue.pop()
                answers.append(await client.ask(prompt, new, time.monotonic()))

        await asyncio.sleep(max(0.0, start - time.monotonic()))
        await asyncio.gather(*(one() for _ in range(count)))
        return answers

    return asyncio.run(open_loop() if clients is None else closed_loop(clients))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) * 1e3 for p in PERCENTILES}


def measure(pool: ProcessPoolExecutor, args: argparse.Namespace, load: str, run: int) -> dict[str, Any]:
    kind, _, number = load.partition("-")
    sizes = Sizes(vocab_size=args.vocab_size, longest=args.longest, scale=args.scale, run=run)
    if kind == "clients":
        workload, clients = mix(sizes), max(1, int(number) // args.processes)
    else:
        workload, clients = make_workload(load, sizes), None
    start = time.monotonic() + 0.5
    parts = [
        pool.submit(serve_part, args.url, args.model, part_of(workload, i, args.processes), clients, start)
        for i in range(args.processes)
    ]
    found = [part.result() for part in parts]
    everything = [answer for part in found for answer in part]
    seconds = max(answer.last for answer in everything) - start
    tokens, disturbing = (
        sum(answer.tokens for answer in everything),
        set(range(len(workload.prompts))[-workload.background :]),
    )
    answers = everything
    if workload.background:  # which runs in an open loop: answers are in the order of their requests
        answers = [
            a for i, part in enumerate(found) for j, a in enumerate(part) if i + j * args.processes not in disturbing
        ]
    return {
        "load": load, "requests": len(everything), "tokens_per_s": tokens / seconds,
        "parts": sum(len(a.gaps) + 1 for a in everything) / tokens,
        "ttft_ms": percentiles([a.first - a.due for a in answers]),
        "itl_ms": percentiles([gap for a in answers for gap in a.gaps]),
        "tpot_ms": percentiles([(a.last - a.first) / (a.tokens - 1) for a in answers]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True, help="of the server, for the record")
    parser.add_argument("--model", required=True, help="as the server knows it")
    parser.add_argument("--load", nargs="+", default=["poisson-10", "poisson-25", "clients-32", "clients-256"])
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests, or of the 20 seconds")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        warm = argparse.Namespace(**vars(args) | {"scale": min(0.1, args.scale)})
        measure(pool, warm, args.load[-1], 1000)
        for run, load in enumerate(args.load):
            rows.append(measure(pool, args, load, run))
            row = rows[-1]
            first, each = ("/".join(f"{value:.2f}" for value in row[key].values()) for key in ("ttft_ms", "tpot_ms"))
            print(
                f"{args.name:12} {load:12} {row['tokens_per_s']:8,.0f} tok/s   first token {first} ms   a token {each} ms",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps({"name": args.name, "scale": args.scale, "rows": rows}))


if __name__ == "__main__":
    main()
