"""OpenAI's routes: `/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from ...client.chat import PLACEHOLDER, RenderedPrompt, tokenized
from ...client.request_options import truncated
from ...core.sampling_params import SamplingParams
from ...wire import messages as m
from ...wire.embeds import embeds_of
from ...wire.failures import EngineError
from ..http.body import JsonRoute
from ..http.errors import ApiError, api_error
from ..http.state import ServerState, check_priority, require
from ..http.trust import Client, Trust
from ..protocol import ChatRequest, CompletionRequest, GenerationRequest, SharedRequest
from ..tools.messages import MessageParser
from .conversations import conversation, fetched
from .generation import CompletionPiece, Generation, Prompt
from .openai_format import Format, usage_of
from .prompt_text import check_length, check_tokens, last_part

T = TypeVar("T")
COMPLETION_TOKENS = 16
"""OpenAI's default length of a completion; a chat's is the rest of the context."""
FEW_POSITIONS = 16
"""Most positions with log probabilities that are written on the event loop."""
FEW_BYTES = 1 << 16
"""Most bytes of captured rows that are written on the event loop."""
JOINED_BYTES = 1 << 16
"""Bytes of a stream's events that leave together, at most about."""
NOT_ENCODED = "not supported with an encoder-decoder model, whose prompts are the encoder's"
DONE = b"data: [DONE]\n\n"
"""The end of a stream of chunks."""


class DisconnectedError(Exception):
    """The client disconnected. The app counts it, and answers 499."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises DisconnectedError: the client disconnected."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def openai_routes(state: ServerState) -> APIRouter:
    """Router of the OpenAI endpoints."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [_card(state), *(_adapter_card(state, name) for name in state.engine.adapters)],
        }

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        adapter = adapter_of(state, name)
        return _card(state) if adapter is None else _adapter_card(state, adapter)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        logprobs = body.logprobs is not None
        if body.echo and logprobs and body.prompt_logprobs is None:
            body.prompt_logprobs = body.logprobs
        if body.echo and body.stream and logprobs:
            raise ApiError(400, "echo with logprobs is not streamed: leave out stream, or one of them", param="echo")
        if body.echo and state.info["limits"]["max_source_len"]:
            raise ApiError(400, f"echo: {NOT_ENCODED}", "echo")
        given, embeds = body.prompts(), body.embeds()
        asked = asked_of(
            state,
            body,
            len(embeds) + len(given),
            COMPLETION_TOKENS,
            lambda: embedded(state, embeds) + texts(state, body, given),
        )._replace(of_ids=not embeds and not any(isinstance(prompt, str) for prompt in given))
        return await _serve(state, body, request, asked, "cmpl", logprobs, body.logprobs or 0, bool(body.echo))

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Write the next message of a conversation, by the model's chat template."""
        plan = body.planned(state.settings.tool_call_parser, state.settings.reasoning_parser)
        asked = asked_of(state, body, 1, None, lambda: [conversation(state, body)])
        if plan.parses:
            asked = asked._replace(parser=plan.parser)
        return await _serve(state, body, request, asked, "chatcmpl", bool(body.logprobs), body.top_logprobs or 0, False)

    return router


def _card(state: ServerState) -> dict[str, Any]:
    length = state.info["limits"]["max_model_len"]
    return {
        "id": state.settings.name, "object": "model", "created": int(state.started), "owned_by": "pymllm-interp",
        "root": state.info["model"], "max_model_len": length,
    }  # fmt: skip


def _adapter_card(state: ServerState, name: str) -> dict[str, Any]:
    """Description of a LoRA adapter, in vLLM's format."""
    return _card(state) | {"id": name, "root": state.engine.adapters[name], "parent": state.settings.name}


def adapter_of(state: ServerState, name: str | None) -> str | None:
    """The LoRA adapter that a model's name stands for; None: the model itself. Raises ApiError: no model of this name is served."""
    known = state.settings.name, state.info["model"]
    if name is None or name in known:
        return None
    if name not in state.engine.adapters:
        served = ", ".join(map(repr, (known[0], *state.engine.adapters)))
        raise ApiError(404, f"there is no model {name[:200]!r}; this server has {served}", "model", "model_not_found")
    return name


