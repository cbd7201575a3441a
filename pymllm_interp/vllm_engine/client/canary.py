"""The canary: one steered request must change the state, before the engine is returned.

vLLM keeps compiled code of models on the disk. If it ever ran code without the op, requests would be unsteered in silence.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any

import torch

from ...client.backend import Submission
from ...client.chat import RenderedPrompt
from ...core.model_spec import ModelSpec, input_add, residual_site
from ...core.sampling_params import SamplingParams
from ...hooks.captures.spec import Capture
from ...hooks.interventions.specs import Steer
from ..refusals import VllmRefusalError

TOKENS = (1, 2, 3)
SECONDS = 600.0
FAILED = (
    "the canary failed: a steered request did not change the state by its vector ({}). Compiled code without our op may have been "
    "loaded: delete vLLM's compile cache (VLLM_CACHE_ROOT), or set VLLM_DISABLE_COMPILE_CACHE=1"
)


def check_steering(backend: Any) -> None:
    """Steer one request for each engine and pipeline stage, and compare its captured states with a plain request's.
    Raises VllmRefusalError: the states do not differ as they must."""
    spec, core = backend.facts.spec, backend.core
    middle = spec.num_hidden_layers // 2
    of_stages = [_middle(sites, spec) for sites in core.stages] or [f"resid_post.{middle}"]
    for engine in range(core.engines):
        backend.engine.only_engine = engine
        for site in of_stages:
            _check(backend, spec, site)
    backend.engine.only_engine = None


def _middle(sites: Container[int], spec: Any) -> str:
    """The input of the middle one of a stage's layers."""
    layers = [layer for layer in range(spec.num_hidden_layers) if residual_site(input_add(layer)) in sites]
    return f"resid_pre.{layers[len(layers) // 2]}"


def _check(backend: Any, spec: ModelSpec, site: str) -> None:
    last = f"resid_post.{spec.num_hidden_layers - 1}"
    sites = [site, last]
    vector = torch.linspace(-1, 1, spec.hidden_size)
    plain, steered = _states(backend, sites, []), _states(backend, sites, [Steer(sites[0], vector, 8.0)])
    change = (steered[0] - plain[0]).float()
    off = float((change - 8.0 * vector).abs().max())
    tolerance = 1e-3 if spec.dtype == torch.float32 else 0.02 * max(1.0, float(plain[0].abs().max()))
    if not off <= tolerance:
        raise VllmRefusalError(FAILED.format(f"off by {off:.3g} at {sites[0]}"))
    if site != last and torch.equal(plain[1], steered[1]):
        raise VllmRefusalError(FAILED.format(f"{sites[1]} is as it was"))


def _states(backend: Any, sites: list[str], interventions: list[Any]) -> list[torch.Tensor]:
    """The captured states of the canary's prompt, in the order of the sites."""
    submission = Submission(
        prompts=[RenderedPrompt(None, [token % backend.facts.spec.vocab_size for token in TOKENS])],
        params=[SamplingParams(temperature=0, max_tokens=int(backend.facts.limits.generates))], interventions=[interventions],
        captures=[[Capture(site) for site in sites]], priority=[0], names=["the canary"],
    )  # fmt: skip
    (handle,) = backend.submit(submission)
    deadline = time.monotonic() + SECONDS
    handle.wait(max(1.0, deadline - time.monotonic()))
    (end,) = handle.ends
    if end.error is not None:
        raise VllmRefusalError(FAILED.format(f"{type(end.error).__name__}: {end.error}")) from end.error
    if end.activations is None or end.activations.error is not None:
        raise VllmRefusalError(FAILED.format("nothing was captured"))
    return [end.activations[site] for site in sites]
