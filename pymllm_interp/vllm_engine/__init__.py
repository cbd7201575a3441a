"""vLLM as the engine of an `LM`: its scheduler, kernels and ranks, with tables and reductions in its passes.

    client      `VllmBackend`: checks and submits requests, as a local engine's client does
    worker      what each rank has: taps at the norms, the op, the declared stage, and the way of results back

The extra `vllm` installs it. Only this folder imports vllm.
"""

from __future__ import annotations

from .settings import llm_arguments as llm_arguments
