"""The start of the engine process: it is tied to its parent before torch is imported.

python -m pymllm_interp.server.process
"""

from __future__ import annotations

import json
import signal

from .lifeline import Lifeline


def main() -> None:
    """Read the settings from standard input, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lifeline = Lifeline()
    settings = json.loads(lifeline.read_settings())
    lifeline.remove_at_end(settings["folder"])

    from .engine_process import run

    try:
        run(settings, lifeline)
    finally:
        lifeline.clean()


if __name__ == "__main__":
    main()
