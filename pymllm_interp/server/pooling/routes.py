"""Routes for embeddings: OpenAI's `/v1/embeddings`, and vLLM's `/pooling`."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..http.body import JsonRoute
from ..http.state import ServerState, check_priority, require
from ..http.trust import Trust
from ..routes.openai_routes import DisconnectedError, while_connected
from .requests import EmbeddingRequest, PooledRequest, PoolingRequest
from .work import PooledWork


def pooling_routes(state: ServerState) -> APIRouter:
    """Router of the routes that generate nothing."""
    router = APIRouter(tags=["Embeddings"], route_class=JsonRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """A vector for each input, or for a conversation."""
        work = _work(state, body, request, "embd")
        return await _answer(state, request, _embeddings(work, body, "embedding", "embedding"))

    @router.post("/pooling")
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """The pooled states of each input: a vector, or a row for each of its tokens or steps."""
        work = _work(state, body, request, "pool")
        how = {"step_tag_id": body.step_tag_id, "returned_token_ids": body.returned_token_ids}
        return await _answer(state, request, _embeddings(work, body, "pooling", "data", **how))

    return router


def _work(state: ServerState, body: PooledRequest, request: Request, kind: str) -> PooledWork:
    client = require(request, Trust.DECLARED if body.hooked else Trust.PLAIN)
    check_priority(client, [body.priority or 0])
    return PooledWork(state, body, request, client, kind)


async def _answer(state: ServerState, request: Request, work: Any) -> Response:
    """The response to a request. Its work ends when its client disconnects."""
    try:
        found = await while_connected(request, work)
    except DisconnectedError:
        state.metrics.totals["disconnects"] += 1
        return Response(status_code=499)
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _embeddings(work: PooledWork, body: EmbeddingRequest, kind: str, name: str, **more: Any) -> dict[str, Any]:
    """The answer of both routes.

    Args:
        kind, name: object and field of an entry.
        more: further arguments of `Pooling`.
    """
    how = work.pooling(pooling=body.pooling, normalize=body.normalized, dimensions=body.dimensions, **more)
    before = work.pooler.prompt_text(body.prompt, body.prompt_name)
    found = await work.rows(
        len(body.inputs()) or 1,
        lambda: work.inputs(body, before),
        lambda text: how.capture(text.token_ids, text.skipped),
        lambda text, rows: _values(how.pooled(rows, text.skipped), body.encoding_format),
        how.reads_logits,
    )
    return work.envelope(data=[work.entry(i, object=kind, **{name: values}) for i, values in enumerate(found)])


def _values(rows: np.ndarray, encoding: str | None) -> Any:
    """Values as a list, or as base64 of float32."""
    if encoding == "base64":
        return base64.b64encode(rows.astype("<f4").tobytes()).decode()
    return rows.tolist()
