"""Every name of nnsight that we touch, in one place.

nnsight's public extension points are stable; the ones under "internal" are those that its own vLLM runner uses, and the
ones under "private" nobody promises. tests/test_nnsight_compat.py holds the contract that we rely on for each of them,
and fails first when nnsight changes.
"""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED = ("0.8.1",)

if version("nnsight") not in SUPPORTED:
    raise ImportError(
        f"pymllm-interp works with nnsight {' or '.join(SUPPORTED)}, but {version('nnsight')} is installed: "
        f'pip install "nnsight=={SUPPORTED[-1]}"'
    )

# Documented extension points.
from nnsight.intervention.barrier import Barrier  # noqa: E402
from nnsight.intervention.cache import Cache, CacheView  # noqa: E402
from nnsight.intervention.editing import EditingTracer  # noqa: E402
from nnsight.intervention.envoy import Envoy  # noqa: E402
from nnsight.intervention.eproperty import eproperty  # noqa: E402

# Internal: used by nnsight's own runtimes, so they move together with them.
from nnsight.intervention.interleaver import (  # noqa: E402  # noqa: E402
    EarlyStopException,
    Event,
    Interleaver,
    Mediator,
    OutOfOrderError,
    Pending,
    dangling_unwind,
)
from nnsight.intervention.iterator import Iterations  # noqa: E402
from nnsight.intervention.serialization import dumps, loads  # noqa: E402
from nnsight.intervention.source import NO_SKIP, Controller, install_controller  # noqa: E402
from nnsight.intervention.tracer import InterleavingTracer, Invoker, ScanningTracer  # noqa: E402
from nnsight.intervention.util import clear_shared_locals, shared_locals  # noqa: E402
from nnsight.modeling.transformers import Generator, GeneratorEnvoy  # noqa: E402
from nnsight.tracing.tracer import Tracer, mark, push_result  # noqa: E402  # noqa: E402

# Private: the thread's saved ids and its nesting depth, which belong to a request here.
from nnsight.tracing.tracer import _local as save_scope  # noqa: E402
from nnsight.tracing.tracer import _saves as thread_saves  # noqa: E402
from nnsight.tracing.util import Scope, clean_traceback  # noqa: E402
from nnsight.util import apply  # noqa: E402

__all__ = [
    "NO_SKIP",
    "Barrier",
    "Cache",
    "CacheView",
    "Controller",
    "EarlyStopException",
    "EditingTracer",
    "Envoy",
    "Event",
    "Generator",
    "GeneratorEnvoy",
    "Interleaver",
    "InterleavingTracer",
    "Invoker",
    "Iterations",
    "Mediator",
    "OutOfOrderError",
    "Pending",
    "ScanningTracer",
    "Scope",
    "Tracer",
    "apply",
    "clean_traceback",
    "clear_shared_locals",
    "dangling_unwind",
    "dumps",
    "eproperty",
    "install_controller",
    "loads",
    "mark",
    "push_result",
    "save_scope",
    "shared_locals",
    "thread_saves",
]
