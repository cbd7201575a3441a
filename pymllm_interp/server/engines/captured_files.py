"""Captured states that came over a link, written to the front's store."""

from __future__ import annotations

import os
from pathlib import Path

from ...wire.failures import failure_of
from ...wire.messages import CapturedStates, Finished


def stored_states(message: Finished, store: Path) -> None:
    """Replace a message's captured states by a file. If it cannot be written, the message becomes a failure."""
    states = message.captured
    assert states is not None and states.data is not None
    path = store / f"pymllm-interp-{os.getpid()}-{message.call}-{message.request}.safetensors"
    try:
        path.write_bytes(states.data)
        message.captured = CapturedStates(states.size, states.sites, file=path.name)
    except OSError as error:
        path.unlink(missing_ok=True)
        message.failure = failure_of(OSError(f"the captured states could not be stored: {error}"))
        message.captured = None
