"""`with lm.session():` several traces that see each other's values."""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

from ..blocks.loops import under_ast_lock
from ..nnsight_compat import (
    Scope,
    Tracer,
    mark,
    push_result,
    save_scope,
    thread_saves,
)
from ..saves.save_transfer import SaveTransfer
from ..saves.saved import saves_device

TRACES = ("trace", "generate", "scan")
ONE_STATEMENT = "`with lm.session(), lm.{0}()`: traces are statements of its block: begin it with `with lm.{0}()`"


class SessionTracer(Tracer):
    """A ``with lm.session():`` block: its traces see each other's values, and its caller gets the saved ones at its end.

    Args:
        device: device of the caller's saves; see `EngineTracer`.
    """

    compile = under_ast_lock(Tracer.compile)

    def __init__(self, device: Any = "cpu", backend: Any = None) -> None:
        super().__init__(backend=backend)
        self.device = saves_device(device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(saves on {self.device})"

    @under_ast_lock
    def parse(self, source: str, lineno: int) -> ast.With | ast.AsyncWith | None:
        """The statement at a line. Raises ValueError: a trace begins in the same one, of which the session would be the body."""
        node = super().parse(source, lineno)
        last = node.items[-1].context_expr if node is not None and len(node.items) > 1 else None
        if isinstance(last, ast.Call) and isinstance(last.func, ast.Attribute) and last.func.attr in TRACES:
            raise ValueError(ONE_STATEMENT.format(last.func.attr))
        return node

    def execute(self, code: CodeType) -> None:
        """Run the block, and bind the saved names in the caller's frame."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        scope = Scope(dict(frame.f_locals), {}, frame.f_globals)
        exec(code, scope)
        names = dict(scope)
        if save_scope.depth == 1:
            transfer, saved = SaveTransfer(self.device), thread_saves()
            names = {name: mark(transfer.deliver(value)) for name, value in names.items() if id(value) in saved}
            transfer.wait()
        push_result(frame, names)
