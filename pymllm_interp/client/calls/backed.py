"""`BackedModel`: the tree that traces are written against, over a backend."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from transformers import PretrainedConfig

from ...core import unsupported
from ...core.limits import EngineLimits
from ...core.model_spec import ModelSpec
from ...core.sampling_params import SamplingParams
from ...hooks.bind import captures_for_each_prompt, for_each_prompt
from ...hooks.site import Site
from ...hooks.traces.syntax.envoy import TracedModel
from ...utils.arguments import SHOWN
from ..backend import Backend, Submission
from ..chat import RenderedPrompt
from ..prompts import checked, names_of, params_for, warn_of_flat_list
from ..request_options import RequestOptions, adapters_of, checked_salt, priorities_of
from .activation_cache import select_sites
from .config_view import ConfigView

PLUMBING = frozenset({"model_maker", "resolve_specs", "submission", "submit_prefill"})
"""Names that `dir` leaves out: harvests and the server use them."""


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
    def cfg(self) -> ConfigView:
        """The model's transformers config, which is read by TransformerLens' names of sizes, too: ``lm.cfg.n_layers``."""
        return ConfigView(self)

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
    def num_heads(self) -> int:
        """Number of attention heads of the queries. `lm.model_spec.num_key_value_heads` is that of keys and values."""
        return self.model_spec.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.model_spec.head_dim

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which is the width of the logits."""
        return self.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of one request, prompt and new ones."""
        return self.limits.max_model_len

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

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in PLUMBING]

    def _unknown(self, name: str) -> str:
        if name in unsupported.ATTRIBUTES:
            hint = f"did you mean lm.{unsupported.ATTRIBUTES[name]}?"
        elif name in unsupported.METHODS:
            hint = unsupported.METHODS[name]
        else:
            modules = [child for child, _ in self._named_children()]
            near = get_close_matches(name[:SHOWN], dict.fromkeys([*modules, *dir(self)]), n=2)
            hint = f"did you mean {' or '.join(f'lm.{one}' for one in near)}? " if near else ""
            hint += f"modules: {', '.join(modules)}"
        return f"LM has no attribute {name!r}: {hint}"

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
