"""Estimates of step times from the steps so far. They set the launch time of the next step and its number of prompt tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.step import SchedulerOutput

SMOOTHING = 0.3
"""Weight of the latest step in a moving average."""
POLL_S = 1e-3
SLACK_S = 3e-4
"""Time that a thread takes to wake up."""
MIN_CHUNK = 16
"""Fewest prompt tokens of a step that holds any, however long they take."""


class StepTimes:
    """Seconds of a step: a time for its decode rows, and more for each prompt token.

    Both are moving averages, for similar numbers of rows and of tokens: small prompts cost little beside the weights' bytes.
    """

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}
        self._per_token: dict[int, float] = {}

    def predict(self, rows: int, prompt_tokens: int) -> float | None:
        """Seconds of a step with these numbers of decode rows and prompt tokens; None before any such step."""
        decode = _nearest(self._decode, _row_key(rows))
        if not prompt_tokens:
            return decode
        per_token = _nearest(self._per_token, _token_key(prompt_tokens))
        return None if per_token is None else (decode or 0.0) + per_token * prompt_tokens

    def prompt_tokens(self, rows: int, seconds: float) -> int | None:
        """Prompt tokens that fit beside this many decode rows in a step of `seconds`; None before any such step."""
        decode = _nearest(self._decode, _row_key(rows))
        if decode is None or not self._per_token:
            return None
        room = max(0.0, seconds - decode)
        found = [min(int(room / each), (1 << key) - 1) for key, each in self._per_token.items() if each > 0]
        fits = [tokens for tokens in found if tokens * self._token_seconds(tokens) <= room]
        return max(MIN_CHUNK, *fits, 0)

    def _token_seconds(self, tokens: int) -> float:
        return _nearest(self._per_token, _token_key(tokens)) or 0.0

    def record(self, rows: int, prompt_tokens: int, seconds: float, at_most: bool = False) -> None:
        """Count a step.

        Args:
            at_most: the device may have waited for the host within these seconds.
        """
        if not prompt_tokens:
            _average(self._decode, _row_key(rows), seconds, at_most)
            return
        decode = _nearest(self._decode, _row_key(rows)) or 0.0
        _average(self._per_token, _token_key(prompt_tokens), max(0.0, seconds - decode) / prompt_tokens, at_most)

    def shorten(self, rows: int, prompt_tokens: int) -> None:
        """The device was done before such a step was expected to be."""
        table, key = (self._per_token, _token_key(prompt_tokens)) if prompt_tokens else (self._decode, _row_key(rows))
        if key in table:
            table[key] *= 1 - SMOOTHING


@dataclass
class _Launched:
    # fmt: off
    rows:          int
    prompt_tokens: int
    begun:         float | None  # time at which the device began; None: at the end of the step before it
    counts:        bool = True   # whether the averages include it
    ends_early:    bool = False  # not all layers run, so that the averages tell nothing of it
    # fmt: on


class StepPacing:
    """Launch time of the next step: late, so that arriving requests can join it, but before the device waits.

    Args:
        times: durations of the steps.
        clock: seconds.
    """

    def __init__(self, times: StepTimes, clock: Callable[[], float] = time.perf_counter) -> None:
        self.times, self._clock = times, clock
        self._launched: deque[_Launched] = deque()
        self._ended: float | None = None
        self._host = 0.0  # seconds to schedule and launch a decode step
        self._waited_for: _Launched | None = None

    def launched(self, step: SchedulerOutput, started: float, idle: bool) -> None:
        """A step was launched.

        Args:
            started: time at which the host began the step.
            idle: the device was done with all steps before it.
        """
        rows = sum(entry.decodes for entry in step.scheduled)
        prompt_tokens = step.total_num_scheduled_tokens - rows
        if not prompt_tokens:
            self._host += SMOOTHING * (self._clock() - started - self._host)
        if idle and self._waited_for is not None:  # too long: its end was seen late
            self.times.shorten(self._waited_for.rows, self._waited_for.prompt_tokens)
            self._waited_for.counts = False
        self._waited_for = None
        early = step.depth is not None
        begun = started if idle else None
        self._launched.append(_Launched(rows, prompt_tokens, begun, not (step.drafts or early), early))

    def ended(self) -> None:
        """The tokens of the earliest launched step were read."""
        now = self._clock()
        if not self._launched:  # forgotten
            return
        step = self._launched.popleft()
        begun = self._ended if step.begun is None else step.begun
        if begun is not None and step.counts:
            self.times.record(step.rows, step.prompt_tokens, now - begun, at_most=step.begun is not None)
        self._ended = now

    def forget(self) -> None:
        """Drop the launched steps, after one failed."""
        self._launched.clear()
        self._ended = self._waited_for = None

    def seconds_left(self) -> float:
        """Seconds to wait before the next step, 0 for none. Then the device is to be asked again: it may be faster than thought."""
        if len(self._launched) != 1 or self._launched[0].ends_early:
            return 0.0
        step = self._launched[0]
        begun = self._ended if step.begun is None else step.begun
        seconds = self.times.predict(step.rows, step.prompt_tokens)
        if begun is None or seconds is None:
            return 0.0
        # Steps with prompts are less alike than decode steps.
        margin = 1.25 * self._host + SLACK_S + (0.15 if step.prompt_tokens else 0.05) * seconds
        left = begun + seconds - margin - self._clock()
        self._waited_for = step if left > 0 else self._waited_for
        return min(max(0.0, left), POLL_S)


def _row_key(rows: int) -> int:
    return -(-rows // 8)


def _token_key(tokens: int) -> int:
    return tokens.bit_length()


def _nearest(table: dict[int, float], key: int) -> float | None:
    return table[min(table, key=lambda known: abs(known - key))] if table else None


def _average(table: dict[int, float], key: int, value: float, at_most: bool) -> None:
    known = table.get(key)
    if known is None or (at_most and value < known):
        table[key] = value
    elif not at_most:
        table[key] = known + SMOOTHING * (value - known)
