"""OpenAI's routes for audio: `/v1/audio/transcriptions` and `/v1/audio/translations`, by models that read audio.

Audio that is longer than the model reads at once is cut at quiet places. The parts are prompts of one request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field, StrictInt, ValidationError
from safetensors.numpy import save
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ...client.chat import RenderedPrompt, tokenized
from ...client.inputs.sound import resampled, samples_of
from ...client.inputs.speech import SpeechTokens
from ...core.structured.structured_outputs import StructuredOutputs
from ...core.unsupported import MULTIMODAL
from ...utils.arguments import PromptError
from ..http.body import parse
from ..http.errors import ApiError, api_error
from ..http.state import ServerState
from ..protocol import GenerationRequest
from ..response_format import form_of as structured_form
from ..routes.openai_format import Format
from ..routes.openai_routes import Work, allowed, asked_of, while_connected
from ..routes.prompt_text import check_length

MAX_SECONDS = 3600.0
"""Seconds of the longest audio."""
DETECT = "auto"
"""Value of `language` with which it is detected."""
QUIET, SEARCHED = 0.1, 1.0
"""Seconds of a place to cut at, and of a part's end in which it is searched."""
TEXTS = frozenset({"model", "language", "prompt", "response_format", "user", "cache_salt", "stop"})
"""Fields that are texts as they are. Others are JSON."""
LISTS = frozenset({"include", "timestamp_granularities"})


class AudioRequest(GenerationRequest):
    """Fields of a form for audio, without its file."""

    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"  # pyright: ignore
    language: str | None = Field(None, description="code of the spoken language, such as de; auto: it is detected")
    prompt: str | None = Field(None, description="text that came before")
    max_completion_tokens: StrictInt | None = Field(None, ge=0)
    include: list[str] | None = None
    timestamp_granularities: list[str] | None = None

    def logprobs_wanted(self) -> int | None:
        """Log probabilities are not served."""
        return None

    def form(self) -> StructuredOutputs | None:
        """The form of the text."""
        return structured_form(None, self.structured_outputs)

    def check(self) -> None:
        """Raise ApiError for values that are not served."""
        refused = {
            "stream": (self.stream, "the text comes at once"),
            "response_format": (self.response_format in ("srt", "vtt"), "json, text and verbose_json are served"),
            "timestamp_granularities": (self.timestamp_granularities, "no timestamps are written"),
            "include": (self.include, "json, text and verbose_json have no log probabilities"),
            "n": (self.n not in (None, 1), "a transcription has one text"),
        }
        for name, (given, why) in refused.items():
            if given:
                raise ApiError(400, f"{name} is not served here: {why}", name)


