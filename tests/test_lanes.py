"""Sessions of tests that share files (tests/support/lanes.py): each test runs once, and each session says what failed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from helpers_paths import ROOT

CONFTEST = """
import glob, os, pytest, time

def note(line):
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}} {{line}}\\n")

def pytest_collection_finish():  # both have collected: each has time for some
    open({log!r} + str(os.getpid()), "w").close()
    while len(glob.glob({log!r} + "*[0-9]")) < 2:
        time.sleep(0.01)

@pytest.fixture(scope="session", autouse=True)
def session():
    yield note
    note("end")
"""
FILE = """
import time, pytest

@pytest.mark.parametrize("case", range(3))
def test_it(case, session):
    session(f"{name} {{case}}")
    time.sleep(0.02)
    assert (case, {name!r}) != (1, "b")
"""
SCRIPT = """
import sys
sys.path[:0] = [{support!r}]
from pathlib import Path
import lanes
arguments = ["-c", "/dev/null", "-p", "no:cacheprovider", "--rootdir", {folder!r}, {folder!r}]
pids = [lanes.session(arguments, [lanes.Claims(Path({claimed!r}))], {{}}, None) for _ in range(2)]
print("statuses", *sorted(map(lanes.status_of, pids)))
"""


def test_sessions_share_the_files(tmp_path: Path) -> None:
    log, claimed = tmp_path / "log", tmp_path / "claimed"
    claimed.mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.format(log=str(log)))
    for name in "abcdef":
        (tmp_path / "tests" / f"test_{name}.py").write_text(FILE.format(name=name))
    paths = {"support": str(ROOT / "tests" / "support"), "folder": str(tmp_path / "tests"), "claimed": str(claimed)}
    line = [sys.executable, "-c", SCRIPT.format(**paths)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "statuses 0 1" in done.stdout and done.stdout.count("1 failed") == 1, done.stdout
    lines = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    ran = Counter(what for _, what in lines if what != "end")
    assert ran == {f"{name} {case}": 1 for name in "abcdef" for case in range(3)}
    ended = [pid for pid, what in lines if what == "end"]
    assert len(ended) == len(set(ended)) == len({pid for pid, _ in lines}) <= 2, (
        "fixtures of a session live until its end"
    )
    for pid in ended:
        assert [what for own, what in lines if own == pid][-1] == "end"
