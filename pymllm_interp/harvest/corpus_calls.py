"""Calls of an `LM` over a whole corpus, here or by workers on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core.sampling_params import SamplingParams
from ..hooks.interventions.knockout import Intervention
from .on_ray.workers import Corpus, harvest_on_ray
from .on_ray.workers import generate_corpus as generated
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


def generate_corpus(
    self: Any, inputs: Iterable[Any], sampling_params: SamplingParams | None = None, *, out: str | Path,
    interventions: Sequence[Intervention] | None = None, unit_documents: int = 256, column: str | None = None,
    cluster: str | None = None, workers: int | None = None, progress: bool | None = None,
) -> HarvestResult:  # fmt: skip
    """Generate from each document of a corpus, into Parquet files in the folder `out`.

    Their columns are `document` (its index in the input), `sample` (of `n`), `token_ids`, `text` and `finish_reason`. A
    document has the seed of the parameters, or 0, plus its index. The same call continues after any end. Each document is
    there once.

    Args:
        inputs, out, unit_documents, column, cluster, workers, progress: see `harvest`. Without `cluster`, this `LM`
            computes.
        sampling_params: sampling parameters of all documents.
        interventions: applied to each.

    Raises:
        ValueError, FileExistsError, HarvestError: as `harvest`.
    """
    corpus = Corpus(inputs, Path(out), unit_documents, column, cluster, workers, progress)
    check_corpus(self, "lm.generate_corpus", "or use lm.imap")
    return generated(self, self._model_maker(), corpus, asked_outputs(self, sampling_params, interventions))


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
