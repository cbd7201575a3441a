"""Native routes: capabilities, vectors, captured states, and the routes that `LM.connect` uses."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import re
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response, StreamingResponse

from ... import __version__
from ...utils.arguments import shown
from ...wire import messages as m
from ...wire.failures import failure_of
from ...wire.frames import frame_start, framed
from ...wire.gate_words import TRACE_PATH
from ...wire.images import format_of
from ..engines.call import Call
from ..http.body import JsonRoute
from ..http.errors import ApiError, api_error
from ..http.metrics import CallMetrics
from ..http.state import ServerState, check_priority, client_of, require, require_operator
from ..http.trust import Client, Trust
from ..protocol import AbortRequest, EmptyRequest, ImagesField, LensRequest, TokenRequest
from .lens import logit_lens
from .openai_routes import while_connected
from .operator_routes import taken

FRAMES = "application/x-pymllm-frames"
"""Content type of streams of frames (`values.framed`)."""
PART = 1 << 20
"""Bytes that are sent at a time."""
MAX_HEADER = 4096
"""Bytes of the header of an encoder's input, which has one tensor."""
_NAME = re.compile(r"\w[\w ./-]{0,127}")


def interp_routes(state: ServerState) -> APIRouter:
    """Router of the interpretability endpoints."""
    router = APIRouter(tags=["Interpretability"], route_class=JsonRoute)

    @router.get("/v1/interp/capabilities")
    async def capabilities(request: Request) -> dict[str, Any]:
        """The model, its sites, ops, limits, execution of hooks, and the permissions of this key."""
        client = client_of(request)
        info = dict(state.info)
        info["adapters"] = state.engine.adapters
        info["limits"] = info["limits"] | asdict(state.limits)
        return info | {
            "name": state.settings.name,
            "version": __version__,
            "client": client.name,
            "trust": client.trust.name.lower(),
            "operator": client.operator,
        }

    @router.get("/v1/interp/tokenizer")
    async def tokenizer() -> Response:
        """The tokenizer's files, as a tar archive."""
        if state.tokenizer is None:
            raise ApiError(404, "this model has no tokenizer: prompts are token ids")
        return Response(
            await asyncio.to_thread(_archive, state.engine.tokenizer_folder), media_type="application/x-tar"
        )

    @router.get("/v1/interp/stats")
    async def stats(request: Request) -> dict[str, Any]:
        """The engine's counters, as `lm.engine.stats()`."""
        return await state.stats() or {}

    @router.post("/v1/interp/reset_prefix_cache")
    async def reset_prefix_cache(
        request: Request, body: EmptyRequest | None = None, reset_connector: bool = False
    ) -> dict[str, Any]:
        """Forget the KV that the prefix cache keeps, of all clients: for operators."""
        require_operator(request)
        await state.engine.ask_all(lambda number: m.ResetPrefixCache(number, reset_connector))
        return {}

    @router.post("/v1/interp/lens")
    async def lens(body: LensRequest, request: Request) -> Response:
        """The logit lens of a prompt: the next token that each layer predicts, at each position."""
        client = require(request, Trust.DECLARED)
        found = await while_connected(request, logit_lens(state, body, client))
        return Response(found, media_type="application/json")

    _vector_routes(router, state)
    _activation_routes(router, state)
    _stream_routes(router, state)
    return router


@lru_cache(1)
def _archive(folder: Path) -> bytes:
    """The files of a folder as a tar archive, which clients share."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    return file.getvalue()


# -- vectors ---------------------------------------------------------------------------------


def _vector_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/interp/vectors")
    async def names(request: Request) -> dict[str, Any]:
        """Names and sizes of this key's vectors."""
        found = state.engine.vectors(require(request, Trust.DECLARED).name)
        return {
            "vectors": [{"name": name, "bytes": len(v.body), "format": v.format} for name, v in sorted(found.items())]
        }

    @router.put("/v1/interp/vectors/{name:path}")
    async def put(name: str, request: Request) -> dict[str, Any]:
        """Store a vector under a name, for this key's requests: the body is a safetensors or a GGUF file."""
        client = require(request, Trust.DECLARED)
        if not _NAME.fullmatch(name):
            raise ApiError(
                400,
                f"{name[:80]!r} is not a name for a vector: expected letters, digits, spaces, and ._/- inside",
                "name",
            )
        with state.uploads.reserved(client.name, name) as upload:
            body = await state.uploads.body(upload, request)
            kind = "gguf" if body[:4] == b"GGUF" else "safetensors"
            return await taken(state, state.engine.put_vector(client.name, name, body, kind))

    @router.get("/v1/interp/vectors/{name:path}")
    async def get(name: str, request: Request) -> Response:
        """A vector's file, as it was uploaded."""
        found = state.engine.vectors(require(request, Trust.DECLARED).name).get(name)
        if found is None:
            raise ApiError(404, f"this key has no vector {name!r}; PUT stores one")
        return Response(found.body, media_type="application/octet-stream", headers={"X-Format": found.format})

    @router.delete("/v1/interp/vectors/{name:path}")
    async def delete(name: str, request: Request) -> dict[str, Any]:
        """Forget a vector. Requests that use it continue."""
        client = require(request, Trust.DECLARED)
        if name not in state.engine.vectors(client.name):
            raise ApiError(404, f"this key has no vector {name!r}")
        await taken(state, state.engine.drop_vector(client.name, name))
        return {"deleted": name}


