"""The edge of the server: what clients learn of it, and what sizes and numbers of theirs cost before they are checked."""

from __future__ import annotations

import json
import pickle
import re
import socket
import sys
import traceback
import tracemalloc

import httpx
import pytest
import torch
from helpers_browser import CHROMIUM, browsing
from helpers_server import KEYS, Server, serving
from safetensors.torch import save

from pymllm_interp import LM
from pymllm_interp.client.remote.remote_errors import exception_of
from pymllm_interp.hooks.traces.nnsight_compat import load_function
from pymllm_interp.wire.failures import MOST_FRAMES, Failure, failure_of
from pymllm_interp.wire.trace_payload import load

# -- vectors on their way ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight(served_folder, tmp_path_factory):
    options = ["--max-vectors", "3", "--max-vector-bytes", "2000", "--allow-code-from", "code"]
    with serving(served_folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


def begin_upload(server: Server, name: str, head: str) -> socket.socket:
    """A PUT whose body does not come."""
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=600)
    found.sendall(
        f"PUT /v1/interp/vectors/{name} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEYS['declared']}\r\n"
        f"Expect: 100-continue\r\n{head}\r\n\r\n".encode()
    )
    assert b" 100 " in found.recv(1000)  # the route waits for the body
    return found


def put(server: Server, name: str, content, key: str = "declared") -> httpx.Response:
    with server.client(key) as client:
        return client.put(f"/v1/interp/vectors/{name}", content=content)


def client_deletes(server: Server, name: str) -> int:
    with server.client("declared") as client:
        return client.delete(f"/v1/interp/vectors/{name}").status_code


def wait_until_stored(server: Server, name: str, content: bytes) -> None:
    """What an upload that broke had reserved is free again, at some time."""
    for _ in range(600):
        if (answer := put(server, name, content)).status_code == 200:
            return
    raise AssertionError(answer.text)


def test_uploads_at_the_same_time_share_the_limits(tight: Server):
    vector = save({f"layer.{layer}": torch.ones(72) for layer in range(2)})  # some 760 bytes
    for head, sent in (("Content-Length: 1500", b""), ("Transfer-Encoding: chunked", b"5dc\r\n" + bytes(1500))):
        with begin_upload(tight, "slow", head) as slow:
            slow.sendall(sent)
            for _ in range(600):  # the chunk is on its way
                refused = put(tight, "other", vector)
                if refused.status_code != 200:
                    break
            assert refused.status_code == 413 and "max_vector_bytes" in refused.json()["error"]["message"]
            assert put(tight, "other", vector, "other").status_code == 200  # each key has its own
        wait_until_stored(tight, "other", vector)
        assert client_deletes(tight, "other") == 200
    with begin_upload(tight, "a", "Content-Length: 10"), begin_upload(tight, "b", "Content-Length: 10") as b:
        assert put(tight, "other", vector).status_code == 200
        many = put(tight, "c", vector)
        assert many.status_code == 429 and "max_vectors" in many.json()["error"]["message"]
        b.sendall(b"0123456789")
        assert b" 400 " in b.recv(1000)  # no safetensors file; its reservation is over
        assert client_deletes(tight, "other") == 200
        assert put(tight, "c", vector).status_code == 200
    assert client_deletes(tight, "c") == 200


def test_an_upload_of_unknown_length_ends_at_the_limit(tight: Server):
    sent = []

    def parts():
        for number in range(10_000):
            sent.append(number)
            yield bytes(1000)

    try:
        answer = put(tight, "endless", parts())
    except httpx.TransportError:  # the server closed the connection while more was sent
        return
    assert answer.status_code == 413 and "max_vector_bytes" in answer.json()["error"]["message"]


# -- what clients learn of the server ---------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions/", "/docs/", "/v1/interp/vectors/", "//evil.com/"])
def test_no_answer_leads_to_a_host_that_the_client_named(server: Server, path):
    with server.client(headers={"Host": "evil.com"}) as client:
        for method in ("GET", "POST"):
            answer = client.request(method, f"{server.url}{path}", headers={"Content-Type": "application/json"})
            assert (
                answer.status_code >= 400 and "location" not in answer.headers and "evil.com" not in str(answer.headers)
            )


def test_an_error_shows_paths_of_the_clients_files_only(server: Server):
    with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm:
        with pytest.raises(json.JSONDecodeError.__mro__[1]) as failure, lm.trace("w1"):
            lm.model.layers[0].output.save()
            __import__("json").loads("{")  # raises in a file of the server
    shown = "".join(traceback.format_tb(failure.value.__intervention_tb__))  # pyright: ignore[reportAttributeAccessIssue]
    files = re.findall(r'File "([^"]*)"', shown)
    assert files[0] == __file__ and files[-1] == "<json.decoder>" and "raises in a file of the server" in shown
    assert not [file for file in files if file.startswith(sys.prefix) or file == json.__file__]


def test_the_documentation_loads_nothing_of_other_hosts(server: Server):
    for path in ("/docs", "/"):
        answer = httpx.get(f"{server.url}{path}", timeout=600)
        assert answer.status_code == 200 and answer.headers["content-security-policy"].startswith("default-src 'self'")
        links = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
        assert links and not [link for link in links if ":" in link or link.startswith("//")]
        for link in links:
            assert httpx.get(f"{server.url}/{link.removeprefix('.')}", timeout=600).status_code == 200
    assert httpx.get(f"{server.url}/redoc", timeout=600).status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_documentation_lists_routes_and_fields(server: Server, tmp_path):
    with browsing(tmp_path / "profile") as page:
        page.open(f"{server.url}/docs")
        page.wait_for("document.querySelectorAll('#routes article').length > 10")
        assert "POST /v1/completions" in page.run("document.getElementById('routes').textContent")
        assert "cache_salt" in page.run("document.getElementById('schemas').textContent")
        assert not page.problems


# -- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [10**12, 10**18, (1 << 31) - 1, 0, -5])
def test_a_line_number_of_a_failure_allocates_nothing(line):
    tracemalloc.start()
    error = exception_of(Failure("ValueError", "x", [], [("mine.py\0", line, "f"), ("mine.py", 3, "g")]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert 'mine.py", line 3, in g' in "".join(traceback.format_exception(error))
    assert failure_of(error).frames == [("mine.py", max(1, min(line, (1 << 31) - 1)), "f"), ("mine.py", 3, "g")]


def test_a_deep_recursion_has_its_first_and_last_frames():
    frames = [("mine.py", number + 1, "f") for number in range(10_000)]
    found = failure_of(exception_of(Failure("RecursionError", "x", [], frames))).frames
    assert len(found) == MOST_FRAMES and found[0] == frames[0] and found[-1] == frames[-1]


class Function:
    """A pickle of a function that says which line it is from."""

    def __init__(self, line: int) -> None:
        self.line = line

    def __reduce__(self):
        return load_function, ("def f(): pass\n", "f", None, None, None, "mine.py", self.line)


def test_a_line_number_of_a_payload_allocates_nothing():
    def find(pid: object) -> None:
        raise AssertionError(pid)

    function: object = load(pickle.dumps(Function(5)), find)
    assert function.__code__.co_firstlineno == 5  # pyright: ignore[reportAttributeAccessIssue]
    for line in (10**12, 10**9):
        with pytest.raises(ValueError, match="at most 1000000 lines"):
            load(pickle.dumps(Function(line)), find)
