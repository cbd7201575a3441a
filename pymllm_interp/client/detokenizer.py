"""Token ids to text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from ..core.sampling_params import SamplingParams

CUT = "\ufffd"
"""Replacement that decoders write for incomplete characters."""
CONTEXTS = (1, 2, 3, 4, 8, 64)
"""Numbers of tokens that others are decoded behind: of the last character's bytes, and more where these have no text."""
MAX_HELD = 64
"""Most tokens that are held back for one character. Longer sequences are not a character."""


def decode(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """The text of token ids. Spaces are not cleaned up, as in vLLM: that would change text which was streamed."""
    if not token_ids:
        return ""
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class Detokenizer:
    """Decodes a completion piece by piece, behind the end of its prompt: decoders strip the first space of a text.

    A token may be a part of a character; such a piece is held back until the character is whole. The pieces do not depend on
    how many tokens come at once, so their concatenation is the completion's text. The decoder's text of all ids may differ.
    With byte fallback, a cut character makes U+FFFD of all bytes before it. `tokenizers.decoders.DecodeStream` raises an
    error there. It also drops held-back text at the end, and does not serve tokenizers in Python.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out.

    Attributes:
        text: the pieces so far.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._held: list[int] = []
        """Tokens that are held back."""
        self._cut_before = ""
        """The prompt's own text of the tokens that are held back, with U+FFFD for the character that it cuts."""
        self.text = ""
        self._follow(list(prompt_token_ids[-CONTEXTS[-1] :]))
        if self._context_text.endswith(CUT):
            self._begin_within(self._seen)

    def _follow(self, seen: list[int]) -> None:
        """Decode the tokens after these."""
        for size in CONTEXTS:
            self._context = seen[-size:]
            self._context_text = self._decode(self._context)
            if (self._context_text and CUT not in self._context_text) or size >= len(seen):
                break
        self._seen = seen[-CONTEXTS[-1] :]

    def _begin_within(self, prompt: list[int]) -> None:
        """Hold back the bytes of a character that the end of the prompt cuts."""
        for size in range(1, 8):  # three bytes of one, and U+FFFD before it
            self._follow(prompt[:-size])
            if not self._context_text.endswith(CUT):
                self._held = prompt[-size:]
                self._cut_before = self._new_text(self._decode(self._context + self._held), self._held)
                return
        self._follow(prompt)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that more tokens add to the pieces returned before."""
        piece = self._push(list(token_ids))
        self.text += piece
        return piece

    def end(self) -> str:
        """Held-back text, after the last token."""
        piece = self._own(self._new_text(self._decode(self._context + self._held), self._held)) if self._held else ""
        self.text += piece
        return piece

    def _push(self, token_ids: list[int]) -> str:
        held = self._held + token_ids
        text = self._decode(self._context + held)
        if CUT in text and len(token_ids) > 1:
            half = len(token_ids) // 2
            return self._push(token_ids[:half]) + self._push(token_ids[half:])
        self._held = held
        if text.endswith(CUT) and len(held) < MAX_HELD:
            return ""
        piece = self._new_text(text, held)
        if piece:
            self._follow(self._seen + held)
        if piece or text or len(held) >= MAX_HELD:  # without a piece: special tokens, or a first space
            self._held = []
        return self._own(piece)

    def _new_text(self, text: str, held: list[int]) -> str:
        """Text that new tokens add to the context.

        Args:
            text: decoded text of context and new tokens.
        """
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(held)  # bytes behind other bytes, and no character

    def _own(self, piece: str) -> str:
        """A piece, without its beginning in the prompt's text."""
        if not piece or not self._cut_before:
            return piece
        known, self._cut_before = self._cut_before, ""
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(piece, known, strict=False))
        return piece[len(list(equal)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, self._skip)


class StopStrings:
    """Looks for a request's stop strings in its text (a `core.request.StopChecker`).

    Args:
        tokenizer: a transformers tokenizer.
        params: parameters with stop strings.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._stops, self._include = params.stop_strings, params.include_stop_str_in_output
        self.text_length: int | None = None

    def push(self, token_ids: list[int], may_stop: bool) -> str | None:
        """Decode the newest token; the stop string that it completed, or None.

        Args:
            token_ids: all generated tokens.
            may_stop: whether `min_tokens` tokens came before. A stop string that one of them completed does not count.
        """
        piece = self._detokenizer.push(token_ids[-1:])
        found = find_stop(self._detokenizer.text, len(piece), self._stops) if may_stop else None
        if found is None:
            return None
        index, stop = found
        self.text_length = index + len(stop) if self._include else index
        return stop


def find_stop(text: str, new: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The stop string that ends first within the last `new` characters of `text`: (its start, the string).

    Of several that one token completes this is vLLM's choice, too: as if the characters had come one by one.
    """
    found = [
        (index, stop) for stop in stops if (index := text.find(stop, max(0, len(text) - new - len(stop) + 1))) != -1
    ]
    return min(found, key=lambda one: one[0] + len(one[1]), default=None)


_LETTERS: WeakKeyDictionary[Any, tuple[list[int], str]] = WeakKeyDictionary()
"""Tokenizer -> a token that others are decoded behind, and its text."""


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token within a text, with the leading space that decoders strip at its beginning."""
    if tokenizer not in _LETTERS:
        letter = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        _LETTERS[tokenizer] = letter, decode(tokenizer, letter)
    letter, before = _LETTERS[tokenizer]
    text = decode(tokenizer, [*letter, token])
    return text[len(before) :] if text.startswith(before) else decode(tokenizer, [token])
