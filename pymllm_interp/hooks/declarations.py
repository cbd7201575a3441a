"""`Declarations`: interventions and captures of requests, checked before the requests are scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.limits import MAX_LISTED
from ..core.model_spec import ModelSpec
from ..core.request import Request
from ..core.step import RequestHooks
from .bind import DeclaredLimits, fingerprint_of
from .bound_hooks import Bindings
from .captures.egress.device_memory import DeviceMemory
from .captures.egress.ring import CaptureRing
from .captures.reductions.reduction import Readout
from .captures.spec import Capture
from .declared import Declared
from .image_words import Images, Located
from .interventions.knockout import Intervention
from .interventions.vector_pool import VectorPool
from .monitors.request_monitors import RequestMonitors
from .part_hooks import PartBindings
from .site import in_part


class Declarations:
    """Checks interventions and captures, and reserves their resources. Called on any thread; the worker learns of it by steps.

    Args:
        model: model that specs are checked against.
        readout: readout of the model, for reductions.
        only_captures: see `Bindings`.
        ring: ring through which captured states leave the device, or None.
        device_memory: memory of captured states that stay on the device; None: all leave it.

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
        device_memory: DeviceMemory | None = None,
    ) -> None:
        self.device_memory = device_memory
        self._limits, self._model, self._readout, self._ring = limits, model, readout, ring
        self._bindings = Bindings(model, limits, readout, only_captures)
        self._parts = PartBindings(model, limits, only_captures)
        rows = limits.max_intervention_vectors
        self.pool = VectorPool(rows, model.hidden_size) if limits.device_tables else None

    def declare(self, specs: Sequence[Intervention], captures: Sequence[Capture], request: Request) -> None:
        """Check the hooks of a request that has some, and set `Request.hooks` and `Request.declared`.
        Raises ValueError: something that the model lacks, or that exceeds the tables, the ring or the results."""
        trace = request.trace
        specs, captures, parts = self._parts.split(specs, captures)
        parts = self._parts.bind(parts, request.encoder, request.images)
        if request.images:
            images = tuple(tuple(image.positions.tolist()) for image in request.images)
            found = _located([*specs, *captures], images, request.prompt_len)
            specs, captures = found[: len(specs)], found[len(specs) :]
        hooks = request.hooks = RequestHooks(
            specs, captures, request.max_tokens, request.logits_from, request.differentiable,
            trace_key=None if trace is None else trace.key, single=request.forward_only, parts=parts,
        )  # fmt: skip
        if request.encoder is not None:
            request.private_encoder = bool(parts) or trace is not None
        elif any(part.interventions for part in parts.values()):
            edits = [
                replace(spec, site=in_part(spec.site, part))
                for part, own in parts.items()
                for spec in own.interventions
            ]
            request.image_edits = fingerprint_of(edits, ())
        if not hooks.declares:
            return
        if self.device_memory is None and any(spec.stays for spec in captures):
            raise ValueError("this engine has the states of captures on the host only: leave out device='engine'")
        bound = self._bindings.bound(hooks, request.prompt_len)
        bound.hash_large()
        declared = hooks.bound = Declared(bound)
        request.declared = declared.demands(self._limits.device_tables)
        if bound.monitors:
            request.monitors = RequestMonitors(bound.monitors, request.request_id, request.prompt_len)
        if request.stream and any(spec.stream for spec in captures):
            request.num_streamed = 0
        if trace is None:
            if request.images or "fits" not in bound.shared:
                self.check_room([request], "this request")
                bound.shared["fits"] = not request.images
        elif not trace.grad:
            self.check_room([request], "this request")

    def check_room(self, together: Sequence[Request], what: str) -> None:
        """Check that the ring can hold the captures of requests that run in the same steps. A traced prompt runs in one step.
        An image with attention in both directions does, too.

        Args:
            what: description of the requests, for the message.

        Raises:
            ValueError: the captures exceed the ring.
        """
        if self._ring is not None:
            wanted = [
                (request.declared.captures, self._undivided(request))
                for request in together
                if request.declared is not None and request.declared.captures is not None
            ]
            self._ring.admission.check(wanted, what)

    def _undivided(self, request: Request) -> list[tuple[int, int]]:
        """(first, number) of tokens that one step computes."""
        if request.trace is not None:
            return [(0, request.prompt_len)]
        images = request.images if self._model.image_span else ()
        ends = [(int(image.positions[0]), int(image.positions[-1]) + 1) for image in images]
        return [(first, stop - first) for first, stop in ends]

    def hold(self, request: Request) -> None:
        """Reserve rows of the pool for a declared request's vectors, and memory for states that stay on the device.

        It opens the ring, too: its error is the caller's.

        Raises:
            ValueError: the pool, or the memory on the device, is full.
            RuntimeError, MemoryError: no memory for the ring on the host.
        """
        assert request.hooks is not None and request.declared is not None, "it declared something"
        bound = request.hooks.bound
        captures = None if bound is None else bound.captures
        if captures is not None and captures.layout.stays:
            assert self.device_memory is not None, "`declare` refuses them"
            captures.prepare(self.device_memory)
        if self.pool is not None and bound is not None:
            request.hooks.vector_rows = self.pool.acquire(bound)
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
        self._parts.close()
        self._limits = replace(self._limits, encoders=None)


def _located(specs: Sequence[Any], images: Images, prompt_len: int) -> list[Any]:
    """Specs with numbers in place of words for images. A word of five characters may stand for thousands of positions."""
    made, left = [], MAX_LISTED
    for spec in specs:
        made.append(spec.located(images, prompt_len))
        for one in (made[-1], *getattr(made[-1], "ops", ())):
            places = [getattr(one, name) for name in one.places]
            left -= sum(len(place) for place in places if isinstance(place, Located))
        if left < 0:
            raise ValueError(
                f"the words for images select more than {MAX_LISTED} positions in all hooks of the request"
            )
    return made
