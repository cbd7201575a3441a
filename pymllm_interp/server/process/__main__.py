"""The start of the engine process: it is tied to its parent before torch is imported.

python -m pymllm_interp.server.process
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys

from ...utils.busy_cores import share_lock
from .lifeline import Lifeline


def main() -> None:
    """Read the settings from standard input, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = 1
    # The first one runs last: freeing torch's modules one by one takes a second.
    atexit.register(lambda: (sys.stdout.flush(), os._exit(status)))
    lifeline = Lifeline()
    settings = json.loads(lifeline.read_settings())
    lifeline.remove_at_end(settings["folder"])

    gc.disable()  # imports make half a million objects, none of them garbage
    from .engine_process import run

    gc.freeze()
    gc.enable()
    try:
        share_lock()
        run(settings, lifeline)
        status = 0
    finally:
        lifeline.clean()


if __name__ == "__main__":
    main()
