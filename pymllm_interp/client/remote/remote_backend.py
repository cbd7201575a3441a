"""`RemoteBackend`: a server, as the backend of the `LM` that `LM.connect` returns. The weights stay on the server."""

from __future__ import annotations

import base64
import io
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from safetensors.torch import save
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from ... import __version__
from ...config import LOWER_TRACES
from ...core.pass_parts import EncoderInput, PromptEmbeds
from ...core.request import Request
from ...core.sampling_params import SamplingParams
from ...core.structured.structured_outputs import StructuredOutputs
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.syntax.envoy import TracedModel
from ...hooks.traces.syntax.tracer import EngineTracer, TraceInput
from ...layers.seal import refuse_weights, seal
from ...models.registry import NATIVE, architecture_of, spec_of
from ...utils.arguments import PromptError
from ...utils.device import DTYPES
from ...wire.embeds import NAME, POSITIONS
from ...wire.specs import to_json
from ...wire.weights import SentWeights
from ..backend import Backend, Submission
from ..calls.lowered import Lowered
from ..chat import RenderedPrompt
from ..facts import ModelFacts
from ..handle import RequestHandle
from ..inputs.audio import AudioReader
from ..pooling.pooler import Pooler
from ..request_options import check_embedded, max_tokens_of, truncated
from .remote_engine import RemoteEngine
from .remote_images import SentImages, images_to_json
from .remote_tracer import NotDeclaredError, RemoteSession, RemoteTracer, edits_payload, run_remotely
from .remote_vectors import RemoteVectors

MOST_IN_FLIGHT = 64
"""Requests of `lm.imap` that may be pending, halved; each has a connection."""


LOAD_SECONDS = 600.0
"""Timeout of an adapter's load, which may capture graphs."""
DONE = {"wake": "awake", "pause": "paused", "resume": "resumed"}
"""Orders with the status that says that they were carried out."""


