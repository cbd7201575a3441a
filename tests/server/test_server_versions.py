"""The server on the lowest and newest versions of what the extra `serve` declares, and on other Pythons. Needs PyPI."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers_load import KINDS, load
from helpers_server import serving

pytestmark = pytest.mark.slow
LOWEST = (
    "fastapi==0.115.0", "starlette==0.37.2", "pydantic==2.9.0", "pydantic-core==2.23.2", "uvicorn==0.32.0", "httptools==0.6.1",
    "pyzmq==26.0.3", "msgspec==0.19.0", "anyio==3.7.1",
)  # fmt: skip
"""What pyproject.toml admits, and the lowest that these admit; httptools and pyzmq have no older wheels for this Python."""
HTTP = (
    "fastapi",
    "uvicorn",
    "httptools",
    "pyzmq",
    "msgspec",
    "pydantic",
    "transformers>=5.17,<5.19",
    "jinja2",
    "rich",
    "numpy",
)
"""The HTTP process without torch."""
PROMPTS = ["w1 w2 w3", "w5", "w8 w9 w10 w11 w12"]


def venv_of(folder: Path, python: str, *packages: str, dependencies: bool) -> Path:
    """A new environment's interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    interpreter = folder / "bin" / "python"
    options = () if dependencies else ("--no-deps",)
    subprocess.run([interpreter, "-m", "pip", "install", "-q", *options, *packages], check=True)
    return interpreter


def beside(interpreter: Path) -> None:
    """What an environment has not is taken from this one: torch, transformers, nnsight."""
    command = [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")


def check(served_folder: Path, tmp_path: Path, interpreter: Path, engine: str | None = None) -> None:
    """Every kind of request, streams and files of activations included, against its solo run."""
    options = ("--allow-code-from", "code", "--inline-bytes", "1000")
    with serving(served_folder, *options, folder=tmp_path, python=str(interpreter), engine_python=engine) as server:
        report = load(server, PROMPTS, clients=4, seconds=5, jobs=15, max_tokens=8)
        assert not report.problems, report.problems[:5]
        assert set(report.answers) == set(KINDS)
        with server.client() as client:
            assert client.get("/openapi.json").status_code == 200 and client.get("/docs").status_code == 200
            assert client.post("/v1/completions", json={"prompt": 5.5}).status_code == 400
        server.wait_until_idle()


def test_the_lowest_versions_serve(served_folder: Path, tmp_path: Path):
    interpreter = venv_of(tmp_path / "lowest", sys.executable, *LOWEST, dependencies=False)
    beside(interpreter)
    check(served_folder, tmp_path, interpreter)


@pytest.mark.parametrize("anyio", ["4.5.0", "4.15.0"])
def test_an_older_anyio_serves(served_folder: Path, tmp_path: Path, anyio: str):
    interpreter = venv_of(tmp_path / "anyio", sys.executable, f"anyio=={anyio}", dependencies=False)
    beside(interpreter)
    check(served_folder, tmp_path, interpreter)


def test_the_newest_versions_serve(served_folder: Path, tmp_path: Path):
    packages = [name.partition("==")[0] for name in LOWEST]
    interpreter = venv_of(tmp_path / "newest", sys.executable, "--upgrade", *packages, dependencies=True)
    beside(interpreter)
    check(served_folder, tmp_path, interpreter)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_http_process_runs_on_other_pythons_without_torch(served_folder: Path, tmp_path: Path, version: str):
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], check=False, capture_output=True).returncode:
        pytest.skip(f"no Python {version} on this machine")
    interpreter = venv_of(tmp_path / "http", python, *HTTP, dependencies=True)
    found = subprocess.run([interpreter, "-c", "import torch"], check=False, capture_output=True)
    assert found.returncode != 0
    check(served_folder, tmp_path, interpreter, engine=sys.executable)
