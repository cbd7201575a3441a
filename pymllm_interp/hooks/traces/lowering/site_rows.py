"""`SiteRows`: the captured rows of one site, as the steps of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from ...positions import Window, selected


class LoopRows(NamedTuple):
    """The values of one site in some steps.

    Attributes:
        prompt: [1, tokens, width] of step 0; None if it is not among them.
        generated: [steps, 1, 1, width] of the others.
    """

    prompt: torch.Tensor | None
    generated: torch.Tensor

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LoopRows:
        """The results of a function of the values."""
        return LoopRows(None if self.prompt is None else function(self.prompt), function(self.generated))


class SitePlaces:
    """Places of a site's captured rows, of all prompts of one length.

    Args:
        windows: the captured positions.

    Attributes:
        of_prompt: number of rows of the prompt.
        first: generated position of the first later row.
    """

    def __init__(self, windows: Sequence[Window], prompt_len: int) -> None:
        self._windows, self.prompt_len = windows, prompt_len
        self.of_prompt = sum(window.among(0, prompt_len) for window in windows)
        self.first = max(max((window.start - prompt_len for window in windows), default=0), 0)

    @cached_property
    def has(self) -> torch.Tensor:
        """[prompt tokens] bool: which rows of the prompt were captured."""
        return torch.from_numpy(selected(self._windows, self.prompt_len))

    @cached_property
    def has_last(self) -> bool:
        """Whether the prompt's last row was captured."""
        return bool(self.has[-1])


class SiteRows:
    """Captured rows of a site, by step.

    Args:
        states: [positions, ...] in ascending order.
        last_only: the step that computes the prompt has the last row only.
        device: device of the rows; None: that of the states.

    Attributes:
        generated: [steps, 1, 1, width] of the later steps.
    """

    def __init__(self, states: torch.Tensor, places: SitePlaces, last_only: bool, device: torch.device | None) -> None:
        states = states if device is None else states.to(device)
        states = states if states.dim() == 2 else states.reshape(len(states), -1)
        self._places, self._last_only = places, last_only
        self._states = states[: places.of_prompt]
        self.generated = states[places.of_prompt :, None, None]

    @cached_property
    def prompt(self) -> torch.Tensor:
        """[1, tokens, width] of the step that computes the prompt. Rows that were not captured are NaN."""
        states = self._states[-1:] if self._last_only else self._states
        if not self._is_filled:
            return states.unsqueeze(0)
        prompt = states.new_full((1, self._places.prompt_len, states.shape[1]), torch.nan)
        prompt[0, self._places.has] = states
        return prompt

    @property
    def _is_filled(self) -> bool:
        """Whether `prompt` has rows that were not captured, so that it is not a view of the captured ones."""
        return not self._last_only and len(self._states) < self._places.prompt_len

    def of_step(self, step: int, taken: bool, whole: bool) -> torch.Tensor:
        """[1, tokens, width] of one step.

        Args:
            taken: most steps are not asked for.
            whole: contiguous, in separate storage, as a pass computes it. A single row looks the same without that copy.
        """
        rows = self.prompt if step == 0 else (self.generated if taken else self.by_step)[step - 1 - self._places.first]
        if not whole or (step == 0 and self._is_filled):
            return rows
        return rows.clone(memory_format=torch.contiguous_format)

    @cached_property
    def by_step(self) -> Sequence[torch.Tensor]:
        """[1, 1, width] of each later step."""
        return self.generated.unbind()

    def among(self, start: int, stop: int, last: bool) -> LoopRows:
        """The values of the steps from `start` on.

        Args:
            last: the last row of the prompt is enough.

        Raises:
            LookupError: they were not captured.
        """
        first, count = max(start, 1) - 1 - self._places.first, stop - max(start, 1)
        if count and (first < 0 or len(self.generated) < first + count):
            raise LookupError(f"steps {start} to {stop}")
        generated = self.generated[first : first + count]
        if start > 0:
            return LoopRows(None, generated)
        return LoopRows(self._states[None, -1:] if last and self._places.has_last else self.prompt, generated)