class RemoteBackend(Backend):
    """A `Backend` with a server's engine.

    Args:
        url, api_key, timeout, lower_traces: see `LM.connect`.

    Raises:
        ConnectionError: no server answers there, or it serves another version.
        PermissionError: the key is missing or not known.

    Attributes:
        runs_code: the key may run code on the server.
    """

    tracer: ClassVar[type[EngineTracer]] = RemoteTracer

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float | None = None, lower_traces: str = "auto"
    ) -> None:
        if lower_traces not in LOWER_TRACES:
            raise ValueError(f"lower_traces={lower_traces!r}: expected one of {', '.join(map(repr, LOWER_TRACES))}")
        self.engine = RemoteEngine(url, api_key, timeout)
        self._info = info = self.engine.ask("GET", "/v1/interp/capabilities").json()
        if info["version"] != __version__:
            raise ConnectionError(
                f"{url} runs pymllm-interp {info['version']}, and this is {__version__}: install the same"
            )
        config = config_of(info["hf_config"])
        self.module: Any = tree_of(config, info["impl"], DTYPES[info["dtype"]])
        most = min(info["limits"]["max_concurrent"] // 2, MOST_IN_FLIGHT)
        self.tokenizer, pooler = _tokenizer(self.engine, info)
        images = info["images"] and SentImages(config, self.tokenizer, info["images"]["max_images"])
        facts = ModelFacts.of_json(info, self.engine.url, self.module.spec, config, most, pooler)
        audio = info["audio"] and AudioReader.of_json(config, info["audio"])
        self.facts = replace(facts, images=images, audio=audio)
        self.vectors = RemoteVectors(self.engine)
        self.saes = ServedSAEs(info["saes"])
        self.lowered = Lowered(self.module, lower_traces, torch.device("cpu"))
        self.runs_code = info["trust"] == "code"

    def describe(self) -> dict[str, Any]:
        return self._info  # the server's `describe`, and the key's permissions

    def submit(self, submission: Submission) -> list[RequestHandle]:
        if not submission.prompts:
            return []
        sent = [self._sent(*each) for each in zip(submission.prompts, submission.params, submission.names, strict=True)]
        frames, accepted = self.engine.start(_body_of(submission, sent))
        if expanded := accepted.get("prompts"):
            sent = [theirs or ids for theirs, ids in zip(expanded, sent, strict=True)]
        handles: list[RequestHandle] = []
        subscribers: list[tuple[str, RequestHandle]] = []
        for i, prompt in enumerate(submission.prompts):
            own = SamplingParams(**_params_of(accepted["params"][i]))
            requests = [
                Request(
                    f"{frames.call}-{i}-{j}", sent[i], own, accepted["max_tokens"][i], own.seed or 0, j,
                    stream=submission.stream, logprobs=None if own.logprobs is None else [],
                )
                for j in range(own.n)
            ]  # fmt: skip
            mode = self.facts.logprobs_mode
            handle = RequestHandle(prompt.text, requests, self.tokenizer, self.engine, submission.stream, mode)
            handles.append(handle)
            subscribers += [(request.request_id, handle) for request in requests]
        self.engine.follow(frames, subscribers)
        return handles

    def _sent(self, prompt: RenderedPrompt, params: SamplingParams | None, name: str) -> list[int]:
        """The token ids for the server. Ids beyond the context are refused before they are sent."""
        limits = self.limits
        params = params or self.defaults.fitting(limits.max_model_len - len(prompt.token_ids))
        if prompt.embeds is not None or prompt.images:
            check_embedded(params, name, "images" if prompt.images else "embeddings")
        ids = truncated(prompt.token_ids, params, limits.max_model_len)
        max_tokens_of(limits, self.tokenizer, ids, params, name, forward_only=False)
        return ids

    def load_adapter(self, name: str, folder: str) -> None:
        self.engine.ask(
            "POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": folder}, timeout=LOAD_SECONDS
        )

    def unload_adapter(self, name: str) -> None:
        self.engine.ask("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    def control(self, order: str, **arguments: Any) -> Any:
        if order == "update_weights":
            return self._update_weights(**arguments)
        method, route = "GET" if order.startswith("is_") else "POST", "wake_up" if order == "wake" else order
        params = {name: value for name, value in arguments.items() if value is not None}
        found = self.engine.ask(method, f"/{route}", params=params, timeout=LOAD_SECONDS).json()
        return found["status"] == DONE[order] if order in DONE else found.get(order)

    def _update_weights(self, weights: Any, draft: bool) -> dict[str, Any]:
        """Send tensors of this process by handles, or the path of a folder of the server's machine."""
        if isinstance(weights, str | Path):
            return self._sent_weights("shared_memory", {"folder": str(weights)}, draft)
        with SentWeights(weights) as sent:
            return self._sent_weights(sent.backend, sent.info, draft)

    def _sent_weights(self, backend: str, info: dict[str, Any], draft: bool) -> dict[str, Any]:
        def post(route: str, **body: Any) -> dict[str, Any]:
            return self.engine.ask("POST", f"/{route}", json=body or None, timeout=LOAD_SECONDS).json()

        post("init_weight_transfer_engine", init_info={"backend": backend})
        post("start_draft_weight_update" if draft else "start_weight_update")
        try:
            post("update_weights", update_info=info)
        except BaseException:
            post("shutdown_weight_transfer_engine")
            raise
        return post("finish_weight_update")

    @property
    def adapters(self) -> dict[str, str]:
        return self.engine.ask("GET", "/v1/interp/capabilities").json()["adapters"]

    def run_blocks(
        self,
        mode: str,
        traces: list[RequestTrace],
        inputs: Sequence[TraceInput | None],
        why: str,
        refused: Exception | None = None,
    ) -> None:
        """Raise NotDeclaredError: `RemoteTracer` sends the whole ``with`` that contains the blocks."""
        raise NotDeclaredError(why) from refused

    def session(self, model: TracedModel, device: Any, **kwargs: Any) -> RemoteSession:
        return RemoteSession(model, device, **kwargs)

    def run_pass(self, model: TracedModel, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        return run_remotely(model, mode, inputs, kwargs)


class ServedSAEs(dict[str, Any]):
    """The server's SAEs by name: their sites and numbers of features."""

    def __setitem__(self, name: str, sae: Any) -> None:
        raise NotImplementedError(f"lm.saes[{name!r}]: a server has the SAEs that it is started with (serve --sae)")


def config_of(values: dict[str, Any]) -> PretrainedConfig:
    """A transformers config from its values in JSON."""
    rest = {
        name: _floats(value) for name, value in values.items() if name not in ("model_type", "transformers_version")
    }
    return AutoConfig.for_model(values["model_type"], **rest)


def _floats(value: Any) -> Any:
    """The value, with infinities as numbers: transformers writes them as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {k: _floats(v) for k, v in value.items()}
    return [_floats(each) for each in value] if isinstance(value, list) else value


def tree_of(config: PretrainedConfig, impl: str, dtype: torch.dtype) -> nn.Module:
    """The model's modules, without weights."""
    spec = spec_of(config, impl, dtype)
    if impl == "native":
        model: nn.Module = NATIVE[architecture_of(config)](config, spec, "meta", spec.context_len)
    else:
        from ...models.transformers.transformers_model import without_weights  # which imports transformers' models

        with torch.device("meta"):
            served: Any = without_weights(config, spec)
        model = nn.Module()
        for name, child in served.named_children():
            model.add_module(name, child)
        model.spec = spec  # pyright: ignore
    seal(model)
    refuse_weights(model, "has its values in the model's process: use them inside the block of a trace")
    for path, module in model.named_modules():  # products hold their weights in ways that torch's functions do not see
        vars(module)["_call_impl"] = partial(_refuse_call, path)
    return model


def _refuse_call(path: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"`{path}` runs in the model's process: call it inside the block of a trace")


def _tokenizer(engine: RemoteEngine, info: dict[str, Any]) -> tuple[Any, Pooler]:
    """The server's tokenizer, or None, and the defaults of embeddings with weights beside it."""
    if not info["tokenizer"]:
        return None, Pooler.of_json(info["pooler"], None)
    archive = engine.ask("GET", "/v1/interp/tokenizer").content
    with tempfile.TemporaryDirectory(prefix="pymllm-interp-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return tokenizer, Pooler.of_json(info["pooler"], Path(folder))


def _body_of(submission: Submission, prompts: list[list[int]]) -> dict[str, Any]:
    """The JSON of a submission of these token ids."""
    ops, captures = submission.interventions, submission.captures
    any_embeds = any(prompt.embeds is not None for prompt in submission.prompts)
    encoders = [prompt.encoder for prompt in submission.prompts]
    any_images = any(prompt.images for prompt in submission.prompts)
    return {
        "prompts": prompts,
        "params": [None if params is None else _params_to_json(params) for params in submission.params],
        "interventions": [[to_json(op) for op in found] for found in ops] if any(ops) else [],
        "captures": [[to_json(spec) for spec in found] for found in captures] if any(captures) else [],
        "priority": submission.priority,
        "lora": list(submission.adapters) if any(submission.adapters) else None,
        "cache_salt": submission.cache_salt,
        "timeout": submission.timeout,
        "names": submission.names,
        "stream": submission.stream,
        "prompt_logits": submission.prompt_logits,
        "receipts": submission.receipts,
        "embeds": [_embeds_to_text(prompt.embeds) for prompt in submission.prompts] if any_embeds else None,
        "images": [images_to_json(prompt) for prompt in submission.prompts] if any_images else None,
        "encoders": [encoder_to_text(encoder) for encoder in encoders] if any(encoders) else None,
        "edits": base64.b64encode(edits_payload(submission.edits)).decode() if submission.edits else "",
    }


def _embeds_to_text(embeds: PromptEmbeds | None) -> str | None:
    """Base64 of a prompt's embeddings in safetensors; None without any."""
    if embeds is None:
        return None
    tensors = {NAME: embeds.vectors, POSITIONS: torch.from_numpy(embeds.positions)}
    return base64.b64encode(save(tensors)).decode()


def encoder_to_text(encoder: EncoderInput | None) -> str | None:
    """Base64 of an encoder's input in safetensors; None without one."""
    return None if encoder is None else base64.b64encode(save({encoder.kind: encoder.values})).decode()


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    if params.constraint is not None:
        raise PromptError(
            "SamplingParams(constraint=...): a constraint is code, which a server does not take: use a local LM"
        )
    found = {field.name: value for field in fields(params) if (value := getattr(params, field.name)) != field.default}
    if isinstance(form := params.structured_outputs, StructuredOutputs):
        found["structured_outputs"] = {name: value for name, value in asdict(form).items() if value is not None}
    return found


def _params_of(given: dict[str, Any]) -> dict[str, Any]:
    biases = given.get("logit_bias")
    return given if biases is None else given | {"logit_bias": {int(token): bias for token, bias in biases.items()}}
