"""Positions of a request: the forms that a caller may write, and the windows that they become."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..core.limits import MAX_LISTED, MAX_POSITION
from ..utils.arguments import is_whole, shown
from .image_words import Images, Located, has_words, is_word, numbers_of


@dataclass(frozen=True)
class Generated:
    """Positions after the prompt: ``Generated(0, 8)`` selects the first 8 new tokens, ``Generated(step=4)`` every fourth.

    Positions are positions of input tokens. Position 0 is the first new token, as the input that yields the second. The first new
    token itself is computed at the prompt's last position, -1. ``Generated(-1)`` selects all positions that yield a new token.

    Args:
        start: first position, counted from the end of the prompt; -1 is the prompt's last.
        stop: one past the last position; None for no end.
        step: distance between positions.

    Raises:
        ValueError: an argument is not a whole number or too large, ``start < -1``, ``stop <= start``, or ``step < 1``.
    """

    start: int = 0
    stop: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if not all(is_whole(value) for value in (self.start, 0 if self.stop is None else self.stop, self.step)):
            raise ValueError(f"{self}: whole numbers are expected")
        if max(self.start, self.stop or 0, self.step) > MAX_POSITION:
            raise ValueError(f"{self}: positions go up to {MAX_POSITION}")
        if self.start < -1 or self.step < 1 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(
                f"{self}: expected -1 <= start < stop, and step >= 1; how many tokens come is not known before"
            )


Positions = (
    Literal["all", "prompt", "generated", "image", "text"] | int | Sequence[int | str] | slice | Generated | Tensor
)
"""Selected positions of input tokens, from 0. A request has prompt + generated - 1 positions.

- ``"all"``: every position.
- ``"prompt"``: the positions of the prompt. The last one yields the first new token.
- ``"generated"``: the positions after the prompt.
- ``"image"``, ``"image[0]"``, ``"text"``: the prompt's images, its first image, its other positions. A list may mix them.
- a whole number, or a list, tuple, range or tensor of them: positions of the prompt. Negative numbers count from the prompt's
  end. Each position must exist, but with ``missing="skip"`` those that a prompt does not have are left out.
- a mask, a bool for each position of the prompt: a tensor, an array or a list.
- a slice of the prompt, as Python slices a list: ``slice(None, None, 4)`` selects every fourth position.
- `Generated`: some of the positions after the prompt.

Logits exist only where a token is sampled: at the prompt's last position and at the positions after the prompt. An intervention
at `logits` ignores its other positions; a `Capture` at `logits` reads ``"all"`` as these, and refuses others. Requests with
``prompt_logprobs``, and traces with ``with lm.trace(...)``, have logits for the whole prompt.
"""


_Indexes = tuple[int, ...] | range
_Words = tuple[int | str, ...]


class Masked(tuple[int, ...]):
    """Positions that a mask selects."""

    length: int

    @classmethod
    def of(cls, mask: Sequence[bool]) -> Masked:
        """The positions where `mask` is true."""
        found = cls(place for place, selected in enumerate(mask) if selected)
        found.length = len(mask)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Masked.of, ([place in self for place in range(self.length)],)


@dataclass(frozen=True)
class Window:
    """Positions ``start, start + step, ...`` below `stop`; None for no end."""

    start: int
    stop: int | None = None
    step: int = 1

    @property
    def size(self) -> int | None:
        """Number of positions; None for no end."""
        return None if self.stop is None else len(range(self.start, self.stop, self.step))

    def among(self, first: int, stop: int) -> int:
        """Number of its positions p with ``first <= p < stop``."""
        skipped = max(0, -(-(first - self.start) // self.step))
        last = stop if self.stop is None else min(stop, self.stop)
        return len(range(self.start + skipped * self.step, last, self.step))


def windows_of(positions: Positions, prompt_len: int, missing: str = "error") -> tuple[Window, ...]:
    """`positions` as ascending windows that do not overlap. A window without end is the only one.

    Args:
        missing: "skip" leaves out positions beyond the prompt; there may be no windows then.

    Raises:
        ValueError: unknown positions, positions beyond the prompt, a position named twice, or an empty slice.
    """
    positions = located(positions, (), prompt_len, missing)
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
        if not selected and missing == "skip":
            return ()
        if not selected:
            raise ValueError(f"{positions} selects nothing of a prompt of {prompt_len} tokens")
        return (Window(selected.start, selected[-1] + 1, selected.step if len(selected) > 1 else 1),)
    if missing == "skip":
        positions = existing(positions, prompt_len)
    return progressions(sorted(absolute_positions(positions, prompt_len)))


def missing_of(positions: Positions, prompt_len: int) -> int:
    """Number of named positions that a prompt does not have. A word for an image counts as one."""
    found: Any = located(positions, (), prompt_len, "skip") if has_words(positions) else positions
    indexes: _Indexes = found if isinstance(found, tuple | range) else ()
    return len(indexes) - len(existing(indexes, prompt_len)) + (indexes.missing if isinstance(indexes, Located) else 0)


def located(
    positions: Positions, images: Images, prompt_len: int, missing: str = "error"
) -> Literal["all", "prompt", "generated"] | _Indexes | slice | Generated:
    """Checked positions with numbers in place of words for images.

    Args:
        missing: "skip" leaves out images that the prompt does not have.

    Raises:
        ValueError: unknown positions, or an image that the prompt does not have.
    """
    checked: Any = checked_positions(positions)
    return numbers_of(checked, images, prompt_len, missing) if has_words(checked) else checked


def existing(indexes: _Indexes, prompt_len: int) -> _Indexes:
    """The indexes that a prompt has, in the order given. A range stays a range, and is not walked."""
    if not isinstance(indexes, range):
        return tuple(index for index in indexes if -prompt_len <= index < prompt_len)
    ascending = indexes if indexes.step > 0 else indexes[::-1]
    first, stop = bisect_left(ascending, -prompt_len), bisect_left(ascending, prompt_len)
    return indexes[first:stop] if indexes.step > 0 else indexes[len(indexes) - stop : len(indexes) - first]


def ordinals_of(windows: tuple[Window, ...], positions: Tensor) -> Tensor:
    """The rank of each position among the windows' positions, from 0; -1 for positions outside of the windows.

    Args:
        positions: [rows], integers.

    Returns:
        [rows] with the dtype and device of `positions`.
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


