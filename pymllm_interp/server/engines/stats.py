"""Counters of several engines, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def merged_stats(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combined `Engine.stats` of all engines: numbers are added. Other values are the first engine's.

    Args:
        found: non-empty list of the engines' statistics.
    """
    return dict(found[0]) if len(found) == 1 else _added(found)


def _added(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one[name] for one in found if one.get(name) is not None]
        if not values:
            merged[name] = None
        elif isinstance(values[0], Mapping):
            merged[name] = _added(values)
        elif isinstance(values[0], int | float) and not isinstance(values[0], bool):
            merged[name] = sum(values)
        else:
            merged[name] = values[0]
    return merged
