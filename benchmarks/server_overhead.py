"""What HTTP adds to a request: latencies of equal requests through a server and through an engine of this process, in turns.

    python benchmarks/server_overhead.py [MODEL] [--requests 300] [--clients 8] [--out FILE]

Prints p50 and p99 of both in milliseconds, and their differences, for whole answers and for the first token of a stream.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from pymllm_interp import LM, SamplingParams
from pymllm_interp.bench import describe_machine

TOKENS = 8


def measured(call: Callable[[], object], requests: int, clients: int) -> list[float]:
    """Milliseconds of each call, by so many threads."""
    found: list[float] = []

    def run() -> None:
        for _ in range(requests // clients):
            started = time.perf_counter()
            call()
            found.append(1000 * (time.perf_counter() - started))

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def row(name: str, http: list[float], own: list[float]) -> dict[str, Any]:
    """Print a comparison, and return it: milliseconds."""
    (h50, h99), (o50, o99) = (
        (statistics.median(found), statistics.quantiles(found, n=100)[98]) for found in (http, own)
    )
    print(
        f"{name:36} HTTP {h50:7.2f} {h99:7.2f}   engine {o50:7.2f} {o99:7.2f}   added {h50 - o50:6.2f} {h99 - o99:6.2f}"
    )
    return {"name": name, "requests": len(http), "http_p50": h50, "http_p99": h99, "engine_p50": o50, "engine_p99": o99}


def main() -> None:
    """Start a server and an engine, and measure both in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"suite": "server-overhead", "machine": describe_machine(), "results": []}
    command = [sys.executable, "-m", "pymllm_interp.cli", "serve", args.model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"is served at (\S+)", server.stdout.readline())
        assert found is not None
        connections = threading.local()
        host = found[1].removeprefix("http://")
        body = {"prompt": [1, 2, 3, 4], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

        def ask(body: dict[str, Any]) -> HTTPResponse:
            """By the standard library's client: httpx takes 0.8 ms of a core for a request, and would be measured too."""
            if not hasattr(connections, "own"):
                connections.own = HTTPConnection(host, timeout=60)
                connections.own.connect()
                connections.own.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections.own.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connections.own.getresponse()
            assert response.status == 200
            return response

        def streamed() -> None:
            response = ask(body | {"stream": True})
            while not response.readline().startswith(b"data: {"):
                pass
            connections.own.close()
            del connections.own

        with LM(args.model) as lm:

            def first() -> None:
                for _ in lm.stream([1, 2, 3, 4], params):
                    return

            pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                "whole answer": (
                    lambda: ask(body).read(),
                    lambda: lm.submit([1, 2, 3, 4], params).result(),
                ),
                "first token of a stream": (streamed, first),
            }
            for name, (over_http, own) in pairs.items():
                for clients in (1, args.clients):
                    http, engine = list[float](), list[float]()
                    for _ in range(5):  # in turns: the machine's other load meets both
                        http += measured(over_http, args.requests // 5, clients)
                        engine += measured(own, args.requests // 5, clients)
                    record["results"].append(row(f"{name}, {clients} clients", http, engine))
        if args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
