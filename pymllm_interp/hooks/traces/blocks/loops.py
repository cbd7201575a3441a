"""``for step in tracer.iter[...]`` that ends when the generation ends.

At the end of a generation, a block waits inside such a loop for a step that never comes. There nnsight unwinds the whole block, so
that code after the loop does not run. Here only the loop ends, and the block continues::

    with lm.generate("Once upon", max_new_tokens=5) as tracer:
        steps = list().save()
        for step in tracer.iter[:]:
            steps.append(lm.model.layers[3].output[0, -1])
        out = tracer.result.save()          # runs

`LoopEnd` is raised at the block's waiting line. `with_loop_ends` puts a handler around each ``for`` of the block, which
catches it if the loop is over steps. A loop in a function that the block calls has no handler. The block ends with a warning,
as in nnsight.
"""

from __future__ import annotations

import ast
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import count, pairwise, takewhile
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from greenlet import getcurrent

from ..nnsight_compat import Iterations, OutOfOrderError
from .errors import LoopEnd

P = ParamSpec("P")
T = TypeVar("T")

PREFIX = "__pymllm_"
"""Prefix of names in the rewritten code. They are never bound in the caller's frame."""


class StepIterations(Iterations):
    """``tracer.iter``: pins the block to one step after another, and stops when the generation is over."""

    named = False
    """The caller listed single steps, which must exist. A slice may end early."""

    def __getitem__(self, key: slice | int | list[int]) -> StepIterations:
        """The steps to iterate over.

        Raises:
            ValueError: a negative step (their number is not known yet), or a stride other than 1.
            OutOfOrderError: a list of steps that does not ascend.
        """
        if isinstance(key, slice):
            if key.step not in (None, 1) or (key.start or 0) < 0 or (key.stop or 0) < 0:
                raise ValueError(f"tracer.iter[{key.start}:{key.stop}:{key.step}]: steps count from 0, one by one")
            return StepIterations(key.start or 0, key.stop)
        chosen = StepIterations(steps=list(key) if isinstance(key, (list, tuple)) else [key])
        listed = chosen.steps or []
        if any(step >= later for step, later in pairwise(listed)):
            raise OutOfOrderError(
                f"tracer.iter[{listed}]: the model runs each step once, in ascending order: tracer.iter[{sorted(set(listed))}]"
            )
        chosen.named = True
        return chosen

    def __iter__(self) -> Iterator[int]:
        block = getcurrent().mediator()  # pyright: ignore[reportAttributeAccessIssue]
        trace, previous = block.trace, block.iteration
        running = self
        if block.take_steps is not None and self.steps is None:
            running = StepIterations(block.take_steps(self.start, self.stop), self.stop)
        try:
            for step in running._numbers():
                if not running._comes(step, block):
                    return
                if 0 < step < (now := block.interleaver.points.pass_of(trace)):
                    block.late = (
                        f"request {trace.request_id}: tracer.iter asks for step {step}, but the model is at step {now}: it runs "
                        "each step once, in ascending order"
                    )
                    raise OutOfOrderError(block.late)
                block.iteration = step
                yield step
        finally:
            if trace.over and (self.steps is not None or self.stop is not None):
                wanted = self.steps if self.steps is not None else f"{self.start}:{self.stop}"
                trace.warn(
                    f"tracer.iter[{wanted}] asked for more steps than the {trace.visits.passes} that ran: the loop was cut "
                    "short (min_tokens= or ignore_eos=True holds a generation to its length)"
                )
            block.iteration = previous

    def execute(self, code: CodeType) -> None:
        """nnsight's deprecated ``with tracer.iter[...]:``. It takes each `OutOfOrderError` for the end of the generation."""
        block = getcurrent().mediator()  # pyright: ignore[reportAttributeAccessIssue]
        block.late = ""
        super().execute(code)
        if block.late:
            raise OutOfOrderError(block.late)

    def _indices(self) -> Iterator[int]:
        """The steps that there can be. Used by nnsight's deprecated ``with tracer.iter[...]:``."""
        block = getcurrent().mediator()  # pyright: ignore[reportAttributeAccessIssue]
        return takewhile(lambda step: self._comes(step, block), self._numbers())

    def _numbers(self) -> Iterable[int]:
        """The steps that were asked for."""
        if self.steps is not None:
            return self.steps
        return count(self.start) if self.stop is None else range(self.start, self.stop)

    def _comes(self, step: int, block: Any) -> bool:
        """Whether there can be a step. Raises ValueError, OutOfOrderError: a step that cannot be meant."""
        trace = block.trace
        if step < 0:
            raise ValueError(f"tracer.iter step {step}: steps count from 0")
        if self.named and step >= trace.max_passes:
            raise OutOfOrderError(
                f"request {trace.request_id}: tracer.iter[{step}] asks for step {step}, but there are at most "
                f"{trace.max_passes} (0 to {trace.max_passes - 1}): raise max_tokens"
            )
        last = trace.max_passes + block.reads_tokens  # the streamer serves the prompt, too
        # An open loop with a body that reads nothing would never end.
        return not (trace.over or (step >= last and self.steps is None and self.stop is None))


