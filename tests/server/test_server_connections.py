"""Connections: idle ones, unfinished heads and large heads are closed, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from helpers_server import Server, serving
from starlette.responses import Response, StreamingResponse

from pymllm_interp.server.http import connections
from pymllm_interp.server.http.connections import OutOfFiles, http_config, with_room_for_files
from pymllm_interp.server.serve import listen
from pymllm_interp.server.settings import ServeLimits

GET = b"GET /hello HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
app = FastAPI()
gate, begun = threading.Event(), threading.Semaphore(0)


@app.get("/hello")
async def hello() -> str:
    return "hello"


@app.post("/hello")
async def twice(body: str = "") -> str:
    return "hello"


@app.get("/slow")
async def slow() -> str:
    begun.release()
    await asyncio.to_thread(gate.wait, 600)
    return "hello"


@app.post("/body")
async def whole(request: Request) -> int:
    return len(await request.body())


@app.get("/endless")
async def endless() -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        begun.release()
        while True:
            yield bytes(1 << 16)
            await asyncio.sleep(0)

    return StreamingResponse(parts())


@app.get("/large")
async def large() -> Response:
    begun.release()
    return Response(bytes(1 << 25))


servers: list[uvicorn.Server] = []


@contextlib.contextmanager
def listening(handler: OutOfFiles | None = None, **limits: float) -> Iterator[tuple[str, int]]:
    """The address of a server with these limits, which runs on a thread."""
    bound = listen("127.0.0.1", 0)
    server, loop = uvicorn.Server(http_config(app, ServeLimits(**limits))), asyncio.new_event_loop()
    loop.set_exception_handler(handler)
    servers[:] = [server]
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[bound]),))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.001)
        yield bound.getsockname()
    finally:
        gate.set()
        server.should_exit = True
        thread.join()
        loop.close()
        bound.close()
        gate.clear()
        while begun.acquire(blocking=False):  # of a slow request that its test did not wait for
            pass


def connect(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    found = socket.create_connection(address, timeout=600)
    found.sendall(data)
    return found


def read(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def answered(connection: socket.socket) -> bool:
    """Whether a request on this connection is answered with "hello"."""
    connection.sendall(GET)
    return hears_hello(connection)


def hears_hello(connection: socket.socket) -> bool:
    found = b""
    while not found.endswith(b'"hello"') and (part := connection.recv(1 << 16)):
        found += part
    return found.endswith(b'"hello"')


@pytest.mark.parametrize("first", [b"", GET], ids=["no request", "after a request"])
def test_an_idle_connection_is_closed(first):
    with listening(idle_seconds=0.3) as address, connect(address, first) as idle:
        assert read(idle).count(b"hello") == bool(first)


@pytest.mark.parametrize(
    ("start", "drip"), [(b"", b"\r\n"), (GET[:-2], b"X: 1\r\n"), (GET[:-2] + b"X: ", b"1"), (GET, b"\r\n")]
)
def test_an_unfinished_head_is_closed_however_often_a_part_of_it_comes(start, drip):
    with listening(idle_seconds=600, header_seconds=0.5) as address, connect(address, start) as late:
        late.settimeout(0.05)
        found = b""
        for _ in range(600):
            try:
                part = late.recv(1 << 16)
            except TimeoutError:
                with contextlib.suppress(OSError):
                    late.sendall(drip)
                continue
            except ConnectionResetError:
                break
            if not part:
                break
            found += part
        else:
            raise AssertionError("the connection was not closed")
        assert b" 408 " in found
        with connect(address) as other:
            assert answered(other)


HEADS = {
    "line": (b"GET /", b"a"),
    "name": (b"GET / HTTP/1.1\r\n", b"a"),
    "value": (b"GET / HTTP/1.1\r\nX: ", b"a"),
    "many": (b"GET / HTTP/1.1\r\n", b"X: 1\r\n"),
    "blank": (b"", b"\r\n"),
    "chunk": (b"POST /hello HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a"),
    "trailer": (b"POST /hello HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_does_not_end_is_refused_by_its_size(kind):
    """So is what a chunked body has beside its data."""
    start, more = HEADS[kind]
    with listening(max_header_bytes=4000) as address, connect(address, start) as large:
        sent, data = 0, more * (8000 // len(more))
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                large.sendall(data)
                sent += len(data)
                time.sleep(0)
        assert sent < 8_000_000
        if kind in ("line", "value", "many"):
            assert b" 431 " in read(large) or sent > 8000  # the answer is lost where more was sent


def test_a_head_that_ends_is_refused_too_and_a_smaller_one_is_answered():
    with listening(max_header_bytes=4000) as address:
        with connect(address, b"GET /hello HTTP/1.1\r\nX: " + bytes(5000).replace(b"\0", b"a") + b"\r\n\r\n") as large:
            answer = read(large)
            assert b" 431 " in answer and b"max_header_bytes" in answer
        with connect(address, b"GET /hello HTTP/1.1\r\nConnection: close\r\nX: " + b"a" * 3000 + b"\r\n\r\n") as small:
            assert read(small).endswith(b'"hello"')


def test_a_large_body_in_small_chunks_is_no_head():
    with listening(max_header_bytes=1000) as address:
        chunks = (b"a" for _ in range(5000))
        assert httpx.post(f"http://127.0.0.1:{address[1]}/hello", content=chunks, timeout=600).status_code == 200


def test_requests_that_wait_behind_another_one_are_bounded():
    with listening() as address, connect(address, SLOW + GET * 2000) as many:
        assert read(many) == b""
    with (
        listening() as address,
        connect(address, GET * 20 + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) as few,
    ):
        assert read(few).count(b"hello") == 21


def test_the_connection_that_rested_longest_makes_room_for_a_new_one():
    with listening(max_connections=3) as address, contextlib.ExitStack() as stack:
        resting = [stack.enter_context(connect(address)) for _ in range(3)]
        assert all(answered(connection) for connection in resting)
        assert answered(resting[0])  # so that the second one has rested longest
        new = stack.enter_context(connect(address))
        assert answered(new) and read(resting[1]) == b""
        assert answered(resting[0]) and answered(resting[2])


def test_a_connection_with_a_running_request_is_not_closed_for_a_new_one():
    with listening(max_connections=2) as address, contextlib.ExitStack() as stack:
        running = [stack.enter_context(connect(address, SLOW)) for _ in range(2)]
        assert all(begun.acquire(timeout=600) for _ in running)
        for _ in range(3):
            answer = read(stack.enter_context(connect(address)))
            assert b" 503 " in answer and b"max_connections" in answer
        gate.set()
        for connection in running:
            assert hears_hello(connection)


def posted(path: bytes, length: int) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % (path, length)


def test_a_connection_whose_body_has_not_come_makes_room_for_a_new_one():
    """Its client may send a byte a minute, for as long as it likes."""
    with listening(max_connections=3) as address, contextlib.ExitStack() as stack:
        late = [stack.enter_context(connect(address, posted(b"/body", 10) + b"1")) for _ in range(3)]
        while len(servers[0].server_state.tasks) < 3:
            time.sleep(0.001)
        new = stack.enter_context(connect(address))
        assert answered(new) and read(late[0]) == b""
        late[1].sendall(b"234567890")
        assert late[1].recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_connection_that_was_answered_before_its_body_came_goes_on():
    with listening(header_seconds=0.3, idle_seconds=600) as address, connect(address, posted(b"/hello", 10)) as early:
        assert hears_hello(early)
        early.sendall(b"1234567890")
        time.sleep(1)
        assert answered(early)


def test_a_client_that_does_not_read_a_stream_makes_room_for_a_new_one():
    with listening(max_connections=1) as address, connect(address, GET.replace(b"hello", b"endless")) as deaf:
        assert begun.acquire(timeout=600)
        connection: Any = next(iter(servers[0].server_state.connections))
        while not connection.flow.write_paused:
            time.sleep(0.001)
        with connect(address) as new:
            assert answered(new)
        assert read(deaf).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", [b"endless", b"large"])
def test_a_client_that_does_not_read_is_disconnected_in_the_end(path, monkeypatch):
    monkeypatch.setattr(connections, "READ_SECONDS", 0.3)
    with listening(idle_seconds=0.1) as address:
        with connect(address, GET.replace(b"hello", path)) as deaf:
            assert begun.acquire(timeout=600)
            while servers[0].server_state.connections:
                time.sleep(0.01)
            assert len(read(deaf)) < 1 << 25
        with connect(address) as other:
            assert answered(other)


def test_a_client_that_reads_slowly_has_all_of_it(monkeypatch):
    monkeypatch.setattr(connections, "READ_SECONDS", 0.5)
    request = GET.replace(b"hello", b"large").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with listening(idle_seconds=0.1) as address, connect(address, request) as slow_reader:
        found = 0
        while part := slow_reader.recv(1 << 21):
            found += len(part)
            time.sleep(0.05)
        assert found > 1 << 25 and begun.acquire(timeout=600)


def test_a_full_table_of_files_is_reported_once(caplog):
    caplog.set_level(logging.INFO)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    handler = OutOfFiles()
    with listening(handler, idle_seconds=0.5) as address, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(12)]
        most = len(os.listdir("/proc/self/fd")) + 5
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        try:
            for client in clients:
                client.settimeout(30)
                client.connect(address)
            assert all(read(client) == b"" for client in clients)  # each is accepted in the end, and was idle
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with connect(address) as other:
            assert answered(other)
    assert len([record for record in caplog.records if "can be accepted" in record.getMessage()]) == 1
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_connections_leave_room_for_other_files(caplog):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 900), before[1]))
        assert with_room_for_files(1000) == (1000 if before[1] >= 1512 else before[1] - 512)
        assert with_room_for_files(1 << 40) == before[1] - 512
        assert "open files" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def rss(pid: int) -> int:
    """Bytes of a process's memory."""
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def generates(server: Server) -> None:
    with server.client() as client:
        for _ in range(3):
            answer = client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 2})
            assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_ten_thousand_idle_connections_and_heads_of_100_mb_lock_nobody_out(served_folder, tmp_path):
    """The connections are 400 more than the server may have files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(before[1] - 200, 10_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            serving(
                served_folder, "--allow-code-from", "code", "--max-connections", "100000", "--idle-seconds", "600",
                folder=tmp_path, files=files - 400,
            )
        )  # fmt: skip
        host, port = server.url.removeprefix("http://").split(":")
        generates(server)
        start = rss(server.process.pid)
        for number in range(files):
            stack.enter_context(contextlib.closing(connect((host, int(port)), b"G" * (number % 2))))
            if number % 2000 == 0:
                generates(server)
        generates(server)
        held = rss(server.process.pid)
        assert held - start < 400 << 20  # some 30 kB a connection
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < files - 400

        def send() -> None:
            with contextlib.suppress(OSError), connect((host, int(port)), b"GET / HTTP/1.1\r\nX: ") as large:
                for _ in range(100):
                    large.sendall(b"a" * 1_000_000)

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        generates(server)
        for thread in threads:
            thread.join()
        generates(server)
        assert rss(server.process.pid) - held < 50 << 20
        assert len([line for line in server.log if "open files" in line or "accepted" in line]) <= 2
