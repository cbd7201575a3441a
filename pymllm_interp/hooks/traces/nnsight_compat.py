"""Every name of nnsight that this package uses.

The names under "documented" are nnsight's extension points. Names under "internal" are used by nnsight's own vLLM runner.
Names under "private" may change at any time. tests/hooks/traces/test_nnsight_compat.py tests every assumption, and fails
first when nnsight changes.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version

SUPPORTED = ("0.8.1",)

if version("nnsight") not in SUPPORTED:
    raise ImportError(
        f"pymllm-interp works with nnsight {' or '.join(SUPPORTED)}, but {version('nnsight')} is installed: "
        f'pip install "nnsight=={SUPPORTED[-1]}"'
    )

# nnsight gives every object a `save`. anyio refuses classes of typed attributes where one has no annotation: before 4.16 in
# the class itself, since then in a base class. Web servers and clients define such classes late, in the same process.
with suppress(ImportError):
    from anyio import TypedAttributeSet

    _check_annotations = TypedAttributeSet.__init_subclass__.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def _with_save(cls: type) -> None:
        cls.__annotations__ = {"save": object, **getattr(cls, "__annotations__", {})}
        _check_annotations(cls)

    TypedAttributeSet.__init_subclass__ = classmethod(_with_save)  # pyright: ignore[reportAttributeAccessIssue]

# Documented.
from nnsight import NNsightDeprecationWarning, save

# Private: nnsight's replacements of `Tensor.backward` and `Tensor.grad`, and torch's own `Tensor.backward`.
from nnsight.intervention.backward import BackwardTracer
from nnsight.intervention.backward import _backward as nnsight_backward
from nnsight.intervention.backward import _grad_property as grad_property
from nnsight.intervention.backward import _original_backward as torch_backward
from nnsight.intervention.barrier import Barrier
from nnsight.intervention.batching import Batcher
from nnsight.intervention.cache import Cache, CacheView
from nnsight.intervention.cache import Entry as CacheEntry
from nnsight.intervention.editing import EditingTracer
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.eproperty import eproperty

# Internal.
from nnsight.intervention.interleaver import (
    EarlyStopException,
    Event,
    Interleaver,
    Mediator,
    OutOfOrderError,
    Pending,
    dangling_unwind,
)
from nnsight.intervention.iterator import Iterations
from nnsight.intervention.serialization import (
    CustomCloudPickler,
    CustomCloudUnpickler,
    code_reduce,
)
from nnsight.intervention.serialization import _load_function as load_function
from nnsight.intervention.source import (
    NO_SKIP,
    Controller,
    Source,
    SourceEnvoy,
    State,
    compiled,
    install_controller,
    install_source,
    instrument,
    make_op,
)
from nnsight.intervention.tracer import InterleavingTracer, Invoker
from nnsight.intervention.util import clear_shared_locals, shared_locals
from nnsight.modeling.transformers import Generator

# Private: sources and parsed blocks, by file, which a server with many clients must forget again.
from nnsight.tracing.globals import BLOCKS, SOURCES
from nnsight.tracing.tracer import (
    ExitTracingException,
    Tracer,
    dec,
    inc,
    mark,
    push_result,
    skip_context,
    skippable,
)

# Private: the saved ids and the nesting depth of a thread, which here belong to a request.
from nnsight.tracing.tracer import _local as save_scope
from nnsight.tracing.tracer import _saves as thread_saves
from nnsight.tracing.util import Scope, SerializedFrame
from nnsight.util import apply
