"""The edge of the server: what clients learn of it, and what sizes and numbers of theirs cost before they are checked."""

from __future__ import annotations

import json
import pickle
import re
import sys
import traceback
import tracemalloc

import httpx
import pytest
from helpers_browser import CHROMIUM, browsing
from helpers_server import KEYS, Server

from pymllm_interp import LM
from pymllm_interp.client.remote.remote_errors import exception_of
from pymllm_interp.hooks.traces.nnsight_compat import load_function
from pymllm_interp.wire.failures import MOST_FRAMES, Failure, failure_of
from pymllm_interp.wire.trace_payload import load

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
