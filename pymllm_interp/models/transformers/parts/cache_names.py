"""The name by which a forward of transformers takes its cache, which differs by version and family."""

from __future__ import annotations

from collections.abc import Iterable

CACHES = ("cache", "past_key_values", "cache_params", "layer_past")
"""Names of the parameter that takes the cache, the newest first. transformers 5.24 renamed `past_key_values` to `cache`."""


def cache_parameter(names: Iterable[str]) -> str:
    """The name by which a forward with these parameters takes its cache."""
    taken = set(names)
    return next((name for name in CACHES if name in taken), "past_key_values")
