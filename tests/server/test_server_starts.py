"""Starts that hang or are ended: no engine process and no folder of theirs is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import zmq
from helpers_forks import children_of
from helpers_processes import SECONDS, engine_of, is_gone, starting, wait_for
from helpers_server import serving

from pymllm_interp.server.engines.owned_folders import OwnedFolder


@pytest.mark.parametrize("phase", ["first line", pytest.param("import", marks=pytest.mark.slow)])
def test_sigterm_while_the_model_loads_leaves_no_process_and_no_folder(served_folder, tmp_path, phase):
    with starting(served_folder, tmp_path) as process:
        pid = engine_of(process, phase)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert is_gone(pid)
        assert not list(tmp_path.glob("pymllm-interp-*"))


@pytest.mark.parametrize(
    "phase",
    ["first line", pytest.param("import", marks=pytest.mark.slow), pytest.param("ready", marks=pytest.mark.slow)],
)
def test_an_engine_whose_parent_is_killed_ends_and_removes_its_folder(served_folder, tmp_path, phase):
    """Also an engine that is stopped: the end of its parent lets it go on."""
    with starting(served_folder, tmp_path) as process:
        pid = engine_of(process, phase)
        if phase == "import":
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        wait_for(lambda: is_gone(pid))
        wait_for(lambda: not list(tmp_path.glob("pymllm-interp-server-*")) or phase == "first line")


@pytest.mark.slow
def test_an_engine_that_is_stopped_while_it_starts_again_is_ended(served_folder, tmp_path):
    options = "--engine-start-seconds", "5"
    with serving(
        served_folder, *options, folder=tmp_path, forked=False
    ) as server:  # a fork starts too soon to be stopped
        first = server.engine_pid()
        os.kill(first, signal.SIGKILL)
        second = wait_for(lambda: [pid for pid in children_of(server.process.pid) if pid != first])[0]
        time.sleep(0.5)
        os.kill(second, signal.SIGSTOP)
        wait_for(lambda: is_gone(second))
        wait_for(lambda: httpx.get(f"{server.url}/health", timeout=SECONDS).status_code == 200)
        assert [line for line in server.log if "engine_start_seconds" in line]


def test_folders_of_dead_owners_are_removed_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os; from pymllm_interp.server.engines.owned_folders import OwnedFolder as F"
    code += "; print(F().path, F('pymllm-interp-store-1').path, flush=True); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    dead = [Path(path) for path in found.stdout.split()]
    foreign, lived = tmp_path / "pymllm-interp-server-notes.txt", OwnedFolder()
    foreign.write_text("a file")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "pymllm-interp-server-link").symlink_to(outside)
    new = OwnedFolder()
    assert len(dead) == 2 and not any(path.exists() for path in dead)
    assert lived.path.exists() and new.path.exists() and foreign.exists() and outside.exists()
    lived.remove()
    assert not lived.path.exists()
    new.remove()


def test_a_socket_in_a_folder_with_a_long_path_is_reached_by_another_process(tmp_path, monkeypatch):
    temporary = tmp_path / ("long" * 40)
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    folder = OwnedFolder()
    address = folder.address("requests-1")
    code = (  # a context that is not ended may drop the message when its process ends
        "import sys, zmq\n"
        "with zmq.Context() as context, context.socket(zmq.PUSH) as socket:\n"
        "    socket.connect(sys.argv[1])\n"
        "    socket.send(b'seen')\n"
    )
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)
        assert (folder.path / "requests-1").is_socket()
        subprocess.run([sys.executable, "-c", code, address], check=True, timeout=SECONDS)
        assert socket.poll(SECONDS * 1000) and socket.recv() == b"seen"
    folder.remove()
    assert not folder.path.exists()
