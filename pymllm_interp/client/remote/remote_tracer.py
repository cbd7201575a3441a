"""Traces of a server's model: their blocks are sent to the server, and their saves are sent back."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from ...hooks.traces.nnsight_compat import EditingTracer, InterleavingTracer, Mediator, mark, push_result
from ...hooks.traces.syntax.scanned import check_outside_scan
from ...hooks.traces.syntax.session import SessionTracer
from ...hooks.traces.syntax.tracer import EngineTracer
from ...utils.caller_frames import warn_at_caller
from ...wire.gate_words import TRACE_PATH, TRACE_TYPE
from ...wire.trace_payload import block_to_data, dump, edit_to_data
from ...wire.values import ValueDecoder, receipt_of, tensors_of
from ..calls.lowered import LoweringError
from ..calls.model import ClientModel
from .remote_engine import Frames, RemoteEngine


class _Names:
    """Names of objects that are not pickled: models, tracers and tokenizers. Models are numbered as they are met."""

    def __init__(self, tracer: Any = None) -> None:
        self._tracer = tracer
        self.models: list[Any] = []

    def of(self, obj: Any) -> Any:
        """The persistent id of an object, or None."""
        if obj is self._tracer and obj is not None:
            return "tracer", "session" if isinstance(obj, SessionTracer) else "trace"
        if isinstance(obj, EditingTracer):
            return "tracer", "edit"
        if isinstance(obj, EngineTracer | SessionTracer):
            raise TypeError(
                "the block reads the tracer of another trace, whose results are its saved values: read those"
            )
        if isinstance(obj, ClientModel) and not obj.backend.in_process:
            return "model", self.number(obj)
        return None

    def number(self, model: Any) -> int:
        """The number of a model."""
        for i, known in enumerate(self.models):
            if known is model:
                return i
        self.models.append(model)
        return len(self.models) - 1


def payload_of(content: dict[str, Any], names: _Names) -> bytes:
    """A trace's payload: its content, and the persistent edits of each model that is named in it."""
    main, models = dump(content, names.of), list[bytes]()
    while len(models) < len(names.models):  # edits may name further models
        edits = [edit_to_data(edit) for edit in names.models[len(models)]._edits]
        models.append(dump({"edits": edits}, names.of))
    return dump({"main": main, "models": models}, names.of)


def edits_payload(edits: Sequence[Mediator]) -> bytes:
    """The payload of persistent edits, for requests without a block."""
    return dump({"edits": [edit_to_data(edit) for edit in edits]}, _Names().of)


def post(engine: RemoteEngine, payload: bytes) -> Frames:
    """Send a trace. Raises RuntimeError: the call is inside the block of a scan, which makes the tensors of an answer fake."""
    check_outside_scan()
    return engine.frames(TRACE_PATH, content=payload, headers={"Content-Type": TRACE_TYPE})


class _Cancel:
    """Ends a trace, as `RequestTrace.cancel` ends a local one."""

    def __init__(self, engine: RemoteEngine, frames: Frames) -> None:
        self._engine, self._frames = engine, frames

    def cancel(self) -> None:
        """End it, once the server has said its number."""
        if self._frames.call is not None:
            self._engine.abort_call(self._frames.call)


class NotDeclaredError(Exception):
    """A block cannot run after its request: it is sent to the server. The message says why.

    Its cause is the server's error for the declared requests, if it has refused them.
    """


