"""Positions of a request: what a caller may write, and the windows that they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Generated:
    """Positions after the prompt: ``Generated(0, 8)`` are those of the first 8 new tokens, ``Generated(step=4)`` every fourth.

    A position is that of an input token: 0 is the first new token, when it is read to make the second one. The first new
    token itself was made at the prompt's last position.

    Raises:
        ValueError: numbers that are not whole, a start below 0, a stop that is not above it, or a step below 1.
    """

    start: int = 0
    stop: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if not all(_is_whole(value) for value in (self.start, 0 if self.stop is None else self.stop, self.step)):
            raise ValueError(f"{self}: whole numbers are expected")
        if self.start < 0 or self.step < 1 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(
                f"{self}: expected 0 <= start < stop, and step >= 1; how many tokens come is not known before"
            )


Positions = Literal["all", "prompt", "generated"] | int | Sequence[int] | slice | Generated
"""Which of a request's positions. Positions are those of input tokens, counted from 0, so a request has prompt + generated - 1.

- ``"all"``; ``"prompt"``; ``"generated"``: those after the prompt, hence not the one that makes the first new token.
- a whole number, or a list, tuple or range of them: of the prompt, negative ones from its end. Each must exist.
- a slice: of the prompt, as Python slices a list; ``slice(None, None, 4)`` is every fourth.
- `Generated`.

Logits are computed where a token is drawn, at the prompt's last position and those behind it: an op at `logits` acts at those of
its positions alone, and a `Capture` of ``"all"`` has those. One that names others is refused, unless the request has the logits
of its whole prompt (``prompt_logprobs``, ``with lm.trace(...)``).
"""


_Indexes = tuple[int, ...] | range


@dataclass(frozen=True)
class Window:
    """Positions ``start, start + step, ...`` below `stop`, or without end where that is None."""

    start: int
    stop: int | None = None
    step: int = 1

    @property
    def size(self) -> int | None:
        """How many positions; None where there is no end."""
        return None if self.stop is None else len(range(self.start, self.stop, self.step))

    def among(self, first: int, stop: int) -> int:
        """How many of its positions are `first` or later, and before `stop`."""
        skipped = max(0, -(-(first - self.start) // self.step))
        last = stop if self.stop is None else min(stop, self.stop)
        return len(range(self.start + skipped * self.step, last, self.step))


def windows_of(positions: Positions, prompt_len: int) -> tuple[Window, ...]:
    """`positions` of a request, as windows in ascending order that do not overlap. One without end is the only one.

    Raises:
        ValueError: positions that are not understood, indexes beyond the prompt, two that are the same position, or a
            slice that selects nothing.
    """
    positions = _checked_positions(positions)
    if positions == "all":
        return (Window(0),)
    if positions == "prompt":
        return (Window(0, prompt_len),)
    if positions == "generated":
        positions = Generated()
    if isinstance(positions, Generated):
        stop = None if positions.stop is None else prompt_len + positions.stop
        return (Window(prompt_len + positions.start, stop, positions.step),)
    if isinstance(positions, slice):
        selected = range(prompt_len)[positions]
        if not selected:
            raise ValueError(f"{positions} selects nothing of a prompt of {prompt_len} tokens")
        return (Window(selected.start, selected.stop, selected.step),)
    return progressions(sorted(_absolute(positions, prompt_len)))


def ordinals_of(windows: tuple[Window, ...], positions: Tensor) -> Tensor:
    """The place of each of `positions` [rows] among the windows' positions, counted from 0; -1 where it is none of them.

    Returns:
        [rows], of the dtype and on the device of `positions`.
    """
    ordinals, before = torch.full_like(positions, -1), 0
    for window in windows:
        offset = positions - window.start
        inside = (offset >= 0) & (offset % window.step == 0)
        if window.stop is not None:
            inside &= positions < window.stop
        ordinals = torch.where(inside, before + offset // window.step, ordinals)
        before += window.size or 0
    return ordinals


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _checked_positions(positions: Positions) -> Literal["all", "prompt", "generated"] | _Indexes | slice | Generated:
    """`positions` in a form that cannot change: a list becomes a tuple, a number a tuple of one."""
    if isinstance(positions, Generated) or (isinstance(positions, str) and positions in ("all", "prompt", "generated")):
        return positions
    if isinstance(positions, slice):
        parts = (positions.start, positions.stop, positions.step)
        whole = all(part is None or _is_whole(part) for part in parts)
        if not whole or (positions.step is not None and positions.step < 1):
            raise ValueError(f"positions={positions}: a slice has whole numbers, and a step of at least 1")
        return positions
    indexes: Any = positions if isinstance(positions, range | list | tuple) else (positions,)
    if not all(_is_whole(index) for index in indexes):
        listed = hasattr(positions, "tolist")  # a tensor, or an array
        hint = "; as a list: indexes.tolist(), or mask.nonzero()[:, 0].tolist()" if listed else ""
        hint = "; the last one of the prompt is -1" if positions == "last" else hint
        raise ValueError(
            f"positions={positions!r}: expected 'all', 'prompt', 'generated', whole numbers, a range, a slice, or "
            f"Generated(...){hint}"
        )
    if not len(indexes):
        raise ValueError(f"positions={positions!r} selects nothing")
    return indexes if isinstance(indexes, range) else tuple(int(index) for index in indexes)


def _absolute(indexes: _Indexes, prompt_len: int) -> list[int]:
    """Positions from the prompt's start, each once, in the order given."""
    beyond = [index for index in indexes if not -prompt_len <= index < prompt_len]
    if beyond:
        raise ValueError(
            f"positions [{', '.join(map(str, beyond[:5]))}] are beyond the prompt, which has {prompt_len} tokens; "
            "Generated(...) means those that follow it"
        )
    absolute = [index + prompt_len if index < 0 else index for index in indexes]
    if len(set(absolute)) < len(absolute):
        twice = next(position for position in absolute if absolute.count(position) > 1)
        raise ValueError(f"position {twice} is named twice in a prompt of {prompt_len} tokens")
    return absolute


def progressions(positions: list[int]) -> tuple[Window, ...]:
    """Ascending positions as windows, long runs of equal steps in one."""
    windows, start = [], 0
    while start < len(positions):
        end = start + 1
        step = positions[end] - positions[start] if end < len(positions) else 1
        while end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        windows.append(Window(positions[start], positions[end - 1] + 1, step))
        start = end
    return tuple(windows)