# -- captured states ---------------------------------------------------------------------------


def _activation_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/interp/activations/{name}")
    async def get(name: str, request: Request) -> Response:
        """Captured states that were too large for a response: a safetensors file with positions and token ids of its rows."""
        stored = state.store.find(name, client_of(request).name)
        if not stored.path.is_file():
            raise ApiError(404, f"the activations of {name!r} are gone from the store")
        return FileResponse(stored.path, media_type="application/octet-stream", filename=f"{name}.safetensors")

    @router.delete("/v1/interp/activations/{name}")
    async def delete(name: str, request: Request) -> dict[str, Any]:
        """Delete them before their time."""
        state.store.find(name, client_of(request).name)
        state.store.drop(name)
        return {"deleted": name}


# -- streams of frames ---------------------------------------------------------------------------


def _stream_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/interp/generate")
    async def generate(body: TokenRequest, request: Request) -> Response:
        """Generate from token ids. The answer is a stream of frames, with token ids; `LM.connect` makes outputs of them."""
        client = require(request, Trust.CODE if body.edits else _trust_of(body))
        check_priority(client, body.priority or ())
        if len(body.prompts) > state.limits.max_prompts:
            raise ApiError(
                400, f"{len(body.prompts)} prompts; at most {state.limits.max_prompts} (max_prompts)", "prompts"
            )
        given = body.params * len(body.prompts) if len(body.params) == 1 else body.params
        counts = list(map(_completions, given))
        count = sum(counts)
        if count > state.limits.max_prompts:
            raise ApiError(400, f"{count} completions were asked for; at most {state.limits.max_prompts} (max_prompts)")
        try:
            edits = await asyncio.to_thread(base64.b64decode, body.edits, validate=True) if body.edits else b""
            embeds = await asyncio.to_thread(_decoded, body.embeds) if body.embeds else []
            encoders = await asyncio.to_thread(_decoded, body.encoders) if body.encoders else []
            images = await asyncio.to_thread(_images_of, body.images) if body.images else []
        except binascii.Error as error:
            raise ApiError(400, f"edits, embeds, images or encoders: not base64 ({error})", "edits") from None
        if any(format_of(one) is None for given in images if given is not None for one in given.bodies):
            require(request, Trust.DECLARED)  # outputs of a processor, which are any numbers
        if not all(one is None or _is_plain_encoder_input(one) for one in encoders):
            require(request, Trust.DECLARED)
        options: dict[str, Any] = {"timeout": body.timeout, "cache_salt": body.cache_salt}
        if body.priority is not None:
            options["priority"] = body.priority
        if body.lora is not None:
            options["lora"] = body.lora

        def make(number: int) -> m.Submit:
            return m.Submit(
                number, client.name, body.prompts, body.params, interventions=body.interventions,
                monitors=body.monitors, captures=body.captures, options=options, names=body.names, stream=body.stream,
                prompt_logits=body.prompt_logits, receipts=body.receipts, embeds=embeds, images=images, encoders=encoders,
                edits=edits,
            )  # fmt: skip

        state.metrics.totals["hooked_requests"] += _trust_of(body) > Trust.PLAIN
        measure = partial(state.call_metrics, request.state.started, list(map(len, body.prompts)), counts, body.lora)
        return streamed(_generated(state, client, make, measure, count))

    @router.post("/v1/interp/abort")
    async def abort(body: AbortRequest, request: Request) -> dict[str, Any]:
        """End a call of this key, or some of its requests. One that has ended is left as it is."""
        if state.callers.get(body.call) == client_of(request).name:
            state.engine.abort(body.call, body.requests)
        return {}

    @router.post(TRACE_PATH)
    async def trace(request: Request) -> Response:
        """Run a trace: arbitrary code, for keys that may send it. The answer is a stream of frames."""
        client = require(request, Trust.CODE)
        payload = await request.body()
        state.metrics.totals["traces"] += 1
        seconds = state.limits.trace_timeout
        return streamed(
            relayed(state, client, "traces", lambda number: m.RunTrace(number, client.name, payload, seconds))
        )


def _completions(params: dict[str, Any] | None) -> int:
    """Number of completions of each prompt."""
    n = (params or {}).get("n", 1)
    if type(n) is not int or n < 1:
        raise ApiError(400, f"n={shown(n)}: expected a whole number from 1 on", "params")
    return n


def _decoded(given: list[str | None]) -> list[bytes | None]:
    return [None if text is None else base64.b64decode(text, validate=True) for text in given]


