"""`EngineServer`: answers a door's messages with a served model.

Messages are data (messages.py). Code comes in one of them, `RunTrace`. The HTTP process has checked its sender.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...client.backend import Submission
from ...client.calls.requests import Requests, read_each
from ...client.chat import RenderedPrompt
from ...client.images.parts import ImageSources
from ...client.prompt_batch import FEATURES, MEDIA
from ...client.prompts import checked, names_of
from ...core.limits import MAX_CALL_TOKEN_IDS, MAX_NAMED
from ...core.sampling_params import MAX_TOKEN_IDS, SamplingParams
from ...core.structured.structured_outputs import StructuredOutputs
from ...utils.arguments import PromptError
from ...utils.files.checked_files import MAX_JSON_BYTES
from ...wire import messages as m
from ...wire.embeds import NAME, POSITIONS
from ...wire.failures import failure_of
from ...wire.images import check_format
from ...wire.request_sizes import CallSizes
from ...wire.specs import capture_of, intervention_of, monitor_of
from ..engines.vector_orders import VectorOrder, VectorOrders
from ..http.threads import Turns, started_pool
from .operator_monitors import OperatorMonitors, check_names
from .outbox import CallEvents, Outbox
from .served_model import ServedModel
from .trace_runs import TraceRuns

logger = logging.getLogger(__name__)
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+"?', re.DOTALL)
"""A JSON string, or one without an end: a search never starts again in its middle."""
SUBMITTERS, SUBMITTERS_EACH = 6, 4
"""Threads that make and submit requests, and most threads of one client."""


class EngineServer:
    """Takes messages, one at a time, and answers them.

    Args:
        outbox: queue of outgoing answers.
        queued_bytes: results of a trace that may wait for its client, before the trace does.
        tokenizer: folder with the tokenizer's files; None, or no such folder, without a tokenizer.
        monitors: the operator's monitors; None: none.
    """

    def __init__(
        self, model: ServedModel, outbox: Outbox, queued_bytes: int = 1 << 28, tokenizer: Path | None = None,
        monitors: OperatorMonitors | None = None,
    ) -> None:  # fmt: skip
        self._monitors = monitors or OperatorMonitors((), False, model.backend.factory)
        self.model, self.outbox, self._tokenizer = model, outbox, tokenizer
        self._orders_taken = VectorOrders()
        self.traces = TraceRuns(model, outbox, queued_bytes)
        model.backend.factory.grammars.guarded = True  # clients are strangers
        self._lock = threading.Lock()
        self._calls: dict[int, CallEvents] = {}
        self._starting: dict[int, list[m.Abort]] = {}  # calls that are being submitted -> aborts that came meanwhile
        self._submitters = started_pool(SUBMITTERS, "pymllm-interp-submit")
        self._turns = Turns(SUBMITTERS, SUBMITTERS_EACH)
        self._orders = started_pool(1, "pymllm-interp-orders")
        self._stored: dict[str, Future[None]] = {}  # owner -> its newest order of a vector
        self._handlers: dict[type, Callable[[Any], Any]] = {
            m.Submit: self._start,
            m.Abort: self._abort,
            m.PutVector: partial(self._later, self._put_vector),
            m.DropVector: partial(self._later, self._drop_vector),
            m.LoadAdapter: partial(self._later, self._load_adapter),
            m.UnloadAdapter: partial(self._later, self._unload_adapter),
            m.RunTrace: self.traces.run,
            m.RunCircuit: self.traces.run_circuit,
            m.ReadFrames: self._was_read,
            m.AskStats: lambda message: m.Answer(message.call, self.stats()),
            m.AskProgress: lambda message: m.Answer(message.call, self.model.engine.progress()._asdict()),
            m.ResetPrefixCache: partial(self._later, self._reset_prefix_cache),
            m.Control: self._control,
            m.AskTokenizer: partial(self._later, self._read_tokenizer),
        }

    def handle(self, message: m.ToEngine) -> None:
        """Answer a message. An error is the answer. Slow work is left to other threads."""
        self._answer(self._handlers[type(message)], message)

    def _answer(self, handler: Callable[[Any], Any], message: Any) -> None:
        try:
            answer = handler(message)
        except Exception as error:
            answer = m.Failed(message.call, failure_of(error))
        if answer is not None:
            self.outbox.put(answer)

    def _later(self, handler: Callable[[Any], Any], message: Any) -> None:
        """Have a message answered by the thread that reads vectors, in order."""
        done = self._orders.submit(self._answer, handler, message)
        if isinstance(message, m.PutVector | m.DropVector):
            self._stored[message.owner] = done

    def stats(self) -> dict[str, Any]:
        """Counters of the engine."""
        own = {"kv_tokens": self.model.limits.kv_tokens, "traces": self.traces.num_running}
        return own | self.model.engine.stats() | {"monitors": self._monitors.stats()}

    @property
    def orders(self) -> list[VectorOrder]:
        """The newest order of each named vector."""
        return self._orders_taken.all()

    def end_calls(self, of: Callable[[int], bool]) -> None:
        """Abort the calls with such numbers."""
        for call in {*self._calls, *self._starting, *self.traces.calls}:
            if of(call):
                self._abort(m.Abort(call))

    def close(self) -> None:
        """End running calls and traces."""
        self._submitters.shutdown(wait=False, cancel_futures=True)
        self._orders.shutdown(wait=False, cancel_futures=True)
        self.model.backend.factory.grammars.close()
        self.traces.close()

    def _start(self, message: m.Submit) -> None:
        """Have a call submitted by another thread: it may take long, and other messages do not wait for it."""
        self._starting[message.call] = []
        stored = self._stored.get(message.owner)
        if any(given is not None and given.get("structured_outputs") is not None for given in message.params):
            self._in_turn(message.owner, self._compile, message, stored)
        else:
            self._in_turn(message.owner, self._serve, message, stored)

    def _in_turn(self, owner: str, work: Callable[..., None], *given: Any) -> None:
        """Have a submitter work when it is the client's turn: reading its images and audio may take long."""

        def run() -> None:
            try:
                work(*given)
            finally:
                self._turns.give_back(owner)

        def start() -> bool:
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                self._submitters.submit(run)
                return True
            return False

        self._turns.take(owner, start)

    def _compile(self, message: m.Submit, stored: Future[None] | None) -> None:
        """Have the grammars of a call compiled, and the call submitted then. No submitter waits for them."""
        with contextlib.suppress(TypeError, ValueError):  # `_serve` answers with the error
            found = [
                StructuredOutputs.of(given.get("structured_outputs")) for given in message.params if given is not None
            ]
            forms = [form for form in found if form is not None]
            grammars = self.model.backend.factory.grammars
            grammars.when_ready(forms, lambda: self._in_turn(message.owner, self._serve, message, stored))
            return
        self._serve(message, stored)

    def _serve(self, message: m.Submit, stored: Future[None] | None) -> None:
        try:
            if stored is not None:
                stored.result()  # vectors that came before the call
            self._submit(message)
        except BaseException as error:  # persistent edits are code, which may raise anything
            self.outbox.put(m.Failed(message.call, failure_of(error)))
        with self._lock:
            aborts = self._starting.pop(message.call)
        for abort in aborts:
            self._abort(abort)

    def _submit(self, message: m.Submit) -> None:
        self._check_sizes(message, max(self.model.limits.max_model_len, self.model.limits.max_source_len))
        model = self.model.of(message.owner, self.traces.edits_of(message.edits))
        made = model.backend.prepare(_submission_of(message, model))
        requests = [request for own in made for request in own]
        events = CallEvents(self.outbox, message, requests, self._monitors, partial(self._ended, message.call))
        self._calls[message.call] = events
        expanded = bool(message.images or model.limits.max_source_len)
        prompts = [own[0].prompt_token_ids if own[0].images or own[0].encoder else None for own in made if expanded]
        self.outbox.put(
            m.Accepted(
                message.call, [asdict(own[0].params) for own in made], [own[0].max_tokens for own in made], prompts
            )
        )
        try:
            model.backend.send([(own, events) for own in made])
        except BaseException:
            self._calls.pop(message.call, None)
            raise

    def _check_sizes(self, message: m.Submit, max_model_len: int) -> None:
        """Refuse a message beyond its size limits, before it is walked."""
        for i, ids in enumerate(message.prompts):
            if len(ids) > max_model_len:
                what = (message.names or names_of(message.prompts))[i]
                raise PromptError(
                    f"{what} has {len(ids)} tokens, but the context holds {max_model_len} (max_model_len)"
                )
        count = len(message.prompts)
        for given in message.params:
            ids = (given or {}).get("allowed_token_ids")
            times = count if len(message.params) == 1 else 1
            if isinstance(ids, list) and len(ids) * times > MAX_CALL_TOKEN_IDS:
                raise PromptError(
                    f"allowed_token_ids: the call lists {len(ids) * times} token ids, counting each for each prompt; at most "
                    f"{MAX_CALL_TOKEN_IDS}: send fewer prompts at a time"
                )
        fields = {"interventions": message.interventions, "monitors": message.monitors, "capture": message.captures}
        for field, given in fields.items():
            CallSizes(count if len(given) == 1 else 1, max_model_len).check(given, field)

    def _ended(self, call: int) -> None:
        self._calls.pop(call, None)

    def _abort(self, message: m.Abort) -> None:
        with self._lock:
            if (waiting := self._starting.get(message.call)) is not None:
                waiting.append(message)
                return
        if (events := self._calls.get(message.call)) is not None:
            ids = events.request_ids
            self.model.engine.abort(
                ids if message.requests is None else [ids[i] for i in message.requests if 0 <= i < len(ids)]
            )
            if message.requests is None:
                events.leave()
        self.traces.abort(message.call)

    def _was_read(self, message: m.ReadFrames) -> None:
        if (events := self._calls.get(message.call)) is not None:
            events.was_read(message.size)
        self.traces.was_read(message)

    def _put_vector(self, message: m.PutVector) -> m.Answer:
        vectors, what = self.model.factory(message.owner).vectors, f"vector {message.name!r}"
        if self._orders_taken.is_news(message):
            self._read_vector(message, vectors, what)
            self._took(message)
        found = vectors.get(message.name)
        shape = (
            {str(layer): list(v.shape) for layer, v in found.items()} if isinstance(found, dict)
            else [] if found is None else list(found.shape)
        )  # fmt: skip
        return m.Answer(message.call, {"name": message.name, "shape": shape})

    def _read_vector(self, message: m.PutVector, vectors: Any, what: str) -> None:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            try:
                if message.format == "gguf":
                    file.write(message.body)
                    file.flush()
                    vectors[message.name] = file.name
                else:
                    vectors[message.name] = _vectors_of(message.body, what)
            except (ValueError, OSError) as error:
                raise PromptError(str(error).replace(file.name, what)) from error

    def _drop_vector(self, message: m.DropVector) -> m.Answer:
        if self._orders_taken.is_news(message):
            self.model.factory(message.owner).vectors.pop(message.name, None)
            self._took(message)
        return m.Answer(message.call)

    def _load_adapter(self, message: m.LoadAdapter) -> m.Answer:
        self.model.backend.load_adapter(message.name, message.folder)
        return m.Answer(message.call)

    def _unload_adapter(self, message: m.UnloadAdapter) -> m.Answer:
        self.model.backend.unload_adapter(message.name)
        return m.Answer(message.call)

    def _control(self, message: m.Control) -> None:
        """Carry out an order on a separate thread: a pause of mode "wait" waits, and later orders do not."""

        def answer(message: m.Control) -> m.Answer:
            return m.Answer(message.call, self.model.backend.control(message.order, **message.arguments))

        threading.Thread(target=self._answer, args=(answer, message), daemon=True).start()

    def _took(self, order: VectorOrder) -> None:
        """Remember an order, and tell all fronts of a replica of it."""
        if self.outbox.replica:
            self._orders_taken.take(order)
            self.outbox.put(m.Spread(0, order))

    def _read_tokenizer(self, message: m.AskTokenizer) -> m.Answer:
        folder = self._tokenizer
        files = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
        return m.Answer(message.call, {path.name: path.read_bytes() for path in files})

    def _reset_prefix_cache(self, message: m.ResetPrefixCache) -> m.Answer:
        self.model.engine.reset_prefix_cache(message.reset_connector)
        return m.Answer(message.call)


