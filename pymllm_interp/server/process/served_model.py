"""`ServedModel`: what a server serves, with named vectors for each of its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...client.calls.model import ClientModel
from ...client.local_backend import LocalBackend
from ...client.request_factory import RequestFactory
from ...config import ModelConfig, ServerConfig
from ...core.request import Request
from ...lens.bridge_of import bridge_of


class ServedModel(ClientModel):
    """What `LM` is to one Python program: the same backend, with a request factory for each owner of named vectors.

    Args:
        model, server: configuration, as of `LM`.
        shared_prefix_cache: whether owners share KV. If not, none can learn from `cached_tokens` or times what others asked.
    """

    backend: LocalBackend
    _bridge = bridge_of  # for the methods of TransformerLens' caches

    def __init__(self, model: ModelConfig, server: ServerConfig, shared_prefix_cache: bool = False) -> None:
        super().__init__(LocalBackend(model, server, wrap=self.tree_maker()))
        self._shared_prefix_cache = shared_prefix_cache
        self._factories = {"": self.backend.factory}

    def factory(self, owner: str) -> RequestFactory:
        """Makes the requests of one owner, with the owner's named vectors."""
        if owner not in self._factories:
            cache_owner = None if self._shared_prefix_cache else owner
            # Another thread may have made one.
            return self._factories.setdefault(owner, self.backend.factory.for_owner(cache_owner))
        return self._factories[owner]

    def of(self, owner: str, edits: list[Any], sent: Callable[[list[Request]], None] | None = None) -> ServedModel:
        """This model as one owner's traces see it: with the owner's vectors, and persistent edits.

        Args:
            sent: called with the requests of each trace before they are submitted.
        """
        found: Any = self._shallow_copy()
        found.backend, found._edits = self.backend.view(self.factory(owner), sent), edits
        return found
