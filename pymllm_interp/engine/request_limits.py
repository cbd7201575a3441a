"""What an engine can serve: a request's lengths and parameters against its limits."""

from __future__ import annotations

from typing import Any

from ..core.arguments import PromptError
from ..core.limits import EngineLimits
from ..core.sampling_params import SamplingParams


def max_tokens_of(
    limits: EngineLimits,
    tokenizer: Any,
    ids: list[int],
    params: SamplingParams,
    what: str,
    forward_only: bool,
) -> int:
    """Upper bound of a request's new tokens; 1 where the only one is dropped.

    Args:
        ids: of the prompt.
        what: names the prompt in messages.
        forward_only: a trace of one pass.

    Raises:
        PromptError: the request can never be served; the message names the limit and its setting.
    """
    length = len(ids)
    room = limits.max_model_len - length
    max_tokens = params.max_tokens if params.max_tokens is not None else max(room, 1)
    reads_only = forward_only or max_tokens == 0
    if reads_only:
        max_tokens = 1  # sampled, and dropped
    if room < (0 if reads_only else max_tokens):
        raise PromptError(
            f"{what} has {length} tokens and asks for {max_tokens} new ones ({length + max_tokens} in all), but the "
            f"context holds {limits.max_model_len} (max_model_len): shorten the prompt or lower max_tokens"
        )
    if length + max_tokens - 1 > limits.kv_tokens:
        raise PromptError(
            f"{what} may come to need KV for {length + max_tokens - 1} tokens, but the pool holds "
            f"{limits.kv_tokens}: raise kv_cache_tokens, or lower max_tokens"
        )
    if params.stop_strings and tokenizer is None:
        raise PromptError(f"{what}: stop strings need a tokenizer, and this model has none: use stop_token_ids")
    for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids or ())):
        for token in tokens:
            if not 0 <= token < limits.vocab_size:
                raise PromptError(
                    f"{what}: {name} names token id {token}, the vocabulary ends at {limits.vocab_size - 1}"
                )
    return max_tokens
