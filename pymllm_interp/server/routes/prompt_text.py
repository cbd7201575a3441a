"""Texts of requests, measured before a tokenizer reads them."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...utils.arguments import PromptError


def check_length(tokenizer: Any, characters: int, max_model_len: int, what: str) -> None:
    """Refuse a text that the context cannot hold, whatever its tokens are. A token is at most as long as the longest, and a space.
    Raises PromptError: the text has more characters."""
    if tokenizer is None:
        return
    most = max_model_len * (longest_token(tokenizer) + 1)
    if characters > most:
        raise PromptError(
            f"{what} has {characters} characters; the {max_model_len} tokens of the context (max_model_len) hold at most {most}"
        )


def check_tokens(count: int, max_model_len: int, what: str) -> None:
    """Refuse a prompt as soon as its tokens are known to be too many: those behind it are not tokenized.
    Raises PromptError: the prompt has more tokens than the context."""
    if count > max_model_len:
        raise PromptError(f"{what} has {count} tokens, but the context holds {max_model_len} (max_model_len)")


def num_characters(value: Any) -> int:
    """Characters of all texts in a value of JSON, with the names of fields. A chat template may write any of them."""
    count, left = 0, [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, dict):
            left += (*value, *value.values())
        elif isinstance(value, list):
            left += value
    return count


def last_part(tokenizer: Any, text: str, max_model_len: int) -> str:
    """The end of a text, if only its last tokens are kept: twice the characters that the context can hold."""
    return text if tokenizer is None else text[-2 * max_model_len * (longest_token(tokenizer) + 1) :]


def truncatable(tokenizer: Any, text: str, most: int) -> str:
    """The part of a text that has its first `most` tokens, or its last ones, by the tokenizer's side."""
    if getattr(tokenizer, "truncation_side", "right") == "left":
        return last_part(tokenizer, text, most)
    return text if tokenizer is None else text[: 2 * most * (longest_token(tokenizer) + 1)]


@lru_cache(4)
def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()), default=1)


logger = logging.getLogger(__name__)


def import_library() -> Any:
    """transformers; its tokenizers need no torch."""
    import transformers

    return transformers


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder that `save_pretrained` wrote.

    `AutoTokenizer` imports torch (seconds, and 0.3 GB): it is the last resort, for tokenizers that are Python code.
    """
    transformers = import_library()
    name = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    cls = getattr(transformers, str(name), None)
    if cls is None or not issubclass(cls, transformers.PreTrainedTokenizerFast):
        logger.warning("the tokenizer %s is loaded by transformers.AutoTokenizer, which imports torch", name)
        cls = transformers.AutoTokenizer
    return cls.from_pretrained(folder, local_files_only=True)
