"""Declared ops inside a module's controller: between the module's forward and the value for traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..nnsight_compat import State


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
