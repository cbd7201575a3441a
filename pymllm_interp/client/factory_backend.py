"""`FactoryBackend`: a backend that makes its requests here, and hands them to its engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from ..core.events import Subscriber
from ..core.limits import EngineLimits
from ..core.model_spec import INNER_SITES, NUMBERED_SITES
from ..core.request import Request
from ..hooks.captures.spec import Capture
from ..hooks.catalogue import ops
from ..hooks.interventions.knockout import Intervention
from ..models.registry import is_native
from .backend import Backend, Submission
from .handle import RequestHandle
from .request_factory import RequestFactory

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling parameters that a model's generation_config.json may set."""


class FactoryBackend(Backend):
    """What backends have in common that check their requests in this process.

    Attributes:
        factory: makes requests, with the named vectors of one owner.
    """

    hooks_run: ClassVar[dict[str, str]] = {
        "declared": "inside the forward pass; no Python runs, and CUDA graphs are replayed",
        "traces": "Python at module boundaries, between graph segments on CUDA",
    }
    """How hooks run, in words."""
    factory: RequestFactory
    _sent: Callable[[list[Request]], None] | None = None

    def view(self, factory: RequestFactory, sent: Callable[[list[Request]], None] | None = None) -> Self:
        """The same engine with another factory.

        Args:
            sent: called with the requests of a trace before they are submitted.
        """
        found = copy.copy(self)
        found._use(factory, sent)
        return found

    def _use(self, factory: RequestFactory, sent: Callable[[list[Request]], None] | None = None) -> None:
        self.factory, self._sent = factory, sent
        self.vectors, self.saes = factory.vectors, factory.saes

    @property
    def limits(self) -> EngineLimits:
        return self.factory.limits

    def fingerprint(self, adapter: str | None = None) -> str:
        self.engine.check_open()
        return self.factory.model_state.fingerprint(adapter)

    @property
    def weights_version(self) -> int:
        return self.factory.model_state.version

    def resolve(
        self, captures: list[Capture], interventions: list[Intervention]
    ) -> tuple[list[Capture], list[Intervention]]:
        return self.factory.named([captures])[0], self.factory.named([interventions])[0]

    # -- requests --------------------------------------------------------------------------

    def submit(self, submission: Submission) -> list[RequestHandle]:
        engine, mode, made = self.engine, self.facts.logprobs_mode, self.prepare(submission)
        handles = [
            RequestHandle(prompt.text, requests, self.tokenizer, engine, submission.stream, mode)
            for prompt, requests in zip(submission.prompts, made, strict=True)
        ]
        self.send([(handle.requests, handle) for handle in handles])
        return handles

    def prepare(self, submission: Submission) -> list[list[Request]]:
        """The requests of each prompt, checked. They hold vectors until `send` has sent them and they have ended.

        Raises:
            PromptError, ValueError, EngineClosedError: as `submit`.
        """
        self.engine.check_open()
        return self.factory.for_prompts(submission)

    def send(self, groups: Sequence[tuple[Sequence[Request], Subscriber]]) -> None:
        """Queue requests, all at once, with the subscriber to their events."""
        try:
            self.engine.submit_all(groups)
        except BaseException:
            self.factory.release([request for requests, _ in groups for request in requests])
            raise

    def describe(self) -> dict[str, Any]:
        runner, facts, config = self.factory.runner, self.facts, self.factory.runner.server_config
        spec, limits, impl = facts.spec, self.limits, runner.model_config.impl
        kinds = [kind for kind in NUMBERED_SITES if kind in spec.family.points or kind == "logits"]
        defaults = self.defaults.sampling_params
        return {
            "model": facts.model,
            "architecture": type(self.module).__name__,
            "tasks": list(runner.get_supported_tasks()),
            "sliding_window_size": runner.sliding_window_size,
            "impl": "native" if is_native(facts.hf_config, impl) else "transformers",
            "dtype": str(facts.dtype)[6:],
            "device": facts.device,
            "engine": facts.engine_name,
            "num_layers": spec.num_hidden_layers,
            "hidden_size": spec.hidden_size,
            "sites": {
                kind: {"shape": list(spec.shape(kind)), "layers": kind not in ("embed", "final_norm", "logits")}
                for kind in kinds
                if kind not in INNER_SITES or kind in facts.inner_sites
            },
            "ops": sorted(ops()),
            "saes": {name: {"site": sae.site, "features": sae.d_sae} for name, sae in self.saes.items()},
            "adapters": {},
            "hooks": {"hook_execution": config.hook_execution, **self.hooks_run},
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
            "generation_config": self.defaults.followed,
            "logprobs_mode": facts.logprobs_mode,
            "inner_sites": sorted(facts.inner_sites),
            "eos_token_ids": sorted(self.defaults.eos_token_ids),
            "seed": runner.model_config.seed,
            "hf_config": json.loads(facts.hf_config.to_json_string(use_diff=False)),
            "tokenizer": self.tokenizer is not None,
            "chat": bool(getattr(self.tokenizer, "chat_template", None)),
        }
