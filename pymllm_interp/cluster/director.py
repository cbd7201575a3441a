"""`Director`: the actor that knows a cluster's replicas and fronts, which of them serve, and which are drained.

It can find all that it knows: replicas and fronts are named actors. Ray starts it again with its arguments.
Requests do not pass it; fronts serve on while it is away.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any

from ..harvest.on_ray.ray_version import NAMESPACE, load_ray
from ..server.engines.replica_process import ReplicaSettings
from ..server.engines.roster import Replica
from ..server.settings import ServeSettings
from .front_keeper import POLL_SECONDS, FrontKeeper, Keeper

SETTLE_SECONDS = 4 * POLL_SECONDS
"""Seconds until all live fronts know of a change."""
FRONT_BYTES = 1 << 20
"""Memory that Ray reserves for a front."""
ANSWER_SECONDS = 30.0
"""Timeout of an answer from an actor."""


@dataclass(frozen=True)
class ClusterPlan:
    """Settings from the command line.

    Args:
        cpus, gpus: CPUs and GPUs of a replica's placement-group bundle.
        node: Ray's id of the node for fronts, if it lives.
        store: unguessable name of the fronts' store in the folder for temporary files, without --store.
    """

    name: str
    settings: ReplicaSettings
    serve: ServeSettings
    replicas: int
    fronts: int
    cpus: float
    gpus: float
    node: str
    store: str = field(default_factory=lambda: f"pymllm-interp-store-{uuid.uuid4().hex}")


class Director:
    """Keeps the actors of a cluster, and answers commands and fronts."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._ray = load_ray()
        self._keepers: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        self._fronts: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._draining: set[str] = set()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._busy = asyncio.Lock()
        self._unheard: set[str] = set()  # replicas that were there before this life of the actor, and have not answered

    # -- calls of fronts and commands ----------------------------------------------------------

    async def roster(self) -> list[dict[str, Any]] | None:
        """The fields of each replica's `Replica`, also of one that is down. None: not known yet, after this actor's own restart."""
        self._begin()
        if self._unheard:
            return None
        found = {name: self._states.get(name, {}).get("replica") for name in sorted(self._keepers)}
        return [
            {**(replica or vars(Replica.down(name, False))), "draining": name in self._draining}
            for name, replica in found.items()
        ]

    async def urls(self) -> list[str]:
        """URLs of the fronts that serve."""
        self._begin()
        states = [self._states.get(name, {}) for name in sorted(self._fronts)]
        return [state["url"] for state in states if state.get("url") and not state.get("lost")]

    async def status(self) -> dict[str, Any]:
        """Replicas and fronts by name, with their reported states, and `lost` for those that do not answer."""
        self._begin()
        replicas = {
            name: {"lost": "", "draining": name in self._draining, **self._states.get(name, {})}
            for name in self._keepers
        }
        return {
            "replicas": replicas,
            "fronts": {name: {"lost": "", **self._states.get(name, {})} for name in self._fronts},
        }

    async def scale(self, count: int) -> None:
        """Set the number of replicas. Surplus ones are drained first."""
        self._begin()
        async with self._busy:
            for name in sorted(self._keepers, key=_number)[count:]:
                await self._remove(name)
            number = 0
            while len(self._keepers) < count:
                if f"r{number}" not in self._keepers:
                    self._add_replica(f"r{number}")
                number += 1

    async def drain(self, name: str) -> str:
        """Drain a replica: send it no further calls, wait for running ones, and end it. Returns the error, or ""."""
        self._begin()
        async with self._busy:
            if name not in self._keepers:
                return f"expected one of the replicas {', '.join(sorted(self._keepers, key=_number))}"
            if len(self._keepers) == 1:
                return f"{name} is the last replica: `cluster scale 2` first, or `cluster stop`"
            await self._remove(name)
        return ""

    async def restart(self) -> str:
        """Drain and start each replica again, one after the other. No request is lost, if there are two.

        Returns why one could not be started again; empty: all were.
        """
        self._begin()
        async with self._busy:
            for name in sorted(self._keepers, key=_number):
                starts = self._states.get(name, {}).get("starts", 0)
                await self._empty(name)
                why = await self._restarted(name, starts)
                self._draining.discard(name)
                if why:
                    return f"replica {name} could not be started again, and the others were left: {why}"
                await asyncio.sleep(SETTLE_SECONDS)
        return ""

    async def _restarted(self, name: str, starts: int) -> str:
        """Start an engine process again, and wait until it serves. Returns why it does not."""
        try:
            await self._answer(self._keepers[name].restart.remote(), ANSWER_SECONDS)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            return f"its keeper does not answer ({type(error).__name__})"
        while True:
            state = self._states.get(name, {})
            if state.get("replica") and state["starts"] != starts:
                return ""
            if why := state.get("failure") or state.get("lost"):
                return why
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """End the fronts, after their requests, and the replicas. The caller ends this actor."""
        self._begin()
        for task in self._watchers.values():
            task.cancel()
        stops = [
            self._answer(front.stop.remote(), self._plan.serve.drain_seconds + ANSWER_SECONDS)
            for front in self._fronts.values()
        ]
        await asyncio.gather(*stops, return_exceptions=True)
        removals = [self._answer(front.remove_store.remote(), ANSWER_SECONDS) for front in self._fronts.values()]
        await asyncio.gather(*removals, return_exceptions=True)
        for actor in (*self._fronts.values(), *self._keepers.values()):
            self._ray.kill(actor)
        for name in self._keepers:
            self._free(name)

    # -- actors --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Find or start the actors. The first call of each life of this actor comes here."""
        if self._fronts:
            return
        prefix = f"{self._plan.name}/"
        named = self._ray.util.list_named_actors(all_namespaces=True)
        there = {one["name"].removeprefix(prefix) for one in named if one["namespace"] == NAMESPACE}
        replicas = sorted((name for name in there if re.fullmatch(r"r\d+", name)), key=_number)
        self._unheard = set(replicas)
        for name in replicas or [f"r{i}" for i in range(self._plan.replicas)]:
            self._add_replica(name)
        for number in range(self._plan.fronts):
            self._add_front(f"front{number}", number)

    def _add_replica(self, name: str) -> None:
        plan, util = self._plan, self._ray.util
        group_name = f"{plan.name}/{name}"
        try:
            group = util.get_placement_group(group_name)
        except ValueError:
            bundle = {"CPU": plan.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})
            group = util.placement_group([bundle], name=group_name, lifetime="detached")
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        self._groups[name] = group
        self._keepers[name] = self._actor(
            Keeper, name, num_cpus=plan.cpus, num_gpus=plan.gpus, scheduling_strategy=strategy
        ).remote(plan.settings, name)
        self._watch(name, self._keepers[name])

    def _add_front(self, name: str, number: int) -> None:
        plan = self._plan
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(plan.node, soft=True)
        settings = replace(plan.serve, port=plan.serve.port and plan.serve.port + number)
        # Ray 2.60 keeps to a node only with actors that need something.
        self._fronts[name] = self._actor(
            FrontKeeper, name, num_cpus=0, memory=FRONT_BYTES, scheduling_strategy=strategy
        ).remote(plan.name, settings, plan.settings.keys, plan.store)
        self._watch(name, self._fronts[name])

    def _actor(self, cls: type, name: str, **options: Any) -> Any:
        return self._ray.remote(cls).options(
            name=f"{self._plan.name}/{name}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True, max_restarts=-1,
            **options,
        )  # fmt: skip

    def _watch(self, name: str, actor: Any) -> None:
        self._watchers[name] = asyncio.create_task(self._ask(name, actor))

    async def _ask(self, name: str, actor: Any) -> None:
        while True:
            try:
                self._states[name] = await self._answer(actor.state.remote(), ANSWER_SECONDS)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                # Its process may still serve: fronts notice if it does not.
                self._states[name] = {**self._states.get(name, {}), "lost": type(error).__name__}
            self._unheard.discard(name)
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, ref: Any, seconds: float) -> Any:
        async def wait() -> Any:
            return await ref

        return await asyncio.wait_for(wait(), seconds)

    # -- the ends of replicas ------------------------------------------------------------------

    async def _empty(self, name: str) -> None:
        """Send a replica no further calls, and wait until it is idle, or for `drain_seconds`."""
        self._draining.add(name)
        await asyncio.sleep(SETTLE_SECONDS)
        deadline = time.monotonic() + self._plan.serve.drain_seconds
        while time.monotonic() < deadline:
            asked: Awaitable[int] = self._answer(self._keepers[name].num_running.remote(), ANSWER_SECONDS)
            try:
                if not await asked:
                    return
            except (self._ray.exceptions.RayError, TimeoutError):
                return  # it is lost: nothing runs there
            await asyncio.sleep(POLL_SECONDS)

    async def _remove(self, name: str) -> None:
        await self._empty(name)
        self._watchers.pop(name).cancel()
        self._ray.kill(self._keepers.pop(name))
        self._free(name)
        self._states.pop(name, None)
        for names in (self._draining, self._unheard):
            names.discard(name)

    def _free(self, name: str) -> None:
        self._ray.util.remove_placement_group(self._groups[name])


def _number(name: str) -> int:
    return int(name[1:])
