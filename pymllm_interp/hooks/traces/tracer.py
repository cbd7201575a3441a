"""A ``with`` block of a trace: its blocks are collected on the caller's thread and handed to the engine.

nnsight captures the block's source and skips its body; when the ``with`` ends, `EngineTracer.execute` makes one
`RequestTrace` for each prompt, has `TracedModel.run_traces` serve them, and puts the saved names into the caller's frame.
"""

from __future__ import annotations

import ast
import dis
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from greenlet import getcurrent

from ..captures.activations import Activations
from .block import Block
from .block_analysis import depend_on_each_other
from .delivery import Delivery
from .envoy import TracedModel
from .gc_threshold import give_back, make_room
from .loops import AST_LOCK, StepIterations
from .nnsight_compat import (
    Barrier,
    CacheView,
    InterleavingTracer,
    Invoker,
    Mediator,
    Scope,
    Tracer,
    clear_shared_locals,
    mark,
    push_result,
    save_scope,
    shared_locals,
    thread_saves,
)
from .saves import saves_device
from .trace import OURS, GangError, RequestTrace, emit, settle_saves

OBJECTS = 64
"""That one request of a trace is made of, about: those that Python's collector goes through."""

IN_VAIN = "the trace read values and kept none: behind its block there is no {}; .save() keeps a value"

Invocation = tuple[Mediator, tuple, dict[str, Any]]
"""A block, and the ``(args, kwargs)`` that its prompt was given by."""


class _Captured:
    """Parses and compiles one block at a time, for clients on many threads."""

    def parse(self, source: str, lineno: int) -> ast.With | ast.AsyncWith | None:
        with AST_LOCK:
            return super().parse(source, lineno)  # pyright: ignore[reportAttributeAccessIssue]

    def compile(self, module: ast.Module, frame: FrameType) -> CodeType:
        with AST_LOCK:
            return super().compile(module, frame)  # pyright: ignore[reportAttributeAccessIssue]


