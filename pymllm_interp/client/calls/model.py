"""`ClientModel`: a model over a backend, with all calls of a client."""

from __future__ import annotations

from .forward_calls import ForwardCalls
from .token_calls import TokenCalls
from .trace_calls import TraceCalls


class ClientModel(TraceCalls, ForwardCalls, TokenCalls):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Calls for outputs, forward passes and traces. `LM` is one, and so is what a server serves."""