def ordinal_of(windows: tuple[Window, ...], position: int) -> int:
    """Single-position version of `ordinals_of`."""
    before = 0
    for window in windows:
        offset = position - window.start
        if offset >= 0 and offset % window.step == 0 and (window.stop is None or position < window.stop):
            return before + offset // window.step
        before += window.size or 0
    return -1


def selected(windows: Iterable[Window], stop: int, first: int = 0) -> np.ndarray:
    """Positions from `first` to `stop` that are in the windows: [stop - first] bool."""
    found = np.zeros(stop - first, dtype=bool)
    for window in windows:
        start, end = window.start - first, stop if window.stop is None else window.stop
        found[start if start >= 0 else start % window.step : max(end - first, 0) : window.step] = True
    return found


def checked_positions(positions: Positions) -> str | _Indexes | _Words | slice | Generated:
    """`positions` in an immutable form: a list becomes a tuple, a number a tuple of one.

    Raises:
        ValueError: unknown positions, or none.
    """
    if isinstance(positions, Generated | Located):
        return positions
    if isinstance(positions, str) and (positions in ("all", "prompt", "generated") or is_word(positions)):
        return positions
    if isinstance(positions, slice):
        parts = (positions.start, positions.stop, positions.step)
        whole = all(part is None or is_whole(part) for part in parts)
        if not whole or (positions.step is not None and positions.step < 1):
            raise ValueError(f"positions={positions}: a slice has whole numbers, and a step of at least 1")
        return positions
    if isinstance(positions, range):
        return _checked_range(positions)
    indexes = _listed(positions)
    words = not all(map(is_whole, indexes))
    if words and not all(is_whole(index) or is_word(index) for index in indexes):
        hint = "; the last one of the prompt is -1" if isinstance(positions, str) and positions == "last" else ""
        raise ValueError(
            f"positions={shown(positions)}: expected 'all', 'prompt', 'generated', 'image', 'image[0]', 'text', whole numbers or a "
            f"mask [positions], a range, a slice, or Generated(...){hint}"
        )
    if not len(indexes):
        raise ValueError(f"positions={shown(positions)} selects nothing")
    if isinstance(indexes, Masked):
        return indexes
    numbers = [index for index in indexes if not isinstance(index, str)] if words else indexes
    largest = max(map(abs, numbers), default=0)
    if largest > MAX_POSITION:
        raise ValueError(f"positions={shown(positions)}: {largest} is too large; positions go up to {MAX_POSITION}")
    if words:
        return tuple(str(index) if isinstance(index, str) else int(index) for index in indexes)
    return tuple(map(int, indexes))


def _checked_range(positions: range) -> range:
    if not positions:
        raise ValueError(f"positions={positions} selects nothing")
    if max(abs(positions[0]), abs(positions[-1])) > MAX_POSITION:
        raise ValueError(f"positions={positions}: positions go up to {MAX_POSITION}")
    return positions


def _listed(positions: Any) -> Sequence[Any]:
    """A number, list, tensor or array as a sequence; booleans as the positions that they select."""
    count = prod(positions.shape) if hasattr(positions, "tolist") else len(positions) if _is_list(positions) else 1
    if count > MAX_LISTED:
        raise ValueError(
            f"positions lists {count} positions; at most {MAX_LISTED} can be listed: use a range or a slice"
        )
    listed: Any = positions.tolist() if hasattr(positions, "tolist") else positions
    if isinstance(listed, Masked):
        return listed
    if _is_list(listed):
        return Masked.of(listed) if listed and all(isinstance(index, bool) for index in listed) else listed
    return (listed,)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def absolute_positions(indexes: _Indexes, prompt_len: int) -> list[int]:
    """Positions counted from the prompt's start, in the order given.

    Raises:
        ValueError: a position beyond the prompt, or one named twice.
    """
    if isinstance(indexes, Masked) and indexes.length != prompt_len:
        raise ValueError(f"the mask has {indexes.length} positions, and the prompt {prompt_len} tokens")
    indexes = indexes[: 2 * prompt_len + 1]  # longer lists have one beyond the prompt or named twice
    beyond = list(islice((index for index in indexes if not -prompt_len <= index < prompt_len), 5))
    if beyond:
        raise ValueError(
            f"positions [{', '.join(map(str, beyond))}] are beyond the prompt, which has {prompt_len} tokens; "
            "Generated(...) means those that follow it, and missing='skip' leaves them out"
        )
    absolute = [index + prompt_len if index < 0 else index for index in indexes]
    if len(set(absolute)) < len(absolute):
        raise ValueError(f"position {_first_repeated(absolute)} is named twice in a prompt of {prompt_len} tokens")
    return absolute


def _first_repeated(values: Iterable[int]) -> int | None:
    seen: set[int] = set()
    return next((value for value in values if value in seen or seen.add(value)), None)


def progressions(positions: list[int]) -> tuple[Window, ...]:
    """Ascending positions as windows, one per run of equal steps."""
    windows, start = [], 0
    while start < len(positions):
        end = start + 1
        step = positions[end] - positions[start] if end < len(positions) else 1
        while end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        windows.append(Window(positions[start], positions[end - 1] + 1, step))
        start = end
    return tuple(windows)