AST_LOCK = threading.Lock()
"""CPython 3.11 counts the depth of AST conversions across threads, so two at a time raise SystemError."""


def under_ast_lock(function: Callable[P, T]) -> Callable[P, T]:
    """`function` under `AST_LOCK`: callers of tracers are on many threads."""

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with AST_LOCK:
            return function(*args, **kwargs)

    return locked


_REWRITTEN: dict[tuple[str, CodeType], CodeType] = {}


def with_loop_ends(node: ast.With | ast.AsyncWith, code: CodeType) -> CodeType:
    """The block's code with a handler around each ``for``; unchanged without a ``for``.

    Args:
        node: the block, as nnsight parsed it.
        code: compiled body.
    """
    key = (code.co_filename, code)
    if key not in _REWRITTEN:
        with AST_LOCK:
            loops = any(isinstance(n, ast.For) for n in ast.walk(node))
            _REWRITTEN[key] = _rewrite(node, code) if loops else code
    return _REWRITTEN[key]


def forget_rewritten(filename: str) -> None:
    """Forget the blocks of a file that no longer exists."""
    for key in [key for key in _REWRITTEN if key[0] == filename]:
        del _REWRITTEN[key]


def _rewrite(node: ast.With | ast.AsyncWith, code: CodeType) -> CodeType:
    module = ast.Module(body=copy.deepcopy(node.body), type_ignores=[])
    _Handlers().visit(module)
    ast.fix_missing_locations(module)
    return compile(module, code.co_filename, "exec").replace(co_name=code.co_name)


class _Handlers(ast.NodeTransformer):
    """``for t in it: body`` -> ``x = it; try: for t in x: body; except LoopEnd: ends(x) or raise; finally: x = None``."""

    def __init__(self) -> None:
        self.count = 0

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        self.generic_visit(node)
        name = f"{PREFIX}steps_{self.count}"
        self.count += 1
        assign = ast.Assign(targets=[ast.Name(name, ast.Store())], value=node.iter)
        node.iter = ast.Name(name, ast.Load())
        call = ast.Call(ast.Name(f"{PREFIX}ends", ast.Load()), [ast.Name(name, ast.Load())], [])
        handler = ast.ExceptHandler(
            type=ast.Name(f"{PREFIX}loop_end", ast.Load()),
            name=None,
            body=[ast.If(test=ast.UnaryOp(ast.Not(), call), body=[ast.Raise()], orelse=[])],
        )
        # Frees a `zip` or `enumerate`, which would keep its steps open, and the block pinned to them.
        forget = ast.Assign(targets=[ast.Name(name, ast.Store())], value=ast.Constant(None))
        guarded = ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[forget])
        return [ast.copy_location(assign, node), ast.copy_location(guarded, node)]


LOOP_NAMES: dict[str, object] = {
    f"{PREFIX}loop_end": LoopEnd,
    f"{PREFIX}ends": lambda steps: isinstance(steps, Iterations),
}
"""Names that the rewritten code needs in its scope."""
