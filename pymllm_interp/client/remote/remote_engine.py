"""`RemoteEngine`: the connection to a server, as handles and calls see an engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from ...core.events import DraftCounts, EngineClosedError, Event, FinishedEvent, Logprob, RowsEvent, TokenEvent
from ...engine.callbacks import Callbacks
from ...hooks.captures.activations import Activations
from ...hooks.captures.streamed import SentRows
from ...hooks.monitors.scores import MonitorScores, scores_from_json
from ...utils.arguments import PromptError
from ...wire.failures import Failure
from ...wire.frames import FRAME_PREFIX, frame_sizes
from ...wire.values import receipt_of
from .remote_errors import exception_of

ANSWER_SECONDS = 60.0
"""Timeout of calls with one short answer."""


class ServerError(RuntimeError):
    """The server refused a request, or failed.

    Attributes:
        status: HTTP status code.
    """

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


def error_of(status: int, message: str) -> BaseException:
    """The exception for an unsuccessful answer."""
    if status in (401, 403):
        return PermissionError(message)
    if status == 400:
        return PromptError(message)
    return EngineClosedError(message) if status == 503 else ServerError(message, status)


class Frames:
    """The frames of a response: a JSON header and a body each. Closing it ends its work on the server.

    Attributes:
        call: the server's number of the call; None before its first frame.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._parts, self._buffer = response.iter_raw(), bytearray()
        self.call: int | None = None

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                self._buffer += next(self._parts)
            except StopIteration:
                raise ConnectionError("the server ended its answer in the midst of it") from None
            except httpx.TransportError as error:
                raise ConnectionError(f"the connection to the server broke: {error!r}") from error
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    def __iter__(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        while True:
            header_size, size = frame_sizes(self._read(FRAME_PREFIX))
            header = json.loads(self._read(header_size))
            body = self._read(size)
            if header["type"] == "failed":
                failure = Failure(**header["failure"])
                if failure.type == "ApiError":
                    raise error_of(header["status"], failure.message)
                raise exception_of(failure)
            if header["type"] == "call":
                self.call = header["call"]
                continue
            yield header, body
            if header["type"] == "done":
                return

    def close(self) -> None:
        """Close the response."""
        self._response.close()


class RemoteEngine:
    """A server's engine.

    Args:
        url: base URL of the server.
        api_key: or None.
        timeout: seconds to wait for the next part of an answer; None: as long as it takes.
    """

    forked: EngineClosedError | None = None
    on_engine_thread = False

    def __init__(self, url: str, api_key: str | None, timeout: float | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(timeout, connect=10),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )  # fmt: skip
        self._closed = False
        self._callbacks = Callbacks()
        self._calls: dict[str, tuple[Frames, int]] = {}

    def __repr__(self) -> str:
        return f"RemoteEngine({self.url}, {self.state})"

    @property
    def state(self) -> str:
        """Description of the engine's state: "idle", the number of live requests, or "shut down"."""
        if self._closed:
            return "shut down"
        live = len(self._calls)
        return f"{live} live request{'' if live == 1 else 's'}" if live else "idle"

    def call_back(self, function: Callable[[], None]) -> None:
        """Run a caller's function on a thread for callbacks."""
        self._callbacks.put(self, function)

    # -- answers ---------------------------------------------------------------------------

    def ask(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """The answer of a short call.

        Raises:
            ConnectionError: no server answers.
            PermissionError, PromptError, ServerError: the server refuses the request.
        """
        self.check_open()
        try:
            response = self._http.request(method, path, **{"timeout": ANSWER_SECONDS, **kwargs})
        except httpx.TransportError as error:
            raise ConnectionError(f"no answer from {self.url}: {error!r}") from None
        self._check(response)
        return response

    def frames(self, path: str, **kwargs: Any) -> Frames:
        """Post a request that is answered by frames.

        Raises:
            As `ask`.
        """
        self.check_open()
        try:
            response = self._http.send(self._http.build_request("POST", path, **kwargs), stream=True)
        except httpx.TransportError as error:
            raise ConnectionError(f"no answer from {self.url}: {error!r}") from None
        if response.status_code != 200:
            response.read()
        self._check(response)
        return Frames(response)

    def _check(self, response: httpx.Response) -> None:
        if response.status_code < 400:
            return
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{self.url} answered {response.status_code}: {response.text[:200]}"
        raise error_of(response.status_code, message)

    # -- requests ----------------------------------------------------------------------------

    def start(self, body: dict[str, Any]) -> tuple[Frames, dict[str, Any]]:
        """Submit requests: their frames, and the accepted requests.
        Raises PromptError, ValueError, TypeError: the server refuses them."""
        frames = self.frames("/v1/interp/generate", json=body)
        try:
            header, _ = next(iter(frames))
        except BaseException:
            frames.close()
            raise
        return frames, header

    def follow(self, frames: Frames, subscribers: Sequence[tuple[str, Any]]) -> None:
        """Pass a call's events to its subscribers, on its own thread.

        Args:
            subscribers: (request id, subscriber) of each request, in order.
        """
        for number, (request_id, _) in enumerate(subscribers):
            self._calls[request_id] = frames, number
        threading.Thread(
            target=self._follow, args=(frames, subscribers), name="pymllm-interp-remote", daemon=True
        ).start()

    def _follow(self, frames: Frames, subscribers: Sequence[tuple[str, Any]]) -> None:
        left = dict(enumerate(subscribers))
        error: BaseException = ConnectionError("the server ended its answer before the requests had ended")
        try:
            for header, body in frames:
                number = header["request"]
                request_id, subscriber = subscribers[number]
                event = event_of(header, body, request_id)
                if isinstance(event, FinishedEvent):
                    self._calls.pop(request_id, None)
                    del left[number]
                subscriber.put(event)
                if not left:
                    return
        except Exception as raised:
            error = raised
        finally:
            frames.close()
            for request_id, subscriber in left.values():
                self._calls.pop(request_id, None)
                subscriber.put(FinishedEvent(request_id, [], "error", error=error))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with finish_reason "abort". Finished and unknown ones are left as they are."""
        by_call: dict[int, list[int]] = {}
        for request_id in request_ids:
            frames, number = self._calls.get(request_id, (None, 0))
            if frames is not None and frames.call is not None:
                by_call.setdefault(frames.call, []).append(number)
        for call, numbers in by_call.items():
            self.abort_call(call, numbers)

    def abort_call(self, call: int, requests: list[int] | None = None) -> None:
        """End a call, or some of its requests."""
        try:
            self.ask("POST", "/v1/interp/abort", json={"call": call, "requests": requests})
        except (ConnectionError, EngineClosedError):
            pass  # the call has ended on the server

    def check_open(self) -> None:
        """Raise EngineClosedError after `shutdown`."""
        if self._closed:
            raise EngineClosedError("the connection was shut down: it takes no more requests")

    def stats(self) -> dict[str, Any]:
        """Counters of the server's engine."""
        return self.ask("GET", "/v1/interp/stats").json()

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Forget the KV that the server's prefix cache keeps, of all clients. Servers do it for operators (`serve --operator`)."""
        self.ask("POST", "/v1/interp/reset_prefix_cache", params={"reset_connector": reset_connector})

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the connections. Running calls end; the server continues."""
        if not self._closed:
            for call in {frames.call for frames, _ in list(self._calls.values()) if frames.call is not None}:
                self.abort_call(call)
            self._closed = True
            self._http.close()


def event_of(header: dict[str, Any], body: bytes, request_id: str) -> Event:
    """The event of a frame."""
    if header["type"] == "rows":
        return RowsEvent(request_id, SentRows(body))
    if header["type"] == "token":
        return TokenEvent(
            request_id, header["token_id"], _logprobs(header.get("logprobs")), scores_from_json(header.get("scores"))
        )
    monitors = header.get("monitors")
    failure, receipt = header.get("failure"), header.get("receipt")
    logprobs, prompt = header.get("logprobs"), header.get("prompt_logprobs")
    return FinishedEvent(
        request_id,
        header["token_ids"],
        header["finish_reason"],
        header.get("stop_reason"),
        header.get("text_length"),
        header.get("num_hidden_tokens", 0),
        logprobs=None if logprobs is None else [_logprobs(entry) or {} for entry in logprobs],
        prompt_logprobs=None if prompt is None else [_logprobs(entry) for entry in prompt],
        activations=Activations.from_bytes(body) if body else None,
        receipt=None if receipt is None else receipt_of(receipt),
        num_cached_tokens=header.get("num_cached_tokens", 0),
        error=None if failure is None else exception_of(Failure(**failure)),
        warnings=header.get("warnings", []),
        drafts=None if header.get("drafts") is None else DraftCounts(*header["drafts"]),
        monitors=monitors and {name: MonitorScores.from_json(found) for name, found in monitors.items()},
    )


def _logprobs(found: dict[str, Any] | None) -> dict[int, Logprob] | None:
    return None if found is None else {int(token): Logprob(value, rank) for token, (value, rank) in found.items()}
