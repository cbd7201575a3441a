"""Memory of a sleeping engine: weights, KV and rings that leave the device, and come back under the same tensors.

Tensors keep their storages, which lose and get memory. So fused weights, views and modules need no repair. Memory may come back at
another address: CUDA graphs are captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...core.events import EngineSleepingError
from ...models.updates import WeightUpdate
from ...runner.device_memory import return_freed_memory
from ...runner.model_runner import ModelRunner
from ...utils.pinned import pinned_memory
from ..engine import Engine
from .lifecycle import MODES, wait_for_requests

TAGS = ("weights", "kv_cache", "captures")
ALIGNMENT = 512
"""Bytes of which a storage's place in host memory is a multiple."""


class SleepingMemory:
    """The memory of some tensors, by storage, while it is off the device.

    Attributes:
        dropped: whether bytes of it are lost, so that new ones are to be written.
    """

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        self.dropped = False

    def put(self, tensors: Iterable[Tensor], host: Callable[[int], Tensor] | None = None) -> None:
        """Free the memory of the tensors.

        Args:
            host: makes uint8 [bytes] in host memory, which keeps the bytes. None: they are lost.
        """
        storages, first = list(_storages(tensors)), len(self._held)
        starts = [0, *accumulate(-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages)]
        memory = None if host is None else host(starts[-1])
        for storage, start in zip(storages, starts, strict=False):
            kept = None if memory is None else memory[start : start + storage.nbytes()]
            if kept is not None:
                kept.copy_(_bytes_of(storage), non_blocking=True)
            self._held.append((storage, storage.nbytes(), kept))
            self.dropped |= kept is None
        self._wait()
        for storage, _, _ in self._held[first:]:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again, with its bytes; zeros for lost ones. Raises torch.OutOfMemoryError: there is no room."""
        for storage, size, _ in self._held:
            storage.resize_(size)
        for storage, _, host in self._held:
            memory = _bytes_of(storage)
            memory.zero_() if host is None else memory.copy_(host, non_blocking=True)
        self._wait()
        self._held.clear()

    def _wait(self) -> None:
        """Wait for copies."""
        for device in {storage.device for storage, _, _ in self._held if storage.device.type == "cuda"}:
            torch.cuda.synchronize(device)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each storage with memory, once. Without mapped files, as transformers loads on a CPU: the system drops their pages itself."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def weights_of(runner: ModelRunner) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of checkpoints, and those that follow from the config, of a model."""
    model = runner.get_model()
    saved = list(model.state_dict(keep_vars=True).values())
    known = {tensor.untyped_storage().data_ptr() for tensor in saved}
    others = [tensor for tensor in model.buffers() if tensor.untyped_storage().data_ptr() not in known]
    return saved, others


def caches_of(runner: ModelRunner) -> list[Tensor]:
    """K and V, recurrent states and their snapshots, and cross keys and values."""
    pools: list[Any] = [runner.token_to_kv_pool, runner.gdn_pool, runner.cross_pool]
    found: list[Tensor] = []
    for pool in pools:
        if pool is not None:
            found += pool.tensors()
    return found


