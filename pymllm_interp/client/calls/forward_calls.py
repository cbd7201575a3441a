"""`ForwardCalls`: the calls of an `LM` for one forward pass over each prompt, without generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from ...core.model_spec import LOGITS
from ...hooks.bind import captures_for_each_prompt
from ...hooks.captures.activations import Activations
from ...hooks.captures.spec import Capture
from ...utils.arguments import PromptError, shown
from ...utils.tables import Shown, Table
from ..notebook.signatures import names_options
from ..prompts import as_prompts
from ..request_options import RequestOptions, check_options
from .activation_cache import ActivationCache, NamesFilter, select_sites
from .request_calls import RequestCalls, wait_for
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


@dataclass(frozen=True, repr=False)
class ForwardOutput(Shown):
    """One forward pass over a prompt."""

    prompt: str | None
    """The text, where it was text or a conversation."""
    prompt_token_ids: list[int]
    logits: torch.Tensor
    """[tokens, vocab], of the model's dtype, on the CPU."""
    activations: Activations
    """What was captured, and the logits."""
    receipt: Any
    """What was applied, and how its steps ran (core.receipt.Receipt)."""

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"prompt={shown(self.prompt)}, "
        return f"ForwardOutput({prompt}prompt_tokens={len(self.prompt_token_ids)}, activations={self.activations!r})"

    def table(self) -> Table:
        """The prompt, the logits' shape, what was captured and what was applied."""
        prompt = str(self.prompt_token_ids) if self.prompt is None else self.prompt
        rows = [("prompt", prompt), ("prompt tokens", len(self.prompt_token_ids)), ("logits", list(self.logits.shape))]
        rows.append(("activations", ", ".join(site for site in self.activations if site != "logits")))
        rows += [("intervention", applied) for applied in self.receipt.interventions]
        return Table("forward pass", ("", ""), rows)


class ForwardCalls(RequestCalls):
    """Forward passes: logits and states of whole prompts."""

    @names_options()
    def forward(
        self, prompts: Any, *, progress: bool | None = None, **options: Unpack[RequestOptions]
    ) -> list[ForwardOutput]:
        """One forward pass over each prompt: the logits of all positions, and what is captured.

        Args:
            prompts, progress: as `generate`.
            options: `capture`, `interventions`, `timeout` and `edits`, as `generate`.

        Raises:
            PromptError, ValueError: a prompt or a spec that cannot be served; nothing was scheduled then.
            RequestError: a request failed.
            TimeoutError: a request ran into its timeout.
        """
        check_options("lm.forward", options)
        return self._forward(as_prompts(prompts), options, progress)

    def _forward(
        self, prompts: list[Any], options: RequestOptions, progress: bool | None = None
    ) -> list[ForwardOutput]:
        captures = captures_for_each_prompt(options.get("capture"), len(prompts))
        if any(spec.site == LOGITS for specs in captures for spec in specs):
            raise PromptError("capture: the logits of all positions are captured in any case; leave them out")
        handles = self._submit_all(prompts, PREFILL, options, prompt_logits=True)
        outs = wait_for(handles, progress=progress)
        for i, out in enumerate(outs):
            if out.finish_reason == "timeout":
                raise TimeoutError(f"prompt {i} ran into its timeout")
        return [
            ForwardOutput(
                out.prompt, out.prompt_token_ids, out.activations["logits"], out.activations, out.receipt
            )
            for out in outs
        ]  # fmt: skip

    @names_options("capture")
    def run_with_cache(
        self, prompts: Any, names_filter: NamesFilter = None, **options: Unpack[RequestOptions]
    ) -> tuple[torch.Tensor, ActivationCache]:
        """The logits and the states of one forward pass, as TransformerLens gives them.

        Args:
            prompts: one prompt, or several of equal length.
            names_filter: a site's name, several names, or a function of TransformerLens' name; None: all that can be captured.
                On CUDA, None and a function leave out inner sites that the engine has no kernels for (`inner_sites`).
            options: `interventions`, `timeout` and `edits`, as `generate`.

        Returns:
            logits [batch, tokens, vocab], and the states by site, [batch, tokens, ...]. Both are on the CPU.

        Raises:
            PromptError: prompts of different lengths, or a site that cannot be captured.
        """
        check_options("lm.run_with_cache", options, OF_TRANSFORMER_LENS)
        if "capture" in options:
            raise TypeError("lm.run_with_cache(prompts, names_filter) got capture: names_filter selects the sites")
        sites = select_sites(names_filter, self.model_spec, self.backend.facts.inner_sites)
        tokens = self._of_equal_length(prompts)
        captures = [Capture(site, positions="prompt") for site in sites if site.kind != "logits"]
        outs = self._forward(tokens, {**options, "capture": [captures] * len(tokens)})
        states = {site: torch.stack([out.activations[site] for out in outs]) for site in sites}
        return torch.stack([out.logits for out in outs]), ActivationCache(self.num_layers, states, self)

    @names_options("capture")
    def run_with_hooks(
        self,
        prompts: Any,
        fwd_hooks: Iterable[tuple[NamesFilter, HookFunction]] = (),
        **options: Unpack[RequestOptions],
    ) -> torch.Tensor:
        """The logits of one forward pass in which functions read and replace states, as in TransformerLens.

        Args:
            prompts: one prompt, or several of equal length. A function is called once for each prompt.
            fwd_hooks: pairs (site, function). A site is one that `run_with_cache` takes. A
                function is called as ``function(value, hook=hook)``. `value` is [1, tokens, width], and [1, tokens, heads,
                head_dim] at `q`, `k`, `v` and `z`. It may be edited in place, or the function returns another of its shape.
                `hook.name` is TransformerLens' name, `hook.layer()` the layer.
            options: `interventions`, `timeout` and `edits`, as `generate`.

        Returns:
            [batch, tokens, vocab], on the CPU.
        """
        check_options("lm.run_with_hooks", options, OF_TRANSFORMER_LENS)
        if "capture" in options:
            raise TypeError("lm.run_with_hooks() got capture: a hook keeps what it reads, for example in a list")
        hooks, tokens = placed_hooks(fwd_hooks, self.model_spec), self._of_equal_length(prompts)
        with self.backend.tracer(self, "trace", **options) as tracer:
            logits = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for ids in tokens:
                with tracer.invoke(ids):
                    logits.append(run_hooks(self, hooks))
        return torch.cat(logits)

    def _of_equal_length(self, prompts: Any) -> list[list[int]]:
        """Token ids of prompts that make a batch without padding."""
        several = as_prompts(prompts)
        if isinstance(prompts, torch.Tensor) and prompts.dim() == 2:
            several = list(prompts)
        tokens = [self.token_ids(prompt, f"prompt {i}") for i, prompt in enumerate(several)]
        lengths = [len(ids) for ids in tokens]
        if not lengths:
            raise PromptError("an empty list of prompts: expected at least one")
        if len(set(lengths)) != 1:
            raise PromptError(
                f"the prompts have {lengths} tokens: a batch [batch, tokens, ...] without padding needs equal lengths; "
                "run each prompt on its own, or use lm.forward"
            )
        return tokens
