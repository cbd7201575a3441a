"""`POST /v1/interp/circuit`: an attribution graph, as a job with progress that ends when its client leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from ...client.chat import tokenized
from ...wire import messages as m
from ..http.body import JsonRoute
from ..http.errors import ApiError, api_error
from ..http.state import ServerState, require
from ..http.trust import Client, Trust
from ..protocol import CircuitRequest
from .interp_routes import close_call, relayed, streamed
from .prompt_text import check_length

OPTIONS = ("max_features", "max_logits", "logit_mass", "node_threshold", "edge_threshold", "batch", "skip")
"""Fields of a request that `LM.circuit` takes by these names."""


def circuit_routes(state: ServerState) -> APIRouter:
    """Router of circuits."""
    router = APIRouter(tags=["Interpretability"], route_class=JsonRoute)

    @router.post("/v1/interp/circuit")
    async def circuit(body: CircuitRequest, request: Request) -> Response:
        """The attribution graph of a prompt, as server-sent events: `progress`, then `circuit` with the graph or figure."""
        client = require(request, Trust.DECLARED)
        try:
            prompt = await state.threads.run(client.name, _token_ids, state, body)
        except Exception as error:
            raise api_error(error, refused=True) from error
        names = [body.transcoders] if isinstance(body.transcoders, str) else body.transcoders
        options, limits = {name: getattr(body, name) for name in OPTIONS}, state.limits

        def make(number: int) -> m.ToEngine:
            return m.RunCircuit(
                number, client.name, prompt, names, body.target, body.form, options, limits.max_circuit_bytes,
                limits.circuit_timeout,
            )  # fmt: skip

        if body.form == "tensors":
            return streamed(relayed(state, client, "circuits", make))
        events = _events(state, client, body.form, make)
        try:
            first = await anext(events)
        except Exception as error:
            raise api_error(error, refused=True) from error
        return StreamingResponse(
            _all(first, events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    return router


def _token_ids(state: ServerState, body: CircuitRequest) -> list[int]:
    """The prompt, within the limits of circuits."""
    ids, limits = body.prompt, state.limits
    if isinstance(ids, str):
        check_length(state.tokenizer, len(ids), state.max_prompt_len, "the prompt")
        _, ids, *_ = tokenized(state.tokenizer, ids, "the prompt")
    for name, given, most in (
        ("max_circuit_tokens", len(ids), limits.max_circuit_tokens),
        ("max_circuit_features", body.max_features, limits.max_circuit_features),
    ):
        if given > most:
            what, field = (
                ("tokens of the prompt", "prompt") if name == "max_circuit_tokens" else ("features", "max_features")
            )
            raise ApiError(400, f"a circuit of {given} {what}; at most {most} ({name})", field, "refused")
    return ids


async def _events(
    state: ServerState, client: Client, form: str, make: Callable[[int], m.ToEngine]
) -> AsyncGenerator[bytes]:
    """The events of a circuit; an error before the first one refuses it."""
    call, over, begun = None, False, False
    try:
        with state.admitted(client, 1, "circuits"):
            call = state.engine.open(make)
            while not over:
                message: Any = await call.next()
                over = isinstance(message, m.Answer)
                yield b"data: [DONE]\n\n" if over else _event(message, form)
                begun = True
                if not over:
                    state.engine.was_read(call, len(message.body))
    except Exception as error:
        over = not (call is not None and call.overrun)
        if not begun:
            raise
        yield b"data: " + json.dumps(api_error(error, refused=False).body()).encode() + b"\n\n"
    finally:
        close_call(state, call, not over)


def _event(frame: m.Frame, form: str) -> bytes:
    content = b"" if not frame.body else b', "%s": %s' % (form.encode(), frame.body)
    return b"data: " + frame.header[:-1] + content + b"}\n\n"


async def _all(first: bytes, others: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(others):
        yield first
        async for event in others:
            yield event
