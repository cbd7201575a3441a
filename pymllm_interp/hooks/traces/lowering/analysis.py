"""Checks whether a block can run after its request, over captured states, and which captures it needs.

A block is *static* if its reads are known before it runs, and if it changes nothing of the pass. `lower` walks the block's
syntax tree with the values of the names from outside. A value that comes from the pass is `Unknown`: reads must not depend on
it. Code that the walk does not know is refused: the block then runs in the forward pass.
"""

from __future__ import annotations

import ast

from ..nnsight_compat import Mediator
from .edits import Edits, without_edits
from .expressions import Expressions
from .plan import Lowering, LoweringModel, NotLowered, NotStatic
from .step_loop import TakenLoop
from .values import (
    KNOWN,
    UNKNOWN,
    RowRead,
    SiteRead,
    Steps,
    Unknown,
    combined,
    truth,
)


def lower(block: Mediator, saved: set[int], model: LoweringModel, single: bool) -> Lowering:
    """Reads and edits of a block as a plan, or the reason that they are unknown before it runs.

    Args:
        saved: ids of the containers that were saved above the block.
        single: the request is one forward pass.
    """
    walk, node = Walk(block.lcls, saved, model, single), block.node
    whole = walk.taken = TakenLoop(None)
    try:
        walk.body(node.body)
        if walk.taken is whole:
            walk.plan.appends = whole.loop()
        walk.plan.code = without_edits(node, block.code, walk.edited) if walk.edited else None
    except NotStatic as refused:
        return NotLowered(str(refused), walk.line)
    except Exception as error:  # a block that this module cannot read runs as it always did
        return NotLowered(f"it cannot be analysed: {type(error).__name__}: {error}", walk.line)
    return walk.plan


class Walk(Expressions):
    """One walk over a block: its statements."""

    # -- statements ----------------------------------------------------------------------------

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.line = statement.lineno
            visit = getattr(self, f"_{type(statement).__name__}", None)
            if visit is None:
                raise NotStatic(f"`{type(statement).__name__.lower()}` is not lowered")
            if self.taken is not None and not self.taken.takes(statement):
                self.taken = None
            visit(statement)

    def _Expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _Pass(self, node: ast.Pass) -> None:
        pass

    def _Assign(self, node: ast.Assign) -> None:
        one_name = len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        if Edits(self).assigns(node):
            return
        value = self.value(node.value, whole=not one_name)
        if self.taken is not None and not (one_name and isinstance(value, RowRead | SiteRead)):
            self.taken = None
        for target in node.targets:
            self._bind(target, value)

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, self.value(node.value))

    def _AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name) or Edits(self).named(node.target) is not None:
            Edits(self).augments(node)
            return
        before, value = self._load(node.target.id), self.value(node.value)
        if not isinstance(before, KNOWN) and not isinstance(before, Unknown):
            raise NotStatic(f"`{node.target.id}` is changed in place")
        if isinstance(before, Unknown) and not before.step:
            raise NotStatic(f"`{node.target.id}` may be a tensor that is edited in place")
        self.names[node.target.id] = combined(before, value)

    def _If(self, node: ast.If) -> None:
        test = self.value(node.test)
        if not isinstance(test, Unknown):
            self.body(node.body if truth(test) else node.orelse)
            return
        self.taken = None
        if not test.step:
            raise NotStatic(
                "a branch on a value of the pass: a declared op acts where a state says so, with when=Gate(...)"
            )
        self._forget(node.body + node.orelse)
        order, conditional, self.conditional = self._order, self.conditional, True
        self.body(node.body)
        reached, self._order = self._order, order
        self.body(node.orelse)
        self._order, self.conditional = max(reached, self._order), conditional
        self._forget(node.body + node.orelse)

    def _For(self, node: ast.For) -> None:
        if node.orelse:
            raise NotStatic("`else` of a loop")
        over = self.value(node.iter)
        if isinstance(over, Steps):
            self._loop_over_steps(node, over)
            return
        for item in self._items(over):
            self._left -= 1
            if self._left < 0:
                raise NotStatic("a long loop")
            self._bind(node.target, item)
            self.body(node.body)

    def _loop_over_steps(self, node: ast.For, steps: Steps) -> None:
        if self.steps is not None or self._looped or (self._order >= 0 and steps.start == 0):
            raise NotStatic("a second look at a step")
        self._forget([node])
        self.steps, self._order, self._looped = steps, -1, True
        self._bind(node.target, Unknown(step=True))
        self.taken = TakenLoop(steps) if isinstance(node.target, ast.Name) and not steps.listed else None
        self.body(node.body)
        self.plan.loop, self.taken = self.taken and self.taken.loop(), None
        self._forget([node])
        self.steps = None

    def _forget(self, statements: list[ast.stmt]) -> None:
        """Names that the statements bind have another value each time."""
        for statement in statements:
            for found in ast.walk(statement):
                if isinstance(found, ast.Name) and isinstance(found.ctx, ast.Store):
                    if isinstance(before := self.names.get(found.id), SiteRead):
                        self.use(before)
                    self.names[found.id] = UNKNOWN
