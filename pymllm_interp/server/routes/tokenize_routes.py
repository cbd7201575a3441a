"""vLLM's routes for tokens: `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ..http.body import JsonRoute
from ..http.errors import ApiError
from ..http.state import ServerState, require
from ..http.trust import Trust
from ..protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .conversations import conversation, text_only
from .openai_routes import adapter_of, texts


def tokenize_routes(state: ServerState) -> APIRouter:
    """Router of the tokenizer endpoints."""
    router = APIRouter(tags=["Tokens"], route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """The token ids of a text, or of a conversation as the chat template writes it."""
        adapter_of(state, body.model)
        client = require(request, Trust.PLAIN)
        with state.admitted(client, 1):
            ids = await state.threads.run(client.name, _token_ids, state, body)
            names = None
            if body.return_token_strs:
                names = await state.threads.run(client.name, state.tokenizer.convert_ids_to_tokens, ids)
        limit = state.info["limits"]["max_model_len"]
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """The text of token ids."""
        adapter_of(state, body.model)
        if state.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer", "tokens")
        most = max(state.info["limits"]["vocab_size"], len(state.tokenizer))
        lowest, highest = min(body.tokens, default=0), max(body.tokens, default=0)
        if lowest < 0 or highest >= most:
            wrong = lowest if lowest < 0 else highest
            raise ApiError(400, f"tokens holds {wrong}, but the vocabulary goes from 0 to {most - 1}", "tokens")
        client = require(request, Trust.PLAIN)
        with state.admitted(client, 1):
            return {"prompt": await state.threads.run(client.name, state.tokenizer.decode, body.tokens)}

    return router


def _token_ids(state: ServerState, body: TokenizeRequest) -> list[int]:
    if state.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: prompts are token ids", "prompt")
    if body.messages is None:
        fields = body.model_dump(include={"prompt", "add_special_tokens"})
        (found,) = texts(state, CompletionRequest.model_validate(fields), [body.prompt], limited=False)
        return found.token_ids
    fields = body.model_dump(
        exclude={"model", "prompt", "add_special_tokens", "return_token_strs"}, exclude_unset=True
    )  # fmt: skip
    return text_only(conversation(state, ChatRequest.model_validate(fields))).token_ids
