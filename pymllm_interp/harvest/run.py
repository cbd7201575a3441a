"""A harvest's run: documents in, one forward pass each, many at once; shards out. `LM.harvest` is the way in.

The caller's thread reads the input and submits, no further ahead than two steps can hold; the engine's thread computes; a thread
writes one shard while the next one fills. Where the disk is the slowest, the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from ..core.sampling_params import SamplingParams
from ..engine.handle import RequestHandle
from ..engine.prompts import PromptError
from .folder import INDEX, HarvestFolder, index_name
from .inputs import Settings, _is_stream, _key, _length, documents_of

READ = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""One forward pass: the single new token is sampled, and never read."""
STEPS_AHEAD = 2
"""The input is read and submitted ahead of what was computed by as much as so many steps hold."""
SAMPLED_TEXTS = 64
"""Of a list of texts, so many are counted for an estimate of its size."""


class HarvestError(RuntimeError):
    """A harvest stopped before the end of its input. The message says why, what was kept, and how to go on."""


@dataclass(frozen=True)
class HarvestResult:
    """What is in a harvest's folder, and what this run did for it."""

    folder: Path
    shards: int
    documents: int
    """In the folder, with those of earlier runs."""
    tokens: int
    rows: dict[str, int]
    """By site."""
    bytes: int
    new_documents: int
    """That this run computed."""
    new_bytes: int
    seconds: float
    """Of this run, until all was on disk."""

    @property
    def gb_per_second(self) -> float:
        """Billions of bytes that this run wrote each second."""
        return self.new_bytes / self.seconds / 1e9


@dataclass
class _Document:
    number: int
    key: bytes
    """What it was given as, for the hash of the input."""
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    tokens: int = 0
    nbytes: int = 0

    def add(self, name: str, rows: Tensor) -> None:
        self.rows.setdefault(name, []).append(rows)
        self.nbytes += rows.nbytes


@dataclass
class _Pass:
    """A request under way, for a document or a part of one."""

    document: _Document
    start: int
    last: bool
    tokens: int
    handle: RequestHandle


