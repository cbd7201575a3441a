"""Events from an engine to its clients: plain values, in order for each request, that another process could receive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Logprob(NamedTuple):
    """A token's log probability; under the raw logits, unless `ServerConfig.logprobs_mode` says otherwise."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str | None = None


class DraftCounts(NamedTuple):
    """Passes of a request with drafts, their drafts, and the accepted ones."""

    steps: int
    drafted: int
    accepted: int


class EngineClosedError(RuntimeError):
    """The engine was shut down."""


class EngineSleepingError(RuntimeError):
    """The engine sleeps: its memory is given back until `LM.wake`."""


class OpError(RuntimeError):
    """An op of some of a step's requests raised.

    Attributes:
        request_ids: these requests.
    """

    request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A request with `stream` has a new token, and has not ended."""

    request_id: str
    token_id: int
    logprobs: dict[int, Logprob] | None = None
    """Log probabilities of this token, if requested."""
    scores: dict[str, Any] | None = None
    """Monitor -> positions and scores since the last event, as `score_pairs` reads them; None without monitors."""


@dataclass(frozen=True, slots=True)
class RowsEvent:
    """Captured rows of a request with `stream` (`Capture(stream=True)`), before its next event."""

    request_id: str
    rows: RowParts


class RowParts(Protocol):
    """Captured rows (`hooks.captures.streamed.StreamedRows`)."""

    def parts(self) -> Iterator[Any]:
        """`hooks.captures.activations.Activations` of bounded size, in order of position."""
        ...

    def named_tokens(self, part: Any) -> Sequence[int]:
        """Token ids that a lens named in one of them, ascending."""
        ...


def score_pairs(scores: dict[str, Any] | None) -> dict[str, list[tuple[int, float]]] | None:
    """Monitor -> (position, score) of each score, from arrays (positions, scores) of an engine, or pairs of a server."""
    if scores is None:
        return None
    return {
        name: found if isinstance(found, list) else list(zip(*(part.tolist() for part in found), strict=True))
        for name, found in scores.items()
    }


class RequestTimes(NamedTuple):
    """Seconds from a request's submission to its admission to a step, its first token and its end.

    `queued` or `first_token` is None if the request ended before.
    """

    queued: float | None
    first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """A request has ended. Its last event."""

    request_id: str
    token_ids: list[int]
    """All generated tokens, with the token that stopped the generation."""
    finish_reason: str
    """stop, length, monitor, abort, timeout or error."""
    stop_reason: int | str | None = None
    """The stop string or token id, where that was the reason; None for the model's main end-of-sequence token."""
    text_length: int | None = None
    """Characters of the text to keep, if a stop string ended it; None: all."""
    num_hidden_tokens: int = 0
    """Tokens at the end that the text leaves out: the one that stopped the generation."""
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    activations: Any = None
    """The captured `hooks.captures.activations.Activations`, or None."""
    receipt: Any = None
    """The `core.receipt.Receipt` of the request, or None."""
    num_cached_tokens: int = 0
    """Prompt tokens with KV in the prefix cache."""
    error: BaseException | None = None
    warnings: list[str] = field(default_factory=list)
    monitors: Any = None
    """Monitor -> its `hooks.monitors.scores.MonitorScores`; None without monitors."""
    drafts: DraftCounts | None = None
    """Counts of drafted and accepted tokens, or None."""
    times: RequestTimes | None = None
    """Timestamps of the request; None in a client of another process."""


Event = RowsEvent | TokenEvent | FinishedEvent


class Subscriber(Protocol):
    """Takes a request's events: a `queue.SimpleQueue`, a handle, a socket's writer."""

    def put(self, event: Event) -> None:
        """Take the next event. Called on the engine's thread, so it must not wait."""
        ...
