"""The HTTP application: routes, the page at `/`, health and metrics, and errors in one shape."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from ... import __version__
from ...core.events import EngineClosedError
from ..audio.routes import audio_routes
from ..pooling.routes import pooling_routes
from ..protocol import COMPONENT
from ..responses.routes import responses_routes
from ..routes.circuits import circuit_routes
from ..routes.interp_routes import interp_routes
from ..routes.openai_routes import DisconnectedError, openai_routes
from ..routes.operator_routes import operator_routes
from ..routes.refused_routes import refused_routes, unknown_route
from ..routes.tokenize_routes import tokenize_routes
from .errors import ApiError, api_error, validation_error
from .gate import RequestGate
from .state import ServerState

DESCRIPTION = (
    "OpenAI's API, with vLLM's further fields. `interventions`, `monitors` and `capture` of a request edit, score and read "
    "its hidden states; docs/use/serve.md of the repository has examples."
)
SCRIPTS = {
    "app.js": "text/javascript", "docs.js": "text/javascript", "style.css": "text/css", "favicon.svg": "image/svg+xml",
}  # fmt: skip
"""Files of the pages -> their types."""
CONTENT_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def create_app(state: ServerState) -> FastAPI:
    """The application over a server's state."""
    settings = state.settings
    app = FastAPI(
        title="pymllm-interp", version=__version__, description=DESCRIPTION, root_path=settings.root_path,
        docs_url=None, redoc_url=None,  # they load scripts of other hosts
        redirect_slashes=False,  # a redirect names the host that the client named
    )  # fmt: skip
    routers = [
        make(state)
        for make in (
            openai_routes,
            audio_routes,
            responses_routes,
            pooling_routes,
            tokenize_routes,
            operator_routes,
            interp_routes,
            circuit_routes,
        )
    ]
    for router in routers:
        app.include_router(router)
    app.openapi = lambda: _document(app, state)
    _add_pages(app, state)
    app.include_router(refused_routes())  # last: the first route that fits a path serves it
    _add_errors(
        app, state, [path for router in routers for route in router.routes if (path := getattr(route, "path", ""))]
    )
    app.add_middleware(RequestGate, state=state)
    if settings.allowed_origins:  # around the gate: a browser asks without a key, and reads errors too
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers, allow_credentials=settings.allow_credentials,
        )  # fmt: skip
    return app


def _document(app: FastAPI, state: ServerState) -> dict[str, Any]:
    """The OpenAPI document, with the schemas that the engine process knows."""
    known = app.openapi_schema
    if known is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        found["components"]["schemas"] |= state.engine.schemas
        known = app.openapi_schema = _with_references(found)
    return known


def _with_references(part: Any) -> Any:
    """A part of the document, with references in place of marked schemas."""
    if isinstance(part, dict):
        if COMPONENT in part:
            return {"$ref": f"#/components/schemas/{part[COMPONENT]}"}
        return {name: _with_references(value) for name, value in part.items()}
    return [_with_references(value) for value in part] if isinstance(part, list) else part


def _add_pages(app: FastAPI, state: ServerState) -> None:
    @app.get("/health", tags=["Operation"])
    async def health() -> Response:
        """200 while the engine serves; 503 while it starts or is stuck, or the server ends."""
        word = "ok" if state.engine.ready else "starting"
        word = "ending" if state.draining else "stuck" if state.engine.stuck else word
        return JSONResponse({"status": word, "engine_restarts": state.engine.restarts}, 200 if word == "ok" else 503)

    @app.get("/ping", tags=["Operation"])
    async def ping() -> Response:
        """`/health` as SageMaker asks for it."""
        return await health()

    app.post("/ping", tags=["Operation"], operation_id="ping_post")(ping)

    @app.get("/version", tags=["Operation"])
    async def version() -> dict[str, Any]:
        """Version of pymllm-interp."""
        return {"version": __version__}

    @app.get("/load", tags=["Operation"])
    async def load() -> dict[str, Any]:
        """Number of running requests and traces."""
        return {"server_load": state.num_running}

    @app.get("/metrics", tags=["Operation"])
    async def metrics() -> Response:
        """Counters in the format of Prometheus."""
        gauges = {
            "store_bytes": state.store.num_bytes, "store_files": state.store.num_files,
            "response_bytes": state.responses.num_bytes, "responses": state.responses.num_responses,
            "tokens_per_second": state.tokens_per_second, "calls": state.engine.num_calls,
            "engine_restarts": state.engine.restarts, "engine_ready": float(state.engine.ready),
        }  # fmt: skip
        return PlainTextResponse(
            state.metrics.text(await state.stats_by_replica(), gauges, state.engine.states()),
            media_type="text/plain; version=0.0.4",
        )

    @app.get("/status", tags=["Operation"])
    async def status() -> dict[str, Any]:
        """Model and load, as drawn by the page at `/`."""
        stats = await state.stats() or {}
        hooked = sum(n for how, n in stats.get("execution", {}).items() if how.split(":")[0] not in ("plain", "replay"))
        return {
            "model": state.settings.name, "ready": state.engine.ready, "keys": not state.settings.keys.anybody,
            "running": stats.get("running", 0), "waiting": stats.get("waiting", 0), "kv_tokens": stats.get("kv_tokens", 0),
            "free_kv_tokens": stats.get("free_kv_tokens", 0), "tokens_per_second": round(state.tokens_per_second, 1),
            "steps": stats.get("steps", 0), "hooked_steps": hooked, "traces": stats.get("traces", 0),
        }  # fmt: skip

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(_file("index.html"), headers={"Content-Security-Policy": CONTENT_POLICY})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return await script("favicon.svg")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(_file("docs.html"), headers={"Content-Security-Policy": CONTENT_POLICY})

    @app.get("/static/{name}", include_in_schema=False)
    async def script(name: str) -> Response:
        if name not in SCRIPTS:
            raise ApiError(404, f"there is no /static/{name[:80]}")
        return Response(_file(name), media_type=SCRIPTS[name])


def _file(name: str) -> str:
    return resources.files("pymllm_interp.server").joinpath("static", name).read_text()


def _add_errors(app: FastAPI, state: ServerState, served: list[str]) -> None:
    """Answers to errors of routes.

    Args:
        served: paths of the routes, for those who misspell one.
    """

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        body = getattr(request.scope.get("route"), "body_field", None)
        fields = getattr(getattr(body, "field_info", None), "annotation", None)
        return validation_error(error.errors(), list(getattr(fields, "model_fields", ()))).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if "route" not in request.scope and error.status_code == 404:
            message = unknown_route(request.url.path, served)
        if error.status_code == 405 and error.headers is not None:
            message = f"{request.url.path[:80]} takes {error.headers.get('Allow')}, not {request.method[:20]}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def refused(request: Request, error: Exception) -> Response:
        return api_error(error, refused=True).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client is gone

    @app.exception_handler(DisconnectedError)
    async def left(request: Request, error: DisconnectedError) -> Response:
        state.metrics.totals["disconnects"] += 1
        return Response(status_code=499)

    for kind in (ValueError, TypeError, EngineClosedError):
        app.add_exception_handler(kind, refused)


async def sweep(state: ServerState, seconds: float = 5.0) -> None:
    """Delete captured states and responses that are too old, for ever."""
    while True:
        await asyncio.sleep(min(seconds, state.limits.store_seconds))
        state.store.sweep_folder()
        state.responses.sweep_folder()
