"""vLLM's routes that load and unload LoRA adapters. A path of the server's machine is an operator's to name."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from ..http.body import JsonRoute
from ..http.errors import ApiError
from ..http.state import ServerState, require_operator
from ..protocol import LoadAdapterRequest, UnloadAdapterRequest
from .orders import taken


def adapter_routes(state: ServerState) -> APIRouter:
    """Router of the LoRA adapter endpoints."""
    router = APIRouter(tags=["LoRA"], route_class=JsonRoute)

    @router.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterRequest, request: Request) -> Response:
        """Load a LoRA adapter: its name is a model's then. For operators."""
        require_operator(request)
        if body.lora_name in (state.settings.name, state.info["model"]):
            raise ApiError(
                400, f"{body.lora_name!r} is the model's own name: give the adapter another one", "lora_name"
            )
        await taken(state, state.engine.load_adapter(body.lora_name, body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterRequest, request: Request) -> Response:
        """Unload a LoRA adapter that no request uses: for operators."""
        require_operator(request)
        if body.lora_name not in state.engine.adapters:
            raise ApiError(404, f"there is no adapter {body.lora_name!r}", "lora_name", "not_found")
        await taken(state, state.engine.unload_adapter(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
