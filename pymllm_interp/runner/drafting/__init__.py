"""Draft models of speculative decoding: a runner of their own, beside the model's (docs/engine/speculative.md)."""
