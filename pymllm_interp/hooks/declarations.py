"""`Declarations`: interventions and captures of requests, checked before the requests are scheduled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.model_spec import ModelSpec
from ..core.request import Request
from ..core.step import RequestHooks
from .bind import DeclaredLimits
from .captures.egress.ring import CaptureRing
from .captures.reductions.reduction import Readout
from .captures.spec import Capture
from .declared import Declared
from .interventions.knockout import Intervention
from .interventions.vector_pool import VectorPool

KEPT = 64
"""Bound hooks that are kept."""
MAX_TABLE_BYTES = 1 << 20
"""Captures with larger tables of positions are not kept: a client could make them hold gigabytes after its requests."""


class BoundHooks:
    """Binds hooks, as `Declared.bound` does. Equal hooks of prompts of one length are bound once. Thread-safe.

    Args:
        model, limits, readout: see `Declared.bound`.
        only_captures: cache only bindings without vectors or weights, so that the cache does not keep tensors alive.
    """

    def __init__(
        self, model: ModelSpec, limits: DeclaredLimits, readout: Readout | None, only_captures: bool = False
    ) -> None:
        self._model, self._limits, self._readout, self._only_captures = model, limits, readout, only_captures
        # With the specs, so that their ids are not reused.
        self._known: OrderedDict[Any, tuple[Any, Declared]] = OrderedDict()
        self._lock = threading.Lock()

    def bound(self, hooks: RequestHooks, prompt_len: int) -> Declared:
        """The hooks of one request, bound.

        Raises:
            ValueError: see `Declared.bound`.
        """
        specs = *hooks.interventions, None, *hooks.captures
        # By identity: specs do not change.
        key = *map(id, specs), prompt_len, hooks.max_tokens, hooks.logits_from
        with self._lock:
            if (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return found[1].fresh()
        found = Declared.bound(hooks, prompt_len, self._model, self._limits, self._readout)
        large = found.captures is not None and found.captures.layout.table_bytes > MAX_TABLE_BYTES
        if large or found.bound_for_each or (self._only_captures and not found.only_captures):
            return found
        with self._lock:
            self._known[key] = specs, found
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found.fresh()

    def clear(self) -> None:
        """Forget all bindings."""
        with self._lock:
            self._known.clear()

    def close(self) -> None:
        """Let go of the model, too."""
        self.clear()
        self._readout, self._limits = None, replace(self._limits, encoders={})


class Declarations:
    """Checks interventions and captures, and reserves their resources. Called on any thread; the worker learns of it by steps.

    Args:
        limits: limits of the engine.
        model: model that specs are checked against.
        readout: readout of the model, for reductions.
        only_captures: see `BoundHooks`.
        ring: ring through which captured states leave the device, or None.

    Attributes:
        pool: rows of vectors; None if ops are functions.
    """

    def __init__(
        self,
        limits: DeclaredLimits,
        model: ModelSpec,
        readout: Readout | None = None,
        ring: CaptureRing | None = None,
        only_captures: bool = True,
    ) -> None:
        self._limits, self._model, self._readout, self._ring = limits, model, readout, ring
        self._bindings = BoundHooks(model, limits, readout, only_captures)
        rows = limits.max_intervention_vectors
        self.pool = VectorPool(rows, model.hidden_size) if limits.device_tables else None

    def declare(self, specs: Sequence[Intervention], captures: Sequence[Capture], request: Request) -> None:
        """Check the hooks of a request, and set `Request.hooks` and `Request.declared`.

        Raises:
            ValueError: something that the model lacks, or that exceeds the tables, the ring or the results.
        """
        trace = request.trace
        if not specs and not captures and trace is None:
            return
        hooks = request.hooks = RequestHooks(
            specs, captures, request.max_tokens, request.logits_from, request.differentiable,
            trace_key=None if trace is None else trace.key, single=request.forward_only,
        )  # fmt: skip
        if not hooks.declares:
            return
        declared = hooks.bound = self._bindings.bound(hooks, request.prompt_len)
        declared.hash_large()
        request.declared = declared.demands(self._limits.device_tables)
        if trace is None:
            if "fits" not in declared.shared:
                self.check_room([request], "this request")
                declared.shared["fits"] = True
        elif not trace.grad:
            self.check_room([request], "this request")

    def check_room(self, together: Sequence[Request], what: str) -> None:
        """Check that the ring can hold the captures of requests that run in the same steps. A traced prompt runs in one step.

        Args:
            what: description of the requests, for the message.

        Raises:
            ValueError: the captures exceed the ring.
        """
        if self._ring is not None:
            wanted = [
                (request.declared.captures, 0 if request.trace is None else request.prompt_len)
                for request in together
                if request.declared is not None and request.declared.captures is not None
            ]
            self._ring.admission.check(wanted, what)

    def hold(self, request: Request) -> None:
        """Reserve rows of the pool for a request's vectors until `release`. Open the ring here, so that the caller gets its error.

        Raises:
            ValueError: the pool is full.
            RuntimeError, MemoryError: no memory for the ring on the host.
        """
        if request.hooks is None or request.declared is None:
            return
        if self.pool is not None:
            request.hooks.vector_rows = self.pool.acquire(request.hooks.bound)
        if self._ring is not None and request.declared.captures is not None:
            self._ring.open()

    def release(self, request: Request) -> None:
        """Release the reservations of `hold`. A second call does nothing."""
        if self.pool is not None and request.declared is not None:
            self.pool.release(request.declared)

    def close(self) -> None:
        """Let go of the ring and the model."""
        self._ring = self._readout = None
        self._bindings.close()
        self._limits = replace(self._limits, encoders={})
