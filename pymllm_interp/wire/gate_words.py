"""Words of the protocol that both ends use."""

from __future__ import annotations

TRACE_PATH = "/v1/interp/trace"
TRACE_TYPE = "application/x-pymllm-trace"
"""Content type of traces. Web pages of other origins cannot send it without asking."""
ORDERS = (
    "/pause", "/resume", "/is_paused", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/weight_info", "/sleep", "/wake_up", "/is_sleeping",
)  # fmt: skip
GUARDED = ("/v1", "/v2", "/tokenize", "/detokenize", "/pooling", "/score", "/rerank", "/classify", *ORDERS)
"""Path prefixes that need a key, if the server has keys."""
