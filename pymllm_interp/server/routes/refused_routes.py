"""Routes of vLLM, OpenAI and others that this server lacks: each is answered with the alternative."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from difflib import get_close_matches

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...core import unsupported
from ..http.errors import ApiError

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_BATCHES = (
    "there are no batch jobs: send the requests at once, they share steps; lm.imap and lm.harvest read long inputs"
)
_STATEFUL = "the server keeps no assistants and threads: /v1/responses continues a response by previous_response_id"
_IMAGES = "images and videos are not generated: the models here write text"
_FILES = "files are not stored; a request has its text in its body"
_STORED = "chats are not stored: /v1/responses keeps responses, which previous_response_id continues"
_OTHERS = "this server has OpenAI's API: use /v1/chat/completions or /v1/completions"

ROUTES: dict[str, str] = {
    # vLLM's
    "/v2/embed": "Cohere's API is not served: use /v1/embeddings",
    "/release_kv_cache_memory": "here it is /sleep?tags=kv_cache",
    **dict.fromkeys(("/start_profile", "/stop_profile"), unsupported.PROFILE),
    "/collective_rpc": "the engine's methods are not called over HTTP: /v1/interp/trace runs code, for keys with that right",
    "/reset_prefix_cache": "here it is /v1/interp/reset_prefix_cache, for operators",
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), unsupported.IMAGE_STATES),
    "/server_info": "/v1/interp/capabilities has the model, its sites and limits, and /version the version",
    "/tokenizer_info": "/v1/interp/tokenizer has the tokenizer's files",
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), unsupported.EXPERT_PARALLEL),
    "/get_world_size": unsupported.PIPELINE,
    "/abort_requests": "a request ends when its client closes the connection",
    "/invocations": "the body's kind is not guessed from its fields: use /v1/chat/completions or /v1/completions",
    "/inference/v1/generate": "/v1/completions takes token ids as prompt; return_token_ids gives them back",
    "/v1/chat/completions/render": "/tokenize renders messages, and gives their token ids",
    "/v1/completions/render": "/tokenize gives the token ids of a prompt",
    "/v1/messages": "Anthropic's API is not served: use /v1/chat/completions",
    "/v1/messages/count_tokens": "Anthropic's API is not served: /tokenize counts the tokens of messages",
    # OpenAI's
    "/v1/audio/{rest:path}": unsupported.MULTIMODAL,
    "/v1/realtime": unsupported.MULTIMODAL,
    "/v1/images/{rest:path}": _IMAGES,
    "/v1/videos": _IMAGES,
    "/v1/moderations": "texts are not moderated",
    "/v1/edits": "OpenAI's old route: use /v1/chat/completions",
    **dict.fromkeys(("/v1/engines", "/v1/engines/{rest:path}"), "OpenAI's old route: /v1/models lists the models"),
    **dict.fromkeys(("/v1/batches", "/v1/batches/{rest:path}"), _BATCHES),
    **dict.fromkeys(("/v1/files", "/v1/files/{rest:path}", "/v1/uploads", "/v1/uploads/{rest:path}"), _FILES),
    **dict.fromkeys(("/v1/vector_stores", "/v1/vector_stores/{rest:path}"), _FILES),
    **dict.fromkeys(("/v1/fine_tuning/{rest:path}", "/v1/evals", "/v1/evals/{rest:path}"), "models are served, and not trained"),
    **dict.fromkeys(
        ("/v1/assistants", "/v1/assistants/{rest:path}", "/v1/threads", "/v1/threads/{rest:path}", "/v1/conversations",
         "/v1/conversations/{rest:path}"),
        _STATEFUL,
    ),
    "/v1/chat/completions/{rest:path}": _STORED,
    "/v1/responses/{response_id}/cancel": "responses do not run in the background: closing the connection ends one",
    "/v1/responses/{response_id}/input_items": "the items of a response's input are not listed; their sender has them",
    "/v1/responses/input_tokens": "/tokenize counts the tokens of messages",
    "/v1/responses/compact": "conversations are not compacted: send the items that count as input",
    # other servers'
    **dict.fromkeys(("/generate", "/generate_stream", "/completion", "/infill", "/api/{rest:path}"), _OTHERS),
}  # fmt: skip
"""Path of another server's route, as a template -> reason and alternative."""


def refused_routes() -> APIRouter:
    """The routes; each answers 501 to every method. They come after those that are served."""
    router = APIRouter()
    for path, reason in ROUTES.items():
        router.add_api_route(path, _answer(reason), methods=_METHODS, include_in_schema=False)
    return router


def _answer(reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise ApiError(501, f"{request.url.path[:80]} is not served: {reason}", code="not_implemented")

    return refuse


def unknown_route(path: str, served: Iterable[str]) -> str:
    """Error message for an unknown path, with the nearest known ones.

    Args:
        served: paths of the routes.
    """
    known = [one for one in served if "{" not in one]
    near = [one for one in known if one == f"/v1{path}" or f"/v1{one}" == path] or get_close_matches(
        path[:80], known, n=1
    )
    hint = f"did you mean {near[0]}?" if near else "/docs lists the routes"
    return f"there is no route {path[:80]}: {hint}"
