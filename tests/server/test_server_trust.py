"""Keys and their rights, limits, and payloads that are refused before they are read."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers_served import served
from helpers_server import KEYS, Server
from safetensors.torch import save

from pymllm_interp import LM, SamplingParams
from pymllm_interp.cli import main
from pymllm_interp.server.http.trust import Keys, Trust, read_keys
from pymllm_interp.server.settings import ServeSettings
from pymllm_interp.wire.gate_words import TRACE_PATH, TRACE_TYPE

LIMITS = {
    "max-body-bytes": 30_000, "max-trace-bytes": 6_000, "max-concurrent": 4, "max-traces": 1, "max-vectors": 2,
    "max-vector-bytes": 2_000, "inline-bytes": 1_000, "max-store-bytes": 60_000, "store-seconds": 3, "trace-timeout": 2.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(served_folder, tmp_path_factory):
    """A server with small limits."""
    options = [part for name, value in LIMITS.items() for part in (f"--{name}", str(value))]
    options += [
        "--allow-code-from",
        "code",
        "--option",
        "trace_step_timeout=1.0",
        "--option",
        "max_capture_bytes=200000",
    ]
    with served(served_folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


class Touch:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("wrong-key-0000", 401), ("plain", 403), ("declared", 403), ("code", 200)]
)
def test_a_payload_is_read_for_keys_with_the_right_alone(server: Server, tmp_path, key, status):
    mark = tmp_path / "read"
    with server.client(key) as client:
        answer = client.post(TRACE_PATH, content=pickle.dumps(Touch(mark)), headers={"Content-Type": TRACE_TYPE})
    assert answer.status_code == status
    assert mark.exists() == (status == 200)  # the right key shows that the payload would have done it
    if status == 403:
        assert "--allow-code-from" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("plain", 403), ("declared", 403), ("code", 400)])
def test_edits_are_payloads_too(server: Server, tmp_path, key, status):
    mark = tmp_path / "read"
    body = {"prompts": [[1]], "params": [{}], "edits": base64.b64encode(pickle.dumps(Touch(mark))).decode()}
    with server.client(key) as client:
        answer = client.post("/v1/interp/generate", json=body)
    assert answer.status_code == (200 if status == 400 else status)
    assert mark.exists() == (status == 400)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_a_foreign_web_page_could_send_is_refused(server: Server, tmp_path, kind):
    """Browsers send these without asking the server; a key in a header they do not send, but a server may be without keys."""
    mark = tmp_path / "read"
    body = {"prompts": [[1]], "params": [{}], "edits": base64.b64encode(pickle.dumps(Touch(mark))).decode()}
    with server.client("code") as client:
        headers = {} if kind is None else {"Content-Type": kind}
        answer = client.post("/v1/interp/generate", content=json.dumps(body).encode(), headers=headers)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
        assert client.post("/v1/interp/reset_prefix_cache").status_code == 200
    assert not mark.exists()


def test_a_refused_body_is_not_even_received(server: Server):
    """The answer comes after the headers: 60 MB that were announced are never sent."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=600) as connection:
        head = (
            f"POST {TRACE_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {TRACE_TYPE}\r\nContent-Length: 60000000\r\n"
        )
        connection.sendall(f"{head}Authorization: Bearer {KEYS['declared']}\r\n\r\n".encode())
        assert b" 403 " in connection.recv(4096).splitlines()[0]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"prompt": "w1", "capture": ["resid_post.0"]}),
        ("POST", "/v1/completions", {"prompt": "w1", "interventions": [{"op": "scale", "site": "resid_post.0", "factor": 2}]}),
        ("PUT", "/v1/interp/vectors/x", {}),
        ("GET", "/v1/interp/vectors", None),
        ("POST", "/v1/interp/generate", {"prompts": [[1]], "params": [{}], "captures": [["resid_post.0"]]}),
    ],
)  # fmt: skip
def test_a_plain_key_generates_and_declares_nothing(server: Server, method, path, body):
    with server.client("plain") as client:
        answer = client.request(method, path, json=body)
        assert answer.status_code == 403 and "'declared'" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Basic plain-key-0000", "Bearer plain-key-000", "Bearer plain-key-00000"]
)
def test_a_key_is_the_whole_key(server: Server, header):
    with server.client(None, headers={"Authorization": header}) as client:
        assert client.get("/v1/models").status_code == 401


def test_without_keys_code_is_off_and_stays_on_this_machine(tmp_path, capsys):
    assert Keys([]).client(None).trust is Trust.DECLARED
    arguments = {"model": {}, "server": {}, "name": "x", "keys": Keys([], Trust.CODE)}
    ServeSettings(**arguments)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match="reachable from other machines"):
            ServeSettings(**arguments, host=host)
    assert main(["serve", "demo", "--host", "0.0.0.0", "--allow-code-from", "anybody"]) == 2
    assert "reachable from other machines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "allowed", "words"),
    [
        ("a", [], "expected 'name key"),
        ("a 12345678 b c", [], "expected 'name key"),
        ("a 1234567", [], "fewer than 8"),
        ("a 12345678\na 12345679", [], "duplicate name or key"),
        ("a 12345678\nb 12345678", [], "duplicate name or key"),
        ("a 12345678 code", [], "--allow-code-from a"),
        ("a 12345678 all", [], "expected one of plain, declared, code"),
        ("a 12345678", ["b"], "no such key"),
        ("# nothing", [], "has no keys"),
    ],
)
def test_a_key_file_that_is_wrong_is_refused(tmp_path, content, allowed, words):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_keys(file, allowed)


