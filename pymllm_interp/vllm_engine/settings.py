"""Settings, limits and sites that client and ranks must agree on. Both compute them from the same values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from .. import __version__
from ..config import ServerConfig
from ..core.model_spec import ModelSpec
from ..hooks.bind import DeclaredLimits
from ..hooks.site import NORMED, Site
from ..models.registry import architecture_of, spec_of
from .refusals import NORMALIZES
from .structures import SITES, TAPPED, why_without_blocks

KEY = "pymllm_interp"
"""Name of this package in vLLM's `additional_config`, which is part of the key of its compile cache, and in `extra_args`."""
WHOLE = "pymllm_interp_whole"
"""Name in `extra_args` of requests with a prompt that runs in one step."""
UNDRAFTED = "pymllm_interp_undrafted"
"""Name in `extra_args` of requests that no draft is scheduled for."""
RANK_MODULE = "pymllm_interp.vllm_engine.worker.worker"
SETTINGS = (
    "max_interventions_per_site", "max_intervention_vectors", "max_capture_bytes", "capture_ring_bytes", "capture_kept_bytes",
    "trace_step_warning", "trace_step_timeout", "inner_sites",
)  # fmt: skip
"""Fields of `ServerConfig` that ranks read."""
WITH_TABLES = "PYMLLM_INTERP_VLLM_TABLES"
"""Environment variable for tests. "1" gives ranks on a CPU device tables and a ring. Triton's interpreter runs the kernels."""
TAPS = "PYMLLM_INTERP_VLLM_TAPS"
"""Environment variable with the location of hooks on CUDA: "front" of vLLM's norms, or "norm", in kernels that replace them."""
BEGINS_LATER = ("FalconH1ForCausalLM", "GPT2LMHeadModel", "GraniteMoeHybridForCausalLM", "OPTForCausalLM")
"""Architectures with a stream that begins behind the embedding of positions, or with scaled embeddings."""
OURS = "LM(model), whose engine is our own, has it"


@dataclass(frozen=True)
class VllmLimits(DeclaredLimits):
    """Limits of a request on this engine. Inner sites need taps (`inner_sites`)."""

    def check(self, site: Site) -> None:
        """Raise ValueError for a site without a tap."""
        if site.kind in SITES or site.kind in NORMED or site.kind in self.inner_sites:
            return
        if site.kind in TAPPED:
            raise ValueError(
                f"{site}: this engine was started without taps at {site.kind!r}: LM(..., engine='vllm', "
                f"inner_sites={tuple(sorted({*self.inner_sites, site.kind}))})"
            )
        raise ValueError(
            f"{site}: vLLM's kernels have {site.kind!r} inside of them; with engine='vllm' the sites are "
            f"{', '.join((*SITES, *NORMED, *TAPPED))}. {OURS}"
        )


def uses_tables(device: str) -> bool:
    """Whether ranks with this type of device read ops from device tables."""
    return device == "cuda" or os.environ.get(WITH_TABLES) == "1"


def limits_of(config: ServerConfig, device: str) -> VllmLimits:
    """The limits that client and ranks check by.

    Args:
        device: type of the ranks' devices.
    """
    return VllmLimits(
        config.max_interventions_per_site, config.max_intervention_vectors, config.max_capture_bytes,
        frozenset(config.inner_sites) & frozenset(TAPPED),
        device_tables=uses_tables(device),
    )  # fmt: skip


def served_spec(config: PretrainedConfig, dtype: Any) -> ModelSpec:
    """The spec of a model in vLLM, without a vision tower, which has no sites there.

    Edges of attention are cut in passes by modules. See `BEGINS_LATER` for the site `embed`.
    """
    spec = replace(spec_of(config, "auto", dtype), vision=None)
    spec = replace(spec, cuts_edges=spec.cuts_edges and why_without_blocks(config) is None)
    if architecture_of(config) in BEGINS_LATER:
        return replace(spec, family=replace(spec.family, missing=spec.family.missing | {"embed"}))
    return spec


def taps_for(quantization: str | None) -> str:
    """Location of hooks, see `TAPS`. By default in the norm, or in front of it with quantised weights.
    Raises ValueError: `TAPS` says something else."""
    found = os.environ.get(TAPS) or ("norm" if quantization is None else "front")
    if found not in ("front", "norm"):
        raise ValueError(f"{TAPS}={found}: expected 'front' or 'norm'")
    return found


def additional_config(config: ServerConfig, quantization: str | None = None) -> dict[str, Any]:
    """Settings that vLLM carries to its ranks. They also change its key of compiled code."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    return {KEY: {"version": __version__, "taps": taps_for(quantization), **settings}}


def llm_arguments(quantization: str | None = None, **settings: Any) -> dict[str, Any]:
    """Keywords for a `vllm.LLM` with hooks, for `LM.attach`: ``vllm.LLM(model, **llm_arguments(inner_sites=("z",)))``.

    Args:
        quantization: vLLM's argument of this name, if it is given.
        settings: fields of `ServerConfig` that vLLM's ranks read (`SETTINGS`).

    Raises:
        TypeError: another field.
    """
    if wrong := settings.keys() - set(SETTINGS):
        raise TypeError(f"llm_arguments({', '.join(sorted(wrong))}): ranks read {', '.join(SETTINGS)}")
    return rank_arguments(ServerConfig(**settings), quantization)


def rank_arguments(config: ServerConfig, quantization: str | None = None) -> dict[str, Any]:
    """Arguments of vLLM for an engine with hooks: the class of its ranks, and their settings.

    Images come normalised, and vLLM keeps none: an attached `LM` would push the images of the engine's user out.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    worker = f"{RANK_MODULE}.Interp{'GPU' if current_platform.is_cuda() else 'CPU'}Worker"
    settings = additional_config(config, quantization)
    found = {"worker_cls": worker, "additional_config": settings, "mm_processor_cache_gb": 0}
    if hasattr(AsyncEngineArgs, NORMALIZES):  # not in vLLM 0.26
        found[NORMALIZES] = False
    return found


def server_config_of(additional: Mapping[str, Any] | None) -> ServerConfig:
    """The settings in vLLM's `additional_config`. Raises ValueError: they are missing, or of another version of this package."""
    found = dict((additional or {}).get(KEY) or {})
    told = found.pop("version", None)
    found.pop("taps", None)
    if told != __version__:
        raise ValueError(
            f"this rank has pymllm-interp {__version__}, and the client "
            f"{'sent no settings' if told is None else f'has {told}'}: install one version on all nodes, and start the engine "
            "with LM(model, engine='vllm')"
        )
    found["inner_sites"] = tuple(found.get("inner_sites", ()))
    return ServerConfig(**found)
