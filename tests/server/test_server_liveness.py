"""A stuck engine process: `/health` says so, it is ended, and another one takes its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from helpers_server import KEYS, Server, serving

from pymllm_interp import LM

ASK = {"prompt": "w1", "max_tokens": 2}


def wait_for(condition: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "\n".join(server.log[-30:])
        time.sleep(0.02)


def health(server: Server) -> tuple[int, int]:
    """(status, how often the engine was started again)."""
    answer = httpx.get(f"{server.url}/health", timeout=600)
    return answer.status_code, answer.json()["engine_restarts"]


def works(server: Server) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json=ASK)
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_a_message_loop_that_does_not_answer_is_ended_and_started_again(served_folder, tmp_path):
    with serving(served_folder, "--engine-message-seconds", "4", folder=tmp_path) as server:
        works(server)
        pid, lost = server.engine_pid(), []

        def ask() -> None:
            with server.client() as client:
                lost.append(client.post("/v1/completions", json=ASK))

        assert health(server) == (200, 0)
        os.kill(pid, signal.SIGSTOP)
        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: health(server)[0] == 503, server)
        wait_for(lambda: health(server) == (200, 1), server)
        thread.join()
        assert [answer.status_code for answer in lost] == [503]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert server.engine_pid() != pid
        works(server)
        assert [line for line in server.log if "engine_message_seconds" in line]


@pytest.mark.slow
def test_a_step_that_does_not_end_is_ended_and_a_block_that_hangs_is_not_taken_for_one(served_folder, tmp_path):
    options = ["--allow-code-from", "code", "--engine-step-seconds", "4", "--option", "trace_step_timeout=1.0"]
    with serving(served_folder, *options, "--trace-timeout", "100", folder=tmp_path) as server:
        pid = server.engine_pid()
        with LM.connect(server.url, api_key=KEYS["code"], lower_traces="off") as lm:
            for _ in range(3):  # each is ended by its own watchdog, after a second
                with pytest.raises(TimeoutError), lm.trace("w1"):
                    lm.model.layers[0].output.sum()
                    while True:
                        pass
            time.sleep(6)  # idle for longer than a step may take
            works(server)
            assert health(server) == (200, 0) and server.engine_pid() == pid
            with pytest.raises(Exception, match=r"ended with status -9|cannot be ended"), lm.trace("w1"):
                lm.model.layers[0].output.sum()
                __import__("time").sleep(100)  # native code: the watchdog's exception does not arrive
            wait_for(lambda: health(server) == (200, 1), server)
            works(server)
        assert [line for line in server.log if "engine_step_seconds" in line]


@pytest.mark.slow
def test_a_stuck_engine_ends_a_server_that_is_to_end_with_it(served_folder, tmp_path):
    options = ["--engine-message-seconds", "2", "--on-engine-exit", "exit"]
    with serving(served_folder, *options, folder=tmp_path) as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert server.process.wait(600) == 3
