"""`run_harvest`: documents in, one forward pass for each, shards out. `LM.harvest` calls it.

The caller's thread reads the input and submits passes, at most as many as two steps hold. The engine's thread computes them. A
third thread writes a shard while the next one fills. If the disk is slowest, the other threads wait for it.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..client.calls.model import ClientModel
from ..core.model_spec import KV, PATTERN, STATE, site_index
from ..hooks.bind import fingerprint_of
from ..hooks.captures.activations import OTHERS, Activations
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention, Knockout
from ..hooks.interventions.patch_kv import PatchKV
from ..hooks.monitors.monitor import Monitor
from ..hooks.monitors.scores import MonitorScores
from ..hooks.positions import Generated
from ..hooks.site import Site, expand, kind_of
from ..hooks.spec import described
from ..utils.arguments import shown
from .feed.document_feed import DocumentFeed
from .feed.documents import SKIPPED, Document, Pass
from .folder import INDEX, HarvestFolder, Identity, index_name
from .inputs import Settings, document_key, documents_of, is_token_stream, tokenizer_fingerprint
from .progress import HarvestError, HarvestProgress, HarvestResult
from .size import estimated_bytes, expected_bytes, has_index_per_site

ON_ERROR = ("raise", "skip")


def run_harvest(
    model: ClientModel,
    inputs: Iterable[Any],
    *,
    capture: Sequence[Capture | Site | str],
    out: str | Path,
    interventions: Sequence[Intervention] | None,
    lora: str | None = None,
    shard_bytes: int,
    max_length: int | None,
    too_long: str,
    on_error: str = "raise",
    progress: bool | None = None,
) -> HarvestResult:
    """Harvest `inputs` into the folder `out`. See `LM.harvest` for the arguments and errors."""
    weights_version = model.weights.version  # before the fingerprint, so that an edit meanwhile is noticed
    asked = asked_of(
        model,
        capture,
        interventions,
        shard_bytes=shard_bytes,
        max_length=max_length,
        too_long=too_long,
        on_error=on_error,
        lora=lora,
    )
    folder = HarvestFolder(out, asked.identity, asked.description)
    run = HarvestRun(
        model,
        weights_version,
        folder,
        asked.settings,
        asked.captures,
        asked.interventions,
        on_error == "skip",
        progress,
        lora,
    )
    return run.run(inputs)


class AskedHarvest(NamedTuple):
    """Checked options of a harvest."""

    captures: list[Capture]
    interventions: list[Intervention]
    settings: Settings
    identity: Identity
    description: dict[str, Any]


def asked_of(
    model: ClientModel,
    capture: Sequence[Capture | Site | str],
    interventions: Sequence[Intervention] | None,
    *,
    shard_bytes: int,
    max_length: int | None,
    too_long: str,
    on_error: str,
    lora: str | None = None,
) -> AskedHarvest:
    """The arguments of `LM.harvest`, checked. See there for the errors."""
    captures, interventions = model._requests.resolved(capture, interventions)
    monitors = monitors_among(interventions)
    if not (captures or monitors):
        raise ValueError("harvest(capture=...): nothing to capture; name sites, as in ['resid_post.*']")
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}: expected one of {ON_ERROR}")
    for spec in captures:
        if spec.stream:
            raise ValueError(f"{spec.name}: a harvest streams nothing, its rows go to the folder: leave out stream")
        if spec.stays:
            raise ValueError(f"{spec.name}: a harvest's rows go to the folder: leave out device, or use lm.activations")
        kind = kind_of(str(spec.site))
        if kind == STATE:
            raise ValueError(f"{spec.name}: a recurrent state is not a row of a document: capture it in a generation")
        if kind == KV:
            raise ValueError(f"{spec.name}: cached K and V are not rows of a document: lm.kv reads them")
        if kind == PATTERN:
            raise ValueError(
                f"{spec.name}: rows of patterns have the lengths of their documents, and shards have one width"
            )
    for spec in monitors:
        if spec.then != "record":
            raise ValueError(
                f"{spec.name}: a monitor of a harvest records scores, and decides nothing: leave out then={shown(spec.then)}"
            )
    for spec in [*captures, *interventions]:
        if isinstance(spec, PatchKV):
            raise ValueError(f"{spec.name}: K and V are replaced for a prompt, and not for each document of a corpus")
        if not isinstance(spec, Knockout):  # its layers and positions are bound to each document
            spec.sites_in(model.model_spec)  # specs that fit no document are refused here
        if spec.positions == "generated" or isinstance(spec.positions, Generated):
            raise ValueError(f"{spec.name}: positions={spec.positions!r}; a harvest generates nothing")
    longest = min(model.limits.max_model_len, model.limits.kv_tokens)
    settings = Settings(longest if max_length is None else max_length, too_long, shard_bytes)
    if settings.max_length > longest:
        raise ValueError(f"max_length={max_length}: a pass takes at most {longest} (max_model_len, kv_cache_tokens)")
    identity = Identity(
        model=model.weights.fingerprint if lora is None else model.weights.fingerprint_with(lora),
        tokenizer=tokenizer_fingerprint(model.tokenizer),
        spec=fingerprint_of(interventions, captures),
        shard_bytes=settings.shard_bytes,
        max_length=settings.max_length,
        too_long=too_long,
        index_per_site=has_index_per_site([*captures, *monitors]),
    )
    return AskedHarvest(captures, interventions, settings, identity, describe(model, captures, interventions, identity))


def monitors_among(specs: Iterable[Intervention]) -> list[Monitor]:
    """The monitors among a harvest's interventions."""
    return [spec for spec in specs if isinstance(spec, Monitor)]