def _tensors_of(body: bytes, what: str) -> dict[str, torch.Tensor]:
    # Before 64 MB become a million tensors or texts, while the engine's other requests wait.
    if (size := int.from_bytes(body[:8], "little")) > len(body):  # JSON, for example
        raise PromptError(f"{what}: the body is no safetensors file and no GGUF file")
    if size > MAX_JSON_BYTES:
        raise PromptError(f"{what}: the file's header has {size} bytes; at most {MAX_JSON_BYTES}")
    # Each tensor has a brace, which no escape can hide. Braces in names and metadata are in strings.
    if (count := _STRING.sub(b"", body[8 : 8 + size]).count(b"{")) > MAX_NAMED + 2:
        raise PromptError(f"{what}: the file's header has {count} objects, one for each tensor; at most {MAX_NAMED}")
    try:
        return load(body)
    except SafetensorError as error:
        raise PromptError(f"{what}: the body is no safetensors file and no GGUF file ({error})") from error


def _vectors_of(body: bytes, what: str) -> Any:
    """The one tensor of a safetensors file, or {layer: tensor}."""
    tensors = _tensors_of(body, what)
    layers = [re.fullmatch(r"(?:layer|direction)\.(\d+)", name) for name in tensors]
    if tensors and all(layers):
        found = {int(match[1]): tensor for match, tensor in zip(layers, tensors.values(), strict=True) if match}
        if len(found) != len(tensors):
            raise PromptError(f"{what} holds two vectors for one layer, such as layer.1 and layer.01")
        return found
    if len(tensors) != 1:
        raise PromptError(f"{what}: one tensor is expected, or one a layer (layer.0, ...), not {sorted(tensors)[:8]}")
    return next(iter(tensors.values()))