class EngineTracer(_Captured, InterleavingTracer):
    """A ``with lm.trace(...)`` or ``with lm.generate(...)`` block. Each invoke is one request.

    Args:
        device: where the caller gets what the block saves: the CPU, unless told otherwise. In a session that is the
            session's to say, and what a trace saves stays where it is until then.

    Raises:
        ValueError: torch has no such device.

    Attributes:
        mode: "trace" (one forward pass) or "generate".
        receipts: what happened to each request, in the order of the invokes; set when the block has run.
        captures: what each request captured (`capture=`), in the same order; empty for one that asked for nothing. A capture
            takes what the model goes on with: the state after the block's edits.
    """

    def __init__(self, envoy: TracedModel, mode: str, *args: Any, device: Any = None, **kwargs: Any) -> None:
        super().__init__(envoy, mode, *args, **kwargs)
        self.mode = mode
        self.device = saves_device(device) if device is not None else None
        self.receipts: list[Any] = []
        self.captures: list[Activations] = []
        self.barriers = 0
        self._invocations: list[Invocation] = []

    @property
    def _model(self) -> TracedModel:
        return cast(TracedModel, self.envoy)  # None once the block is over

    @property
    def receipt(self) -> Any:
        """The only request's receipt."""
        if len(self.receipts) != 1:
            raise ValueError(f"this trace has {len(self.receipts)} requests: use tracer.receipts[i]")
        return self.receipts[0]

    @property
    def activations(self) -> Activations:
        """What the only request captured."""
        if len(self.captures) != 1:
            raise ValueError(f"this trace has {len(self.captures)} requests: use tracer.captures[i]")
        return self.captures[0]

    @property
    def iter(self) -> StepIterations:
        """Steps of the generation: ``for step in tracer.iter[:]``, ``tracer.iter[2:5]``, ``tracer.iter[3]``."""
        return StepIterations()

    def barrier(self, n: int) -> EngineBarrier:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A meeting point for `n` of this trace's blocks, which are stepped together then."""
        self.barriers += 1
        return EngineBarrier(n)

    def cache(self, *args: Any, **kwargs: Any) -> CacheView:
        """Record modules' values as the request's passes reach them; see nnsight's. Each is what its module went on with.

        Raises:
            ValueError: the block has read or changed a value of the model before.
        """
        block = Mediator.current("tracer.cache()")
        if isinstance(block, Block) and block.served:
            raise ValueError("tracer.cache() comes too late: declare it before the block reads or changes a value")
        return super().cache(*args, **kwargs)

    def invoke(self, *args: Any, **kwargs: Any) -> EngineInvoker:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One prompt of this trace, with a block of its own: ``with tracer.invoke(prompt): ...``.

        Raises:
            ValueError: the trace has a prompt already, and this is its block.
        """
        if "device" in kwargs:
            raise TypeError(
                f"device= belongs to `with lm.{self.mode}(device=...)`: the saves of all its invokes go to one place"
            )
        if hasattr(getcurrent(), "mediator"):
            raise ValueError(
                f"tracer.invoke() inside a block that has a prompt: open `with lm.{self.mode}() as tracer:` without one, "
                "and give each invoke its own"
            )
        return EngineInvoker(self, *args, **kwargs)

    def execute(self, code: CodeType) -> None:
        """Collect the blocks, have the engine serve their requests, and put the saved names into the caller's frame."""
        try:
            self._serve(code)
        finally:
            invokes, self._invocations = len(self._invocations), []
            clear_shared_locals()
            give_back(invokes * OBJECTS)

    def _serve(self, code: CodeType) -> None:
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        traces, inputs = self._collect(code)
        delivery = traces[0].delivery
        try:
            self._model.run_traces(self, traces, inputs)
            self.receipts = [trace.receipt for trace in traces]
            self.captures = [trace.activations for trace in traces]
            for trace in traces:
                trace.announce_saves()
            delivery.send()
            handed: dict[int, Any] = {}
            names: dict[str, Any] = {}
            for trace in traces:
                names |= pushed(trace.hand_over(handed))
            settle_saves(handed.values(), delivery)
        finally:
            delivery.close()
        push_result(frame, names)
        if delivery.device is not None and all(trace.in_vain() and trace.error is None for trace in traces):
            emit([IN_VAIN.format(", ".join(traces[0].in_vain()))])
        for trace in traces:
            trace.let_go()
            emit(trace.warnings)
        errors = [trace.error for trace in traces if trace.error is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, GangError)):  # the cause before its consequences
            raise error.with_traceback(block_traceback(error))

    def _collect(self, code: CodeType) -> tuple[list[RequestTrace], list[tuple[tuple, dict]]]:
        """One trace for each prompt: of the ``with`` itself, or of its invokes (whose bodies' surroundings run now)."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        if self._model._batch_size(*self.args, **self.kwargs):
            block = Mediator(code, frame.f_globals, frame.f_locals, node=self.node)
            self._add(block, self.args, self.kwargs)
        else:
            body = Scope(dict(frame.f_locals), shared_locals(frame), frame.f_globals)
            exec(code, body)
            push_result(frame, body.writes())
            if not self._invocations:
                raise ValueError(
                    f"lm.{self.mode}() needs a prompt, or at least one `with tracer.invoke(prompt):` in its block"
                )
        return self._traces()

    def _add(self, block: Mediator, args: tuple, kwargs: dict[str, Any]) -> None:
        make_room(OBJECTS)
        self._invocations.append((block, args, kwargs))

    def _traces(self) -> tuple[list[RequestTrace], list[tuple[tuple, dict]]]:
        saved, delivery = thread_saves(), self._delivery()
        traces, inputs = [], []
        for block, args, kwargs in self._invocations:
            kwargs = dict(kwargs)
            trace = RequestTrace(
                block,
                self._model.interleaver,
                self._model.edits_of(kwargs.pop("edits", None)),
                grad=kwargs.pop("grad", False),
                delivery=delivery,
                on_step=kwargs.pop("on_step", None),
            )
            trace.outer = {n: v for n, v in block.lcls.items() if id(v) in saved} if saved else {}
            if traces:
                trace.trace_id = traces[0].trace_id
            trace.num_prompts = len(self._invocations)
            traces.append(trace)
            inputs.append((args, kwargs))
        if len(traces) > 1 and (self.barriers or depend_on_each_other([block for block, _, _ in self._invocations])):
            for trace in traces:
                trace.gang = traces
        return traces, inputs

    def _delivery(self) -> Delivery:
        if save_scope.depth == 1:
            return Delivery(self.device or torch.device("cpu"))
        if self.device is not None:
            raise ValueError(
                f"device= of a trace inside a session: give it to `with lm.session(device={str(self.device)!r})`, at whose end "
                "all saves are handed over"
            )
        return Delivery(None)

    if TYPE_CHECKING:  # for callers: their block runs, and the names that it binds are bound

        def __enter__(self) -> Self: ...

        def __exit__(self, *exc: object) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    else:

        def __exit__(self, *exc: Any) -> bool:
            try:
                return super().__exit__(*exc)
            except BaseException as error:
                raise error.with_traceback(block_traceback(error)) from error.__cause__


class EngineInvoker(_Captured, Invoker):
    """One ``with tracer.invoke(prompt):`` block."""

    tracer: EngineTracer  # pyright: ignore[reportIncompatibleVariableOverride]

    def execute(self, code: CodeType) -> None:
        """Register the block with its trace; it runs when the trace's ``with`` ends."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        block = Mediator(
            code,
            frame.f_globals,
            frame.f_locals,  # copied there
            node=self.node,
            shared=shared_locals(frame),
        )
        self.tracer._add(block, self.args, {**self.tracer.kwargs, **self.kwargs})


