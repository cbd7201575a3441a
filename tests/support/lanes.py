"""Runs pytest in processes that are forked from one with the imports done: torch and transformers take seconds of CPU in each.

    python tests/support/lanes.py --beside 'tests/server' --beside 'make lint' -- --ignore=tests/server tests

Workers share the tests, file by file, as each has time for one. Beside them, the sessions of `--beside` run one after the other.
The first worker shows its progress, and the others' output comes whole when they end.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

IMPORTED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
PATHS = [os.getcwd(), str(Path(__file__).parents[1]), str(Path(__file__).parent)]


class Claims:
    """A plugin of pytest: its session runs the files that no other session with the same folder has claimed.

    Args:
        folder: has a file for each claimed one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        items = self._claimed(session.items)
        # A file's last test is told what follows: fixtures of the session live until its end.
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _claimed(self, items: Sequence[Any]) -> Iterator[Any]:
        files: dict[str, list[Any]] = {}
        for item in items:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
        for file, own in files.items():
            try:
                (self._folder / file.replace("/", "@")).touch(exist_ok=False)
            except FileExistsError:
                continue
            yield from own


def session(arguments: Sequence[str], plugins: Sequence[Any], environment: dict[str, str], output: int | None) -> int:
    """Fork a session of pytest, with a process of its own that forks engines of its tests.

    Args:
        output: file that gets what it writes; None: this process's output.

    Returns:
        Its process id.
    """
    import helpers_forks
    import pytest

    sys.stdout.flush()
    if pid := os.fork():
        return pid
    helpers_forks.end_with_parent()
    os.environ.update(environment)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    helpers_forks.fork_from_here()
    code = int(pytest.main(["-q", "-W", IMPORTED, *arguments], plugins=[*plugins]))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # without freeing its modules one by one, for seconds


def status_of(pid: int, record: Path | None = None) -> int:
    """The status that a process ends with. A session without its record has failed: a test may have called ``os._exit(0)``."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 1 if not status and record is not None and not record.exists() else status


def beside(steps: Sequence[str], output: int, records: Path) -> bool:
    """Run sessions and commands one after the other. Returns whether all went well."""
    failed = list[str]()
    for number, step in enumerate(steps):
        os.write(output, f"== {step}\n".encode())
        if step.startswith("make "):
            status = subprocess.run(shlex.split(step), stdout=output, stderr=output, check=False).returncode
        else:
            record = records / f"beside-{number}.json"
            status = status_of(session(["--durations-json", str(record), *shlex.split(step)], (), {}, output), record)
        failed += [f"{step}: status {status}"] * bool(status)
    os.write(output, "".join(f"FAILED: {line}\n" for line in failed).encode())
    return not failed


def import_all() -> None:
    """What tests/conftest.py and most engines import."""
    gc.disable()  # imports make half a million objects, none of them garbage
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that asked CUDA itself has no forks with a device
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as in tests/conftest.py
    import helpers_forks

    helpers_forks.import_all()
    import pytest  # noqa: F401

    gc.freeze()
    gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, default=Path("build/durations.json"), help="a file that gets the seconds of each test"
    )
    parser.add_argument("--beside", action="append", default=[], help="a session's arguments, or a make command")
    parser.add_argument("arguments", nargs="*", help="arguments of the workers' sessions")
    asked = parser.parse_args()
    import_all()
    import helpers_durations
    import helpers_forks

    # Not as contexts: processes that are forked leave them, too.
    claimed, records = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    outputs = [tempfile.TemporaryFile() for _ in range(asked.workers + bool(asked.beside))]

    def worker(number: int, output: int | None) -> int:
        # As xdist's own: they share the devices (gpu_workers.py).
        shared = {"PYTEST_XDIST_WORKER_COUNT": str(asked.workers), "PYTEST_XDIST_WORKER": f"gw{number}"}
        options = ["-o", "console_output_style=classic", "--durations-json", str(records / f"{number}.json")]
        return session([*options, *asked.arguments], [Claims(claimed)], shared, output)

    pids = [worker(i, outputs[i].fileno() if i else None) for i in range(asked.workers)]
    if asked.beside and not (lane := os.fork()):
        helpers_forks.end_with_parent()
        os._exit(not beside(asked.beside, outputs[-1].fileno(), records))
    elif asked.beside:
        pids.append(lane)
    found = [status_of(pid, records / f"{i}.json" if i < asked.workers else None) for i, pid in enumerate(pids)]
    for output in outputs:
        output.seek(0)
        sys.stdout.write(output.read().decode(errors="replace"))
    seconds = Counter[str]()
    for record in records.glob("*.json"):
        seconds.update(json.loads(record.read_text()))
    helpers_durations.write(asked.json, seconds)
    print(*helpers_durations.summary(seconds), f"{len(seconds)} tests", sep="\n")
    print(
        *(f"FAILED: lane {number} ended with status {status}\n" for number, status in enumerate(found) if status),
        sep="",
    )
    shutil.rmtree(claimed)
    shutil.rmtree(records)
    sys.exit(max(map(abs, found)))


if __name__ == "__main__":
    sys.path[:1] = PATHS
    import lanes

    lanes.main()
