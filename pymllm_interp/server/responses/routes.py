"""`/v1/responses`: OpenAI's Responses API, over the machinery of chats."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...client.completion import Scored
from ..http.body import JsonRoute
from ..http.errors import ApiError
from ..http.state import ServerState, require
from ..http.trust import Client, Trust
from ..protocol import ChatRequest
from ..routes.conversations import conversation
from ..routes.generation import CompletionPiece, Prompt
from ..routes.openai_format import Format, scores_json
from ..routes.openai_routes import Asked, Work, allowed, answer, asked_of
from ..tools.parts import Part
from .items import item_of, messages_of
from .output import Event, OutputItems
from .request import ResponsesRequest


def responses_routes(state: ServerState) -> APIRouter:
    """Router of /v1/responses."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Write the next items of a conversation."""
        client, before = allowed(body, request), []
        if body.previous_response_id is not None:
            kept = state.responses.find(client.name, body.previous_response_id, "previous_response_id")
            before = await state.threads.run(client.name, json.loads, kept.messages)
        messages = body.messages(before)
        chat = body.chat(messages)
        plan = chat.planned(state.settings.tool_call_parser, state.settings.reasoning_parser)
        if chat.logprobs and plan.parses:
            raise ApiError(
                400, "include: log probabilities are of a whole text; leave tools out, and on a server with --reasoning-parser "
                "use /v1/chat/completions", "include",
            )  # fmt: skip
        asked = asked_of(state, chat, 1, None, lambda: [conversation(state, chat)])
        if plan.parses:
            asked = asked._replace(parser=plan.parser)
        format_ = ResponseJson(state, client, request.state.request_id, body, chat, asked)
        return await answer(state, request, ResponseWork(state, chat, request, client, asked, format_, messages))

    @router.get("/v1/responses/{response_id}")
    async def get(response_id: str, request: Request) -> Response:
        """A response of this key that is kept."""
        _check_query(request)
        kept = state.responses.find(require(request, Trust.PLAIN).name, response_id)
        return Response(kept.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a response of this key. Those that continue it have its conversation."""
        _check_query(request)
        state.responses.drop(require(request, Trust.PLAIN).name, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _check_query(request: Request) -> None:
    for name in request.query_params:
        raise ApiError(400, f"{name[:80]}: a response is fetched as a whole, without parameters", name[:80])


class ResponseJson(Format):
    """Makes the JSON of one response.

    Args:
        chat: the same as a chat's.
    """

    def __init__(
        self, state: ServerState, client: Client, request_id: str, body: ResponsesRequest, chat: ChatRequest, asked: Asked
    ) -> None:  # fmt: skip
        super().__init__(
            "resp", asked.adapter or state.settings.name, request_id, state, client, return_token_ids=False,
            logprobs=bool(chat.logprobs), top=chat.top_logprobs or 0, parser=asked.parser,
        )  # fmt: skip
        self.id, self.chat = f"resp_{request_id}", True
        echo = body.echo() | {"temperature": asked.params.temperature, "top_p": asked.params.top_p}
        self.response: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": self.created, "completed_at": None, "status": "in_progress",
            "error": None, "incomplete_details": None, "model": self.name, "output": [], "usage": None, **echo,
        }  # fmt: skip
        self.output = OutputItems(self._call_id)
        self._scores: dict[str, Scored] = {}

    def _call_id(self) -> str:
        return self._messages[0].call_id() if self._messages else f"call_{uuid.uuid4().hex[:24]}"

    def choice(self, index: int, prompt: Prompt, piece: CompletionPiece, first: bool, chunk: bool) -> dict[str, Any]:
        """The events of a piece. At the end, the response has its output."""
        ids, logprobs, end = list(piece.token_ids), list(piece.logprobs), piece.end
        entries = self._logprobs(index, prompt, piece, ids, logprobs, False)["content"] if self.logprobs else []
        events = list(self.output.push(self._parts(index, prompt, piece), entries))
        if piece.captures is not None:  # a piece without text has no other event
            events.insert(0, {"type": "pymllm.captures", "captures": self.captures_json(piece.captures)})
        if end is not None:
            complete = end.finish_reason == "stop"
            events += self.output.end(complete)
            reason = "max_output_tokens" if end.finish_reason == "length" else end.finish_reason
            self.response |= {
                "status": "completed" if complete else "incomplete", "completed_at": int(time.time()) if complete else None,
                "incomplete_details": None if complete else {"reason": reason}, "output": self.output.items,
            }  # fmt: skip
            self.end(self.response, index, end)
        for name, found in piece.scores.items():
            self._scores.setdefault(name, []).extend(found)
        if self._scores and events:  # a piece without text has none
            events[-1]["pymllm"], self._scores = {"scores": scores_json(self._scores)}, {}
        return {"events": events}

    def _parts(self, index: int, prompt: Prompt, piece: CompletionPiece) -> list[Part]:
        if self._parser is None:
            return [Part("content", piece.text)] if piece.text else []
        if index not in self._messages:
            self._messages[index] = self._parser(prompt.text)
        return list(self._messages[index].parts(piece.text, ended=piece.end is not None))

    async def take_usage(self, prompts: Sequence[Prompt], ends: dict[Any, Any]) -> None:
        """Write the counts of tokens. Reasoning counts as its text."""
        found, thoughts = self.usage(prompts, ends), self.output.texts("reasoning")
        count = 0
        if thoughts and self._state.tokenizer is not None:
            tokenizer = self._state.tokenizer
            ids = await self._state.threads.run(self._client.name, tokenizer, thoughts, add_special_tokens=False)
            count = min(len(ids["input_ids"]), found["completion_tokens"])
        self.response["usage"] = {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {**found.get("completion_tokens_details", {}), "reasoning_tokens": count},
            "total_tokens": found["total_tokens"],
        }  # fmt: skip


class ResponseWork(Work):
    """One request for a response.

    Args:
        messages: conversation before the request, without the instructions.
    """

    _format: ResponseJson

    def __init__(
        self, state: ServerState, body: ChatRequest, request: Request, client: Client, asked: Asked, format_: ResponseJson,
        messages: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__(state, body, request, client, asked, format_)
        self._messages = messages
        self._numbers = 0

    async def whole(self) -> dict[str, Any]:
        """The response of a request that is not streamed."""
        await super().whole()
        return await self._completed()

    async def _completed(self) -> dict[str, Any]:
        """The response with its usage. It is stored if requested."""
        response = self._format.response
        await self._format.take_usage(self._prompts, self._ends)
        if response["store"]:
            shown, messages = await self._state.threads.run(self._client.name, self._to_keep, response)
            if not self._state.responses.keep(self._client.name, response["id"], shown, messages):
                response["store"] = False
                warning = (
                    f"the response is not kept: it has {len(shown) + len(messages)} bytes (max_response_bytes_per_key)"
                )
                response.setdefault("warnings", []).append(warning)
        return response

    def _to_keep(self, response: dict[str, Any]) -> tuple[bytes, bytes]:
        """The response without its captured states, and the messages with its own. A call that was cut is left out."""
        items = [
            item_of(item)
            for item in response["output"]
            if item["type"] != "function_call" or item["status"] == "completed"
        ]
        messages = [*self._messages, *messages_of((), items)]
        shown = {name: value for name, value in response.items() if name != "activations"}
        return _json(shown), _json(messages)

    async def _opening(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join(self._sent({"type": name, "response": self._format.response}) for name in names)

    async def _events(self, piece: CompletionPiece) -> bytes:
        return b"".join(self._sent(event) for event in (await self._choice(piece, chunk=True))["events"])

    async def _closing(self) -> bytes:
        response = await self._completed()
        return self._sent({"type": f"response.{response['status']}", "response": response})

    def _failing(self, error: ApiError) -> bytes:
        code = (
            "server_error"
            if error.status >= 500
            else "rate_limit_exceeded"
            if error.status == 429
            else "invalid_prompt"
        )
        for item in self._format.output.items:
            item["status"] = "incomplete" if item["status"] == "in_progress" else item["status"]
        found = {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "incomplete_details": None,
            "completed_at": None,
        }
        self._format.response |= found | {"output": self._format.output.items}
        return self._sent({"type": "response.failed", "response": self._format.response})

    def _sent(self, event: Event) -> bytes:
        """A server-sent event with its number."""
        self._numbers += 1
        text = _json({"type": event["type"], "sequence_number": self._numbers - 1, **event})
        return b"event: " + event["type"].encode() + b"\ndata: " + text + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
