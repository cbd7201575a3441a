"""Orders of vectors and adapters end: an engine that does not answer costs the client a 504, not its connection for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import torch
from helpers_server import serving
from safetensors.torch import save


def test_an_order_that_is_late_is_a_504_and_is_carried_out_later(model_folder: Callable[[str], Path]) -> None:
    body = save({"vector": torch.ones(72)})
    with serving(model_folder("llama"), "--order-seconds", "1", keys=None, replicas=None) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            engine = server.engine_pid()
            os.kill(engine, signal.SIGSTOP)
            try:
                started = time.monotonic()
                late = client.put("/v1/interp/vectors/v", content=body)
                seconds = time.monotonic() - started
                adapter = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/none"})
            finally:
                os.kill(engine, signal.SIGCONT)
            assert late.status_code == adapter.status_code == 504 and 1 <= seconds < 20
            assert "--order-seconds" in late.json()["error"]["message"]
            deadline = time.monotonic() + 60
            while not (found := client.get("/v1/interp/vectors").json()["vectors"]):
                assert time.monotonic() < deadline, "the order went on"
                time.sleep(0.05)
            assert found[0]["name"] == "v" and server.engine_pid() == engine
            assert client.delete("/v1/interp/vectors/v").json() == {"deleted": "v"}