class HarvestRun:
    """Computes what is missing in a folder, once.

    Args:
        tokens: (document, what it is for messages) -> token ids.
        handle: (token ids, what) -> the request of one pass, not yet submitted.
        submit: starts it.
        max_tokens: that two steps hold; so much of the input is under way at once.
        max_requests: the same of documents.
        expected_bytes: (tokens of a pass) -> what its rows take.
        engine: what computes, for the manifest.
        progress: show it on standard error; None: where that is a terminal.
    """

    def __init__(
        self,
        folder: HarvestFolder,
        settings: Settings,
        *,
        tokens: Callable[[Any, str], list[int]],
        handle: Callable[[list[int], str], RequestHandle],
        submit: Callable[[RequestHandle], None],
        max_tokens: int,
        max_requests: int,
        expected_bytes: Callable[[int], int],
        engine: str,
        progress: bool | None,
    ) -> None:
        self.folder, self.settings = folder, settings
        self._tokens, self._handle, self._submit = tokens, handle, submit
        self._max_tokens, self._max_requests = max_tokens, max_requests
        self._expected_bytes, self._engine = expected_bytes, engine
        self._progress = Console(stderr=True).is_terminal if progress is None else progress
        self._under_way: deque[_Pass] = deque()
        self._shard: list[_Document] = []
        self._shard_bytes = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="pymllm-interp-harvest")
        self._writing: Future[None] | None = None
        self._inputs = hashlib.sha256()

    def run(self, inputs: Iterable[Any]) -> HarvestResult:
        """Harvest the input, from where the folder ends.

        Raises:
            PromptError: inputs that are no documents.
            ValueError: the input does not begin with the documents that the folder has.
            HarvestError: a document, the input, the engine or the disk failed, or there is no room.
        """
        started, first, bytes_before = time.perf_counter(), self.folder.num_documents, self._bytes
        try:
            documents = enumerate(documents_of(inputs, self.settings.max_length))
            self._skip(documents)
            try:
                self._check_room(inputs)
                with self._shown(inputs) as advance:
                    self._harvest(documents, advance)
            except Exception as error:
                self._writer.shutdown()  # what it still writes is kept
                raise HarvestError(f"{str(error) or repr(error)}\n{self._kept()}") from error
        finally:
            self._stop()
        shards = self.folder.shards
        return HarvestResult(
            folder=self.folder.folder,
            shards=len(shards),
            documents=self.folder.num_documents,
            tokens=sum(shard.tokens for shard in shards),
            rows=dict(sum((Counter(shard.rows) for shard in shards), Counter())),
            bytes=self._bytes,
            new_documents=self.folder.num_documents - first,
            new_bytes=self._bytes - bytes_before,
            seconds=time.perf_counter() - started,
        )

    @property
    def _bytes(self) -> int:
        return sum(shard.bytes for shard in self.folder.shards)

    def _kept(self) -> str:
        folder, count = self.folder.folder, self.folder.num_documents
        documents = f"documents 0 to {count - 1}" if count else "no documents yet"
        return f"{folder} has {documents}, in {len(self.folder.shards)} whole shards; the same call goes on at document {count}"

    # -- input ---------------------------------------------------------------------------

    def _skip(self, documents: Iterator[tuple[int, Any]]) -> None:
        """Leave out what the shards have, and see that it is the same."""
        folder = self.folder.folder
        for shard in self.folder.shards:
            for number in range(shard.first_document, shard.last_document + 1):
                _, item = next(documents, (0, None))
                if item is None:
                    raise ValueError(
                        f"{folder} has {self.folder.num_documents} documents, but this input ends after {number}: it is not "
                        "the one that was harvested there"
                    )
                ids = [] if isinstance(item, str) else self._tokens(item, f"document {number}")
                self._inputs.update(_key(item, ids))
            if self._inputs.hexdigest() != shard.inputs:
                raise ValueError(
                    f"{folder} has documents {shard.first_document} to {shard.last_document} in {shard.file}, and those of "
                    "this input are not the same: name a new folder"
                )

    def _passes(self, documents: Iterator[tuple[int, Any]]) -> Iterator[_Pass]:
        for number, item in documents:
            what = f"document {number}"
            ids = self._tokens(item, what)
            document = _Document(number, _key(item, ids))
            passes = list(self.settings.passes(ids, what))
            for place, (start, part) in enumerate(passes):
                last = place == len(passes) - 1
                yield _Pass(document, start, last, len(part), self._handle(part, what))

    def _check_room(self, inputs: Iterable[Any]) -> None:
        """Raises OSError where the input's size is known, and the disk has not that much room."""
        lengths, about = self._lengths(inputs)
        try:
            size = sum(count * self._size_of(length) for length, count in lengths.items())
        except ValueError:  # a document that lacks positions; it is named when it is its turn
            return
        needed = int(about * size) - self._bytes
        free = shutil.disk_usage(self.folder.folder).free
        if needed > free:
            raise OSError(
                f"this input takes {'about ' if about != 1 else ''}{needed / 1e9:.2f} GB more, and {free / 1e9:.2f} GB are free"
            )

    def _lengths(self, inputs: Iterable[Any]) -> tuple[Counter[int], float]:
        """How many documents have so many tokens, and a factor that makes all of them out of some; nothing where not known."""
        if not isinstance(inputs, Sized) or not hasattr(inputs, "__getitem__") or not len(inputs):
            return Counter(), 1
        items: Any = inputs
        if _is_stream(items):
            whole, rest = divmod(len(items), self.settings.max_length)
            return Counter({self.settings.max_length: whole, rest: int(rest > 0)}), 1
        if not isinstance(items[0], str):
            return Counter(map(_length, items)), 1
        lengths = Counter()
        sample = range(0, len(items), -(-len(items) // SAMPLED_TEXTS))
        for number in sample:
            with contextlib.suppress(PromptError):
                lengths[len(self._tokens(items[number], ""))] += 1
        return lengths, len(items) / len(sample)

    def _size_of(self, length: int) -> int:
        """Of the rows of a document of so many tokens."""
        size, longest = self._expected_bytes, self.settings.max_length
        if length <= longest or self.settings.too_long != "split":
            return size(min(length, longest)) if length else 0
        return length // longest * size(longest) + (size(length % longest) if length % longest else 0)

    # -- the run -------------------------------------------------------------------------

    def _harvest(self, documents: Iterator[tuple[int, Any]], advance: Callable[[_Document], None]) -> None:
        passes, failure = self._passes(documents), None
        while True:
            try:
                made = next(passes, None)
            except Exception as error:  # of one document, or of what the input reads from: those before it are good
                made, failure = None, error
            if made is None:
                break
            while self._under_way and not self._has_room_for(made):
                self._take(advance)
            self._submit(made.handle)
            self._under_way.append(made)
        while self._under_way:
            self._take(advance)
        if failure is None:
            self._write()
        self._written()
        if failure is not None:
            raise failure
        self.folder.finish()

    def _has_room_for(self, made: _Pass) -> bool:
        tokens = sum(one.tokens for one in self._under_way) + made.tokens
        return tokens <= self._max_tokens and len(self._under_way) < self._max_requests

    def _take(self, advance: Callable[[_Document], None]) -> None:
        """Wait for the earliest pass, and keep its rows."""
        done = self._under_way[0]
        done.handle.wait()
        self._under_way.popleft()
        (request,) = done.handle.requests
        document = done.document
        error = request.error or request.activations.error
        if error is not None:
            raise RuntimeError(f"document {document.number}: {error!r}") from error
        found = request.activations
        indexed = set(found.indexes)
        for place, site in enumerate(found):
            rows, positions, tokens = found[site], found.positions[site], found.token_ids[site]
            if len(rows) < len(positions):  # a mean: it stands where its last row does
                positions, tokens = positions[-len(rows) :], tokens[-len(rows) :]
            document.add(site, rows)
            if site in indexed:
                document.add(f"indexes.{site}", found.indexes[site])
            if place and not self.folder.identity.index_per_site:
                continue
            index = (torch.full_like(positions, document.number), positions + done.start, tokens)
            for name, values in zip(INDEX, index, strict=True):
                document.add(index_name(name, site, self.folder.identity.index_per_site), values)
        document.tokens += done.tokens
        if done.last:
            self._keep(document)
            advance(document)

    def _keep(self, document: _Document) -> None:
        if self._shard and self._shard_bytes + document.nbytes > self.settings.shard_bytes:
            self._write()
        self._shard.append(document)
        self._shard_bytes += document.nbytes

    def _write(self) -> None:
        """Give the shard to the writer, which first has to be through with the one before."""
        self._written()
        if not self._shard:
            return
        shard, self._shard, self._shard_bytes = self._shard, [], 0
        for document in shard:
            self._inputs.update(document.key)
        tensors = {name: [piece for document in shard for piece in document.rows[name]] for name in shard[0].rows}
        sites = [name for name in tensors if not name.startswith((*INDEX, "indexes."))]
        entry = {
            "rows": {site: sum(map(len, tensors[site])) for site in sites},
            "tokens": sum(document.tokens for document in shard),
            "first_document": shard[0].number,
            "last_document": shard[-1].number,
            "inputs": self._inputs.hexdigest(),
            "engine": self._engine,
        }
        self._writing = self._writer.submit(self.folder.add, tensors, entry)

    def _written(self) -> None:
        """Wait for the writer. Raises what went wrong there."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except OSError as error:
                raise OSError(f"shard {len(self.folder.shards)} could not be written: {error}") from error

    def _stop(self) -> None:
        for left in self._under_way:
            left.handle.cancel()
        for left in self._under_way:
            left.handle.wait()
        self._writer.shutdown()
        self.folder.close()

    def _shown(self, inputs: Iterable[Any]) -> _Shown:
        total = len(inputs) if isinstance(inputs, Sized) and not _is_stream(inputs) else None
        return _Shown(self._progress, total, self.folder.num_documents)


class _Shown:
    """A line on standard error, while it is entered."""

    def __init__(self, enabled: bool, total: int | None, done: int) -> None:
        self._bar = Progress(
            TextColumn("{task.completed:,} documents"), BarColumn(), TextColumn("{task.fields[tokens]:,} tokens"),
            TextColumn("{task.fields[speed]:.2f} GB/s"), TimeElapsedColumn(),
            console=Console(stderr=True), disable=not enabled,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, tokens=0, speed=0.0)
        self._started, self._tokens, self._bytes = time.perf_counter(), 0, 0

    def __enter__(self) -> Callable[[_Document], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def _advance(self, document: _Document) -> None:
        self._tokens, self._bytes = self._tokens + document.tokens, self._bytes + document.nbytes
        speed = self._bytes / (time.perf_counter() - self._started) / 1e9
        self._bar.update(self._task, advance=1, tokens=self._tokens, speed=speed)
