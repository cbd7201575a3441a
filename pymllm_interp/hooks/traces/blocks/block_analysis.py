"""Analysis of a block's code: whether it needs gradients or names of other blocks, or only reads."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ..nnsight_compat import Mediator

GRADIENT_NAMES = frozenset({"backward", "grad", "requires_grad_", "retain_grad", "autograd"})
LIBRARIES = ("torch", "numpy", "einops", "transformers", "nnsight", "pymllm_interp")
"""Packages with functions that are not searched for autograd."""
ACTS = (
    ast.Call, ast.AugAssign, ast.Assert, ast.Raise, ast.Delete, ast.Global, ast.With, ast.AsyncWith, ast.Import, ast.ImportFrom,
    ast.Await, ast.Yield, ast.YieldFrom,
)  # fmt: skip
"""Syntax that may have an effect outside of the block."""


class Names(NamedTuple):
    """Names in a block's own scope."""

    binds: frozenset[str]
    needs: frozenset[str]
    """Names read before the block binds them, in code order."""


@lru_cache(maxsize=1024)
def names_of(code: CodeType) -> Names:
    """The names that a block binds, and those that it needs from outside."""
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


def want_gradients(blocks: Iterable[Mediator]) -> bool:
    """Whether one of the blocks, or a function that it names, uses a name of autograd."""
    return any(
        wants_gradients(block.code) or helpers_want_gradients(block.code, block.lcls, block.glbls) for block in blocks
    )


@lru_cache(maxsize=1024)
def wants_gradients(code: CodeType) -> bool:
    """Whether any code of the block uses a name of autograd (`GRADIENT_NAMES`)."""
    return bool(GRADIENT_NAMES & {name for part in codes_of(code) for name in part.co_names})


def helpers_want_gradients(code: CodeType, scope: Mapping[str, Any], outer: Mapping[str, Any], depth: int = 3) -> bool:
    """Whether a function that the code names uses autograd, or one that this names, and so on.

    Args:
        scope, outer: values of the names; `outer` is asked where `scope` has none.
        depth: maximum depth of followed calls.
    """
    for name in all_names(code):
        helper = scope.get(name)
        if helper is None and name not in scope:
            helper = outer.get(name)
        if isinstance(helper, FunctionType) and not (helper.__module__ or "").startswith(LIBRARIES):
            inner = helper.__code__
            if wants_gradients(inner) or (
                depth > 1 and helpers_want_gradients(inner, helper.__globals__, {}, depth - 1)
            ):
                return True
    return False


def only_binds(block: ast.With | ast.AsyncWith) -> bool:
    """Whether the block can only read values and bind its own names: it calls nothing and changes no object."""
    nodes = [node for statement in block.body for node in ast.walk(statement)]
    stored = [node for node in nodes if isinstance(node, (ast.Attribute, ast.Subscript))]
    return not any(isinstance(node, ACTS) for node in nodes) and all(isinstance(node.ctx, ast.Load) for node in stored)


def augmented(block: ast.With | ast.AsyncWith) -> frozenset[str]:
    """Names that the block changes by ``name += value`` and its kin."""
    changes = [node.target for node in ast.walk(block) if isinstance(node, ast.AugAssign)]
    return frozenset(target.id for target in changes if isinstance(target, ast.Name))


def depend_on_each_other(blocks: list[Mediator]) -> bool:
    """Whether a block reads a name that another block binds, and that was unbound when the block was written."""
    bound_by: dict[str, set[int]] = {}
    for i, block in enumerate(blocks):
        for name in names_of(block.code).binds:
            bound_by.setdefault(name, set()).add(i)
    if not bound_by:
        return False
    return any(
        bound_by.get(name, set()) - {i}
        for i, block in enumerate(blocks)
        for name in names_of(block.code).needs
        if not dict.__contains__(block.lcls, name)
    )


@lru_cache(maxsize=1024)
def all_names(code: CodeType) -> frozenset[str]:
    """All names in the code of a block and of the functions in it: variables, attributes and modules."""
    return frozenset(name for part in codes_of(code) for name in part.co_names)


@lru_cache(maxsize=1024)
def variables_of(code: CodeType) -> tuple[str, ...]:
    """Names that may be variables. The others of `all_names` are attributes, or modules that are imported."""
    found = {
        instruction.argval
        for part in codes_of(code)
        for instruction in dis.get_instructions(part)
        if instruction.argval in part.co_names and not instruction.opname.endswith(("_ATTR", "_METHOD", "IMPORT_NAME"))
    }
    return tuple(sorted(found))


def codes_of(code: CodeType) -> list[CodeType]:
    """The code of a block, and of the functions in it."""
    return [code, *_functions(code)]


def _functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions(constant)
