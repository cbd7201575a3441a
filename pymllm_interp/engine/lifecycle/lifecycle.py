"""`EngineLifecycle`: pauses an engine, and gives its model new weights."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ...core.events import EngineClosedError, EngineSleepingError
from ...core.receipt import Receipt
from ...core.request import Request, RequestStatus
from ...models.updates import WeightUpdate
from ...models.weights.model_state import ModelState
from ..engine import Engine
from .intake import RESUMED

MODES = ("abort", "wait", "keep")
ON_THE_WAY = 10.0
"""Seconds in which an order that was sent before another one may come after it."""


def wait_for_requests(engine: Engine, drain: Callable[[], Future[None]] | None = None) -> None:
    """Hold new requests back until all others have ended; then the engine is paused.

    An interrupted wait, as by Ctrl-C, leaves the engine as it was, unless another call waits, too.
    """
    intake, begun = engine.intake, list[tuple[bool, Future[None]]]()

    def begin() -> Future[None]:
        begun.append((intake.paused, (drain or intake.drain)()))
        return begun[0][1]

    try:
        engine.call(begin).result()
    except Exception:  # the engine's answer: it was resumed, or has ended
        raise
    except BaseException:
        with contextlib.suppress(EngineClosedError):
            engine.call(lambda: [intake.undo(*each) for each in begun])
        raise


class Stamps:
    """Times of the pauses and resumes of fronts, which reach the replicas of a model in different sequences."""

    def __init__(self) -> None:
        self._newest, self._until = 0, 0.0

    def is_late(self, stamp: int | None) -> bool:
        """Whether a newer order came before. None is always the newest. So is an order long after the others: a clock was set."""
        now = time.monotonic()
        if stamp is None or (stamp < self._newest and now < self._until):
            return stamp is not None
        self._newest, self._until = stamp, now + ON_THE_WAY
        return False


class EngineLifecycle:
    """Orders that concern all requests of an engine. Each waits for the engine's thread, between two steps.

    Args:
        engine: a started engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._one_update, self._stamps = threading.Lock(), Stamps()

    @property
    def is_paused(self) -> bool:
        """Whether no step is launched, or new requests wait for the running ones to end."""
        return self._engine.intake.paused or self._engine.intake.held is not None

    def pause(self, mode: str = "abort", stamp: int | None = None) -> bool:
        """Pause the engine, see `LM.pause`. Returns when it is paused; False: a newer `resume` came before, and it runs.

        Args:
            stamp: time of the order, for `Stamps`. The newest order counts.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        if mode == "wait":
            wait_for_requests(self._engine, partial(self._drain, stamp))
            return True
        return self._engine.call(partial(self._pause, mode, stamp))

    def resume(self, stamp: int | None = None) -> bool:
        """Let requests run again. Returns whether they do; False: a newer `pause` came before."""
        return self._engine.call(partial(self._resume, stamp))

    def _resume(self, stamp: int | None) -> bool:
        if not self._stamps.is_late(stamp):
            self._engine.intake.resume()
        return not self.is_paused

    def _drain(self, stamp: int | None) -> Future[None]:
        intake = self._engine.intake
        if not self._stamps.is_late(stamp) or intake.held is not None:
            return intake.drain()
        done = Future[None]()
        if intake.paused:
            done.set_result(None)
        else:
            done.set_exception(RuntimeError(RESUMED))
        return done

    def _pause(self, mode: str, stamp: int | None) -> bool:
        late = self._stamps.is_late(stamp)
        self._engine.sync_previous_step()
        if not late:
            self._engine.intake.stop()
        if mode == "abort":
            self._engine.intake.end_all()
        return self.is_paused

    # -- weights ----------------------------------------------------------------------------

    def new_update(self, draft: bool = False) -> WeightUpdate:
        """Update of the model, or of the draft model. Raises ValueError: the engine has no draft model."""
        runner: Any = self._engine.runner
        if draft:
            if runner.drafter is None:
                raise ValueError("this engine has no draft model: speculative={'model': ...} sets one")
            runner = runner.drafter.runner
        if runner.source is None or runner.model is None:
            raise EngineClosedError("the engine was shut down")
        return WeightUpdate(runner.get_model(), runner.source.hf_config, runner.model_config)

    def install(self, update: WeightUpdate, draft: bool = False, whole: bool = False) -> dict[str, int]:
        """Check an update, and write it between two steps. Live requests continue with the new weights.

        KV of the old weights is not used again: running requests compute their tokens' KV anew. Captured rows and scores stay.

        Returns:
            {"tensors": their number, "version": the new `ModelWeights.version`}.

        Raises:
            WeightsError: the weights do not fit. The engine keeps its old ones.
            ValueError: traces are under way. Their blocks cannot run again.
            EngineClosedError: the write failed halfway, and the engine has ended.
        """
        with self._one_update:
            update.check(whole)
            return self._engine.call(partial(self._install, update, draft))

    def _install(self, update: WeightUpdate, draft: bool) -> dict[str, int]:
        engine, runner, count = self._engine, self._engine.runner, len(update)
        state, scheduler = runner.model_state, engine.scheduler
        assert state is not None
        if state.asleep:  # since the caller looked
            raise EngineSleepingError("the weights are asleep: lm.wake(tags=['weights']) gives them memory")
        engine.sync_previous_step()
        if not draft:
            self._refuse_traces()
        before = state.version
        if not draft:
            for request in list(scheduler.running):
                request.num_preemptions += 1
                scheduler.put_back(request)
        try:
            update.write()
        except BaseException as error:
            raise engine.end_with(EngineClosedError(f"new weights were written in part: {error!r}")) from error
        if runner.drafter is not None:
            runner.drafter.sequences.clear()
        if not draft:
            scheduler.kv.reset_prefix_cache()
            begun = [
                (
                    request,
                    len(request.output_token_ids) if request.output_token_ids or request.prompt_computed else None,
                )
                for request in (*scheduler.live, *(engine.intake.held or ()))
            ]
            note_weights(begun, state, before)
        return {"tensors": count, "version": state.version}

    def _refuse_traces(self) -> None:
        scheduler = self._engine.scheduler
        begun = [r.request_id for r in scheduler.live if r.trace is not None and r.status is not RequestStatus.WAITING]
        if begun:
            raise ValueError(
                f"{len(begun)} requests of traces are under way, and their blocks cannot run again with other weights: "
                "pause with mode='wait' or 'abort' first"
            )


def note_weights(live: Iterable[tuple[Request, int | None]], state: ModelState, before: int) -> None:
    """Note the weights of the tokens so far in receipts.

    Args:
        live: requests, each with its number of tokens so far; None for one that has not begun.
        before: version of these weights.
    """
    fingerprints = dict[str | None, str]()
    for request, num_tokens in live:
        if num_tokens is not None:
            request.receipt = request.receipt or Receipt()  # of a request without hooks, too
            request.receipt.made_with(before, num_tokens)
        elif request.receipt is not None and request.receipt.model:
            if request.adapter not in fingerprints:
                fingerprints[request.adapter] = state.fingerprint(request.adapter)
            request.receipt.model = fingerprints[request.adapter]
