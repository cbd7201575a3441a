"""Edits by the states that they change, as a `RowProgram`: what a block computes of each row by itself."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...interventions.row_edit import STATES, RowProgram
from ...site import Site
from ..nnsight_compat import Envoy
from .plan import NotStatic
from .values import RowRead, SiteRead, Unknown

if TYPE_CHECKING:
    from .expressions import Expressions

OPERATORS = ast.Add | ast.Sub | ast.Mult | ast.Div
SUMS = frozenset({"norm", "sum", "mean"})
"""Methods that sum over a row, where it is their last dimension and stays."""
EACH = frozenset({"abs", "clone", "detach", "float", "neg", "relu", "sqrt", "square"})
"""Methods of single elements, without arguments. Their results are exact, or rounded once as IEEE 754 says."""
FUNCTIONS: dict[Any, str] = {
    torch.norm: "norm", torch.linalg.norm: "norm", torch.linalg.vector_norm: "norm", torch.sum: "sum", torch.mean: "mean",
    torch.abs: "abs", torch.clamp: "clamp", torch.relu: "relu", torch.sqrt: "sqrt", torch.square: "square",
}  # fmt: skip
PRODUCTS = frozenset({"bmm", "dot", "einsum", "inner", "matmul", "mm", "mv", "outer"})
"""Functions with bits that depend on the other rows."""
NOT_BY_ROW = "an edit that is not computed row by row"
LONGEST = 1 << 15
"""Width from which on torch may sum a row in several threads, if it is the only one."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RowExpression:
    """The value of an edit, as a program of the rows that it changes.

    Args:
        site: what is edited.
        index: of the edit; None for the whole value.
        row_of: the row that an index selects.
    """

    def __init__(
        self, walk: Expressions, site: str, index: ast.expr | None, row_of: Callable[[ast.expr | None], int | None]
    ) -> None:
        self._walk, self._site, self._index, self._row_of = walk, site, index, row_of
        self._width = walk.model.widths[Site.parse(site).kind]
        self._row = row_of(index)
        self._tensors: dict[str, torch.Tensor] = {}

    def reads(self, node: ast.AST) -> bool:
        """Whether an expression has the states that are edited."""
        return any(self._is_states(part) for part in ast.walk(node))

    def program(self, node: ast.stmt, whole: bool) -> RowProgram:
        """The program of a statement that edits.

        Args:
            whole: the value is assigned to the module, so it must have the shape and the dtype of the states.

        Raises:
            NotStatic: a row depends on others, or on other values of the pass. So does an operation with bits that may differ.
        """
        if self._width >= LONGEST:
            raise NotStatic(NOT_BY_ROW)
        assert isinstance(node, ast.Assign | ast.AugAssign)
        value = self._value(node.value)
        operator = ""
        if isinstance(node, ast.AugAssign):
            if not isinstance(node.op, OPERATORS):
                raise NotStatic("an edit in place")
            operator = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(node.op)]
        text = ast.unparse(value)
        program = RowProgram(f"{STATES}[:] {operator}= {text}", self._tensors)
        self._try(program, text if whole else None)
        return program

    def cause(self, value: ast.expr) -> str:
        """What of a value prevents its program, and the declared op that does the same; "" for other causes."""
        steps = made = ""
        for part in ast.walk(value):
            function = part.func if isinstance(part, ast.Call) else None
            name = getattr(function, "attr", getattr(function, "id", ""))
            if (isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult)) or name in PRODUCTS:
                return f"`{ast.unparse(part)}` is a product: Ablate({self._site!r}, directions) removes directions"
            found = self._walk.names.get(part.id) if isinstance(part, ast.Name) else None
            if isinstance(found, SiteRead | RowRead) and not self._is_states(part):
                return f"`{ast.unparse(part)}` is a value of the pass at another place"
            if isinstance(part, ast.Name) and isinstance(found, Unknown) and not self._is_states(part):
                steps, made = (part.id, made) if found.step else (steps, part.id)
        if steps:
            return (
                f"`{steps}` depends on the step: Steer({self._site!r}, vectors, positions=Generated(0, n)) has a vector for each "
                "position"
            )
        return f"`{made}` is made in the block: above the `with`, if nothing of the pass is in it" if made else ""

    def _try(self, program: RowProgram, whole: str | None) -> None:
        """Run it on states of ones."""
        states = torch.ones(2, 1, self._width, dtype=self._walk.model.dtype)
        kept = f"out = {whole}" if whole else ""
        try:
            program.run(states.clone(), program.tensors)
            found: dict[str, Any] = {}
            exec(kept, {"__builtins__": {}, STATES: states, **program.tensors}, found)
        except Exception as error:
            raise NotStatic(f"{type(error).__name__}: {error}") from None
        out = found.get("out", states)
        if not isinstance(out, torch.Tensor) or out.shape != states.shape or out.dtype != states.dtype:
            raise NotStatic("an assignment of another shape or dtype")

    def _is_states(self, node: ast.AST) -> bool:
        """Whether it is the whole value at the site: a name of it, or ``module.output``."""
        walk = self._walk
        if isinstance(node, ast.Name):
            found = walk.names.get(node.id)
            return (
                isinstance(found, SiteRead)
                and (found.site, found.in_tuple) == (self._site, False)
                and found.steps is walk.steps
            )
        if not isinstance(node, ast.Attribute) or node.attr not in ("output", "input"):
            return False
        envoy = walk.value(node.value)
        point = walk.points.get(f"{envoy.path}.{node.attr}") if isinstance(envoy, Envoy) else None
        return point is not None and (point.site, point.in_tuple) == (self._site, False)

    def _value(self, node: ast.expr) -> ast.expr:
        """The expression in the names of the program."""
        if self._is_states(node) or (isinstance(node, ast.Subscript) and self._is_states(node.value)):
            index = node.slice if isinstance(node, ast.Subscript) else None
            if self._row_of(index) != self._row or self._dims(index) != self._dims(self._index):
                raise NotStatic("an edit of a row by another one, or by another shape")
            return ast.Name(STATES, ast.Load())
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            return ast.BinOp(self._value(node.left), node.op, self._value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and self.reads(node):
            return ast.UnaryOp(node.op, self._value(node.operand))
        if isinstance(node, ast.Call) and self.reads(node):
            return self._call(node)
        return self._constant(self._walk.value(node))

    def _dims(self, index: ast.expr | None) -> int:
        """Dimensions of the values that an index selects."""
        parts = index.elts if isinstance(index, ast.Tuple) else [index] if index is not None else []
        return 3 - sum(type(self._walk.value(part)) is int for part in parts)

    def _constant(self, value: Any) -> ast.expr:
        """What exists before the block runs."""
        if type(value) in (int, float) and math.isfinite(value) and abs(value) < 2**53:
            return ast.Constant(value)
        if isinstance(value, Unknown) or type(value) is not torch.Tensor:
            raise NotStatic(NOT_BY_ROW)
        plain = value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad
        if not plain or value.dtype not in DTYPES or tuple(value.shape) != (self._width,):
            raise NotStatic("an edit by a tensor that is no vector of the states' width")
        name = f"t{len(self._tensors)}"
        self._tensors[name] = value.detach().clone()
        return ast.Name(name, ast.Load())

    def _call(self, node: ast.Call) -> ast.expr:
        """A method of the rows, or a function of them."""
        if isinstance(node.func, ast.Attribute) and self.reads(node.func.value):
            name, rows, arguments = node.func.attr, node.func.value, node.args
        else:
            function = self._walk.value(node.func)
            known = type(function) is type(torch.abs) or callable(function)
            name = FUNCTIONS.get(function, "") if known and type(function).__hash__ is not None else ""
            rows, arguments = (node.args[0] if node.args else None), node.args[1:]
            if not name or rows is None or not self.reads(rows):
                raise NotStatic(NOT_BY_ROW)
        options = {keyword.arg: self._walk.value(keyword.value) for keyword in node.keywords}
        if name == "clamp":
            bounds: dict[Any, Any] = dict(zip(("min", "max"), map(self._walk.value, arguments), strict=False)) | options
            if not bounds.keys() <= {"min", "max"} or not all(type(bound) in (int, float) for bound in bounds.values()):
                raise NotStatic(NOT_BY_ROW)
            return self._method(rows, name, **bounds)
        if name in EACH and not arguments and not options:
            return self._method(rows, name)
        over_row = options == {"dim": -1, "keepdim": True} and options["keepdim"] is True and not arguments
        over_row |= len(arguments) == 1 and options == {"keepdim": True} and self._is_last(name, arguments[0])
        if name not in SUMS or not over_row:
            raise NotStatic(NOT_BY_ROW)
        return self._method(rows, name, dim=-1, keepdim=True)

    def _is_last(self, name: str, dim: ast.expr) -> bool:
        """Whether the first argument of a sum says its last dimension. The one of a norm is its order."""
        return name != "norm" and self._walk.value(dim) == -1

    def _method(self, rows: ast.expr, name: str, **options: Any) -> ast.expr:
        keywords = [ast.keyword(key, ast.Constant(value)) for key, value in options.items()]
        return ast.Call(ast.Attribute(self._value(rows), name, ast.Load()), [], keywords)
