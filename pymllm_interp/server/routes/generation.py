"""`Generation`: one call's completions in the HTTP process, from token ids to text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...client.completion import Completion, Scored, StreamPiece
from ...core.events import FinishedEvent
from ...core.sampling_params import SamplingParams
from ...wire import messages as m
from ..engines.call import Call
from ..engines.door import Door

_FIELDS = {one.name for one in fields(SamplingParams)}


@dataclass
class Prompt:
    """A prompt, tokenized, and how it is generated from."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    embeds: bytes | None = None
    """Embeddings as safetensors, in place of token embeddings; None without any."""
    images: m.PromptImages | None = None
    """Images, or None. `token_ids` have their positions once the engine has accepted the prompt."""
    encoder: bytes | None = None
    """Encoder's input as safetensors; None: the model has no encoder, or it reads `token_ids`."""
    num_encoded: int = 0
    """Tokens that an encoder reads. Once the engine has accepted the prompt, the decoder reads `token_ids`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, for the encoder and the decoder."""
        return self.num_encoded + len(self.token_ids)


@dataclass
class CompletionPiece:
    """New text of one completion.

    Attributes:
        logprobs: log probabilities of the new tokens, if requested.
        end: end of the completion; None while it runs.
        scores: monitor -> (position, score) of those scored since the piece before.
        captures: rows captured since the piece before; None without any.
    """

    prompt: int
    sample: int
    text: str
    token_ids: list[int]
    logprobs: list[m.Logprobs]
    end: m.Finished | None = None
    scores: Mapping[str, Scored] = field(default_factory=dict)
    captures: m.Rows | None = None


class Generation:
    """The completions of some prompts.

    Args:
        engine: serves them.
        tokenizer: a transformers tokenizer, or None.
        call: accepted call with the prompts' requests.
    """

    def __init__(self, engine: Door, tokenizer: Any, prompts: Sequence[Prompt], call: Call) -> None:
        self._engine, self._call, self.prompts = engine, call, prompts
        self._places = [(i, j) for i, prompt in enumerate(prompts) for j in range(prompt.params.n)]
        self._completions = [
            Completion(f"{call.number}-{i}-{j}", j, prompts[i].params, tokenizer, prompts[i].token_ids)
            for i, j in self._places
        ]
        self._left = len(self._places)

    @classmethod
    async def start(
        cls, engine: Door, tokenizer: Any, prompts: Sequence[Prompt], owner: str, stream: bool, **more: Any
    ) -> Generation:
        """Submit the prompts.

        Args:
            owner: owner of the named vectors.
            stream: whether pieces come token by token.
            more: further fields of `messages.Submit`.

        Raises:
            Exception: the engine refuses them.
        """
        given = [prompt.params for prompt in prompts]
        if all(params is given[0] for params in given):
            given = given[:1]  # once for all
        params: list[dict[str, Any] | None] = [{name: getattr(one, name) for name in _FIELDS} for one in given]
        ids = [prompt.token_ids for prompt in prompts]
        if any(prompt.embeds for prompt in prompts):
            more["embeds"] = [prompt.embeds for prompt in prompts]
        if any(prompt.images for prompt in prompts):
            more["images"] = [prompt.images for prompt in prompts]
        if any(prompt.encoder for prompt in prompts):
            more["encoders"] = [prompt.encoder for prompt in prompts]
        call = engine.open(lambda number: m.Submit(number, owner, ids, params, stream=stream, **more))
        try:
            accepted = await call.next()
        except BaseException as error:
            engine.close(call, abort=isinstance(error, asyncio.CancelledError))
            raise
        assert isinstance(accepted, m.Accepted)
        for prompt, expanded in zip(prompts, accepted.prompts, strict=bool(accepted.prompts)):
            if expanded and not prompt.images and prompt.encoder is None:
                prompt.num_encoded = len(prompt.token_ids)
            prompt.token_ids = expanded or prompt.token_ids
        return cls(engine, tokenizer, prompts, call)

    async def pieces(self) -> AsyncIterator[CompletionPiece]:
        """A piece for each token of a stream, which may have no text yet. The last piece of each completion has its end. Many
        captured rows come in pieces without a token. Asking for the next piece says that the client has read the one before.

        Raises:
            Exception: the engine process ended, or the client reads too slowly.
        """
        while self._left:
            message, piece = await self._call.next(), None
            if isinstance(message, m.Token):
                found = self._completions[message.request].token_piece(
                    message.token_id, hold=False, scores=message.scores
                )
                assert found is not None
                piece = self._piece(message.request, found, [] if message.logprobs is None else [message.logprobs])
            elif isinstance(message, m.Rows):
                if (found := self._completions[message.request].rows_piece(message)) is not None:
                    piece = self._piece(message.request, found, [])
            elif isinstance(message, m.Finished):
                self._left -= 1
                completion = self._completions[message.request]
                logprobs = (message.logprobs or [])[completion._emitted :]
                piece = self._piece(message.request, completion.last_piece(event_of(message)), logprobs, message)
            if piece is not None:
                yield piece
                if piece.captures is not None:
                    self._engine.was_read(self._call, piece.captures.states.size)

    def _piece(
        self, request: int, piece: StreamPiece, logprobs: list[Any], end: m.Finished | None = None
    ) -> CompletionPiece:
        prompt, sample = self._places[request]
        return CompletionPiece(prompt, sample, piece.text, piece.token_ids, logprobs, end, piece.scores, piece.captures)

    @property
    def has_piece(self) -> bool:
        """Whether `pieces` has the next one without waiting."""
        return self._left > 0 and self._call.has_token

    @property
    def unfinished(self) -> bool:
        """Whether any completion is still running."""
        return self._left > 0

    def close(self) -> None:
        """End running completions. Called in any case."""
        self._engine.close(self._call, abort=self._left > 0)


def event_of(message: m.Finished) -> FinishedEvent:
    """The message as the engine's event that `Completion` reads."""
    return FinishedEvent(
        "",
        message.token_ids,
        message.finish_reason,
        message.stop_reason,
        message.text_length,
        message.num_hidden_tokens,
        monitors=message.monitors,
    )
