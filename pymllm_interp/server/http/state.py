"""`ServerState`: state shared by the routes of the HTTP process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ...client.pooling.pooler import Pooler
from ...wire.messages import AskStats
from ..engines.call import EngineDiedError
from ..engines.door import Door
from ..responses.store import ResponseStore
from ..routes.prompt_text import import_library, load_tokenizer
from ..settings import ServeSettings
from ..store import ActivationStore
from .body import Uploads
from .errors import ApiError
from .media import Media
from .metrics import CallMetrics, Metrics, merged_stats
from .threads import FairThreads
from .trust import STRANGERS, Client, Trust

if TYPE_CHECKING:
    from .spans import Spans

MakeEngine = Callable[[ServeSettings, Callable[[], Any]], Door]
MEDIA_THREADS = 16
"""Threads that wait for images of requests."""
RATE_SECONDS = 5.0
"""Span that the tokens per second are measured over."""


class ServerState:
    """Shared state of the HTTP process: engine, tokenizer, stores and counters.

    Args:
        engine: makes the engine, from the settings and a function that is called when it ended unasked.

    Attributes:
        callers: number of a call that clients may abort -> name of its client.
        tokenizer: the model's, or None.
        pooler: the model's defaults of embeddings.
        threads: threads for work on texts, shared fairly by client name.
        media_threads: threads that wait for images, which are fetched.
        media: reads the images of requests.
        draining: whether the server is ending, and refuses new requests.
    """

    def __init__(self, settings: ServeSettings, engine: MakeEngine) -> None:
        self.settings, self.limits = settings, settings.limits
        self.metrics = Metrics(settings.name)
        self.spans = _spans_to(settings.otlp_traces_endpoint)
        self.engine = engine(settings, self._engine_exited)
        shared = settings.shared_store
        self.store = ActivationStore(self.engine.store, settings.limits, shared=shared)
        self.responses = ResponseStore(settings.limits, folder=self.engine.store if shared else None)
        self.uploads = Uploads(settings.limits, self.engine.vectors)
        self.tokenizer: Any = None
        self.pooler = Pooler()
        self.threads, self.media_threads = FairThreads(), FairThreads(MEDIA_THREADS, MEDIA_THREADS // 4)
        self.media = Media(
            settings.allowed_media_domains, settings.allowed_local_media_path, settings.limits.max_image_bytes,
            settings.limits.image_fetch_seconds,
        )  # fmt: skip
        self.draining = False
        self.exiting = asyncio.Event()
        self.started = time.time()
        self.callers: dict[int, str] = {}
        self._running: Counter[tuple[str, str]] = Counter()
        self._tokens: deque[tuple[float, int]] = deque()

    async def start(self) -> None:
        """Start the engine, and load its tokenizer."""
        self.store.open()
        importing = asyncio.create_task(asyncio.to_thread(import_library))  # seconds, beside the engine's start
        await self.engine.start()
        await importing
        folder = self.engine.tokenizer_folder
        if folder.exists():
            self.tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        self.pooler = await asyncio.to_thread(Pooler.of_json, self.info["pooler"], folder)

    def _engine_exited(self) -> None:
        if self.settings.on_engine_exit == "exit":
            self.exiting.set()

    @property
    def info(self) -> dict[str, Any]:
        """The engine's description of itself (`Backend.describe`). Raises EngineDiedError: the engine is not ready."""
        if self.engine.info is None:
            raise EngineDiedError("the engine is starting; try again in some seconds")
        return self.engine.info

    @property
    def max_prompt_len(self) -> int:
        """Most tokens of a prompt, which an encoder reads if the model has one."""
        limits = self.info["limits"]
        return limits["max_source_len"] or limits["max_model_len"]

    async def stats(self) -> dict[str, Any] | None:
        """The engine's counters, of all replicas together; None while it is not ready. `/metrics` has the counts of monitors."""
        found = await self.stats_by_replica()
        for stats in found.values():
            stats.pop("monitors", None)
        return merged_stats(list(found.values())) if found else None

    async def stats_by_replica(self) -> dict[str, dict[str, Any]]:
        """The counters of each replica that is ready, by its name; "" is the name of a single engine process."""
        if not self.engine.ready:
            return {}
        try:
            return await self.engine.ask_all(AskStats, 5)
        except (TimeoutError, EngineDiedError):
            return {}

    # -- limits -------------------------------------------------------------------------

    @contextmanager
    def admitted(self, client: Client, count: int, what: str = "requests") -> Iterator[None]:
        """Count requests, traces or circuits while they run. Raises ApiError: the client has as many as it may."""
        name = "max_concurrent" if what == "requests" else f"max_{what}"
        most = getattr(self.limits, name)
        key = client.name, what
        if self._running[key] + count > most:
            raise ApiError(
                429,
                f"{self._running[key]} {what} of {client.name!r} run, and {count} more were asked for; at most {most} may run at a "
                f"time ({name})",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self._running[key] += count
        try:
            yield
        finally:
            self._running[key] -= count

    @property
    def num_running(self) -> int:
        """Requests and traces of all clients."""
        return sum(self._running.values())

    def generated(self, tokens: int) -> None:
        """Count new tokens for the rate and the total."""
        self.metrics.totals["generation_tokens"] += tokens
        now = time.monotonic()
        self._tokens.append((now, tokens))
        while self._tokens and self._tokens[0][0] < now - RATE_SECONDS:
            self._tokens.popleft()

    def call_metrics(
        self, started: float, prompt_tokens: Sequence[int], n: Sequence[int], lora: Sequence[str | None] | None = None
    ) -> CallMetrics:
        """Count an accepted call, and the ends of its requests.

        Args:
            started: `time.perf_counter()` at which its HTTP request arrived.
            n: completions of each prompt.
            lora: adapter of each prompt, or None; all None without the argument.
        """
        self.metrics.totals["prompt_tokens"] += sum(prompt_tokens)
        lengths = [length for length, count in zip(prompt_tokens, n, strict=True) for _ in range(count)]
        spans = None
        if self.spans is not None:
            names = zip(lora or [None] * len(n), n, strict=True)
            spans = self.spans.call(
                [name or self.settings.name for name, count in names for _ in range(count)], started
            )
        return CallMetrics(self.metrics, started, lengths, self.generated, spans)

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, over the last seconds."""
        since = time.monotonic() - RATE_SECONDS
        return sum(count for at, count in self._tokens if at >= since) / RATE_SECONDS


def _spans_to(endpoint: str | None) -> Spans | None:
    """Exporter of spans; None without an endpoint, which imports nothing of OpenTelemetry."""
    if endpoint is None:
        return None
    from .spans import Spans

    return Spans(endpoint)


def client_of(request: Request) -> Client:
    """The client of a request, as the gate identified it."""
    return request.state.client


def require(request: Request, trust: Trust) -> Client:
    """The client, if it may do this. Raises ApiError: the key lacks the permission."""
    client = client_of(request)
    if client.trust < trust:
        raise denied(client, trust)
    return client


def require_operator(request: Request) -> Client:
    """The client, if it is an operator. Raises ApiError: the client is not an operator."""
    client = client_of(request)
    if not client.operator:
        how = (
            f"start the server with --operator {client.name}"
            if client.name != STRANGERS
            else "send it from the server's machine"
        )
        raise ApiError(
            403, f"this acts on all clients, and {client.name!r} is not an operator: {how}", code="not_allowed"
        )
    return client


def check_priority(client: Client, priorities: Iterable[int]) -> None:
    """Refuse to let a client with the right `plain` go before others.
    Raises ApiError: a priority below 0, which affects all clients."""
    first = min(priorities, default=0)
    if first < 0 and client.trust < Trust.DECLARED:
        raise ApiError(
            403, f"priority={first}: with the right 'plain', {client.name!r} may ask for 0 or more, which goes after others; a key "
            "with the right 'declared' may ask for less", "priority", "not_allowed",
        )  # fmt: skip


def denied(client: Client, trust: Trust) -> ApiError:
    """The answer to a client without the right."""
    asked, has = trust.name.lower(), client.trust.name.lower()
    if client.name == STRANGERS:
        how = "a server without keys gives it to clients on its own machine, at http://127.0.0.1; for others, give it keys (--keys)"
        return ApiError(
            403, f"this needs the right {asked!r}, and {has!r} is what clients have here: {how}", code="not_allowed"
        )
    how = {
        Trust.DECLARED: "the operator's key file grants it (a line 'name key declared')",
        Trust.CODE: f"the operator grants it with --allow-code-from {client.name}",
    }.get(trust, "")
    return ApiError(
        403, f"this needs a key with the right {asked!r}, and {client.name!r} has {has!r}; {how}", code="not_allowed"
    )
