"""Results on their way to clients: large ones, slow readers, and what an engine that is started again leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from helpers_served import served
from helpers_server import KEYS, REPLICAS, SECONDS, Server, serving

from pymllm_interp import LM
from pymllm_interp.server.engines.call import Call, SlowReaderError
from pymllm_interp.server.process.trace_runs import TraceRun
from pymllm_interp.server.routes.generation import CompletionPiece
from pymllm_interp.server.routes.openai_routes import Work
from pymllm_interp.wire import messages as m
from pymllm_interp.wire.trace_payload import with_arguments_of_super


def frame(size: int) -> m.Frame:
    return m.Frame(1, b"", b"x" * size)


def test_a_message_above_the_limit_reaches_a_client_that_reads() -> None:
    async def run() -> None:
        call = Call(1, limit=100)
        call.put(frame(1000))
        call.put(m.Answer(1))  # comes at once, before the client has read the first
        assert isinstance(await call.next(), m.Frame)
        call.put(frame(100))
        assert isinstance(await call.next(), m.Answer)
        assert isinstance(await call.next(), m.Frame)
        call.put(frame(1000))  # behind one of 100 that is read
        with pytest.raises(SlowReaderError):
            await call.next()

    asyncio.run(run())


def test_what_waits_for_a_client_that_does_not_read_is_bounded() -> None:
    """Tokens and log probabilities count, too."""
    for message in (frame(60), m.Token(1, 0, 5, {i: (0.0, i) for i in range(3)}), m.Finished(1, 0, [1] * 3, "stop")):
        call, kept = Call(1, limit=10_000), 0
        while not call.overrun:
            call.put(message)
            kept += 1
        assert 10 < kept < 200
        call.put(message)
        assert len(call._messages) == kept


def parts_of(server: Server, route: str, body: dict[str, Any]) -> list[bytes]:
    """The chunks of a response's body, as they were sent."""
    url, data = urlsplit(server.url), json.dumps(body | {"stream": True, "temperature": 0, "ignore_eos": True}).encode()
    head = f"POST /v1/{route} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {KEYS['plain']}\r\nConnection: close\r\n"
    with socket.create_connection((url.hostname, url.port), SECONDS) as client, client.makefile("rb") as reader:
        client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        assert b" 200 " in reader.readline()
        while reader.readline().strip():
            pass
        found = []
        while size := int(reader.readline(), 16):
            found.append(reader.read(size))
            reader.readline()
    return found


@pytest.mark.skipif(REPLICAS, reason="the fronts of replicas are other processes")
def test_events_that_are_there_at_once_leave_together(served_folder: Path, tmp_path: Path, monkeypatch) -> None:
    take, late = Work._take, set()

    def taken(work: Work, piece: CompletionPiece) -> None:
        if work.body.stop and piece.token_ids and work not in late:
            late.add(work)
            time.sleep(0.5)  # the event loop is late, and the engine goes on
        take(work, piece)

    monkeypatch.setattr(Work, "_take", taken)
    with served(served_folder, folder=tmp_path) as server:
        for route, asked in (
            ("completions", {"prompt": "w3 w14", "max_tokens": 30, "n": 2, "seed": 1, "return_token_ids": True}),
            ("chat/completions", {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 30}),
            ("responses", {"input": "w3", "max_output_tokens": 30}),
        ):
            texts, counts = [], []
            for stop in ([], ["never"]):
                parts = parts_of(server, route, asked | {"stop": stop})
                events = re.findall(rb"^(?:data|event|:).*$", b"".join(parts), re.M)
                text = b"\n".join(sorted(events) if asked.get("n") else events)
                texts.append(re.sub(rb'"(?:id|item_id|created|created_at|completed_at)":("[^"]*"|[0-9.]+)', b"", text))
                counts.append((len(parts), len(events)))
            assert texts[0] == texts[1]
            assert counts[1][0] < counts[1][1] / 2, (route, counts)


def test_a_trace_waits_until_its_client_has_read_enough() -> None:
    run, sent = TraceRun(1, lambda ids: None, 100), threading.Event()
    run.send(1000, wait=True)  # nothing waits: whatever its size

    def more() -> None:
        run.send(50, wait=True)
        sent.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not sent.wait(0.5)
    run.was_read(1000)
    assert sent.wait(600)
    thread.join()


def test_arguments_are_written_into_super_at_the_level_of_the_block() -> None:
    source = 'x = "é"; y = super().f(super(), super(A, b))\ndef g(self):\n    return super().g()\nif x: super( )\n'
    assert with_arguments_of_super(source, "self") == (
        'x = "é"; y = super(__class__, self).f(super(__class__, self), super(A, b))\n'
        "def g(self):\n    return super().g()\nif x: super( __class__, self)\n"
    )


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
def test_large_results_arrive_and_restarts_leave_nothing_behind(
    served_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = ("--allow-code-from", "code", "--max-queued-bytes", "1000000")
    with serving(served_folder, *options, folder=tmp_path) as server:
        with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm:
            with lm.trace("w1 w2"):
                large = torch.full((700_000,), 2.0).save()  # 2.8 MB
            assert large.shape == (700_000,) and large[-1] == 2
        counts = []
        for restart in range(3):
            os.kill(server.engine_pid(), signal.SIGKILL)
            deadline = time.monotonic() + 600
            while server.metric("engine_restarts") <= restart or not server.metric("engine_ready"):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            (folder,) = tmp_path.glob("pymllm-interp-*")
            while counts and descriptors(server.process.pid) > counts[0][0]:  # connections of the questions above close
                assert time.monotonic() < deadline, (descriptors(server.process.pid), counts)
                time.sleep(0.2)
            paths = sorted(folder.iterdir())
            kept = [path.name for path in paths if path.is_dir()], sum(path.is_socket() for path in paths)
            counts.append((descriptors(server.process.pid), *kept))
        assert all(found[0] <= counts[0][0] + 1 and found[1:] == counts[0][1:] for found in counts), counts
