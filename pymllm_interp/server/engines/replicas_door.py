"""`ReplicasDoor`: the `Door` of several replicas of one model.

Each replica is an engine process that listens for fronts (`FrontsEnd`). Others start them, and say which there are (`update`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from ...wire import messages as m
from ...wire.failures import EngineError, failure_of
from ..settings import ServeSettings
from ..store import stored_states
from .call import Call, EngineDiedError
from .door import Door, encoded
from .link import Link, LinkBrokenError, LinkOwner
from .roster import LinkKeys, Replica, choose, key_of, least_loaded, weight_of
from .vector_orders import VectorOrder

logger = logging.getLogger(__name__)
UNDONE_BY = {
    "sleep": "wake", "start_weight_update": "shutdown_weight_transfer_engine", "receive_weights": "shutdown_weight_transfer_engine",
    "check_weight_update": "shutdown_weight_transfer_engine",
}  # fmt: skip
"""Orders that some replicas refuse are taken back from the others."""
QUESTIONS = ("is_paused", "is_sleeping", "weight_info")
"""Orders for the replicas that take calls only."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at a replica that has other weights than the others."""
RUNS = 2
"""Attempts of a request: one more if its replica ended before any output."""
UNREAD = 4
"""Most bytes on their way to a replica, in multiples of `max_queued_bytes`."""
WAIT_SECONDS = 60.0
"""Seconds that a retried request waits for a replica."""


class ReplicasDifferError(RuntimeError):
    """Some replicas have carried out an order, and others have not."""


class ReplicatedCall(Call):
    """A call, and the state that a retry needs.

    Attributes:
        message: message that started the call.
        link: the replica that serves it; None while it waits for one.
        shown: whether output was sent to the client. Such calls are not retried.
    """

    def __init__(self, number: int, limit: int, message: m.ToEngine) -> None:
        super().__init__(number, limit)
        self.message, self.shown = message, False
        self.link: Link | None = None
        self.runs, self.weight, self.started = 0, weight_of(message), time.monotonic()
        self._accepted = self.aborted = False
        self.left: Link | None = None  # which ended under it

    def put(self, message: m.FromEngine | BaseException) -> None:
        if isinstance(message, m.Accepted):
            if self._accepted:  # of the second run
                return
            self._accepted = True
        else:
            self.shown = True
        super().put(message)

    @property
    def may_run_again(self) -> bool:
        """Whether nothing of it can be seen twice: no output came, and it runs no client's code."""
        again = isinstance(self.message, m.Submit) and not self.message.edits
        return again and not self.shown and not self.aborted and self.runs < RUNS

    def again(self) -> m.ToEngine:
        """The message for another run, with the rest of its time."""
        message = copy.copy(self.message)
        if isinstance(message, m.Submit) and message.options.get("timeout") is not None:
            left = message.options["timeout"] - (time.monotonic() - self.started)
            message.options = message.options | {"timeout": max(left, 1e-3)}
        return message


