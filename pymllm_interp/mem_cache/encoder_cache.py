"""`EncoderCache`: the vision tower's states of images, by their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor


class EncoderCache:
    """States [tokens, width] by content. Past the budget, the least recently used ones are dropped.

    Args:
        budget: most tokens, unless one step needs more.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.num_tokens, self.num_hits, self.num_computed = budget, 0, 0, 0
        self._states: OrderedDict[bytes, Tensor] = OrderedDict()

    def __contains__(self, content: bytes) -> bool:
        return content in self._states

    def __getitem__(self, content: bytes) -> Tensor:
        self._states.move_to_end(content)
        return self._states[content]

    def put(self, content: bytes, states: Tensor, keep: Collection[bytes]) -> None:
        """Add the states of an image, and drop others than `keep` until they are within the budget."""
        self._states[content] = states
        self.num_tokens += len(states)
        self.num_computed += 1
        for other in [known for known in self._states if known not in keep]:
            if self.num_tokens <= self.budget:
                break
            self.free((other,))

    def free(self, contents: Iterable[bytes]) -> None:
        """Drop the states of these images, as far as they are there."""
        for content in contents:
            if (states := self._states.pop(content, None)) is not None:
                self.num_tokens -= len(states)

    def reset(self) -> None:
        """Drop all states."""
        self.free(list(self._states))

    def stats(self) -> dict[str, Any]:
        """Counts of images and their tokens that are kept, of images computed, and of images found."""
        return {
            "images": len(self._states), "tokens": self.num_tokens, "budget": self.budget, "computed": self.num_computed,
            "hits": self.num_hits,
        }  # fmt: skip
