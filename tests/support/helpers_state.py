"""The state of a model that adapters are loaded for, which no engine has yet."""

from __future__ import annotations


class AdaptedState:
    """What the prefix cache asks of a `ModelState`.

    Attributes:
        version: of the model; a test that edits it adds 1.
    """

    version = 0

    def namespace(self, adapter: str | None = None) -> str | None:
        """Of the adapter: its name."""
        return adapter
