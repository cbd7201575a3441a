"""The folder of what is made once on a machine: converted models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "PYMLLM_INTERP_CACHE"


def default_cache_dir() -> Path:
    """`$PYMLLM_INTERP_CACHE`, `$XDG_CACHE_HOME/pymllm-interp`, or ~/.cache/pymllm-interp."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pymllm-interp"
