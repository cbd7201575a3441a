"""The HTTP process: small, without torch and nnsight, on the oldest and the newest versions of what it declares."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import helpers_forks
import pytest
from helpers_server import KEYS, Server, serving

from pymllm_interp import LM
from pymllm_interp.utils.busy_cores import SWITCH_SECONDS

IMPORTS = """
import sys
import pymllm_interp.cli, pymllm_interp.server.command, pymllm_interp.server.serve
from pymllm_interp.server.routes.prompt_text import load_tokenizer

tokenizer = load_tokenizer(__import__("pathlib").Path(sys.argv[1]))
text = tokenizer.decode(tokenizer("w1 w2")["input_ids"])
tokenizer.apply_chat_template([{"role": "user", "content": "w3"}], tokenize=False)
print(text, sorted({"torch", "nnsight", "greenlet"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real command: other tests' servers are forked with all imported (helpers_forks.py)."""
    with serving(
        served_folder, "--allow-code-from", "code", folder=tmp_path_factory.mktemp("keys"), forked=False
    ) as found:
        yield found


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_fork_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a run of tests that waits for ever (helpers_forks.py)."""
    monkeypatch.setattr(helpers_forks, "SECONDS", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        found = helpers_forks.Forks(ours)
        for error in (TimeoutError, OSError):  # nor is a late answer the next one's
            with pytest.raises(error):
                found.fork({}, [])


TOKENIZERS_IMPORT_TORCH = pytest.mark.skipif(
    version("transformers") < "5.18", reason="the tokenizers of transformers 5.17 import torch where it is installed"
)


@TOKENIZERS_IMPORT_TORCH
def test_the_http_process_imports_neither_torch_nor_nnsight(served_folder: Path):
    found = run(IMPORTS, str(served_folder))
    assert found.stdout.strip() == "w1w2 []", found.stderr[-2000:]


def test_threads_of_the_engine_process_wait_little_for_pythons_lock(server: Server) -> None:
    with LM.connect(server.url, api_key=KEYS["code"]) as lm, lm.trace("w1"):
        seconds = (0 * lm.lm_head.output + sys.getswitchinterval()).save()
    assert seconds.max().item() == pytest.approx(SWITCH_SECONDS)


@TOKENIZERS_IMPORT_TORCH
def test_a_server_that_served_everything_has_not_loaded_torch(server: Server):
    """The running process, after requests of each kind."""
    body = {"prompt": "w1 w2", "max_tokens": 2, "interventions": [{"op": "scale", "site": "resid_post.0", "factor": 2}]}
    with server.client() as client:
        for path, more in (
            ("/v1/completions", {"capture": ["resid_post.1"]}), ("/v1/completions", {"interventions": [{"op": "none"}]}),
            ("/v1/completions", {"stream": True, "logprobs": 2}),
        ):  # fmt: skip
            assert client.post(path, json=body | more).status_code in (200, 400)
        chat = {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert client.post("/v1/interp/lens", json={"prompt": "w1"}).status_code == 200
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "httptools" in maps and "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{server.engine_pid()}/maps").read_text()


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("pydantic_core", "the installed pydantic needs it"), ("uvicorn", 'pip install -e ".[serve]"')],
)
def test_a_missing_package_is_told_with_the_package_that_needs_it(missing: str, remedy: str):
    code = f"import sys; sys.modules[{missing!r}] = None; from pymllm_interp.cli import main; print(main(['serve', 'demo']))"
    found = run(code)
    assert found.stdout.strip() == "2", (found.stdout, found.stderr[-2000:])
    assert missing in found.stderr and remedy in found.stderr, found.stderr
