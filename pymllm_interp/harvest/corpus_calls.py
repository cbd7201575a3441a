"""Calls of an `LM` over a whole corpus, here or by workers on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from ..hooks.site import Site
from ..utils.arguments import is_whole, shown
from .on_ray.workers import Corpus, harvest_on_ray
from .on_ray.workers import generate_corpus as generated
from .outputs import asked_outputs
from .progress import HarvestResult
from .run import asked_of, run_harvest

if TYPE_CHECKING:
    from .feed.batches import ActivationBatches


def harvest(
    lm: Any, inputs: Iterable[Any], out: str | Path, cluster: str | None, workers: int | None, unit_documents: int,
    column: str | None, progress: bool | None, **asked: Any,
) -> HarvestResult:  # fmt: skip
    """Write the states of a corpus to a folder. `asked` has the other arguments of `LM.harvest`."""
    check_corpus(lm, "lm.harvest", "or capture with lm.imap")
    if cluster is None:
        return run_harvest(lm, inputs, out=out, progress=progress, **asked)
    if (lora := asked.pop("lora")) is not None:
        raise ValueError(f"lora={lora!r}: workers of a cluster load no adapters; harvest without cluster=")
    skips = asked["on_error"] == "skip"
    plan = asked_of(lm, asked.pop("capture"), asked.pop("interventions"), **asked)
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


def activations(
    self: Any, inputs: Iterable[Any], site: Capture | Site | str | Sequence[Capture | Site | str], *, rows: int = 4096,
    shuffle: int = 0, seed: int = 0, device: str | torch.device | None = None,
    interventions: Sequence[Intervention] | None = None, lora: str | None = None, max_length: int | None = None,
    too_long: str = "error", on_error: str = "raise",
) -> ActivationBatches:  # fmt: skip
    """Batches of the states of a corpus, which never leave the engine's device, for training on them.

    Each ``for`` loop is an epoch, in which each row comes once. Documents are computed as their rows are taken: a slow consumer
    stops them, and no other request. The states of two steps, and the buffer, take memory of `device_capture_bytes`.

    Args:
        inputs: documents, see `harvest`. Several epochs need a list, or another object that starts anew.
        site: a site or a `Capture`, or several with the same positions. Passes end behind the last one's layer.
        rows: rows of a batch; the last one of an epoch may have fewer.
        shuffle: rows of the shuffle buffer, at least `rows`; 0: the order of the documents.
        seed: seed of the order.
        device: device of the batches; None: the engine's.
        interventions, lora, max_length, too_long, on_error: see `harvest`.

    Raises:
        ValueError: invalid captures, sizes or device. While it is read: no room in `device_capture_bytes`, or an invalid document.
        NotImplementedError: the engine is not in this process.
    """
    from .feed.batches import ActivationBatches

    check_corpus(self, "lm.activations", "or harvest there, and open_harvest the folder")
    memory = self.backend.factory.device_memory
    if memory is None:
        raise NotImplementedError(
            "lm.activations needs engine='own': other engines have captured states on the host only"
        )
    for name, value, lowest in (("rows", rows, 1), ("shuffle", shuffle, 0), ("seed", seed, 0)):
        if not is_whole(value) or value < lowest:
            raise ValueError(f"lm.activations: {name}={shown(value)}: expected a whole number of at least {lowest}")
    if shuffle and shuffle < rows:
        raise ValueError(f"lm.activations: shuffle={shuffle}: expected 0, or at least the {rows} rows of a batch")
    given = [site] if isinstance(site, Capture | Site | str) else list(site)
    specs = [replace(spec, device="cpu") if isinstance(spec, Capture) else spec for spec in given]
    version = self.weights.version  # before the fingerprint, so that an edit meanwhile is noticed
    asked = asked_of(
        self,
        specs,
        interventions,
        shard_bytes=1,
        max_length=max_length,
        too_long=too_long,
        on_error=on_error,
        lora=lora,
    )
    if asked.identity.index_per_site:
        raise ValueError(
            "lm.activations: the sites of a batch have the same rows, and these select different positions"
        )
    try:
        found = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"lm.activations: device={shown(device)}: {error}") from None
    captures = [replace(spec, device="engine") for spec in asked.captures]
    return ActivationBatches(
        self, inputs, asked.settings, captures, asked.interventions, asked.identity.model, version, repr(asked.identity), memory,
        rows=rows, shuffle=shuffle, seed=seed, device=found, skip=on_error == "skip",
        lora=lora,
    )  # fmt: skip


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
