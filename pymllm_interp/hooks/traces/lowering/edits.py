"""Edits of a lowered block: the declared op that does the same, and the block without them."""

from __future__ import annotations

import ast
import copy
import math
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from ...positions import Generated, Positions
from ...site import Site
from ..blocks.loops import AST_LOCK, with_loop_ends
from ..nnsight_compat import Envoy
from .plan import LAST, Edit, NotStatic, same_state
from .values import RowRead, SiteRead, Unknown

if TYPE_CHECKING:
    from .expressions import Expressions

KINDS = frozenset(
    {"embed", "attn_out", "mlp_out", "resid_pre", "resid_post", "final_norm", "q", "k", "v", "z", "mlp_act", "logits"}
)
"""Kinds of sites for which an edit of the module's value is an edit of the site."""
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
IN_PLACE = "an edit in place"
PRODUCTS = frozenset({"bmm", "dot", "einsum", "inner", "matmul", "mm", "mv", "outer"})
MAX_MADE = 512
"""Most blocks of which the code without edits is kept."""
_MADE: dict[tuple[str, CodeType, frozenset[tuple[int, int]]], CodeType] = {}


class Edits:
    """The edits of one walk over a block."""

    def __init__(self, walk: Expressions) -> None:
        self._walk = walk

    def augments(self, node: ast.AugAssign) -> None:
        """``layer.output[...] += v``, and ``h[...] += v`` or ``h += v`` of a name of such a value."""
        self._edit(node, node.target, OPERATORS.get(type(node.op), ""), node.value)

    def assigns(self, node: ast.Assign) -> bool:
        """``layer.output[...] = v`` or ``layer.output = layer.output + v``; False if it is another assignment."""
        target = node.targets[0]
        if isinstance(target, ast.Subscript) and len(node.targets) == 1 and self.named(target.value) is not None:
            self._edit(node, target, "=", node.value)
            return True
        place = target.value if isinstance(target, ast.Subscript) else target
        if not (isinstance(place, ast.Subscript | ast.Attribute) and self._is_read(place)):
            return False
        if isinstance(target, ast.Subscript) and not self._is_container(target):
            self._edit(node, target, "=", node.value)
            return True
        value = node.value
        if (
            isinstance(value, ast.BinOp)
            and type(value.op) in OPERATORS
            and ast.unparse(value.left) == ast.unparse(target)
        ):
            self._edit(node, target, OPERATORS[type(value.op)], value.right, assigned=True)
        else:
            self._edit(node, target, "", value, assigned=True)
        return True

    def named(self, node: ast.expr) -> SiteRead | None:
        """The value of a site that a name stands for."""
        found = self._walk.names.get(node.id) if isinstance(node, ast.Name) else None
        return found if isinstance(found, SiteRead) and not found.in_tuple else None

    def _is_read(self, node: ast.expr) -> bool:
        """Whether an expression is ``module.output``, or an entry of it."""
        while isinstance(node, ast.Subscript):
            node = node.value
        if not (isinstance(node, ast.Attribute) and node.attr in ("output", "input")):
            return False
        return isinstance(self._walk.value(node.value), Envoy)

    def _is_container(self, target: ast.Subscript) -> bool:
        """Whether the target is the entry of a tuple: ``attention.output[0]``."""
        if isinstance(target.value, ast.Subscript):
            return False
        point = self._walk.points.get(self._location(target.value))
        return point is not None and point.in_tuple

    def _location(self, node: ast.expr) -> str:
        assert isinstance(node, ast.Attribute)
        envoy = self._walk.value(node.value)
        return f"{envoy.path}.{node.attr}"

    def _edit(self, node: ast.stmt, target: ast.expr, operator: str, value: ast.expr, assigned: bool = False) -> None:
        walk = self._walk
        read = self.named(target.value if isinstance(target, ast.Subscript) else target)
        if read is not None:
            self._edit_named(node, read, target.slice if isinstance(target, ast.Subscript) else None, operator, value)
            return
        index = None
        if not self._is_read(target):
            raise NotStatic(IN_PLACE)
        if isinstance(target, ast.Subscript) and not self._is_container(target):
            index, target = target.slice, target.value
        container = isinstance(target, ast.Subscript)
        if isinstance(target, ast.Subscript):
            if not self._is_container(target) or walk.value(target.slice) != 0:
                raise NotStatic(IN_PLACE)
            target = target.value
        location = self._location(target)
        point = walk.points.get(location)
        if point is None or not point.site or Site.parse(point.site).kind not in KINDS or point.in_tuple != container:
            raise NotStatic(f"an edit of `{location}`")
        if not point.end or (assigned and point.end == "input"):
            raise NotStatic(f"an edit of `{location}`")
        self._stands_apart(point.site)
        self._comes_first(point.site, point.site in (walk.read if assigned or not walk.stands_at(point) else walk.used))
        operand = self._operand_of(point.site, operator, value, assigned)
        walk.reach(location)
        walk.plan.edits += [Edit(point.site, operator, operand, where) for where in self._positions(index)]
        walk.edited.add((node.lineno, node.col_offset))
        if walk.taken is not None:
            walk.taken.reads += 1

    def _edit_named(
        self, node: ast.stmt, read: SiteRead, index: ast.expr | None, operator: str, value: ast.expr
    ) -> None:
        """An edit of a value by its name, before anything else was made of it."""
        walk = self._walk
        point = next(point for point in walk.points.values() if point.site == read.site)
        if Site.parse(read.site).kind not in KINDS or not point.end:
            raise NotStatic(f"an edit of `{read.site}`")
        self._stands_apart(read.site)
        late = not walk.stands_at(point) or read.steps is not walk.steps
        self._comes_first(read.site, late or read.site in walk.used)
        operand = self._operand_of(read.site, operator, value, assigned=False)
        walk.plan.edits += [Edit(read.site, operator, operand, where) for where in self._positions(index)]
        walk.edited.add((node.lineno, node.col_offset))

    def _operand_of(self, site: str, operator: str, value: ast.expr, assigned: bool) -> Any:
        """The operand of the declared op with the edit's effect. Raises NotStatic without one."""
        walk = self._walk
        try:
            if not operator:
                raise NotStatic("an assignment to a module" if assigned else IN_PLACE)
            return self._operand(walk.value(value), walk.model.widths[Site.parse(site).kind], operator, assigned)
        except NotStatic as refused:
            raise NotStatic(self._cause(site, value) or str(refused)) from None

    def _cause(self, site: str, value: ast.expr) -> str:
        """Reason that no declared op computes a value, and the op that does the same; "" for other causes."""
        steps = made = ""
        for part in ast.walk(value):
            function = part.func if isinstance(part, ast.Call) else None
            name = getattr(function, "attr", getattr(function, "id", ""))
            if (isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult)) or name in PRODUCTS:
                return f"`{ast.unparse(part)}` is a product: Ablate({site!r}, directions) removes directions"
            found = self._walk.names.get(part.id) if isinstance(part, ast.Name) else None
            if isinstance(found, SiteRead | RowRead) and not self._is_edited(found, site):
                return f"`{ast.unparse(part)}` is a value of the pass at another place"
            if isinstance(part, ast.Name) and isinstance(found, Unknown) and not self._is_edited(found, site):
                steps, made = (part.id, made) if found.step else (steps, part.id)
        if steps:
            return (
                f"`{steps}` depends on the step: Steer({site!r}, vectors, positions=Generated(0, n)) has a vector for each "
                "position"
            )
        return f"`{made}` is made in the block: above the `with`, if nothing of the pass is in it" if made else ""

    def _is_edited(self, found: Unknown, site: str) -> bool:
        """Whether a name stands for the whole value that is edited."""
        return isinstance(found, SiteRead) and (found.site, found.in_tuple) == (site, False)

    def _comes_first(self, site: str, used: bool) -> None:
        """Refuse an edit that is not the first thing that the block does with a value."""
        walk = self._walk
        if walk.conditional:
            raise NotStatic(
                "an edit in a branch on the step's number: loop over `tracer.iter[1:]`, or declare the edit with positions=, as in "
                f"Steer({site!r}, vector, positions=Generated(0)) for `if step > 0`"
            )
        if any(edit.site == site for edit in walk.plan.edits):
            raise NotStatic(f"a second edit of {site}: interventions=[...] takes several at a site")
        if used:
            raise NotStatic(
                f"an edit of {site} after a use or a later read: edit it first, in one statement; Ablate({site!r}, directions) "
                "removes directions"
            )

    def _stands_apart(self, site: str) -> None:
        """Refuse an edit of a layer's input if the block has the output before it, which is the same state."""
        before, walk = same_state(site), self._walk
        if before in walk.read or any(edit.site == before for edit in walk.plan.edits):
            raise NotStatic("an edit of a layer's input after a read or an edit of the output before it")

    def _operand(self, value: Any, width: int, operator: str, assigned: bool) -> Any:
        """The operand of an edit, if it exists before the block runs.

        Args:
            width: width of the state.
            assigned: the result is assigned, so it must have the dtype of the states.

        Returns:
            a number, or a tensor [width] float32 on the CPU.
        """
        model = self._walk.model
        if type(value) in (int, float) and math.isfinite(value):
            return float(value) if operator == "*" else torch.full((width,), float(value))
        if type(value) is not torch.Tensor or operator == "*":
            raise NotStatic(IN_PLACE)
        fits = 0 < value.dim() <= 3 and value.shape[-1] == width == value.numel()
        dtypes = (model.dtype,) if assigned else (model.dtype, torch.float32)
        if not fits or value.dtype not in dtypes or value.requires_grad or value.device.type != model.device.type:
            raise NotStatic("an edit by a tensor that no declared op takes")
        if not bool(torch.isfinite(value).all()):
            raise NotStatic("an edit by NaN or infinity")
        self._walk.plan.has_vectors = True
        return value.reshape(-1).float().cpu()

    def _positions(self, index: ast.expr | None) -> list[Positions]:
        """Positions of the rows that an index selects, in all steps of the edit."""
        walk = self._walk
        row = self._row(index)
        steps = walk.steps
        if walk.single or steps is None:
            if row is not None and not walk.single and row != LAST:
                raise NotStatic("an edit of a row of the prompt")
            return ["prompt"] if row is None else [(row,)]
        if row not in (None, LAST):
            raise NotStatic("an edit of one row in several steps")
        runs = [(step, step + 1) for step in steps.listed] or [(steps.start, steps.stop)]
        return [where for start, stop in runs for where in self._in_steps(row, start, stop)]

    @staticmethod
    def _in_steps(row: int | None, start: int, stop: int | None) -> list[Positions]:
        """Positions of all rows, or of the last one, in the steps from `start` to `stop`."""
        stop = None if stop is None else stop - 1
        if start > 0:
            return [Generated(start - 1, stop)]
        if row == LAST:
            return [Generated(-1, stop)] if stop is None or stop > -1 else []
        return ["all"] if stop is None else ["prompt", *([Generated(0, stop)] if stop > 0 else [])]

    def _row(self, index: ast.expr | None) -> int | None:
        """The row that an index selects; None for all rows."""
        walk = self._walk
        if index is None:
            return None
        parts = [walk.value(part) for part in (index.elts if isinstance(index, ast.Tuple) else [index])]
        batch, *rest = parts
        if not (batch == slice(None) or (type(batch) is int and batch == 0) or batch is ...):
            raise NotStatic(IN_PLACE)
        if batch is ... and rest:
            raise NotStatic(IN_PLACE)
        if len(rest) > 1 and rest[1:] != [slice(None)]:
            raise NotStatic("an edit of some channels: Patch with the whole state, or heads= of an op at `z`")
        if not rest or rest[0] == slice(None):
            return None
        if type(rest[0]) is not int:
            raise NotStatic(IN_PLACE)
        return rest[0]


