"""`RowEdit`: an edit of each row by itself, as a block of a trace writes it in torch. Many requests are one call.

Operations are in the states' dtype and round one by one, as in the block. The bits of a row do not depend on the other rows. So a
`RowProgram` has IEEE arithmetic of single elements and sums over a row, and nothing else.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType

import torch
from torch import Tensor

from ..positions import Positions
from ..site import Site
from ..vectors.files import content_hash
from .op import Gate, Missing, Op

STATES = "h"
"""Name of the states in a program."""


class RowProgram:
    """Statements that change states [rows, 1, width] in place.

    Args:
        source: in the names `STATES` and the keys of `tensors`.
        tensors: [width] each.

    Attributes:
        nan_edits: passes in which it wrote NaN.
    """

    def __init__(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        self.source, self.tensors = source, dict(tensors)
        self._alike = source, *(tensor.dtype for tensor in tensors.values())
        self.nan_edits = 0

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the source and of the tensors."""
        parts = [(name, str(tensor.dtype), content_hash(tensor).hex()) for name, tensor in self.tensors.items()]
        return hashlib.sha256(repr((self.source, parts)).encode()).hexdigest()

    def is_like(self, other: RowProgram) -> bool:
        """Whether both can run in one call: only values of their tensors differ."""
        return self._alike == other._alike

    def run(self, states: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Change states [rows, 1, width] in place.

        Args:
            tensors: in the place of its own: [width], or [rows, 1, width].
        """
        with torch.no_grad():
            exec(_code_of(self.source), {"__builtins__": {}, STATES: states, **tensors})


@lru_cache(maxsize=1024)
def _code_of(source: str) -> CodeType:
    return compile(ast.parse(source), "<rows>", "exec")


def run_rows(states: Tensor, programs: Sequence[RowProgram], counts: Sequence[int]) -> None:
    """Run programs that are `is_like` each other in one call, in place.

    Args:
        states: [rows, width].
        counts: rows of each program, one after another.
    """
    first, tensors = programs[0], {}
    for name, tensor in first.tensors.items():
        own = [program.tensors[name] for program in programs]
        if any(other is not tensor for other in own):
            tensor = torch.cat([each.expand(count, 1, -1) for each, count in zip(own, counts, strict=True)])
        tensors[name] = tensor
    first.run(states.unsqueeze(1), tensors)
    if not bool(states.sum().isfinite()):  # infinities of one sign, or NaN: look at each
        for program, rows in zip(programs, states.split(list(counts)), strict=True):
            program.nan_edits += bool(rows.isnan().any())


@dataclass(frozen=True, eq=False)
class RowEdit(Op):
    """Run a `RowProgram` on the states. It has no kernel, and no form over HTTP."""

    site: Site | str
    program: RowProgram
    positions: Positions = "all"
    when: Gate | None = None
    missing: Missing = "error"

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Not in float32: see `run_rows`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a RowEdit acts on states of the model's dtype")