class Asked(NamedTuple):
    """Parsed parameters of a request, before its prompts are tokenized."""

    prompts: int
    params: SamplingParams
    adapter: str | None
    """LoRA adapter that the prompts run with."""
    read: Callable[[], list[RenderedPrompt]]
    """Tokenizes the prompts: takes long, unless all are token ids."""
    of_ids: bool = False
    """Whether all prompts are token ids."""
    parser: Callable[[str | None], MessageParser] | None = None
    """Parsers of the messages, from the prompt's text."""


def asked_of(
    state: ServerState, body: GenerationRequest, count: int, max_tokens: int | None, read: Callable[[], list[RenderedPrompt]]
) -> Asked:  # fmt: skip
    """Parsed parameters of a request. Raises ApiError: another model, or more prompts than a request may have."""
    adapter = adapter_of(state, body.model)
    if body.truncate_prompt_tokens is not None and state.info["limits"]["max_source_len"]:
        raise ApiError(400, f"truncate_prompt_tokens: {NOT_ENCODED}", "truncate_prompt_tokens")
    params = body.sampling_params(state.info["sampling_defaults"], max_tokens)
    if count * params.n > state.limits.max_prompts:
        raise ApiError(
            400, f"{count} prompts with n={params.n}; at most {state.limits.max_prompts} (max_prompts)", "prompt"
        )
    return Asked(count, params, adapter, read)


def _prompt(state: ServerState, read: RenderedPrompt, params: SamplingParams) -> Prompt:
    ids = read.token_ids  # the engine refuses to truncate embeddings
    if read.embeds is None and not read.images:
        ids = truncated(ids, params, state.info["limits"]["max_model_len"])
    text = read.text if len(ids) == len(read.token_ids) else None
    return Prompt(text, ids, params, read.embeds, read.images or None, read.encoder)


def embedded(state: ServerState, given: list[str]) -> list[RenderedPrompt]:
    """The prompts of embeddings, which have a placeholder for each token."""
    found, room = list[RenderedPrompt](), state.info["limits"]["max_model_len"]
    for i, text in enumerate(given):
        name = f"prompt_embeds {i}" if len(given) > 1 else "prompt_embeds"
        tokens, body = embeds_of(text, name)
        check_tokens(tokens, room, name)
        found.append(RenderedPrompt(None, [PLACEHOLDER] * tokens, body))
    return found


def texts(
    state: ServerState, body: CompletionRequest, given: list[Any], limited: bool = True
) -> list[RenderedPrompt]:  # fmt: skip
    """The prompts of a completion, with their token ids.

    Args:
        limited: refuse the first prompt that the context cannot hold.
    """
    found, room = [], state.max_prompt_len
    for i, prompt in enumerate(given):
        name = f"prompt {i}" if len(given) > 1 else "the prompt"
        if isinstance(prompt, str):
            if body.truncate_prompt_tokens is None:
                check_length(state.tokenizer, len(prompt), room, name)
            else:
                prompt = last_part(state.tokenizer, prompt, room)
            special = body.add_special_tokens is not False
            found.append(tokenized(state.tokenizer, prompt, name, add_special_tokens=special))
            if limited and body.truncate_prompt_tokens is None:
                check_tokens(len(found[-1].token_ids), room, name)
        else:
            found.append(RenderedPrompt(None, prompt))
    return found


async def _serve(
    state: ServerState, body: GenerationRequest, request: Request, asked: Asked, kind: str, logprobs: bool, top: int,
    echo: bool,
) -> Response:  # fmt: skip
    client = allowed(body, request)
    format_ = Format(
        kind, asked.adapter or state.settings.name, request.state.request_id, state, client,
        return_token_ids=bool(body.return_token_ids), logprobs=logprobs, top=top, echo=echo, parser=asked.parser,
    )  # fmt: skip
    return await answer(state, request, Work(state, body, request, client, asked, format_))


