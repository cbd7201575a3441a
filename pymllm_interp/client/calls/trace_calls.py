"""`TraceCalls`: the calls of an `LM` that open traced blocks, or run the model as one would."""

from __future__ import annotations

import sys
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from greenlet import getcurrent

from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.syntax.caller_frames import opens_with
from ...hooks.traces.syntax.session import SessionTracer
from ...hooks.traces.syntax.tracer import EngineTracer
from ..notebook.signatures import OF_TRACES, names_options
from ..prompt_batch import prompts_of
from .backed import BackedModel
from .scan import FakeModel, ScanTracer
from .traces import run

PIPELINE = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}
"""Parameters of transformers' text-generation pipeline, where nobody says otherwise."""


class TraceCalls(BackedModel):
    """Blocks over the model's passes: `trace`, `scan`, `pipe` and `session`; and the same without a block."""

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
        return self.backend.tracer(self, "trace", *inputs, **kwargs)

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
        return FakeModel(self.hf_config, self.dtype, device, self.interleaver)

    @names_options(options=OF_TRACES, rest=True)
    def pipe(self, *inputs: Any, **kwargs: Any) -> Any:
        """transformers' text-generation pipeline, which samples: ``with lm.pipe(prompt) as tracer:``, or a call.

        ``tracer.result``, or what the call returns, is ``[{"generated_text": ...}]``; for a list of prompts, or several invokes,
        a list of these. Invokes run together, and each gets the result of all.
        """
        if opens_with(sys._getframe(1)):
            return self.backend.tracer(self, "pipe", *inputs, **(PIPELINE | kwargs))
        return self._run("pipe", inputs, PIPELINE | kwargs)

    def session(self, device: Any = "cpu", **kwargs: Any) -> SessionTracer:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Several traces that see each other's values: ``with lm.session():``. What it saves is on `device` afterwards."""
        return self.backend.session(self, device, **kwargs)

    def explain(self, tracer: EngineTracer) -> str:
        """How the blocks of a trace ran: what was declared in their place, or the line that prevents it.

        Raises:
            ValueError: the trace has not run.
        """
        if not tracer.receipts:
            raise ValueError("lm.explain() needs the tracer of a trace that has run: call it behind the `with`")
        told = []
        for number, (receipt, plan) in enumerate(zip_longest(tracer.receipts, tracer.plans)):
            if receipt.lowered:
                told.append(f"invoke {number} runs after its request")
                told += [f"  {line}" for line in str(plan or "").splitlines()]
            else:
                reason = receipt.not_lowered or "lower_traces='off'"
                told.append(f"invoke {number} runs in the forward passes: {reason}")
        return "\n".join(told)

    def run_traces(self, mode: str, traces: list[RequestTrace], inputs: list[tuple[tuple, dict] | None]) -> list[Any]:
        return run(self.backend, mode, traces, inputs)

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        """Prompts in an invoke's input. Without any, a trace's block holds invokes, and an invoke's sees all others' prompts."""
        return len(prompts_of(inputs, kwargs, "the prompt")[0].prompts)

    def _run(self, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a trace without a block, on the CPU."""
        return self.backend.run_pass(self, mode, inputs, kwargs)
