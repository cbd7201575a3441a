"""`EngineTracer`: the ``with`` block of a trace, on its caller's thread.

nnsight captures the source of the block and skips its body. When the ``with`` ends, `EngineTracer.execute` makes one `RequestTrace`
per prompt. `TracedModel._run_traces` serves them, and the saved names are bound in the caller's frame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from contextlib import suppress
from types import CodeType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from greenlet import getcurrent

from ....utils.caller_frames import block_traceback, warn_at_caller
from ....utils.gc_threshold import lower_threshold, raise_threshold
from ...captures.activations import Activations
from ..blocks import backward  # noqa: F401  # mounts it
from ..blocks.block_analysis import depend_on_each_other
from ..blocks.errors import GangError
from ..blocks.loops import StepIterations, under_ast_lock
from ..blocks.trace import Block, RequestTrace
from ..nnsight_compat import (
    Barrier,
    CacheView,
    InterleavingTracer,
    Invoker,
    Mediator,
    Scope,
    clear_shared_locals,
    push_result,
    save_scope,
    shared_locals,
    skip_context,
    skippable,
    thread_saves,
)
from ..saves.save_transfer import SaveTransfer
from ..saves.saved import saves_device
from .async_trace import leave_async, ready
from .envoy import TracedModel

OBJECTS = 128
"""Objects of one traced request and its block that Python's cycle collector tracks, about."""

NOTHING_SAVED = "the trace read values and saved none: after its block there is no {}; .save() keeps a value"
CONTAINER_NOT_SAVED = (
    "saved values are in {}, which was not saved: after the block it is gone; [...].save(), or list().save(), keeps it"
)
NOT_REPLACED = (
    "the block gave {} a new value and did not save it: after the block it is the old one; .save() keeps the new one"
)

Invocation = tuple[Mediator, tuple, dict[str, Any], frozenset[str]]
"""A block, the ``(args, kwargs)`` that its prompts were given by, and the names of its invoke's own keywords."""
TraceInput = tuple[tuple, dict[str, Any]]
"""``(args, kwargs)`` of the prompts of a block. None: the block sees the prompts of all others."""


