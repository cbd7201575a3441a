"""Values of the names of a block, as far as they are known before it runs."""

from __future__ import annotations

import ast
import types
from itertools import pairwise
from typing import Any

import torch

from ..blocks.loops import AST_LOCK
from .plan import NotStatic, Row

MAX_NODES = 100_000
"""Most nodes that are walked, loops unrolled."""
KNOWN = (bool, int, float, str, type(None), slice, range, torch.dtype, torch.device, type(...))


SCALARS = (bool, int, float, type(None))
"""Known values that operators are evaluated of."""
OPEN = (int, float, str, list, tuple, dict, torch.Tensor)
"""Classes that others extend with their own operators."""
EXACT = (bool, int, float, str, list, tuple, dict, torch.Size, torch.Tensor, torch.nn.Parameter)
FUNCTION_TYPES = (types.BuiltinFunctionType, types.FunctionType, type, type(torch.ones_like))
CONTAINERS = (list, dict, range, str)
"""Containers that only look up their items."""


class Unknown:
    """A value that exists when the block runs.

    Args:
        step: whether the value depends only on the number of the step.
        fresh: a container that the block made, or that was saved above it.
    """

    __slots__ = ("fresh", "step")

    def __init__(self, step: bool = False, fresh: bool = False) -> None:
        self.step, self.fresh = step, fresh


class SiteRead(Unknown):
    """Value at a location: that of a site, or a tuple of it."""

    __slots__ = ("in_tuple", "site", "steps")

    def __init__(self, site: str, in_tuple: bool, steps: Steps | None) -> None:
        super().__init__()
        self.site, self.in_tuple, self.steps = site, in_tuple, steps


class RowRead(Unknown):
    """A part of a site's value, by an index that is known.

    Args:
        of: the part that a method converts. The result may be the same tensor, as of ``.float()`` in float32.
    """

    __slots__ = ("origin", "row", "steps")

    def __init__(self, row: Row, steps: Steps | None, of: RowRead | None = None) -> None:
        super().__init__()
        self.row, self.steps = row, steps
        self.origin: RowRead = self if of is None else of.origin


class TracerValue:
    """The tracer of the block."""


class Steps:
    """``tracer.iter[...]``: steps `start` to `stop`; None for no end.

    Attributes:
        listed: the steps, of a list of them.
    """

    def __init__(self, start: int, stop: int | None, listed: tuple[int, ...] = ()) -> None:
        self.start, self.stop, self.listed = start, stop, listed


UNKNOWN = Unknown()


class KnownItems:
    """Items that are known, of a ``zip`` or the like."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


LISTED = {
    enumerate: lambda items, start=0: list(enumerate(items, start)),
    zip: lambda *items: list(zip(*items, strict=False)),
    reversed: lambda items: items[::-1],
    list: list,
    tuple: list,
}
"""Functions of known sequences -> the items that they give."""


def is_small(number: Any, most: int = 2**31) -> bool:
    """Whether arithmetic of the number stays cheap."""
    return isinstance(number, bool | float) or (type(number) is int and abs(number) < most)


def combined(*parts: Any) -> Unknown:
    """A value made of `parts`."""
    return Unknown(step=all(not isinstance(part, Unknown) or part.step for part in parts))


def steps(index: Any) -> Steps:
    """The steps of ``tracer.iter[index]``. Raises NotStatic if they are not known."""
    if isinstance(index, slice):
        parts = index.start or 0, index.stop
        if (
            any(isinstance(part, Unknown) for part in parts)
            or index.step not in (None, 1)
            or min(parts[0], parts[1] or 0) < 0
        ):
            raise NotStatic("steps that are not known")
        return Steps(*parts)
    if type(index) is int and index >= 0:
        return Steps(index, index + 1)
    listed = index if isinstance(index, (list, tuple)) else ()
    if not listed or not all(type(step) is int for step in listed):
        raise NotStatic("steps that are not known")
    if listed[0] < 0 or any(step >= later for step, later in pairwise(listed)):
        raise NotStatic("a list of steps that are not in order")
    return Steps(listed[0], listed[-1] + 1, tuple(listed))


def truth(value: Any) -> bool:
    """Whether a known value is true. Raises NotStatic for an object that may compute that."""
    if not isinstance(value, (*KNOWN, list, tuple, dict)):
        raise NotStatic(f"a branch on a {type(value).__name__}")
    return bool(value)


def evaluate(node: ast.expr, parts: list[Any]) -> Any:
    """The operator `node` over known operands."""
    names = [ast.Name(f"x{i}", ast.Load()) for i in range(len(parts))]
    if isinstance(node, ast.BinOp):
        most = 2**31 if isinstance(node.op, ast.Mult) else 64
        grows = isinstance(node.op, ast.Pow | ast.LShift | ast.Mult)
        if grows and not (is_small(parts[0]) and is_small(parts[1], most)):
            raise NotStatic("a large number")
        made: ast.expr = ast.BinOp(names[0], node.op, names[1])
    elif isinstance(node, ast.UnaryOp):
        made = ast.UnaryOp(node.op, names[0])
    elif isinstance(node, ast.BoolOp):
        made = ast.BoolOp(node.op, list(names))
    else:
        assert isinstance(node, ast.Compare)
        made = ast.Compare(names[0], node.ops, list(names[1:]))
    with AST_LOCK:
        code = compile(ast.fix_missing_locations(ast.Expression(made)), "<lowered>", "eval")
    try:
        return eval(code, {f"x{i}": part for i, part in enumerate(parts)})
    except Exception as error:
        raise NotStatic(f"{type(error).__name__}: {error}") from None


def plain_attribute(of: Any, name: str) -> Any:
    """An attribute that is stored in the object, and computed by nothing."""
    if isinstance(of, types.ModuleType):
        stored, computed = vars(of), False
    elif type(of).__getattribute__ is object.__getattribute__:
        stored, computed = getattr(of, "__dict__", {}), hasattr(getattr(type(of), name, None), "__get__")
    else:
        stored, computed = {}, True
    if name in stored and not computed:
        return stored[name]
    raise NotStatic(f"`.{name}` of a {type(of).__name__}")
