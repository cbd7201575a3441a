"""A Ray cluster of this machine for tests, harvests on it, and a served cluster's commands, loads and processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from helpers_server import SECONDS, Server

from pymllm_interp.harvest.reader import open_harvest

NAME = "tests"
MARK = f"PYMLLM_TEST_CLUSTER={os.getpid()}".encode()
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all ports on the loopback interface
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(sys.path), "PYMLLM_TEST_CLUSTER": str(os.getpid()),
}  # fmt: skip
QUICK = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3, "prestart_worker_first_driver": False,
}  # fmt: skip
"""A node that is lost is noticed within seconds. No workers are started before they are needed."""
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


def is_ours(pid: str, title: bytes) -> bool:
    """Whether it is a process of this file's Ray cluster with such a title: another cluster may run on the machine.

    Ray writes the title over a worker's environment; the raylet that started it has its own.
    """
    try:
        if title not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return MARK in Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- harvests ------------------------------------------------------------------------------------

HARVEST = """
import sys
from pathlib import Path
from pymllm_interp import LM

lm = LM(sys.argv[1], dtype="float32", device="cpu")
lm.harvest([Path(sys.argv[2])], capture=["resid_post.*"], out=sys.argv[3], max_length=32, too_long="truncate",
           cluster="auto", workers=2, unit_documents=5, progress=False)
"""


def equal(one: Path, other: Path) -> None:
    a, b = open_harvest(one), open_harvest(other)
    assert a.manifest["complete"] and b.manifest["complete"]
    assert torch.equal(a.document_ids(), b.document_ids()) and torch.equal(a.positions(), b.positions())
    for site in a.sites:
        states = a[site][:]
        assert ((b[site][:] - states).norm(dim=-1) <= 1e-5 * states.norm(dim=-1)).all()
    named = {shard.path.name for shard in b.shards}
    assert {path.name for path in other.iterdir()} - named <= {"manifest.json", "plan.json", "documents.jsonl", "units"}


def workers() -> list[int]:
    """Process ids of harvests' workers."""
    return [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if is_ours(pid, b"ray::HarvestWorker")]


# -- serving -------------------------------------------------------------------------------------


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """`pymllm-interp cluster ...`, in a process of its own: what it starts outlives it."""
    named = () if "--name" in args else ("--name", NAME)
    line = [sys.executable, "-m", "pymllm_interp.cli", "cluster", *args, *named]
    return subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)


def ask(actor: Any, method: str) -> Any:
    """An answer of the director, also where it is being started again: it may have been on a node that is lost."""
    import ray

    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return ray.get(getattr(actor, method).remote(), timeout=SECONDS)
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def serving(cluster: Any, count: int = 2) -> dict[str, Any]:
    """Status of the replicas, once so many serve, for the fronts too."""
    front = front_of(cluster)
    wait_for(
        lambda: (
            sum(bool(one["address"]) for one in ask(cluster, "roster") or ()) == count
            and front.metric("replica_up") == count
        )
    )
    return ask(cluster, "status")["replicas"]


def front_of(cluster: Any) -> Server:
    wait_for(lambda: bool(ask(cluster, "urls")))
    return Server(ask(cluster, "urls")[0], None, None)  # pyright: ignore[reportArgumentType]


class Load:
    """Short requests, until its end; all of them must be answered."""

    def __init__(self, url: str) -> None:
        self.done, self.failed, self._over = 0, list[str](), threading.Event()
        self._server = Server(url, None, None)  # pyright: ignore[reportArgumentType]
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        rng = random.Random(1)
        with self._server.client(None) as client:
            while not self._over.is_set():
                body = {"prompt": [rng.randrange(90) for _ in range(5)], "max_tokens": 4, "ignore_eos": True}
                try:
                    answer = client.post("/v1/completions", json=body)
                except httpx.TransportError as error:
                    self.failed.append(repr(error))
                    return
                self.failed += [answer.text] if answer.status_code != 200 else []
                self.done += 1

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        deadline = time.monotonic() + SECONDS
        while self.done <= 3 and not self.failed and time.monotonic() < deadline:
            time.sleep(0.05)
        self._over.set()
        self._thread.join()
        assert self.done > 3 and not self.failed, self.failed[:3]


class Streams:
    """A stream at each front, begun before the body; all of them must come to their end."""

    def __init__(self, urls: list[str]) -> None:
        self._urls, self._ends = urls, dict[str, str]()
        self._begun = threading.Barrier(len(urls) + 1)
        self._threads = [threading.Thread(target=self._read, args=(url,)) for url in urls]

    def _read(self, url: str) -> None:
        body = {"prompt": "w1 w2", "max_tokens": 100, "ignore_eos": True, "stream": True}
        server = Server(url, None, None)  # pyright: ignore[reportArgumentType]
        with server.client(None) as client, client.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            self._begun.wait(SECONDS)
            self._ends[url] = list(lines)[-1]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        self._begun.wait(SECONDS)

    def __exit__(self, *exc: object) -> None:
        for thread in self._threads:
            thread.join(SECONDS)
        assert self._ends == dict.fromkeys(self._urls, "data: [DONE]")


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def engine_of(keeper: int) -> int:
    (found,) = [
        pid for pid in children(keeper) if b"pymllm_interp.server.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def answers(cluster: Any) -> bool:
    import ray

    try:
        return bool(ray.get(cluster.urls.remote(), timeout=SECONDS))
    except ray.exceptions.RayError:
        return False
