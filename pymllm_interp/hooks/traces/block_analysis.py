"""What a block's code tells: whether it wants gradients, needs its siblings' names, or can do anything but read."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

from .nnsight_compat import Mediator

GRADIENT_NAMES = frozenset({"backward", "grad", "requires_grad_", "retain_grad", "autograd"})
ACTS = (
    ast.Call, ast.AugAssign, ast.Assert, ast.Raise, ast.Delete, ast.Global, ast.With, ast.AsyncWith, ast.Import, ast.ImportFrom,
    ast.Await, ast.Yield, ast.YieldFrom,
)  # fmt: skip
"""What may do something that is seen behind the block."""


class Names(NamedTuple):
    """The names of a block's own scope."""

    binds: frozenset[str]
    needs: frozenset[str]
    """Read before the block binds them, in the order of its code."""


@lru_cache(maxsize=1024)
def names_of(code: CodeType) -> Names:
    """What the block binds, and what it needs from around it."""
    binds, needs = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            binds.add(instruction.argval)
        elif instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL") and instruction.argval not in binds:
            needs.add(instruction.argval)
    for inner in _functions(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval not in binds:
                needs.add(instruction.argval)
    return Names(frozenset(binds), frozenset(needs))


@lru_cache(maxsize=1024)
def wants_gradients(code: CodeType) -> bool:
    """Whether the block names autograd in any of its code."""
    return bool(GRADIENT_NAMES & {name for part in (code, *_functions(code)) for name in part.co_names})


def only_binds(block: ast.With | ast.AsyncWith) -> bool:
    """Whether the block can do nothing but read, and bind names of its own: it calls nothing, and writes to no object."""
    nodes = [node for statement in block.body for node in ast.walk(statement)]
    stored = [node for node in nodes if isinstance(node, (ast.Attribute, ast.Subscript))]
    return not any(isinstance(node, ACTS) for node in nodes) and all(isinstance(node.ctx, ast.Load) for node in stored)


def depend_on_each_other(blocks: list[Mediator]) -> bool:
    """Whether some block reads a name that another one binds (and that it did not find where it was written)."""
    bound_by: dict[str, set[int]] = {}
    for i, block in enumerate(blocks):
        for name in names_of(block.code).binds:
            bound_by.setdefault(name, set()).add(i)
    return any(
        bound_by.get(name, set()) - {i}
        for i, block in enumerate(blocks)
        for name in names_of(block.code).needs
        if not dict.__contains__(block.lcls, name)
    )


def _functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions(constant)
