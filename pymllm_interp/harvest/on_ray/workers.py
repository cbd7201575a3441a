"""A harvest by workers on Ray: actors with a model each, which compute units. Shards go from the workers to the shared folder.

Ray gives units out at least once; the records in the folder make it exactly once (`harvest.units`). All that the
driver knows is in the folder. So the same call continues after any end, and several drivers may work in one folder.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..folder import FORMAT, Identity, ShardEntry
from ..outputs import OUTPUTS_FORMAT, AskedOutputs, generate_unit
from ..plan import UNITS, HarvestPlan, Unit, make_plan, read_plan
from ..progress import HarvestError, HarvestProgress, HarvestResult
from ..run import AskedHarvest
from ..units import UnitRecord, done_units, run_unit, settle
from .ray_version import connect_to_ray

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.5
SETTLE_SECONDS = 30.0
"""Seconds between updates of the manifest, for readers of a running harvest."""
MOST_LOSSES = 3
"""Number of workers that one unit may be lost with. Then the harvest ends: the unit is the likely reason."""
SLOW_FACTOR, SLOW_SECONDS = 3.0, 10.0
"""An idle worker also computes a unit that another one has had for far longer than the median."""


Compute = Callable[[Any, Path, HarvestPlan, Unit], bool]
"""Computes a unit of a plan in a folder with a model. Returns whether its result counts."""


class HarvestWorker:
    """An actor with a model.

    Args:
        make_model: makes an `LM`.
        out: the folder, on shared storage.
        compute: a function that can be pickled.
    """

    def __init__(self, make_model: Callable[[], Any], out: str, compute: Compute) -> None:
        self._make, self._out, self._compute = make_model, Path(out), compute
        self._model: Any = None
        self._plan: HarvestPlan | None = None

    def prepare(self) -> str:
        """Load the model. Returns why it cannot serve, else an empty string."""
        try:
            self._plan = read_plan(self._out)
            self._model = self._make()
            if self._model.weights.fingerprint != self._plan.identity.model:
                return "a worker has other weights than the plan was made with: give all nodes the same model"
        except Exception as error:  # Ray makes its error classes at run time: data is recognised separately
            return f"{type(error).__name__}: {error}"
        return ""

    def compute(self, number: int) -> dict[str, Any]:
        """Compute a unit: `seconds`, and `failure` in words."""
        assert self._plan is not None
        started, failure = time.perf_counter(), ""
        try:
            self._compute(self._model, self._out, self._plan, self._plan.units[number])
        except Exception as error:
            failure = str(error) or repr(error)
        return {"seconds": time.perf_counter() - started, "failure": failure}


@dataclass(eq=False)
class UnitTask:
    """A unit that a worker has."""

    unit: int
    worker: Any
    started: float = field(default_factory=time.monotonic)


class UnitQueue:
    """Queue of units to compute. Independent of Ray.

    Args:
        missing: numbers of units without a record, in order.
    """

    def __init__(self, missing: Sequence[int]) -> None:
        self.todo = list(reversed(missing))
        self.running: list[UnitTask] = []
        self.seconds: list[float] = []
        self._losses: Counter[int] = Counter()

    def next(self, done: Callable[[int], bool], now: float) -> int | None:
        """A unit for an idle worker; None: no unit now. Once all are given out, one that takes long is given out twice."""
        while self.todo:
            if not done(unit := self.todo.pop()):  # others work in the folder, too
                return unit
        counts = Counter(task.unit for task in self.running)
        least = max(SLOW_SECONDS, SLOW_FACTOR * statistics.median(self.seconds)) if self.seconds else SLOW_SECONDS
        slow = [
            task
            for task in self.running
            if counts[task.unit] == 1 and now - task.started > least and not done(task.unit)
        ]
        return min(slow, key=lambda task: task.started).unit if slow else None

    def lost(self, unit: int, why: str) -> None:
        """The worker that had a unit is gone. Raises HarvestError: too many were lost with it."""
        self._losses[unit] += 1
        if self._losses[unit] >= MOST_LOSSES:
            raise HarvestError(
                f"unit {unit}: {MOST_LOSSES} workers were lost while they computed it; the last one: {why}"
            )
        self.todo.append(unit)


@dataclass(frozen=True)
class Corpus:
    """Documents, and who computes them. See `LM.harvest`. Raises ValueError: an invalid number."""

    inputs: Iterable[Any]
    out: Path
    unit_documents: int
    column: str | None
    cluster: str | None
    workers: int | None
    progress: bool | None

    def __post_init__(self) -> None:
        for name, value in (("unit_documents", self.unit_documents), ("workers", self.workers)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")


def harvest_on_ray(
    model: Any, make_model: Callable[[], Any], corpus: Corpus, asked: AskedHarvest, skip: bool
) -> HarvestResult:
    """Harvest by workers on a Ray cluster.

    Args:
        model: an `LM`, which the workers' must equal.
        make_model: makes a worker's.
        skip: leave out documents that fail.
    """
    compute = partial(run_unit, captures=asked.captures, interventions=asked.interventions, skip=skip)
    return compute_corpus(model, make_model, corpus, asked.identity, asked.description, compute, FORMAT)


def generate_corpus(model: Any, make_model: Callable[[], Any], corpus: Corpus, asked: AskedOutputs) -> HarvestResult:
    """Generate from each document, here or by workers. See `LM.generate_corpus`."""
    compute = partial(generate_unit, asked=asked)
    return compute_corpus(model, make_model, corpus, asked.identity, asked.description, compute, OUTPUTS_FORMAT)


def compute_corpus(
    model: Any, make_model: Callable[[], Any], corpus: Corpus, identity: Identity, description: dict[str, Any], compute: Compute,
    manifest: str,
) -> HarvestResult:  # fmt: skip
    """Plan the corpus and compute its units.

    Raises:
        ValueError, FileExistsError: the folder is another harvest's.
        HarvestError: a unit failed. Completed units are kept.
    """
    started, out, inputs, ray, ours = time.perf_counter(), corpus.out.resolve(), corpus.inputs, None, False
    if corpus.cluster is not None:
        ray, ours = connect_to_ray(corpus.cluster)
    try:
        if type(inputs).__module__.startswith("ray.data."):
            inputs = _stored(inputs, out)
        plan = make_plan(out, identity, description, inputs, corpus.column, corpus.unit_documents, manifest)
        before = done_units(out)
        try:
            if ray is None:
                _compute_here(model, out, plan, compute, corpus.progress)
            else:
                gpus = float(str(model.backend.facts.device).startswith("cuda"))
                count = corpus.workers or max(1, int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1)))
                pool = WorkerPool(ray, make_model, compute, out, plan, gpus, count)
                try:
                    pool.run(corpus.progress)
                finally:
                    pool.close()
            settle(out)
        except Exception as error:
            with contextlib.suppress(OSError):
                settle(out)
            raise HarvestError(f"{str(error) or repr(error)}\n{_kept(out, plan)}") from error
    finally:
        if ours and ray is not None:
            ray.shutdown()
    return _result(out, before, time.perf_counter() - started)


def _compute_here(model: Any, out: Path, plan: HarvestPlan, compute: Compute, progress: bool | None) -> None:
    done = done_units(out)
    documents = sum(plan.units[number].portion.documents for number in done)
    with HarvestProgress(progress, plan.documents, documents) as shown:
        for unit in plan.units:
            if unit.number not in done:
                compute(model, out, plan, unit)
                count_unit(out, unit, shown)


def count_unit(out: Path, unit: Unit, shown: HarvestProgress) -> None:
    """Show that a unit is done."""
    record = UnitRecord.read(out / UNITS / f"{unit.number:06}.json")
    shown.advance(
        record.tokens, sum(shard.bytes for shard in record.shards), documents=unit.portion.documents,
        skipped=unit.portion.documents - record.documents,
    )  # fmt: skip


def _stored(dataset: Any, out: Path) -> list[Path]:
    """The files that a Ray dataset is written to, once, by its own workers. So its documents keep their numbers."""
    folder = out.with_name(f"{out.name}.documents")
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
        dataset.write_parquet(str(partial))
        try:
            partial.rename(folder)
        except OSError:  # another driver was first
            shutil.rmtree(partial)
    return sorted(folder.glob("*.parquet"))


class WorkerPool:
    """Workers, and the units that they have."""

    def __init__(
        self, ray: Any, make_model: Callable[[], Any], compute: Compute, out: Path, plan: HarvestPlan, gpus: float, count: int
    ) -> None:  # fmt: skip
        self._ray, self._out, self._plan = ray, out, plan
        self._done = done_units(out)
        self._queue = UnitQueue([unit.number for unit in plan.units if unit.number not in self._done])
        actor = ray.remote(HarvestWorker).options(num_cpus=1, num_gpus=gpus, max_restarts=-1)
        count = min(count, len(self._queue.todo))
        self._workers = [actor.remote(make_model, str(out), compute) for _ in range(count)]
        self._starting = {worker.prepare.remote(): worker for worker in self._workers}
        self._idle: list[Any] = []
        self._tasks: dict[Any, UnitTask] = {}

    @property
    def num_ready(self) -> int:
        """Number of workers with a loaded model."""
        return len(self._idle) + len(self._tasks)

    @property
    def unit_seconds(self) -> list[float]:
        """Seconds of each unit that workers of this pool computed, in order of completion."""
        return self._queue.seconds

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            self._ray.kill(worker)

    def run(self, progress: bool | None) -> None:
        """Have all units computed. Raises HarvestError: a worker could not start, or a unit failed."""
        units = self._plan.units
        settled = time.monotonic()
        documents = sum(units[number].portion.documents for number in self._done)
        with HarvestProgress(progress, self._plan.documents, documents) as shown:
            while len(self._done) < len(units):
                self._give_out()
                waited = [*self._starting, *self._tasks]
                ready, _ = self._ray.wait(waited, num_returns=1, timeout=POLL_SECONDS) if waited else ([], None)
                for ref in ready:
                    self._take(ref)
                for number in sorted(done_units(self._out) - self._done):
                    self._count(units[number], shown)
                if time.monotonic() - settled > SETTLE_SECONDS:
                    settle(self._out)
                    settled = time.monotonic()

    def _count(self, unit: Unit, shown: HarvestProgress) -> None:
        """A unit is done, by a worker of this pool or of another one."""
        self._done.add(unit.number)
        shown.workers = self.num_ready
        count_unit(self._out, unit, shown)

    def _give_out(self) -> None:
        while self._idle:
            number = self._queue.next(self._done.__contains__, time.monotonic())
            if number is None:
                return
            task = UnitTask(number, self._idle.pop())
            self._tasks[task.worker.compute.remote(number)] = task
            self._queue.running.append(task)

    def _take(self, ref: Any) -> None:
        worker = self._starting.pop(ref, None)
        task = self._tasks.pop(ref, None)
        if task is not None:
            worker = task.worker
            self._queue.running.remove(task)
        try:
            found = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            logger.warning("a worker was lost: %s", why)
            if task is not None and task.unit not in done_units(self._out):
                self._queue.lost(task.unit, why)
            self._prepare_again(worker)
            return
        if task is None:
            if found:
                raise HarvestError(found)
            self._idle.append(worker)
            return
        if found["failure"]:
            raise HarvestError(found["failure"])
        self._queue.seconds.append(found["seconds"])
        self._idle.append(worker)

    def _prepare_again(self, worker: Any) -> None:
        """Ray starts the actor again, here or on another node; its model is loaded again, too."""
        self._starting[worker.prepare.remote()] = worker


def _kept(out: Path, plan: HarvestPlan) -> str:
    done = len(done_units(out))
    return f"{out} has {done} of {len(plan.units)} units, whole; the same call continues with the others"


def _result(out: Path, before: set[int], seconds: float) -> HarvestResult:
    records = [UnitRecord.read(path) for path in sorted((out / UNITS).glob("??????.json"))]
    shards: list[ShardEntry] = [shard for record in records for shard in record.shards]
    new = [record for record in records if record.unit not in before]
    skipped = {number: error for shard in shards for number, error in shard.skipped.items()}
    for record in records:
        skipped |= record.skipped
    return HarvestResult(
        folder=out, shards=len(shards), documents=sum(record.documents for record in records),
        tokens=sum(shard.tokens for shard in shards), rows=dict(sum((Counter(shard.rows) for shard in shards), Counter())),
        bytes=sum(shard.bytes for shard in shards), new_documents=sum(record.documents for record in new),
        new_bytes=sum(shard.bytes for record in new for shard in record.shards), seconds=seconds,
        skipped={int(number): error for number, error in sorted(skipped.items(), key=lambda entry: int(entry[0]))},
    )  # fmt: skip
