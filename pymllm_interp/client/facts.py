"""`ModelFacts`: all that a client knows of a served model. A server sends its own as `to_json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from ..core.limits import EngineLimits
from ..core.model_spec import INNER_SITES, NUMBERED_SITES, ModelSpec
from ..hooks.catalogue import ops
from ..hooks.site import PART_KINDS, in_part
from ..utils.device import DTYPES
from .generation_defaults import GenerationDefaults
from .pooling.pooler import Pooler

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling parameters that a model's generation_config.json may set."""
HOOK_LIMITS = ("max_interventions_per_site", "max_intervention_vectors", "max_capture_bytes", "trace_step_timeout")
"""Fields of `ServerConfig` that bound hooks."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A served model, the engine's limits, and the defaults of requests. None of it changes while the model is served."""

    name: str
    """Name of the model, and its server, if any."""
    model: str
    """Requested model: a name, folder, file or hub id."""
    folder: Path | None
    """The folder with the weights' files on this machine, or None."""
    spec: ModelSpec
    hf_config: PretrainedConfig
    impl: str
    """"native" or "transformers"."""
    architecture: str
    """Name of the class of the model's modules."""
    dtype: torch.dtype
    """Dtype of weights and states."""
    device: str
    engine_name: str
    """Versions, device, attention backend and dtype: with equal weights, results may differ by it in the last bits."""
    inner_sites: frozenset[str]
    """Kinds of inner sites ("q", "z", ...) that captures and interventions can use."""
    limits: EngineLimits
    """Upper bounds of requests and steps."""
    settings: Mapping[str, Any]
    """Further bounds of requests: fields of `ServerConfig` by name."""
    hooks: Mapping[str, str]
    """Description of how hooks run, by kind."""
    defaults: GenerationDefaults
    """Sampling parameters of requests without any, and the end-of-sequence ids."""
    seed: int
    """Seed of requests that bring none."""
    logprobs_mode: str
    decoder_start_ids: tuple[int, ...] = ()
    """Token ids that a decoder behind an encoder begins with, without a prompt."""
    tasks: tuple[str, ...] = ("generate",)
    """Tasks that requests may ask for."""
    pooler: Pooler = field(default=Pooler(), repr=False)
    """Defaults of embeddings."""
    pooled_site: str = "final_norm"
    """Site of transformers' `last_hidden_state`."""

    # For checks of requests, in the process of the engine's client.
    names: tuple[str, ...] = field(default=(), repr=False)
    """Names under which files may know the model."""
    own_device: torch.device | None = field(default=None, repr=False)
    """The engine's device, where vectors of this process may stay; None: the engine is in another process."""
    page_size: int = field(default=1, repr=False)
    """Tokens of a KV page."""
    longest_pass: int = field(default=0, repr=False)
    """Most tokens of traced prompts that run in one pass."""
    keeps_scores: bool = field(default=False, repr=False)
    """Whether attention keeps all scores of a pass in memory."""
    audio: Any = field(default=None, repr=False, compare=False)
    """Reads audio for the encoder (`inputs.audio.AudioReader`); None: the model takes none."""
    banned: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """Tokens that no request generates, as `Request.bad_words`."""
    images: Any = field(default=None, repr=False, compare=False)
    """Reads images of prompts (`images.reader.ImageReader`); None: the model takes text only."""
    speculates: bool = field(default=False, repr=False)
    """Whether drafts are proposed."""

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON, with the model's sites and the names of the ops."""
        spec, limits, defaults = self.spec, self.limits, self.defaults
        kinds = [kind for kind in NUMBERED_SITES if kind in spec.family.points or kind == "logits"]
        return {
            "model": self.model,
            "architecture": self.architecture,
            "tasks": list(self.tasks),
            "sliding_window_size": spec.sliding_window_size,
            "impl": self.impl,
            "dtype": str(self.dtype)[6:],
            "device": self.device,
            "engine": self.engine_name,
            "encoder": spec.bidirectional,
            "num_layers": spec.num_hidden_layers,
            "hidden_size": spec.hidden_size,
            "sites": {
                kind: {"shape": list(spec.shape(kind)), "layers": kind not in ("embed", "final_norm", "logits")}
                for kind in kinds
                if kind not in INNER_SITES or kind in self.inner_sites
            }
            | {
                in_part(kind, part): {"shape": list(own.shape(kind)), "layers": kind not in ("embed", "final_norm")}
                for part, own in spec.parts.items()
                for kind in own.family.points
                if kind in PART_KINDS.get(part, ("embed", "resid_post"))
            },
            "ops": sorted(ops()),
            "hooks": dict(self.hooks),
            "limits": {
                "max_model_len": limits.max_model_len,
                "max_num_tokens": limits.max_num_tokens,
                "kv_tokens": limits.kv_tokens,
                "max_running_requests": limits.max_running,
                "vocab_size": limits.vocab_size,
                "max_source_len": limits.max_source_len,
                **self.settings,
            },
            "sampling_defaults": {name: getattr(defaults.sampling_params, name) for name in SAMPLING_DEFAULTS},
            "generation_config": defaults.followed,
            "logprobs_mode": self.logprobs_mode,
            "pooler": self.pooler.to_json(),
            "pooled_site": self.pooled_site,
            "inner_sites": sorted(self.inner_sites),
            "cuts_edges": spec.cuts_edges,
            "eos_token_ids": sorted(defaults.eos_token_ids),
            "decoder_start_ids": list(self.decoder_start_ids),
            "seed": self.seed,
            "hf_config": json.loads(self.hf_config.to_json_string(use_diff=False)),
        }

    @classmethod
    def of_json(
        cls, info: Mapping[str, Any], where: str, spec: ModelSpec, hf_config: PretrainedConfig, max_running: int,
        pooler: Pooler,
    ) -> ModelFacts:  # fmt: skip
        """The facts that a server tells (`to_json`).

        Args:
            where: The server's address.
            spec, hf_config: Made of the config in `info`.
            max_running: Upper bound of the requests that this client has in flight.
            pooler: Made of `info` and the server's files.
        """
        found = dict(info["limits"])
        limits = EngineLimits(
            found.pop("vocab_size"), found.pop("max_model_len"), found.pop("max_num_tokens"), found.pop("kv_tokens"),
            min(found.pop("max_running_requests"), max_running), "generate" in info["tasks"],
            found.pop("max_source_len"),
        )  # fmt: skip
        return cls(
            name=f"{info['model']} at {where}", model=info["model"], folder=None,
            spec=replace(spec, cuts_edges=info["cuts_edges"]), hf_config=hf_config,
            impl=info["impl"], architecture=info["architecture"], tasks=tuple(info["tasks"]), dtype=DTYPES[info["dtype"]],
            device=info["device"], engine_name=info["engine"], inner_sites=frozenset(info["inner_sites"]),
            limits=limits, settings=found, hooks=info["hooks"],
            defaults=GenerationDefaults(info["generation_config"], frozenset(info["eos_token_ids"])), seed=info["seed"],
            logprobs_mode=info["logprobs_mode"], pooler=pooler, pooled_site=info["pooled_site"],
            decoder_start_ids=tuple(info["decoder_start_ids"]),
        )  # fmt: skip
