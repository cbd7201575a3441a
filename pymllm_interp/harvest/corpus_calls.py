"""`CorpusCalls`: calls of an `LM` over a whole corpus, here or by workers on Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..client.calls.backed import BackedModel
from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from ..hooks.site import Site
from .on_ray.workers import Corpus, generate_corpus, harvest_on_ray
from .outputs import asked_outputs
from .result import HarvestResult
from .run import asked_of, run_harvest

if TYPE_CHECKING:
    from .model import HarvestModel


class CorpusCalls(BackedModel):
    """Harvests, and generation over a corpus."""

    def model_maker(self) -> Callable[[], Any]:
        """Makes an equal model in another process: it can be pickled."""
        raise NotImplementedError(f"workers cannot make a {type(self).__name__}")

    def harvest(
        self,
        inputs: Iterable[Any],
        *,
        capture: Sequence[Capture | Site | str],
        out: str | Path,
        interventions: Sequence[Intervention] | None = None,
        lora: str | None = None,
        shard_bytes: int = 1 << 29,
        max_length: int | None = None,
        too_long: str = "error",
        on_error: str = "raise",
        progress: bool | None = None,
        cluster: str | None = None,
        workers: int | None = None,
        unit_documents: int = 1024,
        column: str | None = None,
    ) -> HarvestResult:
        """Write the states of a corpus to the folder `out`, as safetensors shards that `open_harvest` reads.

        Each document is one forward pass without generation; many run at once. The same call resumes a run that was killed or
        failed: it skips the documents in whole shards, and deletes all other files of the run.

        Args:
            inputs: an iterable of documents (texts or token ids), which may be lazy and endless. Or one stream of tokens: a tensor
                [n], an array, an iterable of integers. It is cut into documents of `max_length` tokens.
            capture: sites and `Capture`s. Positions and reductions apply to one pass.
            out: a new folder, or a folder of the same harvest.
            interventions: applied to each document.
            lora: a LoRA adapter that each document runs with, by name; None: the model itself.
            shard_bytes: upper bound of a shard, in bytes. A document is never split over shards, so a larger document makes a
                larger shard. About twice this much is held in host memory.
            max_length: upper bound of a pass, in tokens; None: max_model_len.
            too_long: of a longer document: "error"; "truncate": read its beginning; "split": read it in several passes.
                Passes have `max_length` tokens, and do not attend to each other. Positions still count from the start of the
                document, so the position in the pass is ``position % max_length``.
            on_error: "raise"; "skip": leave out documents that fail, and name them in the result and the manifest.
            progress: show documents, rates and the time left on standard error: a bar on a terminal, lines elsewhere. None: no
                lines in the first seconds. False: nothing.
            cluster: compute by workers on a Ray cluster (docs/engine/cluster.md): "auto" (of this machine, or of RAY_ADDRESS), or
                its address. `out` is on shared storage. `inputs` may be `Path`s of JSONL or Parquet files, or a `ray.data.Dataset`.
            workers: each with a model of its own; None: one for each GPU of the cluster, or for each CPU.
            unit_documents: documents that a worker gets at a time, at most.
            column: of the files; None: "text", or else "input_ids".

        Raises:
            ValueError: invalid captures, a folder of another harvest or input, or `lora` with `cluster`: workers load no adapters.
            FileExistsError: the folder holds other files.
            HarvestError: the run stopped before the end of the input. The message names the document, and what was kept.
        """
        self._check_corpus("lm.harvest", "or capture with lm.imap")
        model = cast("HarvestModel", self)
        if cluster is not None:
            if lora is not None:
                raise ValueError(f"lora={lora!r}: workers of a cluster load no adapters; harvest without cluster=")
            asked = asked_of(
                model,
                capture,
                interventions,
                shard_bytes=shard_bytes,
                max_length=max_length,
                too_long=too_long,
                on_error=on_error,
            )
            corpus = Corpus(inputs, Path(out), unit_documents, column, cluster, workers, progress)
            return harvest_on_ray(self, self.model_maker(), corpus, asked, on_error == "skip")
        return run_harvest(
            model, inputs, capture=capture, out=out, interventions=interventions, lora=lora, shard_bytes=shard_bytes,
            max_length=max_length, too_long=too_long, on_error=on_error, progress=progress,
        )  # fmt: skip

    def generate_corpus(
        self, inputs: Iterable[Any], sampling_params: SamplingParams | None = None, *, out: str | Path,
        interventions: Sequence[Intervention] | None = None, unit_documents: int = 256, column: str | None = None,
        cluster: str | None = None, workers: int | None = None, progress: bool | None = None,
    ) -> HarvestResult:  # fmt: skip
        """Generate from each document of a corpus, into Parquet files in the folder `out`.

        Their columns are `document` (its index in the input), `sample` (of `n`), `token_ids`, `text` and `finish_reason`. A
        document has the seed of the parameters, or 0, plus its index. The same call continues after any end. Each document is
        there once.

        Args:
            inputs, out, unit_documents, column, cluster, workers, progress: as of `harvest`. Without `cluster`, this `LM` computes.
            sampling_params: of all documents.
            interventions: applied to each.

        Raises:
            ValueError, FileExistsError, HarvestError: as `harvest`.
        """
        self._check_corpus("lm.generate_corpus", "or use lm.imap")
        asked = asked_outputs(self, sampling_params, interventions)
        corpus = Corpus(inputs, Path(out), unit_documents, column, cluster, workers, progress)
        return generate_corpus(self, self.model_maker(), corpus, asked)

    def _check_corpus(self, what: str, instead: str) -> None:
        self.backend.require_process(what, instead)
        if self.engine.on_engine_thread:
            raise RuntimeError("a harvest cannot be run inside the block of a trace: the engine would wait for itself")
        self.engine.check_open()
        if self.edits_of(None):
            raise NotImplementedError(
                "this model has edits, and a harvest does not apply them: clear them, or declare them"
            )
