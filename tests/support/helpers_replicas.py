"""Replicas and fronts of tests, without Ray: engine processes that are started again when they end, and fronts over them."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq.asyncio
from helpers_forks import forking
from helpers_server import KEYS, SECONDS, Server, _read

from pymllm_interp.server.engines.replica_process import ReplicaProcess, ReplicaSettings
from pymllm_interp.server.engines.roster import LinkKeys, Replica
from pymllm_interp.server.front import greeting, roster_line
from pymllm_interp.server.http.trust import Key, Keys, Trust
from pymllm_interp.server.settings import ServeLimits, ServeSettings
from pymllm_interp.wire import messages as m

SILENCE = 3.0
"""Seconds that a replica or a front may be silent."""


class Replicas:
    """Engine processes by name, on an event loop of a thread of their own.

    Attributes:
        starts: how often each was started.
    """

    def __init__(self, model: str | Path, count: int, saes: dict[str, str] | None = None, **limits: Any) -> None:
        self.limits = ServeLimits(**{"replica_silence_seconds": SILENCE, **limits})
        self.keys = LinkKeys.new()
        self._settings = ReplicaSettings(
            model={"model": str(model), "dtype": "float32", "saes": saes or {}},
            server={"device": "cpu", "trace_step_timeout": 60.0},
            keys=self.keys,
            limits=self.limits,
        )
        self.processes: dict[str, ReplicaProcess] = {}
        self.live: dict[str, Replica] = {}
        self.draining: set[str] = set()
        self.stopped: set[str] = set()
        self.starts: dict[str, int] = {}
        self.fronts: list[Server] = []
        self._tasks: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        for number in range(count):
            self.add(f"r{number}")
        self.wait_for(lambda: len(self.live) == count)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def add(self, name: str, **settings: Any) -> None:
        own = ReplicaSettings(**{**vars(self._settings), **settings})

        async def begin() -> None:
            self._tasks[name] = asyncio.create_task(self._keep(name, own))

        self.run(begin())

    def remove(self, name: str) -> None:
        async def end() -> None:
            task = self._tasks.pop(name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.run(end())

    async def _keep(self, name: str, settings: ReplicaSettings) -> None:
        while True:
            process = self.processes[name] = ReplicaProcess(settings, name, "127.0.0.1")
            try:
                self.live[name] = await process.start()
                self.starts[name] = self.starts.get(name, 0) + 1
                self.tell()
                await process.wait()
            finally:
                self.live.pop(name, None)
                self.tell()
                await process.close()

    def tell(self) -> None:
        """Tell all fronts which replicas there are."""
        found = {name: Replica.down(name, False) for name in self._tasks if name not in self.stopped} | self.live
        line = roster_line([replace(one, draining=name in self.draining) for name, one in found.items()])
        for front in self.fronts:
            if front.process.poll() is None:
                front.process.stdin.write(line)
                front.process.stdin.flush()

    def drain(self, name: str) -> None:
        self.draining.add(name)
        self.tell()

    def pid(self, name: str) -> int:
        process = self.processes[name].process
        assert process is not None
        return process.pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a replica's engine process. SIGKILL: returns once the process is known to be gone."""
        before = self.live.get(name)
        os.kill(self.pid(name), number)
        if number == signal.SIGKILL:
            self.wait_for(lambda: self.live.get(name) is not before)

    def front(self, name: str = "served", **more: Any) -> Server:
        """Another front, once it answers and all replicas are up for it. `more` are fields of its `ServeSettings`."""
        trust = {"plain": Trust.PLAIN, "code": Trust.CODE}
        keys = Keys(
            [Key.of(who, key, trust.get(who, Trust.DECLARED), operator=who == "code") for who, key in KEYS.items()]
        )
        settings = ServeSettings(model={}, server={}, name=name, port=0, keys=keys, limits=self.limits, **more)
        process = subprocess.Popen(
            [sys.executable, "-m", "pymllm_interp.server.front"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(greeting(settings, self.keys))
        front = Server("", process, queue.Queue())  # pyright: ignore[reportArgumentType]
        for stream, into in ((process.stdout, front.lines), (process.stderr, queue.Queue())):
            text = (line.decode() for line in stream)
            threading.Thread(target=_read, args=(text, into, front.log), daemon=True).start()
        self.fronts.append(front)
        self.tell()
        deadline = time.monotonic() + SECONDS
        while not front.url:
            assert process.poll() is None and time.monotonic() < deadline, "\n".join(front.log)
            try:
                found = re.search(r"is served at (https?://\S+)", front.lines.get(timeout=0.2))
            except queue.Empty:
                continue
            front.url = found[1] if found else ""
        self.wait_for(lambda: front.metric("replica_up") == len(self.live))
        return front

    def wait_for(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            failed = [task for task in self._tasks.values() if task.done() and not task.cancelled()]
            assert not failed, failed[0].exception()
            assert time.monotonic() < deadline, [front.log[-20:] for front in self.fronts]
            time.sleep(0.02)

    def wait_until_up(self, front: Server) -> None:
        """All replicas live, and the front's links to them are up."""
        count = len(self._tasks)
        self.wait_for(lambda: len(self.live) == count and front.metric("replica_up") == count)

    def close(self) -> None:
        for front in self.fronts:
            if front.process.poll() is None:
                front.process.send_signal(signal.SIGCONT)
                front.end()
            for stream in (front.process.stdin, front.process.stdout, front.process.stderr):
                stream.close()
        for name in list(self._tasks):
            self.signal_quietly(name, signal.SIGCONT)
            self.remove(name)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def signal_quietly(self, name: str, number: signal.Signals) -> None:
        try:
            self.signal(name, number)
        except (ProcessLookupError, AssertionError):
            pass


@contextmanager
def replicas_of(
    model: str | Path, count: int, saes: dict[str, str] | None = None, **limits: Any
) -> Iterator[Replicas]:  # fmt: skip
    """Replicas, until the end of the body. They and their fronts are forked (helpers_forks.py)."""
    with forking():
        found = Replicas(model, count, saes, **limits)
        try:
            yield found
        finally:
            found.close()


async def greeted(address: str, server_key: str, keys: LinkKeys, curve: bool, seconds: float) -> list[bytes]:
    """What a replica says to a `Hello`, with these keys; nothing within so many seconds: an empty list."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        if curve:
            socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
            socket.curve_serverkey = server_key.encode()
        socket.connect(address)
        socket.send(m.encoder.encode(m.Hello(0)))
        return [await asyncio.wait_for(socket.recv(), seconds)]
    except TimeoutError:
        return []
    finally:
        socket.close(linger=0)
        context.destroy(linger=0)
