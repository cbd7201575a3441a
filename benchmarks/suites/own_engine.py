"""Our engine as `measure` takes it: plain, with interventions, or with traced requests among the plain ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pymllm_interp.bench.common import greedy
from pymllm_interp.core.events import Event, FinishedEvent
from pymllm_interp.hooks.interventions.op import Op
from pymllm_interp.lm import LM

from .serving.traffic import TokenStream


class Receiver:
    """Notes the time of each token of a request. Subscribes to the request's events."""

    def __init__(self, stream: TokenStream) -> None:
        self._times, self._ended = stream.times, threading.Event()
        self._last: FinishedEvent | None = None

    def put(self, event: Event) -> None:
        """Take the event of a token. Called on the engine's thread."""
        self._times.append(time.perf_counter())
        if type(event) is FinishedEvent:
            self._last = event
            self._ended.set()

    def wait(self) -> None:
        """Wait for the end. Raises RuntimeError where the request has failed."""
        self._ended.wait()
        last = self._last
        assert last is not None
        if last.error is not None or last.finish_reason != "length":
            raise RuntimeError(f"request {last.request_id} ended with {last.finish_reason!r}") from last.error


class OurEngine:
    """An `LM` under load.

    Tokens are noted on the engine's thread, when the engine tells its clients. The calling thread sleeps between arrivals.

    Args:
        interventions: of each request, by index.
        traced: index of a request -> the layer that its block reads at each step. Each has a thread of its own, which waits.
    """

    name = "pymllm-interp"

    def __init__(
        self, lm: LM, interventions: Sequence[Sequence[Op]] | None = None, traced: Mapping[int, int] | None = None
    ) -> None:
        self._lm, self._interventions, self._traced = lm, interventions, traced or {}
        self.vocab_size, self.max_model_len = lm.limits.vocab_size, lm.limits.max_model_len
        self._receivers: list[Receiver] = []
        self._pool = ThreadPoolExecutor(max(1, len(self._traced)))
        self._blocks: list[Future[None]] = []

    def submit(self, streams: Sequence[TokenStream]) -> None:
        """Start requests, all in one submission."""
        for stream in streams:
            stream.traced = stream.index in self._traced
        plain = [stream for stream in streams if not stream.traced]
        if plain:
            declared = self._interventions
            backend: Any = self._lm.backend
            made = backend.prepare(
                self._lm._requests.submission(
                    [stream.prompt for stream in plain],
                    [greedy(stream.new_tokens) for stream in plain],
                    {} if declared is None else {"interventions": [declared[stream.index] for stream in plain]},
                    stream=True,
                )
            )
            receivers = [Receiver(stream) for stream in plain]
            backend.send(list(zip(made, receivers, strict=True)))
            self._receivers += receivers
        self._blocks += [self._pool.submit(self._trace, stream) for stream in streams if stream.traced]

    def _trace(self, stream: TokenStream) -> None:
        lm, layer, prompt, new_tokens = self._lm, self._traced[stream.index], stream.prompt, stream.new_tokens
        with lm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True) as tracer:
            kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in tracer.iter[:]:
                kept.append(lm.model.layers[layer].output[0, -1])
        stream.times += [time.perf_counter()] * len(kept)

    def serve(self, until: float | None) -> None:
        """Sleep until then, or wait until all requests have ended: the engine has a thread of its own."""
        if until is not None:
            time.sleep(max(0.0, until - time.perf_counter()))
            return
        for receiver in self._receivers:
            receiver.wait()
        for block in self._blocks:
            block.result()
        self._receivers, self._blocks = [], []

    def execution(self) -> Mapping[str, int]:
        """Steps so far, by execution and reason."""
        return self._lm.engine.stats()["execution"]
