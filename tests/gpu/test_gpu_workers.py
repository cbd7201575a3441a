"""Workers of `make test-gpu`: they fit on the device together, and each has its share."""

from __future__ import annotations

import pytest
from conftest import device_share
from gpu_workers import CONTEXT_BYTES, SHARERS, WORKER_BYTES, num_workers, options, share_of, take_device


@pytest.mark.parametrize(
    ("gib", "cores", "expected"),
    [(139, 16, 8), (139, 4, 2), (79, 64, 5), (34, 16, 2), (15, 16, 1), (8, 1, 1), (0, 16, 1)],
)
def test_as_many_workers_run_as_memory_and_cores_allow(gib: int, cores: int, expected: int) -> None:
    workers = num_workers(gib << 30, cores)
    assert workers == expected
    assert num_workers(gib << 30, 4 * cores, 4) == (4 * expected if gib >= 15 else 1)
    assert workers == 1 or share_of(gib << 30, workers) + CONTEXT_BYTES >= WORKER_BYTES
    assert workers * (share_of(gib << 30, workers) + CONTEXT_BYTES) <= gib << 30


def test_workers_are_spread_over_the_devices() -> None:
    environments = [{"PYTEST_XDIST_WORKER": f"gw{i}", "PYTEST_XDIST_WORKER_COUNT": "7"} for i in range(7)]
    for environment in environments:
        take_device(environment, 4)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == list("0123012")
    assert {one[SHARERS] for one in environments} == {"2"}


@pytest.mark.parametrize(
    ("given", "devices", "sharers"),
    [
        ({}, 4, "1"),
        ({"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "3"}, 1, "3"),
        ({"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "3"}, 0, "3"),
        ({"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "3", "CUDA_VISIBLE_DEVICES": "2"}, 1, "3"),
    ],
)
def test_a_choice_of_devices_stays(given: dict[str, str], devices: int, sharers: str) -> None:
    environment = dict(given)
    take_device(environment, devices)
    assert environment == {**given, SHARERS: sharers}


def test_without_a_device_there_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert options() == ""


def test_a_worker_sees_its_share_as_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved, fractions = 3 << 30, []
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: (100 << 30, 120 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device=None: reserved)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", fractions.append)
    import torch

    with device_share(6):
        assert torch.cuda.mem_get_info() == (16 << 30, 19 << 30)
        assert fractions == [19 / 120]
        reserved = 20 << 30
        assert torch.cuda.mem_get_info(0) == (0, 19 << 30)
    assert torch.cuda.mem_get_info()[1] == 120 << 30 and fractions == [19 / 120, 1.0]
