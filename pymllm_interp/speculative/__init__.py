"""Speculative decoding: what proposes draft tokens. Drafts never change a token (docs/engine/speculative.md)."""
