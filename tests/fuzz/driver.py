"""Runs jobs from several threads under pressure, each by itself, and compares."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from conftest import held
from helpers_idle import left_behind

from pymllm_interp import LM
from pymllm_interp.core.model_spec import ModelSpec

from .engines import WAYS, engines, folder_of, weights_of
from .jobs import (
    WAIT,
    Called,
    Drawn,
    Ended,
    Forward,
    Generation,
    Harvest,
    Job,
    PatchSweep,
    Stream,
    Sweep,
    random_prompt,
)
from .results import Differs, short
from .traces import CallsAnother, Gang, Gradient, OnStep, Static, Stuck, Traced
from .world import World, sae_of

THREADS = 6
WITH_LLAMAS_NAMES = ("llama", "qwen3", "mistral", "olmo2")
"""Families whose modules have the names that `Gang` uses."""
NATIVE_WITH_LLAMAS_NAMES = ("llama", "qwen3", "mistral", "gemma2")
"""Those with blocks that `Static` has lowered."""


def makers(rng: random.Random, model: ModelSpec, family: str) -> list[tuple[int, Callable[[], Job]]]:
    """(weight, a function that makes a job of one kind)."""
    return [
        (6, lambda: Generation.random(rng, model)),
        (2, lambda: Stream.random(rng, model)),
        (2, lambda: Drawn.random(rng)),
        (4, lambda: Forward.of_prompts(rng, model)),
        (4, lambda: Harvest.of_prompts(rng, model)),
        (2, lambda: Sweep.random(rng, model)),
        (1, lambda: PatchSweep.random(rng)),
        (2, lambda: Ended.random(rng, model)),
        (1, lambda: Called.random(rng, model)),
        (6, lambda: Traced.random(rng, model)),
        (2, lambda: Gang.random(rng) if family in WITH_LLAMAS_NAMES else Traced.long(rng, model)),
        (3, lambda: Static.random(rng, model) if family in NATIVE_WITH_LLAMAS_NAMES else Traced.random(rng, model)),
        (1, lambda: Gradient(random_prompt(rng), rng.randrange(model.num_hidden_layers))),
        (1, lambda: OnStep(random_prompt(rng))),
        (1, lambda: Stuck(random_prompt(rng, 12))),
        (1, lambda: CallsAnother(random_prompt(rng))),
    ]


def random_jobs(rng: random.Random, model: ModelSpec, family: str, count: int) -> list[Job]:
    """Four traces that do not fit the pool together, and one use of the SAE; then one job of each kind, then others."""
    weights, make = zip(*makers(rng, model, family), strict=True)
    each = [one() for one in make]
    rng.shuffle(each)
    others = [one() for one in rng.choices(make, weights, k=max(count - len(each), 0))]
    first = [*(Traced.long(rng, model) for _ in range(4)), Generation.of_sae(rng)]
    return first + (each + others)[:count]


def attempt(job: Job, run: Callable[[World], Any], world: World) -> Any:
    """What a job returns; for the error that it is to end with, its name. Other errors are raised."""
    try:
        found = run(world)
    except BaseException as error:
        if not job.fails or type(error).__name__ != job.fails:
            raise
        return job.fails
    if job.fails:
        raise Differs(f"it returned {short(found)}: it is to end with {job.fails}")
    return found


class Round:
    """Some jobs, run at once."""

    def __init__(self, jobs: list[Job], under: World, alone: World) -> None:
        self.jobs, self.under, self.alone = jobs, under, alone
        self.results: dict[int, Any] = {}
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: set[int] = set()

    def run(self) -> None:
        wanted = [attempt(job, job.run, self.alone.anew()) for job in self.jobs]
        self.under_pressure()
        wrong = []
        for i, (job, alone) in enumerate(zip(self.jobs, wanted, strict=True)):
            got = self.results[i]
            try:
                if isinstance(got, BaseException):
                    raise got
                job.check(got, alone)
            except Exception as error:
                wrong.append((i, job, error))
        if wrong:
            text = "\n".join(
                f"job {i}, {type(error).__name__}: {short(str(error))}\n    {job}" for i, job, error in wrong[:5]
            )
            raise Differs(f"{len(wrong)} of {len(self.jobs)} jobs differ:\n{text}") from wrong[0][2]

    def under_pressure(self) -> None:
        for i in range(len(self.jobs)):
            self._left.put(i)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        with held(self.under.lm) as arrived:  # the first four begin together
            for thread in threads:
                thread.start()
            arrived(4)
        deadline = time.monotonic() + WAIT
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        if any(thread.is_alive() for thread in threads):
            raise Differs("these jobs hang:\n" + "\n".join(f"job {i}: {self.jobs[i]}" for i in sorted(self._running)))

    def _work(self) -> None:
        while True:
            try:
                i = self._left.get_nowait()
            except queue.Empty:
                return
            job = self.jobs[i]
            self._running.add(i)
            try:
                self.results[i] = attempt(job, job.run_under_pressure, self.under)
            except BaseException as error:
                self.results[i] = error
            self._running.discard(i)


@contextmanager
def edited(rng: random.Random, under: World, alone: World) -> Iterator[None]:
    """A weight of both engines, and the SAE, are other ones meanwhile. Their identities follow, there and back."""
    pairs = list(zip(weights_of(under.lm), weights_of(alone.lm), strict=True))
    pair, before = pairs[0] if rng.random() < 0.5 else rng.choice(pairs), identities(under)
    kept, of_sae = pair[0].clone(), [(tensor, tensor.clone()) for _, tensor in under.sae.tensors()]
    factor = 1 + torch.arange(kept.shape[-1]) % 2  # of every second value
    with torch.no_grad():
        for weight in pair:
            weight.mul_(factor) if weight.dim() > 1 else weight.add_(factor)  # buffers begin at 0
        for tensor, _ in of_sae:
            tensor.mul_(0.5)
    if same := [name for name, now in identities(under).items() if now == before[name]]:
        raise Differs(f"{same} are as before, and a tensor of shape {list(kept.shape)} and the SAE were edited")
    yield
    with torch.no_grad():
        for weight in pair:
            weight.copy_(kept)
        for tensor, before_edit in of_sae:
            tensor.copy_(before_edit)
    if (now := identities(under)) != before:
        raise Differs(f"identities are {now}, and were {before} before an edit that was taken back")


def identities(world: World) -> dict[str, str]:
    return {"model": world.lm.weights.fingerprint, "SAE": world.sae.fingerprint}


def fuzz(
    seed: int, family: str, way: str, parent: Path, rounds: int, count: int, exact: dict[str, Any] | None = None
) -> Counter[str]:
    """Rounds of random jobs, every second one with edited weights. `exact`: settings for equal bits (`engines`).

    Returns:
        How often requests were preempted and swapped, and steps overlapped.

    Raises:
        Differs: a result, an identity, or what is left in the engine afterwards is wrong. The same seed makes the same jobs.
    """
    rng = random.Random(seed)
    with engines(folder_of(family, parent), WAYS[way], exact) as (pressed, solo):
        sae = sae_of(pressed.runner.model_spec.hidden_size)
        under, alone = World(pressed, sae, parent, solo), World(solo, sae, parent, pressed)
        for number in range(rounds):
            try:
                with edited(rng, under, alone) if number % 2 else nullcontext():
                    Round(random_jobs(rng, under.model, family, count), under, alone).run()
                check_idle(pressed)
            except Exception as error:
                raise Differs(f"seed {seed}, {family}, {way}, round {number}: {error}") from error
        stats = pressed.engine.stats()
        return Counter({name: stats[name] for name in ("preempted", "moved_to_host", "overlapped_steps")})


def check_idle(lm: LM) -> None:
    """Memory and queues are as before the first request."""
    if left := left_behind(lm):
        raise Differs(f"the idle engine holds {left}")


logging.getLogger("pymllm_interp").addFilter(lambda record: "planned" not in record.getMessage())
