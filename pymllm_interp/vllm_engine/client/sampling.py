"""Sampling parameters as vLLM's, and the salt of a request's KV."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import numpy as np

from ...core.events import Logprob
from ...core.request import Request
from ...core.sampling_params import SamplingParams
from ...engine.drafts import why_undrafted
from ...hooks.declared import Declared
from ...hooks.monitors.monitor import ScoreRead
from ...utils.arguments import PromptError
from ..images import VllmImages
from ..settings import KEY, OURS, UNDRAFTED, WHOLE

MASK = "prompt_is_token_ids"
"""vLLM's field of a prompt of token ids and embeddings."""


def check_params(params: SamplingParams, what: str) -> None:
    """Refuse parameters that vLLM lacks. Raises PromptError: the message names the parameter."""
    if params.constraint is not None:
        raise PromptError(
            f"{what}: SamplingParams(constraint=...): a constraint is code of this process, and vLLM samples in another: use "
            "allowed_token_ids, or LM(model), whose engine is our own"
        )
    if params.structured_outputs is not None:
        raise PromptError(
            f"{what}: SamplingParams(structured_outputs=...) is not passed to vLLM: use LM(model), whose engine is our own"
        )


def check_embeds(prompt: Any, params: SamplingParams | None, model_config: Any, what: str) -> None:
    """Refuse embeddings that vLLM does not take as they are meant.

    Args:
        prompt: the rendered prompt.
        params: sampling parameters; None for calls without.
        model_config: vLLM's.

    Raises:
        PromptError: the message says what helps.
    """
    if prompt.embeds is None:
        return
    if not model_config.enable_prompt_embeds:
        raise PromptError(f"{what} has embeddings: make the LM with enable_prompt_embeds=True, or use LM(model)")
    from vllm.inputs import EmbedsPrompt  # pyright: ignore[reportMissingImports]

    if len(prompt.embeds.positions) < len(prompt.token_ids) and MASK not in EmbedsPrompt.__annotations__:
        raise PromptError(f"{what} has token ids beside embeddings, which this version of vLLM does not take")
    if params is not None and params.repetition_penalty != 1:
        raise PromptError(
            f"{what} has embeddings: with engine='vllm' repetition_penalty counts their placeholders as tokens. {OURS}"
        )


def prompt_of(request: Request, images: VllmImages | None) -> dict[str, Any]:
    """A request's prompt as vLLM's."""
    ids, own = list(request.prompt_token_ids), request.embeds
    if request.images:
        assert images is not None, "only its reader makes them"
        return images.prompt_of(ids, request.scoped_images)
    if own is None:
        return {"prompt_token_ids": ids}
    if len(own.positions) == len(ids):
        return {"prompt_embeds": own.vectors}
    vectors, is_token = own.vectors.new_zeros(len(ids), own.vectors.shape[1]), np.ones(len(ids), dtype=np.bool_)
    vectors[own.positions], is_token[own.positions] = own.vectors, False
    return {"prompt_embeds": vectors, "prompt_token_ids": ids, MASK: is_token.tolist()}


def follows(request: Request) -> bool:
    """Whether the client reads each token when it comes. Else vLLM answers once, at the end."""
    return (
        request.stream or request.stop_checker is not None or (request.monitors is not None and request.monitors.stops)
    )


def why_kept(request: Request) -> str:
    """Reason that rows of drafts cannot be taken back from a request's interventions and captures, or ""."""
    if request.declared is None or request.hooks is None:
        return ""
    if request.hooks.bound.hooks.cuts_edges:
        return "cut edges of attention, or attention patterns"
    if request.monitors is not None:
        return "monitors"
    return "streamed captures" if request.num_streamed is not None else request.declared.why_undrafted


def vllm_params(request: Request, hooks: bytes | None, read_cache: bool, kinds: Any) -> Any:
    """vLLM's sampling parameters of one request.

    Args:
        hooks: sealed, or None.
        read_cache: whether it may begin behind KV of the prefix cache.
        kinds: the module `vllm.sampling_params`.
    """
    params = request.params
    seed = None if params.greedy or params.seed is None else _seed_of(request)
    allowed = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
    extra: dict[str, Any] = {} if hooks is None else {KEY: hooks}
    if request.trace is not None:
        extra[WHOLE] = True
    if why_kept(request) or why_undrafted(request):
        extra[UNDRAFTED] = True
    made = kinds.SamplingParams(
        n=1, temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0), min_p=params.min_p,
        repetition_penalty=params.repetition_penalty, frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty, seed=seed, stop_token_ids=sorted(request.eos_token_ids) or None, ignore_eos=True,
        max_tokens=request.max_tokens, min_tokens=min(params.min_tokens, request.max_tokens), logprobs=params.logprobs,
        prompt_logprobs=None if request.prompt_logprobs is None else params.prompt_logprobs, detokenize=False,
        logit_bias=params.logit_bias, allowed_token_ids=allowed,
        output_kind=kinds.RequestOutputKind.DELTA if follows(request) else kinds.RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True if params.skip_reading_prefix_cache or not read_cache else None,
        extra_args=extra or None,
    )  # fmt: skip
    if request.bad_words:
        made._bad_words_token_ids = [list(word) for word in request.bad_words]
    return made


def pooling_params(request: Request, hooks: bytes | None, read_cache: bool, task: str) -> Any:
    """vLLM's parameters of a request to a model that generates nothing. See `vllm_params`."""
    from vllm.pooling_params import PoolingParams  # pyright: ignore[reportMissingImports]

    return PoolingParams(
        task=task, extra_kwargs=None if hooks is None else {KEY: hooks},
        skip_reading_prefix_cache=True if request.params.skip_reading_prefix_cache or not read_cache else None,
    )  # fmt: skip


def logprobs_of(found: Any) -> dict[int, Logprob]:
    """vLLM's log probabilities of a token and its alternatives."""
    return {int(token): Logprob(one.logprob, one.rank) for token, one in found.items()}


def _seed_of(request: Request) -> int:
    """A seed for each completion: vLLM's noise has no index of completions."""
    return (request.seed * 0x9E3779B97F4A7C15 + request.sample_index) % 2**63


def salt_of(request: Request, declared: Declared | None) -> str | None:
    """Cache salt of a request: its owner, the caller's salt, and all edits at all positions.

    vLLM keeps the KV of generated tokens under the hashes of prompts, so edits of generated positions count. Positions count as
    they are bound to the prompt. One that counts from the prompt's end is another position for another prompt.
    """
    parts: list[str] = []
    if request.trace is not None or (
        declared is not None and declared.hooks.knockouts
    ):  # a block may edit at any position
        parts.append(f"block {secrets.token_hex(16)}")
    if request.cache_owner is not None:
        parts.append(f"owner {request.cache_owner}")
    if request.cache_salt is not None:
        parts.append(f"salt {request.cache_salt}")
    if declared is not None:
        if "salt" not in declared.hooks.shared:
            found = [(site, op) for site, ops in sorted(declared.hooks.ops.items()) for op in ops]
            found = [(site, op) for site, op in found if not isinstance(op.spec, ScoreRead)]  # which changes no state
            declared.hooks.shared["salt"] = [f"{site} {op.spec.fingerprint} {op.windows}" for site, op in found]
        parts += declared.hooks.shared["salt"]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32] if parts else None
