"""Sessions of tests that share files (tests/support/lanes.py): each test runs once, and each session says what failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from helpers_paths import ROOT

SUPPORT = str(ROOT / "tests" / "support")
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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
    paths = {"support": SUPPORT, "folder": str(tmp_path / "tests"), "claimed": str(claimed)}
    line = [sys.executable, "-c", SCRIPT.format(**paths)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)
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


RECORDS = """
from pathlib import Path

def pytest_addoption(parser):
    parser.addoption("--durations-json", type=Path)

def pytest_terminal_summary(config):
    config.getoption("--durations-json").write_text("{}")
"""
ENDS = {
    "fine": ("", "pass", 0),
    "fails": ("", "assert False", 1),
    "leaves": ("", "os._exit(0)", 1),
    "exits": ("", "sys.exit(0)", 1),
    "crashes": ("", "os.kill(os.getpid(), signal.SIGSEGV)", 11),
    "interrupted": ("", "raise KeyboardInterrupt", 2),
    "not collected": ("1 / 0", "pass", 2),
    "exits early": ("sys.exit(0)", "pass", 3),
}
"""Name -> code of a file of tests, code of a test, and the status of a run that has it."""
BESIDE = ("leaves", "crashes")
RUNS = """
import os, signal, sys
sys.path[:0] = [{support!r}]
import lanes
import pytest
from _pytest.config import default_plugins
for name in default_plugins:
    __import__("_pytest." + name)
lanes.import_all = lambda: None  # its seconds, in each run
for folder, lane in {runs!r}:
    if not (pid := os.fork()):
        session = ["-c", "/dev/null", "-p", "no:cacheprovider", "--rootdir", {root!r}]
        beside = ["--beside=" + " ".join([*session, folder])] if lane else []
        sys.argv = ["lanes.py", "--workers=1", "--json", folder + "/seconds.json", *beside, "--", *session]
        sys.argv.append({fine!r} if lane else folder)
        lanes.main()
    print("status", lanes.status_of(pid), flush=True)
"""


def file_of(folder: Path, before: str, code: str) -> str:
    """A file of three tests, of which the second one runs `code`."""
    folder.mkdir()
    lines = [f"import os, signal, sys, time\n{before}"]
    lines += [f"def test_fine_{i}():\n    {one}" for i, one in enumerate(("pass", code, "pass"))]
    (folder / "test_it.py").write_text("\n".join(lines))
    return str(folder)


def test_a_session_that_ends_in_any_way_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(RECORDS)
    folders = {name: file_of(tmp_path / name.replace(" ", "_"), *code[:2]) for name, code in ENDS.items()}
    runs = [*((folder, False) for folder in folders.values()), *((folders[name], True) for name in BESIDE)]
    script = RUNS.format(support=SUPPORT, runs=runs, root=str(tmp_path), fine=folders["fine"])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
    )
    statuses = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("status ")]
    wanted = [status for *_, status in ENDS.values()]
    assert statuses == [*wanted, *(1 for _ in BESIDE)], done.stdout + done.stderr
    for lane, count in ((0, len(ENDS) - 1), (1, len(BESIDE))):
        assert done.stdout.count(f"FAILED: lane {lane} ended with status") == count


def test_sessions_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(RECORDS)
    pids = tmp_path / "pids"
    code = f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(120)"
    folder = file_of(tmp_path / "long", "", code)
    script = RUNS.format(support=SUPPORT, runs=[(folder, True)], root=str(tmp_path), fine=folder)
    script = script.replace("if not (pid := os.fork()):", "if True:")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, env=ENVIRONMENT) as run:
        deadline = time.monotonic() + 120
        while not (pids.exists() and pids.read_text().count("\n") == 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
    found = [Path(f"/proc/{pid}") for pid in pids.read_text().split()]
    assert len(found) == 2
    while any(map(Path.exists, found)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(Path.exists, found))
