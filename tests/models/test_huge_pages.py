"""Huge pages under a model's weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import COMMON
from helpers_runner import make_runner
from transformers import LlamaConfig

from pymllm_interp.models.weights.huge_pages import HUGE_PAGE


def flags_at(address: int) -> list[str]:
    """What Linux notes of the memory at an address."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(value, 16) for value in first.split("-"))
            within = start <= address < stop
        elif within and first == "VmFlags:":
            return line.split()[1:]
    raise LookupError(hex(address))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason=f"this system ({sys.platform}) has no huge pages"
)
def test_weights_lie_in_huge_pages_before_they_are_written():
    runner = make_runner(LlamaConfig(**{**COMMON, "hidden_size": 1024, "intermediate_size": 2048}), dtype="float32")
    weights = [p for p in runner.get_model().parameters() if p.untyped_storage().nbytes() >= HUGE_PAGE]
    assert len(weights) > 4
    for weight in weights:
        assert "hg" in flags_at(weight.data_ptr() + weight.nbytes // 2)
    runner.shutdown()
