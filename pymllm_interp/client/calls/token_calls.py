"""`TokenCalls`: text to tokens and back, with TransformerLens' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ...utils.arguments import PromptError
from .backed import BackedModel


class TokenCalls(BackedModel):
    """Conversions between text and token ids."""

    def to_tokens(self, text: str | Sequence[str], prepend_bos: bool | None = None) -> torch.Tensor:
        """Token ids of a text, or of several that have equally many tokens.

        Args:
            prepend_bos: whether the ids begin with one BOS token. None: as the tokenizer does, and so as prompts are read.

        Returns:
            [batch, tokens] int64, on the CPU.

        Raises:
            PromptError: no tokenizer, no BOS token, or texts of different lengths, which would need padding.
        """
        rows = [self._ids(one, prepend_bos) for one in ([text] if isinstance(text, str) else text)]
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            raise PromptError(f"the texts have {lengths} tokens, and nothing is padded here: call to_tokens for each")
        return torch.tensor(rows, dtype=torch.int64)

    def to_string(self, tokens: torch.Tensor | Sequence[Any] | int) -> Any:
        """The text of token ids: a string for one row, a list of strings for [batch, tokens]. Special tokens are kept."""
        if isinstance(tokens, torch.Tensor):
            tokens = cast(list[Any], torch.atleast_1d(tokens).tolist())
        ids = [tokens] if isinstance(tokens, int) else list(tokens)
        if ids and isinstance(ids[0], list | tuple):
            return [self.to_string(row) for row in ids]
        return self._tokenizer().decode(ids, clean_up_tokenization_spaces=False)

    def to_str_tokens(self, text: Any, prepend_bos: bool | None = None) -> Any:
        """The text of each token.

        Args:
            text: a text, token ids ([tokens] or [1, tokens]), or a list of texts, which makes a list of lists.
            prepend_bos: of a text; see `to_tokens`.
        """
        if isinstance(text, list | tuple) and text and all(isinstance(one, str) for one in text):
            return [self.to_str_tokens(one, prepend_bos) for one in text]
        if isinstance(text, str):
            ids = self._ids(text, prepend_bos)
        else:
            ids = torch.as_tensor(text).reshape(-1).tolist()
        return [self.to_string([token]) for token in ids]

    def to_single_token(self, text: str) -> int:
        """The token id of a text that is one token, without BOS.

        Raises:
            PromptError: it is none, or several.
        """
        ids = self._ids(text, prepend_bos=False)
        if len(ids) != 1:
            raise PromptError(f"{text!r} is {len(ids)} tokens, not one: {self.to_str_tokens(ids)}")
        return ids[0]

    def _ids(self, text: str, prepend_bos: bool | None) -> list[int]:
        tokenizer = self._tokenizer()
        ids = tokenizer(text)["input_ids"]
        if prepend_bos is None:
            return ids
        bos = tokenizer.bos_token_id
        if prepend_bos and bos is None:
            raise PromptError("prepend_bos=True: this tokenizer has no BOS token")
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [bos, *plain] if prepend_bos else plain

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise PromptError("this model has no tokenizer: prompts are token ids")
        return self.tokenizer