def _prompt_of(token_ids: list[int], embeds: bytes | None, what: str) -> Any:
    """A client's prompt: token ids, or with its embeddings in their place."""
    if embeds is None:
        return token_ids
    tensors = _tensors_of(embeds, f"embeddings of {what}")
    vectors, positions = tensors.pop(NAME, None), tensors.pop(POSITIONS, None)
    if vectors is None and positions is None and len(tensors) == 1:
        (vectors,) = tensors.values()
    if vectors is None or vectors.dim() != 2 or len(vectors) > len(token_ids):
        raise PromptError(
            f"embeddings of {what}: one tensor [positions, width] is expected, of at most {len(token_ids)}"
        )
    if positions is None:
        return {"prompt_embeds": vectors}
    if (
        positions.shape != (len(vectors),)
        or positions.dtype is not torch.int64
        or len(positions.unique()) < len(vectors)
    ):
        raise PromptError(f"embeddings of {what}: different positions [{len(vectors)}] int64 are expected")
    return {"prompt_token_ids": token_ids, "embeds": dict(zip(positions.tolist(), vectors, strict=True))}


def _image_of(body: bytes, what: str) -> Any:
    """An image's file, or outputs of the image processor, as a client sent it."""
    if int.from_bytes(body[:8], "little") <= min(MAX_JSON_BYTES, len(body)):  # the header of safetensors
        return _tensors_of(body, what)
    check_format(body, what)
    return body


