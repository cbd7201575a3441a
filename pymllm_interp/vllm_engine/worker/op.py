"""The custom ops in front of vLLM's norms, or instead of them.

They change the delta and the stream in place, so that idle rows cost no copy. In front, idle rows keep all bits.

A compiler sees that the tensors are changed, and nothing else: the tables are reached by a number, through `STAGES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Taps(Protocol):
    """Callbacks of the ops: a rank's stage of declared hooks."""

    def pair(self, delta: torch.Tensor, stream: torch.Tensor, residual_add: int) -> None:
        """Ops and captures of the delta and the sum at a residual add; both [rows, hidden], changed in place."""
        ...

    def norm(
        self, delta: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, eps: float, kind: int, residual_add: int
    ) -> None:
        """`pair`, then the norm: `stream` becomes the sum, and `delta` its norm, with the final norm's ops and captures."""
        ...

    def state(self, rows: torch.Tensor, site: int) -> None:
        """Ops and captures of a site's rows [rows, hidden], changed in place."""
        ...

    def inner(self, rows: torch.Tensor, sites: Sequence[int], widths: Sequence[int]) -> None:
        """Ops and captures of inner sites, of which `rows` [rows, sum(widths)] has the columns, changed in place.

        A site of -1 has no tap.
        """
        ...


STAGES: dict[int, Taps] = {}
"""Handle -> the stage of a rank. A process has one rank, and a handle for each model that it loads."""
_library = torch.library.Library("pymllm_interp", "FRAGMENT")
_library.define("pair_(Tensor(a!) delta, Tensor(b!) stream, int residual_add, int handle) -> ()")
_library.define(
    "norm_(Tensor(a!) delta, Tensor(b!) stream, Tensor weight, float eps, int kind, int residual_add, int handle) -> ()"
)
_library.define("state_(Tensor(a!) rows, int site, int handle) -> ()")
_library.define("inner_(Tensor(a!) rows, int[] sites, int[] widths, int handle) -> ()")


def _pair(delta: torch.Tensor, stream: torch.Tensor, residual_add: int, handle: int) -> None:
    STAGES[handle].pair(delta, stream, residual_add)


def _norm(
    delta: torch.Tensor,
    stream: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kind: int,
    residual_add: int,
    handle: int,
) -> None:
    STAGES[handle].norm(delta, stream, weight, eps, kind, residual_add)


def _state(rows: torch.Tensor, site: int, handle: int) -> None:
    STAGES[handle].state(rows, site)


def _inner(rows: torch.Tensor, sites: Sequence[int], widths: Sequence[int], handle: int) -> None:
    STAGES[handle].inner(rows, sites, widths)


def _nothing(*_: object) -> None:
    """Fake implementation: shapes and dtypes do not change."""


for _key in ("CPU", "CUDA"):
    _library.impl("pair_", _pair, _key)
    _library.impl("norm_", _norm, _key)
    _library.impl("state_", _state, _key)
    _library.impl("inner_", _inner, _key)
for _name in ("pair_", "norm_", "state_", "inner_"):
    torch.library.register_fake(f"pymllm_interp::{_name}", _nothing, lib=_library)


def register(stage: Taps) -> int:
    """Make a stage known to the ops. Returns its handle, which compiled code keeps."""
    handle = len(STAGES)
    STAGES[handle] = stage
    return handle
