"""What goes wrong around a server: clients that vanish or send junk, an engine that is killed, a full disk, SIGTERM under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from helpers_forks import children_of
from helpers_gguf import announcing, overlapping
from helpers_served import ThreadDoor, ThreadProcess, served
from helpers_server import GREEDY, KEYS, Server, serving, text_of
from safetensors.torch import save

from pymllm_interp import LM, SamplingParams
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.server.serve import DrainingServer, listen
from pymllm_interp.wire.gate_words import TRACE_PATH, TRACE_TYPE

LONG = {"prompt": "w3 w14 w15", "max_tokens": 120, "ignore_eos": True, "stream": True}


def raw(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=600)


def post_bytes(path: str, body: bytes, length: int | None = None, kind: str = "application/json") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        f"Authorization: Bearer {KEYS['code']}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def test_half_sent_bodies_and_broken_requests_leave_nothing_behind(server: Server):
    before = text_of(server)
    body = json.dumps(GREEDY).encode()
    for data in (
        post_bytes("/v1/completions", body[:20], len(body)), post_bytes(TRACE_PATH, b"half", 4000, TRACE_TYPE),
        b"POST /v1/completions HTTP/1.1\r\n", b"\x00\xff" * 200 + b"\r\n\r\n", post_bytes("/v1/completions", body)[:-3],
    ):  # fmt: skip
        with raw(server) as connection:
            connection.sendall(data)
            time.sleep(0.05)
    server.wait_until_idle()
    assert text_of(server) == before


def test_a_stream_that_is_cut_frees_its_kv_and_captures(server: Server):
    for body in (LONG, LONG | {"n": 4, "capture": ["resid_post.*"]}):
        with raw(server) as connection:
            connection.sendall(post_bytes("/v1/completions", json.dumps(body).encode()))
            received = b""
            while b"data:" not in received:
                received += (part := connection.recv(1 << 16))
                assert part, received
    server.wait_until_idle()
    assert server.metric("kv_tokens_free") == server.metric("kv_tokens")
    assert server.metric("store_bytes") == 0


def test_a_slow_reader_delays_nobody(server: Server):
    """It reads nothing for as long as others are served; its answer waits for it."""
    with raw(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(post_bytes("/v1/completions", json.dumps(LONG | {"n": 2, "logprobs": 5}).encode()))
        for _ in range(2):
            text_of(server)
        received = b""
        while b"[DONE]" not in received:
            part = slow.recv(1 << 16)
            assert part
            received += part
    server.wait_until_idle()


def junk(rng: random.Random) -> object:
    """A value that a client might send by mistake, or in bad faith."""
    kinds = [
        None, True, -1, 0, 10**30, 1e308, float("1e-320"), "", "w1", "\ud800" if rng.random() < 0.1 else "é", [], {}, [[]], [None],
        {"op": "steer"}, [1] * 50, "resid_post.*", ["w1", 3], {"dtype": "float32", "shape": [-1], "data": "!"}, [[1, 2], [3]],
    ]  # fmt: skip
    return rng.choice(kinds)


FIELDS = (
    "prompt", "messages", "max_tokens", "n", "temperature", "stop", "logit_bias", "seed", "stream", "logprobs", "interventions",
    "capture", "stop_token_ids", "priority", "timeout", "cache_salt", "model", "stream_options", "prompt_logprobs", "top_k",
)  # fmt: skip
OP_FIELDS = (
    "op",
    "site",
    "vector",
    "scale",
    "positions",
    "directions",
    "low",
    "high",
    "when",
    "heads",
    "missing",
    "layer",
    "from_",
    "to",
)


def send_junk(server: Server, count: int, seed: int) -> None:
    """Random requests; each is answered, and none with a 500."""
    rng = random.Random(seed)
    with server.client() as client:
        for number in range(count):
            body = dict(GREEDY) | {"max_tokens": 2}
            for _ in range(rng.randint(1, 3)):
                body[rng.choice(FIELDS)] = junk(rng)
            if rng.random() < 0.4:
                op = {
                    "op": rng.choice(["steer", "ablate", "clamp", "scale", "patch", "knockout"]),
                    "site": "resid_post.1",
                }
                op |= {rng.choice(OP_FIELDS): junk(rng) for _ in range(rng.randint(0, 4))}
                body["interventions"] = [op]
            path = rng.choice(["/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/interp/generate"])
            data = json.dumps(body).encode()
            if rng.random() < 0.15:
                data = bytearray(data)
                for _ in range(3):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            answer = client.post(path, content=bytes(data), headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (number, path, bytes(data), answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text


def test_junk_is_answered_and_changes_nothing(server: Server):
    before = text_of(server)
    send_junk(server, 100, seed=1)
    server.wait_until_idle()
    assert text_of(server) == before
    assert server.metric("kv_tokens_free") == server.metric("kv_tokens")


def mutate(server: Server, count: int, seed: int) -> None:
    """Payloads of traces with some bytes changed: an error, or the right thing, and the engine goes on."""
    from pymllm_interp.client.remote import remote_tracer

    kept: list[bytes] = []
    with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm, pytest.MonkeyPatch.context() as patch:
        post = remote_tracer.post
        patch.setattr(remote_tracer, "post", lambda engine, payload: kept.append(payload) or post(engine, payload))
        with lm.trace("w1 w2"):
            lm.model.layers[0].output.save()
    rng, (payload,) = random.Random(seed), kept
    with server.client() as client:
        for _ in range(count):
            data = bytearray(payload)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            cut = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
            answer = client.post(TRACE_PATH, content=cut, headers={"Content-Type": TRACE_TYPE})
            assert answer.status_code == 200 and (b'"failed"' in answer.content or b'"done"' in answer.content)


def test_payloads_with_changed_bytes_end_in_an_error_of_their_own(server: Server):
    before, pid = text_of(server), server.engine_pid()
    mutate(server, 40, seed=2)
    assert text_of(server) == before and server.engine_pid() == pid


@pytest.fixture
def own_server(served_folder, tmp_path):
    """A server that cannot write large files."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))  # inherited
        try:
            options = ("--allow-code-from", "code", "--inline-bytes", "1000")
            server = stack.enter_context(serving(served_folder, *options, folder=tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        yield server


def test_a_full_disk_costs_the_request_a_killed_engine_is_started_again_and_sigterm_lets_requests_end(own_server):
    server = own_server
    check_full_disk(server)
    with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm:
        lm.vectors["v"] = torch.ones(72)
        steered = [{"op": "steer", "site": "resid_post.0", "vector": "v", "scale": 4}]
        with server.client() as client:
            before = client.post("/v1/completions", json=GREEDY | {"interventions": steered}).json()["choices"][0][
                "text"
            ]
            handle = lm.submit("w1", SamplingParams(max_tokens=120, ignore_eos=True))
            with client.stream("POST", "/v1/completions", json=LONG) as stream:
                lines = stream.iter_lines()
                while not next(lines).startswith("data:"):
                    pass
                os.kill(server.engine_pid(), signal.SIGKILL)
                rest = "\n".join(lines)
            assert ("engine_unavailable" in rest and "[DONE]" in rest) or '"finish_reason":"length"' in rest
            try:
                assert handle.result(600).finish_reason == "length"
            except EngineClosedError as error:
                assert "ended with status -9" in str(error)
            early = client.post("/v1/completions", json=GREEDY)
            assert early.status_code in (200, 503)
            server.wait_until_healthy()
            assert (
                client.post("/v1/completions", json=GREEDY | {"interventions": steered}).json()["choices"][0]["text"]
                == before
            )
            assert client.get("/health").json()["engine_restarts"] == 1
            with lm.trace("w1"):
                h = lm.model.layers[0].output.save()
            assert h.shape == (1, 1, 72)
        check_sigterm(server)


def check_sigterm(server: Server) -> None:
    """SIGTERM lets running requests end, and takes no new ones."""
    pid, texts = server.engine_pid(), ["", "", "", ""]
    begun = threading.Barrier(5)

    def run(i: int) -> None:
        with server.client() as client, client.stream("POST", "/v1/completions", json=LONG | {"seed": i}) as stream:
            for number, line in enumerate(stream.iter_lines()):
                if number == 2:
                    begun.wait(600)
                texts[i] += line + "\n"

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(600)
    assert server.end(60) == 0
    for thread in threads:
        thread.join()
    assert all('"finish_reason":"length"' in text and "[DONE]" in text for text in texts)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def check_full_disk(server: Server) -> None:
    """A limit on the size of files stands for the full disk: writing fails in the midst of it."""
    with server.client("declared") as client:
        body = GREEDY | {"prompt": "w1 " * 100, "capture": ["resid_post.*", "mlp_out.*"]}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 507, answer.text
        assert "could not be stored" in answer.json()["error"]["message"]
        small = client.post("/v1/completions", json=GREEDY | {"capture": ["resid_post.1"]})
        assert small.status_code == 200
        assert len(client.get(small.json()["choices"][0]["activations"]["url"]).content) > 1000
    assert server.metric("store_files") == 1


def test_an_engines_end_may_end_the_server(served_folder, tmp_path, monkeypatch):
    """Threads in place of processes, which end with status 3 in test_server_liveness.py."""
    killed = threading.Event()

    class Killed(ThreadProcess):
        async def wait(self) -> int | None:
            await asyncio.wait(
                {asyncio.create_task(super().wait()), asyncio.create_task(asyncio.to_thread(killed.wait))},
                return_when=asyncio.FIRST_COMPLETED,
            )
            return -9 if killed.is_set() else 0

    monkeypatch.setattr(ThreadDoor, "starts", Killed)
    with served(served_folder, "--on-engine-exit", "exit", folder=tmp_path) as server:
        text_of(server)
        killed.set()
        assert server.process.result(600) == 3


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [True, False])
def test_an_engine_whose_parent_is_killed_ends_by_itself(served_folder, loaded):
    """Also where the parent is killed while the engine loads its model."""
    command = [sys.executable, "-m", "pymllm_interp.cli", "serve", str(served_folder), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        if loaded:
            process.stdout.readline()  # the address
        deadline = time.monotonic() + 600
        while not (found := children_of(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (pid,) = found
        process.kill()
        process.wait()
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the engine process outlived its server")


def test_the_address_is_told_once_connections_are_accepted():
    """Told before, whoever reads it and connects at once is refused."""
    bound = listen("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=5)
    reached: list[bool] = []

    def announce() -> None:
        with socket.create_connection(bound.getsockname(), timeout=5):
            reached.append(True)
        server.should_exit = True

    state = SimpleNamespace(num_running=0, draining=False, settings=SimpleNamespace(drain_seconds=1))
    server = DrainingServer(uvicorn.Config(FastAPI(), log_config=None), state, announce)
    asyncio.run(server.serve(sockets=[bound]))
    assert reached == [True]


@pytest.mark.slow
def test_ten_thousand_junk_requests(server: Server):
    before = text_of(server)
    send_junk(server, 10_000, seed=3)
    mutate(server, 2_000, seed=4)
    server.wait_until_idle()
    assert text_of(server) == before


def test_vectors_that_are_junk_are_refused(server: Server):
    rng = random.Random(5)
    good = save({"v": torch.ones(72)})
    with server.client() as client:
        for _ in range(30):
            data = bytearray(good)
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            data = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
            answer = client.put("/v1/interp/vectors/junk", content=data)
            assert answer.status_code in (200, 400), answer.text
        assert client.put("/v1/interp/vectors/junk", content=b"GGUF" + good).status_code == 400
        endless = announcing(2**63)
        assert client.put("/v1/interp/vectors/junk", content=endless, timeout=60).status_code == 400
        assert client.put("/v1/interp/vectors/junk", content=overlapping(1000, 1 << 20), timeout=60).status_code == 400
        assert client.put("/v1/interp/vectors/junk", content=good).status_code == 200  # orders after it are served
        client.delete("/v1/interp/vectors/junk")


@pytest.mark.slow
def test_a_block_that_ends_the_process_costs_what_runs_and_the_engine_comes_back(own_server):
    server = own_server
    with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm:
        before, pid = text_of(server), server.engine_pid()
        with pytest.raises(EngineClosedError, match="ended with status 7"), lm.trace("w1"):
            lm.model.layers[0].output.sum()
            __import__("os")._exit(7)
        server.wait_until_healthy()
        assert server.engine_pid() != pid and text_of(server) == before
