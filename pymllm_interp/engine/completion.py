"""One completion as its caller follows it: text, stop strings, pieces."""

from __future__ import annotations

from typing import Any

from ..core.output import CompletionOutput, Logprob
from ..core.request import Request
from ..hooks.captures.activations import NOTHING, Activations
from .detokenizer import Detokenizer, find_stop


class StreamPiece(str):
    """A piece of generated text, with what belongs to it.

    Attributes:
        text: the piece itself.
        token_ids: the tokens that it came from; more than one where a character took several.
        output_index: which of the prompt's completions it belongs to.
        finish_reason: set on the last piece of a completion (whose text may be empty).
        activations, receipt: of its completion, on the last piece (the receipt where something was declared); else None.
    """

    token_ids: list[int]
    output_index: int
    finish_reason: str | None
    activations: Any = None
    receipt: Any = None

    @classmethod
    def of(cls, text: str, token_ids: list[int], index: int, finish_reason: str | None) -> StreamPiece:
        piece = cls(text)
        piece.token_ids, piece.output_index, piece.finish_reason = token_ids, index, finish_reason
        return piece

    @property
    def text(self) -> str:
        return str(self)


class Completion:
    """One request as its caller follows it: text, stop strings, pieces. Written by the engine's thread."""

    def __init__(self, request: Request, tokenizer: Any, streaming: bool) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._stops = request.params.stop_strings
        follows = tokenizer is not None and (streaming or self._stops)
        self._detokenizer = Detokenizer(tokenizer, request.params.skip_special_tokens) if follows else None
        self._emitted = self._emitted_chars = 0
        self._cut: int | None = None

    def advance(self) -> str | None:
        """Decode the newest token. Returns the stop string that it completed, if any."""
        if self._detokenizer is None:
            return None
        piece = self._detokenizer.push(self.request.output_token_ids)
        if not self._stops or len(self.request.output_token_ids) < self.request.params.min_tokens:
            return None
        found = find_stop(self._detokenizer.text, len(piece), self._stops)
        if found is None:
            return None
        index, stop = found
        self._cut = index + len(stop) if self.request.params.include_stop_str_in_output else index
        return stop

    def piece(self) -> StreamPiece | None:
        """What there is to stream since the last call. Text that may turn out a stop string is held back."""
        done = self.request.finished
        text = self.text() if done else (self._detokenizer.text if self._detokenizer else "")
        upto = len(text) if done else len(text) - self._held_back(text)
        ids = self.request.output_token_ids
        if not done and upto <= self._emitted_chars and self._tokenizer is not None:
            return None
        piece = StreamPiece.of(
            text[self._emitted_chars : max(upto, self._emitted_chars)],
            ids[self._emitted :],
            self.request.sample_index,
            self.request.finish_reason if done else None,
        )
        if done:
            piece.activations, piece.receipt = self.activations, self.request.receipt
        self._emitted, self._emitted_chars = len(ids), max(upto, self._emitted_chars)
        return piece

    def _held_back(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def text(self) -> str:
        """The finished text: without the stop string, and without the token that stopped it."""
        if self._tokenizer is None:
            return ""
        if self._cut is not None and self._detokenizer is not None:
            return self._detokenizer.text[: self._cut]
        ids = self.request.output_token_ids
        if isinstance(self.request.stop_reason, int):
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=self.request.params.skip_special_tokens)

    @property
    def activations(self) -> Activations:
        """What was captured."""
        found = self.request.activations
        return NOTHING if found is None else found

    def output(self) -> CompletionOutput:
        request = self.request
        return CompletionOutput(
            index=request.sample_index,
            text=self.text(),
            token_ids=list(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=self._decoded(request.logprobs),
            error=request.error,
            activations=self.activations,
            receipt=request.receipt,
        )

    def _decoded(self, entries: list[dict] | None) -> list[dict[int, Logprob]] | None:
        return None if entries is None else [decoded(entry, self._tokenizer) for entry in entries]


def decoded(entry: dict[int, Logprob], tokenizer: Any) -> dict[int, Logprob]:
    """The same log probabilities, with each token's text."""
    if tokenizer is None:
        return entry
    return {token: value._replace(decoded_token=tokenizer.decode([token])) for token, value in entry.items()}
