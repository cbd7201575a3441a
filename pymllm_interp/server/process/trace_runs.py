"""`TraceRuns`: the traces and circuits of clients, each on its own thread, like a local program's.

The blocks run on the engine's thread, as always, where the watchdog ends those that hang. The code around them runs here:
reading the payload, collecting invokes, running sessions. All of it is arbitrary Python, which a limit of seconds ends, too.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...core.request import Request
from ...hooks.traces.blocks.errors import TraceTimeoutError
from ...hooks.traces.nnsight_compat import EditingTracer, Mediator, Tracer, dec, inc
from ...hooks.traces.syntax.session import SessionTracer
from ...hooks.traces.syntax.tracer import EngineTracer
from ...wire import messages as m
from ...wire.failures import failure_of
from ...wire.trace_payload import Sources, envoy_at, is_envoy_id, load
from ...wire.values import ValueEncoder, pack
from .circuits import send_circuit
from .client_frame import frame_for
from .outbox import Outbox
from .served_model import ServedModel

logger = logging.getLogger(__name__)
WAKE_SECONDS = 0.2
"""Seconds between checks whether a trace that waits for its client was aborted."""


class RunEndedError(BaseException):
    """Raised into the thread of a trace that is ended before its time. No class of errors that a block would handle."""


class TraceRun:
    """One trace's thread, and how it is ended before its time.

    Args:
        abort: ends requests.
        limit: bytes of results that may wait for its client.
        checks: whether its code calls `check` often, and is never interrupted elsewhere.
    """

    def __init__(self, call: int, abort: Callable[[list[str]], None], limit: int, checks: bool = False) -> None:
        self.call, self._abort, self._limit, self._checks = call, abort, limit, checks
        self._unread, self._read = 0, threading.Condition()
        self._lock, self._requests = threading.Lock(), list[str]()
        self._thread: int | None = None
        self._over = self._posted = self.late = False

    def enter(self) -> None:
        """The thread that calls this is the trace's."""
        self._thread = threading.get_ident()

    def sent(self, requests: list[Request]) -> None:
        """Record submitted requests."""
        self._requests += [request.request_id for request in requests]

    def send(self, size: int, wait: bool) -> None:
        """Count a result with this many bytes; with `wait`, once its client has read enough of earlier ones."""
        with self._read:
            while wait and self._unread and self._unread + size > self._limit and not self._posted:
                self._read.wait(WAKE_SECONDS)  # between two waits it can be ended
            self.check()
            self._unread += size

    def was_read(self, size: int) -> None:
        """The client has read results."""
        with self._read:
            self._unread -= size
            self._read.notify_all()

    def end(self, late: bool = False) -> None:
        """Abort the requests, and raise RunEndedError in the thread, between two bytecodes, once it does not wait.

        Args:
            late: the limit of seconds is the reason; else the client is gone.
        """
        with self._lock:
            if self._over or self._posted or (self._thread is None and not self._checks):
                return
            self._posted, self.late = True, late
            if self._checks:
                return
            assert self._thread is not None  # else it checks
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(RunEndedError))
        self._abort(list(self._requests))

    def check(self) -> None:
        """Raise RunEndedError after `end`, in a run that checks."""
        if self._checks and self._posted:
            raise RunEndedError

    def leave(self) -> None:
        """Finish on the thread. An error posted to it arrives here at the latest."""
        with self._lock:
            self._over = True
        try:
            for _ in range(1000 if self._posted else 0):
                pass
        except RunEndedError:
            pass


