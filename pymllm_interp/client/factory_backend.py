"""`FactoryBackend`: a backend that makes its requests here, and hands them to its engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Self

from ..core.events import Subscriber
from ..core.request import Request
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from .backend import Backend, Submission
from .handle import RequestHandle
from .request_factory import RequestFactory


class FactoryBackend(Backend):
    """Base of backends that check their requests in this process.

    Attributes:
        factory: makes requests, with the named vectors of one owner.
    """

    factory: RequestFactory
    _sent: Callable[[list[Request]], None] | None = None

    def view(self, factory: RequestFactory, sent: Callable[[list[Request]], None] | None = None) -> Self:
        """The same engine with another factory.

        Args:
            sent: called with requests before they are submitted.
        """
        found = copy.copy(self)
        found._use(factory, sent)
        return found

    def _use(self, factory: RequestFactory, sent: Callable[[list[Request]], None] | None = None) -> None:
        self.factory, self._sent = factory, sent
        self.vectors, self.saes = factory.vectors, factory.saes

    def fingerprint(self, adapter: str | None = None) -> str:
        self.engine.check_open()
        return self.factory.model_state.fingerprint(adapter)

    @property
    def weights_version(self) -> int:
        return self.factory.model_state.version

    def resolve(
        self, captures: list[Capture], interventions: list[Intervention]
    ) -> tuple[list[Capture], list[Intervention]]:
        return self.factory.named([captures])[0], self.factory.named([interventions])[0]

    # -- requests --------------------------------------------------------------------------

    def submit(self, submission: Submission) -> list[RequestHandle]:
        engine, mode, made = self.engine, self.facts.logprobs_mode, self.prepare(submission)
        handles = [
            RequestHandle(prompt.text, requests, self.tokenizer, engine, submission.stream, mode)
            for prompt, requests in zip(submission.prompts, made, strict=True)
        ]
        self.send([(handle.requests, handle) for handle in handles])
        return handles

    def prepare(self, submission: Submission) -> list[list[Request]]:
        """The requests of each prompt, checked. They hold vectors until `send` has sent them and they have ended.
        Raises PromptError, ValueError, EngineClosedError: as `submit`."""
        self.engine.check_open()
        return self.factory.for_prompts(submission)

    def send(self, groups: Sequence[tuple[Sequence[Request], Subscriber]]) -> None:
        """Queue requests, all at once, with the subscriber to their events."""
        if self._sent is not None:
            self._sent([request for requests, _ in groups for request in requests])
        try:
            self.engine.submit_all(groups)
        except BaseException:
            self.factory.release([request for requests, _ in groups for request in requests])
            raise
