"""Prompts of encoder-decoder models: an input of the encoder, and the decoder's first tokens.

A plain prompt is the encoder's. vLLM's dict ``{"encoder_prompt": ..., "decoder_prompt": ...}`` has both. Without a prompt, the
decoder begins as in transformers: with `decoder_start_token_id`, and `forced_bos_token_id` if the model has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core.pass_parts import EncoderInput
from ...utils.arguments import PromptError
from ..chat import RenderedPrompt
from ..facts import ModelFacts

KEYS = ("encoder_prompt", "decoder_prompt")
Read = Callable[[Any, str], RenderedPrompt]


def is_of_both(prompt: Any) -> bool:
    """Whether a prompt is a dict with the sides of encoder and decoder."""
    return isinstance(prompt, Mapping) and any(key in prompt for key in KEYS)


def refuse_both(prompt: Any, what: str) -> None:
    """Refuse a prompt with an encoder's side, for a model without an encoder."""
    if is_of_both(prompt):
        raise PromptError(
            f"{what} has an encoder_prompt or a decoder_prompt, and the model has no encoder: pass a prompt"
        )


def encoded(read: Read, prompt: Any, facts: ModelFacts, what: str) -> RenderedPrompt:
    """The decoder's prompt, with the encoder's input.

    Args:
        read: reads the text or token ids of one side.

    Raises:
        PromptError: no side for the encoder, an empty or too long one, other keys, or ids outside the vocabulary.
    """
    given, own = prompt, None
    if is_of_both(prompt):
        if others := sorted(map(str, prompt.keys() - set(KEYS))):
            raise PromptError(f"{what} has {', '.join(others)}: expected encoder_prompt and decoder_prompt")
        given, own = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
        if given is None:
            raise PromptError(f"{what} has no encoder_prompt, which an encoder-decoder model reads first")
    source = read(given, f"the encoder_prompt of {what}" if own is not None else what)
    if source.embeds is not None:
        raise PromptError(f"{what} has embeddings, which encoders are not given: pass text or token ids")
    values = torch.tensor(source.token_ids, dtype=torch.int64)
    check_length(len(values), facts, what)
    started = (
        RenderedPrompt(None, list(facts.decoder_start_ids))
        if own is None
        else read(own, f"the decoder_prompt of {what}")
    )
    if started.embeds is not None:
        raise PromptError(
            f"the decoder_prompt of {what} has embeddings, which decoders behind an encoder are not given"
        )
    return started._replace(encoder=EncoderInput.of(values, len(values)))


def check_length(length: int, facts: ModelFacts, what: str) -> None:
    """Raise PromptError for an encoder input that is longer than the encoder or the pool of its results."""
    if length > (longest := facts.limits.max_source_len):
        raise PromptError(
            f"{what} has {length} positions for the encoder, which takes {longest} (the model's own limit, or cross_cache_tokens)"
        )


def decoder_start_ids(config: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that a decoder begins with, without a prompt.

    Args:
        config: a model's config.
        generation: values of its generation_config.json.
    """
    names = ("decoder_start_token_id", "forced_bos_token_id")
    start, forced = (generation.get(name, getattr(config, name, None)) for name in names)
    if start is None:
        start = getattr(config, "bos_token_id", None)
    found = [token for token in (start, forced) if token is not None]
    return tuple(found)