class SessionTracer(_Captured, Tracer):
    """A ``with lm.session():`` block: Python that opens traces, and gets their values as they are; its caller gets the saved ones.

    Args:
        device: where the caller gets what is saved; see `EngineTracer`.
    """

    def __init__(self, device: Any = "cpu", backend: Any = None) -> None:
        super().__init__(backend=backend)
        self.device = saves_device(device)

    def execute(self, code: CodeType) -> None:
        """Run the block, and put what it saved into the caller's frame."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        scope = Scope(dict(frame.f_locals), {}, frame.f_globals)
        exec(code, scope)
        names = dict(scope)
        if save_scope.depth == 1:
            delivery, saved = Delivery(self.device), thread_saves()
            names = {name: mark(delivery.hand(value)) for name, value in names.items() if id(value) in saved}
            delivery.wait()
        push_result(frame, names)


def pushed(names: dict[str, Any]) -> dict[str, Any]:
    """Those of a block's names that `push_result` lets through. It writes to a frame but once for all blocks: that takes longer
    than to ask for their names."""
    if save_scope.depth > 1:
        return names
    saved = thread_saves()
    return {name: value for name, value in names.items() if id(value) in saved}


def opens_with(frame: FrameType) -> bool:
    """Whether what `frame` is calling now is what a ``with`` statement opens: ``with lm.generate(...):``."""
    return _enters_context(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _enters_context(code: CodeType, offset: int) -> bool:
    following = [i.opname for i in dis.get_instructions(code) if i.offset > offset and i.opname != "CACHE"][:2]
    return following[:1] in (["BEFORE_WITH"], ["BEFORE_ASYNC_WITH"]) or following == ["COPY", "LOAD_SPECIAL"]


def block_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of what a block raised: its own lines, without the engine's and nnsight's."""
    traceback = getattr(error, "__intervention_tb__", error.__traceback__)
    kept = []
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if not module.startswith(OURS):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


class EngineBarrier(Barrier):
    """Every block that holds the barrier calls it; the last to arrive lets the others go.

    nnsight's, but that the blocks it lets go are filed by the interleaver where they wait next.
    """

    def __call__(self) -> None:
        """Wait until `n` blocks have arrived."""
        block = Mediator.current("tracer.barrier()")
        assert isinstance(block, Block)
        self._waiting.append(block)
        if len(self._waiting) < self.n:
            Mediator.barrier()
            return
        waiting, self._waiting = self._waiting[:-1], []
        for other in waiting:
            assert isinstance(other, Block)
            other.trace.interleaver.release(other)
