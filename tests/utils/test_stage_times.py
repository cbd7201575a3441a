"""What `StageTimes` counts."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

from pymllm_interp.utils.stage_times import VARIABLE, StageTimes

ALL = "process: all threads"


def test_a_stage_has_the_calls_and_bytes_of_all_threads() -> None:
    times = StageTimes(True)

    def work() -> None:
        for _ in range(100):
            with times.of("copy", 10):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.add("device", 0.25, nbytes=3)
    found = times.taken()
    assert (found["copy"]["calls"], found["copy"]["bytes"]) == (400, 4000)
    assert found["device"] == {"calls": 1, "seconds": 0.25, "bytes": 3}
    assert set(times.taken()) == {ALL}  # since the last call


def test_waiting_is_not_cpu_time() -> None:
    times = StageTimes(True)
    with times.of("outer"), times.of("inner"):
        time.sleep(0.05)
    found = times.taken()
    for name in ("outer", "inner"):
        assert found[name]["seconds"] >= 0.05 > found[name].get("cpu", 0.0)
    assert found[ALL]["seconds"] >= 0.05


def test_a_stage_that_raises_is_counted() -> None:
    times = StageTimes(True)
    try:
        with times.of("failing"):
            raise SystemExit
    except SystemExit:
        pass
    assert times.taken()["failing"]["calls"] == 1


def test_collections_are_a_stage() -> None:
    times = StageTimes(True)
    gc.callbacks.append(times.collects)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(times.collects)
    times.collects("stop", {})  # one that had begun before
    assert times.taken()["process: garbage collection"]["calls"] >= 1


def test_a_collection_that_begins_while_a_stage_is_added_is_counted() -> None:
    times = StageTimes(True)

    class Collects(int):
        def __radd__(self, other: object) -> int:
            gc.collect()
            return int(self)

    gc.callbacks.append(times.collects)
    try:
        adding = threading.Thread(target=lambda: times.add("copy", 0.0, nbytes=Collects(10)), daemon=True)
        adding.start()
        adding.join(20)
        assert not adding.is_alive()
    finally:
        gc.callbacks.remove(times.collects)
    found = times.taken()
    assert found["process: garbage collection"]["calls"] >= 1 and found["copy"]["bytes"] == 10


def test_off_nothing_is_kept() -> None:
    times = StageTimes(False)
    with times.of("copy", 10):
        times.add("device", 1.0)
    assert times.taken() == {}


def test_the_environment_says_whether_a_process_measures() -> None:
    code = "from pymllm_interp.utils.stage_times import TIMES; print(TIMES.on)"
    for value, wanted in (("1", "True"), ("", "False")):
        told = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {VARIABLE: value}, capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == wanted
