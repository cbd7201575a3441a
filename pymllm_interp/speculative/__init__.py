"""Speculative decoding: what proposes draft tokens. Drafts never change a token (docs/speculative.md)."""
