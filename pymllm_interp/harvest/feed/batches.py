"""`ActivationBatches`: the states of a corpus as batches on the engine's device. `LM.activations` makes them.

The consumer's thread drives it: it takes results of passes, and submits further ones. A consumer that is slow, raises or stops
leaves the engine to others.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...client.calls.model import ClientModel
from ...hooks.captures.egress.device_memory import DeviceMemory
from ...hooks.captures.spec import Capture
from ...hooks.interventions.knockout import Intervention
from ...hooks.site import Site
from ..inputs import Settings, document_key, documents_of
from .document_feed import DocumentFeed
from .documents import SKIPPED, Pass
from .mixer import MixedRows, RowMixer


class StateBatch(NamedTuple):
    """States of a batch, on one device.

    Attributes:
        states: site -> [rows, width]; `q`, `k`, `v` and `z` have [rows, heads, head_dim].
        documents, positions, token_ids: [rows] int64: index of the document in the input, position in it, and token.
    """

    states: dict[str, torch.Tensor]
    documents: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """The states of the only site."""
        if len(self.states) != 1:
            raise ValueError(f"this batch has {', '.join(self.states)}: read batch.states[site]")
        return next(iter(self.states.values()))


class ActivationBatches(IterableDataset[StateBatch]):
    """Batches of the states of a corpus: one epoch for each ``for`` loop, in which each row comes once.

    It is a `torch.utils.data.IterableDataset`: ``DataLoader(batches, batch_size=None)``. One loop at a time reads it.

    Args:
        inputs: documents, see `LM.activations`.
        captures: captures with ``device="engine"``, all of the same positions.
        fingerprint: fingerprint of the model, with the adapter.
        identity: key of all that makes the rows.
        memory: memory of states on the device.

    Attributes:
        epoch: index of the epoch that is read now, or was last.
        skipped: documents of the epoch that ``on_error="skip"`` left out: index in the input -> the error.
    """

    def __init__(
        self,
        model: ClientModel,
        inputs: Iterable[Any],
        settings: Settings,
        captures: Sequence[Capture],
        interventions: Sequence[Intervention],
        fingerprint: str,
        weights_version: int,
        identity: str,
        memory: DeviceMemory,
        *,
        rows: int,
        shuffle: int,
        seed: int,
        device: torch.device | None,
        skip: bool,
        lora: str | None,
    ) -> None:
        self._model, self._inputs, self._settings, self._memory = model, inputs, settings, memory
        self._rows, self._shuffle, self._seed, self._device = rows, shuffle, seed, device
        self._identity = hashlib.sha256(f"{identity} {rows} {shuffle} {seed}".encode()).hexdigest()
        self._feed_of = lambda: DocumentFeed(
            model, settings, captures, interventions, fingerprint, weights_version, skip=skip, lora=lora,
            who="lm.activations", advice="make it again",
        )  # fmt: skip
        self.epoch, self.skipped = -1, dict[int, str]()
        self._mixer: RowMixer | None = None  # of the loop that reads
        self._next, self._digest = (0, 0), b""  # the first pass that was not taken in; hash of the documents before it
        self._left: dict[str, Any] = {"identity": self._identity, "epoch": -1, "held": None}
        self._resumes = False

    def __iter__(self) -> Iterator[StateBatch]:
        if get_worker_info() is not None:
            raise RuntimeError("the engine is in the main process: DataLoader(batches, batch_size=None, num_workers=0)")
        self._check_free("call lm.activations again for a second consumer")
        state = self._left if self._resumes and self._left["held"] is not None else None
        self.epoch = self._left["epoch"] + (state is None)
        random = np.random.default_rng((self._seed, self.epoch))
        if state is not None:
            random.bit_generator.state = state["random"]
        self._resumes, self._mixer = False, RowMixer(self._rows, self._shuffle, self._memory, random)
        feed, begun, ended = self._feed_of(), state is None, False
        try:
            for mixed in self._mixed(feed, self._mixer, state):
                begun = True
                yield self._batch(mixed)
            ended = True
        finally:
            feed.cancel()
            if ended:
                self._left = {"identity": self._identity, "epoch": self.epoch, "held": None}
            elif begun:
                self._left = self.state_dict()
            else:
                self._resumes = True  # the state could not be gone on from, and the next loop tries again
            self._mixer = None

    def tensors(self, site: str | Site | None = None, epochs: int | None = 1) -> Generator[torch.Tensor, None, None]:
        """The rows of a site, batch by batch: what SAELens' `SAETrainer` takes as its `data_provider`.

        Args:
            site: one of the sites; None: the only one.
            epochs: None: without end.
        """
        for _ in itertools.count() if epochs is None else range(epochs):
            for batch in self:
                yield batch.rows if site is None else batch.states[str(site)]

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, between two batches: numbers of documents and rows, and no states.

        After a loop that was left early it is the place where the loop was left. After a whole one the next epoch comes.
        """
        if self._mixer is None:
            return self._left
        return {
            "identity": self._identity, "epoch": self.epoch, "next": self._next, "digest": self._digest, "held": self._mixer.held,
            "random": self._mixer.random.bit_generator.state, "skipped": dict(self.skipped),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next loop start where `state_dict` was taken. Documents with rows in the buffer are computed again.

        Raises:
            ValueError: a state of other captures, documents' lengths, batches, seed or weights.
            RuntimeError: a loop reads the batches.
        """
        self._check_free("end it before load_state_dict")
        if state.get("identity") != self._identity:
            raise ValueError(
                "this state is of another lm.activations: its sites, interventions, rows, shuffle, seed, max_length, too_long and "
                "the weights must be the same"
            )
        self._left, self._resumes = state, True

    def _check_free(self, advice: str) -> None:
        if self._mixer is not None:
            raise RuntimeError(f"a loop reads these batches: {advice}")

    # -- an epoch -------------------------------------------------------------------------

    def _mixed(self, feed: DocumentFeed, mixer: RowMixer, state: dict[str, Any] | None) -> Iterator[MixedRows]:
        begun = (0, 0) if state is None else state["next"]
        self._next, self._digest, self.skipped = begun, b"", {} if state is None else dict(state["skipped"])
        restored = _Restored(torch.zeros((0, 2), dtype=torch.int64) if state is None else state["held"])
        self._digest = b"" if state is None else state["digest"]
        for made, rows in _passes_of(feed, self._documents(begun[0], restored.documents)):
            if made.document.error is not None:
                self.skipped[made.document.number] = str(made.document.error)
            if (made.document.number, made.start) < begun:
                restored.add(rows)
                continue
            restored.move_to(mixer)
            self._next = made.document.number, made.start + 1
            if made.is_last:
                self._next, self._digest = (made.document.number + 1, 0), _joined(self._digest, made.document.key)
            mixer.add(rows)
            del rows  # which is freed with its batches
            yield from mixer.batches(last=False)
        restored.move_to(mixer)
        yield from mixer.batches(last=True)

    def _documents(self, begun: int, again: set[int]) -> Iterator[tuple[int, Any]]:
        """The documents from number `begun` on, and earlier ones that are computed again.

        Raises:
            ValueError: other documents than the state's come before.
            RuntimeError: an iterator that an earlier epoch has read.
        """
        documents, digest, number = documents_of(self._inputs, self._settings.max_length), b"", -1
        for number, item in enumerate(documents):
            if number < begun:
                read = partial(self._model._requests.read, item, f"document {number}")
                digest = _joined(digest, SKIPPED if number in self.skipped else document_key(item, read))
            if number == begun - 1 and digest != self._digest:
                raise ValueError(f"documents 0 to {number} of this input are not those of the state")
            if number >= begun or number in again:
                yield number, item
        if number < begun - 1:
            raise ValueError(f"this input ends after document {number}, and the state is of a longer one")
        if number < 0 and self.epoch and iter(self._inputs) is self._inputs:
            raise RuntimeError("the inputs are an iterator, which an epoch has read: give a list, or what starts anew")

    def _batch(self, mixed: MixedRows) -> StateBatch:
        states, index = dict(mixed.states), mixed.index
        device = self._device or self._memory.device
        if self._device is not None:
            states = {site: rows.to(device, non_blocking=True) for site, rows in states.items()}
        documents, positions, token_ids = index.T.contiguous().to(device)
        return StateBatch(states, documents, positions, token_ids)


class _Restored:
    """Rows of a resumed epoch that were held, as their documents are computed again.

    Args:
        held: [rows, 2]: document and position of each row, in the order in which they were held.
    """

    def __init__(self, held: torch.Tensor) -> None:
        self.documents: set[int] = set(held[:, 0].tolist())
        self._places = {tuple(place): i for i, place in enumerate(held.tolist())}
        self._pieces: list[MixedRows] = []
        self._found: list[int] = []

    def add(self, rows: MixedRows) -> None:
        """Take in the rows of a pass that were held."""
        own = [
            (self._places[place], i)
            for i, row in enumerate(rows.index[:, :2].tolist())
            if (place := tuple(row)) in self._places
        ]
        if own:
            order = torch.tensor([i for _, i in own])
            self._found += [place for place, _ in own]
            states = {site: values[order.to(values.device)] for site, values in rows.states.items()}
            self._pieces.append(MixedRows(rows.index[order], states))

    def move_to(self, mixer: RowMixer) -> None:
        """Give all rows to a mixer, in the order in which they were held. Does nothing without any, and at a second call.

        Raises:
            ValueError: some did not come: the input is not the same.
        """
        if not self._places:
            return
        if sorted(self._found) != list(range(len(self._places))):
            raise ValueError(
                "the documents of this input are not those of the state: some of the rows that it held are missing"
            )
        order = torch.tensor(self._found).argsort()
        sites = self._pieces[0].states
        states = {site: torch.cat([piece.states[site] for piece in self._pieces]) for site in sites}
        states = {site: values[order.to(values.device)] for site, values in states.items()}
        mixer.add(MixedRows(torch.cat([piece.index for piece in self._pieces])[order], states))
        self._places, self._pieces = {}, []


def _passes_of(feed: DocumentFeed, documents: Iterator[tuple[int, Any]]) -> Iterator[tuple[Pass, MixedRows]]:
    """Passes over documents, and their rows; none of a skipped document."""
    for made, found, _ in feed.results(documents):
        if not found:
            yield made, MixedRows(torch.zeros((0, 3), dtype=torch.int64), {})
            continue
        positions = next(iter(found.positions.values()))
        documents_of_rows = torch.full_like(positions, made.document.number)
        index = torch.stack([documents_of_rows, positions + made.start, next(iter(found.token_ids.values()))], 1)
        rows = MixedRows(index, {site: found.as_arrived(site) for site in found})
        del found
        yield made, rows
        del rows


def _joined(digest: bytes, key: bytes) -> bytes:
    """Hash of documents, from the hash of all but the last one."""
    return hashlib.sha256(digest + key).digest()
