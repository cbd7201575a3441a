"""`joined`: the results of a request from the ranks of several pipeline stages as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....core.receipt import Applied
from ....core.step import DeclaredResult
from ....hooks.captures.activations import Activations
from ...worker.hooked_request import RankResult


def joined(found: Sequence[RankResult | None], order: tuple[str, ...]) -> RankResult | None:
    """The result of a request; None if a stage never met it.

    Args:
        found: results in the order of the stages.
        order: captured sites.
    """
    parts = [one for one in found if one is not None]
    if len(parts) < len(found):
        return None
    first = parts[0]
    if len(parts) == 1:
        return first
    captured = {each.site: each for one in parts for each in one.declared.captured}
    own = [one.declared.activations for one in parts if one.declared.activations is not None]
    declared = DeclaredResult(
        [_applied(each) for each in zip(*(one.declared.applied for one in parts), strict=True)],
        [captured[site] for site in order if site in captured],
        _activations(own, order) if own else None,
        [rows for one in parts for rows in one.declared.rows or ()] or None,
    )
    error = next((one.error for one in parts if one.error is not None), None)
    return RankResult(declared, first.steps, first.preemptions, error)


def _applied(counted: tuple[Applied, ...]) -> Applied:
    """Counts of an op. All stages count its rows, and the stage of its site counts the gate's fires."""
    fires = [each.gate_fires for each in counted if each.gate_fires is not None]
    return replace(counted[0], gate_fires=max(fires)) if fires else counted[0]


def _activations(parts: Sequence[Activations], order: tuple[str, ...]) -> Activations:
    told: list[Any] = [each.as_pieces() for each in parts]
    pieces = [piece for _, own, _, _ in told for piece in own]
    error = next((error for *_, error in told if error is not None), None)
    return Activations(told[0][0], () if error else pieces, () if error else order, error)
