"""`DocumentFeed`: forward passes over documents, for harvests and for `lm.activations`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...client.calls.model import ClientModel
from ...client.chat import RenderedPrompt
from ...client.handle import RequestHandle
from ...core.events import EngineClosedError
from ...hooks.captures.activations import Activations
from ...hooks.captures.egress.device_memory import DeviceMemoryFull
from ...hooks.captures.spec import Capture
from ...hooks.interventions.knockout import Intervention
from ...hooks.monitors.scores import MonitorScores
from ..inputs import Settings, document_key
from .documents import SKIPPED, Document, Pass

STEPS_IN_FLIGHT = 2
"""Passes are submitted up to the capacity of this many steps."""


class PassResult(NamedTuple):
    """Result of a pass over a document, or over a part of it."""

    made: Pass
    found: Activations | None
    """Captured states; None: the document is skipped."""
    scores: Mapping[str, MonitorScores]


class DocumentFeed:
    """Forward passes over documents, at most as many in flight as two steps hold. Whoever takes the results sets the pace.

    Args:
        settings: division of documents into passes.
        captures, interventions: results of `Requests.resolved`.
        fingerprint: fingerprint of the model, with the adapter.
        weights_version: the model's, when its fingerprint was taken.
        skip: leave out documents that fail.
        lora: adapter that each document runs with.
        who, advice: the call, and what to do when the model has changed, for messages.
    """

    def __init__(
        self,
        model: ClientModel,
        settings: Settings,
        captures: Sequence[Capture],
        interventions: Sequence[Intervention],
        fingerprint: str,
        weights_version: int,
        *,
        skip: bool,
        lora: str | None,
        who: str,
        advice: str,
    ) -> None:
        self._model, self._settings, self._captures, self._interventions = model, settings, captures, interventions
        self._fingerprint, self._weights_version, self._skip, self._lora = fingerprint, weights_version, skip, lora
        self._who, self._advice = who, advice
        self._max_tokens = STEPS_IN_FLIGHT * model.limits.max_num_tokens
        self._max_requests = STEPS_IN_FLIGHT * model.limits.max_running
        self._in_flight: deque[tuple[Pass, RequestHandle | None]] = deque()

    def results(self, documents: Iterator[tuple[int, Any]]) -> Iterator[PassResult]:
        """The results of all passes, in the order of the documents.

        Args:
            documents: (number, document).

        Raises:
            Exception: of the input, or ValueError of a document, after the results of all earlier documents.
            RuntimeError: a pass has failed, or the weights were edited.
        """
        passes, failure = self._passes(documents), None
        while failure is None:
            try:
                made = next(passes, None)
            except Exception as error:  # of one document, or of the input's source: earlier documents are kept
                failure = error
                break
            if made is None:
                break
            while self._in_flight and not self._may_submit(made):
                yield self._collect()
            try:
                while not self._submit(made):  # results on the device leave first
                    yield self._collect()
            except ValueError as error:  # of this document: earlier ones are kept
                failure = error
        while self._in_flight:
            yield self._collect()
        if failure is not None:
            raise failure

    def cancel(self) -> list[RequestHandle]:
        """Cancel all passes in flight, and forget them. Returns at once, with their handles."""
        handles = [handle for _, handle in self._in_flight if handle is not None]
        self._in_flight.clear()
        for handle in handles:
            handle.cancel()
        return handles

    def _passes(self, documents: Iterator[tuple[int, Any]]) -> Iterator[Pass]:
        for number, item in documents:
            what, document = f"document {number}", Document(number, SKIPPED)
            try:
                prompt = self._model._requests.read(item, what)
                document.key = document_key(item, lambda prompt=prompt: prompt)
                passes = list(self._settings.passes(prompt, what))
            except ValueError as error:
                if not self._skip:
                    raise
                document.skip(error)
                passes = [(0, RenderedPrompt(None, []))]
            for place, (start, part) in enumerate(passes):
                yield Pass(document, start, place == len(passes) - 1, part)

    def _may_submit(self, made: Pass) -> bool:
        tokens = sum(len(one.prompt.token_ids) for one in (*(one for one, _ in self._in_flight), made))
        return tokens <= self._max_tokens and len(self._in_flight) < self._max_requests

    def _submit(self, made: Pass) -> bool:
        """Submit a pass. False: its states have no room on the device, and earlier ones are in flight."""
        what, handle = f"document {made.document.number}", None
        if made.document.error is None:
            try:
                handle = self._model._requests.prefill(
                    made.prompt, self._captures, self._interventions, what, self._lora
                )
            except DeviceMemoryFull:
                if self._in_flight:
                    return False
                raise
            except ValueError as error:
                if not self._skip:
                    raise
                made.document.skip(error)
        self._in_flight.append((made, handle))
        return True

    def _collect(self) -> PassResult:
        """Wait for the earliest pass."""
        done, handle = self._in_flight[0]
        document = done.document
        if handle is not None:
            handle.wait()
        self._in_flight.popleft()
        if self._model.weights.version != self._weights_version:
            raise RuntimeError(
                f"document {document.number}: the weights of the model were edited while {self._who} ran. Undo the edit and "
                f"{self._advice}"
            )
        if handle is None:
            return PassResult(done, None, {})
        (request,) = handle.requests
        if self._lora is not None and request.receipt.model != self._fingerprint:
            raise RuntimeError(
                f"document {document.number}: the adapter {self._lora!r} was loaded anew, with other weights, while {self._who} "
                f"ran: load the first one again and {self._advice}"
            )
        (end,), found = handle.ends, request.activations
        error = request.error or (None if found is None else found.error)
        if error is not None:
            if not self._skip or isinstance(error, EngineClosedError):
                raise RuntimeError(f"document {document.number}: {error!r}") from error
            document.skip(RuntimeError(f"document {document.number}: {error!r}"))
        if document.error is not None:
            return PassResult(done, None, {})
        return PassResult(done, Activations(0) if found is None else found, end.monitors or {})