def audio_routes(state: ServerState) -> APIRouter:
    """Router of the audio endpoints."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/audio/transcriptions", openapi_extra=_schema())
    async def transcriptions(request: Request) -> Response:
        """Write the text of an audio file, in its language."""
        return await _answer(state, request, "transcribe")

    @router.post("/v1/audio/translations", openapi_extra=_schema())
    async def translations(request: Request) -> Response:
        """Write the text of an audio file in English."""
        return await _answer(state, request, "translate")

    return router


def _schema() -> dict[str, Any]:
    fields = {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "language": {"type": "string"},
    }
    content = {"multipart/form-data": {"schema": {"type": "object", "properties": fields, "required": ["file"]}}}
    return {"requestBody": {"content": content, "required": True}}


async def _answer(state: ServerState, request: Request, task: str) -> Response:
    info = state.info["audio"]
    if info is None:
        raise ApiError(501, f"{request.url.path[:80]} is not served: {MULTIMODAL}", code="not_implemented")
    if state.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer, which makes texts of tokens")
    content = await request.body(), request.headers.get("content-type", "")
    body, file = await state.threads.run(request.state.client.name, _read, *content)
    most = state.limits.max_audio_bytes
    if len(file) > most:
        raise ApiError(413, f"the file has {len(file)} bytes; at most {most} (max_audio_bytes)", "file")
    client = allowed(body, request)
    tokens, detected = SpeechTokens(**info["tokens"]), None
    try:
        start = tokens.ids(None if body.language == DETECT else body.language, task)
        parts, seconds = await state.threads.run(client.name, _parts, file, info)
        if body.language == DETECT and tokens.languages:
            detected = await _detected(state, request, body, tokens, parts[0])
            start = tokens.ids(detected, task)
        if body.prompt:
            start = await state.threads.run(client.name, _after, state, tokens, body.prompt, start)
    except PromptError as error:
        raise api_error(error, refused=True) from error
    prompts = [RenderedPrompt(None, start, encoder=part) for part in parts]
    asked = asked_of(state, body, len(prompts), None, lambda: prompts)
    format_ = Format(
        "transcription", asked.adapter or state.settings.name, request.state.request_id, state, client, return_token_ids=False,
        logprobs=False, top=0,
    )  # fmt: skip
    state.metrics.totals["hooked_requests"] += body.hooked
    found = await while_connected(request, Work(state, body, request, client, asked, format_).whole())
    text = "".join(choice["text"] for choice in found["choices"]).strip()
    if body.response_format == "text":
        return PlainTextResponse(text + "\n")
    more: dict[str, Any] = {"choices": found["choices"]} if body.hooked else {}
    if body.response_format == "verbose_json":
        spoken = detected or (tokens.language if body.language in (None, DETECT) else body.language)
        more |= {"task": task, "language": spoken, "duration": seconds}
    return JSONResponse({"text": text, "usage": {"type": "duration", "seconds": ceil(seconds)}, **more})


async def _detected(state: ServerState, request: Request, body: AudioRequest, tokens: SpeechTokens, part: bytes) -> str:
    """Code of a part's language: the likeliest first token among the languages' tokens, as in transformers."""
    own = {name: getattr(body, name) for name in ("model", "timeout", "cache_salt", "priority")}
    words = [*tokens.languages.values()]
    asked = AudioRequest.model_validate({**own, "temperature": 0, "max_tokens": 1, "allowed_token_ids": words})
    client, prompt = allowed(asked, request), RenderedPrompt(None, [tokens.start], encoder=part)
    work = asked_of(state, asked, 1, None, lambda: [prompt])
    format_ = Format(
        "detection", state.settings.name, request.state.request_id, state, client, return_token_ids=True, logprobs=False, top=0
    )  # fmt: skip
    found = await while_connected(request, Work(state, asked, request, client, work, format_).whole())
    (choice,) = found["choices"]
    if not choice["token_ids"]:
        late = choice["finish_reason"] == "timeout"
        raise ApiError(408 if late else 503, f"the language was not detected: {choice['finish_reason']}")
    return next(code for code, own in tokens.languages.items() if own == choice["token_ids"][0])


def _read(content: bytes, kind: str) -> tuple[AudioRequest, bytes]:
    """The fields of a form, and its file."""
    form = form_of(content, kind)
    body, file = _request_of(form), form.files.get("file")
    body.check()
    if file is None or len(form.files) > 1:
        raise ApiError(400, "the form has no file, or several; one field `file` is expected", "file")
    return body, file


def _request_of(form: Form) -> AudioRequest:
    """The fields of a form, checked."""
    given: dict[str, Any] = {}
    for name, texts in form.fields.items():
        if len(texts) > 1 and name not in LISTS:
            raise ApiError(400, f"the form has the field {name[:40]!r} {len(texts)} times", name[:40])
        given[name] = texts if name in LISTS else texts[0] if name in TEXTS else _value(texts[0])
    given.setdefault("temperature", 0.0)
    try:
        body = AudioRequest.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    return body


def _value(text: str) -> Any:
    try:
        return parse(text.encode())
    except ValueError:
        return text


def _after(state: ServerState, tokens: SpeechTokens, text: str, start: list[int]) -> list[int]:
    """First tokens of a decoder behind the end of a text, as OpenAI's Whisper has them."""
    if tokens.previous is None:
        raise PromptError("prompt: the model's generation config has no prev_sot_token_id, which comes before it")
    room = state.info["limits"]["max_model_len"] // 2 - 1
    check_length(state.tokenizer, len(text), 8 * room, "prompt")
    ids = tokenized(state.tokenizer, " " + text.strip(), "prompt", add_special_tokens=False).token_ids
    return [tokens.previous, *ids[-room:], *start]


