"""`AttachedLLM`: a user's `vllm.LLM` with the methods of vLLM's asynchronous engine that a `VllmCore` calls."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

ORDERED = ("add_request", "abort_request", "collective_rpc", "reset_prefix_cache", "add_lora", "remove_lora")
"""Methods of vLLM's engine that its caller runs, and that run on the thread of steps from now on."""

WAIT_SECONDS = 1.0
"""Longest wait of the user's thread for the outputs of a step."""


class AttachedLLM:
    """Runs the steps of a `vllm.LLM` on one thread, for the requests of an `LM` and of `llm.generate`.

    vLLM's engine is for one thread. So all calls of it become orders, which are carried out between its steps.

    Args:
        llm: the `vllm.LLM`.
        loop: loop of the `VllmCore`.

    Raises:
        ValueError: it has an LM, which was not shut down.
    """

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = llm.llm_engine, loop
        if "step" in vars(self._engine):
            raise ValueError("LM.attach(llm): another LM is attached to llm: shut that one down first")
        self._orders: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[Any] = queue.SimpleQueue()  # outputs of the user's requests, or an error
        self._lock = threading.Lock()  # of a step and what became of its outputs
        self._own: dict[str, Any] = {}  # vLLM's id -> the outputs of a request of the LM
        self._step = self._engine.step
        self._unfinished = self._engine.has_unfinished_requests
        self._calls = {name: getattr(self._engine, name) for name in ORDERED}
        for name, call in self._calls.items():
            setattr(self._engine, name, partial(self._from_user, call))
        self._engine.step, self._engine.has_unfinished_requests = self._users_outputs, self._users_unfinished
        self._thread = threading.Thread(target=self._serve, name="pymllm-interp-attached", daemon=True)
        self._thread.start()

    # -- the thread of steps -----------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            order = self._orders.get()
            if order is None:
                return
            self._carry_out(order)
            while self._unfinished():
                with self._lock:
                    try:
                        outputs = self._step()
                    except BaseException as error:  # vLLM's processes have ended
                        self._fail(error)
                        break
                    if outputs:
                        self._others.put(outputs)
                    self._forget_ended()
                while not self._orders.empty():
                    order = self._orders.get()
                    if order is None:
                        return
                    self._carry_out(order)

    def _carry_out(self, order: tuple[Future[Any], Callable[[], Any]]) -> None:
        done, function = order
        try:
            with self._lock:
                found = function()
                self._forget_ended()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(found)

    def _forget_ended(self) -> None:
        known = self._engine.output_processor.request_states
        self._own = {number: found for number, found in self._own.items() if number in known}

    def _fail(self, error: BaseException) -> None:
        for found in self._own.values():
            found.put(error)
        self._own.clear()
        self._others.put(error)

    def _order(self, function: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        self._orders.put((done, function))
        return done

    # -- the user ----------------------------------------------------------------------------

    def _from_user(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._order(partial(call, *args, **kwargs)).result()

    def _users_outputs(self) -> Any:
        """Outputs of a step for the user's thread, which runs none itself."""
        try:
            found = self._others.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            return []
        if isinstance(found, BaseException):
            raise found
        return found

    def _users_unfinished(self) -> bool:
        with self._lock:
            return not self._others.empty() or self._engine.get_num_unfinished_requests() > len(self._own)

    # -- the LM ------------------------------------------------------------------------------

    async def add_request(self, request_id: str, prompt: Any, params: Any, **kwargs: Any) -> Any:
        """Start a request. Returns its outputs, as vLLM's `AsyncLLM.add_request`."""
        from vllm.v1.engine.output_processor import RequestOutputCollector  # pyright: ignore[reportMissingImports]

        loop = self._loop

        class Outputs(RequestOutputCollector):
            def put(self, output: Any) -> None:
                loop.call_soon_threadsafe(super().put, output)

        def add() -> Any:
            number = self._calls["add_request"](request_id, prompt, params, **kwargs)
            found = Outputs(params.output_kind, number)
            self._engine.output_processor.request_states[number].queue = found
            self._own[number] = found
            return found

        return await asyncio.wrap_future(self._order(add))

    async def abort(self, request_id: str, internal: bool = False) -> None:
        """End a request; its last output has the tokens so far."""
        await self._called("abort_request", [request_id], internal)

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> Any:
        """Call a method of all ranks."""
        return await self._called("collective_rpc", method, timeout, args)

    async def reset_prefix_cache(self) -> Any:
        """Forget the KV that vLLM keeps."""
        return await self._called("reset_prefix_cache")

    async def add_lora(self, request: Any) -> bool:
        """Load an adapter."""
        return await self._called("add_lora", request)

    async def remove_lora(self, number: int) -> bool:
        """Forget an adapter."""
        return await self._called("remove_lora", number)

    @property
    def engine_core(self) -> Any:
        """vLLM's connection to its engine."""
        return self._engine.engine_core

    @property
    def errored(self) -> bool:
        """Whether vLLM's processes have ended."""
        return bool(getattr(getattr(self._engine.engine_core, "resources", None), "engine_dead", False))

    @property
    def dead_error(self) -> Exception:
        """Error of calls then."""
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

        return EngineDeadError()

    async def _called(self, name: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._order(partial(self._calls[name], *args)))

    def shutdown(self) -> None:
        """Give the engine back to its user: its threads call it again."""
        self._orders.put(None)
        while self._thread.is_alive() and not self.errored:
            self._thread.join(WAIT_SECONDS)
        self._thread.join(WAIT_SECONDS)  # a call that vLLM has left without an answer never ends
        while not self._thread.is_alive() and not self._orders.empty():  # of calls of the user's in the meantime
            if (order := self._orders.get()) is not None:
                self._carry_out(order)
        for name in (*ORDERED, "step", "has_unfinished_requests"):
            delattr(self._engine, name)
