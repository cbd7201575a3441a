"""Keywords of the calls that submit requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict

from ..core import unsupported
from ..core.limits import EngineLimits
from ..core.sampling_params import ALIASES, ELSEWHERE, SamplingParams
from ..utils.arguments import PromptError, check_names, is_whole, shown

if TYPE_CHECKING:
    from ..core.request import Request
    from ..hooks.captures.spec import Capture
    from ..hooks.interventions.knockout import Intervention

MAX_SALT = 1024
"""Most characters of a `cache_salt`."""


class RequestOptions(TypedDict, total=False):
    """Keywords of `LM.generate`, `chat`, `submit`, `stream`, their asyncio forms, and `LM.imap`."""

    interventions: Any
    """`Steer`, `Ablate`, `Clamp`, `Scale`, `Patch`, `Knockout`: one list for all prompts, or a list (or None) for each."""
    monitors: Any
    """`Monitor`s: one list for all prompts, or a list (or None) for each."""
    capture: Any
    """Sites and `Capture`s: one list for all prompts, or a list (or None) for each."""
    timeout: float | None
    """Seconds, after which the request ends with finish_reason "timeout"."""
    priority: int | list[int]
    """Requests with lower numbers are scheduled first, and preempted last; 0 by default. A list has one for each prompt."""
    cache_salt: str | None
    """Requests share KV through the prefix cache only with requests of the same salt."""
    lora: Any
    """Name of a LoRA adapter (`lm.adapters.load`), or None. A list has a name or None for each prompt."""
    edits: list[str] | None
    """Names of the persistent edits that apply; None: all."""
    output_hidden_states: bool
    """Capture what `output.hidden_states` needs, transformers' tuples of the hidden states of all layers."""
    output_attentions: bool
    """Capture what `output.attentions` needs, transformers' tuples of the attention weights of all layers."""
    return_routed_experts: bool
    """Capture what `output.routed_experts` needs, vLLM's ids of the experts that each token was sent to."""


OPTIONS = tuple(RequestOptions.__annotations__)
TRACE_OPTIONS = (*OPTIONS, "device", "grad", "on_step")
"""Keywords of a trace, beside its prompt."""
SAMPLING = (*SamplingParams.__dataclass_fields__, *ALIASES, "do_sample")
"""Names of sampling parameters: this package's and transformers'."""


def check_options(who: str, given: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> None:
    """Look for a keyword outside of `RequestOptions`.

    Args:
        who: the call, such as "lm.generate".
        elsewhere: name that other projects use -> advice.

    Raises:
        TypeError: an unknown keyword; the message has the alternative.
    """
    hints = {**unsupported.OF_REQUESTS, **(elsewhere or {})}
    for name in given:
        if name in OPTIONS:
            continue
        near = get_close_matches(name, [*OPTIONS, *SAMPLING], n=1)
        if name not in hints and (name in ELSEWHERE or (near and near[0] in SAMPLING)):
            raise TypeError(
                f"{who}(prompts, SamplingParams(...)) got {name}: a call takes SamplingParams; as "
                "keywords they belong to `with lm.generate(prompt, ...) as tracer:`"
            )
        check_names(who, [name], OPTIONS, hints)


def priorities_of(given: Any, prompts: int) -> list[int]:
    """One priority for each prompt.

    Raises:
        PromptError: values that are not integers, or not one for each prompt.
    """
    if given is None:
        return [0] * prompts
    found = list(given) if isinstance(given, list | tuple) else [given or 0] * prompts
    if len(found) != prompts or not all(is_whole(priority) for priority in found):
        raise PromptError(
            f"priority={shown(given)}: a whole number is expected, or one for each of the {prompts} prompts"
        )
    return found


def adapters_of(given: Any, prompts: int) -> list[str | None]:
    """The adapter of each prompt, by name.

    Raises:
        PromptError: values that are not names, or not one for each prompt.
    """
    found = list(given) if isinstance(given, list | tuple) else [given] * prompts
    if len(found) != prompts or not all(name is None or isinstance(name, str) for name in found):
        raise PromptError(
            f"lora={shown(given)}: expected the name of a loaded adapter, or a name or None for each of the {prompts} prompts"
        )
    return found


def checked_salt(given: Any) -> str | None:
    """The `cache_salt`. Raises PromptError, unless it is a string that is not empty, or None."""
    if given is not None and not (isinstance(given, str) and 0 < len(given) <= MAX_SALT):
        raise PromptError(f"cache_salt={shown(given)}: expected a string of 1 to {MAX_SALT} characters, or None")
    return given


def check_trace_options(given: Iterable[str]) -> None:
    """Look for a keyword that `lm.trace` does not take.

    Raises:
        TypeError: an unknown keyword; the message has the alternative.
    """
    names = list(given)
    for name in names:
        if near := get_close_matches(name, TRACE_OPTIONS, n=1):
            raise TypeError(f"lm.trace() has no argument {name!r}: did you mean {near[0]}?")
    if names:
        raise TypeError(
            f"lm.trace() got {', '.join(sorted(names))}: it runs one forward pass, and takes {', '.join(TRACE_OPTIONS)}; "
            "`with lm.generate(...)` takes sampling parameters, and `with lm.scan(...)` reads shapes without a pass"
        )


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


def neutral(params: SamplingParams, what: str) -> SamplingParams:
    """Parameters for a model with labels, which samples no token: nothing in them indexes logits by tokens.

    Raises:
        PromptError: log probabilities of the prompt.
    """
    if params.prompt_logprobs is not None:
        raise PromptError(
            f"{what}: prompt_logprobs are a language modelling head's, and this model has none: leave them out"
        )
    return replace(
        params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, logit_bias=None, allowed_token_ids=None,
        bad_words=None, min_tokens=0,
    )  # fmt: skip


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
