"""Orders of vectors and adapters: the engine's answers, within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ..http.errors import ApiError, api_error
from ..http.state import ServerState

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
