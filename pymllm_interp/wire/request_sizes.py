"""Size limits of a call's specs, checked before any of them is walked. Errors name the field, its limit and the value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.limits import MAX_CALL_SPECS, MAX_LISTED, MAX_NAMED, MAX_SPECS
from ..hooks.captures.spec import Capture
from ..hooks.monitors.monitor import Monitor, Then
from ..hooks.monitors.probe import ProbeSource
from ..hooks.positions import Positions
from ..hooks.spec import Spec, arguments_of
from ..hooks.vectors.files import Source
from ..utils.arguments import PromptError
from .specs import INTERVENTIONS, MAX_THEN, MONITORS, part_class, probe_class

TAGGED = {"interventions": INTERVENTIONS, "monitors": MONITORS}
"""Field of a request -> the classes of its objects."""
MAX_NUMBERS = 1 << 20
"""Most numbers of a vector that is written as lists. Base64 has no such limit."""
MAX_NAME = 256
"""Most characters of a stored vector's name."""


class CallSizes:
    """Counts the items in the specs of a call.

    Args:
        prompts: number of prompts that each list of specs is for.
        max_model_len: tokens that the context holds.
    """

    def __init__(self, prompts: int, max_model_len: int) -> None:
        self._prompts, self._room = prompts, max_model_len
        self._specs = self._listed = 0

    def check(self, lists: Sequence[Sequence[Any]], field: str) -> None:
        """Check the lists of specs of a field. Raises PromptError: something is larger than its limit."""
        for specs in lists:
            if len(specs) > MAX_SPECS:
                raise PromptError(f"{field} has {len(specs)} entries; a prompt takes at most {MAX_SPECS}")
            self._count(len(specs), field)
            for i, spec in enumerate(specs):
                cls = Capture if field == "capture" else TAGGED[field].class_of(spec)
                self._check_spec(cls, spec, f"{field}[{i}]")

    def _count(self, specs: int, what: str) -> None:
        self._specs += specs * self._prompts
        if self._specs > MAX_CALL_SPECS:
            raise PromptError(
                f"{what}: the call has {self._specs} interventions, captures and vectors by layer or more, counting each "
                f"for each prompt; at most {MAX_CALL_SPECS}: send fewer prompts at a time"
            )

    def _check_spec(self, cls: type[Spec] | None, spec: Any, what: str) -> None:
        """Check the fields of an object of JSON. One that names no class is refused without being walked."""
        if cls is None or not isinstance(spec, Mapping):
            return
        for argument in arguments_of(cls):
            value, name = spec.get(argument.name), f"{what}.{argument.name}"
            if value is None:
                continue
            if argument.hint == Source:
                self._check_vector(value, name)
            elif argument.hint == ProbeSource:
                cls = probe_class(value)
                self._check_vector(value, name) if cls is None else self._check_spec(cls, value, name)
            elif argument.hint == Then:
                acting = value if isinstance(value, list) else [value]
                _check_count(len(acting), MAX_THEN, name)
                for i, one in enumerate(acting):
                    cls = INTERVENTIONS.class_of(one)
                    self._check_spec(None if cls is Monitor else cls, one, f"{name}[{i}]")
            elif argument.hint == Positions and isinstance(value, list):
                self._check_positions(len(value), name)
            elif isinstance(value, list):
                _check_count(len(value), MAX_NAMED, name)
            elif argument.part is not None:
                self._check_spec(part_class(argument.part, value), value, name)

    def _check_positions(self, count: int, what: str) -> None:
        _check_count(
            count, self._room, what, " positions; the context (max_model_len) holds {most}: use a range or a slice"
        )
        self._listed += count * self._prompts
        if self._listed > MAX_LISTED:
            raise PromptError(
                f"{what}: the call lists {self._listed} positions or more; at most {MAX_LISTED}: use ranges"
            )

    def _check_vector(self, value: Any, what: str) -> None:
        if isinstance(value, str):
            _check_count(len(value), MAX_NAME, what, " characters; the name of a vector has at most {most}")
        elif isinstance(value, list):
            _check_count(_numbers(value), MAX_NUMBERS, what, " numbers; as lists at most {most}: use base64")
        elif isinstance(value, Mapping) and isinstance(layers := value.get("layers"), Mapping):
            _check_count(len(layers), MAX_NAMED, f"{what}.layers")
            self._count(len(layers), what)
            for layer, vector in layers.items():
                self._check_vector(vector if isinstance(vector, list) else None, f"{what}.layers.{layer}")


def _check_count(count: int, most: int, what: str, expected: str = " entries; at most {most}") -> None:
    if count > most:
        raise PromptError(f"{what} has {count}{expected.format(most=most)}")


def _numbers(value: Any) -> int:
    """Numbers of a nested list, if all inner lists are as long as the first; torch checks that."""
    count = 1
    while isinstance(value, list) and value and count <= MAX_NUMBERS:
        count, value = count * len(value), value[0]
    return count
