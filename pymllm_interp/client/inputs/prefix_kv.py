"""`lm.kv`: the cached keys and values of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ...core.model_spec import KV, ModelSpec
from ...hooks.captures.activations import NOTHING, Activations
from ...hooks.captures.spec import Capture
from ...hooks.monitors.scores import MonitorScores
from ...hooks.site import expand_in
from ...utils.arguments import shown
from ...utils.tables import Shown, Table
from ..calls.requests import wait_for
from ..calls.traced_prompts import PREFILL
from ..notebook.signatures import names_options
from ..prompts import as_prompts, captures_in
from ..request_options import RequestOptions, check_options

if TYPE_CHECKING:
    from ..calls.model import ClientModel


@dataclass(frozen=True, repr=False)
class PrefixKV(Shown):
    """The cached keys and values of a prompt, as transformers' `past_key_values` holds them."""

    prompt_token_ids: list[int]
    k: torch.Tensor
    """[layers, tokens, kv_heads, head_dim] in the model's dtype, after norm and rotation."""
    v: torch.Tensor
    """[layers, tokens, kv_heads, head_dim]."""
    receipt: Any
    num_cached_tokens: int = 0
    """Prompt tokens with K and V in the prefix cache."""
    activations: Activations = field(default_factory=lambda: NOTHING)
    """Captured states; of a prompt with captures, with the sites `kv.*`."""
    monitors: Mapping[str, MonitorScores] = field(default_factory=dict)
    """Name of a monitor -> its scores."""

    def __repr__(self) -> str:
        return f"PrefixKV(prompt_tokens={len(self.prompt_token_ids)}, k={shown(self.k)}, v={shown(self.v)})"

    def table(self) -> Table:
        """The numbers of tokens, and the shapes."""
        rows = [("prompt tokens", len(self.prompt_token_ids)), ("k", list(self.k.shape)), ("v", list(self.v.shape))]
        return Table("keys and values", ("", ""), rows)


@names_options()
def kv(
    self: ClientModel, prompts: Any, *, progress: bool | None = None, **options: Unpack[RequestOptions]
) -> list[PrefixKV]:  # fmt: skip
    """The keys and values that the cache has of prompts, behind interventions. Nothing is generated.

    Args:
        prompts, progress, options: see `generate`.

    Raises:
        PromptError, ValueError: a prompt that cannot be served, or a model without such a cache; nothing was scheduled then.
        RequestError, TimeoutError: a request failed, or ran into its timeout.
    """
    check_options("lm.kv", options)
    given = as_prompts(prompts)
    spec, captures = self.model_spec, captures_in(options, len(given))
    sites = [f"{KV}.{layer}" for layer in range(spec.num_hidden_layers)]
    options["capture"] = [[*_left(others, spec), *others] for others in captures]
    outs = wait_for(self._requests.submit(given, PREFILL, options), progress=progress)
    found = list[PrefixKV]()
    for out, others in zip(outs, captures, strict=True):
        if out.finish_reason == "timeout":
            raise TimeoutError("a prompt ran into its timeout")
        both = torch.stack([out.activations[site].to(spec.dtype) for site in sites])
        kept = out.activations if others else NOTHING
        found.append(
            PrefixKV(
                out.prompt_token_ids,
                both[:, :, 0],
                both[:, :, 1],
                out.receipt,
                out.num_cached_tokens,
                kept,
                out.monitors,
            )
        )
    return found


def _left(captures: list[Capture], model: ModelSpec) -> list[Capture]:
    """The captures of keys and values beside a caller's own."""
    whole = {site.layer for one in captures if _has_all_rows(one) for site in expand_in(one.site, model)}
    left = [str(layer) for layer in range(model.num_hidden_layers) if layer not in whole]
    where = "*" if not whole else f"{{{','.join(left)}}}"
    return [Capture(f"{KV}.{where}", positions="prompt")] if left else []


def _has_all_rows(spec: Capture) -> bool:
    """Whether a caller's capture has the keys and values of all positions, in at least the model's precision."""
    whole = spec.reduce is None and spec.heads is None and spec.dtype in (None, torch.float32)
    return whole and not spec.stays and str(spec.site).startswith(f"{KV}.") and str(spec.positions) in ("all", "prompt")
