"""`ServedModel`: an engine, its request factories and the tree that traces are written against, without an `LM`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from ...client import open_engines
from ...client.calls.forward_calls import ForwardCalls
from ...client.calls.token_calls import TokenCalls
from ...client.calls.trace_calls import TraceCalls
from ...client.generation_defaults import GenerationDefaults
from ...client.handle import RequestHandle
from ...client.request_factory import RequestFactory
from ...config import ModelConfig, ServerConfig
from ...core.model_spec import NUMBERED_SITES, ModelSpec
from ...engine.engine import Engine
from ...hooks.registry import ops
from ...layers.seal import seal
from ...models.registry import is_native
from ...models.weights.source import load_tokenizer
from ...runner.interp_model_runner import InterpModelRunner

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling parameters that a model's generation_config.json may set."""


class ServedModel(TraceCalls, ForwardCalls, TokenCalls):  # pyright: ignore[reportIncompatibleMethodOverride]
    """What `LM` is to one Python program: the same engine, with a request factory for each owner of named vectors.

    Args:
        model, server: configuration, as of `LM`.
        shared_prefix_cache: whether owners share KV. If not, none can learn from `cached_tokens` or times what others asked.

    Attributes:
        engine: serves the requests.
        tokenizer: a transformers tokenizer, or None.
    """

    def __init__(self, model: ModelConfig, server: ServerConfig, shared_prefix_cache: bool = False) -> None:
        self._shared_prefix_cache = shared_prefix_cache
        self.runner = InterpModelRunner(server, model, wrap=self.tree_maker())
        self.engine = Engine(self.runner)
        open_engines.track(self.engine)
        self.engine.start()
        seal(self.runner.get_model())
        source = self.runner.source
        assert source is not None
        self.tokenizer = load_tokenizer(source)
        self.hf_config: PretrainedConfig = source.hf_config
        self._defaults = GenerationDefaults.of(model.generation_config, source.hf_config, source.folder)
        self._factories: dict[str, RequestFactory] = {}
        self._factory = self.factory("")

    def factory(self, owner: str) -> RequestFactory:
        """Makes the requests of one owner, with the owner's named vectors."""
        if owner not in self._factories:
            seed = self.runner.model_config.seed
            cache_owner = None if self._shared_prefix_cache else owner
            made = RequestFactory(self.runner, self.tokenizer, self._defaults, seed, cache_owner)
            return self._factories.setdefault(owner, made)  # another thread may have made one
        return self._factories[owner]

    def of(self, owner: str, edits: list[Any]) -> ServedModel:
        """This model as one owner's traces see it: with the owner's vectors, and persistent edits."""
        copy: Any = self._shallow_copy()
        copy._factory, copy._edits = self.factory(owner), edits
        return copy

    @property
    def vectors(self) -> Any:
        """Vectors by name."""
        return self._factory.vectors

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and states."""
        return self.runner.dtype

    @property
    def model_spec(self) -> ModelSpec:
        """Sites and widths of the model."""
        return self.runner.model_spec

    def sent(self, handles: list[RequestHandle]) -> None:
        """Called with the handles of a trace's requests, before they are submitted."""

    def _send(self, handles: list[RequestHandle]) -> None:
        self.sent(handles)
        super()._send(handles)

    def describe(self) -> dict[str, Any]:
        """What clients may know of the model and its engine, as JSON."""
        runner, factory, config = self.runner, self._factory, self.runner.server_config
        spec, limits = runner.model_spec, factory.limits
        kinds = [kind for kind in NUMBERED_SITES if kind in spec.family.points or kind == "logits"]
        usable = runner.declared.limits.inner_sites
        defaults = factory.defaults.sampling_params
        return {
            "model": runner.model_config.model,
            "architecture": type(runner.get_model()).__name__,
            "impl": "native" if is_native(self.hf_config, runner.model_config.impl) else "transformers",
            "dtype": str(runner.dtype)[6:],
            "device": runner.device,
            "engine": factory.engine_name,
            "num_layers": spec.num_hidden_layers,
            "hidden_size": spec.hidden_size,
            "sites": {
                kind: {"shape": list(spec.shape(kind)), "layers": kind not in ("embed", "final_norm", "logits")}
                for kind in kinds
                if kind not in ("q", "k", "v", "z", "mlp_act") or kind in usable
            },
            "ops": sorted(ops()),
            "saes": {name: {"site": sae.site, "features": sae.d_sae} for name, sae in self._factory.saes.items()},
            "hooks": {
                "hook_execution": config.hook_execution,
                "declared": "inside the forward pass; no Python runs, and CUDA graphs are replayed",
                "traces": "Python at module boundaries, between graph segments on CUDA",
            },
            "limits": {
                "max_model_len": limits.max_model_len,
                "max_num_tokens": limits.max_num_tokens,
                "kv_tokens": limits.kv_tokens,
                "max_running_requests": limits.max_running,
                "vocab_size": limits.vocab_size,
                "max_interventions_per_site": config.max_interventions_per_site,
                "max_intervention_vectors": config.max_intervention_vectors,
                "max_capture_bytes": config.max_capture_bytes,
                "trace_step_timeout": config.trace_step_timeout,
            },
            "sampling_defaults": {name: getattr(defaults, name) for name in SAMPLING_DEFAULTS},
            "logprobs_mode": config.logprobs_mode,
            "inner_sites": sorted(usable),
            "eos_token_ids": sorted(factory.defaults.eos_token_ids),
            "seed": runner.model_config.seed,
            "hf_config": self.hf_config.to_dict(),
            "tokenizer": self.tokenizer is not None,
            "chat": bool(getattr(self.tokenizer, "chat_template", None)),
        }