def _with_images(prompt: Any, images: m.PromptImages | None, what: str, model: ServedModel, salt: Any) -> Any:
    """A client's prompt with its images read, here and not on the engine's thread."""
    if images is None:
        return prompt
    if not isinstance(prompt, list):
        raise PromptError(f"{what} has embeddings and images: one of the two is expected")
    items = [_image_of(body, f"image {i} of {what}") for i, body in enumerate(images.bodies)]
    owner = model.backend.factory.cache_owner
    scope = "" if owner is None and salt is None else repr((salt, owner))  # as `ImageInput.scoped`
    given = RenderedPrompt(images.text, prompt, images=ImageSources(items, images.special, scope))
    return checked(model.tokenizer, given, model.backend.facts, what)


def _with_encoder(prompt: Any, body: bytes | None, model: ServedModel, what: str) -> Any:
    """A client's prompt with its encoder's input read. Without one, the prompt is that input."""
    if body is not None:
        found = _tensors_of(body, f"the encoder's input of {what}")
        ids = found.get("input_ids")
        if len(found) == 1 and ids is not None and ids.dim() == 1 and ids.dtype is torch.int64:
            source: Any = ids.tolist()
        elif found.keys() == {"audio"}:
            source = {MEDIA: found}
        elif found.keys() == {FEATURES}:
            source = found
        else:
            raise PromptError(
                f"the encoder's input of {what}: one tensor input_ids [tokens] int64 is expected, input_features, or audio"
            )
        prompt = {"encoder_prompt": source, "decoder_prompt": prompt}
    return checked(model.tokenizer, prompt, model.backend.facts, what)


