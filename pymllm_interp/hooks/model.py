"""The nnsight model over a runner's weights: what a trace is written against.

`TracedModel` is the envoy tree of the module that the runner serves. `LM` (engine/lm.py) is the one that users hold; the
runner's own `nnsight_model` is the same object. Opening a trace collects its blocks here and hands them to
`TracedModel.run_traces`, which the engine implements.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from greenlet import getcurrent
from torch import nn

from .analysis import depend_on_each_other
from .barrier import EngineBarrier
from .interleaver import Block, EngineInterleaver
from .loops import StepIterations, with_loop_ends
from .nnsight_compat import (
    CacheView,
    EditingTracer,
    Envoy,
    Generator,
    InterleavingTracer,
    Invoker,
    Mediator,
    Scope,
    clear_shared_locals,
    eproperty,
    mark,
    push_result,
    shared_locals,
    thread_saves,
)
from .trace import GangError, RequestTrace, emit


class TracedEnvoy(Envoy):
    """An envoy whose errors name what there is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A serialised block names its envoys by path; without this it would carry the tree.
        self._persistent_id = f"Envoy:{self.path}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise AttributeError(self._unknown(name)) from None

    def _unknown(self, name: str) -> str:
        names = [child for child, _ in self._named_children()]
        if names and all(child.isdigit() for child in names):
            return f"`{self.path}` has no entry {name}: it holds {len(names)} modules, 0 to {len(names) - 1}"
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        return f"`{self.path}` has no module or attribute `{name}`{hint} (modules: {', '.join(names) or 'none'})"


class TracedModel(TracedEnvoy):
    """The root of the tree: the model's modules, the step's `logits` and `samples`, and the `generator`.

    Args:
        module: the runner's model; its weights are not copied.
        rename: aliases for modules, as in nnsight.
    """

    interleaver: EngineInterleaver

    def __init__(self, module: nn.Module, rename: dict[Any, Any] | None = None) -> None:
        super().__init__(
            module,
            path="model",
            interleaver=EngineInterleaver(),
            rename=rename,
            envoys=TracedEnvoy,  # pyright: ignore
        )
        self.interleaver.bind(self)
        self.generator = TracedEnvoy(
            Generator(), path=f"{self.path}.generator", interleaver=self.interleaver, parent=self
        )
        self._children.append(self.generator)

    @eproperty(description="this step's logits, before sampling")
    def logits(self, value: Any) -> Any:
        """[1, vocab]: of the request's next token. Assigning replaces what is sampled from."""
        return value

    @eproperty(description="this step's sampled token")
    def samples(self, value: Any) -> Any:
        """[1, 1] int64: the token id that was drawn. Assigning replaces the token that generation goes on with."""
        return value

    def edit(self, *, inplace: bool = False, name: str | None = None, backend: Any = None) -> EditingTracer:
        """A block that runs with every later request, ahead of its own: ``with lm.edit() as (tracer, edited):``.

        The edit belongs to the copy `edited`; with `inplace` to this model, and then only the tracer is bound. A `name` implies
        `inplace`; requests may say which named edits they want (``edits=["name"]``), and have all of them otherwise.
        """
        tracer = EditingTracer(self, inplace=inplace or name is not None, backend=backend)
        if name is not None:
            tracer.execute = _NamedEdit(self, name, tracer.execute)  # pyright: ignore[reportAttributeAccessIssue]
        return tracer

    def clear_edits(self, name: str | None = None) -> None:
        """Drop the edits of this name, or all."""
        known = {getattr(edit, "name", None) for edit in self._edits}
        if name is not None and name not in known:
            raise KeyError(f"no edit is named {name!r}: {sorted(n for n in known if n)}")
        self._edits = [edit for edit in self._edits if name is not None and getattr(edit, "name", None) != name]

    def edits_of(self, wanted: list[str] | None) -> list[Mediator]:
        """The edits that a request gets: all, or the unnamed ones and those of `wanted`. Raises KeyError on unknown names."""
        names = {getattr(edit, "name", None) for edit in self._edits}
        unknown = set(wanted or ()) - names
        if unknown:
            raise KeyError(
                f"edits={wanted}: no edit is named {sorted(unknown)}; there are {sorted(n for n in names if n)}"
            )
        return [e for e in self._edits if wanted is None or getattr(e, "name", None) in (None, *wanted)]

    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: the engine's passes run on real weights."""
        raise NotImplementedError("lm.scan is not supported: read the shapes in a trace of a short prompt")

    def run_traces(self, tracer: EngineTracer, traces: list[RequestTrace], inputs: list[tuple[tuple, dict]]) -> None:
        """Serve the traces' requests and return when all have ended. `inputs` are each trace's ``(args, kwargs)``.

        Raises:
            RuntimeError: this tree has no engine behind it.
        """
        raise RuntimeError("this model has no engine to run a trace on: open traces on an LM")


