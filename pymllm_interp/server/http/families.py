"""The metrics of `/metrics`: name -> kind and help. Names and meanings are vLLM's, where vLLM has the metric."""

from __future__ import annotations

from typing import NamedTuple

TIMES = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""Upper bounds of buckets, in seconds."""
LENGTHS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))
"""Upper bounds of buckets, in tokens."""

SCORES = (
    -100.0, -30.0, -10.0, -3.0, -1.0, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0, 3.0, 10.0, 30.0, 100.0,
)  # fmt: skip
"""Upper bounds of buckets, of scores: probabilities and dot products."""


class MetricFamily(NamedTuple):
    """Name, type and help text of a Prometheus metric.

    Attributes:
        kind: counter, gauge or histogram.
        help: description of the counted quantity.
        buckets: upper bounds, of a histogram.
    """

    kind: str
    help: str
    buckets: tuple[float, ...] = ()


def _time(text: str) -> MetricFamily:
    return MetricFamily("histogram", text, TIMES)


FAMILIES = {
    "http_requests_total": MetricFamily("counter", "HTTP requests of all routes, by path and status."),
    "http_request_duration_seconds": _time("Duration of HTTP requests of all routes, /health included."),
    "e2e_request_latency_seconds": _time("Time from the arrival of a generation to its end."),
    "time_to_first_token_seconds": _time("Time from the arrival of a generation to its first token, streamed or not."),
    "inter_token_latency_seconds": _time("Time between two tokens of a stream."),
    "request_queue_time_seconds": _time("Time that a request waits to be admitted to a step."),
    "request_prefill_time_seconds": _time("Time from the admission of a request to its first token."),
    "request_decode_time_seconds": _time("Time from the first token of a request to its end."),
    "request_time_per_output_token_seconds": _time("Mean time between two tokens of a request, streamed or not."),
    "request_prompt_tokens": MetricFamily("histogram", "Prompt tokens of a request.", LENGTHS),
    "request_generation_tokens": MetricFamily("histogram", "Generated tokens of a request.", LENGTHS),
    "request_success_total": MetricFamily("counter", "Requests that ended, by finished_reason: errors and aborts, too."),
    "prompt_tokens_total": MetricFamily("counter", "Prompt tokens of accepted generations."),
    "generation_tokens_total": MetricFamily("counter", "Generated tokens."),
    "tokens_per_second": MetricFamily("gauge", "Generated tokens a second, over the last five seconds."),
    "hooked_requests_total": MetricFamily("counter", "Calls with interventions, monitors or captures."),
    "traces_total": MetricFamily("counter", "Traces that clients sent."),
    "disconnects_total": MetricFamily("counter", "Calls that a client left before the end."),
    "captured_bytes_total": MetricFamily("counter", "Bytes of captured states that clients were sent or may fetch."),
    "store_bytes": MetricFamily("gauge", "Bytes of captured states that wait to be fetched."),
    "store_files": MetricFamily("gauge", "Files of captured states that wait to be fetched."),
    "response_bytes": MetricFamily("gauge", "Bytes of responses (/v1/responses) that can be continued."),
    "responses": MetricFamily("gauge", "Responses (/v1/responses) that can be continued."),
    "calls": MetricFamily("gauge", "Calls of the engine that have not ended, such as generations and this question."),
    "engine_restarts": MetricFamily("counter", "How often an engine process was started again."),
    "engine_ready": MetricFamily("gauge", "1 while the engine takes calls, else 0."),
    "replica_up": MetricFamily("gauge", "1 while a replica of the cluster takes calls, else 0."),
    "replica_draining": MetricFamily("gauge", "1 while a replica takes no new calls, because it is to be stopped."),
    "replica_requests": MetricFamily("gauge", "Requests of this front that run on a replica."),
    "num_requests_running": MetricFamily("gauge", "Requests in the engine's steps."),
    "num_requests_waiting": MetricFamily("gauge", "Requests that wait to be admitted."),
    "num_requests_swapped": MetricFamily("gauge", "Preempted requests with KV in host memory."),
    "requests_traces": MetricFamily("gauge", "Traces that run."),
    "kv_cache_usage_perc": MetricFamily("gauge", "Used part of the KV cache; 1 is all of it."),
    "kv_tokens": MetricFamily("gauge", "Tokens that the KV cache has room for."),
    "kv_tokens_free": MetricFamily("gauge", "Tokens of room in the KV cache that are free or can be made free."),
    "num_preemptions_total": MetricFamily("counter", "Preemptions of requests."),
    "moved_to_host_total": MetricFamily("counter", "Preempted requests that moved their KV to host memory."),
    "steps_total": MetricFamily("counter", "Steps of the engine."),
    "overlapped_steps_total": MetricFamily("counter", "Steps that were followed by the next launch before their tokens were read."),
    "flat_logits_total": MetricFamily("counter", "Logits of requests with edits that were NaN, or equal for all tokens."),
    "steps_by_execution_total": MetricFamily("counter", "Steps by how they ran, and why."),
    "cuda_graphs": MetricFamily("gauge", "CUDA graphs, by state: captured, or missing so far."),
    "block_seconds_total": MetricFamily("counter", "Seconds for which steps waited for blocks of traces."),
    "prefix_cache_queries_total": MetricFamily("counter", "Prompt tokens looked up in the prefix cache, by edits of the request."),
    "prefix_cache_hits_total": MetricFamily("counter", "Prompt tokens found in the prefix cache, by edits of the request."),
    "monitor_fires_total": MetricFamily("counter", "Positions at which a monitor fired; those of clients are one series."),
    "monitor_stops_total": MetricFamily("counter", "Requests that a monitor ended."),
    "monitor_score": MetricFamily("histogram", "Scores of a monitor, of requests that ended.", SCORES),
    "spec_decode_num_drafts_total": MetricFamily("counter", "Passes of requests with draft tokens."),
    "spec_decode_num_draft_tokens_total": MetricFamily("counter", "Draft tokens."),
    "spec_decode_num_accepted_tokens_total": MetricFamily("counter", "Draft tokens that were accepted."),
    "spec_decode_num_pauses_total": MetricFamily("counter", "Pauses of requests with drafts that are seldom accepted."),
}  # fmt: skip
REASONS = ("stop", "length", "monitor", "content_filter", "abort", "timeout", "error")
"""Values of the label finished_reason."""
