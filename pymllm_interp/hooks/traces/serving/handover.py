"""`Handover`: how a module hands its values to the interleaver. `SiteState`: the ops between its forward and those values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch

from ..blocks.block_runner import BlockRunner
from ..nnsight_compat import NO_SKIP, Controller, State
from .points import Points
from .visits import PassVisits


class Visited(Protocol):
    """The part of `EngineInterleaver` that modules use."""

    thread: int | None
    blocks: BlockRunner
    points: Points
    visits: PassVisits

    def visit(self, location: str, value: Any) -> Any: ...


class Handover(Controller):
    """A module's `forward`: nnsight's controller, with a fast path past locations without waiting blocks.

    A pass calls hundreds of modules, and blocks wait at a few of them. Calls by a block, calls on other threads, and calls for
    another tree that shares the module take nnsight's path.
    """

    def __init__(self, module: torch.nn.Module, state: Any, interleaver: Visited) -> None:
        super().__init__(module, state)
        self._interleaver = weakref.ref(interleaver)
        self._locations: tuple[str, str, str] = state.routes[-1][2]  # of the tree that was registered last: this one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        interleaver = self._interleaver()
        if interleaver is None or interleaver.thread != get_ident() or interleaver.blocks.serving is not None:
            return super().__call__(*args, **kwargs)
        at_input, at_skip, at_output = self._locations
        points, counts = interleaver.points.opened, interleaver.visits.counts
        if at_input in points:
            args, kwargs = interleaver.visit(at_input, (args, kwargs))
        else:
            counts[at_input] += 1
        output = NO_SKIP
        if at_skip in points:
            output = interleaver.visit(at_skip, NO_SKIP)
        else:
            counts[at_skip] += 1
        if output is NO_SKIP:
            output = self.state.body(self.module_ref(), *args, **kwargs)
        if at_output in points:
            return interleaver.visit(at_output, output)
        counts[at_output] += 1
        return output


class Ends(Protocol):
    """The sites at a module's ends (models/transformers/site_ends.py), its attribute `site_ends`."""

    has_controller: bool

    def before_forward(self, args: tuple, kwargs: dict[str, Any]) -> None: ...

    def after_forward(self, output: Any) -> Any: ...


class SiteState(State):
    """A controller's state. Its body, and the body that `.source` swaps in, has the ops of the module's sites."""

    __slots__ = ()

    @property
    def body(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The module's forward, unbound, with the ops."""
        return _body.__get__(self)

    @body.setter
    def body(self, forward: Callable[..., Any]) -> None:
        def with_sites(module: Any, *args: Any, **kwargs: Any) -> Any:
            ends: Ends = module.site_ends
            ends.before_forward(args, kwargs)
            return ends.after_forward(forward(module, *args, **kwargs))

        _body.__set__(self, with_sites)


_body: Any = State.body


def serve_sites(state: State, ends: Ends) -> None:
    """Make the state of a module's controller a `SiteState`."""
    ends.has_controller = True
    if not isinstance(state, SiteState):
        forward = state.body
        state.__class__ = SiteState
        state.body = forward
