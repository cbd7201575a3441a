"""Keywords of the calls that submit requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypedDict

from ..core import unsupported
from ..core.sampling_params import ALIASES, ELSEWHERE, SamplingParams
from ..utils.arguments import PromptError, check_names, is_whole, shown

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
            f"lm.trace() got {', '.join(sorted(names))}: it runs one forward pass and takes a prompt and timeout; "
            "`with lm.generate(...)` takes sampling parameters"
        )
