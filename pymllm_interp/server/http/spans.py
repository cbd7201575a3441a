"""OpenTelemetry spans of requests: `--otlp-traces-endpoint`, vLLM's option. Imported with that option only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from threading import Thread
from typing import Any

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    from ...utils.extras import install_command

    raise ImportError(f"--otlp-traces-endpoint needs {error.name}: {install_command('otel')}") from error

from ... import __version__
from ...wire.messages import Finished

MAX_QUEUED = 2048
"""Spans that wait to be sent; further ones are dropped."""
EXPORT_SECONDS, END_SECONDS = 10, 2
"""Timeouts of sending a batch, and of the export at shutdown."""
_parent: ContextVar[Context | None] = ContextVar("parent", default=None)


class Spans:
    """Sends a span for each request that ends, by OTLP over HTTP, on its own thread.

    Nothing here waits for the endpoint: spans are queued, and dropped if the queue is full.

    Args:
        endpoint: URL of the receiver, such as "http://localhost:4318/v1/traces".
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource({SERVICE_NAME: "pymllm-interp"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED))
        self._tracer = self._provider.get_tracer("pymllm_interp", __version__)

    def arrived(self, headers: Mapping[str, str]) -> None:
        """Make the trace context of a request's headers the parent of its spans.

        Args:
            headers: headers with lower-case names.
        """
        _parent.set(TraceContextTextMapPropagator().extract(headers, Context()))

    def call(self, models: Sequence[str], started: float) -> CallSpans:
        """The spans of a call.

        Args:
            started: `time.perf_counter()` at which its HTTP request arrived.
        """
        return CallSpans(self._tracer, models, started, _parent.get())

    def close(self) -> None:
        """Send queued spans, for a short time at most."""
        sending = Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(END_SECONDS)


class CallSpans:
    """Spans of one call's requests. Attributes are `gen_ai` of the semantic conventions, latencies are vLLM's."""

    def __init__(self, tracer: Any, models: Sequence[str], started: float, parent: Context | None) -> None:
        self._tracer, self._models, self._parent, self._started = tracer, models, parent, started
        self._start_ns = time.time_ns() - int((time.perf_counter() - started) * 1e9)

    def ended(
        self, request: int, prompt_tokens: int, end: Finished | None, tokens: int, first_token: float | None
    ) -> None:
        """Record a request, by its index in the call.

        Args:
            end: end of the completion; None for an aborted request.
            tokens: generated tokens.
            first_token: seconds until the first token.
        """
        model = self._models[request]
        reason = "abort" if end is None else end.finish_reason
        found = {
            "gen_ai.operation.name": "text_completion", "gen_ai.request.model": model, "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": tokens,
            "gen_ai.response.finish_reasons": (reason or "error",),
            "gen_ai.latency.time_to_first_token": first_token, "gen_ai.latency.e2e": time.perf_counter() - self._started,
            "gen_ai.latency.time_in_queue": None if end is None or end.times is None else end.times.queued,
        }  # fmt: skip
        known = {name: value for name, value in found.items() if value is not None}
        span = self._tracer.start_span(
            "llm_request", self._parent, kind=SpanKind.SERVER, start_time=self._start_ns, attributes=known
        )
        span.end()
