"""Loading of plotly's JavaScript: the first figure of a notebook brings it for all."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

REMARK = """<script>
if (!window.Plotly) {
  const remark = document.createElement("p");
  remark.textContent = "This figure needs plotly's JavaScript, which the first figure of the notebook has. Run all cells again.";
  document.currentScript.before(remark);
}
</script>"""
"""Shown instead of a figure if the JavaScript was not loaded."""


class _Cell(NamedTuple):
    """The run of a cell.

    Attributes:
        shell: the IPython shell.
        cell: its id, or None if the front end gives no id.
        run: IPython's count of runs.
    """

    shell: Any
    cell: str | None
    run: int


_carrier: _Cell | None = None
"""The cell with the JavaScript in its output."""


def is_needed() -> bool:
    """Whether a figure that is shown now must bring the JavaScript.

    The first figure of a notebook must. So must the first one of the same cell when it is run again: its output is replaced.
    Outside a notebook each figure must.
    """
    global _carrier
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return True
    now = _Cell(shell, _cell_id(shell), shell.execution_count)
    known = _carrier
    if (
        known is not None
        and known.shell is shell
        and (now.cell is None or now.cell != known.cell or now.run == known.run)
    ):
        return False
    _carrier = now
    return True


def _cell_id(shell: Any) -> str | None:
    """The id of the cell that runs."""
    parent = getattr(shell, "parent_header", None) or {}  # the whole message in ipykernel's shell
    return (parent.get("metadata") or {}).get("cellId")
