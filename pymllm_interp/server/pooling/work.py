"""`PooledWork`: the inputs of a request, pooled by the engine, and their JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import Request
from safetensors.numpy import load

from ...client.chat import render
from ...client.pooling.labels import NO_HEAD, Labels, check_types, has_types, logits_capture, pair_of
from ...client.pooling.pooler import PooledText, Pooler
from ...client.pooling.pooling import Pooling
from ...core.sampling_params import SamplingParams
from ...utils.arguments import PromptError
from ...wire import messages as m
from ...wire.failures import EngineError
from ..http.errors import ApiError, api_error
from ..http.state import ServerState
from ..http.trust import Client
from ..routes.conversations import text_only
from ..routes.generation import Generation, Prompt
from ..routes.lens import content_of
from ..routes.openai_format import Format
from ..routes.openai_routes import adapter_of
from ..routes.prompt_text import check_length, check_tokens, num_characters, truncatable
from .requests import InputsRequest, PooledRequest

READ_ONLY = SamplingParams(temperature=0.0, max_tokens=0)
MAX_VALUES = 1 << 22
"""Most numbers in an answer. A row for each token of each input may have billions."""


class PooledWork:
    """One request.

    Args:
        kind: first word of its id, as vLLM's.

    Attributes:
        pooler: the model's defaults.
    """

    def __init__(self, state: ServerState, body: PooledRequest, request: Request, client: Client, kind: str) -> None:
        if "score" not in state.info["tasks"]:
            raise ApiError(400, f"{state.info['architecture']} is an encoder-decoder model, of which nothing is pooled")
        self.state, self.body, self.client = state, body, client
        self.pooler: Pooler = state.pooler
        self._adapter = adapter_of(state, body.model)
        self._model = self._adapter or state.settings.name
        self._format = Format(
            kind, self._model, request.state.request_id, state, client, return_token_ids=False, logprobs=False, top=0
        )
        self._started, self._notes = request.state.started, request.state.record.notes
        self._prompts: list[Prompt] = []
        self._ends: dict[tuple[int, int], m.Finished] = {}
        self._of_entries: list[int] = []  # input of each entry's hooks; empty: the entry's own
        self._room: int = state.info["limits"]["max_model_len"]

    def pooling(self, **how: Any) -> Pooling:
        """The pooling of this request. Raises PromptError for values out of their range."""
        info = self.state.info
        return Pooling(self.pooler, info["pooled_site"], info["hidden_size"], info["limits"]["vocab_size"], **how)

    def labels(self) -> Labels:
        """The model's classification head. Raises PromptError without one."""
        if (found := self._head()) is None:
            raise PromptError(NO_HEAD)
        return found

    @property
    def is_encoder(self) -> bool:
        """Whether the model is one: its first token has the logits of a text."""
        return self.state.info["encoder"]

    def logits_capture(self, text: PooledText) -> dict[str, Any]:
        """Fields of the `Capture` of a text's logits."""
        return logits_capture(self.is_encoder)

    def _head(self) -> Labels | None:
        return Labels.of(self.state.info["hf_config"], self.state.info["tasks"])

    # -- inputs ------------------------------------------------------------------------------

    def inputs(self, body: InputsRequest, before: str) -> list[PooledText]:
        """The inputs with their token ids. Takes long."""
        most = self.pooler.most_tokens(body.truncate_prompt_tokens, self._room)
        check_length(self.state.tokenizer, len(before), self._room, "prompt")
        if body.messages is not None:
            return [self._fitting(self._conversation(body), most, "the conversation")]
        given = body.inputs()
        names = [f"input {i}" for i in range(len(given))] if len(given) > 1 else ["the input"]
        return [self.text(one, before, most, name) for one, name in zip(given, names, strict=True)]

    def text(self, given: str | list[int], before: str, most: int | None, name: str) -> PooledText:
        """A text, or token ids, as pooling reads them."""
        if isinstance(given, str):
            given = self._measured(given, most, name, len(before))
            read = self.pooler.read(self.state.tokenizer, given, before, name, most, self._special)
            return self._fitting(read, most, name)
        return self._fitting(PooledText(None, given), most, name)

    @property
    def _special(self) -> bool:
        return self.body.add_special_tokens is not False

    @property
    def _has_types(self) -> bool:
        return has_types(self.state.info["hf_config"], self.state.info["tasks"])

    def _measured(self, text: str, most: int | None, name: str, others: int) -> str:
        """The part of a text that has its first or last `most` tokens. None refuses a text that is too long.

        Args:
            others: characters beside it.
        """
        if most is not None:
            return truncatable(self.state.tokenizer, text, most)
        check_length(self.state.tokenizer, len(text) + others, self._room, name)
        return text

    def _fitting(self, read: PooledText, most: int | None, name: str) -> PooledText:
        """The input cut to `most` tokens. Raises PromptError for one that is empty or too long."""
        ids = read.token_ids
        if not ids:
            raise PromptError(f"{name} is empty: an input needs at least one token")
        if most is not None and len(ids) > most:
            left = getattr(self.state.tokenizer, "truncation_side", "right") == "left"
            ids = ids[-most:] if left else ids[:most]
        check_tokens(len(ids), self._room, name)
        self.pooler.check_length(len(ids), name)
        if read.text is not None and self._has_types:
            check_types(self.state.tokenizer, ids, None, name)
        return read._replace(token_ids=ids)

    def _conversation(self, body: InputsRequest) -> PooledText:
        messages = [message.model_dump(exclude_unset=True) for message in body.messages or ()]
        for part in ([list(message.values()) for message in messages], body.chat_template_kwargs):
            check_length(self.state.tokenizer, num_characters(part), self._room, "messages")
        found = render(
            self.state.tokenizer, messages, "the conversation", add_generation_prompt=False,
            chat_template_kwargs=body.chat_template_kwargs,
            check=lambda text: check_length(self.state.tokenizer, len(text), self._room, "the conversation"),
        )  # fmt: skip
        return PooledText(found.text, text_only(found).token_ids)

    def _pair(self, first: str, second: str, most: int | None, name: str) -> PooledText:
        """Two texts, as the tokenizer joins them."""
        first, second = (self._measured(*pair) for pair in ((first, most, name, len(second)), (second, most, name, 0)))
        ids = pair_of(self.state.tokenizer, first, second, name, most, self._special, self._has_types)
        return self._fitting(PooledText(None, ids), most, name)

    # -- the engine ----------------------------------------------------------------------------

    async def rows(
        self, count: int, read: Callable[[], list[PooledText]], how: Callable[[PooledText], dict[str, Any]],
        result: Callable[[PooledText, np.ndarray], Any], prompt_logits: bool = False,
        num_values: Callable[[PooledText, dict[str, Any]], int] = lambda text, capture: 1,
    ) -> list[Any]:  # fmt: skip
        """The results of all inputs.

        Args:
            count: inputs of the request.
            read: makes them; called on another thread.
            how: fields of the `Capture` of an input; called there, too.
            result: result of an input and its captured rows [positions, width]; called on another thread.
            num_values: numbers in the result of an input with this capture.

        Raises:
            ApiError: too many inputs or numbers, or an engine's error.
        """
        self._check_count(count)
        with self.state.admitted(self.client, count):
            try:

                def prepared() -> tuple[list[PooledText], list[dict[str, Any]]]:
                    texts = read()
                    captures = [how(text) for text in texts]
                    _check_values(sum(map(num_values, texts, captures)))
                    return texts, captures

                texts, captures = await self.state.threads.run(self.client.name, prepared)
                generation = await self._start(texts, captures, prompt_logits)
            except Exception as error:
                raise api_error(error, refused=True) from error
            try:
                async for piece in generation.pieces():
                    if piece.end is not None:
                        self._ended(piece.prompt, piece.end)
                sites = [capture["site"] for capture in captures]
                return [await self._result(i, texts[i], sites[i], result) for i in range(len(texts))]
            except Exception as error:
                raise api_error(error, refused=False) from error
            finally:
                for end in self._ends.values():
                    self.state.store.forget(end.captured)
                self._metrics.close()
                generation.close()

    def _check_count(self, count: int) -> None:
        if count > self.state.limits.max_prompts:
            raise ApiError(400, f"{count} inputs; at most {self.state.limits.max_prompts} (max_prompts)", "input")

    async def pair_scores(self, pairs: list[tuple[str, str]], activated: bool | None) -> list[float]:
        """Scores of pairs of texts: of the classification head, or the cosines of their embeddings.

        Results of hooks are of the pairs. Without a head they are of second texts.
        """
        self._check_count(len(pairs))  # of which many may have equal texts
        most, head = self.pooler.most_tokens(self.body.truncate_prompt_tokens, self._room), self._head()
        if head is not None:
            head.check_one()
            return await self.rows(
                len(pairs),
                lambda: [self._pair(*pair, most, f"pair {i}") for i, pair in enumerate(pairs)],
                self.logits_capture,
                lambda text, rows: head.score(rows[-1], activated, pair=True),
                self.is_encoder,
            )
        how, before = self.pooling(normalize=True), self.pooler.prompt_text(None, None)
        flat = [text for pair in pairs for text in pair]
        texts = flat if self.body.hooked else list(dict.fromkeys(flat))  # equal ones once, unless they have results
        number = {text: i for i, text in enumerate(texts)}
        places = [*range(len(flat))] if self.body.hooked else [number[text] for text in flat]
        self._of_entries = places[1::2]
        found = await self.rows(
            len(texts),
            lambda: [self.text(text, before, most, f"text {i}") for i, text in enumerate(texts)],
            lambda text: how.capture(text.token_ids, text.skipped),
            lambda text, rows: how.pooled(rows, text.skipped),
        )
        return [float(found[a] @ found[b]) for a, b in zip(places[::2], places[1::2], strict=True)]

    async def _start(
        self, texts: list[PooledText], pooled: list[dict[str, Any]], prompt_logits: bool
    ) -> Generation:  # fmt: skip
        body, own = self.body, list(self.body.capture or ())
        options = body.engine_options(self._adapter, len(texts))
        options["captures"] = [[capture, *own] for capture in pooled]
        self._prompts = [Prompt(text.text, text.token_ids, READ_ONLY) for text in texts]
        lengths = [len(text.token_ids) for text in texts]
        self._notes |= {"prompt_tokens": sum(lengths), "hooked": body.hooked, "stream": False}
        self.state.metrics.totals["hooked_requests"] += body.hooked
        found = await Generation.start(
            self.state.engine, None, self._prompts, self.client.name, False, prompt_logits=prompt_logits, **options
        )  # fmt: skip
        self._metrics = self.state.call_metrics(self._started, lengths, [1] * len(texts), [self._adapter] * len(texts))
        return found

    def _ended(self, index: int, end: m.Finished) -> None:
        self._metrics.ended(index, end)
        self._ends[index, 0] = end
        if end.failure is not None:
            raise EngineError(end.failure)
        if end.finish_reason == "timeout":
            raise ApiError(408, f"input {index} ran into its timeout", code="timeout")

    async def _result(self, index: int, text: PooledText, site: str, result: Callable[..., Any]) -> Any:
        captured = self._ends[index, 0].captured
        assert captured is not None, "each input has a capture"
        body = await asyncio.to_thread(content_of, captured, self.state.engine.store)
        if self.body.capture:
            self._format.keep_activations(index, captured)
            self._ends[index, 0].captured = None  # the store has it
        return await self.state.threads.run(self.client.name, lambda: result(text, load(body)[site]))

    # -- answers -------------------------------------------------------------------------------

    def envelope(self, **more: Any) -> dict[str, Any]:
        """The answer, with its usage."""
        usage = self._format.usage(self._prompts, self._ends)
        return {
            "id": self._format.id, "object": "list", "created": int(time.time()), "model": self._model, **more,
            "usage": usage,
        }  # fmt: skip

    def entry(self, index: int, **fields: Any) -> dict[str, Any]:
        """An input's part of the answer, with results of its hooks."""
        found = {"index": index, **fields}
        if self.body.hooked:
            of = self._of_entries[index] if self._of_entries else index
            self._format.end(found, of, self._ends[of, 0])
        return found


def _check_values(count: int) -> None:
    """Raise ApiError for an answer of too many numbers."""
    if count > MAX_VALUES:
        raise ApiError(
            400, f"the answer has {count} numbers; at most {MAX_VALUES}: send fewer inputs at a time", "input"
        )