class EngineSleep:
    """Puts an engine to sleep, and wakes it. Requests are refused from its sleep on, until all of its memory is back.

    Args:
        engine: a started engine.

    Attributes:
        needs_weights: the weights were dropped, and no new ones were given.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded_version = 0 if engine.runner.model_state is None else engine.runner.model_state.version
        self.needs_weights = self._needs_graphs = False

    @property
    def _asleep(self) -> dict[str, SleepingMemory]:
        """Memory of a sleep by tag. The runner frees it, and the host's, when it shuts down."""
        return self._engine.runner.kept.setdefault("asleep", {})

    @property
    def _pinned(self) -> dict[int, Tensor]:
        """Host memory of each `put` of weights. It stays for the next sleep."""
        return self._engine.runner.kept.setdefault("pinned", {})

    @property
    def is_sleeping(self) -> bool:
        """Whether memory of the engine is off the device, or weights are to be given."""
        return bool(self._asleep) or self.needs_weights

    def check_weights(self) -> None:
        """Raise ValueError while the weights have no memory."""
        if "weights" in self._asleep:
            raise ValueError("the weights are asleep: lm.wake(tags=['weights']) gives them memory")

    def sleep(self, level: int = 1, tags: Sequence[str] = TAGS, mode: str = "keep") -> None:
        """Give memory back, see `LM.sleep`.

        Args:
            mode: "keep": live requests are an error. "wait", "abort": new ones are refused from now on, and live ones end first.
        """
        if level not in (1, 2):
            raise ValueError(f"level={level!r}: 1 keeps the weights in host memory, 2 drops them")
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        tags, engine = _checked(tags), self._engine
        try:
            if mode == "wait":
                paused = engine.intake.paused or engine.intake.held is not None
                wait_for_requests(engine, self._drain)
                engine.intake.paused = paused
            engine.call(partial(self._sleep, level, tags, mode == "abort"))
        finally:
            if not self.is_sleeping:
                engine.intake.why_closed = None

    def _drain(self) -> Future[None]:
        """Refuse new requests, and wait for the others. On the engine's thread, behind those that were submitted before."""
        self._close_intake()
        return self._engine.intake.drain()

    def _close_intake(self) -> None:
        self._engine.intake.why_closed = EngineSleepingError("the engine sleeps: lm.wake() (POST /wake_up) wakes it")

    def _sleep(self, level: int, tags: Sequence[str], abort: bool) -> None:
        engine, runner = self._engine, self._engine.runner
        engine.sync_previous_step()
        if abort:
            self._close_intake()
            engine.intake.end_all()
        if live := len(engine.scheduler.live) + len(engine.intake.held or ()):
            raise ValueError(f"{live} requests are live: drain=True waits for them, lm.pause('abort') ends them")
        self._close_intake()
        assert runner.model_state is not None
        runner.graphs.release()
        runners: list[ModelRunner] = [runner, *(() if runner.drafter is None else (runner.drafter.runner,))]
        if runner.drafter is not None:
            runner.drafter.release_graphs()
        for tag in tags:
            if tag in self._asleep or (tag == "captures" and runner.capture_ring is None):
                continue
            memory = self._asleep[tag] = SleepingMemory()
            if tag == "weights":
                runner.model_state.asleep = True
                for number, each in enumerate(runners):
                    saved, others = weights_of(each)
                    memory.put(others, partial(self._host, 2 * number))
                    memory.put(saved, partial(self._host, 2 * number + 1) if level == 1 or each is not runner else None)
            elif tag == "kv_cache":
                engine.scheduler.kv.reset_prefix_cache()
                runner.reset_encoder_cache()
                if runner.drafter is not None:
                    runner.drafter.sequences.clear()
                for each in runners:
                    memory.put(caches_of(each))
            elif runner.capture_ring is not None:
                runner.capture_ring.wait()
                memory.put([runner.capture_ring.memory])
        return_freed_memory(runner.device)
        self._open_if_whole()  # nothing fell asleep: graphs are captured anew

    def _host(self, number: int, size: int) -> Tensor:
        """Host memory [size] of a `put`, pinned for a CUDA device."""
        if not size or not self._engine.runner.device.startswith("cuda"):
            return torch.empty(size, dtype=torch.uint8)
        if len(self._pinned.get(number, ())) != size:
            self._pinned.pop(number, None)
            self._pinned[number] = pinned_memory(size)
        return self._pinned[number]

    def wake(self, tags: Sequence[str] | None = None, all_graphs: bool = False) -> bool:
        """Take memory again, see `LM.wake`. Returns whether the engine is awake."""
        checked = TAGS if tags is None else _checked(tags)
        if self.is_sleeping or self._needs_graphs:
            self._engine.call(partial(self._wake, checked))
            if self.needs_weights and tags is None:
                self._reload()
        graphs = self._engine.runner.graphs
        while all_graphs and not self.is_sleeping and graphs.num_missing:  # requests run in between
            self._engine.call(self._engine.late_captures.capture)
        if all_graphs and graphs.failure:
            raise RuntimeError(f"a CUDA graph could not be captured, of {graphs.failure}")
        return not self.is_sleeping

    def _wake(self, tags: Sequence[str]) -> None:
        runner = self._engine.runner
        assert runner.model_state is not None
        for tag in tags:
            memory = self._asleep.get(tag)
            if memory is not None:
                memory.restore()
                del self._asleep[tag]
                if tag == "weights":
                    runner.model_state.asleep, self.needs_weights = False, memory.dropped
        self._open_if_whole()

    def weights_given(self) -> None:
        """All weights were written."""
        self.needs_weights = False
        self._engine.call(self._open_if_whole)

    def _open_if_whole(self) -> None:
        """Take requests, if nothing is asleep. Graphs are captured anew: the largest now, the others while the engine serves."""
        runner = self._engine.runner
        if self.is_sleeping:
            return
        self._needs_graphs = True  # until they are captured: a later `wake` tries again
        runner.init_cuda_graphs(lazily=True)
        if runner.adapters is not None and runner.adapters.any_loaded:
            runner.graphs.capture_adapted(runner.adapters, lazily=True)
        if runner.drafter is not None:
            runner.drafter.capture_graphs()
        self._needs_graphs, self._engine.intake.why_closed = False, None

    def _reload(self) -> None:
        """Load dropped weights from the model's folder. Raises ValueError: it has none, or they were changed since."""
        runner = self._engine.runner
        state, source = runner.model_state, runner.source
        assert state is not None and source is not None
        if source.folder is None or state.version != self._loaded_version:
            raise ValueError(
                "the weights were dropped, and are not those of a folder: lm.update_weights gives all of them, and the engine wakes"
            )
        update = WeightUpdate(runner.get_model(), source.hf_config, runner.model_config)
        update.add(source.folder)
        update.check()
        self._engine.call(update.write)
        self._loaded_version = state.version
        self.weights_given()


def _checked(tags: Sequence[str]) -> Sequence[str]:
    if isinstance(tags, str) or not tags or set(tags) - set(TAGS):
        raise ValueError(f"tags={tags!r}: expected a list of {', '.join(TAGS)}")
    return tags
