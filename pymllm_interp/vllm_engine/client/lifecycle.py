"""`VllmLifecycle` and `VllmSleep`: pauses, new weights and sleep of vLLM, by its own calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ...core.events import EngineClosedError, EngineSleepingError
from ...core.request import Request
from ...engine.lifecycle.intake import RESUMED
from ...engine.lifecycle.lifecycle import MODES, Stamps, note_weights
from ...engine.lifecycle.sleep import TAGS
from ...models.weights.loading import WeightsError
from ...utils.arguments import shown
from ...wire.weights import SentWeights
from ..refusals import VllmRefusalError
from ..results import host_name
from ..settings import OURS
from .core import VllmCore
from .engine import VllmRequestEngine
from .weights import VllmUpdate, VllmWeights

UPDATE_SECONDS = 1800.0
"""Timeout of a rank that loads weights."""
ASLEEP = "the engine sleeps: lm.wake() (POST /wake_up) wakes it"


class VllmLifecycle:
    """Pauses and new weights of vLLM. A `client.lifecycle.orders.Lifecycle`.

    Args:
        core, engine, weights: vLLM, its requests, and the state of its weights.
        make_update: an empty update of the served model.
        has_experts: whether the model has experts.

    Attributes:
        held: whether the engine is to be paused when it wakes: vLLM itself forgets a pause.
    """

    held = False

    def __init__(
        self, core: VllmCore, engine: VllmRequestEngine, weights: VllmWeights, make_update: Callable[[], VllmUpdate],
        has_experts: bool,
    ) -> None:  # fmt: skip
        self._core, self._engine, self._weights, self._make_update = core, engine, weights, make_update
        self._has_experts, self._draining = has_experts, threading.Lock()
        self._one_order, self._stamps = threading.Lock(), Stamps()
        self._drained: Future[None] | None = None

    @property
    def is_paused(self) -> bool:
        """Whether vLLM schedules no new request."""
        return self._core.ask(self._core.llm.is_paused())

    def pause(self, mode: str = "abort", stamp: int | None = None) -> bool:
        """Pause the engine, see `EngineLifecycle.pause`. Raises ValueError: another mode."""
        if mode not in MODES:
            raise ValueError(f"pause(mode={shown(mode)}): expected 'abort', 'wait' or 'keep'")
        if mode == "abort":
            self._engine.abort_all()
        with self._one_order:
            late = self._stamps.is_late(stamp)
            if mode != "wait" and not late:
                self._core.ask(self._core.llm.pause_generation(mode=mode, clear_cache=False))
                self.held = True
        if mode == "wait" and late and not self.is_paused:
            raise RuntimeError(RESUMED)
        if mode == "wait" and not late:
            with self._draining:
                self._drain()
                self.held = True
        return not late or self.is_paused

    def _drain(self) -> None:
        """Pause when all requests have ended. An interrupted wait, as by Ctrl-C, leaves the engine as it was."""
        waiting = self._core.llm.pause_generation(mode="wait", clear_cache=False)
        self._drained = self._core.start(self._core.answered(waiting))
        try:
            self._drained.result()
        except CancelledError:  # by `resume`: vLLM itself would answer when it is idle
            raise RuntimeError(RESUMED) from None
        except BaseException:
            self._drained.cancel()
            self.as_held()
            raise
        finally:
            self._drained = None
        if not self.is_paused:
            raise RuntimeError(RESUMED)

    def resume(self, stamp: int | None = None) -> bool:
        """Let requests run again. A pause that waits for them to end fails. False: a newer `pause` came before."""
        with self._one_order:
            if self._stamps.is_late(stamp):
                return not self.is_paused
            self.held = False
            self.let_run()
            return True

    def let_run(self) -> None:
        """Let requests of a pause run, for good only by `resume`."""
        self._core.ask(self._core.llm.resume_generation())
        if (drained := self._drained) is not None:
            drained.cancel()

    def as_held(self) -> None:
        """Have vLLM paused or not by `held`, after an order that has failed."""
        with suppress(Exception):
            llm = self._core.llm
            self._core.ask(
                llm.pause_generation(mode="keep", clear_cache=False) if self.held else llm.resume_generation()
            )

    def new_update(self, draft: bool = False) -> VllmUpdate:
        """Update of the model. Raises VllmRefusalError: of the draft model."""
        if draft:
            raise VllmRefusalError(f"update_weights(draft=True): vLLM's draft model keeps its weights. {OURS}")
        if not self._core.on_cuda and (self._has_experts or self._core.config.model_config.quantization is not None):
            raise VllmRefusalError(
                f"update_weights: vLLM for CPUs packs experts and quantised weights, and does not pack new ones. {OURS}"
            )
        return self._make_update()

    def install(self, update: VllmUpdate, draft: bool = False, whole: bool = False) -> dict[str, int]:
        """Check an update, and have all ranks load it between two steps, see `EngineLifecycle.install`."""
        update.check(whole)
        core, count = self._core, len(update)
        hosts = {rank["host"] for rank in core.ranks} - {host_name()}
        if update.folder is None and hosts:
            raise WeightsError(f"ranks on {', '.join(sorted(hosts))} read a folder that all hosts have: give its path")
        sent = (
            SentWeights({name: tensor.cpu() for name, tensor in update.tensors.items()}) if not update.folder else None
        )
        # A resume waits: steps in between would put KV of the old weights into the cache.
        with self._draining, self._one_order, sent or nullcontext():
            paused = self.is_paused
            core.ask(core.llm.pause_generation(mode="keep", clear_cache=False))
            try:
                self._refuse_traces()
                core.ask(core.llm.pause_generation(mode="keep", clear_cache=True))  # all are computed again
                self.load(None if sent is None else sent.info, update.folder)
                before = self._weights.version
                self._weights.changed()
                note_weights(self._tokens_so_far(), self._weights, before)
            finally:
                update.drop()
                if not paused and core.llm is not None:
                    core.ask(core.llm.resume_generation())
        return {"tensors": count, "version": self._weights.version}

    def load(self, info: dict[str, Any] | None, folder: Path | None) -> None:
        """Have all ranks load weights. Raises EngineClosedError: a rank has failed, and the engine has ended."""
        try:
            path = None if folder is None else str(folder)
            self._core.wait(self._core.call_async("interp_update", info, path, timeout=UPDATE_SECONDS))
        except BaseException as error:
            told = EngineClosedError(f"new weights were written in part: {error!r}")
            raise self._engine.end_with(told) from error

    def _refuse_traces(self) -> None:
        if begun := sum(one.sent and one.request.trace is not None for one in self._engine.live):
            raise ValueError(
                f"{begun} requests of traces are under way, and their blocks cannot run again with other weights: "
                "pause with mode='wait' or 'abort' first"
            )

    def _tokens_so_far(self) -> list[tuple[Request, int | None]]:
        """The live requests, each with its number of tokens; None before it has begun."""
        states = self._core.llm.output_processor.request_states
        found = [(one.request, states.get(one.vllm_id)) for one in self._engine.live]
        return [
            (request, None if state is None else state.detokenizer.num_output_tokens() if state.detokenizer else 0)
            for request, state in found  # a request that pools has no detokenizer
        ]


class VllmSleep:
    """Sleep of vLLM, which gives its weights and KV back together. A `client.lifecycle.orders.Sleep`.

    Args:
        lifecycle: loads weights again.
        folder: folder of the served weights.

    Attributes:
        needs_weights: the weights were dropped, and no new ones were given.
    """

    def __init__(
        self, core: VllmCore, engine: VllmRequestEngine, weights: VllmWeights, lifecycle: VllmLifecycle, folder: Path | None
    ) -> None:  # fmt: skip
        self._core, self._engine, self._weights = core, engine, weights
        self._lifecycle, self._folder = lifecycle, folder
        self._asleep = set[str]()
        self._dropped = self.needs_weights = False

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is off the devices, or weights are to be given."""
        return bool(self._asleep) or self.needs_weights

    def check_weights(self) -> None:
        """Raise ValueError while the weights have no memory."""
        if "weights" in self._asleep:
            raise ValueError("the weights are asleep: lm.wake(tags=['weights']) gives them memory")

    def sleep(self, level: int = 1, tags: Sequence[str] = TAGS, mode: str = "keep") -> None:
        """Give memory back, see `LM.sleep`. The ring of captures stays.

        Raises:
            VllmRefusalError: vLLM was started without sleep mode, or tags that it does not give back by themselves.
            ValueError: live requests, or another level, tag or mode.
        """
        if not self._core.config.model_config.enable_sleep_mode:
            raise VllmRefusalError(
                "lm.sleep: start vLLM with LM(..., engine='vllm', enable_sleep_mode=True), which it has on CUDA only"
            )
        parallel = self._core.config.parallel_config
        if max(parallel.pipeline_parallel_size, parallel.data_parallel_size) > 1:
            raise VllmRefusalError(
                "lm.sleep: not tested with pipeline or data parallel ranks: raise tensor_parallel_size instead"
            )
        if level not in (1, 2):
            raise ValueError(f"level={level!r}: 1 keeps the weights in host memory, 2 drops them")
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        if isinstance(tags, str) or set(tags) - set(TAGS):
            raise ValueError(f"tags={tags!r}: expected a list of {', '.join(TAGS)}")
        if not {"weights", "kv_cache"} <= set(tags):
            raise VllmRefusalError(f"tags={list(tags)}: vLLM gives 'weights' and 'kv_cache' back together. {OURS}")
        if len(self._asleep) == 1:
            raise ValueError(
                f"only {', '.join(self._asleep)} sleeps, and vLLM puts no other memory to sleep then: lm.wake() first"
            )
        if self._asleep:
            return
        try:
            with self._engine.lock:
                self._engine.why_closed = EngineSleepingError(ASLEEP)
            if mode == "keep" and (live := len(self._engine.live)):
                raise ValueError(f"{live} requests are live: drain=True waits for them, lm.pause('abort') ends them")
            if mode == "abort":
                self._engine.abort_all()
            self._lifecycle.held = self._lifecycle.is_paused
            try:
                if mode == "wait":
                    self._lifecycle.let_run()  # requests of a pause, too
                self._engine.wait_until_idle()
                self._fall_asleep(level)
            except BaseException:
                if not self._asleep:
                    self._lifecycle.as_held()
                raise
        finally:
            self._open_if_whole()

    def _fall_asleep(self, level: int) -> None:
        falling = self._core.start(self._core.answered(self._core.llm.sleep(level, "abort")))
        try:
            falling.result()
        finally:  # after an interrupt, as by Ctrl-C, vLLM falls asleep all the same
            if falling.exception() is None:
                self._asleep, self._dropped, self._weights.asleep = {"weights", "kv_cache"}, level == 2, True

    def wake(self, tags: Sequence[str] | None = None, all_graphs: bool = False) -> bool:
        """Take memory again, see `LM.wake`. Returns whether the engine is awake. vLLM keeps its graphs."""
        if isinstance(tags, str) or (tags is not None and set(tags) - set(TAGS)):
            raise ValueError(f"tags={tags!r}: expected a list of {', '.join(TAGS)}")
        wanted = self._asleep if tags is None else self._asleep & set(tags)
        if wanted:
            self._core.ask(self._core.llm.wake_up(None if len(wanted) == 2 else sorted(wanted)))
            if "weights" in wanted:
                self._weights.asleep, self.needs_weights = False, self._dropped
            self._asleep = self._asleep - wanted
            if self._lifecycle.held and not self._asleep:
                self._core.ask(self._core.llm.pause_generation(mode="keep", clear_cache=False))
        if self.needs_weights and tags is None:
            self._reload()
        self._open_if_whole()
        return not self.is_sleeping

    def weights_given(self) -> None:
        """All weights were written."""
        self.needs_weights = False
        self._open_if_whole()

    def _open_if_whole(self) -> None:
        if not self.is_sleeping:
            self._engine.why_closed = None

    def _reload(self) -> None:
        """Load dropped weights from the model's folder. Raises ValueError: they were changed since they were loaded."""
        if self._folder is None or self._weights.version:
            raise ValueError(
                "the weights were dropped, and are not those of a folder: lm.update_weights gives all of them, and the engine wakes"
            )
        self._lifecycle.load(None, self._folder)
        self.needs_weights = False