def allowed(body: SharedRequest, request: Request) -> Client:
    """The client, if it may ask for this. Raises ApiError: the key lacks the permission."""
    client = require(request, Trust.DECLARED if body.hooked else Trust.PLAIN)
    check_priority(client, [body.priority or 0])
    return client


async def answer(state: ServerState, request: Request, work: Work) -> Response:
    """The response to a request, or the stream of its events."""
    state.metrics.totals["hooked_requests"] += work.body.hooked
    if work.body.stream:
        stream = work.stream()
        first = await anext(stream)  # an engine's refusal is a response without a stream
        return StreamingResponse(
            _chained(first, stream), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    found = await while_connected(request, work.whole())
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for part in rest:
            yield part
    finally:
        await rest.aclose()  # pyright: ignore[reportAttributeAccessIssue]


class Work:
    """One request, from its prompts to its answer."""

    def __init__(
        self, state: ServerState, body: GenerationRequest, request: Request, client: Client, asked: Asked, format_: Format
    ) -> None:  # fmt: skip
        self._state, self.body, self._client = state, body, client
        self._asked, self._format = asked, format_
        self._prompts: list[Prompt] = []
        self._notes = request.state.record.notes
        self._started = request.state.started
        self._n = asked.params.n
        self._ends: dict[tuple[int, int], m.Finished] = {}
        self._made: Counter[int] = Counter()

    def _admitted(self) -> AbstractContextManager[None]:
        return self._state.admitted(self._client, self._asked.prompts * self._n)

    async def _start(self, stream: bool) -> Generation:
        """Tokenize the prompts and submit them. The request is admitted already."""
        options = self.body.engine_options(self._asked.adapter, self._asked.prompts)
        try:
            if self._asked.of_ids:  # a thread would take longer to begin than to read them
                read = self._asked.read()
            else:
                read = await self._state.threads.run(self._client.name, self._asked.read)
            if any(one.images for one in read):
                read = await self._state.media_threads.run(self._client.name, fetched, self._state, read)
            prompts = self._prompts = [_prompt(self._state, one, self._asked.params) for one in read]
            found = await Generation.start(
                self._state.engine, self._state.tokenizer, prompts, self._client.name, stream, **options
            )
            lengths = [prompt.num_tokens for prompt in prompts]
            self._notes |= {"prompt_tokens": sum(lengths), "hooked": self.body.hooked, "stream": stream}
            self._metrics = self._state.call_metrics(
                self._started, lengths, [self._n] * len(prompts), [self._asked.adapter] * len(prompts)
            )
            return found
        except Exception as error:
            raise api_error(error, refused=True) from error

    def _index(self, piece: CompletionPiece) -> int:
        return piece.prompt * self._n + piece.sample

    async def _choice(self, piece: CompletionPiece, chunk: bool) -> dict[str, Any]:
        """A choice, or a chunk's part of it. Many log probabilities, and large captured rows, are written on a thread."""
        index, end = self._index(piece), piece.end
        if end is not None and end.captured is not None:
            self._format.keep_activations(index, end.captured)
        given = index, self._prompts[piece.prompt], piece, index not in self._made, chunk
        positions = len(piece.logprobs)
        if end is not None:
            positions += len(end.prompt_logprobs or ())
            positions += sum(len(found.scores) for found in (end.monitors or {}).values())
        size = 0 if piece.captures is None else piece.captures.states.size
        if positions <= FEW_POSITIONS and size <= FEW_BYTES:
            found = self._format.choice(*given)
        else:
            found = await self._state.threads.run(self._client.name, self._format.choice, *given)
        self._made[index] += len(piece.token_ids)
        return found

    def _take(self, piece: CompletionPiece) -> None:
        """Count a piece's tokens and captured rows, and keep its end."""
        if piece.captures is not None:
            self._state.metrics.totals["captured_bytes"] += piece.captures.states.size
        if piece.end is None:
            if piece.token_ids:
                self._metrics.tokens(self._index(piece), len(piece.token_ids))
        else:
            self._metrics.ended(self._index(piece), piece.end)
            self._ends[piece.prompt, piece.sample] = piece.end
            if piece.end.failure is not None:
                self._state.store.forget(piece.end.captured)
                raise api_error(EngineError(piece.end.failure), refused=False)

    async def whole(self) -> dict[str, Any]:
        """The response of a request that is not streamed."""
        with self._admitted():
            generation = await self._start(stream=False)
            choices: dict[int, dict[str, Any]] = {}
            try:
                async for piece in generation.pieces():
                    self._take(piece)
                    choices[self._index(piece)] = await self._choice(piece, chunk=False)
            except Exception as error:
                raise api_error(error, refused=False) from error
            finally:
                self._close(generation)
        found = self._format.envelope([choices[i] for i in sorted(choices)], chunk=False)
        found["usage"] = self._format.usage(self._prompts, self._ends)
        self._note_tokens()
        return found

    async def stream(self) -> AsyncIterator[bytes]:
        """The server-sent events of a stream. The first one comes when the request is accepted.

        Events that are there at once leave together: the system call that sends them takes longer than making one.
        """
        with ExitStack() as stack:
            stack.enter_context(self._admitted())
            generation = await self._start(stream=True)
            stack.callback(self._closed, generation)
            yield await self._opening()
            joined = b""
            try:
                async for piece in generation.pieces():
                    if not self._notes.get("first_token_ms") and piece.token_ids:
                        self._notes["first_token_ms"] = round(1000 * (time.perf_counter() - self._started), 2)
                    self._take(piece)
                    joined += await self._events(piece)
                    if joined and (len(joined) >= JOINED_BYTES or not generation.has_piece):
                        sent, joined = joined, b""
                        yield sent
                joined += await self._closing()
            except Exception as error:
                joined += self._failing(api_error(error, refused=False))
            yield joined

    async def _opening(self) -> bytes:
        """The first events of a stream, one at least."""
        if not self._format.chat:
            return b": accepted\n\n"
        return b"".join([await self._events(CompletionPiece(0, i, "", [], [])) for i in range(self._n)])

    async def _events(self, piece: CompletionPiece) -> bytes:
        """A piece's events: here one. With include_usage its usage is null, with continuous_usage_stats that of its choice."""
        index, options = self._index(piece), self.body.stream_options
        chunk = self._format.envelope([await self._choice(piece, chunk=True)], chunk=True)
        if options is not None and options.usage:
            read = self._prompts[piece.prompt].num_tokens
            chunk["usage"] = usage_of(read, self._made[index]) if options.continuous_usage_stats else None
        return _data(chunk)

    async def _closing(self) -> bytes:
        """The last events of a stream."""
        if self.body.stream_options is None or not self.body.stream_options.usage:
            return DONE
        last = self._format.envelope([], chunk=True)
        return _data(last | {"usage": self._format.usage(self._prompts, self._ends)}) + DONE

    def _failing(self, error: ApiError) -> bytes:
        """The last events of a stream that failed."""
        return _data(error.body()) + DONE

    def _note_tokens(self) -> None:
        self._notes["generated_tokens"] = sum(len(end.token_ids) for end in self._ends.values())

    def _closed(self, generation: Generation) -> None:
        self._note_tokens()
        if generation.unfinished:
            self._state.metrics.totals["disconnects"] += 1
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        self._metrics.close()
        generation.close()


def _data(value: dict[str, Any]) -> bytes:
    """Data of one server-sent event, in ASCII: some clients end a line at U+2028."""
    data = msgspec.json.encode(value)
    if not data.isascii():  # from the JSON: an infinite number is null in all events
        data = json.dumps(msgspec.json.decode(data), separators=(",", ":")).encode()
    return b"data: " + data + b"\n\n"
