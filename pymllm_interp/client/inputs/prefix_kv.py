"""`lm.kv`: the cached keys and values of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ...core.model_spec import KV
from ...hooks.captures.spec import Capture
from ...utils.arguments import shown
from ...utils.tables import Shown, Table
from ..calls.requests import wait_for
from ..calls.traced_prompts import PREFILL
from ..notebook.signatures import names_options
from ..prompts import as_prompts, captures_for_each_prompt
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
    own = Capture(f"{KV}.*", positions="prompt")
    options["capture"] = [[own, *others] for others in captures_for_each_prompt(options.get("capture"), len(given))]
    outs = wait_for(self._requests.submit(given, PREFILL, options), progress=progress)
    found = list[PrefixKV]()
    for out in outs:
        if out.finish_reason == "timeout":
            raise TimeoutError("a prompt ran into its timeout")
        sites = [f"{KV}.{layer}" for layer in range(self.model_spec.num_hidden_layers)]
        both = torch.stack([out.activations[site] for site in sites])
        found.append(PrefixKV(out.prompt_token_ids, both[:, :, 0], both[:, :, 1], out.receipt, out.num_cached_tokens))
    return found
