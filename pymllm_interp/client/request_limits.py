"""Checks of a request's lengths and parameters against the engine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.limits import EngineLimits
from ..core.sampling_params import SamplingParams
from ..utils.arguments import PromptError

if TYPE_CHECKING:  # torch, which servers' HTTP processes do without
    from ..core.request import Request
    from ..hooks.captures.spec import Capture
    from ..hooks.interventions.knockout import Intervention

REQUEST_OBJECTS, SPEC_OBJECTS = 64, 64
"""Objects of a request, and of an intervention or a capture of it, that Python's cycle collector tracks, about."""


def max_tokens_of(
    limits: EngineLimits,
    tokenizer: Any,
    ids: list[int],
    params: SamplingParams,
    what: str,
    forward_only: bool,
) -> int:
    """Upper bound of a request's new tokens; 1 if the only token is dropped.

    Args:
        ids: token ids of the prompt.
        what: prompt name used in error messages.
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
    elif not limits.generates:
        raise PromptError(
            f"{what}: this model has no language modelling head, and generates nothing: lm.classify, lm.score, lm.encode and "
            "traces of one pass read it; over HTTP /classify, /score, /v1/embeddings and /pooling"
        )
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
    for name, (lowest, highest) in params.token_ranges.items():
        if lowest < 0 or highest >= limits.vocab_size:
            token = lowest if lowest < 0 else highest
            raise PromptError(f"{what}: {name} names token id {token}, the vocabulary ends at {limits.vocab_size - 1}")
    return max_tokens


def check_boundary(requests: Sequence[Request], boundary: int | None, what: str) -> None:
    """Check that traced requests stay on one side of `ModelSpec.rope_boundary`.

    Behind it, a plain request is computed again from its first token. The blocks of a trace would see its positions twice.

    Raises:
        PromptError: a trace that may outgrow the boundary.
    """
    for request in requests:
        if boundary is not None and request.prompt_len <= boundary < request.max_total_tokens:
            raise PromptError(
                f"{what} has {request.prompt_len} tokens and asks for {request.max_tokens} new ones in a trace. longrope rotates "
                f"texts of more than {boundary} tokens (original_max_position_embeddings) by other factors. "
                "The trace would run again over all positions. "
                f"Pass max_new_tokens of at most {boundary - request.prompt_len + 1}, or declare interventions and captures in "
                "place of the block"
            )


def check_embedded(params: SamplingParams, what: str, kind: str = "embeddings") -> None:
    """Refuse parameters that read the prompt's token ids. Prompts with "images" have ids; none of them may be cut off."""
    for name in ("truncate_prompt_tokens", "prompt_logprobs")[: 2 if kind == "embeddings" else 1]:
        if getattr(params, name) is not None:
            raise PromptError(f"{what} has {kind}, and {name} is of a prompt's tokens: leave it out")


def truncated(ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """A prompt's token ids after `truncate_prompt_tokens`: its last ones."""
    kept = params.truncate_prompt_tokens
    if kept == -1:
        kept = max(1, max_model_len - (params.max_tokens if params.max_tokens is not None else 1))
    return ids if kept is None or len(ids) <= kept else ids[-kept:]


def num_objects(
    params: Sequence[SamplingParams | None],
    interventions: Sequence[Sequence[Intervention]],
    captures: Sequence[Sequence[Capture]],
) -> int:
    """Objects of a call's requests that Python's cycle collector tracks, about."""
    return sum(
        (1 if param is None else param.n) * (REQUEST_OBJECTS + SPEC_OBJECTS * (len(ops) + len(captured)))
        for param, ops, captured in zip(params, interventions, captures, strict=True)
    )
