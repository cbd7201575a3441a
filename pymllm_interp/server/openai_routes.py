"""OpenAI's routes: `/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..core.arguments import PromptError
from ..engine.chat import RenderedPrompt, render, tokenized
from . import messages as m
from .errors import ApiError, api_error
from .failures import EngineError
from .generation import Generation, Piece, Prompt
from .openai_format import Format
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .state import ServerState, check_priority, require
from .trust import Client, Trust

T = TypeVar("T")
COMPLETION_TOKENS = 16
"""OpenAI's default length of a completion; a chat's is what the context holds."""


class DisconnectedError(Exception):
    """The client is gone."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        DisconnectedError: it did.
    """

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
    """The routes."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(state)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(state, name)
        return _card(state)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        logprobs = body.logprobs is not None
        if body.echo and logprobs and body.prompt_logprobs is None:
            body.prompt_logprobs = body.logprobs
        if body.echo and body.stream and logprobs:
            raise ApiError(400, "echo with logprobs is not streamed: leave out stream, or one of them", param="echo")
        prompts = await _prompts(state, body, COMPLETION_TOKENS, lambda: _texts(state, body))
        return await _serve(state, body, request, prompts, "cmpl", logprobs, body.logprobs or 0, bool(body.echo))

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Write the next message of a conversation, by the model's chat template."""
        prompts = await _prompts(state, body, None, lambda: [_conversation(state, body)])
        return await _serve(
            state, body, request, prompts, "chatcmpl", bool(body.logprobs), body.top_logprobs or 0, False
        )

    return router


def _card(state: ServerState) -> dict[str, Any]:
    length = state.info["limits"]["max_model_len"]
    return {
        "id": state.settings.name, "object": "model", "created": int(state.started), "owned_by": "pymllm-interp",
        "root": state.info["model"], "max_model_len": length,
    }  # fmt: skip


def _check_model(state: ServerState, name: str | None) -> None:
    known = state.settings.name, state.info["model"]
    if name is not None and name not in known:
        raise ApiError(404, f"there is no model {name!r}; this server has {known[0]!r}", "model", "model_not_found")


async def _prompts(state: ServerState, body: GenerationRequest, max_tokens: int | None, read: Any) -> list[Prompt]:
    """The tokenized prompts, with their sampling parameters."""
    _check_model(state, body.model)
    params = body.sampling_params(state.info["sampling_defaults"], max_tokens)
    found = await asyncio.to_thread(read)
    if len(found) * params.n > state.limits.max_prompts:
        raise ApiError(
            400, f"{len(found)} prompts with n={params.n}; at most {state.limits.max_prompts} (max_prompts)", "prompt"
        )
    return [Prompt(one.text, one.token_ids, params) for one in found]


def _texts(state: ServerState, body: CompletionRequest) -> list[Any]:
    given, found = body.prompts(), []
    for i, prompt in enumerate(given):
        name = f"prompt {i}" if len(given) > 1 else "the prompt"
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            found.append(tokenized(state.tokenizer, prompt, name, add_special_tokens=special))
        else:
            found.append(RenderedPrompt(None, prompt))
    return found


