"""The custom ops in front of vLLM's norms, or instead of them.

They change the delta and the stream in place, so that idle rows cost no copy. In front, idle rows keep all bits.

A compiler sees that the tensors are changed, and nothing else: the tables are reached by a number, through `STAGES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

STAGES: dict[int, Any] = {}
"""Handle -> the `RankTaps` of a rank. A process has one rank, and a handle for each model that it loads."""
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


DIRECT = SimpleNamespace(pair_=_pair, norm_=_norm, state_=_state, inner_=_inner)
"""The ops as functions, for code that no compiler reads. Torch's dispatcher takes 1.7 us for each call, these take 0.1."""
used: Any = None
"""`DIRECT` where it is to be called; None: torch's ops."""


@contextmanager
def directly() -> Iterator[None]:
    """Call functions, not torch's ops."""
    global used
    before, used = used, DIRECT
    try:
        yield
    finally:
        used = before


def register(stage: Any) -> int:
    """Make a stage known to the ops. Returns its handle, which compiled code keeps."""
    handle = len(STAGES)
    STAGES[handle] = stage
    return handle
