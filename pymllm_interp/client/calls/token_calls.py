"""Text to tokens and back, with TransformerLens' names: methods of `ClientModel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ...utils.arguments import PromptError, shown


def to_tokens(self: Any, text: str | Sequence[str], prepend_bos: bool | None = None) -> torch.Tensor:
    """Token ids of a text, or of several that have equally many tokens.

    Args:
        prepend_bos: whether the ids begin with one BOS token. None: as the tokenizer does, and so as prompts are read.

    Returns:
        [batch, tokens] int64, on the CPU.

    Raises:
        PromptError: no tokenizer, no BOS token, or texts of different lengths, which would need padding.
    """
    rows = [_ids(self.tokenizer, one, prepend_bos) for one in ([text] if isinstance(text, str) else text)]
    lengths = [len(row) for row in rows]
    if len(set(lengths)) > 1:
        raise PromptError(f"the texts have {lengths} tokens, and nothing is padded here: call to_tokens for each")
    return torch.tensor(rows, dtype=torch.int64)


def to_string(self: Any, tokens: torch.Tensor | Sequence[Any] | int) -> Any:
    """The text of token ids: a string for one row, a list of strings for [batch, tokens]. Special tokens are kept."""
    if isinstance(tokens, torch.Tensor):
        tokens = cast(list[Any], torch.atleast_1d(tokens).tolist())
    ids = [tokens] if isinstance(tokens, int) else list(tokens)
    if ids and isinstance(ids[0], list | tuple):
        return [to_string(self, row) for row in ids]
    return _checked(self.tokenizer).decode(ids, clean_up_tokenization_spaces=False)


def to_str_tokens(self: Any, text: Any, prepend_bos: bool | None = None) -> Any:
    """The text of each token.

    Args:
        text: a text, token ids ([tokens] or [1, tokens]), or a list of texts, which makes a list of lists.
        prepend_bos: prepends the BOS token to a text; see `to_tokens`.
    """
    if isinstance(text, list | tuple) and text and all(isinstance(one, str) for one in text):
        return [to_str_tokens(self, one, prepend_bos) for one in text]
    if isinstance(text, str):
        ids = _ids(self.tokenizer, text, prepend_bos)
    else:
        ids = torch.as_tensor(text).reshape(-1).tolist()
    return [to_string(self, [token]) for token in ids]


def to_single_token(self: Any, text: str) -> int:
    """The token id of a text that is one token, without BOS. Raises PromptError if it is not one token."""
    ids = _ids(self.tokenizer, text, prepend_bos=False)
    if len(ids) != 1:
        raise PromptError(f"{shown(text)} is {len(ids)} tokens, not one: {shown(to_str_tokens(self, ids[:20]))}")
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
