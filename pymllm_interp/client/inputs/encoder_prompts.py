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
from ..prompt_batch import FEATURES, MEDIA, is_audio, vllm_prompt

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
    given, own = _sides(prompt, what)
    source = f"the encoder_prompt of {what}" if own is not None else what
    if facts.audio is not None:
        encoder = facts.audio.read(given, source)
    elif is_audio(given):
        raise PromptError(f"{what} has audio, and {facts.name} ({facts.architecture}) reads text")
    else:
        found = read(given, source)
        if found.embeds is not None:
            raise PromptError(f"{what} has embeddings, which encoders are not given: pass text or token ids")
        encoder = EncoderInput.of(torch.tensor(found.token_ids, dtype=torch.int64), len(found.token_ids))
    check_length(encoder.length, facts, what)
    started = (
        RenderedPrompt(None, list(facts.decoder_start_ids))
        if own is None
        else read(own, f"the decoder_prompt of {what}")
    )
    if started.embeds is not None:
        raise PromptError(
            f"the decoder_prompt of {what} has embeddings, which decoders behind an encoder are not given"
        )
    return started._replace(encoder=encoder)


def _sides(prompt: Any, what: str) -> tuple[Any, Any]:
    """(encoder's side, decoder's side or None) of a prompt. A decoder without one begins as the model says."""
    if is_of_both(prompt):
        if others := sorted(map(str, prompt.keys() - set(KEYS))):
            raise PromptError(f"{what} has {', '.join(others)}: expected encoder_prompt and decoder_prompt")
        if prompt.get("encoder_prompt") is None:
            raise PromptError(f"{what} has no encoder_prompt, which an encoder-decoder model reads first")
        return prompt["encoder_prompt"], prompt.get("decoder_prompt")
    if not is_audio(prompt):
        return prompt, None
    own = vllm_prompt(prompt, what)  # beside audio, vLLM's prompt is the decoder's
    return {key: prompt[key] for key in (MEDIA, FEATURES) if key in prompt}, own or None


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
