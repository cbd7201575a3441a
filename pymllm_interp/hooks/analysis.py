"""What a block's code tells before it runs: whether it wants gradients, and whether it needs its siblings' names."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

from .nnsight_compat import Mediator

GRADIENT_NAMES = frozenset({"backward", "grad", "requires_grad_", "retain_grad", "autograd"})


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
