"""One completion as its caller follows it: text, pieces, and the finished output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.events import FinishedEvent
from ..core.output import CompletionOutput, Logprob
from ..core.sampling_params import SamplingParams
from .detokenizer import Detokenizer, token_text


class StreamPiece(str):
    """A piece of generated text.

    Attributes:
        text: the piece itself.
        token_ids: tokens that the piece was decoded from; several where a character took several.
        output_index: index of the completion among the prompt's `n`.
        finish_reason: set on the last piece of a completion. Its text may be empty.
        activations, receipt: set on the last piece, where something was captured or declared; else None.
    """

    token_ids: list[int]
    output_index: int
    finish_reason: str | None
    activations: Any = None
    receipt: Any = None

    @classmethod
    def of(cls, text: str, token_ids: list[int], index: int, finish_reason: str | None) -> StreamPiece:
        """A piece with its attributes."""
        piece = cls(text)
        piece.token_ids, piece.output_index, piece.finish_reason = token_ids, index, finish_reason
        return piece

    @property
    def text(self) -> str:
        """The piece as a plain string."""
        return str(self)


class Completion:
    """Text of one request, from its events. Used by one thread at a time: the caller's.

    Args:
        request_id: of the request.
        index: among the prompt's `n` completions.
        params: its sampling parameters.
        tokenizer: a transformers tokenizer, or None, without which there is no text.
        prompt_token_ids: of the prompt, which the text follows.
        nothing: the activations of a completion without captures.
    """

    def __init__(
        self, request_id: str, index: int, params: SamplingParams, tokenizer: Any, prompt_token_ids: Sequence[int],
        nothing: Any = None,
    ) -> None:  # fmt: skip
        self.request_id, self.index, self._params, self._tokenizer = request_id, index, params, tokenizer
        self._prompt_token_ids, self._nothing = prompt_token_ids, nothing
        self._token_ids: list[int] = []
        self._streamed: Detokenizer | None = None
        self._emitted = self._emitted_chars = 0

    def token_piece(self, token_id: int, hold: bool = True) -> StreamPiece | None:
        """The text that a new token adds. A part of a character is held back, and what may turn out a stop string.

        Args:
            hold: None where all of the text is held back, so that the next piece has this token too; else a piece without text.
        """
        self._token_ids.append(token_id)
        if self._tokenizer is None:
            return self._piece("", 0, None)
        self._streamed = self._streamed or self._detokenizer()
        self._streamed.push([token_id])
        text = self._streamed.text
        end = len(text) - self._held_back(text)
        return None if hold and end <= self._emitted_chars else self._piece(text, end, None)

    def last_piece(self, finished: FinishedEvent) -> StreamPiece:
        """The rest of the text, with what belongs to the completion as a whole."""
        self._token_ids = finished.token_ids
        text = self.text(finished)
        piece = self._piece(text, len(text), finished.finish_reason)
        piece.activations, piece.receipt = self._activations(finished), finished.receipt
        return piece

    def _piece(self, text: str, end: int, finish_reason: str | None) -> StreamPiece:
        end = max(end, self._emitted_chars)
        ids = self._token_ids[self._emitted :]
        piece = StreamPiece.of(text[self._emitted_chars : end], ids, self.index, finish_reason)
        self._emitted, self._emitted_chars = len(self._token_ids), end
        return piece

    def _held_back(self, text: str) -> int:
        longest = 0
        for stop in self._params.stop_strings:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def text(self, end: FinishedEvent) -> str:
        """The text: without the stop string, and without the token that stopped it, unless these are asked for."""
        if self._tokenizer is None:
            return ""
        ids = end.token_ids[: len(end.token_ids) - end.num_hidden_tokens]
        detokenizer = self._detokenizer()
        text = detokenizer.push(ids) + detokenizer.end()
        return text if end.text_length is None else text[: end.text_length]

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self._params.skip_special_tokens, self._prompt_token_ids)

    def output(self, end: FinishedEvent) -> CompletionOutput:
        """The completion as a value."""
        return CompletionOutput(
            index=self.index,
            text=self.text(end),
            token_ids=list(end.token_ids),
            finish_reason=end.finish_reason or None,
            stop_reason=end.stop_reason,
            logprobs=None if end.logprobs is None else [decoded(entry, self._tokenizer) for entry in end.logprobs],
            error=end.error,
            activations=self._activations(end),
            receipt=end.receipt,
            drafts=end.drafts,
        )

    def _activations(self, end: FinishedEvent) -> Any:
        return self._nothing if end.activations is None else end.activations


def decoded(entry: dict[int, Logprob], tokenizer: Any) -> dict[int, Logprob]:
    """The same log probabilities, with each token's text."""
    if tokenizer is None:
        return entry
    return {token: value._replace(decoded_token=token_text(tokenizer, token)) for token, value in entry.items()}
