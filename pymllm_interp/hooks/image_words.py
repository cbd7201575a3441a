"""Words for the positions of a prompt's images: "image", "image[0]", "image[-1]" and "text"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Images = Sequence[Sequence[int]]
"""Positions of each image of a prompt, ascending."""
WORD = re.compile(r"text|image(?:\[(-?\d{1,6})\])?")


class Located(tuple[int, ...]):
    """Positions that words select in one prompt. It may be empty.

    Attributes:
        missing: number of words for images that the prompt does not have.
    """

    missing = 0


def is_word(value: Any) -> bool:
    """Whether a value is one of the words."""
    return isinstance(value, str) and WORD.fullmatch(value) is not None


def has_words(positions: Any) -> bool:
    """Whether checked positions are or hold words."""
    return str in map(type, positions) if type(positions) is tuple else is_word(positions)


def numbers_of(words: str | Sequence[int | str], images: Images, prompt_len: int, missing: str) -> Located:
    """Numbers in place of words, in the order given.

    Args:
        missing: "skip" leaves out images that the prompt does not have.

    Raises:
        ValueError: an image that the prompt does not have, or words for more positions than it has.
    """
    found: list[int] = []
    absent, left, known = 0, prompt_len, dict[str, Sequence[int] | None]()
    for part in (words,) if isinstance(words, str) else words:
        if isinstance(part, int):
            found.append(part)
            continue
        if part not in known:
            known[part] = _of_word(part, images, prompt_len)
        own = known[part]
        if own is None and missing != "skip":
            has = f"{len(images)} images, image[0] to image[{len(images) - 1}]" if images else "no images"
            raise ValueError(f"positions {part!r}: the prompt has {has}; missing='skip' leaves others out")
        absent += own is None
        if (left := left - len(own or ())) < 0:  # lists of many words would be long ones
            raise ValueError(f"positions {part!r}: its words name a position of the prompt twice")
        found += own or ()
    made = Located(found)
    made.missing = absent
    return made


def _of_word(word: str, images: Images, prompt_len: int) -> Sequence[int] | None:
    """The positions of a word, or None for an image that the prompt does not have."""
    index = word.removeprefix("image").strip("[]")
    if index not in ("", "text"):
        return images[int(index)] if -len(images) <= int(index) < len(images) else None
    every = [place for image in images for place in image]
    return sorted({*range(prompt_len)}.difference(every)) if index == "text" else every or None