def _submission_of(message: m.Submit, model: ServedModel) -> Submission:
    """A client's call as a `Submission`."""
    room, prompts = model.limits.max_model_len, message.prompts
    names = message.names or names_of(prompts)
    params = _for_each([None if given is None else _params(given) for given in message.params], prompts)
    asked = [_prompt_of(*each) for each in zip(prompts, message.embeds or [None] * len(prompts), names, strict=True)]
    if message.images:
        read = partial(_with_images, model=model, salt=message.options.get("cache_salt"))
        asked = list(read_each(read, asked, message.images, names))
    if message.encoders or model.limits.max_source_len:
        inputs = message.encoders or [None] * len(prompts)
        asked = [_with_encoder(*each, model, what) for *each, what in zip(asked, inputs, names, strict=True)]
    if message.images or model.limits.max_source_len:
        prompts = [
            one.token_ids if isinstance(one, RenderedPrompt) else ids for one, ids in zip(asked, prompts, strict=True)
        ]
    params = [one or model.backend.defaults.fitting(room - len(ids)) for one, ids in zip(params, prompts, strict=True)]
    options: Any = dict(message.options)
    for key, given, read in (
        ("interventions", message.interventions, intervention_of), ("monitors", message.monitors, monitor_of),
        ("capture", message.captures, capture_of),
    ):  # fmt: skip
        if given:
            lists = [[read(one, f"{key}[{i}]") for i, one in enumerate(ops)] for ops in given]
            check_names(spec for specs in lists for spec in specs)
            options[key] = _for_each(lists, prompts)
    return Requests(model, model.backend, model.tokenizer).submission(
        asked, params, options, message.stream, names, message.prompt_logits, message.receipts
    )


def _for_each(given: list[Any], prompts: list[Any]) -> list[Any]:
    """One entry for each prompt, from a list that may have one for all."""
    return given * len(prompts) if len(given) == 1 else given


def _params(given: dict[str, Any]) -> SamplingParams:
    if isinstance(biases := given.get("logit_bias"), dict) and len(biases) <= MAX_TOKEN_IDS:
        given = given | {"logit_bias": {int(token): bias for token, bias in biases.items()}}
    return SamplingParams(**given)