class EngineTracer(InterleavingTracer):
    """A ``with lm.trace(...)`` or ``with lm.generate(...)`` block. Each prompt of its invokes is one request.

    Args:
        device: device of the caller's saves; the CPU by default. Inside a session, saves stay on their device, and the
            session's `device` applies at its end.

    Raises:
        ValueError: torch has no such device.

    Attributes:
        mode: "trace" (one forward pass) or "generate".
        receipts: the receipt of each invoke, in their order. Set when the block has run.
        plans: declared plan of each block; empty if the blocks ran elsewhere.
        captures: the activations that each prompt's request captured (`capture=`), in order; empty for a request without
            captures. A state is captured after the block's edits.
        scores: monitor -> its `MonitorScores`, of each prompt's request (`monitors=`). A state is scored before the block's edits
            at its site.
    """

    parse, compile = under_ast_lock(InterleavingTracer.parse), under_ast_lock(InterleavingTracer.compile)

    def __init__(self, envoy: TracedModel, mode: str, *args: Any, device: Any = None, **kwargs: Any) -> None:
        super().__init__(envoy, mode, *args, **kwargs)
        self.mode = mode
        self.device = saves_device(device) if device is not None else None
        self.receipts: list[Any] = []
        self.plans: list[Any] = []
        self.captures: list[Activations] = []
        self.scores: list[Mapping[str, Any]] = []
        self.served: list[RequestTrace] = []
        self._transfers: list[SaveTransfer] = []
        self.barriers = 0
        self._invocations: list[Invocation] = []

    @property
    def _model(self) -> TracedModel:
        return cast(TracedModel, self.envoy)  # None after the block

    @property
    def receipt(self) -> Any:
        """The receipt of a trace of one invoke. Raises ValueError if it has several."""
        if len(self.receipts) != 1:
            raise ValueError(f"this trace has {len(self.receipts)} invokes: use tracer.receipts[i]")
        return self.receipts[0]

    @property
    def activations(self) -> Activations:
        """The captured activations of a trace of one request. Raises ValueError if it has several."""
        if len(self.captures) != 1:
            raise ValueError(f"this trace has {len(self.captures)} requests: use tracer.captures[i]")
        return self.captures[0]

    @property
    def monitors(self) -> Mapping[str, Any]:
        """Monitor -> its scores in a trace of one request. Raises ValueError if it has several."""
        if len(self.scores) != 1:
            raise ValueError(f"this trace has {len(self.scores)} requests: use tracer.scores[i]")
        return self.scores[0]

    @property
    def iter(self) -> StepIterations:
        """Steps of the generation: ``for step in tracer.iter[:]``, ``tracer.iter[2:5]``, ``tracer.iter[3]``."""
        return StepIterations()

    def warn(self, texts: list[str]) -> None:
        """Pass the block's outcome to the caller."""
        warn_at_caller(texts)

    def barrier(self, n: int) -> EngineBarrier:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A barrier for `n` blocks of this trace. Its requests then share each step."""
        self.barriers += 1
        return EngineBarrier(n)

    def cache(self, *args: Any, **kwargs: Any) -> CacheView:
        """Record the outputs of modules, after edits, in each pass of the request; see nnsight's `tracer.cache`.

        Raises:
            ValueError: the block has already read or changed a value of the model.
        """
        block = Mediator.current("tracer.cache()")
        if isinstance(block, Block) and block.served:
            raise ValueError("tracer.cache() comes too late: declare it before the block reads or changes a value")
        return super().cache(*args, **kwargs)

    def invoke(self, *args: Any, **kwargs: Any) -> EngineInvoker:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One prompt of this trace, with its own block: ``with tracer.invoke(prompt): ...``.

        Raises:
            TypeError: `device` or `padding` is given, which belong to the trace.
            ValueError: the trace itself has a prompt.
        """
        if "device" in kwargs:
            raise TypeError(
                f"device= belongs to `with lm.{self.mode}(device=...)`: the saves of all its invokes go to one place"
            )
        if "padding" in kwargs:
            raise TypeError(
                f"padding= belongs to `with lm.{self.mode}(padding=True)`: it pads all invokes to one length"
            )
        if hasattr(getcurrent(), "mediator"):
            raise ValueError(
                f"tracer.invoke() inside a block that is already running: open `with lm.{self.mode}() as tracer:` without one, "
                "and give each invoke its own"
            )
        return EngineInvoker(self, *args, **kwargs)

    def execute(self, code: CodeType) -> None:
        """Collect the blocks, serve their requests, and bind the saved names in the caller's frame."""
        try:
            self._serve(code)
        finally:
            invokes, self._invocations = len(self._invocations), []
            served, self.served = self.served, []
            for trace in served:  # an error, or Ctrl-C, left them: their blocks hold the caller's model
                trace.release_blocks()
            clear_shared_locals()
            while self._transfers:  # nothing holds the blocks now: the collector does not look at their tensors
                self._transfers.pop().close()
            lower_threshold(invokes * OBJECTS)

    def _serve(self, code: CodeType) -> None:
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        self._collect(code)
        traces, inputs = self._traces()
        self.served = traces
        transfer = traces[0].saves.transfer
        self._transfers.append(transfer)
        self.plans = self._model._run_traces(self.mode, traces, inputs)
        self.receipts = [trace.receipt for trace in traces]
        self.captures = [found for trace in traces for found in trace.activations]
        self.scores = [found for trace in traces for found in trace.scores]
        for trace in traces:
            trace.saves.queue()
        transfer.flush()
        delivered: dict[int, Any] = {}
        names: dict[str, Any] = {}
        for trace in traces:
            names |= _pushed(trace.saves.deliver(delivered))
        transfer.finish(delivered.values())
        push_result(frame, names)
        if transfer.device is not None and all(trace.unsaved_names() and trace.error is None for trace in traces):
            self.warn([NOTHING_SAVED.format(", ".join(traces[0].unsaved_names()))])
        if transfer.device is not None and traces[0].error is None:
            if lost := traces[0].saves.unsaved_containers():
                self.warn([CONTAINER_NOT_SAVED.format(", ".join(lost))])
            if stale := traces[0].saves.stale_names(frame.f_locals):
                self.warn([NOT_REPLACED.format(", ".join(stale))])
        self.served = []
        for trace in traces:
            trace.release_blocks()
            self.warn(trace.warnings)
        errors = [(i, error) for i, trace in enumerate(traces) if (error := trace.take_error()) is not None]
        for i, error in sorted(errors, key=lambda entry: isinstance(entry[1], GangError)):  # the cause first
            if len(traces) > 1:
                with suppress(Exception):  # a frozen dataclass takes no notes
                    error.add_note(f"(prompt {i} of the {len(traces)} of this trace)")
            raise error

    def _collect(self, code: CodeType) -> None:
        """Add the block of the ``with`` itself, or the blocks of its invokes. Other code runs now."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        if self._model._batch_size(*self.args, **self.kwargs):
            block = Mediator(code, frame.f_globals, frame.f_locals, node=self.node)
            self._add(block, self.args, self.kwargs, {})
        else:
            body = Scope(dict(frame.f_locals), shared_locals(frame), frame.f_globals)
            exec(code, body)
            push_result(frame, body.writes())
            if not self._invocations:
                raise ValueError(
                    f"lm.{self.mode}() needs a prompt, or at least one `with tracer.invoke(prompt):` in its block"
                )

    def _add(self, block: Mediator, args: tuple, kwargs: dict[str, Any], own: dict[str, Any]) -> None:
        raise_threshold(OBJECTS)
        self._invocations.append((block, args, kwargs | own, frozenset(own)))

    def _traces(self) -> tuple[list[RequestTrace], list[TraceInput | None]]:
        """One trace for each block."""
        saved, transfer = thread_saves(), self._transfer()
        traces: list[RequestTrace] = []
        inputs: list[TraceInput | None] = []
        for block, args, kwargs, own in self._invocations:
            kwargs = dict(kwargs)
            edits = self._model._edits_of(kwargs.pop("edits", None))
            padded = kwargs.pop("padding", False)
            has_prompt = self._model._batch_size(*args, **kwargs) > 0
            trace = RequestTrace(
                block,
                edits if has_prompt else [],
                grad=kwargs.pop("grad", False),
                options=self._model._pass_options([block, *edits], kwargs),
                transfer=transfer,
                on_step=kwargs.pop("on_step", None),
            )
            trace.saves.outer = {n: v for n, v in block.lcls.items() if id(v) in saved} if saved else {}
            if traces:
                trace.trace_id = traces[0].trace_id
            trace.order, trace.padded = len(traces), padded
            traces.append(trace)
            inputs.append((args, kwargs) if has_prompt else None)
            unused = [] if has_prompt else [name for name in kwargs if name in own]
            if unused:
                raise TypeError(
                    f"tracer.invoke({', '.join(f'{name}=...' for name in unused)}) has no prompt, so nothing is generated for "
                    "it: give its parameters to the invokes with prompts"
                )
        blocks = [block for block, *_ in self._invocations]
        joined = bool(self.barriers) or self.mode == "pipe" or depend_on_each_other(blocks)
        _join(traces, [trace for trace, given in zip(traces, inputs, strict=True) if given is None], joined)
        return traces, inputs

    def _transfer(self) -> SaveTransfer:
        if save_scope.depth == 1:
            return SaveTransfer(self.device or torch.device("cpu"))
        if self.device is not None:
            raise ValueError(
                f"device= of a trace inside a session: give it to `with lm.session(device={str(self.device)!r})`, at whose end "
                "all saves are copied there"
            )
        return SaveTransfer(None)

    if TYPE_CHECKING:  # to a type checker, the block runs and binds its names

        def __enter__(self) -> Self: ...

        def __exit__(self, *exc: object) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    else:

        def __exit__(self, *exc: Any) -> bool:
            try:
                return super().__exit__(*exc)
            except BaseException as error:
                raise error.with_traceback(block_traceback(error)) from error.__cause__

    def __aenter__(self) -> Awaitable[Self]:
        """Capture the block of an ``async with``. No coroutine: nnsight finds the block by the frame that calls this one."""
        self.capture()
        assert self.node is not None, "it is captured"
        if skippable(self.node):
            skip_context(self)
        return ready(self)

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        return await leave_async(self, kind, error)


class EngineInvoker(Invoker):
    """A ``with tracer.invoke(prompt):`` block."""

    tracer: EngineTracer  # pyright: ignore[reportIncompatibleVariableOverride]
    parse, compile = under_ast_lock(Invoker.parse), under_ast_lock(Invoker.compile)

    def execute(self, code: CodeType) -> None:
        """Add the block to its trace. It runs when the trace's ``with`` ends."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        block = Mediator(
            code,
            frame.f_globals,
            frame.f_locals,  # copied
            node=self.node,
            shared=shared_locals(frame),
        )
        self.tracer._add(block, self.args, self.tracer.kwargs, self.kwargs)


def _join(traces: list[RequestTrace], whole: list[RequestTrace], joined: bool) -> None:
    """Make the traces of a ``with`` block a gang, if they need each other.

    Args:
        whole: those without a prompt, which see the prompts of all others.
        joined: whether their blocks meet at a barrier, read each other's names, or get one result together (`pipe`).

    Raises:
        ValueError: none of them has a prompt.
    """
    if len(whole) == len(traces):
        raise ValueError("a prompt is needed: an invoke without one sees those of the other invokes")
    for trace in traces if whole or (joined and len(traces) > 1) else ():
        trace.gang = traces
        trace.sees_all = trace in whole
        trace.whole_batch = () if trace.sees_all else whole


def _pushed(names: dict[str, Any]) -> dict[str, Any]:
    """The names that `push_result` lets through. It is then called once for all blocks: writing to a frame is slow."""
    if save_scope.depth > 1:
        return names
    saved = thread_saves()
    return {name: value for name, value in names.items() if id(value) in saved}


class EngineBarrier(Barrier):
    """A point that `n` blocks of a trace wait for. The last to arrive resumes the others.

    Unlike nnsight's, it files the resumed blocks at their next locations.
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
            other.interleaver.blocks.release(other)