# -- limits -----------------------------------------------------------------------------------


def test_bodies_and_payloads_have_a_size(small: Server):
    with small.client() as client:
        big = client.post("/v1/completions", json={"prompt": "w1 " * 20_000})
        assert big.status_code == 413 and "max_body_bytes" in big.json()["error"]["message"]

        def parts():  # of unknown length
            for _ in range(100):
                yield b" " * 1000

        kind = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=parts(), headers=kind).status_code == 413
        trace = client.post(TRACE_PATH, content=bytes(7000), headers={"Content-Type": TRACE_TYPE})
        assert trace.status_code == 413 and "max_trace_bytes" in trace.json()["error"]["message"]


def test_vectors_of_a_key_are_counted(small: Server):
    with small.client("declared") as client, small.client("other") as other:
        for name in ("a", "b"):
            assert client.put(f"/v1/interp/vectors/{name}", content=save({"v": torch.ones(72)})).status_code == 200
        third = client.put("/v1/interp/vectors/c", content=save({"v": torch.ones(72)}))
        assert third.status_code == 429 and "max_vectors" in third.json()["error"]["message"]
        assert client.put("/v1/interp/vectors/a", content=save({"v": torch.zeros(72)})).status_code == 200  # replaced
        large = client.put("/v1/interp/vectors/a", content=save({"v": torch.ones(6, 72)}))
        assert large.status_code == 413 and "max_vector_bytes" in large.json()["error"]["message"]
        assert other.put("/v1/interp/vectors/a", content=save({"v": torch.ones(72)})).status_code == 200
        assert client.put("/v1/interp/vectors/..%2Fa", content=b"").status_code == 400


def test_requests_of_a_key_are_counted(small: Server):
    with small.client("declared") as client, small.client("other") as other:
        answer = client.post("/v1/completions", json={"prompt": "w1", "n": 5, "max_tokens": 1})
        assert answer.status_code == 429 and "max_concurrent" in answer.json()["error"]["message"]
        body = {"prompt": "w1", "max_tokens": 120, "ignore_eos": True, "n": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as running:
            next(running.iter_lines())
            assert client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code in (200, 429)
            assert other.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200
        small.wait_until_idle()
        assert client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200


def test_captures_of_a_request_and_of_the_store_are_bounded(small: Server):
    ask = {"prompt": "w1 " * 60, "max_tokens": 1, "capture": ["resid_post.*"]}
    with small.client("declared") as client:
        many = client.post(
            "/v1/completions", json=ask | {"capture": ["resid_post.*", "mlp_out.*", "attn_out.*", "resid_mid.*"]}
        )
        assert many.status_code == 400 and "max_capture_bytes" in many.json()["error"]["message"]
        first = client.post("/v1/completions", json=ask).json()["choices"][0]["activations"]
        second = client.post("/v1/completions", json=ask)
        assert second.status_code == 429 and "max_store_bytes" in second.json()["error"]["message"]
        assert client.get(first["url"]).status_code == 200
        deadline = time.monotonic() + 600
        while small.metric("store_files"):  # deleted after store_seconds
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.get(first["url"]).status_code == 404
        assert client.post("/v1/completions", json=ask).status_code == 200


def test_a_block_that_overruns_loses_its_request_and_the_engine_goes_on(small: Server):
    with LM.connect(small.url, api_key=KEYS["code"], lower_traces="off") as lm:
        with pytest.raises(TimeoutError, match=r"ran for more than|longer than"), lm.trace("w1"):
            lm.model.layers[0].output.sum()
            while True:
                pass
        with pytest.raises(TimeoutError, match="trace_timeout"), lm.session():
            while True:
                count = 1
        with pytest.raises(TimeoutError, match="trace_timeout"), lm.session():
            for _ in range(10_000):
                with lm.trace("w1"):
                    count = lm.model.layers[0].output.sum()
        assert lm.generate("w1", SamplingParams(max_tokens=2))[0].finish_reason == "length"
        assert small.metric("requests_traces") == 0
        assert count is not None if "count" in locals() else True


def test_traces_of_a_key_are_counted(small: Server, tmp_path: Path):
    from pymllm_interp.client.remote.remote_engine import ServerError

    with (
        LM.connect(small.url, api_key=KEYS["code"], lower_traces="off") as lm,
        LM.connect(small.url, api_key=KEYS["code"], lower_traces="off") as second,
    ):
        begun, refused = threading.Event(), str(tmp_path / "refused")

        def run() -> None:  # until the second one was refused
            with lm.generate("w1", max_new_tokens=100, ignore_eos=True, on_step=lambda *_: begun.set()) as tracer:
                for _ in tracer.iter[:]:
                    __import__("time").sleep(0.05 * (not __import__("os").path.exists(refused)))
                    lm.model.layers[0].output.sum()

        thread = threading.Thread(target=run)
        thread.start()
        assert begun.wait(600)
        with pytest.raises(ServerError, match="max_traces"), second.trace("w1"):
            second.model.layers[0].output.save()
        Path(refused).touch()
        thread.join()
        with second.trace("w1"):
            h = second.model.layers[0].output.save()
        assert h.shape == (1, 1, 72)


def test_nothing_of_a_request_is_in_the_log_but_its_numbers(server: Server):
    with server.client("declared") as client:
        client.post("/v1/completions", json={"prompt": "w7 w7 w77", "max_tokens": 1}, headers={"X-Request-Id": "quiet"})
    deadline = time.monotonic() + 600
    while not (found := [line for line in list(server.log) if '"quiet"' in line]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "w77" not in found[0] and json.loads(found[0])["prompt_tokens"] == 3
