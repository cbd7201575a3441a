"""Calls of an `LM` over a whole corpus, here or by workers on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core.sampling_params import SamplingParams
from ..hooks.interventions.knockout import Intervention
from .on_ray.workers import Corpus, generate_corpus, harvest_on_ray
from .outputs import asked_outputs
from .result import HarvestResult
from .run import asked_of, run_harvest

if TYPE_CHECKING:
    from .model import HarvestModel


def harvest(
    lm: Any, inputs: Iterable[Any], out: str | Path, cluster: str | None, workers: int | None, unit_documents: int,
    column: str | None, progress: bool | None, **asked: Any,
) -> HarvestResult:  # fmt: skip
    """Write the states of a corpus to a folder. `asked` has the other arguments of `LM.harvest`."""
    check_corpus(lm, "lm.harvest", "or capture with lm.imap")
    model = cast("HarvestModel", lm)
    if cluster is None:
        return run_harvest(model, inputs, out=out, progress=progress, **asked)
    if (lora := asked.pop("lora")) is not None:
        raise ValueError(f"lora={lora!r}: workers of a cluster load no adapters; harvest without cluster=")
    skips = asked["on_error"] == "skip"
    plan = asked_of(model, asked.pop("capture"), asked.pop("interventions"), **asked)
    corpus = Corpus(inputs, Path(out), unit_documents, column, cluster, workers, progress)
    return harvest_on_ray(lm, lm._model_maker(), corpus, plan, skips)


def generate_outputs(
    lm: Any, corpus: Corpus, sampling_params: SamplingParams | None, interventions: Sequence[Intervention] | None
) -> HarvestResult:
    """Generate from each document of a corpus. See `LM.generate_corpus`."""
    check_corpus(lm, "lm.generate_corpus", "or use lm.imap")
    return generate_corpus(lm, lm._model_maker(), corpus, asked_outputs(lm, sampling_params, interventions))


def check_corpus(lm: Any, what: str, instead: str) -> None:
    """Refuse a call over a corpus that cannot run.

    Args:
        what, instead: the call, and its alternative, for messages.

    Raises:
        NotImplementedError: the model is a server's, or has edits.
        RuntimeError: inside the block of a trace, or after `shutdown`.
    """
    lm.backend.require_process(what, instead)
    if lm.engine.on_engine_thread:
        raise RuntimeError("a harvest cannot be run inside the block of a trace: the engine would wait for itself")
    lm.engine.check_open()
    if lm._edits_of(None):
        raise NotImplementedError(
            "this model has edits, and a harvest does not apply them: clear them, or declare them"
        )
