"""`BackedModel`: the tree that traces are written against, over a backend."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from ...core.limits import EngineLimits
from ...core.model_spec import ModelSpec
from ...core.sampling_params import SamplingParams
from ...hooks.declared import captures_for_each_prompt, for_each_prompt
from ...hooks.site import Site
from ...hooks.traces.syntax.envoy import TracedModel
from ..activation_cache import select_sites
from ..backend import Backend, Submission
from ..chat import RenderedPrompt
from ..prompts import checked, names_of, params_for, warn_of_flat_list
from ..request_options import RequestOptions, adapters_of, checked_salt, priorities_of


class BackedModel(TracedModel):
    """A model's module tree, and the backend that runs it.

    Args:
        backend: has the model, and runs requests.
        rename: aliases for modules, as in nnsight.
        envoys: nnsight's map from module classes or paths to envoy classes.

    Attributes:
        backend: likewise.
        tokenizer: a transformers tokenizer, or None.
        hf_config: the model's transformers config.
    """

    def __init__(
        self, backend: Backend, rename: dict[Any, Any] | None = None, envoys: dict[Any, Any] | None = None
    ) -> None:
        if "_module" not in vars(self):  # else the runner has made the tree when it loaded the model
            super().__init__(backend.module, backend.interleaver, rename, envoys)
        self.backend = backend
        backend.attach(self)
        self.tokenizer: Any = backend.tokenizer
        self.hf_config: PretrainedConfig = backend.facts.hf_config

    @property
    def engine(self) -> Any:
        """What runs the requests: its `stats()` are counters of steps and requests."""
        return self.backend.engine

    @property
    def vectors(self) -> MutableMapping[str, Any]:
        """Vectors by name, for interventions that give a name in a vector's place."""
        return self.backend.vectors

    @property
    def saes(self) -> MutableMapping[str, Any]:
        """Sparse autoencoders by name, for captures and interventions that give a name in place of one."""
        return self.backend.saes

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and states, as `lm.device` says where they are."""
        return self.backend.facts.dtype

    @property
    def cfg(self) -> PretrainedConfig:
        """The model's transformers config: `hf_config`, by TransformerLens' name for a config."""
        return self.hf_config

    @property
    def model_spec(self) -> ModelSpec:
        """Sites and widths of the model."""
        return self.backend.facts.spec

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.model_spec.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.model_spec.hidden_size

    @property
    def sites(self) -> list[str]:
        """The sites that captures read, in the order of a forward pass; ``.*`` stands for the layer: "resid_post.*"."""
        found = select_sites(None, self.model_spec, self.backend.facts.inner_sites, captured=False)
        kinds = [site.kind if site.layer is None else f"{site.kind}.*" for site in (*found, Site("logits"))]
        others = {"pattern.*": self.model_spec.cuts_edges, "state.*": any(self.model_spec.states)}
        return [*dict.fromkeys(kinds), *(kind for kind, has in others.items() if has)]

    @property
    def limits(self) -> EngineLimits:
        """Upper bounds of requests and steps, as they are now."""
        return self.backend.limits

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of calls without any: those of the model's generation_config.json, as in vLLM."""
        return self.backend.defaults.sampling_params

    def token_ids(self, prompt: Any, what: str = "the prompt") -> list[int]:
        """Token ids of a prompt: a text, token ids (list or tensor), or a tokenizer's dict.

        Args:
            what: names the prompt in messages.

        Raises:
            PromptError: it is empty, of another type, or has ids outside the vocabulary.
        """
        return self._read(prompt, what).token_ids

    def _read(self, prompt: Any, what: str) -> RenderedPrompt:
        return checked(self.tokenizer, prompt, self.limits.vocab_size, what)

    def submission(
        self,
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        stream: bool = False,
        names: Sequence[str] | None = None,
        prompt_logits: bool = False,
    ) -> Submission:
        """What a call asks for. Prompts, parameters and specs that are wrong in themselves are refused here."""
        count, names = len(prompts), list(names or names_of(prompts))
        own = params_for(prompts, params)
        warn_of_flat_list(options.get("interventions"), count)
        declared = for_each_prompt(options.get("interventions"), count)
        captures = captures_for_each_prompt(options.get("capture"), count)
        edits = self.edits_of(options.get("edits"))
        return Submission(
            prompts=[self._read(prompt, name) for prompt, name in zip(prompts, names, strict=True)],
            params=own, interventions=declared, captures=captures, names=names, stream=stream, prompt_logits=prompt_logits,
            priority=priorities_of(options.get("priority"), count), cache_salt=checked_salt(options.get("cache_salt")),
            adapters=adapters_of(options.get("lora"), count), timeout=options.get("timeout"), edits=edits,
            passes=self.pass_options(edits, {}),
        )  # fmt: skip