def _conversation(state: ServerState, body: ChatRequest) -> Any:
    messages = [_message(i, message.model_dump(exclude_unset=True)) for i, message in enumerate(body.messages)]
    return render(
        state.tokenizer, messages, "the conversation",
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message, tools=None if body.tool_choice == "none" else body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message with its parts as one text, which is what templates read."""
    parts = message.get("content")
    if isinstance(parts, list):
        texts = []
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise PromptError(
                    f"messages.{index}: its content has a part that is no text; the model reads text alone"
                )
            texts.append(part["text"])
        message["content"] = "".join(texts)
    return message


async def _serve(
    state: ServerState, body: GenerationRequest, request: Request, prompts: list[Prompt], kind: str, logprobs: bool, top: int,
    echo: bool,
) -> Response:  # fmt: skip
    client = require(request, Trust.DECLARED if body.hooked else Trust.PLAIN)
    check_priority(client, [body.priority or 0])
    format_ = Format(
        kind, state.settings.name, request.state.request_id, state, client, return_token_ids=bool(body.return_token_ids),
        logprobs=logprobs, top=top, echo=echo,
    )  # fmt: skip
    state.metrics.totals["hooked_requests"] += body.hooked
    state.metrics.totals["prompt_tokens"] += sum(len(prompt.token_ids) for prompt in prompts)
    work = _Work(state, body, request, client, prompts, format_)
    if body.stream:
        stream = work.stream()
        first = await anext(stream)  # what the engine refuses is an answer of its own
        return StreamingResponse(
            _chained(first, stream), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    try:
        return JSONResponse(await while_connected(request, work.whole()))
    except DisconnectedError:
        state.metrics.totals["disconnects"] += 1
        return Response(status_code=499)


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for part in rest:
            yield part
    finally:
        await rest.aclose()  # pyright: ignore[reportAttributeAccessIssue]


class _Work:
    """One request, from its prompts to its answer."""

    def __init__(
        self, state: ServerState, body: GenerationRequest, request: Request, client: Client, prompts: Sequence[Prompt],
        format_: Format,
    ) -> None:  # fmt: skip
        self._state, self._body, self._client = state, body, client
        self._prompts, self._format = prompts, format_
        self._notes = request.state.passage.notes
        self._started = request.state.started
        self._n = prompts[0].params.n if prompts else 1
        self._ends: dict[tuple[int, int], m.Finished] = {}

    async def _start(self, stream: bool) -> Generation:
        body, prompts = self._body, self._prompts
        hooks: dict[str, Any] = {}
        for name, field in (("interventions", body.interventions), ("captures", body.capture)):
            if field:
                hooks[name] = [field] * len(prompts)
        options: dict[str, Any] = {"timeout": body.timeout, "cache_salt": body.cache_salt}
        if body.priority is not None:
            options["priority"] = [body.priority] * len(prompts)
        self._notes |= {
            "prompt_tokens": sum(len(p.token_ids) for p in prompts),
            "hooked": body.hooked,
            "stream": stream,
        }
        try:
            return await Generation.start(
                self._state.engine, self._state.tokenizer, prompts, self._client.name, stream, options=options, **hooks
            )
        except Exception as error:
            raise api_error(error, refused=True) from error

    def _index(self, piece: Piece) -> int:
        return piece.prompt * self._n + piece.sample

    def _choice(self, piece: Piece, first: bool, chunk: bool) -> dict[str, Any]:
        return self._format.choice(self._index(piece), self._prompts[piece.prompt], piece, first, chunk)

    def _take_end(self, piece: Piece) -> None:
        if piece.end is not None:
            self._ends[piece.prompt, piece.sample] = piece.end
            if piece.end.failure is not None:
                self._state.store.forget(piece.end.captured)
                raise api_error(EngineError(piece.end.failure), refused=False)

    async def whole(self) -> dict[str, Any]:
        """The response of a request that is not streamed."""
        with self._state.admitted(self._client, len(self._prompts) * self._n):
            generation = await self._start(stream=False)
            choices: dict[int, dict[str, Any]] = {}
            try:
                async for piece in generation.pieces():
                    self._state.generated(len(piece.token_ids))
                    self._take_end(piece)
                    choices[self._index(piece)] = self._choice(piece, first=True, chunk=False)
            except Exception as error:
                raise api_error(error, refused=False) from error
            finally:
                generation.close()
        found = self._format.envelope([choices[i] for i in sorted(choices)], chunk=False)
        found["usage"] = self._format.usage(self._prompts, self._ends)
        self._notes["generated_tokens"] = found["usage"]["completion_tokens"]
        return found

    async def stream(self) -> AsyncIterator[bytes]:
        """The server-sent events of a stream. The first one comes when the request is accepted."""
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        with ExitStack() as stack:
            stack.enter_context(self._state.admitted(self._client, len(self._prompts) * self._n))
            generation = await self._start(stream=True)
            stack.callback(self._closed, generation)
            begun: set[int] = set()
            if self._format.chat:
                for index in range(self._n):
                    empty = Piece(0, index, "", [], [])
                    yield self._event(self._format.envelope([self._choice(empty, True, True)], chunk=True), usage)
                    begun.add(index)
            else:
                yield b": accepted\n\n"
            try:
                async for piece in generation.pieces():
                    self._state.generated(len(piece.token_ids))
                    if not self._notes.get("first_token_ms") and piece.token_ids:
                        seconds = time.perf_counter() - self._started
                        self._state.metrics.first_token.add(seconds)
                        self._notes["first_token_ms"] = round(1000 * seconds, 2)
                    self._take_end(piece)
                    index = self._index(piece)
                    choice = self._choice(piece, index not in begun, chunk=True)
                    begun.add(index)
                    yield self._event(self._format.envelope([choice], chunk=True), usage)
                if usage:
                    last = self._format.envelope([], chunk=True)
                    yield self._event(last | {"usage": self._format.usage(self._prompts, self._ends)}, False)
            except Exception as error:
                yield b"data: " + json.dumps(api_error(error, refused=False).body()).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

    def _event(self, chunk: dict[str, Any], usage: bool) -> bytes:
        """An event. With include_usage, all but the last have a usage of null."""
        if usage:
            chunk["usage"] = None
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    def _closed(self, generation: Generation) -> None:
        self._notes["generated_tokens"] = sum(len(end.token_ids) for end in self._ends.values())
        if generation.unfinished:
            self._state.metrics.totals["disconnects"] += 1
        generation.close()
