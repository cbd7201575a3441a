"""`TraceCalls`: the calls of an `LM` that open traced blocks, or run the model as one would."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any

import torch
from greenlet import getcurrent
from transformers import PretrainedConfig

from ...core.request import Request
from ...engine.engine import Engine
from ...hooks.captures.activations import NOTHING
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.nnsight_compat import apply
from ...hooks.traces.saves.save_transfer import SaveTransfer
from ...hooks.traces.syntax.caller_frames import opens_with
from ...hooks.traces.syntax.envoy import TracedModel
from ...hooks.traces.syntax.scanned import current_scan
from ...hooks.traces.syntax.session import SessionTracer
from ...hooks.traces.syntax.tracer import EngineTracer
from ..handle import RequestHandle
from ..notebook.signatures import OF_TRACES, names_options
from ..prompt_batch import prompts_of
from ..request_factory import RequestFactory
from .lowered import Lowered
from .scan import FakeModel, ScanTracer

PIPELINE = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}
"""Parameters of transformers' text-generation pipeline, where nobody says otherwise."""


class TraceCalls(TracedModel):
    """Blocks over the model's passes: `trace`, `scan`, `pipe` and `session`; and the same without a block.

    Attributes:
        engine: serves their requests.
        hf_config: transformers' config of the model.
    """

    engine: Engine
    hf_config: PretrainedConfig
    tracer_class: type[EngineTracer] = EngineTracer
    _factory: RequestFactory

    @names_options(options=OF_TRACES, rest=True)
    def trace(self, *inputs: Any, trace: bool = True, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One forward pass, with a block that reads and edits it: ``with lm.trace(prompt) as tracer:``.

        A list of prompts is one padded batch [prompts, tokens, ...] to its block. Without a prompt, the block opens one ``with
        tracer.invoke(prompt):`` for each of its prompts; ``padding=True`` pads these to the longest one, on the left. What it saves
        is on the CPU afterwards, or on `device`. In a coroutine, ``async with`` leaves the event loop free.

        Args:
            trace: False runs the pass without a block, and returns the model's output.
        """
        if not trace:
            return self._run("trace", inputs, kwargs)
        return self.tracer_class(self, "trace", *inputs, **kwargs)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output for a prompt: a `CausalLMOutputWithPast` with logits [prompts, tokens, vocab] on the CPU."""
        if hasattr(getcurrent(), "mediator"):
            raise RuntimeError(
                "the whole model cannot be called inside a block: call its modules, or open another trace"
            )
        return self._run("trace", inputs, kwargs)

    @names_options(options=OF_TRACES, rest=True)
    def scan(self, *inputs: Any, **kwargs: Any) -> EngineTracer:
        """Shapes and dtypes without a pass of the engine: a block over fake tensors, which hold no values.

        The block is written as for `trace`, and the same values have the same shapes. It runs over the model's class in
        transformers with fake weights, which is built at the first call. Its `.source` has transformers' operations.

        Raises:
            TypeError: `interventions`, `capture` or `on_step` is given.
            RuntimeError: the call is inside the block of a trace or of another scan.
        """
        return ScanTracer(self, "scan", *inputs, **kwargs)

    @cached_property
    def _fake_model(self) -> FakeModel:
        """The model of `scan`, built at the first one."""
        device = self.device
        if device is None or device.type == "meta":  # a server's model has no weights here
            device = torch.device("cpu")
        return FakeModel(self.hf_config, self._factory.runner.dtype, device, self.interleaver)

    @names_options(options=OF_TRACES, rest=True)
    def pipe(self, *inputs: Any, **kwargs: Any) -> Any:
        """transformers' text-generation pipeline, which samples: ``with lm.pipe(prompt) as tracer:``, or a call.

        ``tracer.result``, or what the call returns, is ``[{"generated_text": ...}]``; for a list of prompts, or several invokes,
        a list of these. Invokes run together, and each gets the result of all.
        """
        if opens_with(sys._getframe(1)):
            return self.tracer_class(self, "pipe", *inputs, **(PIPELINE | kwargs))
        return self._run("pipe", inputs, PIPELINE | kwargs)

    def session(self, device: Any = "cpu", **kwargs: Any) -> SessionTracer:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Several traces that see each other's values: ``with lm.session():``. What it saves is on `device` afterwards."""
        return SessionTracer(device, **kwargs)

    def run_traces(self, mode: str, traces: list[RequestTrace], inputs: list[tuple[tuple, dict] | None]) -> None:
        if self.engine.on_engine_thread or current_scan() is not None:
            raise RuntimeError(
                "a trace cannot be opened inside the block of another, of this LM or of another: use a session, or invokes"
            )
        self.engine.check_open()
        requests = self._requests_of(mode, traces, inputs)
        handles = [RequestHandle(None, [request], None, self.engine) for request in requests]
        self._send(handles)
        for trace in traces:
            trace.cancel = lambda: [handle.cancel() for handle in handles]
        try:
            for handle in handles:
                handle.wait()
        except BaseException:
            for handle in handles:
                handle.cancel()
            for handle in handles:
                handle.wait()
            raise
        saves = {key: names for request in requests for key, names in request.saves.items()}
        for trace in traces:
            trace.saves.collected = saves.get(trace.key, {})
        owners = {request_id: trace for trace in traces if trace.plan is not None for request_id in trace.request_ids}
        self._lowered.replay([(owners[r.request_id], r) for r in requests if r.request_id in owners])
        for request in requests:
            trace = owners.get(request.request_id) or request.trace
            if trace.plan is not None:
                trace.error = _ended_early(request) or request.error or trace.error
                continue
            trace.activations.append(NOTHING if request.activations is None else request.activations)
            # Why it ended comes before what its block, which still waited, made of that.
            trace.error = _ended_early(request) or request.error or trace.error

    def _requests_of(
        self, mode: str, traces: list[RequestTrace], inputs: list[tuple[tuple, dict] | None]
    ) -> list[Request]:
        """The requests of the traces, with captures in the place of blocks that can run afterwards."""
        self._lowered.lower(mode, traces, inputs)
        try:
            return self._factory.for_traces(mode, traces, inputs)
        except Exception as error:
            if all(trace.plan is None for trace in traces):
                raise
            self._lowered.unlower(traces, error)
            return self._factory.for_traces(mode, traces, inputs)

    @cached_property
    def _lowered(self) -> Lowered:
        runner = self._factory.runner
        return Lowered(self, runner.server_config.lower_traces, torch.device(runner.device))

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        """Prompts in an invoke's input. Without any, a trace's block holds invokes, and an invoke's sees all others' prompts."""
        return len(prompts_of(inputs, kwargs, "the prompt")[0].prompts)

    def _run(self, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a trace without a block, on the CPU."""
        blocks = self.edits_of(kwargs.pop("edits", None))
        options = self.pass_options(blocks, kwargs)
        trace = RequestTrace(None, blocks, options=options, transfer=SaveTransfer(None))
        trace.keeps_result = True
        self.run_traces(mode, [trace], [(inputs, kwargs)])
        trace.saves.queue()
        result, error = trace.result, trace.take_error()
        trace.release_blocks()
        if error is not None:
            raise error
        return apply(result, lambda tensor: tensor.detach().to("cpu", copy=True), torch.Tensor)


def _ended_early(request: Request) -> BaseException | None:
    if request.finish_reason == "timeout":
        return TimeoutError(f"request {request.request_id} ran into its timeout")
    return None
