"""The prompt of a traced request and its parameters, from the keywords of ``with lm.trace(...)`` or ``with lm.generate(...)``."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ...core.sampling_params import SamplingParams
from ...utils.arguments import PromptError
from ..facts import ModelFacts
from ..generation_defaults import IGNORED
from ..prompts import checked
from ..request_options import adapters_of, check_trace_options, checked_salt, priorities_of

OFF = ("scan", "validate")
"""Keywords of earlier nnsight that scripts pass as False, which changes nothing."""
FORWARD = SamplingParams(temperature=0.0, max_tokens=1)
"""Sampling parameters of a trace's single pass, for blocks that read `lm.samples`."""
PREFILL = SamplingParams(temperature=0.0, max_tokens=0)
"""Sampling parameters of forward passes without a block."""


class TracedPrompt(NamedTuple):
    """Prompt and parameters of a traced request. `timeout` is in seconds. Others: see `RenderedPrompt`."""

    token_ids: list[int]
    embeds: Any
    images: Any
    encoder: Any
    params: SamplingParams
    timeout: float | None
    priority: int
    cache_salt: str | None
    adapter: str | None


class PromptReader(Protocol):
    """Reader of prompts: a request factory, or a server's backend."""

    tokenizer: Any

    @property
    def facts(self) -> ModelFacts:
        """The limits and defaults of requests."""
        ...


def traced_prompt(
    reader: PromptReader, mode: str, prompt: Any, kwargs: dict[str, Any], what: str,
    known: dict[tuple, Any], lowered: bool,
) -> TracedPrompt:  # fmt: skip
    """Read one prompt of a trace.

    Args:
        mode: "trace" (one forward pass), "generate" or "pipe".
        kwargs: the trace's keywords; changed.
        what: prompt name used in error messages.
        known: results for the keywords of the trace's other prompts, which are often the same objects. Updated in place.
        lowered: whether its block runs after the request.

    Raises:
        PromptError, TypeError, ValueError: a prompt or keyword that no trace takes.
    """
    limits = reader.facts.limits
    _, ids, embeds, images, encoder = checked(reader.tokenizer, prompt, reader.facts, what)
    # By identity: the trace holds its keywords. Errors are raised for each prompt.
    key = len(ids), lowered, *((name, id(value)) for name, value in kwargs.items())
    if (found := known.get(key)) is not None:
        return TracedPrompt(ids, embeds, images, encoder, *found[4:])
    timeout, (priority,) = kwargs.pop("timeout", None), priorities_of(kwargs.pop("priority", None), 1)
    salt, (adapter,) = checked_salt(kwargs.pop("cache_salt", None)), adapters_of(kwargs.pop("lora", None), 1)
    if mode == "trace":
        check_trace_options([name for name in kwargs if name not in IGNORED and (name not in OFF or kwargs[name])])
        params = PREFILL if lowered else FORWARD
    else:
        params = kwargs.pop("sampling_params", None)
        if params is None:
            config = kwargs.pop("generation_config", None)
            defaults = reader.facts.defaults.overlaid(config)
            lengths = defaults.lengths(len(ids), limits.max_model_len - len(ids), what)
            own = (lengths, id(config), *((name, id(value)) for name, value in kwargs.items()))
            params = known.get(own)
            if params is None:
                params = known[own] = defaults.of_trace(kwargs, lengths)
    if params.max_tokens == 0 and mode != "trace":
        raise PromptError(f"{what}: max_tokens=0 generates nothing: use `with lm.trace(prompt):`")
    if params.truncate_prompt_tokens is not None:
        raise PromptError(f"{what}: truncate_prompt_tokens is not for traces: cut the prompt before it is traced")
    if params.n > 1:
        raise PromptError(f"{what} asks for n={params.n}: a trace follows one generation; use one invoke for each")
    found = known[key] = TracedPrompt(ids, embeds, images, encoder, params, timeout, priority, salt, adapter)
    return found
