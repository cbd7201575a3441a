"""Attacks on a server that runs, over the loopback interface: it lives, leaves nothing behind, and serves others meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from helpers_server import GREEDY, KEYS, Server, text_of

KEY = f"Authorization: Bearer {KEYS['declared']}\r\n"
JSON = f"Host: x\r\n{KEY}Content-Type: application/json\r\n"
POST = f"POST /v1/completions HTTP/1.1\r\n{JSON}"
BODY = b'{"prompt": "w3 w14 w15", "max_tokens": 8, "temperature": 0}'


def connected(server: Server, data: bytes | str = b"") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=60)
    with contextlib.suppress(ConnectionError):
        found.sendall(data.encode() if isinstance(data, str) else data)
    return found


def heard(connection: socket.socket, seconds: float = 60, most: int = 1 << 22) -> bytes:
    """What comes until the server closes the connection, or nothing comes for so long."""
    found = b""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError):
        while len(found) < most and (part := connection.recv(1 << 16)):
            found += part
    return found


def asked(server: Server, data: bytes | str, seconds: float = 60) -> bytes:
    """The answer to raw bytes that end with `Connection: close`."""
    with contextlib.closing(connected(server, data)) as connection:
        return heard(connection, seconds)


@contextlib.contextmanager
def others_served(server: Server) -> Iterator[None]:
    """Another client's requests are answered, and right, as long as the body runs."""
    wanted, found, over = text_of(server), list[str](), threading.Event()
    waits, files = list[float](), len(os.listdir(f"/proc/{server.process.pid}/fd"))

    def ask() -> None:
        while not over.is_set() or not found:
            began = time.monotonic()
            found.append(text_of(server))
            waits.append(time.monotonic() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert set(found) == {wanted} and max(waits) < 30, (found, waits)
    server.wait_until_idle()
    assert server.process.poll() is None and not [line for line in server.log if "Traceback" in line]
    deadline = time.monotonic() + 60
    while len(os.listdir(f"/proc/{server.process.pid}/fd")) > files + 4:
        assert time.monotonic() < deadline, "files stay open"
        time.sleep(0.05)


# -- connections that are slow, many, or half closed ---------------------------------------------

UNFINISHED = {
    "a head": ("GET /health HTTP/1.1\r\nX: ", b"a"),
    "a body": (POST + "Content-Length: 4000\r\n\r\n", b" "),
    "chunks": (POST + "Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "nothing": ("", b""),
}


@pytest.mark.parametrize("kind", UNFINISHED)
def test_slow_requests_take_nothing_from_others(server: Server, kind: str) -> None:
    start, drip = UNFINISHED[kind]
    with others_served(server), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(contextlib.closing(connected(server, start))) for _ in range(150)]
        for _ in range(4):
            for connection in slow:
                connection.sendall(drip)
            time.sleep(0.1)


@pytest.mark.parametrize("part", [0, 1, len(BODY) // 2, len(BODY)])
def test_streams_that_are_half_closed_end(server: Server, part: int) -> None:
    """By the client, after the head, within the body, or after the request, of plain answers and of streams."""
    with others_served(server), contextlib.ExitStack() as stack:
        for body in (BODY, BODY[:-1] + b', "stream": true, "max_tokens": 60}'):
            head = POST + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            sent = body if part == len(BODY) else body[:part]
            for _ in range(8):
                connection = stack.enter_context(contextlib.closing(connected(server, head.encode() + sent)))
                connection.shutdown(socket.SHUT_WR)
                assert heard(connection)[:12] in (b"", b"HTTP/1.1 200", b"HTTP/1.1 400")


# -- heads and bodies ----------------------------------------------------------------------------


def deflated(levels: int) -> bytes:
    """A few bytes that unpack to gigabytes, or to more of their kind."""
    found = b" " * (1 << 24)
    for _ in range(levels):
        found = zlib.compress(found, 9)
    return found


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x-gzip", "gzip, gzip, gzip", "GZIP"])
def test_packed_bodies_are_refused_and_never_unpacked(server: Server, encoding: str) -> None:
    bomb = deflated(2)
    with others_served(server):
        for head in (POST, f"PUT /v1/interp/vectors/x HTTP/1.1\r\n{JSON}", f"POST /tokenize HTTP/1.1\r\n{JSON}"):
            head += f"Content-Encoding: {encoding}\r\nContent-Length: {len(bomb)}\r\nConnection: close\r\n\r\n"
            answer = asked(server, head.encode() + bomb)
            assert answer.startswith(b"HTTP/1.1 415") and b"without Content-Encoding" in answer
    plain = asked(
        server,
        f"{POST}Content-Encoding: identity\r\nContent-Length: {len(BODY)}\r\nConnection: close\r\n\r\n".encode() + BODY,
    )
    assert plain.startswith(b"HTTP/1.1 200")


HEADS = {
    "many": "GET /health HTTP/1.1\r\n" + "".join(f"X-{i}: y\r\n" for i in range(40_000)),
    "one name": "GET /health HTTP/1.1\r\n" + "Cookie: a=b\r\n" * 40_000,
    "long": "GET /health HTTP/1.1\r\nX: " + "y" * (1 << 20),
    "folded": "GET /health HTTP/1.1\r\nX: y\r\n" + " y\r\n" * 40_000,
    "target": "GET /" + "a" * (1 << 20),
    "query": "GET /health?" + "a=b&" * (1 << 18),
    "method": "A" * (1 << 20),
}


@pytest.mark.parametrize("kind", HEADS)
def test_floods_of_headers_are_refused(server: Server, kind: str) -> None:
    with others_served(server):
        for _ in range(4):
            assert asked(server, HEADS[kind] + "\r\n\r\n")[:12] in (b"", b"HTTP/1.1 431", b"HTTP/1.1 400")


CHUNKED = f"{POST}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
BODIES: dict[str, Callable[[], bytes]] = {
    "large": lambda: CHUNKED + (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 80,
    "tiny": lambda: CHUNKED + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n",
    "negative": lambda: CHUNKED + b"-1\r\n \r\n",
    "announced": lambda: CHUNKED + b"7fffffffffffffff\r\n",
    "overflow": lambda: CHUNKED + b"f" * 40 + b"\r\n",
    "extension": lambda: CHUNKED + b"1;" + b"a" * (1 << 20),
    "trailers": lambda: CHUNKED + b"0\r\n" + b"X: y\r\n" * 100_000,
    "length": lambda: f"{POST}Content-Length: {1 << 62}\r\n\r\n".encode(),
    "both": lambda: f"{POST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + b"0\r\n\r\n",
    "two lengths": lambda: f"{POST}Content-Length: 4\r\nContent-Length: 9\r\n\r\n".encode() + BODY,
    "signed": lambda: f"{POST}Content-Length: +4\r\n\r\n    ".encode(),
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_that_lie_or_do_not_end_are_refused(server: Server, kind: str) -> None:
    data = BODIES[kind]()
    with others_served(server), contextlib.ExitStack() as stack:
        connections = [stack.enter_context(contextlib.closing(connected(server))) for _ in range(3)]
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        for connection in connections:
            assert heard(connection)[:10] in (b"", b"HTTP/1.1 4")


@pytest.mark.parametrize("number", [40, 1000])
def test_pipelined_requests_are_answered_in_order_or_refused(server: Server, number: int) -> None:
    """Those that generate, and cheap ones between."""
    one = f"{POST}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with others_served(server):
        answer = asked(server, (one + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n") * (number // 2) + last)
        assert b"HTTP/1.1 5" not in answer
        if number < 64:
            kinds = [b'"choices"' in part for part in answer.split(b"HTTP/1.1 200")[1:]]
            assert kinds == [True, False] * (number // 2) + [False]


@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/realtime HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        "GET /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        "CONNECT 127.0.0.1:22 HTTP/1.1\r\n",
        "PRI * HTTP/2.0\r\n",
        "GET http://169.254.169.254/latest HTTP/1.1\r\n",
        "TRACE / HTTP/1.1\r\n",
        "\x16\x03\x01\x02",
    ],
    ids=["websocket", "h2c", "connect", "http2", "proxy", "trace", "tls"],
)
def test_other_protocols_are_refused(server: Server, head: str) -> None:
    """Nothing is read as frames afterwards."""
    with others_served(server):
        for _ in range(10):
            with contextlib.closing(connected(server, f"{head}Host: x\r\n{KEY}\r\n")) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(b"\x81\xfe\xff\xff" + b"a" * 1000)
                    connection.shutdown(socket.SHUT_WR)
                answer = heard(connection)
                assert answer[:10] in (b"", b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.1 501"), answer
                assert b"101 Switching" not in answer


# -- names of files --------------------------------------------------------------------------------

UP = "../" * 12
TARGETS = [
    f"{UP}etc/passwd", f"{'%2e%2e%2f' * 12}etc%2fpasswd", f"{'..%2f' * 12}etc%2fpasswd", f"{'%252e%252e%252f' * 12}etc%252fpasswd",
    f"{'..%5c' * 12}etc%5cpasswd", "/etc/passwd", "%2fetc%2fpasswd", "app.js/../../app.py", "app.js%00.py", "..", ".", "%00",
    "file:%2f%2f%2fetc%2fpasswd", f"{'%c0%ae%c0%ae%c0%af' * 12}etc%c0%afpasswd", "~root", "a" * 5000,
]  # fmt: skip
ROUTES = [
    "/static/", "/v1/interp/vectors/", "/v1/interp/activations/", "/v1/responses/", "/v1/models/", "/v1/interp/saes/", "/docs/",
    "/",
]  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_no_path_names_a_file_of_the_machine(server: Server, route: str) -> None:
    with others_served(server):
        for target in TARGETS:
            for method in ("GET", "DELETE", "PUT"):
                answer = asked(
                    server, f"{method} {route}{target} HTTP/1.1\r\n{JSON}Content-Length: 0\r\nConnection: close\r\n\r\n"
                )
                ours = target in ("", ".") and answer.startswith(b"HTTP/1.1 200")
                assert ours or answer.startswith(b"HTTP/1.1 4"), (method, target, answer[:200])
                assert b"root:x:" not in answer and b"import" not in answer


def test_names_in_bodies_are_no_files(server: Server, tmp_path) -> None:
    """Of models, adapters, vectors, tools and stored responses. A folder is an operator's to name, and no link leads out of it."""
    link = tmp_path / "adapter"
    link.mkdir()
    (link / "adapter_config.json").symlink_to("/etc/passwd")
    (link / "adapter_model.safetensors").symlink_to("/dev/zero")
    names = [f"{UP}etc/passwd", "/etc/passwd", "file:///etc/passwd", "/dev/zero", str(link), "x\0y", "."]
    with others_served(server), server.client("declared") as client, server.client("code") as operator:
        for name in names:
            for body in (
                {**GREEDY, "model": name},
                {**GREEDY, "interventions": [{"op": "steer", "site": "resid_post.0", "vector": name}]},
                {**GREEDY, "interventions": [{"op": "steer", "site": "resid_post.0", "vector": {"name": name}}]},
                {**GREEDY, "monitors": [{"site": "resid_post.0", "probe": name, "threshold": 1.0}]},
                {**GREEDY, "capture": [name]},
            ):
                answer = client.post("/v1/completions", json=body)
                served = name == "" and answer.status_code == 200
                assert served or 400 <= answer.status_code < 500, (body, answer.text)
                assert "root:x:" not in answer.text
            stored = {"model": "x", "input": "w3", "previous_response_id": name}
            assert 400 <= client.post("/v1/responses", json=stored).status_code < 500
            load = {"lora_name": "a", "lora_path": name}
            assert client.post("/v1/load_lora_adapter", json=load).status_code == 403
            answer = operator.post("/v1/load_lora_adapter", json=load)
            assert 400 <= answer.status_code < 500 and "root:x:" not in answer.text, answer.text
            load = {"lora_name": name, "lora_path": str(tmp_path)}
            assert 400 <= operator.post("/v1/load_lora_adapter", json=load).status_code < 500
