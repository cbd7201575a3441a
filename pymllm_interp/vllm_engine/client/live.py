"""`Live`: a request between the client and vLLM."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from ...core.events import Subscriber
from ...core.request import Request
from ..payloads import TensorKey


class Live:
    """A request on its way.

    Attributes:
        task: task that serves it.
        reason: reason for its end, once requested.
        started: whether its task runs. A task that is cancelled before would never answer.
        sent: vLLM knows it.
        vllm_id: vLLM's id of it then.
        dots: (first position, dot products of monitors [slots, positions]) of steps that the monitors have not taken.
        num_scored: positions up to which dot products have come.
        scored: set when more come.
        engine: the data parallel engine that has it.
    """

    engine = 0

    def __init__(self, request: Request, subscriber: Subscriber) -> None:
        self.request, self.subscriber = request, subscriber
        self.task: asyncio.Task[None] | None = None
        self.reason: str | None = None
        self.keys: list[TensorKey] = []
        self.started, self.sent, self.vllm_id = False, False, ""
        self.dots: deque[tuple[int, np.ndarray]] = deque()
        self.num_scored, self.scored = 0, asyncio.Event()

    def feed(self, num_tokens: int) -> None:
        """Let the monitors take the dot products that are there when this many tokens are sampled."""
        monitors = self.request.monitors
        while monitors is not None and self.dots and monitors.num_taken < self.request.prompt_len + num_tokens - 1:
            monitors.take(*self.dots.popleft())
