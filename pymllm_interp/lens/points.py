"""Hook points of a `Bridge`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from transformer_lens.hook_points import HookPoint, LensHandle

GRADIENTS = "gradients are those of a trace: `with lm.trace(prompt):` and `with loss.backward():`, or lm.attribute"


class BridgePoint(HookPoint):
    """A hook point. Its functions read and edit forward passes.

    Args:
        name: name of the hook point.
        served: whether the engine has the value.
    """

    def __init__(self, name: str, served: bool = True) -> None:
        super().__init__()
        self.name, self.served = name, served

    def add_hook(
        self, hook: Callable[..., Any], dir: Literal["fwd", "bwd"] = "fwd", *args: Any, **kwargs: Any
    ) -> LensHandle:
        """Add a hook function, as `HookPoint.add_hook`.

        Raises:
            NotImplementedError: a backward hook, or a point with a value that the engine does not have.
        """
        if dir == "bwd":
            raise NotImplementedError(f"{self.name}: Bridge has no backward hooks; {GRADIENTS}")
        if not self.served:
            raise NotImplementedError(f"this engine has no value for {self.name}; bridge.hook_dict has the names")
        return super().add_hook(hook, dir, *args, **kwargs)
