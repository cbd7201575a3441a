"""Words of the protocol that both ends use."""

from __future__ import annotations

TRACE_PATH = "/v1/interp/trace"
TRACE_TYPE = "application/x-pymllm-trace"
"""Content type of traces. Web pages of other origins cannot send it without asking."""
GUARDED = ("/v1", "/v2", "/tokenize", "/detokenize", "/pooling", "/score", "/rerank", "/classify")
"""Path prefixes that need a key, if the server has keys."""