class ReplicasDoor(Door, LinkOwner):
    """Replicas, as one engine. A call that has had no output yet runs again where its replica ends.

    Args:
        keys: keys of the cluster's fronts.
        follow: calls `update` with the replicas, again whenever they change.
    """

    def __init__(
        self, settings: ServeSettings, keys: LinkKeys, follow: Callable[[ReplicasDoor], Coroutine[Any, Any, None]]
    ) -> None:
        super().__init__(settings)
        self._keys, self._follow = keys, follow
        self._fingerprint = ""  # of the first replica's weights, which all must have
        self._links: dict[str, Link] = {}
        self._down: dict[str, Replica] = {}
        self._waiting: list[ReplicatedCall] = []
        self._came_up = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refused: dict[str, str] = {}
        self._weights = (0, "")  # stamp and name of the last update that is known

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait for the first replica. Raises Exception: an earlier error of `follow`."""
        following = asyncio.create_task(self._follow(self))
        self._tasks.add(following)
        first = asyncio.create_task(self._came_up.wait())
        await asyncio.wait((following, first), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            following.result()
            raise EngineDiedError("there are no replicas")

    async def shutdown(self) -> None:
        """Close the links, and remove the files. The replicas stay."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close("the front ended") for link in links))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown()

    def update(self, replicas: Iterable[Replica]) -> None:
        """The replicas that there are now. Calls of those that are gone or down end, or run again on others."""
        found = list(replicas)
        wanted = {replica.name: replica for replica in found if replica.address}
        self._down = {replica.name: replica for replica in found if not replica.address}
        for name, link in list(self._links.items()):
            new = wanted.get(name)
            if new is None or new.key != link.replica.key:
                del self._links[name]
                self.restarts += new is not None
                self._refused.pop(name, None)
                self._spawn(link.close("its process ended" if new or name in self._down else "it was stopped"))
            else:
                link.replica = new
        for name in wanted.keys() - self._links.keys():
            limits = self.settings.limits
            self._links[name] = Link(
                wanted[name],
                self._keys,
                self,
                self._context,
                limits.replica_silence_seconds,
                UNREAD * limits.max_queued_bytes,
            )

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def ready(self) -> bool:
        return any(link.up for link in self._links.values())

    @property
    def stuck(self) -> bool:
        return False  # who started a replica ends it when it is stuck

    def states(self) -> dict[str, dict[str, Any]]:
        """State of each replica: `up`, `draining`, `requests`, and `why_down`."""
        found: dict[str, dict[str, Any]] = {
            one.name: {"up": False, "draining": one.draining, "requests": 0, "why_down": "its process does not run"}
            for one in self._down.values()
        }
        for name, link in self._links.items():
            found[name] = {
                "up": link.up, "draining": link.replica.draining, "requests": link.load,
                "why_down": self._refused.get(name) or link.why_down,
            }  # fmt: skip
        return dict(sorted(found.items()))

    # -- callbacks of links ------------------------------------------------------------------

    def vector_orders(self) -> list[VectorOrder]:
        return self._orders.all()

    def learned(self, order: VectorOrder) -> None:
        if self._orders.take(order):  # another front's: replicas that it cannot reach need it, too
            self._spawn(self._settle())

    async def opened(self, link: Link) -> None:
        assert link.ready is not None
        fingerprint = self._fingerprint or next((o.replica.fingerprint for o in self._links.values() if o.up), "")
        if why := link.replica.differs_from(fingerprint):
            if self._refused.get(link.name) != why:
                logger.error("%s", why, extra={"event": "replica_refused"})
            self._refused[link.name] = why
            raise LinkBrokenError(why)
        self._fingerprint = link.replica.fingerprint
        while why := await self._differs(link):
            self._refused[link.name] = why
            await asyncio.sleep(LOOK_SECONDS)
        self._refused.pop(link.name, None)
        if self.info is None:
            self._take(link.ready, await link.ask(m.AskTokenizer))

    def _take(self, ready: m.Ready, files: dict[str, bytes]) -> None:
        """The first replica's model and tokenizer are kept: its files may be read by now."""
        if self.info is None:
            if files:
                self.tokenizer_folder.mkdir(exist_ok=True)
            for name, content in files.items():
                (self.tokenizer_folder / name).write_bytes(content)
            self.info = {name: value for name, value in ready.info.items() if name != "replica"}
            self.schemas = ready.schemas

    def came_up(self, link: Link) -> None:
        self._came_up.set()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._run_again(call)

    def lost(self, link: Link, calls: list[Call], why: str) -> None:
        error = EngineDiedError(f"replica {link.name} ended, or cannot be reached ({why}); the request is lost")
        for call in calls:
            if isinstance(call, ReplicatedCall):
                call.link = None
                if call.may_run_again:
                    self._run_again(call)
                    continue
            call.put(error)

    def deliver(self, call: Call, message: m.FromEngine) -> None:
        failure = message.failure if isinstance(message, m.Finished | m.Failed) else None
        if failure is not None and failure.is_a("EngineClosedError") and isinstance(call, ReplicatedCall):
            if call.may_run_again and call.link is not None:  # the replica ends, and has said so before its link broke
                call.left = call.link
                self._leave(call)
                self._run_again(call)
                return
        if isinstance(message, m.Finished) and message.captured is not None and message.captured.data is not None:
            if message.captured.size > self.settings.limits.inline_bytes:
                if isinstance(call, ReplicatedCall):
                    call.shown = True  # it is on its way to the client
                self._spawn(self._store(call, message))
                return
        call.put(message)

    async def _store(self, call: Call, message: m.Finished) -> None:
        """Large states wait in this front's store, as a local engine's do."""
        await asyncio.to_thread(stored_states, message, self.store)
        if call.number in self._calls:
            call.put(message)
        elif message.captured is not None and message.captured.file is not None:
            (self.store / message.captured.file).unlink(missing_ok=True)  # its client is gone

    # -- calls -------------------------------------------------------------------------------

    def _place(self, call: ReplicatedCall, message: m.ToEngine) -> bool:
        """Send a call to a replica. Returns whether there is one."""
        links = {
            name: link
            for name, link in self._links.items()
            if link.up and not link.replica.draining and link is not call.left
        }
        data = encoded(message)
        while links:
            loads = {name: link.load for name, link in links.items()}
            if isinstance(message, m.Submit):
                name = choose(key_of(message), loads)
            else:
                name = least_loaded(getattr(message, "owner", ""), loads)
            link = links.pop(name)
            try:
                link.send(data)
            except EngineDiedError:
                continue
            link.calls[call.number], call.link = call, link
            link.load += call.weight
            call.runs += 1
            return True
        return False

    def _run_again(self, call: ReplicatedCall) -> None:
        if call.number not in self._calls:
            return
        if not self._place(call, call.again()):
            self._waiting.append(call)
            asyncio.get_running_loop().call_later(WAIT_SECONDS, self._give_up, call)

    def _give_up(self, call: ReplicatedCall) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            call.put(EngineDiedError(f"its replica ended, and no other one was ready for {WAIT_SECONDS:g} s"))

    def _open(self, make: Callable[[int], m.ToEngine]) -> Call:
        number = next(self._numbers)
        message = make(number)
        call = ReplicatedCall(number, self.settings.limits.max_queued_bytes, message)
        if not self._place(call, message):
            raise EngineDiedError("no replica takes calls now; try again in some seconds")
        self._calls[number] = call
        return call

    def close(self, call: Call, abort: bool) -> None:
        if self._calls.pop(call.number, None) is None or not isinstance(call, ReplicatedCall):
            return
        if call in self._waiting:
            self._waiting.remove(call)
        link = call.link
        if link is not None and self._leave(call) and abort:
            self._tell(link, m.Abort(call.number))

    @staticmethod
    def _leave(call: ReplicatedCall) -> bool:
        """Take a call from its replica. Returns whether it was there."""
        link, call.link = call.link, None
        if link is None or link.calls.pop(call.number, None) is None:
            return False
        link.load -= call.weight
        return True

    def abort(self, call: int, requests: list[int] | None) -> None:
        found = self._calls.get(call)
        if isinstance(found, ReplicatedCall):
            found.aborted = True
            if found.link is not None:
                self._tell(found.link, m.Abort(call, requests))
            elif found in self._waiting:
                self._waiting.remove(found)
                found.put(EngineDiedError("the request was ended while it waited for a replica"))

    def was_read(self, call: Call, size: int) -> None:
        if isinstance(call, ReplicatedCall) and call.link is not None and call.number in self._calls:
            self._tell(call.link, m.ReadFrames(call.number, size))

    def _tell(self, link: Link, message: m.ToEngine) -> None:
        try:
            link.send(encoded(message))
        except EngineDiedError:
            pass  # the session ends, and its calls with it

    async def ask_all(self, make: Callable[[int], m.ToEngine], seconds: float | None = None) -> dict[str, Any]:
        links = [link for link in self._links.values() if link.up]
        asked = (asyncio.wait_for(link.ask(make), seconds) for link in links)
        found = await asyncio.gather(*asked, return_exceptions=True)
        return self._answers(dict(zip([link.name for link in links], found, strict=True)))

    def _answers(self, found: dict[str, Any]) -> dict[str, Any]:
        """The answers of live replicas. Raises a replica's refusal; EngineDiedError if no replica is left."""
        gone = EngineDiedError, TimeoutError
        left = {name: answer for name, answer in found.items() if not isinstance(answer, gone)}
        for answer in left.values():
            if isinstance(answer, BaseException):
                raise answer
        if not left:
            raise EngineDiedError("no replica takes calls now; try again in some seconds")
        return left

    # -- orders ------------------------------------------------------------------------------

    async def control(self, order: str, **arguments: Any) -> Any:
        """Have all replicas carry out an order, see `Backend.control`.

        Raises:
            EngineDiedError: a replica does not answer. No other was asked.
            ReplicasDifferError: some have done it and others not, or their answers differ. The message has each one's state.
            Exception: a replica refuses it. No replica has done it.
        """
        if order == "finish_weight_update":
            return await self._finish(**arguments)
        if order in QUESTIONS:
            up = [link for link in self._links.values() if link.up]
            found = self._answers(await self._answers_of(up, order, arguments))
        else:
            stamp = {"stamp": time.time_ns()} if order in ("pause", "resume") else {}
            found = await self._ask_everyone(order, arguments | stamp)
        first = next(iter(found.values()))
        if order in ("wake", "pause", "resume"):
            return all(found.values())
        if any(answer != first for answer in found.values()):
            raise ReplicasDifferError(f"{order}: the replicas differ: {_listed(found)}")
        return first

    async def _finish(self, weight_version: str | None = None) -> dict[str, Any]:
        """Check the collected weights everywhere, and then write them. A replica that fails then takes no calls until the next
        update."""
        await self._ask_everyone("check_weight_update", {})
        stamp = time.time_ns()
        arguments: dict[str, Any] = {"weight_version": weight_version or str(stamp), "stamp": stamp}
        try:
            found = await self._ask_everyone("finish_weight_update", arguments)
        except Exception:
            for link in self._links.values():
                link.look_again()
            raise
        self._weights = stamp, arguments["weight_version"]
        return {
            "tensors": next(iter(found.values()))["tensors"],
            "version": max(one["version"] for one in found.values()),
        }

    async def _ask_everyone(self, order: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The answers of all replicas to an order."""
        links = list(self._links.values())
        gone = sorted([*self._down, *(link.name for link in links if not link.is_open)])
        if gone or not links:
            raise EngineDiedError(
                f"{order}: nothing was done, replicas do not answer: {', '.join(gone) or 'all'}; try again later"
            )
        found = await self._answers_of(links, order, arguments)
        failed = {name: answer for name, answer in found.items() if isinstance(answer, BaseException)}
        if not failed:
            return found
        if (undo := UNDONE_BY.get(order)) is not None:
            done = [link for link in links if link.name not in failed]
            left = await self._answers_of(done, undo, {})
            if not any(isinstance(answer, BaseException) for answer in left.values()):
                found = failed  # as if no replica had been asked
        if len(failed) < len(found):
            weights = await self._answers_of([link for link in links if link.is_open], "weight_info", {})
            raise ReplicasDifferError(
                f"{order}: some replicas failed: {_listed(found)}; now their weights are {_listed(weights)}"
            )
        raise next(iter(failed.values()))

    @staticmethod
    async def _answers_of(links: list[Link], order: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer or error of each of these replicas."""
        asked = (link.ask(lambda number: m.Control(number, order, arguments)) for link in links)
        return dict(
            zip([link.name for link in links], await asyncio.gather(*asked, return_exceptions=True), strict=True)
        )

    async def _differs(self, link: Link) -> str:
        """Reason that a replica does not fit the others as they are now, or "". A process that was started again has the weights
        of the model's folder. It is paused here, if the others are."""
        links = [one for one in self._links.values() if one.is_open]
        found = await self._answers_of(links, "weight_info", {})
        states = {name: one for name, one in found.items() if not isinstance(one, BaseException)}
        own = states.pop(link.name, None)
        if own is None:
            if isinstance(found.get(link.name), EngineError):
                return ""  # the weights of another engine do not change
            raise LinkBrokenError("it does not tell its weights")
        weights = {name: (one["stamp"], one["weight_version"]) for name, one in states.items()}
        mine = own["stamp"], own["weight_version"]
        self._weights = newest = max([self._weights, mine, *weights.values()])
        for one in links:
            if one.up and weights.get(one.name, newest) != newest:
                one.look_again()
        if mine != newest:
            return (
                f"it has the weights {mine[1]!r}, and the others {newest[1]!r}: send the update again, for all of them"
            )
        others = [states[one.name] for one in links if one.up and one.name in states]
        if any(one["sleeping"] for one in others) and not own["sleeping"]:
            return "the others sleep: POST /wake_up"
        if any(one["paused"] for one in others) and not own["paused"]:
            await link.ask(lambda number: m.Control(number, "pause", {"mode": "keep"}))
        return ""

    # -- vectors -----------------------------------------------------------------------------

    async def _order(self, order: VectorOrder) -> Any:
        """Have all replicas take an order. Those that come up meanwhile have it before they take calls."""
        links = [link for link in self._links.values() if link.up]
        found = await asyncio.gather(*(link.order(order) for link in links), return_exceptions=True)
        answers = self._answers(dict(zip([link.name for link in links], found, strict=True)))
        self._orders.take(order)
        await self._settle()
        return next(iter(answers.values()))

    async def _settle(self) -> None:
        """Bring all orders to all replicas that are up."""

        async def bring(link: Link) -> None:
            try:
                await link.bring(self._orders.all())
            except EngineDiedError:
                pass  # it gets them before it is up again

        await asyncio.gather(*(bring(link) for link in self._links.values() if link.up))


def _listed(answers: Mapping[str, Any]) -> str:
    """Answers by replica, in words."""
    words = (
        (name, failure_of(one).message or failure_of(one).type) if isinstance(one, BaseException) else (name, one)
        for name, one in sorted(answers.items())
    )
    return "; ".join(f"{name}: {'done' if one is None else one}" for name, one in words)
