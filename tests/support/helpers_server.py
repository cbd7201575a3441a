"""Real servers for tests: `pymllm-interp serve` in processes of its own, on a free port of this machine."""

from __future__ import annotations

import os
import queue
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from helpers_forks import children_of, forking

import pymllm_interp
from pymllm_interp.server.http.families import FAMILIES

SECONDS = 600
"""How long what a server does may take, on a machine that is busy with other work."""
CLOSE = 1e-4 if torch.cuda.is_available() else 1e-5
"""Tolerance of states that were computed in batches of other shapes."""
REPLICAS = int(os.environ.get("PYMLLM_TEST_REPLICAS", "0"))
"""With it, the servers of all tests are fronts over so many replicas."""
TRUSTED = ssl.create_default_context()
"""Certificates that clients trust. Each `httpx.Client` would read them anew, for 30 ms."""
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
KEYS = {"plain": "plain-key-0000", "declared": "declared-key-0000", "other": "other-key-0000", "code": "code-key-0000"}
KEY_FILE = f"""
plain {KEYS["plain"]} plain   # may generate
declared {KEYS["declared"]}
other {KEYS["other"]}
code {KEYS["code"]}
"""


@dataclass
class Server:
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]
    lines: queue.Queue[str]
    log: list[str] = field(default_factory=list)

    def client(self, key: str | None = "code", **kwargs) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {KEYS.get(key, key)}"}
        kwargs = {"verify": TRUSTED, **kwargs, "headers": headers | kwargs.get("headers", {})}
        return httpx.Client(base_url=self.url, timeout=SECONDS, **kwargs)

    def engine_pid(self) -> int:
        """The server's one child."""
        if REPLICAS:
            pytest.skip("of a server with one engine process")
        found = children_of(self.process.pid)
        assert len(found) == 1, found
        return found[0]

    def metric(self, name: str) -> float:
        """The sum of a metric's series; 0 where it has none now."""
        assert name in FAMILIES, f"{name} is no metric"
        text = httpx.get(f"{self.url}/metrics", timeout=SECONDS, verify=TRUSTED).text
        return sum(float(value) for value in re.findall(rf"^pymllm_interp_{name}(?:{{.*}})? ([\d.e+-]+)$", text, re.M))

    def wait_until_idle(self, seconds: float = SECONDS) -> None:
        """No request runs, and all of the KV is free."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            names = ("num_requests_running", "num_requests_waiting", "requests_traces", "calls")
            if all(self.metric(name) <= (name == "calls") for name in names):  # the question itself is a call
                return
            time.sleep(0.05)
        raise AssertionError(httpx.get(f"{self.url}/metrics").text)

    def wait_until_healthy(self, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health", timeout=SECONDS, verify=TRUSTED).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("\n".join(self.log[-30:]))

    def end(self, seconds: float = SECONDS) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def _read(stream, lines: queue.Queue[str], log: list[str]) -> None:
    for line in stream:
        log.append(line.rstrip())
        lines.put(line.rstrip())


def arguments_of(model: str | Path, options: Sequence[str], keys: str | None, folder: Path | None) -> list[str]:
    """The command line of a server; `serving` says what is what."""
    found = ["serve", str(model), "--port", "0", "--dtype", "float32"]
    if torch.cuda.is_available() and not any("kv_cache_tokens" in option for option in options):
        found += ["--option", "kv_cache_tokens=65536"]  # several servers share the device
        found += ["--option", "inner_sites=('q', 'k', 'v', 'z', 'mlp_act')"]  # as a CPU has them
    if keys is not None:
        assert folder is not None
        (folder / "keys").write_text(keys)
        found += ["--keys", str(folder / "keys")]
    return [*found, *options]


@contextmanager
def serving(
    model: str | Path,
    *options: str,
    keys: str | None = KEY_FILE,
    folder: Path | None = None,
    python: str = sys.executable,
    engine_python: str | None = None,
    files: int | None = None,
    replicas: int | None = None,
    announces: str = "https?://",
    forked: bool = True,
) -> Iterator[Server]:
    """A server of a model, until the end of the body.

    Args:
        keys: the key file's content; None: no keys.
        folder: for the key file.
        python: the interpreter of the HTTP process.
        engine_python: the interpreter of the engine process, where it is another one.
        files: that the server's processes may have open, each.
        replicas: of a front without Ray (replicated_server.py), all ready; None: `pymllm-interp serve`, or as --replicas says.
        announces: how the address begins that it prints.
        forked: its processes are forked (helpers_forks.py), where their interpreter is this one.
    """
    replicas = replicas or REPLICAS
    main = ["-m", "pymllm_interp.cli"]
    if engine_python is not None:  # the engine process is started by sys.executable
        main = [
            "-c",
            f"import sys; sys.executable = {engine_python!r}; from pymllm_interp.cli import main; sys.exit(main())",
        ]
    if replicas:
        main = [str(Path(__file__).with_name("replicated_server.py")), str(replicas)]
    command = ["prlimit", f"--nofile={files}"] if files else []
    command += [python, *main, *arguments_of(model, options, keys, folder)]
    paths = sys.path if python == sys.executable else [str(Path(pymllm_interp.__file__).parents[1])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with forking() if forked else nullcontext():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    lines: queue.Queue[str] = queue.Queue()
    server = Server("", process, lines)
    errors: queue.Queue[str] = queue.Queue()
    for stream, into in ((process.stdout, lines), (process.stderr, errors)):
        threading.Thread(target=_read, args=(stream, into, server.log), daemon=True).start()
    try:
        deadline = time.monotonic() + SECONDS
        while not server.url:
            assert process.poll() is None and time.monotonic() < deadline, "\n".join(server.log)
            try:
                found = re.search(rf"is served at ({announces}\S+)", lines.get(timeout=0.2))
            except queue.Empty:
                continue
            server.url = found[1] if found else ""
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


GREEDY = {"prompt": "w3 w14 w15", "max_tokens": 8, "temperature": 0}


def text_of(server: Server) -> str:
    with server.client() as client:
        answer = client.post("/v1/completions", json=GREEDY)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]
