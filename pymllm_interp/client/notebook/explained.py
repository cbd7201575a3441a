"""Text explanations of how the blocks of a trace ran."""

from __future__ import annotations

from itertools import zip_longest

from ...hooks.traces.syntax.tracer import EngineTracer


def explain(tracer: EngineTracer) -> str:
    """A paragraph for each invoke: the declared hooks that replace it, or the line that prevents it.
    Raises ValueError: the trace has not run."""
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
