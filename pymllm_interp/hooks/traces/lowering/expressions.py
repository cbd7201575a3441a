"""Expressions of a block: their values, and their reads."""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ..nnsight_compat import Envoy, InterleavingTracer, Iterations, save
from ..syntax.envoy import TracedEnvoy, TracedModel
from . import pure
from .plan import LAST, BlockPlan, LoweringModel, Need, NotStatic, Row, Scope, SiteLocation, same_state
from .step_loop import TakenLoop
from .values import (
    CONTAINERS,
    EXACT,
    FUNCTION_TYPES,
    KNOWN,
    LISTED,
    MAX_NODES,
    OPEN,
    SCALARS,
    UNKNOWN,
    KnownItems,
    RowRead,
    SiteRead,
    Steps,
    TracerValue,
    Unknown,
    evaluate,
    plain_attribute,
    steps,
    truth,
)


class Expressions:
    """The state of one walk over a block, and its expressions.

    Attributes:
        plan: plan found so far.
        line: current line.
        steps: steps of the enclosing loop over steps.
        read: sites that were read.
        used: sites of which something was made.
        names: the block's own, and their values.
        edited: (line, column) of the statements that edit.
        conditional: whether the line is in a branch that not all steps take.
        taken: the loop over steps that it is in, while all of the loop's steps can be taken at once.
    """

    def __init__(self, scope: Scope, saved: set[int], model: LoweringModel, single: bool) -> None:
        self.plan, self.line = BlockPlan(), 0
        self._scope, self._saved, self.model, self.single = scope, saved, model, single
        self.points = model.points
        self.names: dict[str, Any] = {}
        self.steps: Steps | None = None
        self.read: set[str] = set()
        self.used: set[str] = set()
        self.edited: set[tuple[int, int]] = set()
        self.conditional = False
        self.taken: TakenLoop | None = None
        self._order, self._looped, self._left = -1, False, MAX_NODES

    # -- expressions ---------------------------------------------------------------------------

    def value(self, node: ast.expr | None, whole: bool = True) -> Any:
        """The value of an expression: an object that exists, or an `Unknown`.

        Args:
            whole: a value of a site is used as it is; False where its rows are known.
        """
        self._left -= 1
        if self._left < 0:
            raise NotStatic(f"more than {MAX_NODES} operations")
        visit = getattr(self, f"_{type(node).__name__}_value", None)
        if visit is None:
            raise NotStatic(f"`{type(node).__name__.lower()}` is not lowered")
        found = visit(node)
        if whole and isinstance(found, SiteRead):
            self.use(found)
        return found

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(value, KnownItems):
            raise NotStatic("a variable that holds an iterator")
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            if any(isinstance(entry, ast.Starred) for entry in target.elts):
                raise NotStatic("a starred name")
            items = self._items(value) if not isinstance(value, Unknown) else itertools.repeat(self._part(value))
            for entry, item in zip(target.elts, items, strict=False):
                self._bind(entry, item)
        elif isinstance(target, ast.Subscript):
            into = self.value(target.value)
            if not (isinstance(into, Unknown) and into.fresh):
                raise NotStatic("an edit in place, or of an object from outside")
            self.value(target.slice)
        else:
            raise NotStatic("an assignment to an attribute")

    def _Constant_value(self, node: ast.Constant) -> Any:
        return node.value

    def _Name_value(self, node: ast.Name) -> Any:
        return self._load(node.id)

    def _load(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        try:
            return self._known(self._scope[name])
        except (KeyError, NameError):
            pass
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise NotStatic(f"`{name}` does not exist yet")

    def _known(self, value: Any) -> Any:
        if isinstance(value, InterleavingTracer):
            return TracerValue()
        if id(value) in self._saved and type(value) in (list, dict):
            return Unknown(fresh=True)
        if isinstance(value, OPEN) and type(value) not in EXACT:
            raise NotStatic(f"a {type(value).__name__}, which may have operators of its own")
        return value

    def _Attribute_value(self, node: ast.Attribute) -> Any:
        of = self.value(node.value, whole=node.attr not in ("shape", "dtype", "ndim"))
        name = node.attr
        if isinstance(of, SiteRead) and name in ("shape", "dtype", "ndim"):
            return UNKNOWN
        if isinstance(of, TracerValue):
            return self._of_tracer(name)
        if isinstance(of, Unknown):
            if name not in pure.ATTRIBUTES:
                raise NotStatic(f"`.{name}` is not lowered")
            return Unknown(of.step)
        if isinstance(of, Envoy):
            return self._of_envoy(of, name)
        if isinstance(of, torch.Tensor):
            if name not in pure.ATTRIBUTES:
                raise NotStatic(f"`.{name}` of a tensor")
            return UNKNOWN
        return self._known(plain_attribute(of, name))

    def _of_tracer(self, name: str) -> Any:
        if name == "iter" and not self.single:
            return Iterations
        if name != "result" or self.steps is not None:
            raise NotStatic(f"`tracer.{name}` is not lowered")
        if self.single:
            self.reach("result")
            self._need("logits", None, None)
            self.plan.needs["logits"].whole = True
        self._looped = True
        return UNKNOWN

    def _of_envoy(self, envoy: Envoy, name: str) -> Any:
        if type(envoy) is not TracedEnvoy and not isinstance(envoy, TracedModel):
            raise NotStatic(f"`{type(envoy).__name__}` is a class of its own")
        root = isinstance(envoy, TracedModel)
        if name in ("output", "input") or (root and name in ("logits", "samples")):
            return self._read(f"{envoy.path}.{name}")
        if name in envoy._child_map or name in envoy._aliases:
            return getattr(envoy, name)
        raise NotStatic(f"`{envoy.path}.{name}` is not lowered")

    def _read(self, location: str) -> SiteRead | Unknown:
        point = self.points.get(location)
        if point is None or (self.single and not point.site):
            raise NotStatic(f"`{location}` is no site")
        self.reach(location)
        if not point.site:  # the token
            self.taken = None
            return UNKNOWN
        self.read.add(point.site)
        if self.taken is not None:
            self.taken.reads += 1
        if not point.end:  # the step's logits have another shape
            self.taken = None
        site = before if (before := same_state(point.site)) in self.read else point.site
        self._need(site, LAST, self.steps)
        return SiteRead(site, point.in_tuple, self.steps)

    def reach(self, location: str) -> None:
        order = self.points[location].order
        again = order == self._order
        if (order <= self._order and not again) or (self._looped and self.steps is None):
            raise NotStatic(f"`{location}` is read late, or again")
        self._order = order

    def stands_at(self, point: SiteLocation) -> bool:
        """Whether the block has reached this location last."""
        return self._order == point.order

    def use(self, read: SiteRead, row: int | None = None, whole: bool = True) -> None:
        """Need a row of the value that was read; None: all rows."""
        self.used.add(read.site)
        self._need(read.site, row, read.steps)
        self.plan.needs[read.site].whole |= whole

    def _need(self, site: str, row: int | None, steps: Steps | None) -> None:
        need = self.plan.needs.setdefault(site, Need())
        if steps is None or steps.start == 0:
            need.add_rows(LAST if site == "logits" and not self.single else row)
        if steps is not None:
            need.add_generated(max(steps.start, 1) - 1, None if steps.stop is None else steps.stop - 1)

    def _Subscript_value(self, node: ast.Subscript) -> Any:
        of = self.value(node.value, whole=False)
        if isinstance(of, SiteRead):
            return self._of_read(of, node.slice)
        index = self.value(node.slice)
        self._is_pure_value(index)
        if of is Iterations:
            return steps(index)
        if isinstance(of, Unknown):
            return self._part(of)
        if isinstance(of, Envoy):
            if isinstance(index, Unknown) or not isinstance(index, int):
                raise NotStatic("a module by an index that is not known")
            try:
                return of[index]
            except Exception as error:
                raise NotStatic(f"{error}") from None
        if type(of) is torch.Tensor and type(index) is int and of.dim() > 1 and -len(of) <= index < len(of):
            self.plan.computes = True
            return of.detach()[index]
        if isinstance(of, torch.Tensor) or isinstance(index, Unknown):
            self._is_pure_value(of)
            self.plan.computes |= isinstance(index, Unknown)
            return UNKNOWN
        if type(of) in CONTAINERS or isinstance(of, tuple):
            try:
                return self._known(of[index])  # pyright: ignore[reportArgumentType, reportCallIssue]
            except Exception as error:
                raise NotStatic(f"{type(error).__name__}: {error}") from None
        raise NotStatic(f"an entry of a {type(of).__name__}")

    def _of_read(self, read: SiteRead, index: ast.expr) -> Any:
        """A part of a site's value. Its rows are known if the index is a constant."""
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        values = [self.value(part) for part in parts]
        if read.in_tuple:
            if len(values) == 1 and isinstance(values[0], int) and values[0] == 0:
                return SiteRead(read.site, False, read.steps)
            self.use(read)
            return UNKNOWN
        row = values[1] if len(values) > 1 and type(values[0]) in (int, slice) and type(values[1]) is int else None
        one_row = len(values) > 1 and type(values[0]) is int and type(values[1]) is int
        self.use(read, row if read.steps is None or row == LAST else None, whole=not one_row)
        basic = all(type(value) in (int, slice, type(None), type(...)) for value in values)
        if not basic:
            return UNKNOWN
        found = RowRead(Row(read.site, tuple(values)), read.steps)
        if self.taken is not None:
            self.taken.rows.append(found)
        return found

    def _part(self, of: Unknown) -> Unknown:
        if isinstance(of, SiteRead):
            self.use(of)
        return Unknown(of.step)

    def _Slice_value(self, node: ast.Slice) -> Any:
        parts = [None if part is None else self.value(part) for part in (node.lower, node.upper, node.step)]
        found = next((part for part in parts if isinstance(part, Unknown)), None)
        return found or slice(*parts)

    def _Tuple_value(self, node: ast.Tuple) -> Any:
        items = [self.value(item) for item in node.elts]
        return Unknown() if any(isinstance(item, Unknown) for item in items) else tuple(items)

    def _List_value(self, node: ast.List) -> Any:
        items = [self.value(item) for item in node.elts]
        return Unknown(fresh=True) if any(isinstance(i, Unknown) for i in items) or not items else items

    def _Dict_value(self, node: ast.Dict) -> Any:
        for part in (*node.keys, *node.values):
            self.value(part)
        return Unknown(fresh=True)

    def _ListComp_value(self, node: ast.ListComp) -> Any:
        self._comprehend(node.generators, [node.elt])
        return Unknown(fresh=True)

    def _DictComp_value(self, node: ast.DictComp) -> Any:
        self._comprehend(node.generators, [node.key, node.value])
        return Unknown(fresh=True)

    def _comprehend(self, generators: list[ast.comprehension], parts: list[ast.expr]) -> None:
        if not generators:
            for part in parts:
                self.value(part)
            return
        first, *rest = generators
        hidden = dict(self.names)
        for item in self._items(self.value(first.iter)):
            self._bind(first.target, item)
            tests = [self.value(test) for test in first.ifs]
            if any(isinstance(test, Unknown) and not test.step for test in tests):
                raise NotStatic("a branch on a value of the pass")
            if all(isinstance(test, Unknown) or truth(test) for test in tests):
                self._comprehend(rest, parts)
        self.names = hidden

    def _items(self, of: Any) -> Iterator[Any]:
        """Items of a loop, which must be static."""
        if isinstance(of, Envoy) and type(of) is TracedEnvoy:
            return (child for _, child in of._named_children())
        if type(of) is torch.Tensor and of.dim() > 1 and len(of) <= MAX_NODES:
            return iter(of.detach().unbind())
        if isinstance(of, KnownItems):
            return iter(of.items)
        if (type(of) in CONTAINERS or isinstance(of, tuple)) and len(of) <= MAX_NODES:
            return iter([self._known(item) for item in of])
        raise NotStatic("a loop over a value that is not known before the block runs")

    def _BinOp_value(self, node: ast.BinOp) -> Any:
        return self._computed(node, [self.value(node.left), self.value(node.right)])

    def _UnaryOp_value(self, node: ast.UnaryOp) -> Any:
        return self._computed(node, [self.value(node.operand)])

    def _Compare_value(self, node: ast.Compare) -> Any:
        return self._computed(node, [self.value(part) for part in (node.left, *node.comparators)])

    def _BoolOp_value(self, node: ast.BoolOp) -> Any:
        found = [self.value(part) for part in node.values]
        if any(isinstance(part, Unknown) and not part.step for part in found):
            raise NotStatic("a branch on a value of the pass")
        return self._computed(node, found)

    def _IfExp_value(self, node: ast.IfExp) -> Any:
        test = self.value(node.test)
        if isinstance(test, Unknown):
            raise NotStatic("a branch on a value of the pass")
        return self.value(node.body if truth(test) else node.orelse)

    def _JoinedStr_value(self, node: ast.JoinedStr) -> Any:
        found = [self.value(part) for part in node.values]
        return UNKNOWN if any(isinstance(part, Unknown) for part in found) else self._computed(node, found)

    def _FormattedValue_value(self, node: ast.FormattedValue) -> Any:
        found = self.value(node.value)
        self._is_pure_value(found)
        if node.format_spec is not None:
            self.value(node.format_spec)
        self.plan.computes = True
        return Unknown(step=isinstance(found, KNOWN) or (isinstance(found, Unknown) and found.step))

    def _computed(self, node: ast.expr, parts: list[Any]) -> Any:
        """The result of an operator: of known numbers it is known, too."""
        for part in parts:
            self._is_pure_value(part)
            if isinstance(part, range) or (isinstance(part, str) and isinstance(node, ast.BinOp)):
                raise NotStatic(f"an operation of a {type(part).__name__}")
        if all(isinstance(part, SCALARS) for part in parts) and not isinstance(node, ast.JoinedStr):
            return evaluate(node, parts)
        self.plan.computes |= not all(isinstance(part, Unknown) and part.step for part in parts)
        return Unknown(step=all(isinstance(part, KNOWN) or (isinstance(part, Unknown) and part.step) for part in parts))

    def _is_pure_value(self, value: Any) -> None:
        self.plan.computes |= isinstance(value, torch.Tensor)  # it is on the model's device
        if type(value) in (list, tuple, dict):
            if len(value) > MAX_NODES:
                raise NotStatic(f"a list of more than {MAX_NODES} items")
            for item in value if not isinstance(value, dict) else (*value.keys(), *value.values()):
                self._is_pure_value(self._known(item))
        if not isinstance(value, (Unknown, torch.Tensor, list, tuple, dict, *KNOWN)):
            raise NotStatic(f"an operation of a {type(value).__name__}")

    def _saved_value(self, value: Any) -> Any:
        if isinstance(value, RowRead):
            value.row = value.row._replace(saved=True)
        else:
            self.taken = None
        return value

    # -- calls ---------------------------------------------------------------------------------

    def _Call_value(self, node: ast.Call) -> Any:
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise NotStatic("starred arguments")
        if any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
            raise NotStatic("`out=` and `inplace=` write into a tensor")
        if isinstance(node.func, ast.Attribute):
            of = self._receiver(node.func)
            if of is not None:
                return self._method(of[0], node.func.attr, node)
        function = self.value(node.func)
        arguments = self._arguments(node)
        if function is save and len(arguments) == 1:
            return self._saved_value(arguments[0])
        if not isinstance(function, FUNCTION_TYPES) or function not in pure.FUNCTIONS:
            raise NotStatic(f"a call of `{ast.unparse(node.func)}`")
        for argument in arguments:
            if not isinstance(argument, Envoy | KnownItems):
                self._is_pure_value(argument)
        return self._result(function, arguments)

    def _result(self, function: Any, arguments: list[Any]) -> Any:
        if function in (list, dict) and not arguments:
            return Unknown(fresh=True)
        known = not any(isinstance(argument, Unknown) for argument in arguments)
        if function is len and type(arguments[0]) in CONTAINERS:
            return len(arguments[0])
        if function is len and known and isinstance(arguments[0], Envoy):
            return len(dict(arguments[0]._named_children()))
        if function in LISTED and known:
            arguments = [argument for argument in arguments if type(argument) is not bool]  # strict=
            return KnownItems(LISTED[function](*(a if type(a) is int else list(self._items(a)) for a in arguments)))
        scalars = all(isinstance(argument, KNOWN) and type(argument) is not range for argument in arguments)
        if any(isinstance(argument, range) for argument in arguments) and function is not len:
            raise NotStatic("a function of a range")
        if known and scalars and function in pure.BUILTINS:
            try:
                return function(*arguments)
            except Exception as error:
                raise NotStatic(f"{type(error).__name__}: {error}") from None
        self.plan.computes |= function not in pure.MOVING or function is str
        return Unknown(fresh=function in (list, dict, sorted))

    def _arguments(self, node: ast.Call) -> list[Any]:
        return [self.value(argument) for argument in (*node.args, *(keyword.value for keyword in node.keywords))]

    def _receiver(self, function: ast.Attribute) -> tuple[Any] | None:
        """The object of a method, if it is a value; None for a function of a module."""
        before, order = self._left, self._order
        of = self.value(function.value)
        if isinstance(of, (Unknown, torch.Tensor, list, tuple, dict, str, KnownItems)):
            return (of,)
        self._left, self._order = before, order
        return None

    def _method(self, of: Any, name: str, node: ast.Call) -> Any:
        arguments = self._arguments(node)
        for argument in arguments:
            self._is_pure_value(argument)
        if name == "save" and not arguments:
            return self._saved_value(of)
        if name in pure.COPIES and not arguments and isinstance(of, RowRead):
            return RowRead(Row(of.row.site, of.row.indexes, (*of.row.methods, name)), of.steps, of)
        fresh = isinstance(of, Unknown) and of.fresh
        if name in pure.FILLS:
            if not fresh:
                raise NotStatic(f"`.{name}()` fills an object from outside: make it in the `with`, list().save()")
            if self.taken is not None and not self.taken.append(node, arguments):
                self.taken = None
            return UNKNOWN
        if name not in pure.METHODS:
            raise NotStatic(f"`.{name}()` is not lowered")
        self.plan.computes |= name not in pure.MOVES
        return UNKNOWN
