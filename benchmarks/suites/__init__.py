"""Suites on one engine that `benchmarks/suite.py` runs, and what they share with the other scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from pymllm_interp.bench.suites import Model

from .interventions import interventions_suite
from .memory import memory_suite
from .profile import profile_suite
from .speculative import speculative_suite
from .startup import startup_suite
from .toolkit import toolkit_suite
from .traces import traces_suite

SUITES: dict[str, Callable[[Model], Iterator[dict[str, Any]]]] = {
    "interventions": interventions_suite, "memory": memory_suite, "profile": profile_suite, "speculative": speculative_suite,
    "startup": startup_suite, "toolkit": toolkit_suite, "traces": traces_suite,
}  # fmt: skip
"""By name; "serving" has settings of its own (`suites.serving.suite`)."""


def growing_record(suite: str, model: Model, machine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record of a suite after each part."""
    record = {"suite": suite, "load_format": model.load_format, "machine": machine, "settings": asdict(model.settings)}
    yield from (record | found for found in SUITES[suite](model))
