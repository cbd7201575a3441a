"""Routes for embeddings and scores: OpenAI's `/v1/embeddings`; vLLM's `/pooling`, `/classify`, `/score` and `/rerank`."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from ...client.pooling.labels import pairs_of
from ...client.pooling.pooler import PooledText
from ..http.body import JsonRoute
from ..http.state import ServerState, check_priority, require
from ..http.trust import Trust
from ..routes.openai_routes import while_connected
from .requests import ClassifyRequest, EmbeddingRequest, PooledRequest, PoolingRequest, RerankRequest, ScoreRequest
from .work import PooledWork


def pooling_routes(state: ServerState) -> APIRouter:
    """Router of the routes that generate nothing."""
    router = APIRouter(tags=["Embeddings"], route_class=JsonRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """A vector for each input, or for a conversation."""
        work = _work(state, body, request, "embd")
        return await _answer(request, _embeddings(work, body, "embedding", "embedding"))

    @router.post("/pooling")
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """The pooled states of each input: a vector, or a row for each of its tokens or steps."""
        work = _work(state, body, request, "pool")
        how = {"step_tag_id": body.step_tag_id, "returned_token_ids": body.returned_token_ids}
        return await _answer(request, _embeddings(work, body, "pooling", "data", **how))

    @router.post("/classify")
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Labels of each input, by the model's classification head."""
        return await _answer(request, _classes(_work(state, body, request, "classify"), body))

    @router.post("/score", operation_id="score")
    @router.post("/v1/score", operation_id="v1_score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Scores of pairs of texts, by a cross-encoder's head, or by the cosine of embeddings."""
        work = _work(state, body, request, "score")
        return await _answer(request, _scores(work, body))

    @router.post("/rerank", operation_id="rerank")
    @router.post("/v1/rerank", operation_id="v1_rerank")
    @router.post("/v2/rerank", operation_id="v2_rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents by their score with a query, best first."""
        return await _answer(request, _ranking(_work(state, body, request, "rerank"), body))

    return router


def _work(state: ServerState, body: PooledRequest, request: Request, kind: str) -> PooledWork:
    client = require(request, Trust.DECLARED if body.hooked else Trust.PLAIN)
    check_priority(client, [body.priority or 0])
    return PooledWork(state, body, request, client, kind)


async def _answer(request: Request, work: Any) -> Response:
    """The response to a request. Its work ends when its client disconnects."""
    found = await while_connected(request, work)
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
        lambda text, capture: how.num_values(capture, len(text.token_ids)),
    )
    return work.envelope(data=[work.entry(i, object=kind, **{name: values}) for i, values in enumerate(found)])


async def _classes(work: PooledWork, body: ClassifyRequest) -> dict[str, Any]:
    labels = work.labels()

    def found(text: PooledText, rows: np.ndarray) -> dict[str, Any]:
        probs = labels.probs(rows[-1], body.use_activation)
        return {
            "label": labels.names[int(rows[-1].argmax())],
            "probs": probs.tolist(),
            "num_classes": len(labels.names),
        }

    count = len(body.inputs()) or 1
    classes = await work.rows(count, lambda: work.inputs(body, ""), work.logits_capture, found, work.is_encoder)
    return work.envelope(data=[work.entry(i, **fields) for i, fields in enumerate(classes)])


async def _scores(work: PooledWork, body: ScoreRequest) -> dict[str, Any]:
    pairs = pairs_of(*body.sides())
    found = await work.pair_scores(pairs, body.use_activation)
    return work.envelope(data=[work.entry(i, object="score", score=value) for i, value in enumerate(found)])


async def _ranking(work: PooledWork, body: RerankRequest) -> dict[str, Any]:
    texts = body.texts()
    scores = await work.pair_scores(pairs_of([body.query], texts), body.use_activation)
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    results = []
    for i in best:
        fields: dict[str, Any] = {"relevance_score": scores[i]}
        if body.return_documents:
            fields["document"] = {"text": texts[i]}
        results.append(work.entry(i, **fields))
    found = work.envelope(results=results)
    return {name: found[name] for name in ("id", "model", "usage", "results")}


def _values(rows: np.ndarray, encoding: str | None) -> Any:
    """Values as JSON, so that the event loop does not write each number, or as base64 of float32."""
    if encoding == "base64":
        return base64.b64encode(rows.astype("<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(rows.tolist()))
