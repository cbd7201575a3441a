"""Signals to a server and its engine process while the model loads, and while a server that is to end lets its requests end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import httpx
import pytest
from helpers_forks import children_of
from helpers_processes import SECONDS, engine_of, is_gone, starting, wait_for
from helpers_server import GREEDY, Server, serving

from pymllm_interp.server.engines.liveness import Liveness, WatchedEngine
from pymllm_interp.server.engines.start import _watch
from pymllm_interp.server.settings import ServeLimits

LONG = {"prompt": "w3 w14 w15", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
BEATS = "import os, time\nwhile True: os.write(0, b'.'); time.sleep(0.02)"


# -- while the model loads ----------------------------------------------------------------------


def test_a_second_sigterm_while_the_model_loads_does_not_cut_the_end_of_the_first(served_folder, tmp_path):
    with starting(served_folder, tmp_path) as process:
        pid = engine_of(process, "import")  # large enough to take some milliseconds to end
        for _ in range(20):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert process.wait(SECONDS) == 0
        assert "Traceback" not in process.stderr.read()
        assert is_gone(pid) and not list(tmp_path.glob("pymllm-interp-*"))


def test_an_engine_that_is_killed_while_the_model_loads_ends_the_server_with_one_line(served_folder, tmp_path):
    uds = tmp_path / "socket"
    with starting(served_folder, tmp_path, "--uds", str(uds)) as process:
        os.kill(engine_of(process, "first line"), signal.SIGKILL)
        assert process.wait(SECONDS) == 2
        last = process.stderr.read().strip().splitlines()[-1]
        assert "the engine process ended with status -9 before it was ready" in last
        assert process.stdout.read() == ""
        assert not uds.exists() and not list(tmp_path.glob("pymllm-interp-*"))


@pytest.mark.slow
def test_processes_that_are_stopped_while_the_model_loads_go_on(served_folder, tmp_path):
    """The engine for less than `engine_start_seconds`, the server for longer."""
    with starting(served_folder, tmp_path, "--engine-start-seconds", "8") as process:
        pid = engine_of(process, "import")
        for stopped, seconds in ((pid, 1), (process.pid, 10)):
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(stopped, signal.SIGCONT)
        url = process.stdout.readline().partition("served at ")[2].split()[0]
        assert httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200
        assert children_of(process.pid) == [pid]


def test_a_start_is_not_given_up_because_this_process_did_not_run():
    """As where SIGSTOP reached the server alone. An engine that is stopped is ended."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", BEATS, stdin=theirs.fileno())
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        await reader.read(1)
        watcher = asyncio.create_task(_watch(child, reader, 0.8))
        await asyncio.sleep(0.1)
        time.sleep(1)
        await asyncio.sleep(0.1)
        assert child.returncode is None and not watcher.done()
        child.send_signal(signal.SIGSTOP)
        assert await asyncio.wait_for(child.wait(), SECONDS) == -signal.SIGKILL
        await watcher
        writer.close()

    asyncio.run(run())


# -- while it serves ----------------------------------------------------------------------------


def test_a_step_is_not_given_up_because_this_process_did_not_run():
    """As where SIGSTOP reached server and engine, in the midst of a step."""

    class Engine(WatchedEngine):
        info: dict[str, Any] | None = None
        ready, killed = True, False

        async def ask(self, make: Any) -> Any:
            return {"busy": True, "progress": 7, "in_block": False}

        def kill(self) -> None:
            self.killed = True

    async def run() -> None:
        engine = Engine()
        task = asyncio.create_task(Liveness(engine, ServeLimits(engine_step_seconds=1.0)).watch())
        await asyncio.sleep(0.3)
        time.sleep(1.2)
        await asyncio.sleep(0.4)
        assert not engine.killed
        while not engine.killed:
            await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(run())


