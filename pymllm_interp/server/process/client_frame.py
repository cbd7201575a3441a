"""The frame that stands in for a client's: its variables, as copies, and the names that a block binds there."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import CodeType
from typing import Any

import torch

from ...hooks.traces.nnsight_compat import SerializedFrame

ONLY_HERE = (
    "the block ran on the server, and changed a copy of {} there, which is not sent back: make it in the block, "
    "xs = list().save()"
)


def _state(value: Any) -> tuple[int, list[Any]]:
    """Value that a change in place makes another: a tensor's version, and the objects of a container."""
    if isinstance(value, torch.Tensor):
        return (0 if value.is_inference() else value._version), []
    if isinstance(value, dict):
        return 0, [*value, *value.values()]
    return 0, list(value) if isinstance(value, list | set) else []


def _has_changed(value: Any, version: int, parts: list[Any]) -> bool:
    now, own = _state(value)
    return now != version or len(own) != len(parts) or any(map(operator.is_not, own, parts))


class RecordedNames(dict[str, Any]):
    """Local variables of a frame that stands in for the client's. Records the names that a trace binds there.

    Args:
        names: the client's local variables that the block reads.
        outer: its global ones.
    """

    def __init__(self, names: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        super().__init__(names)
        self.bound: dict[str, Any] = {}
        self._sent = {name: (value, _state(value)) for name, value in (dict(outer) | dict(names)).items()}

    def warnings(self) -> list[str]:
        """A text about the client's objects of which only the copies here have changed; empty without any."""
        found = [f"`{name}`" for name, (value, state) in self._sent.items() if _has_changed(value, *state)]
        return [ONLY_HERE.format(", ".join(found))] if found else []

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Record bound names."""
        self.bound |= dict(*args, **kwargs)
        super().update(*args, **kwargs)


def frame_for(block: Mapping[str, Any], code: CodeType) -> tuple[Any, RecordedNames]:
    """A frame that stands in for the client's, and its local variables."""
    frame: Any = SerializedFrame(code.co_filename, 1, code.co_name)
    frame.f_globals = dict(block["globals"])
    frame.f_locals = names = RecordedNames(block["locals"], block["globals"])
    return frame, names
