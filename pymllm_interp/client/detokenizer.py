"""Token ids to text, token by token."""

from __future__ import annotations

from typing import Any

from ..core.sampling_params import SamplingParams


class Detokenizer:
    """Decodes a growing list of token ids, piece by piece.

    A token may be half a character; such a piece is held back until the character is whole. The concatenated pieces equal the
    text of all ids decoded at once.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._start = self._read = 0
        self.text = ""

    def push(self, token_ids: list[int], last: bool = False) -> str:
        """The text that `token_ids` (all so far) adds to the pieces returned before.

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


class StopStrings:
    """Looks for a request's stop strings in its text (a `core.request.StopChecker`).

    Args:
        tokenizer: a transformers tokenizer.
        params: with stop strings.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops, self._include = params.stop_strings, params.include_stop_str_in_output
        self.text_length: int | None = None

    def push(self, token_ids: list[int], may_stop: bool) -> str | None:
        """Decode the newest token; the stop string that it completed, or None.

        Args:
            token_ids: all generated tokens.
            may_stop: whether `min_tokens` is reached. A stop string that is completed before does not count.
        """
        piece = self._detokenizer.push(token_ids)
        found = find_stop(self._detokenizer.text, len(piece), self._stops) if may_stop else None
        if found is None:
            return None
        index, stop = found
        self.text_length = index + len(stop) if self._include else index
        return stop


def find_stop(text: str, new: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The first stop string in `text` that ends within its last `new` characters: (where it begins, which)."""
    found = [
        (index, stop) for stop in stops if (index := text.find(stop, max(0, len(text) - new - len(stop) + 1))) != -1
    ]
    return min(found, default=None)
