"""One forward pass over each prompt, without generation: `ForwardOutput`, and the functions behind the calls of an `LM`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.model_spec import LOGITS
from ...hooks.captures.activations import Activations
from ...hooks.captures.spec import Capture
from ...hooks.monitors.scores import MonitorScores
from ...hooks.site import Site
from ...hooks.traces.syntax.envoy import TracedModel
from ...utils.arguments import PromptError, shown
from ...utils.tables import Shown, Table
from ..prompts import as_prompts, captures_for_each_prompt, only_tokens, refuse_captures
from ..request_options import RequestOptions, check_options
from .activation_cache import NamesFilter, select_sites
from .requests import Requests, wait_for
from .site_hooks import HookFunction, placed_hooks, run_hooks
from .traced_prompts import PREFILL

OF_TRANSFORMER_LENS = {
    "return_type": "the logits are returned; a loss is a function of them",
    "bwd_hooks": "gradients are those of a trace: `with lm.trace(prompt):` and `with loss.backward():`",
    "incl_bwd": "gradients are those of a trace: `with lm.trace(prompt):` and `with loss.backward():`",
    "remove_batch_dim": "index the batch: cache[name][0]",
    "reset_hooks_end": "hooks last for one call; lm.edit() is persistent",
    "clear_contexts": "hooks last for one call; lm.edit() is persistent",
    "stop_at_layer": "a trace ends early with tracer.stop()",
    "prepend_bos": "pass lm.to_tokens(text, prepend_bos=...)",
    "device": "results are on the CPU",
}
"""TransformerLens' keywords -> what to do."""
NEUTRAL = {
    "return_type": "logits",
    "remove_batch_dim": False,
    "incl_bwd": False,
    "reset_hooks_end": True,
    "clear_contexts": False,
}
"""Values of these keywords that ask for nothing else."""


@dataclass(frozen=True, repr=False)
class ForwardOutput(Shown):
    """One forward pass over a prompt."""

    prompt: str | None
    """The prompt's text, if it was text or a conversation."""
    prompt_token_ids: list[int]
    logits: torch.Tensor
    """[tokens, vocab] of the model's dtype, on the CPU."""
    activations: Activations
    """Captured states and the logits."""
    receipt: Any
    """Applied interventions and execution of its steps (`core.receipt.Receipt`)."""
    monitors: Mapping[str, MonitorScores] = field(default_factory=dict)
    """Name of a monitor -> its scores."""

    @property
    def hidden_states(self) -> tuple[torch.Tensor, ...] | None:
        """transformers' hidden states, by layer [1, tokens, hidden]; None without ``output_hidden_states=True``."""
        return self.activations.hidden_states

    @property
    def attentions(self) -> tuple[torch.Tensor, ...] | None:
        """transformers' attention weights, by layer [1, heads, tokens, tokens]; None without ``output_attentions=True``."""
        return self.activations.attentions

    @property
    def routed_experts(self) -> torch.Tensor | None:
        """`Activations.routed_experts`."""
        return self.activations.routed_experts

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"prompt={shown(self.prompt)}, "
        return f"ForwardOutput({prompt}prompt_tokens={len(self.prompt_token_ids)}, activations={self.activations!r})"

    def table(self) -> Table:
        """The prompt, the logits' shape, captures and applied interventions."""
        prompt = str(self.prompt_token_ids) if self.prompt is None else self.prompt
        rows = [("prompt", prompt), ("prompt tokens", len(self.prompt_token_ids)), ("logits", list(self.logits.shape))]
        rows.append(("activations", ", ".join(site for site in self.activations if site != "logits")))
        rows += [("intervention", applied) for applied in self.receipt.interventions]
        return Table("forward pass", ("", ""), rows)


def forward(
    requests: Requests, prompts: list[Any], options: RequestOptions, progress: bool | None = None
) -> list[ForwardOutput]:
    """A `ForwardOutput` for each prompt. See `ClientModel.forward`."""
    captures = captures_for_each_prompt(options.get("capture"), len(prompts))
    if any(spec.site == LOGITS for specs in captures for spec in specs):
        raise PromptError("capture: the logits of all positions are captured in any case; leave them out")
    handles = requests.submit(prompts, PREFILL, options, prompt_logits=True)
    outs = wait_for(handles, progress=progress)
    for i, out in enumerate(outs):
        if out.finish_reason == "timeout":
            raise TimeoutError(f"prompt {i} ran into its timeout")
    return [
        ForwardOutput(
            out.prompt, out.prompt_token_ids, out.activations["logits"], out.activations, out.receipt, out.monitors
        )
        for out in outs
    ]  # fmt: skip


def states_of(
    requests: Requests, prompts: Any, names_filter: NamesFilter, options: RequestOptions
) -> tuple[torch.Tensor, dict[Site, torch.Tensor]]:
    """The logits [batch, tokens, vocab], and the states by site. See `ClientModel.run_with_cache`."""
    options = _checked_options("lm.run_with_cache", options)
    refuse_captures("lm.run_with_cache(prompts, names_filter)", options, "names_filter selects the sites")
    facts = requests.backend.facts
    sites = select_sites(names_filter, facts.spec, facts.inner_sites)
    tokens = tokens_of_equal_length(requests, prompts)
    captures = [Capture(site, positions="prompt") for site in sites if site.kind != "logits"]
    outs = forward(requests, tokens, {**options, "capture": [captures] * len(tokens)})
    states = {site: torch.stack([out.activations[site] for out in outs]) for site in sites}
    return torch.stack([out.logits for out in outs]), states


def logits_with_hooks(
    model: TracedModel,
    requests: Requests,
    prompts: Any,
    fwd_hooks: Iterable[tuple[NamesFilter, HookFunction]],
    options: RequestOptions,
) -> torch.Tensor:
    """The logits [batch, tokens, vocab]. See `ClientModel.run_with_hooks`."""
    options = _checked_options("lm.run_with_hooks", options)
    refuse_captures("lm.run_with_hooks()", options, "a hook keeps what it reads, for example in a list")
    hooks = placed_hooks(fwd_hooks, requests.backend.facts.spec)
    tokens = tokens_of_equal_length(requests, prompts)
    with requests.backend.tracer(model, "trace", **options) as tracer:
        logits = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for ids in tokens:
            with tracer.invoke(ids):
                logits.append(run_hooks(model, hooks))
    return torch.cat(logits)


def _checked_options(who: str, options: RequestOptions) -> RequestOptions:
    """The options without neutral keywords of TransformerLens. Raises TypeError for an unknown keyword, or another value."""
    found: Any = {name: value for name, value in options.items() if name not in NEUTRAL or value != NEUTRAL[name]}
    check_options(who, found, OF_TRANSFORMER_LENS)
    return found


def tokens_of_equal_length(requests: Requests, prompts: Any) -> list[list[int]]:
    """Token ids of prompts that make a batch without padding."""
    several = as_prompts(prompts)
    if isinstance(prompts, torch.Tensor) and prompts.dim() == 2:
        several = list(prompts)
    tokens = [only_tokens(requests.read(prompt, f"prompt {i}"), f"prompt {i}") for i, prompt in enumerate(several)]
    lengths = [len(ids) for ids in tokens]
    if not lengths:
        raise PromptError("an empty list of prompts: expected at least one")
    if len(set(lengths)) != 1:
        raise PromptError(
            f"the prompts have {lengths} tokens: a batch [batch, tokens, ...] without padding needs equal lengths; "
            "run each prompt on its own, or use lm.forward"
        )
    return tokens
