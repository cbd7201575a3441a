"""Text to tokens and back, with TransformerLens' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ...utils.arguments import PromptError, shown


def to_tokens(tokenizer: Any, text: str | Sequence[str], prepend_bos: bool | None = None) -> torch.Tensor:
    """[batch, tokens] int64. See `ClientModel.to_tokens`."""
    rows = [_ids(tokenizer, one, prepend_bos) for one in ([text] if isinstance(text, str) else text)]
    lengths = [len(row) for row in rows]
    if len(set(lengths)) > 1:
        raise PromptError(f"the texts have {lengths} tokens, and nothing is padded here: call to_tokens for each")
    return torch.tensor(rows, dtype=torch.int64)


def to_string(tokenizer: Any, tokens: torch.Tensor | Sequence[Any] | int) -> Any:
    """The text of token ids: a string for one row, a list of strings for [batch, tokens]. Special tokens are kept."""
    if isinstance(tokens, torch.Tensor):
        tokens = cast(list[Any], torch.atleast_1d(tokens).tolist())
    ids = [tokens] if isinstance(tokens, int) else list(tokens)
    if ids and isinstance(ids[0], list | tuple):
        return [to_string(tokenizer, row) for row in ids]
    return _checked(tokenizer).decode(ids, clean_up_tokenization_spaces=False)


def to_str_tokens(tokenizer: Any, text: Any, prepend_bos: bool | None = None) -> Any:
    """The text of each token. See `ClientModel.to_str_tokens`."""
    if isinstance(text, list | tuple) and text and all(isinstance(one, str) for one in text):
        return [to_str_tokens(tokenizer, one, prepend_bos) for one in text]
    if isinstance(text, str):
        ids = _ids(tokenizer, text, prepend_bos)
    else:
        ids = torch.as_tensor(text).reshape(-1).tolist()
    return [to_string(tokenizer, [token]) for token in ids]


def to_single_token(tokenizer: Any, text: str) -> int:
    """The token id of a text. Raises PromptError: the text is not one token."""
    ids = _ids(tokenizer, text, prepend_bos=False)
    if len(ids) != 1:
        raise PromptError(f"{shown(text)} is {len(ids)} tokens, not one: {shown(to_str_tokens(tokenizer, ids[:20]))}")
    return ids[0]


def _ids(tokenizer: Any, text: str, prepend_bos: bool | None) -> list[int]:
    _checked(tokenizer)
    ids = tokenizer(text)["input_ids"]
    if prepend_bos is None:
        return ids
    bos = tokenizer.bos_token_id
    if prepend_bos and bos is None:
        raise PromptError("prepend_bos=True: this tokenizer has no BOS token")
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [bos, *plain] if prepend_bos else plain


def _checked(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise PromptError("this model has no tokenizer: prompts are token ids")
    return tokenizer