def _parts(file: bytes, info: Mapping[str, Any]) -> tuple[list[bytes], float]:
    """(a safetensors file for each part of the audio, seconds of all)."""
    rate = info["rate"]
    samples, given = samples_of(file, "the file", MAX_SECONDS)
    samples = resampled(samples, given, rate, "the file")
    if not np.isfinite(samples).all():
        raise PromptError("the file has samples that are no numbers")
    most = round(info["seconds"] * rate)
    cut = [
        samples[start:stop]
        for start, stop in cuts(samples, most, round(min(SEARCHED * rate, most / 4)), round(QUIET * rate))
    ]
    return [save({"audio": np.ascontiguousarray(part)}) for part in cut], len(samples) / rate


def cuts(samples: np.ndarray, most: int, searched: int, quiet: int) -> list[tuple[int, int]]:
    """(start, stop) of parts of at most `most` samples. Each ends in the quietest place of its last `searched` samples.

    Args:
        quiet: samples of a place.
    """
    found, start, quiet = list[tuple[int, int]](), 0, max(1, min(quiet, searched // 4))
    while len(samples) - start > most:
        last = samples[start + most - searched : start + most]
        places = last[: searched // quiet * quiet].reshape(-1, quiet)
        stop = start + most - searched + int((places**2).sum(1).argmin()) * quiet + quiet // 2
        found.append((start, stop))
        start = stop
    return [*found, (start, len(samples))]


MAX_FIELDS = 64
"""Most parts of a form."""
MAX_HEADERS = 4096
"""Most bytes of a part's headers."""
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'^content-disposition:[^\r\n]*?[;\s]name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE)
_FILE = re.compile(rb"^content-disposition:[^\r\n]*?[;\s]filename\*?=", re.IGNORECASE | re.MULTILINE)


class Form(NamedTuple):
    """The parts of a form.

    Attributes:
        fields: name -> texts, in order.
        files: name -> the file's bytes.
    """

    fields: dict[str, list[str]]
    files: dict[str, bytes]


def form_of(body: bytes, content_type: str) -> Form:
    """The form in a body. Raises ApiError for another body, or too many parts."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ApiError(400, "the body's content type is no multipart/form-data with a boundary")
    mark = b"\r\n--" + (found[1] or found[2]).encode()
    body = b"\r\n" + body
    parts, form = body.count(mark), Form({}, {})
    if not 2 <= parts <= MAX_FIELDS + 1:
        raise ApiError(400, f"the form has {max(parts - 1, 0)} parts; 1 to {MAX_FIELDS} are expected, and an end")
    _, *inner, last = body.split(mark)
    if not last.startswith(b"--"):
        raise ApiError(400, "the form has no end: the last boundary with -- behind it")
    for part in inner:
        headers, gap, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(headers) if len(headers) <= MAX_HEADERS else None
        if not gap or name is None or not part.startswith(b"\r\n"):
            raise ApiError(400, "a part of the form has no header Content-Disposition with a name")
        try:
            key = name[1].decode()
            if _FILE.search(headers):
                if key in form.files:
                    raise ApiError(400, f"the form has several files {key[:40]!r}; one is expected")
                form.files[key] = content
            else:
                form.fields.setdefault(key.removesuffix("[]"), []).append(content.decode())
        except UnicodeDecodeError:
            raise ApiError(400, "a field of the form is no text in UTF-8") from None
    return form
