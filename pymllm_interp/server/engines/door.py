"""`Door`: the HTTP process's interface to an engine. Used on one event loop. There are two:

- `ProcessDoor` reaches one process over two Unix sockets, and starts it again when it ends. `ends.ProcessEnd` is its other end.
- `ReplicasDoor` reaches processes that others start, by a `Link` each (TCP, keys, heartbeats). Their end is
  `fronts_end.FrontsEnd`.

One process has separate sockets. A link's keys, heartbeats and byte counts would cost each token a hop between threads.

A client's request is a `Call`: `open` sends its first message, `Call.next` has the answers, and `close` ends it:

    call = door.open(lambda number: messages.Submit(number, ...))
    try:
        while not isinstance(message := await call.next(), messages.Finished): ...
    finally:
        door.close(call, abort=True)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq.asyncio

from ...core.events import EngineClosedError
from ...wire import messages as m
from ..settings import ServeSettings
from .call import Call, EngineDiedError
from .owned_folders import OwnedFolder
from .vector_orders import VectorOrder, VectorOrders


def encoded(message: m.ToEngine) -> bytes:
    """A message as bytes. Raises ValueError: a client's values that no message can hold."""
    try:
        return m.encoder.encode(message)
    except OverflowError as error:
        raise ValueError("a whole number of the request has more than 64 bits") from error
    except RecursionError as error:
        raise ValueError("the request is nested too deeply") from error


class Door(ABC):
    """Calls of an engine, its named vectors and its adapters.

    Attributes:
        info: engine's description (`Backend.describe`); None until it is ready.
        schemas: schemas of interventions and captures, for the OpenAPI document.
        folder: folder for sockets and files, readable by this user only.
        store: folder of captured states that wait to be fetched.
        tokenizer_folder: folder of the tokenizer's files, if the model has a tokenizer.
        restarts: number of restarts of an engine process.
        adapters: loaded LoRA adapters, name -> folder; also for the engine processes that follow this one.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.info: dict[str, Any] | None = None
        self.schemas: dict[str, Any] = {}
        self._owned = OwnedFolder()
        self.folder = self._owned.path
        self.store = settings.store or self.folder / "store"
        self.tokenizer_folder = self.folder / "tokenizer"
        self.restarts = 0
        self.adapters: dict[str, str] = dict(settings.adapters)
        self._context = zmq.asyncio.Context()
        self._calls: dict[int, Call] = {}
        self._numbers = count(1)
        self._orders = VectorOrders()

    # -- life ------------------------------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """Wait until calls can be made. Raises Exception: an error of the model or engine; EngineDiedError if it just ended."""

    async def shutdown(self) -> None:
        """End, and remove the files."""
        self._context.destroy(linger=0)
        self._owned.remove()

    @property
    def ready(self) -> bool:
        """Whether calls can be made."""
        return self.info is not None

    @property
    @abstractmethod
    def stuck(self) -> bool:
        """Whether the engine is found to be stuck, and is being ended."""

    def states(self) -> dict[str, dict[str, Any]]:
        """State of each replica: `up`, `draining`, running `requests`, and `why_down`. Empty without replicas."""
        return {}

    # -- calls -----------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        """Number of open calls."""
        return len(self._calls)

    def open(self, make: Callable[[int], m.ToEngine]) -> Call:
        """Start a call with the message that `make` makes of its number. `close` it at the end.
        Raises EngineDiedError: the engine is not ready."""
        if not self.ready:
            raise EngineDiedError("the engine is starting; try again in some seconds")
        return self._open(make)

    @abstractmethod
    def _open(self, make: Callable[[int], m.ToEngine]) -> Call: ...

    @abstractmethod
    def close(self, call: Call, abort: bool) -> None:
        """End a call.

        Args:
            abort: whether to end a call that still runs.
        """

    @abstractmethod
    def abort(self, call: int, requests: list[int] | None) -> None:
        """End a call, or some of its requests. Its last messages still come."""

    @abstractmethod
    def was_read(self, call: Call, size: int) -> None:
        """The client has read frames of a trace, with this many bytes."""

    def fail_calls(self, error: EngineClosedError) -> None:
        """End all calls with an error."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.put(error)

    async def ask(self, make: Callable[[int], m.ToEngine]) -> Any:
        """The answer to a call that has one. Raises Exception: the engine's answer."""
        return await self._answer(self.open(make))

    async def _answer(self, call: Call) -> Any:
        try:
            message = await call.next()
            assert isinstance(message, m.Answer)
            return message.value
        finally:
            self.close(call, abort=False)

    @abstractmethod
    async def ask_all(self, make: Callable[[int], m.ToEngine], seconds: float | None = None) -> dict[str, Any]:
        """The answers of all engine processes that are ready, by replica. A single engine process has the name "".

        Args:
            seconds: timeout of an answer. Slower replicas are omitted.
        """

    # -- adapters --------------------------------------------------------------------------

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter from a folder of this machine.

        Raises:
            ValueError: the engine has replicas, which load adapters when they start.
            Exception: the engine refuses it.
        """
        raise ValueError("replicas load their adapters when they start: name them with --lora-modules NAME=FOLDER")

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter.

        Raises:
            ValueError: the engine has replicas, which keep their adapters.
            Exception: the engine refuses it.
        """
        raise ValueError(f"adapter {name!r}: replicas keep the adapters that they started with")

    @abstractmethod
    async def control(self, order: str, **arguments: Any) -> Any:
        """Have the engine carry out an order, see `Backend.control`. Raises Exception: the engine refuses it."""

    # -- vectors ---------------------------------------------------------------------------

    async def put_vector(self, owner: str, name: str, body: bytes, kind: str) -> Any:
        """Store a vector, also for the engine processes that follow. Returns its name and shape.
        Raises Exception: the engine refuses it."""
        return await self._order(m.PutVector(0, owner, name, body, kind, time.time_ns()))

    async def drop_vector(self, owner: str, name: str) -> None:
        """Delete a named vector."""
        await self._order(m.DropVector(0, owner, name, time.time_ns()))

    @abstractmethod
    async def _order(self, order: VectorOrder) -> Any:
        """Have the engine take an order, and keep it. Returns the engine's answer."""

    def vectors(self, owner: str) -> dict[str, m.PutVector]:
        """An owner's vectors by name, as they were uploaded."""
        return self._orders.vectors(owner)