class EngineTracer(InterleavingTracer):
    """A ``with lm.trace(...)`` or ``with lm.generate(...)`` block. Each invoke is one request.

    Attributes:
        mode: "trace" (one forward pass) or "generate".
        receipts: what happened to each request, in the order of the invokes; set when the block has run.
    """

    def __init__(self, envoy: TracedModel, mode: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(envoy, mode, *args, **kwargs)
        self.mode = mode
        self.receipts: list[Any] = []
        self.barriers = 0
        self._invocations: list[tuple[Mediator, tuple, dict]] = []

    @property
    def receipt(self) -> Any:
        """The only request's receipt."""
        if len(self.receipts) != 1:
            raise ValueError(f"this trace has {len(self.receipts)} requests: use tracer.receipts[i]")
        return self.receipts[0]

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
        if hasattr(getcurrent(), "mediator"):
            raise ValueError(
                f"tracer.invoke() inside a block that has a prompt: open `with lm.{self.mode}() as tracer:` without one, "
                "and give each invoke its own"
            )
        return EngineInvoker(self, *args, **kwargs)

    def execute(self, code: CodeType) -> None:
        """Collect the blocks, have the engine serve their requests, and put the saved names into the caller's frame."""
        model, frame = self.envoy, self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        try:
            traces, inputs = self._collect(code)
            model.run_traces(self, traces, inputs)
            self.receipts = [trace.receipt for trace in traces]
            for trace in traces:
                trace.release_all()
                for value in trace.saved_values():
                    mark(value)
                push_result(frame, trace.written())
                emit(trace.warnings, stacklevel=5)
            errors = [trace.error for trace in traces if trace.error is not None]
            for error in sorted(errors, key=lambda e: isinstance(e, GangError)):  # the cause before its consequences
                raise error.with_traceback(block_traceback(error))
        finally:
            self._invocations = []
            clear_shared_locals()

    def _collect(self, code: CodeType) -> tuple[list[RequestTrace], list[tuple[tuple, dict]]]:
        """One trace for each prompt: of the ``with`` itself, or of its invokes (whose bodies' surroundings run now)."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        code = with_loop_ends(self.node, code)  # pyright: ignore[reportArgumentType]
        if self.envoy._batch_size(*self.args, **self.kwargs):
            block = Mediator(code, frame.f_globals, dict(frame.f_locals), node=self.node)
            self._invocations = [(block, self.args, self.kwargs)]
        else:
            from .loops import LOOP_NAMES, PREFIX

            body = Scope({**frame.f_locals, **LOOP_NAMES}, shared_locals(frame), frame.f_globals)
            exec(code, body)
            push_result(frame, {n: v for n, v in body.writes().items() if not n.startswith(PREFIX)})
            if not self._invocations:
                raise ValueError(
                    f"lm.{self.mode}() needs a prompt, or at least one `with tracer.invoke(prompt):` in its block"
                )
        return self._traces()

    def _traces(self) -> tuple[list[RequestTrace], list[tuple[tuple, dict]]]:
        saved = thread_saves()
        traces, inputs = [], []
        for block, args, kwargs in self._invocations:
            kwargs = dict(kwargs)
            trace = RequestTrace(
                block,
                self.envoy.interleaver,
                self.envoy.edits_of(kwargs.pop("edits", None)),
                grad=kwargs.pop("grad", False),
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

    if TYPE_CHECKING:  # for callers: their block runs, and the names that it binds are bound

        def __enter__(self) -> Self: ...

        def __exit__(self, *exc: object) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    else:

        def __exit__(self, *exc: Any) -> bool:
            try:
                return super().__exit__(*exc)
            except BaseException as error:
                raise error.with_traceback(block_traceback(error)) from error.__cause__


class _NamedEdit:
    """Stores an edit block under a name, in place of the one that had it."""

    def __init__(self, model: TracedModel, name: str, store: Callable[[CodeType], None]) -> None:
        self.model, self.name, self.store = model, name, store

    def __call__(self, code: CodeType) -> None:
        self.model._edits = [e for e in self.model._edits if getattr(e, "name", None) != self.name]
        self.store(code)
        self.model._edits[-1].name = self.name  # pyright: ignore[reportAttributeAccessIssue]


class EngineInvoker(Invoker):
    """One ``with tracer.invoke(prompt):`` block."""

    def execute(self, code: CodeType) -> None:
        """Register the block with its trace; it runs when the trace's ``with`` ends."""
        frame = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        block = Mediator(
            with_loop_ends(self.node, code),  # pyright: ignore[reportArgumentType]
            frame.f_globals,
            dict(frame.f_locals),
            node=self.node,
            shared=shared_locals(frame),
        )
        self.tracer._invocations.append((block, self.args, {**self.tracer.kwargs, **self.kwargs}))


def block_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of what a block raised: its own lines, without the engine's and nnsight's."""
    traceback = getattr(error, "__intervention_tb__", error.__traceback__)
    kept = []
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if not module.startswith(("nnsight.", "pymllm_interp.", "greenlet")):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result
