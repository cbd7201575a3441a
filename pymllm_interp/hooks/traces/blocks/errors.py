"""Errors that end a traced request. Each is also an instance of the builtin error that fits it best."""

from __future__ import annotations

from collections.abc import Iterator

from ..nnsight_compat import OutOfOrderError


class TraceError(Exception):
    """An error of one traced request. Other requests of the batch are not affected."""


class EditError(TraceError, ValueError):
    """An edit does not fit the value that it replaces: another type, shape, dtype or device."""


class MixedRowsError(TraceError, RuntimeError):
    """A value mixes the rows of several requests, as inside experts. No request may see it beside others."""


class GangError(TraceError, RuntimeError):
    """Another request of the same gang failed."""


class TraceTimeoutError(TraceError, TimeoutError):
    """A block ran for more than `trace_step_timeout` seconds without reaching the model."""


def too_late(request_id: str, location: str, before: str, step: int | None = None) -> str:
    """The text of an `OutOfOrderError`.

    Args:
        before: location at which the block was served last; "" for none.
        step: step that ``tracer.iter`` pins the block to.
    """
    where = "" if step is None else f" in step {step}"
    at = f": the block was at `{before}` before" if before else ""
    return (
        f"request {request_id}: `{location}` was requested but the model already ran past it{where}{at}; a block reads in the "
        "order in which the model runs: what is inside of a module before the module's own output"
    )


class LoopEnd(TraceError, OutOfOrderError):
    """The generation is over, so the block's loop over its steps ends."""


def notes_of(raised: BaseException, text: str, grad: bool) -> Iterator[str]:
    """Advice that an error's text lacks.

    Args:
        grad: the trace has gradients.
    """
    if isinstance(raised, RuntimeError) and "does not require grad" in text and not grad:
        yield "a trace has gradients if its block names them (backward, grad, ...), or with grad=True"
    if "derivative for" in text and "attention" in text:
        yield "torch's fused attention has no second derivative: give the trace attn_implementation='eager'"


BOUND_ELSEWHERE = (
    "`{}` is bound by another invoke of this trace, which has not reached that line yet: with `barrier = tracer.barrier(2)`, "
    "call `barrier()` after that line there, and before this line here"
)
