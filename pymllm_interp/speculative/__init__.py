"""Speculative decoding: sources of draft tokens. Drafts never change a token (docs/engine/speculative.md)."""
