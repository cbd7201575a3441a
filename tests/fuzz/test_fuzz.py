"""Random mixes of all kinds of requests, under pressure, against runs of each by itself.

A seed makes the jobs, and selects a family of models and a way to run hooks. The order in which threads come is the machine's.

    pytest tests/fuzz                                  # a quarter of a minute
    pytest tests/fuzz -m slow                          # half an hour: each family in each way
    pytest tests/fuzz -m slow --fuzz-seeds 1000:1010   # these seeds
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .driver import fuzz
from .engines import FAMILIES, WAYS

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]
SHORT = range(5)
LONG = range(100, 184)
"""As many as there are pairs of a family and a way."""
INTERPRETED = 0.25
"""Size of runs with device tables: off CUDA, an interpreter runs their kernels."""


def pair_of(seed: int) -> tuple[str, str]:
    """(family, way)."""
    return FAMILIES[seed % len(FAMILIES)], list(WAYS)[seed % len(WAYS)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--fuzz-seeds")
    slow = metafunc.definition.get_closest_marker("slow") is not None
    seeds = range(*map(int, given.split(":"))) if given and slow else LONG if slow else SHORT
    plans = [(seed, *pair_of(seed)) for seed in seeds]
    metafunc.parametrize(("seed", "family", "way"), plans, ids=["-".join(map(str, plan)) for plan in plans])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def size(way: str, count: int) -> int:
    """Number of jobs in a round."""
    return round(count * INTERPRETED) if WAYS[way].tables else count


def test_jobs_under_pressure_equal_their_solo_runs(seed: int, family: str, way: str, folder: Path) -> None:
    counts = fuzz(seed, family, way, folder, rounds=1, count=size(way, 9))
    assert counts["preempted"] + counts["moved_to_host"], "the pressure was too low"


@pytest.mark.slow
def test_thousands_of_jobs_under_pressure_equal_their_solo_runs(seed: int, family: str, way: str, folder: Path) -> None:
    fuzz(seed, family, way, folder, rounds=4, count=size(way, 40))
