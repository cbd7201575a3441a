"""Whether the code around invokes can run twice: here, to collect their blocks, and on a server."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from ..nnsight_compat import InterleavingTracer

CALLS = ("range", "len", "enumerate", "zip", "reversed", "sorted", "list", "dict", "str", "int", "tuple")
"""Builtins that change nothing."""


def opens_invokes_only(body: list[ast.stmt], scope: Mapping[str, Any]) -> bool:
    """Whether statements only open invokes, in loops or not, and bind containers that their blocks fill.

    Args:
        scope: names that the statements may read. An iterator among them can be read once.
    """
    return all(_opens(statement, scope) for statement in body)


def _opens(statement: ast.stmt, scope: Mapping[str, Any]) -> bool:
    match statement:
        case ast.With(
            items=[
                ast.withitem(
                    context_expr=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="invoke"), args=args) as call
                )
            ]
        ) if isinstance(_found(scope, name), InterleavingTracer):
            return all(_repeats(part, scope) for part in (*args, *(keyword.value for keyword in call.keywords)))
        case ast.For(iter=over, body=body, orelse=[]):
            return _repeats(over, scope) and opens_invokes_only(body, scope)
        case ast.Assign(targets=[ast.Name()], value=value):
            return _repeats(value, scope)
        case ast.Pass():
            return True
    return False


def _repeats(node: ast.expr, scope: Mapping[str, Any]) -> bool:
    """Whether an expression has the same value again, and changes nothing."""
    match node:
        case ast.Constant():
            return True
        case ast.Name(id=name):
            return not isinstance(_found(scope, name), Iterator)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in CALLS and _found(scope, name) is None:
            return all(_repeats(part, scope) for part in args)
        case ast.Call(func=ast.Attribute(value=value, attr="save"), args=[], keywords=[]):
            return isinstance(value, ast.Call | ast.List | ast.Dict) and _repeats(value, scope)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.JoinedStr(values=parts):
            return all(_repeats(part, scope) for part in parts)
        case ast.FormattedValue(value=value):
            return _repeats(value, scope)
        case ast.Dict(keys=keys, values=values):
            return all(key is not None and _repeats(key, scope) for key in keys) and all(
                _repeats(value, scope) for value in values
            )
        case ast.BinOp(left=left, right=right) | ast.Subscript(value=left, slice=right):
            return _repeats(left, scope) and _repeats(right, scope)
    return False


def _found(scope: Mapping[str, Any], name: str) -> Any:
    try:
        return scope[name]
    except (KeyError, NameError):
        return None
