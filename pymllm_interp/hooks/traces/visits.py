"""`Point`: a location of the model, and what waits there in a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block import Block
    from .trace import RequestTrace


class Point:
    """A location, and what waits there in this pass.

    Attributes:
        in_model: each pass reaches it. Modules that a user attached, and results, are counted by their calls.
        of_module: it is such a place, and a module's.
        of_logits: its values carry logit rows, not token rows.
        layer: the decoder layer that it belongs to, if any.
        below: its module's path from there on, "" for the layer's own.
        ends_layer: it is the layer's own output.
        module: of an operation (`.source`): where its module's output is.
        parked: blocks that wait here.
        caches: (block, cache, what the cache stores).
        skips: replacements for the rows of requests that skip the module.
    """

    __slots__ = (
        "below", "caches", "ends_layer", "in_model", "layer", "location", "module", "of_logits", "of_module", "parked", "skips",
    )  # fmt: skip

    def __init__(
        self,
        location: str,
        in_model: bool,
        of_module: bool,
        of_logits: bool,
        layer: int | None,
        below: str,
        module: str | None,
    ) -> None:
        self.location, self.in_model, self.of_module, self.of_logits = location, in_model, of_module, of_logits
        self.layer, self.below, self.module = layer, below, module
        self.ends_layer = layer is not None and module is None and not below and location.endswith(".output")
        self.parked: list[Block] = []
        self.caches: list[tuple[Block, Any, tuple[str, str]]] = []
        self.skips: list[tuple[Block, Any]] = []

    def lies_inside(self, module: str, but: str) -> bool:
        """Whether it lies inside of its layer (or of the layer's `module`), but not at the module `but` or in it."""
        inside = self.module is not None if self.below == module else self.below.startswith(module and f"{module}.")
        return inside and not (but and (self.below == but or self.below.startswith(f"{but}.")))

    def awaited(self, visit: int) -> bool:
        """Whether something waits for this visit."""
        if self.caches or self.skips:
            return True
        for block in self.parked:  # a generator costs more, and this is asked for each layer of a pass
            if block.due == visit:
                return True
        return False

    def waiting(self, visit: int) -> set[RequestTrace]:
        """The traces of what waits for this visit."""
        blocks = [entry[0] for entry in (*self.caches, *self.skips)]
        return {block.trace for block in (*blocks, *(block for block in self.parked if block.due == visit))}

    def take(self, visit: int) -> list[Block]:
        """The blocks that wait for this visit; they are parked here no more."""
        parked = self.parked
        ready = [block for block in parked if block.due == visit]
        self.parked = [block for block in parked if block.due != visit] if len(ready) < len(parked) else []
        return ready

    def leave(self, trace: RequestTrace) -> None:
        """Forget what waits here for a trace."""
        self.parked = [block for block in self.parked if block.trace is not trace]
        self.caches = [entry for entry in self.caches if entry[0].trace is not trace]
        self.skips = [entry for entry in self.skips if entry[0].trace is not trace]

    def clear(self) -> None:
        """Forget who waits: the pass is over."""
        self.parked, self.caches, self.skips = [], [], []
