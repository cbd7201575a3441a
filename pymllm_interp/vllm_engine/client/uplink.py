"""`Uplink`: the hooks of requests on the way to all ranks. A tensor travels once, before the requests that need it."""

from __future__ import annotations

import asyncio
import pickle
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from ...client.remote.remote_errors import exception_of
from ...core.request import Request
from ...core.step import RequestHooks
from ...hooks.bound_hooks import KEPT
from ..blocks import trace_on_wire
from ..payloads import HookedOnWire, Sealer, TensorKey, TensorKeys, dumped, packed_tensor, version_of

MAX_BYTES = 4 << 30
"""Most bytes of tensors that ranks keep for requests to come."""


class Uplink:
    """Connection that sends hooks to all ranks. Used on the engine's loop only.

    Args:
        call: a collective call of all ranks: (method, *arguments) -> the answers, in the ranks' order.
        sealer: signs payloads.
        ranks: number of ranks.
    """

    def __init__(self, call: Callable[..., Awaitable[list[Any]]], sealer: Sealer, ranks: int) -> None:
        self._call, self._sealer, self._ranks = call, sealer, ranks
        self._keys = TensorKeys()
        self._sent: OrderedDict[TensorKey, int] = OrderedDict()  # key -> bytes, the least recently used first
        self._used: dict[TensorKey, int] = {}  # key -> live requests with it
        self._lock = asyncio.Lock()
        # By identity of the specs, which it keeps alive; specs do not change.
        self._known: OrderedDict[Any, tuple[Any, tuple[bytes, dict[TensorKey, torch.Tensor]]]] = OrderedDict()

    async def sealed(self, request: Request) -> tuple[bytes, list[TensorKey]]:
        """The payload of a request, after its tensors have reached all ranks; and their keys, for `release`.
        Raises RuntimeError: a tensor has not reached a rank. The message names it."""
        hooks = request.hooks
        assert hooks is not None
        specs, tensors = self._pickled(hooks)
        told = HookedOnWire(
            request.request_id, request.prompt_len, hooks.max_tokens, hooks.logits_from, hooks.vector_rows, specs,
            None if hooks.trace_key is None else tuple(trace_on_wire(request, hooks.trace_key)),
        )  # fmt: skip
        for key in tensors:
            self._used[key] = self._used.get(key, 0) + 1
        try:
            if tensors:
                async with self._lock:
                    await self._send({key: tensor for key, tensor in tensors.items() if key not in self._sent})
                    for key in tensors:
                        self._sent.move_to_end(key)
                    await self._make_room()
        except BaseException:
            self.release(list(tensors))
            raise
        return self._sealer.sealed(pickle.dumps(tuple(told), protocol=5)), list(tensors)

    async def send_traces(self, payload: bytes) -> None:
        """Make traces known to all ranks. Raises the error of a rank that cannot serve them."""
        for failure in await self._call("interp_traces", self._sealer.sealed(payload)):
            if failure is not None:
                raise exception_of(pickle.loads(failure))

    def _pickled(self, hooks: RequestHooks) -> tuple[bytes, dict[TensorKey, torch.Tensor]]:
        """The specs of a request, and their tensors. Equal ones are pickled once."""
        specs = *hooks.interventions, None, *hooks.captures
        versions = tuple([version_of(tensor) for spec in specs if spec is not None for _, tensor in spec.tensors()])
        key = *map(id, specs), *versions
        if key not in self._known:
            tensors: dict[TensorKey, torch.Tensor] = {}
            pickled = dumped((list(hooks.interventions), list(hooks.captures)), self._keys, tensors)
            self._known[key] = specs, (pickled, tensors)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key][1]

    def release(self, keys: list[TensorKey]) -> None:
        """A request with these tensors has ended."""
        for key in keys:
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]

    async def _send(self, missing: dict[TensorKey, torch.Tensor]) -> None:
        if not missing:
            return
        answers = await self._call("interp_put", [packed_tensor(key, tensor) for key, tensor in missing.items()])
        for rank, (_, keys) in enumerate(answers):
            lacking = missing.keys() - set(map(bytes, keys))
            if lacking:
                raise RuntimeError(
                    f"{len(lacking)} of {len(missing)} vectors did not reach rank {rank} of {self._ranks}: the request was not "
                    "started"
                )
        self._sent |= {key: tensor.nbytes for key, tensor in missing.items()}

    async def _make_room(self) -> None:
        total, dropped = sum(self._sent.values()), []
        for key, size in list(self._sent.items()):
            if total <= MAX_BYTES:
                break
            if key not in self._used:
                total -= size
                dropped.append(key)
                del self._sent[key]
        if dropped:
            await self._call("interp_drop", dropped)
