"""`ServedModel`: the model of a server, with named vectors for each of its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...client.calls.model import ClientModel
from ...client.factory_backend import FactoryBackend
from ...client.local_backend import LocalBackend
from ...client.request_factory import RequestFactory
from ...config import ModelConfig, ServerConfig
from ...core.request import Request
from ...lens.bridge_of import bridge_of


class ServedModel(ClientModel):
    """The served counterpart of `LM`: the same backend, with a request factory for each owner of named vectors.

    Args:
        model, server: configuration, see `LM`.
        shared_prefix_cache: whether owners share KV. If not, `cached_tokens` and times tell an owner nothing of others'
            prompts.
        vllm: arguments of vLLM, if it is the engine; None: the native engine.
    """

    backend: FactoryBackend
    _bridge = bridge_of  # for the methods of TransformerLens' caches

    def __init__(
        self,
        model: ModelConfig,
        server: ServerConfig,
        shared_prefix_cache: bool = False,
        vllm: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(self._backend_of(model, server, vllm))
        self._shared_prefix_cache = shared_prefix_cache
        self._factories = {"": self.backend.factory}

    def _backend_of(self, model: ModelConfig, server: ServerConfig, vllm: dict[str, Any] | None) -> FactoryBackend:
        if vllm is None:
            return LocalBackend(model, server, wrap=self._tree_maker())
        from ...vllm_engine.client.backend import VllmBackend

        return VllmBackend(model, server, vllm)

    def factory(self, owner: str) -> RequestFactory:
        """The request factory of an owner, with the owner's named vectors."""
        if owner not in self._factories:
            cache_owner = None if self._shared_prefix_cache else owner
            # Another thread may have made one.
            return self._factories.setdefault(owner, self.backend.factory.for_owner(cache_owner))
        return self._factories[owner]

    def of(self, owner: str, edits: list[Any], sent: Callable[[list[Request]], None] | None = None) -> ServedModel:
        """A view of this model for one owner's traces, with the owner's vectors and persistent edits.

        Args:
            sent: called with the requests of each trace before they are submitted.
        """
        found: Any = self._shallow_copy()
        found.backend, found._edits = self.backend.view(self.factory(owner), sent), edits
        return found
