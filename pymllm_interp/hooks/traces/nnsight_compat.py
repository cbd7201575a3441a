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
from nnsight import NNsightDeprecationWarning, save  # noqa: E402

# Private: nnsight's replacements of `Tensor.backward` and `Tensor.grad`, and torch's own `Tensor.backward`.
from nnsight.intervention.backward import BackwardTracer  # noqa: E402
from nnsight.intervention.backward import _backward as nnsight_backward  # noqa: E402
from nnsight.intervention.backward import _grad_property as grad_property  # noqa: E402
from nnsight.intervention.backward import _original_backward as torch_backward  # noqa: E402
from nnsight.intervention.barrier import Barrier  # noqa: E402
from nnsight.intervention.batching import Batcher  # noqa: E402
from nnsight.intervention.cache import Cache, CacheView  # noqa: E402
from nnsight.intervention.cache import Entry as CacheEntry  # noqa: E402
from nnsight.intervention.editing import EditingTracer  # noqa: E402
from nnsight.intervention.envoy import Envoy  # noqa: E402
from nnsight.intervention.eproperty import eproperty  # noqa: E402

# Internal.
from nnsight.intervention.interleaver import (  # noqa: E402
    EarlyStopException,
    Event,
    Interleaver,
    Mediator,
    OutOfOrderError,
    Pending,
    dangling_unwind,
)
from nnsight.intervention.iterator import Iterations  # noqa: E402
from nnsight.intervention.serialization import (  # noqa: E402
    CustomCloudPickler,
    CustomCloudUnpickler,
    code_reduce,
)
from nnsight.intervention.serialization import _load_function as load_function  # noqa: E402
from nnsight.intervention.source import (  # noqa: E402
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
from nnsight.intervention.tracer import InterleavingTracer, Invoker  # noqa: E402
from nnsight.intervention.util import clear_shared_locals, shared_locals  # noqa: E402
from nnsight.modeling.transformers import Generator  # noqa: E402

# Private: sources and parsed blocks, by file, which a server with many clients must forget again.
from nnsight.tracing.globals import BLOCKS, SOURCES  # noqa: E402
from nnsight.tracing.tracer import (  # noqa: E402
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
from nnsight.tracing.tracer import _local as save_scope  # noqa: E402
from nnsight.tracing.tracer import _saves as thread_saves  # noqa: E402
from nnsight.tracing.util import Scope, SerializedFrame  # noqa: E402
from nnsight.util import apply  # noqa: E402

__all__ = [
    "BLOCKS",
    "NO_SKIP",
    "SOURCES",
    "BackwardTracer",
    "Barrier",
    "Batcher",
    "Cache",
    "CacheEntry",
    "CacheView",
    "Controller",
    "CustomCloudPickler",
    "CustomCloudUnpickler",
    "EarlyStopException",
    "EditingTracer",
    "Envoy",
    "Event",
    "ExitTracingException",
    "Generator",
    "Interleaver",
    "InterleavingTracer",
    "Invoker",
    "Iterations",
    "Mediator",
    "NNsightDeprecationWarning",
    "OutOfOrderError",
    "Pending",
    "Scope",
    "SerializedFrame",
    "Source",
    "SourceEnvoy",
    "State",
    "Tracer",
    "apply",
    "clear_shared_locals",
    "code_reduce",
    "compiled",
    "dangling_unwind",
    "dec",
    "eproperty",
    "grad_property",
    "inc",
    "install_controller",
    "install_source",
    "instrument",
    "load_function",
    "make_op",
    "mark",
    "nnsight_backward",
    "push_result",
    "save",
    "save_scope",
    "shared_locals",
    "skip_context",
    "skippable",
    "thread_saves",
    "torch_backward",
]
