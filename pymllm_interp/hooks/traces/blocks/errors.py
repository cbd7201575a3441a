"""Errors that end a traced request. Each is also an instance of the builtin error that fits it best."""

from __future__ import annotations

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


class LoopEnd(TraceError, OutOfOrderError):
    """The generation is over, so the block's loop over its steps ends."""
