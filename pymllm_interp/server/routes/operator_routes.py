"""vLLM's routes for operators: LoRA adapters, pauses, and new weights. A path of the server's machine is an operator's to name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import PlainTextResponse, Response

from ..http.body import JsonRoute
from ..http.errors import ApiError, api_error
from ..http.state import ServerState, require_operator
from ..protocol import (
    FinishUpdateRequest,
    InitTransferRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)


def operator_routes(state: ServerState) -> APIRouter:
    """Router of the operators' endpoints."""
    router = APIRouter(tags=["operators"], route_class=JsonRoute)
    _add_pauses(router, state)
    _add_weights(router, state)

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


async def _order(state: ServerState, request: Request, order: str, **arguments: Any) -> Any:
    """The result of an order of `Backend.control`."""
    require_operator(request)
    return await taken(state, state.engine.control(order, **arguments))


def _add_pauses(router: APIRouter, state: ServerState) -> None:
    """vLLM's routes for pauses and sleep."""
    order = partial(_order, state)

    @router.post("/pause")
    async def pause(
        request: Request, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> dict[str, Any]:
        """Pause the engine, as `lm.pause`. Without effect: `clear_cache`, because cached KV of old weights is never used."""
        return {"status": "paused" if await order(request, "pause", mode=mode) else "resumed"}  # by a newer order

    @router.post("/resume")
    async def resume(request: Request) -> dict[str, Any]:
        """Let a paused engine run. The status is "paused" if a newer pause came before."""
        return {"status": "resumed" if await order(request, "resume") else "paused"}

    @router.get("/is_paused")
    async def is_paused(request: Request) -> dict[str, Any]:
        """Whether the engine is paused."""
        return {"is_paused": await order(request, "is_paused")}

    @router.post("/sleep")
    async def sleep(
        request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Literal["abort", "wait", "keep"] = "abort",
        tags: Annotated[list[str] | None, Query(max_length=8)] = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Give the device's memory back, as `lm.sleep`. `mode` is as of `/pause`; live requests of "keep" are an error."""
        given = {} if tags is None else {"tags": tags}
        await order(request, "sleep", level=level, mode=mode, **given)
        return {"status": "sleeping", "level": level}

    @router.post("/wake_up")
    async def wake_up(
        request: Request, tags: Annotated[list[str] | None, Query(max_length=8)] = None, all_graphs: bool = False
    ) -> dict[str, Any]:
        """Take memory again, as `lm.wake`."""
        awake = await order(request, "wake", tags=tags, all_graphs=all_graphs)
        return {"status": "awake" if awake else "sleeping", "tags": tags}

    @router.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, Any]:
        """Whether the engine sleeps."""
        return {"is_sleeping": await order(request, "is_sleeping")}


def _add_weights(router: APIRouter, state: ServerState) -> None:
    """vLLM's routes for new weights."""
    order = partial(_order, state)

    @router.post("/init_weight_transfer_engine")
    async def init(request: Request, body: InitTransferRequest) -> dict[str, Any]:
        """Choose how new weights come: {"backend": "ipc"} or {"backend": "shared_memory"}."""
        await order(request, "init_weight_transfer_engine", init_info=body.init_info)
        return {"message": "Weight transfer initialized"}

    @router.post("/shutdown_weight_transfer_engine")
    async def shutdown(request: Request) -> dict[str, Any]:
        """Drop an update that is under way."""
        await order(request, "shutdown_weight_transfer_engine")
        return {"message": "Weight transfer shut down"}

    @router.post("/start_weight_update")
    async def start(request: Request) -> dict[str, Any]:
        """Begin an update of the model's weights."""
        await order(request, "start_weight_update")
        return {"message": "Weight update started"}

    @router.post("/start_draft_weight_update")
    async def start_draft(request: Request) -> dict[str, Any]:
        """Begin an update of the draft model's weights."""
        await order(request, "start_weight_update", draft=True)
        return {"message": "Draft weight update started"}

    @router.post("/update_weights")
    async def update(request: Request, body: UpdateWeightsRequest) -> dict[str, Any]:
        """Collect weights by handles of shared memory or CUDA IPC, or of a folder. Nothing is written yet."""
        await order(request, "receive_weights", update_info=body.update_info)
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update")
    async def finish(request: Request, body: FinishUpdateRequest | None = None) -> dict[str, Any]:
        """Check the collected weights, and write all of them between two steps."""
        version = None if body is None else body.weight_version
        found = await order(request, "finish_weight_update", weight_version=version)
        return {"message": "Weight update finished", **found}

    @router.get("/weight_info")
    async def weight_info(request: Request) -> dict[str, Any]:
        """The name of the weights that the last update gave."""
        return {"weight_version": (await order(request, "weight_info"))["weight_version"]}


_late: set[asyncio.Future[Any]] = set()


async def taken(state: ServerState, order: Awaitable[Any]) -> Any:
    """The engine's answer to an order.

    A late order is not cancelled, so this process still learns the engine's stored state.

    Raises:
        ApiError: the engine refuses it, or does not answer within `order_seconds`.
    """
    seconds, task = state.settings.limits.order_seconds, asyncio.ensure_future(order)
    _late.add(task)
    task.add_done_callback(_forget)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        raise ApiError(
            504,
            f"the engine has not answered within {seconds:g} s (--order-seconds); it may still do what was asked",
            code="late",
        )
    try:
        return task.result()
    except Exception as error:
        raise api_error(error, refused=True) from error


def _forget(task: asyncio.Future[Any]) -> None:
    _late.discard(task)
    if not task.cancelled():
        task.exception()  # ignored: the client has its answer