def _images_of(given: list[ImagesField | None]) -> list[m.PromptImages | None]:
    return [
        None
        if one is None
        else m.PromptImages([base64.b64decode(body, validate=True) for body in one.bodies], one.text, one.special)
        for one in given
    ]


def _is_plain_encoder_input(body: bytes) -> bool:
    """Whether a safetensors file has token ids or samples of audio, and no features that a client has computed."""
    try:
        names = json.loads(body[8 : 8 + min(int.from_bytes(body[:8], "little"), MAX_HEADER)])
        return {*names} - {"__metadata__"} in ({"input_ids"}, {"audio"})
    except (ValueError, TypeError, RecursionError):
        return False


def _trust_of(body: TokenRequest) -> Trust:
    declared = any(map(any, (body.interventions, body.monitors, body.captures, body.embeds or ())))
    return Trust.DECLARED if declared or body.prompt_logits else Trust.PLAIN


def streamed(parts: AsyncIterator[bytes]) -> Response:
    """The response with a stream of frames."""
    return StreamingResponse(parts, media_type=FRAMES, headers={"Cache-Control": "no-cache"})


async def _generated(
    state: ServerState, client: Client, make: Any, measure: Callable[[], CallMetrics], count: int
) -> AsyncIterator[bytes]:
    call, left, metrics = None, count, None
    try:
        with state.admitted(client, count):
            call = state.engine.open(make)
            yield _opened(state, client, call)
            while left:
                message = await call.next()
                if isinstance(message, m.Accepted):
                    metrics = measure()
                elif isinstance(message, m.Token) and metrics is not None:
                    metrics.tokens(message.request, 1)
                if isinstance(message, m.Rows):
                    states, message.states.data = message.states.data or b"", None
                    state.metrics.totals["captured_bytes"] += len(states)
                    yield _frame(message, states)
                    state.engine.was_read(call, len(states))
                elif isinstance(message, m.Finished) and metrics is not None:
                    left -= 1
                    metrics.ended(message.request, message)
                    async for part in _finished(state, message):
                        yield part
                else:
                    yield _frame(message)
    except Exception as error:
        yield _failed(error, refused=left == count)
    finally:
        if metrics is not None:
            metrics.close()
        close_call(state, call, left > 0)


async def relayed(
    state: ServerState, client: Client, what: str, make: Callable[[int], m.ToEngine]
) -> AsyncIterator[bytes]:
    """The frames of a call, as they travel over HTTP.

    Args:
        what: kind of work that counts, see `ServerState.admitted`.
    """
    call, over = None, False
    try:
        with state.admitted(client, 1, what):
            call = state.engine.open(make)
            yield _opened(state, client, call)
            while not over:
                message = await call.next()
                over = isinstance(message, m.Answer)
                if not isinstance(message, m.Frame):
                    yield framed(b'{"type":"done"}', b"")
                    continue
                yield frame_start(message.header, len(message.body))
                for start in range(0, len(message.body), PART):  # so that a slow client delays the following frames
                    yield message.body[start : start + PART]
                state.engine.was_read(call, len(message.body))
    except Exception as error:
        over = not (call is not None and call.overrun)
        yield _failed(error, refused=False)
    finally:
        close_call(state, call, not over)


def _opened(state: ServerState, client: Client, call: Call) -> bytes:
    """The first frame of a stream: the call's number, for `/v1/interp/abort`."""
    state.callers[call.number] = client.name
    return framed(json.dumps({"type": "call", "call": call.number}).encode(), b"")


def close_call(state: ServerState, call: Call | None, abort: bool) -> None:
    """Close a stream's call."""
    if call is not None:
        state.callers.pop(call.number, None)
        state.metrics.totals["disconnects"] += abort
        state.engine.close(call, abort)


def _frame(message: Any, body: bytes = b"") -> bytes:
    return framed(_header(message), body)


def _header(message: Any) -> bytes:
    found = msgspec.to_builtins(message, str_keys=True) | {"type": type(message).__name__.lower()}
    return msgspec.json.encode(found)


async def _finished(state: ServerState, message: m.Finished) -> AsyncIterator[bytes]:
    """The frame of a request's end: its body are the captured states, from the message or from their file."""
    captured, message.captured = message.captured, None
    if captured is None or captured.data is not None:
        yield _frame(message, b"" if captured is None or captured.data is None else captured.data)
        return
    state.metrics.totals["captured_bytes"] += captured.size
    path = state.engine.store / str(captured.file)
    try:
        with path.open("rb") as file:
            yield frame_start(_header(message), captured.size)
            while part := await asyncio.to_thread(file.read, PART):
                yield part
    finally:
        path.unlink(missing_ok=True)


def _failed(error: Exception, refused: bool) -> bytes:
    """The last frame of a stream that failed."""
    status = api_error(error, refused).status
    return framed(
        json.dumps({"type": "failed", "status": status, "failure": msgspec.to_builtins(failure_of(error))}).encode(),
        b"",
    )
