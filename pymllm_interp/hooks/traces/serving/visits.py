"""Visit counts: how often the model has reached each location, in the current pass and for each request.

A *visit* is one time that a pass reaches a location, such as ``model.model.layers.3.output``. A block waits for a location
and an *occurrence*, the number of its request's earlier visits there. Passes in which the
request takes no part do not count. `PassVisits` counts the current pass, for all requests; `VisitCounts` counts one
request's earlier passes.
"""

from __future__ import annotations

from collections import defaultdict


class Location:
    """A named place of the model that serves values.

    Attributes:
        name: path and key, such as "model.model.layers.3.output".
        in_model: every pass reaches it. Other locations (modules that a user attached, results) are counted by call.
        of_module: whether it is in the model, served by a module or an operation of one.
        of_logits: whether its values have logit rows instead of token rows.
        layer: index of its decoder layer; None outside of the layers.
        below: path of its module relative to the layer; "" for the layer itself.
        ends_layer: whether it is the layer's own output.
        module_output: output location of the module that contains an operation (`.source`); else None.
        has_attention: whether its module contains an attention.
    """

    __slots__ = (
        "below", "ends_layer", "has_attention", "in_model", "layer", "module_output", "name", "of_logits", "of_module",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        *,
        in_model: bool,
        of_module: bool,
        of_logits: bool,
        layer: int | None,
        below: str,
        module_output: str | None,
        has_attention: bool,
    ) -> None:
        self.name, self.in_model, self.of_module, self.of_logits = name, in_model, of_module, of_logits
        self.layer, self.below, self.module_output, self.has_attention = layer, below, module_output, has_attention
        self.ends_layer = layer is not None and module_output is None and not below and name.endswith(".output")

    def lies_inside(self, module: str, but: str) -> bool:
        """Whether it lies inside its layer's `module` ("" for the layer), and not at or inside the module `but`."""
        is_operation = self.module_output is not None
        inside = is_operation if self.below == module else self.below.startswith(module and f"{module}.")
        return inside and not (but and (self.below == but or self.below.startswith(f"{but}.")))


class PassVisits:
    """Visits of the current pass.

    Attributes:
        counts: visits by location name. Visits of fused parts of the model are not in it; see `of`.
        event_count: visits and passes so far. While it is unchanged, the model has not moved on.
        per_pass: visits of a whole pass, for the locations that a pass reaches more than once. Learned from past passes.
    """

    def __init__(self) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)  # not a subclass: every module of a pass counts here
        self.event_count = 0
        self.per_pass: dict[str, int] = {}
        self._fused_layers: set[int] = set()
        self._fused_parts: dict[int, set[tuple[str, str]]] = {}

    def begin_pass(self) -> None:
        """Start counting from zero."""
        self.event_count += 1
        self.counts.clear()
        self._fused_layers.clear()
        self._fused_parts.clear()

    def end_pass(self) -> None:
        """Learn `per_pass`. A single visit teaches nothing: a pass that failed may have stopped there."""
        self.per_pass.update((name, count) for name, count in self.counts.items() if count > 1)

    def fuse_layer(self, layer: int, output: str | None = None) -> None:
        """Count all locations of a layer as visited, except for its `output`, if that is given."""
        self._fused_layers.add(layer)
        if output is not None:
            self.counts[output] = 0

    def fuse_layers(self, first: int, stop: int) -> None:
        """Count all locations of the layers from `first` to `stop` as visited."""
        self._fused_layers.update(range(first, stop))

    def fuse_part(self, layer: int, module: str, but: str) -> None:
        """Count the locations inside a layer's `module` as visited (see `Location.lies_inside`)."""
        self._fused_parts.setdefault(layer, set()).add((module, but))

    def unfuse_part(self, layer: int | None, module: str) -> None:
        """Undo `fuse_part` of a whole module, which runs again."""
        if layer is not None and (parts := self._fused_parts.get(layer)) is not None:
            parts.discard((module, ""))

    def of(self, location: Location) -> int:
        """Number of times that the pass has reached `location`."""
        count = self.counts.get(location.name)
        if count is not None:
            return count
        layer = location.layer
        if layer is not None:
            if layer in self._fused_layers:
                return 1
            parts = self._fused_parts.get(layer)
            if parts is not None and any(location.lies_inside(*part) for part in parts):
                return 1
        # A module may have run without its operations being called.
        return self.counts.get(location.module_output, 0) if location.module_output is not None else 0


class VisitCounts:
    """Visits that one request's passes have made.

    Attributes:
        passes: completed passes that the request took part in.
        in_pass: the request takes part in the current pass.
        pass_index: equals `passes` while the request is in a pass and has never skipped a module; else -1. Requests with
            equal pass indexes have equal visit counts at every location of the model.
        calls: visits of locations outside the model, by name.
        skipping: paths of the modules that the request skips in the current pass.
    """

    __slots__ = ("_missed", "calls", "in_pass", "pass_index", "passes", "skipping")

    def __init__(self) -> None:
        self.passes, self.pass_index, self.in_pass = 0, -1, False
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.skipping: list[str] = []
        self._missed: defaultdict[str, int] = defaultdict(int)

    def begin_pass(self) -> None:
        """Take part in the pass that begins."""
        self.in_pass = True
        self.pass_index = -1 if self._missed else self.passes

    def end_pass(self) -> None:
        """Count the pass."""
        self.leave_pass()
        self.passes += 1
        if self.skipping:
            for path in self.skipping:
                self._missed[path] += 1
            self.skipping.clear()

    def leave_pass(self) -> None:
        """Leave the current pass without counting it."""
        self.in_pass, self.pass_index = False, -1

    def skip(self, path: str) -> None:
        """Skip the module at `path` in the current pass."""
        self.skipping.append(path)
        self.pass_index = -1

    def skips(self, name: str) -> bool:
        """Whether the location `name` lies inside a module that is skipped in the current pass."""
        return any(is_inside(path, name) for path in self.skipping)

    def before_pass(self, location: Location, per_pass: dict[str, int]) -> int:
        """Visits of `location` before the current pass.

        Args:
            per_pass: see `PassVisits`.
        """
        if not location.in_model:
            return self.calls.get(location.name, 0)
        count = self.passes
        if per_pass:
            count *= per_pass.get(location.name, 1)
        if self._missed:
            count -= sum(missed for path, missed in self._missed.items() if is_inside(path, location.name))
        return count

    def occurrence(self, location: Location, visits: PassVisits) -> int:
        """Visits of `location` so far, including the current pass."""
        count = self.before_pass(location, visits.per_pass)
        if location.in_model and self.in_pass and not (self.skipping and self.skips(location.name)):
            count += visits.of(location)
        return count

    def key(self, location: Location, visits: PassVisits) -> tuple[int, int]:
        """(event count, pass index). Requests with equal keys have equal occurrences of `location`; (-1, -2) equals no key."""
        if self.pass_index < 0 or not location.in_model:
            return -1, -2
        return visits.event_count, self.pass_index


def is_inside(path: str, name: str) -> bool:
    """Whether the location `name` lies inside the module at `path`. The module's own ends do if `path` ends with a dot."""
    if path.endswith("."):
        return name.startswith(path)
    return name.startswith(path + ".") and name[len(path) + 1 :] not in ("input", "skip", "output")
