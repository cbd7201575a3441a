"""`SamplingParams.bad_words` as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from ..core.sampling_params import SamplingParams
from ..utils.arguments import PromptError


def bad_word_ids(tokenizer: Any, words: Sequence[str], vocab_size: int, what: str) -> tuple[tuple[int, ...], ...]:
    """The token ids of words, without and with a space before them, as in vLLM.

    The form with a space counts if it has the same number of tokens, and begins with another one.

    Args:
        what: prompt name used in error messages.

    Raises:
        PromptError: no tokenizer, or a word that has no tokens, or some outside the vocabulary.
    """
    if tokenizer is None:
        raise PromptError(f"{what}: bad_words needs a tokenizer, and this model has none: use allowed_token_ids")
    try:
        return _word_ids(tokenizer, tuple(words), vocab_size)
    except PromptError as error:
        raise PromptError(f"{what}: {error}") from None


@lru_cache(64)
def _word_ids(tokenizer: Any, words: tuple[str, ...], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of words. All prompts of a call have the same ones, as a rule."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (
            tuple(tokenizer(before + word.lstrip(), add_special_tokens=False)["input_ids"]) for before in ("", " ")
        )
        if not plain or max(plain) >= vocab_size:
            raise PromptError(
                f"bad_words has {word!r}, whose tokens are {list(plain)}; the vocabulary ends at {vocab_size - 1}"
            )
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0] and max(spaced) < vocab_size:
            found[spaced] = None
    return tuple(found)


def check_allowed(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], ends: AbstractSet[int], what: str
) -> None:
    """Check that `allowed_token_ids` leaves a token to sample at the first step.

    Args:
        ends: end-of-sequence and stop tokens, which `min_tokens` forbids.

    Raises:
        PromptError: no token is left.
    """
    assert params.allowed_token_ids is not None, "it is asked for"
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens > 0:
        banned |= ends
    if banned.issuperset(params.allowed_token_ids):
        raise PromptError(
            f"{what}: allowed_token_ids leaves no token: bad_words, or min_tokens={params.min_tokens} (which forbids the tokens "
            "that end a generation), forbid all of them"
        )