class RemoteTracer(EngineTracer):
    """A ``with lm.trace(...)`` or ``with lm.generate(...)`` block of a server's model."""

    def execute(self, code: CodeType) -> None:
        """Serve the block by declared requests, or else by the server, and bind the saved names in the caller's frame."""
        try:
            self._declare(code)
            return
        except NotDeclaredError as error:
            self._withdraw()
            if error.__cause__ is not None and not self._model.backend.runs_code:
                error.__cause__.add_note(
                    "The block is a declared request, of captures; with the right 'code' it needs none."
                )
                raise error.__cause__ from None
            reason = str(error)
        try:
            self._send()
        except PermissionError as error:
            error.add_note(f"A block that can run after its request needs no such right; this one cannot: {reason}.")
            raise

    def _declare(self, code: CodeType) -> None:
        """Serve the block by declared requests.

        Raises:
            NotDeclaredError: it must run on the server.
            LoweringError: likewise, and no block may.
        """
        mode = self._model.backend.lowered.mode
        if mode == "off":
            raise NotDeclaredError("lower_traces='off'")
        if not self._runs_twice():
            reason = "the code around its invokes does more than to open them"
            if mode == "require":
                raise LoweringError(f"lower_traces='require', but {reason}")
            raise NotDeclaredError(reason)
        super().execute(code)

    @property
    def _model(self) -> Any:
        return self.envoy

    def _runs_twice(self) -> bool:
        """Whether the ``with`` can be collected here, and still be sent. The code around invokes runs in both cases."""
        if self._model._batch_size(*self.args, **self.kwargs):
            return True
        frame: Any = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        return opens_invokes_only(self.node.body, ChainMap(frame.f_locals, frame.f_globals))  # pyright: ignore[reportOptionalMemberAccess]

    def _withdraw(self) -> None:
        """Forget the traces that were to be declared."""
        traces, self.served = self.served, []
        for trace in traces:
            trace.release_blocks()

    def _send(self) -> None:
        """Send the block, pass on the values saved at each step, and bind the saved names."""
        model: Any = self.envoy
        kwargs = dict(model._requests.with_monitors(self.kwargs))
        on_step = kwargs.pop("on_step", None)
        names = _Names(self)
        content = {
            "kind": "trace", "mode": self.mode, "args": self.args, "kwargs": kwargs, "steps": on_step is not None,
            "block": _block_of(self), "model": names.number(model),
        }  # fmt: skip
        frames = post(model.engine, payload_of(content, names))
        self.served = [_Cancel(model.engine, frames)]  # pyright: ignore[reportAttributeAccessIssue]
        try:
            for header, body in frames:
                values = ValueDecoder(tensors_of(body), self.device, model)
                if header["type"] == "step" and on_step is not None:
                    on_step(header["step"], {name: values.decode(tree) for name, tree in header["names"].items()})
                elif header["type"] == "result":
                    self._take(header, values)
        finally:
            self.served = []
            frames.close()

    def _take(self, header: Mapping[str, Any], values: ValueDecoder) -> None:
        self.receipts = [receipt_of(receipt) for receipt in header["receipts"]]
        self.captures = [values.decode(tree) for tree in header["captures"]]
        self.scores = [values.decode(tree) for tree in header["scores"]]
        _bind(self, header, values)


class RemoteSession(SessionTracer):
    """A ``with lm.session():`` block, which runs on the server as a whole.

    Args:
        model: the session's model.
        device: device of the caller's saves.
    """

    def __init__(self, model: Any, device: Any = "cpu", backend: Any = None) -> None:
        super().__init__(device, backend)
        self._model = model

    def execute(self, code: CodeType) -> None:
        """Send the block, and bind the saved names in the caller's frame."""
        model, names = self._model, _Names(self)
        frames = post(model.engine, payload_of({"kind": "session", "block": _block_of(self)}, names))
        try:
            for header, body in frames:
                if header["type"] == "result":
                    _bind(self, header, ValueDecoder(tensors_of(body), self.device, model))
        finally:
            frames.close()


def run_remotely(model: Any, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of a trace without a block."""
    names, result = _Names(), None
    content = {"kind": "run", "mode": mode, "args": inputs, "kwargs": kwargs, "model": names.number(model)}
    frames = post(model.engine, payload_of(content, names))
    try:
        for header, body in frames:
            if header["type"] == "result":
                result = ValueDecoder(tensors_of(body), None, model).decode(header["names"]["result"])
    finally:
        frames.close()
    return result


def _block_of(tracer: Any) -> dict[str, Any]:
    frame = tracer.info.frame
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else None
    return block_to_data(tracer.node, code.co_filename, code.co_name, frame.f_globals, frame.f_locals, first)


def _bind(tracer: Any, header: Mapping[str, Any], values: ValueDecoder) -> None:
    """Bind the saved names in the caller's frame, and issue the server's warnings."""
    found = {name: mark(values.decode(tree)) for name, tree in header["names"].items()}
    push_result(tracer.info.frame, found)
    warn_at_caller(header["warnings"])


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