def without_edits(node: ast.With | ast.AsyncWith, code: CodeType, edited: set[tuple[int, int]]) -> CodeType:
    """The block's code with a read of the module in the place of each edit.

    Args:
        code: code of the block.
        edited: (line, column) of the statements that edit.
    """
    key = code.co_filename, code, frozenset(edited)
    if (found := _MADE.get(key)) is None:
        if len(_MADE) == MAX_MADE:
            _MADE.clear()
        found = _MADE[key] = _without_edits(node, code, edited)
    return found


def _without_edits(node: ast.With | ast.AsyncWith, code: CodeType, edited: set[tuple[int, int]]) -> CodeType:
    with AST_LOCK:
        block = copy.deepcopy(node)
        block.body = _Reads(edited).visit(ast.Module(body=block.body, type_ignores=[])).body
        ast.fix_missing_locations(block)
        module = ast.Module(body=block.body, type_ignores=[])
        made = compile(module, code.co_filename, "exec").replace(co_name=code.co_name)
    return with_loop_ends(block, made)


class _Reads(ast.NodeTransformer):
    def __init__(self, edited: set[tuple[int, int]]) -> None:
        self._edited = edited

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Assign | ast.AugAssign) and (node.lineno, node.col_offset) in self._edited:
            place: ast.expr = node.targets[0] if isinstance(node, ast.Assign) else node.target
            while isinstance(place, ast.Subscript):
                place = place.value
            assert isinstance(place, ast.Attribute | ast.Name)
            place.ctx = ast.Load()
            return ast.copy_location(ast.Expr(place), node)
        return super().generic_visit(node)
