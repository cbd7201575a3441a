"""Random mixes of all kinds of requests, under pressure, against runs of each by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from .driver import fuzz
from .engines import FAMILIES, WAYS

PLAN = [(seed, FAMILIES[seed % len(FAMILIES)], list(WAYS)[seed % len(WAYS)]) for seed in range(1000)]
"""Seeds with their families and ways: 8 and 7 of them, so that all pairs come in 56 seeds."""
pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize(("seed", "family", "way"), PLAN[:8])
def test_jobs_under_pressure_equal_their_solo_runs(seed: int, family: str, way: str, folder: Path) -> None:
    counts = fuzz(seed, family, way, folder, rounds=3, count=20)
    assert counts["preempted"] and counts["moved_to_host"], f"the pressure was too low: {counts}"


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "family", "way"), PLAN[100:])
def test_thousands_of_jobs_under_pressure_equal_their_solo_runs(seed: int, family: str, way: str, folder: Path) -> None:
    fuzz(seed, family, way, folder, rounds=4, count=40)
