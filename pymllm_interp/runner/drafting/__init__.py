"""Draft models of speculative decoding: a second runner, beside the model's (docs/engine/speculative.md)."""
