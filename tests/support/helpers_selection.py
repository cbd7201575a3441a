"""Which cases run where: most are for nights and for devices, so that `make test` takes ten minutes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

LOCAL_SCRIPTS = {"call_plain_outside", "result_is_the_output", "gradients_afterwards", "a_saved_loss"}
"""Scripts of tests that keep weights, graphs or one object under two names: these stay on a server."""


def select(config: pytest.Config, items: list[pytest.Item], cuda: bool) -> None:
    """Skip what cannot run here, and mark slow what runs elsewhere or at night.

    Args:
        config: Its options --remote and --tenth count.
        items: The tests; those of other tenths are taken out.
        cuda: Whether there is a CUDA device.
    """
    if not cuda:
        _few(items)
        _thin(items)
        _skip(
            [item for item in items if item.get_closest_marker("gpu")], "needs a CUDA device, and torch sees none here"
        )
    if config.getoption("--remote"):
        _skip([item for item in items if _is_local(item)], "looks into an engine of this process")
    if (tenth := config.getoption("--tenth")) is not None:
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % 10 != tenth % 10]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % 10 == tenth % 10]


def _skip(items: Sequence[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


def _is_local(item: pytest.Item) -> bool:
    found = getattr(item, "callspec", None)
    return item.get_closest_marker("local") is not None or (
        found is not None and found.id.rpartition("-")[2] in LOCAL_SCRIPTS
    )


def _few(items: list[pytest.Item]) -> None:
    """Mark cases of `few` tests slow, but for those with the named values. `ways`: of the cases with such engines alone."""
    for item in items:
        for marker in item.iter_markers("few"):
            (name, *values), ways = marker.args, marker.kwargs.get("ways")
            params: dict[str, object] = getattr(item, "callspec").params  # noqa: B009
            if params[name] not in values and (ways is None or params["lm_of"] in ways):
                item.add_marker(pytest.mark.slow)


def _thin(items: list[pytest.Item]) -> None:
    """Mark most cases of `thin` tests slow. Of several parameters, each value keeps a case; of one, the first case stays.
    Slow cases, and those for a CUDA device, run nowhere here and keep no value."""
    tests: dict[str, list[tuple[pytest.Item, set[tuple[int, str]]]]] = {}
    for item in items:
        if item.get_closest_marker("thin") is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("thin") is not None and item.get_closest_marker("slow") is None:
            test, _, case = item.nodeid.partition("[")
            tests.setdefault(test, []).append((item, set(enumerate(case.split("-")))))
    for cases in tests.values():
        seen: set[tuple[int, str]] = set()
        kept: set[str] = set()
        for wanted in (
            set.isdisjoint,
            lambda values, seen: not values <= seen,
        ):  # cases whose values are all new come first
            for item, values in cases:
                if wanted(values, seen) and (len(values) > 1 or not seen):
                    seen |= values
                    kept.add(item.nodeid)
        for item, _ in cases:
            # By the hash of its name: in the order of parameters it could be one value's cases.
            thin = item.get_closest_marker("thin")
            if item.nodeid not in kept and zlib.crc32(item.nodeid.encode()) % thin.args[0]:  # pyright: ignore[reportOptionalMemberAccess]
                item.add_marker(pytest.mark.slow)
