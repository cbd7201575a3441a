"""`SiteRows`: the captured rows of one site, as the steps of a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ...positions import Window, selected
from .step_loop import LoopRows


class SiteRows:
    """Captured rows of a site, by step.

    Args:
        states: [positions, width] in ascending order.
        windows: the positions.
        last_only: the step that computes the prompt has the last row only.

    Attributes:
        generated: [steps, 1, 1, width] of the later steps.
        first: generated position of the first of them.
    """

    def __init__(self, states: torch.Tensor, windows: Sequence[Window], prompt_len: int, last_only: bool) -> None:
        of_prompt = sum(window.among(0, prompt_len) for window in windows)
        self._states, self._windows, self._prompt_len, self._last_only = (
            states[:of_prompt],
            windows,
            prompt_len,
            last_only,
        )
        self.generated = states[of_prompt:, None, None]
        self.first = max(max((window.start - prompt_len for window in windows), default=0), 0)

    @classmethod
    def of(
        cls,
        states: torch.Tensor,
        windows: Sequence[Window],
        prompt_len: int,
        last_only: bool,
        device: torch.device | None,
    ) -> SiteRows:
        """Rows from captured states [positions, ...], on a device; None: their own."""
        states = states.reshape(len(states), -1) if device is None else states.to(device).flatten(1)
        return cls(states, windows, prompt_len, last_only)

    @cached_property
    def prompt(self) -> torch.Tensor:
        """[1, tokens, width] of the step that computes the prompt. Rows that were not captured are NaN."""
        states = self._states[-1:] if self._last_only else self._states
        if not self._is_filled:
            return states.unsqueeze(0)
        prompt = states.new_full((1, self._prompt_len, states.shape[1]), torch.nan)
        prompt[0, self._has] = states
        return prompt

    @property
    def _is_filled(self) -> bool:
        """Whether `prompt` has rows that were not captured, so that it is not a view of the captured ones."""
        return not self._last_only and len(self._states) < self._prompt_len

    def of_step(self, step: int, taken: bool, whole: bool) -> torch.Tensor:
        """[1, tokens, width] of one step.

        Args:
            taken: most steps are not asked for.
            whole: contiguous, in separate storage, as a pass computes it. A single row looks the same without that copy.
        """
        rows = self.prompt if step == 0 else (self.generated if taken else self.by_step)[step - 1 - self.first]
        if not whole or (step == 0 and self._is_filled):
            return rows
        return rows.clone(memory_format=torch.contiguous_format)

    @cached_property
    def _has(self) -> torch.Tensor:
        """[prompt tokens] bool: which rows of the prompt were captured."""
        return torch.from_numpy(selected(self._windows, self._prompt_len))

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
        first = max(start, 1) - 1 - self.first
        generated = self.generated[first : stop - 1 - self.first] if first >= 0 else self.generated[:0]
        if len(generated) != stop - max(start, 1):
            raise LookupError(f"steps {start} to {stop}")
        if start > 0:
            return LoopRows(None, generated)
        return LoopRows(self._states[None, -1:] if last and self._has[-1] else self.prompt, generated)