def test_an_engine_that_was_started_again_within_a_pause_is_not_stuck():
    """Restarts of small models take less than the pause between two questions."""

    class Engine(WatchedEngine):
        info: dict[str, Any] | None = None
        ready = True

        async def start(self) -> None:
            self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")

        async def ask(self, make: Any) -> Any:
            if self.process is first:
                await asyncio.sleep(600)
            return {"busy": False, "progress": 0, "in_block": False}

    async def run() -> None:
        nonlocal first
        engine = Engine()
        await engine.start()
        first = engine.process
        liveness = Liveness(engine, ServeLimits(engine_message_seconds=0.4))
        task = asyncio.create_task(liveness.watch())
        assert first is not None and await asyncio.wait_for(first.wait(), SECONDS) == -signal.SIGKILL
        await engine.start()
        assert not liveness.stuck
        await asyncio.sleep(0.5)
        assert not liveness.stuck
        task.cancel()
        engine.kill()
        assert engine.process is not None
        await engine.process.wait()

    first: asyncio.subprocess.Process | None = None
    asyncio.run(run())


def test_a_sigterm_while_an_engine_is_started_again_leaves_nothing_behind(served_folder, tmp_path):
    with starting(served_folder, tmp_path) as process:
        first = engine_of(process, "ready")
        os.kill(first, signal.SIGKILL)
        (second,) = wait_for(lambda: [pid for pid in children_of(process.pid) if pid != first])
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert "Traceback" not in process.stderr.read()
        wait_for(lambda: is_gone(second))
        assert not list(tmp_path.glob("pymllm-interp-*"))


# -- while requests end -------------------------------------------------------------------------


class Asked(threading.Thread):
    """A streamed request.

    Attributes:
        end: the last lines, or the error of the connection.
    """

    def __init__(self, server: Server, first: threading.Event) -> None:
        super().__init__()
        self._server, self._first, self.end = server, first, ""

    def run(self) -> None:
        lines: list[str] = []
        try:
            with (
                self._server.client() as client,
                client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream,
            ):
                for line in stream.iter_lines():
                    lines += [line] if line else []
                    self._first.set()
                self.end = "\n".join(lines[-3:])
        except httpx.TransportError as error:
            self.end = repr(error)


def status_of(server: Server) -> str:
    return httpx.get(f"{server.url}/health", timeout=SECONDS).json()["status"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["engine stops", "engine goes on", "engine is killed", "server stops", "server is killed"]
)
def test_a_signal_while_requests_end_leaves_an_answer_and_nothing_else(served_folder, tmp_path, monkeypatch, what):
    """The engine process is stopped in the midst of a request, and the server told to end; what follows differs."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    shared = set(os.listdir("/dev/shm"))
    options = ["--drain-seconds", "6", "--engine-message-seconds", "100"]
    with serving(served_folder, *options, folder=tmp_path) as server:
        first, pid = threading.Event(), server.engine_pid()
        asked = Asked(server, first)
        asked.start()
        assert first.wait(SECONDS)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: status_of(server) == "ending")
        with server.client() as client:
            late = client.post("/v1/completions", json=GREEDY)
        assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
        if what == "engine is killed":
            os.kill(pid, signal.SIGKILL)
        elif what == "server is killed":
            server.process.kill()
        elif what == "engine goes on":
            os.kill(pid, signal.SIGCONT)
        elif what == "server stops":
            server.process.send_signal(signal.SIGSTOP)
            os.kill(pid, signal.SIGCONT)
            time.sleep(2)
            server.process.send_signal(signal.SIGCONT)
        status = server.process.wait(SECONDS)
        asked.join(SECONDS)
        assert time.monotonic() - began < 40, "a drain of 6 s, and 10 s for the engine, on a busy machine"
        wait_for(lambda: is_gone(pid))
        if what == "server is killed":
            assert status == -signal.SIGKILL and "Error" in asked.end
            wait_for(lambda: not list(temporary.iterdir()))
        else:
            assert status == 0, server.log[-20:]
            whole = what in ("engine goes on", "server stops")
            assert asked.end.endswith("data: [DONE]")
            assert '"finish_reason":"length"' in asked.end if whole else "engine_unavailable" in asked.end, asked.end
            assert not list(temporary.iterdir()), list(temporary.iterdir())
    assert set(os.listdir("/dev/shm")) <= shared
