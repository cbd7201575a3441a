"""Token ids to text, as they come."""

from __future__ import annotations

from typing import Any


class Detokenizer:
    """Decodes a growing list of token ids, piece by piece.

    A token may be half a character; such a piece is held back until it is whole. The pieces together are the text of all
    ids decoded at once.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._start = self._read = 0
        self.text = ""

    def push(self, token_ids: list[int], last: bool = False) -> str:
        """The text that `token_ids` (all so far) has beyond what was returned before.

        Args:
            last: no more ids come, so nothing is held back.
        """
        before = self._decode(token_ids[self._start : self._read])
        after = self._decode(token_ids[self._start :])
        if len(after) <= len(before) or (after.endswith("\ufffd") and not last):
            return ""
        piece = after[len(before) :]
        self._start, self._read = self._read, len(token_ids)
        self.text += piece
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""


def find_stop(text: str, new: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The first stop string in `text` that ends within its last `new` characters: (where it begins, which)."""
    found = [
        (index, stop) for stop in stops if (index := text.find(stop, max(0, len(text) - new - len(stop) + 1))) != -1
    ]
    return min(found, default=None)