class TraceRuns:
    """Runs the traces of clients.

    Args:
        model: model that the traces are written against.
        outbox: queue of outgoing results.
        queued_bytes: results of a trace that may wait for its client.
    """

    def __init__(self, model: ServedModel, outbox: Outbox, queued_bytes: int) -> None:
        self._model, self._outbox, self._queued_bytes = model, outbox, queued_bytes
        self._sources = Sources()
        self._runs: dict[int, TraceRun] = {}
        self._circuit_turn = threading.Lock()

    @property
    def num_running(self) -> int:
        """Traces and circuits that have not ended."""
        return len(self._runs)

    @property
    def calls(self) -> list[int]:
        """Numbers of the calls of these traces."""
        return list(self._runs)

    def run(self, message: m.RunTrace) -> None:
        """Start a trace. Returns at once."""
        self.start(TraceRun(message.call, self._model.engine.abort, self._queued_bytes), message, self._execute)

    def run_circuit(self, message: m.RunCircuit) -> None:
        """Start a circuit. Returns at once."""
        run = TraceRun(message.call, self._model.engine.abort, self._queued_bytes, checks=True)
        self.start(run, message, partial(send_circuit, self._model, self._outbox, self._circuit_turn))

    def start(self, run: TraceRun, message: Any, work: Callable[[TraceRun, Any], None]) -> None:
        """Have a separate thread do the work of a run, and answer its message. Returns at once."""
        self._runs[message.call] = run
        threading.Thread(
            target=self._serve, args=(run, message, work), name=f"pymllm-interp-run-{message.call}", daemon=True
        ).start()

    def was_read(self, message: m.ReadFrames) -> None:
        """A client has read results of its trace."""
        if (run := self._runs.get(message.call)) is not None:
            run.was_read(message.size)

    def abort(self, call: int) -> None:
        """End a trace without a client."""
        if (run := self._runs.get(call)) is not None:
            run.end()

    def close(self) -> None:
        """Abort all traces."""
        for call in self.calls:
            self.abort(call)

    def edits_of(self, payload: bytes) -> list[Mediator]:
        """Persistent edits of a client's model, from their payload. Runs code of whoever wrote it."""
        if not payload:
            return []
        content = load(payload, _Named(self._model, "", None).find)
        return [self._edit(edit) for edit in content["edits"]]

    def _edit(self, data: Mapping[str, Any]) -> Mediator:
        code, node = self._sources.compiled(data)
        edit: Any = Mediator(code, data["globals"], data["locals"], copy=True, node=node)
        if data["edit"] is not None:
            edit.name = data["edit"]
        return edit

    def _serve(self, run: TraceRun, message: Any, work: Callable[[TraceRun, Any], None]) -> None:
        timer = None
        answer: m.Answer | m.Failed = m.Answer(message.call)
        try:
            run.enter()
            if message.timeout is not None:
                timer = threading.Timer(message.timeout, run.end, (True,))
                timer.daemon = True
                timer.start()
            work(run, message)
        except RunEndedError:
            if run.late:
                what = "trace" if isinstance(message, m.RunTrace) else "circuit"
                late = TraceTimeoutError(
                    f"the {what} took longer than {message.timeout:g} s, the server's limit ({what}_timeout)"
                )
                answer = m.Failed(message.call, failure_of(late))
        except BaseException as error:
            answer = m.Failed(message.call, failure_of(error))
        finally:
            if timer is not None:
                timer.cancel()
            run.leave()
            self._runs.pop(message.call, None)
        self._outbox.put(answer)

    def _execute(self, run: TraceRun, message: m.RunTrace) -> None:
        named = _Named(self._model, message.owner, run)
        parts = load(message.payload, named.find)
        content = load(parts["main"], named.find)
        for number, edits in enumerate(parts["models"]):
            named.model(number)._edits = [self._edit(edit) for edit in load(edits, named.find)["edits"]]
        if content["kind"] == "run":
            model = named.model(content["model"])
            found = model.backend.run_pass(model, content["mode"], content["args"], content["kwargs"])
            self._send_result(run, None, {"result": found})
            return
        code, node = self._sources.compiled(content["block"])
        frame, names = frame_for(content["block"], code)
        tracer = named.tracer(content["kind"])
        if isinstance(tracer, ServedTracer):
            kwargs = content["kwargs"]
            if content["steps"]:
                kwargs["on_step"] = lambda step, saved: self._send_step(run, step, saved)
            tracer.__init__(named.model(content["model"]), content["mode"], *content["args"], **kwargs)
        else:
            tracer.__init__()
        tracer.node, tracer.info = node, Tracer.Info(frame, code)
        inc()
        try:
            tracer.execute(code)
        finally:
            dec()
            self._send_result(run, tracer, names.bound, names.warnings())

    def _send_result(self, run: TraceRun, tracer: Any, bound: Mapping[str, Any], warnings: Sequence[str] = ()) -> None:
        """Send a block's saved values, also if it failed."""
        encoder = ValueEncoder()
        header = {"type": "result", "receipts": [], "captures": [], "scores": [], "warnings": [*warnings]}
        header["names"] = {name: encoder.encode(value, name) for name, value in bound.items()}
        if isinstance(tracer, ServedTracer):
            header["receipts"] = [self._outbox.receipt(receipt) for receipt in tracer.receipts]
            header["captures"] = [encoder.encode(found, "captures") for found in tracer.captures]
            header["scores"] = [encoder.encode(found, "scores") for found in tracer.scores]
            header["warnings"] += tracer.texts
        frame = m.Frame(run.call, *pack(header, encoder.tensors))
        run.send(len(frame.body), wait=True)
        self._outbox.put(frame)

    def _send_step(self, run: TraceRun, step: int, saved: Mapping[str, Any]) -> None:
        """Send the values saved so far. They are copies, which the outbox's thread packs."""

        def frame() -> list[m.FromEngine]:
            encoder = ValueEncoder()
            header = {
                "type": "step",
                "step": step,
                "names": {name: encoder.encode(value, name) for name, value in saved.items()},
            }
            found = m.Frame(run.call, *pack(header, encoder.tensors))
            run.send(len(found.body), wait=False)
            return [found]

        self._outbox.put(frame)


class ServedTracer(EngineTracer):
    """A client's trace. Its warnings are kept, for the client."""

    texts: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.texts = []

    def warn(self, texts: list[str]) -> None:
        """Keep warnings for the result."""
        self.texts += texts


class _Named:
    """Objects that a payload names instead of pickling them: models, their modules, and the tracer."""

    def __init__(self, root: ServedModel, owner: str, run: TraceRun | None) -> None:
        self._root, self._owner, self._run = root, owner, run
        self._models: dict[int, ServedModel] = {}
        self._tracers: dict[str, Any] = {}

    def model(self, number: int) -> ServedModel:
        """The client's model of this number, with its own persistent edits."""
        if number not in self._models:
            sent = None if self._run is None else self._run.sent
            self._models[number] = self._root.of(self._owner, [], sent)
        return self._models[number]

    def tracer(self, kind: str) -> Any:
        """The tracer, which a block may refer to before it is initialised."""
        cls: Any = {"session": SessionTracer, "edit": EditingTracer}.get(kind, ServedTracer)
        return self._tracers.setdefault(kind, cls.__new__(cls))

    def find(self, pid: Any) -> Any:
        """The object of a persistent id."""
        match pid:
            case ("model", int(number)):
                return self.model(number)
            case ("tracer", str(kind)):
                return self.tracer(kind)
            case "tokenizer":
                return self._root.tokenizer
            case _ if is_envoy_id(pid):
                return envoy_at(self._root, pid)
        raise ValueError(f"the trace names {pid!r}, which a server does not have")