class HarvestRun:
    """One run of a harvest, from the end of the folder to the end of the input.

    Args:
        weights_version: the model's, when its fingerprint was taken.
        captures, interventions: results of `Requests.resolved`.
        skip: leave out documents that fail.
        progress: see `HarvestProgress`.
        lora: adapter that each document runs with.
    """

    def __init__(
        self,
        model: ClientModel,
        weights_version: int,
        folder: HarvestFolder,
        settings: Settings,
        captures: Sequence[Capture],
        interventions: Sequence[Intervention],
        skip: bool,
        progress: bool | None,
        lora: str | None = None,
    ) -> None:
        self.folder, self.settings, self._model = folder, settings, model
        self._feed = DocumentFeed(
            model, settings, captures, interventions, folder.identity.model, weights_version, skip=skip, lora=lora,
            who="the harvest", advice="call again, or name a new folder",
        )  # fmt: skip
        self._specs = [*captures, *monitors_among(interventions)]
        self._show_progress = progress
        self._shard: list[Document] = []
        self._shard_bytes = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="pymllm-interp-harvest")
        self._writing: Future[None] | None = None
        self._inputs = hashlib.sha256()

    def run(self, inputs: Iterable[Any]) -> HarvestResult:
        """Harvest the input, from the end of the folder.

        Raises:
            PromptError: inputs that are not documents.
            ValueError: the input does not begin with the documents in the folder.
            HarvestError: a document, the input, the engine or the disk failed.
        """
        started, first, bytes_before = time.perf_counter(), self._num_kept, self._bytes
        try:
            documents = enumerate(documents_of(inputs, self.settings.max_length))
            self._skip_harvested(documents)
            try:
                self._check_disk_space(inputs)
                total = len(inputs) if isinstance(inputs, Sized) and not is_token_stream(inputs) else None
                with HarvestProgress(self._show_progress, total, self.folder.num_documents) as progress:
                    self._harvest(documents, progress)
            except Exception as error:
                self._writer.shutdown()  # the shard that is being written is kept
                raise HarvestError(f"{str(error) or repr(error)}\n{self._kept()}") from error
        finally:
            self._stop()
        shards = self.folder.shards
        return HarvestResult(
            folder=self.folder.folder,
            shards=len(shards),
            documents=self._num_kept,
            tokens=sum(shard.tokens for shard in shards),
            rows=dict(sum((Counter(shard.rows) for shard in shards), Counter())),
            bytes=self._bytes,
            new_documents=self._num_kept - first,
            new_bytes=self._bytes - bytes_before,
            seconds=time.perf_counter() - started,
            skipped=self.folder.skipped | {document.number: str(document.error) for document in self._shard},
        )

    @property
    def _num_kept(self) -> int:
        return self.folder.num_documents - len(self.folder.skipped)

    @property
    def _bytes(self) -> int:
        return sum(shard.bytes for shard in self.folder.shards)

    def _kept(self) -> str:
        folder, count = self.folder.folder, self.folder.num_documents
        documents = f"documents 0 to {count - 1}" if count else "no documents yet"
        return f"{folder} has {documents}, in {len(self.folder.shards)} whole shards; the same call continues at document {count}"

    # -- input ---------------------------------------------------------------------------

    def _skip_harvested(self, documents: Iterator[tuple[int, Any]]) -> None:
        """Skip the documents in the shards, and check that they are the same."""
        folder = self.folder.folder
        for shard in self.folder.shards:
            for number in range(shard.first_document, shard.last_document + 1):
                found = next(documents, None)
                if found is None:
                    raise ValueError(
                        f"{folder} has {self.folder.num_documents} documents, but this input ends after {number}: it is not "
                        "the one that was harvested there"
                    )
                _, item = found
                key = SKIPPED
                if str(number) not in shard.skipped:
                    key = document_key(item, partial(self._model._requests.read, item, f"document {number}"))
                self._inputs.update(key)
            if self._inputs.hexdigest() != shard.inputs:
                raise ValueError(
                    f"{folder} has documents {shard.first_document} to {shard.last_document} in {shard.file}, and those of "
                    "this input are not the same: name a new folder"
                )

    def _check_disk_space(self, inputs: Iterable[Any]) -> None:
        """Raise OSError if the input's size is known and the disk has less space."""

        def size_of(tokens: int) -> int:
            return expected_bytes(self._specs, self._model.model_spec, tokens)

        try:
            size, exact = estimated_bytes(inputs, self.settings, size_of, self._model.token_ids)
        except ValueError:  # a document without some position; its pass will be refused
            return
        needed = size - self._bytes
        free = shutil.disk_usage(self.folder.folder).free
        if needed > free:
            raise OSError(
                f"this input takes {'' if exact else 'about '}{needed / 1e9:.2f} GB more, and {free / 1e9:.2f} GB are free"
            )

    # -- the run -------------------------------------------------------------------------

    def _harvest(self, documents: Iterator[tuple[int, Any]], progress: HarvestProgress) -> None:
        try:
            for done in self._feed.results(documents):
                document = done.made.document
                if done.found is not None:
                    self._add_rows(done.made, done.found, done.scores)
                if done.made.is_last:
                    self._keep(document)
                    progress.advance(document.tokens, document.nbytes, skipped=document.error is not None)
            self._write_shard()
        finally:
            self._wait_for_writer()
        self._finish()

    def _finish(self) -> None:
        self.folder.finish()

    def _add_rows(self, done: Pass, found: Activations, scored: Mapping[str, MonitorScores]) -> None:
        document, ids = done.document, torch.tensor(done.prompt.token_ids)
        index_per_site = self.folder.identity.index_per_site
        parts = [(site, found.as_arrived(site), found.positions[site], found.token_ids[site]) for site in found]
        parts += [(f"scores.{name}", own.scores, own.positions, ids[own.positions]) for name, own in scored.items()]
        for place, (site, rows, positions, tokens) in enumerate(parts):
            if len(rows) < len(positions):  # a mean: its index is that of the last position
                positions, tokens = positions[-len(rows) :], tokens[-len(rows) :]
            document.add(site, rows)
            for name, values in found.others(site).items() if site in found else ():
                document.add(f"{name}.{site}", values)
            if place and not index_per_site:
                continue
            index = (torch.full_like(positions, document.number), positions + done.start, tokens)
            for name, values in zip(INDEX, index, strict=True):
                document.add(index_name(name, site, index_per_site), values)
        document.tokens += len(done.prompt.token_ids)

    def _keep(self, document: Document) -> None:
        if self._shard and self._shard_bytes + document.nbytes > self.settings.shard_bytes:
            self._write_shard()
        self._shard.append(document)
        self._shard_bytes += document.nbytes

    def _write_shard(self) -> None:
        """Hand the shard to the writer, after it has written the one before. Skipped documents wait for one that is kept."""
        self._wait_for_writer()
        kept = [document for document in self._shard if document.error is None]
        if not kept:
            return
        shard, self._shard, self._shard_bytes = self._shard, [], 0
        for document in shard:
            self._inputs.update(document.key)
        tensors = {name: [piece for document in kept for piece in document.rows[name]] for name in kept[0].rows}
        sites = [name for name in tensors if not name.startswith((*INDEX, *(f"{other}." for other in OTHERS)))]
        entry = {
            "rows": {site: sum(map(len, tensors[site])) for site in sites},
            "tokens": sum(document.tokens for document in shard),
            "first_document": shard[0].number,
            "last_document": shard[-1].number,
            "inputs": self._inputs.hexdigest(),
            "engine": self._model.backend.facts.engine_name,
            "skipped": {str(one.number): str(one.error) for one in shard if one.error is not None},
        }
        self._writing = self._writer.submit(self.folder.add, tensors, entry)

    def _wait_for_writer(self) -> None:
        """Wait until the shard is written. Raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except OSError as error:
                raise OSError(f"shard {len(self.folder.shards)} could not be written: {error}") from error

    def _stop(self) -> None:
        for handle in self._feed.cancel():
            handle.wait()
        self._writer.shutdown()
        self.folder.close()


SHOWN_DIGITS = 8
"""Hexadecimal digits of a fingerprint in words."""


def describe(
    model: ClientModel, captures: Sequence[Capture], interventions: Sequence[Intervention], identity: Identity
) -> dict[str, Any]:
    """The model, its tokenizer, the captured sites and all specs, for `manifest.json`."""
    spec = model.model_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    sites = {site for one in captures for site in expand(one.site, spec.num_hidden_layers, spec.family)}
    return {
        "model": (
            f"{spec.family.name}, {spec.num_hidden_layers} layers, hidden_size {spec.hidden_size}, {dtype}, "
            f"fingerprint {identity.model[:SHOWN_DIGITS]}"
        ),
        "num_hidden_layers": spec.num_hidden_layers,
        "tokenizer": f"fingerprint {identity.tokenizer[:SHOWN_DIGITS]}" if identity.tokenizer else "none",
        "sites": [
            *map(str, sorted(sites, key=lambda site: site_index(site, spec.num_hidden_layers))),
            *(f"scores.{one.name}" for one in interventions if isinstance(one, Monitor)),
        ],
        "capture": [described(one) for one in captures],
        "interventions": [described(one) for one in interventions],
    }
