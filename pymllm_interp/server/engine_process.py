"""The engine process: a served model behind two sockets. Started by `engine_client`; ends with its parent.

    python -m pymllm_interp.server.engine_process < settings.json

Messages are data (messages.py). Code comes in one of them, `RunTrace`, whose sender the HTTP process has checked.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from safetensors import SafetensorError
from safetensors.torch import load

from ..config import ModelConfig, ServerConfig
from ..core.arguments import PromptError
from ..core.sampling_params import SamplingParams
from ..hooks.traces.trace import RequestTrace
from . import messages as m
from .failures import failure_of
from .outbox import CallEvents, Outbox
from .schema import components
from .served_model import ServedModel
from .specs import capture_of, intervention_of
from .trace_runs import TraceRuns

logger = logging.getLogger(__name__)
POLL_MS = 500
"""How often the process looks whether its parent lives."""


class EngineServer:
    """Takes messages, one at a time, and answers them.

    Args:
        model: what is served.
        outbox: where answers go.
    """

    def __init__(self, model: ServedModel, outbox: Outbox) -> None:
        self.model, self.outbox = model, outbox
        self.traces = TraceRuns(model, outbox)
        self._calls: dict[int, list[str]] = {}
        self._handlers: dict[type, Callable[[Any], Any]] = {
            m.Submit: self._submit,
            m.Abort: self._abort,
            m.PutVector: self._put_vector,
            m.DropVector: self._drop_vector,
            m.RunTrace: self.traces.run,
            m.AskLens: self.traces.lens,
            m.AskStats: lambda message: m.Answer(message.call, self.stats()),
            m.AskProgress: lambda message: m.Answer(message.call, self.model.engine.progress()._asdict()),
            m.ResetPrefixCache: self._reset_prefix_cache,
        }

    def handle(self, message: m.ToEngine) -> None:
        """Answer a message. What it raises is the answer."""
        try:
            answer = self._handlers[type(message)](message)
        except Exception as error:
            answer = m.Failed(message.call, failure_of(error))
        if answer is not None:
            self.outbox.put(answer)

    def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        limits = self.model.factory("").limits
        return self.model.engine.stats() | {"kv_tokens": limits.kv_tokens, "traces": self.traces.num_running}

    def _submit(self, message: m.Submit) -> None:
        model, factory = self.model, self.model.factory(message.owner)
        edits = self.traces.edits_of(message.edits)
        params = [None if given is None else _params(given) for given in message.params]
        names = message.names or [
            f"prompt {i}" if len(message.prompts) > 1 else "the prompt" for i in range(len(params))
        ]
        options: Any = dict(message.options)
        for key, given, read in (
            ("interventions", message.interventions, intervention_of), ("capture", message.captures, capture_of)
        ):  # fmt: skip
            if given:
                options[key] = [[read(one, f"{key}[{i}]") for i, one in enumerate(ops)] for ops in given]
        passes = model.pass_options(edits, {})
        traces = (lambda: RequestTrace(None, edits, options=passes)) if edits else None
        if any(one is None for one in params):
            room = factory.limits.max_model_len
            params = [
                one or factory.defaults.fitting(room - len(ids))
                for one, ids in zip(params, message.prompts, strict=True)
            ]
        made = factory.for_prompts(
            message.prompts, params, options, traces, message.stream, names, message.prompt_logits  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        requests = [request for _, own in made for request in own]
        ids = self._calls[message.call] = [request.request_id for request in requests]
        events = CallEvents(self.outbox, message.call, ids, partial(self._ended, message.call))
        self.outbox.put(
            m.Accepted(message.call, [asdict(own[0].params) for _, own in made], [own[0].max_tokens for _, own in made])
        )
        try:
            model.engine.submit(requests, events)
        except BaseException:
            factory.release(requests)
            self._calls.pop(message.call, None)
            raise

    def _ended(self, call: int) -> None:
        self._calls.pop(call, None)

    def _abort(self, message: m.Abort) -> None:
        ids = self._calls.get(message.call, [])
        self.model.engine.abort(ids if message.requests is None else [ids[i] for i in message.requests if i < len(ids)])
        self.traces.abort(message.call)

    def _put_vector(self, message: m.PutVector) -> m.Answer:
        vectors, what = self.model.factory(message.owner).vectors, f"vector {message.name!r}"
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
        found = vectors[message.name]
        shape = (
            {str(layer): list(v.shape) for layer, v in found.items()} if isinstance(found, dict) else list(found.shape)
        )
        return m.Answer(message.call, {"name": message.name, "shape": shape})

    def _drop_vector(self, message: m.DropVector) -> m.Answer:
        self.model.factory(message.owner).vectors.pop(message.name, None)
        return m.Answer(message.call)

    def _reset_prefix_cache(self, message: m.ResetPrefixCache) -> m.Answer:
        self.model.engine.call(lambda: self.model.engine.scheduler.kv.reset_prefix_cache())
        return m.Answer(message.call)


def _vectors_of(body: bytes, what: str) -> Any:
    """The one tensor of a safetensors file, or {layer: tensor}."""
    try:
        tensors = load(body)
    except SafetensorError as error:
        raise PromptError(f"{what}: the body is no safetensors file and no GGUF file ({error})") from error
    layers = [re.fullmatch(r"(?:layer|direction)\.(\d+)", name) for name in tensors]
    if tensors and all(layers):
        return {int(match[1]): tensor for match, tensor in zip(layers, tensors.values(), strict=True) if match}
    if len(tensors) != 1:
        raise PromptError(
            f"{what}: one tensor is expected, or one for each layer (layer.0, ...), not {sorted(tensors)[:8]}"
        )
    return next(iter(tensors.values()))


def _params(given: dict[str, Any]) -> SamplingParams:
    if isinstance(biases := given.get("logit_bias"), dict):
        given = given | {"logit_bias": {int(token): bias for token, bias in biases.items()}}
    return SamplingParams(**given)


def serve(settings: dict[str, Any]) -> None:
    """Load the model, say that it is ready, and answer messages until told to stop, or the parent is gone."""
    context = zmq.Context()
    incoming, outgoing = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outgoing.setsockopt(zmq.LINGER, 1000)
    for socket in (incoming, outgoing):
        socket.set_hwm(0)
    incoming.connect(settings["requests"])
    outgoing.connect(settings["events"])
    outbox = Outbox(outgoing.send, Path(settings["store"]), settings["inline_bytes"])
    try:
        served = ServedModel(
            ModelConfig(**settings["model"]), ServerConfig(**settings["server"]), settings["shared_prefix_cache"]
        )
    except Exception as error:
        outbox.put(m.Failed(0, failure_of(error)))
        outbox.close()
        raise SystemExit(1) from error
    if served.tokenizer is not None:
        served.tokenizer.save_pretrained(settings["tokenizer"])
    server = EngineServer(served, outbox)
    gc.collect()
    gc.freeze()  # modules and weights stay for good: a full collection over them would stop all requests for 0.2 s
    outbox.put(m.Ready(0, served.describe(), components()))
    try:
        while os.getppid() == settings["parent"]:  # which may have ended while the model was loaded
            if not incoming.poll(POLL_MS):
                continue
            message = m.to_engine.decode(incoming.recv())
            if isinstance(message, m.Stop):
                break
            server.handle(message)
    finally:
        server.traces.close()
        served.engine.shutdown()
        outbox.close()
        context.destroy(linger=1000)


def main() -> None:
    """Read the settings from standard input, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    logging.basicConfig(level=settings["log_level"].upper(), format="%(levelname)s %(name)s: %(message)s")
    serve(settings)


if __name__ == "__main__":
    main()
