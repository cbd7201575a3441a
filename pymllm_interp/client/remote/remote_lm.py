"""`RemoteLM`: what `LM.connect` returns. The calls are those of `LM`; the model's weights stay on the server."""

from __future__ import annotations

import base64
import io
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from ... import __version__
from ...core.limits import EngineLimits
from ...core.request import Request
from ...core.sampling_params import SamplingParams
from ...hooks.declared import captures_for_each_prompt, for_each_prompt
from ...hooks.traces.syntax.envoy import TracedModel
from ...layers.seal import seal
from ...models.registry import NATIVE, architecture_of, spec_of
from ...utils.arguments import PromptError
from ...utils.device import DTYPES
from ...wire.specs import to_json
from ..generation_defaults import GenerationDefaults
from ..handle import RequestHandle
from ..lm import LM
from ..notebook.tab_completion import set_up_completion
from ..prompts import params_for, warn_of_flat_list
from ..request_factory import RequestFactory
from ..request_limits import truncated
from ..request_options import RequestOptions, checked_salt, priorities_of
from .remote_engine import RemoteEngine
from .remote_tracer import RemoteSession, RemoteTracer, edits_payload, run_remotely
from .remote_vectors import RemoteVectors

MOST_IN_FLIGHT = 64
"""Requests of `lm.imap` that may be pending, halved; each has a connection."""


class RemoteFactory(RequestFactory):
    """Reads prompts, and knows the server's limits."""

    def __init__(self, info: dict[str, Any], runner: Any, tokenizer: Any, vectors: RemoteVectors) -> None:
        self.runner, self.tokenizer, self.vectors = runner, tokenizer, vectors
        self.seed = info["seed"]
        values = {name: value for name, value in info["sampling_defaults"].items() if value is not None}
        values["max_new_tokens"] = values.pop("max_tokens", 16)
        self.defaults = GenerationDefaults(values, frozenset(info["eos_token_ids"]))
        self._info = info

    @property
    def limits(self) -> EngineLimits:
        """The server's."""
        found = self._info["limits"]
        return EngineLimits(
            found["vocab_size"], found["max_model_len"], found["max_num_tokens"], found["kv_tokens"],
            min(found["max_running_requests"], found["max_concurrent"] // 2, MOST_IN_FLIGHT),
        )  # fmt: skip

    @property
    def engine_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What computes there."""
        return self._info["engine"]


class RemoteLM(LM):
    """An `LM` whose engine is a server. Made by `LM.connect`.

    Args:
        url, api_key, timeout: as of `LM.connect`.
    """

    tracer_class = RemoteTracer
    is_remote = True
    engine: RemoteEngine  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, url: str, api_key: str | None, timeout: float | None) -> None:
        engine = RemoteEngine(url, api_key, timeout)
        info = engine.ask("GET", "/v1/interp/capabilities").json()
        if info["version"] != __version__:
            raise ConnectionError(
                f"{url} runs pymllm-interp {info['version']}, and this is {__version__}: install the same"
            )
        self.engine, self._info = engine, info
        self.hf_config = config_of(info["hf_config"])
        module = tree_of(self.hf_config, info["impl"], DTYPES[info["dtype"]])
        TracedModel.__init__(self, module)
        spec: Any = module.spec
        self.runner = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
            model_spec=spec,
            dtype=DTYPES[info["dtype"]],
            server_config=SimpleNamespace(logprobs_mode=info["logprobs_mode"]),
            declared=SimpleNamespace(limits=SimpleNamespace(inner_sites=frozenset(info["inner_sites"]))),
        )
        self.tokenizer = _tokenizer(engine)
        self.vectors = RemoteVectors(engine)
        self._factory = RemoteFactory(info, self.runner, self.tokenizer, self.vectors)
        set_up_completion(type(self))

    def session(self, device: Any = "cpu", **kwargs: Any) -> RemoteSession:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Several traces that see each other's values, which run on the server as a whole: ``with lm.session():``."""
        return RemoteSession(self, device, **kwargs)

    def _summary(self) -> str:
        info = self._info
        return f"RemoteLM({info['model']} at {self.engine.url}, {info['device']}, {info['dtype']}, engine: {self.engine.state})"

    @property
    def capabilities(self) -> dict[str, Any]:
        """What the server said of its model, limits and this key's rights."""
        return self._info

    def reset_prefix_cache(self) -> None:
        """Forget the KV that the server's prefix cache keeps, of all clients. Servers do it for operators (`serve --operator`)."""
        self.engine.ask("POST", "/v1/interp/reset_prefix_cache")

    def harvest(self, *args: Any, **kwargs: Any) -> Any:
        """Not for a server: a harvest writes files where the model is."""
        raise NotImplementedError("lm.harvest runs where the model is: make a local LM there, or capture with lm.imap")

    def attribute(self, *args: Any, **kwargs: Any) -> Any:
        """Not for a server: gradients are those of the model's own process."""
        raise NotImplementedError(
            "lm.attribute runs where the model is: make a local LM there; lm.patch_sweep runs here, as requests"
        )

    def submit_prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Not for a server: use `lm.submit` with SamplingParams(max_tokens=0)."""
        raise NotImplementedError("a server has no submit_prefill: use lm.submit(prompt, SamplingParams(max_tokens=0))")

    def _submit_all(
        self,
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        streaming: bool = False,
        names: Sequence[str] | None = None,
        prompt_logits: bool = False,
    ) -> list[RequestHandle]:
        self.engine.check_open()
        if names is None:
            names = [f"prompt {i}" for i in range(len(prompts))] if len(prompts) > 1 else ["the prompt"]
        if not prompts:
            return []
        given = params_for(prompts, params)
        warn_of_flat_list(options.get("interventions"), len(prompts))
        ops = for_each_prompt(options.get("interventions"), len(prompts))
        specs = captures_for_each_prompt(options.get("capture"), len(prompts))
        read = [self._factory.tokens(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        edits = self.edits_of(options.get("edits"))
        body = {
            "prompts": [one.token_ids for one in read],
            "params": [None if one is None else _params_to_json(one) for one in given],
            "interventions": [[to_json(op) for op in found] for found in ops] if any(ops) else [],
            "captures": [[to_json(spec) for spec in found] for found in specs] if any(specs) else [],
            "priority": priorities_of(options.get("priority"), len(prompts)),
            "cache_salt": checked_salt(options.get("cache_salt")),
            "timeout": options.get("timeout"),
            "names": list(names),
            "stream": streaming,
            "prompt_logits": prompt_logits,
            "edits": base64.b64encode(edits_payload(self, edits)).decode() if edits else "",
        }
        frames, accepted = self.engine.start(body)
        handles: list[RequestHandle] = []
        subscribers: list[tuple[str, RequestHandle]] = []
        for i, one in enumerate(read):
            own = SamplingParams(**_params_of(accepted["params"][i]))
            ids = truncated(one.token_ids, own, self._factory.limits.max_model_len)
            requests = [
                Request(
                    f"{frames.call}-{i}-{j}", ids, own, accepted["max_tokens"][i], own.seed or 0, j,
                    stream=streaming, logprobs=None if own.logprobs is None else [],
                )
                for j in range(own.n)
            ]  # fmt: skip
            engine: Any = self.engine
            mode = self._info["logprobs_mode"]
            handles.append(RequestHandle(one.text, requests, self.tokenizer, engine, streaming, mode))
            subscribers += [(request.request_id, handles[-1]) for request in requests]
        self.engine.follow(frames, subscribers)
        return handles

    def _run(self, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        return run_remotely(self, mode, inputs, kwargs)

    def run_traces(self, mode: str, traces: list[Any], inputs: list[Any]) -> None:
        """Traces run on the server (`RemoteTracer`)."""
        raise NotImplementedError("a remote model's traces run on its server")

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the connection. The server goes on."""
        engine = self.__dict__.get("engine")
        if engine is not None:
            engine.shutdown()


def config_of(values: dict[str, Any]) -> PretrainedConfig:
    """A transformers config from its values."""
    rest = {name: value for name, value in values.items() if name not in ("model_type", "transformers_version")}
    return AutoConfig.for_model(values["model_type"], **rest)


def tree_of(config: PretrainedConfig, impl: str, dtype: torch.dtype) -> nn.Module:
    """The model's modules, without weights."""
    spec = spec_of(config, impl, dtype)
    if impl == "native":
        model: nn.Module = NATIVE[architecture_of(config)](config, spec, "meta", spec.context_len)
    else:
        with torch.device("meta"):
            served = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = nn.Module()
        for name, child in served.named_children():
            model.add_module(name, child)
        model.spec = spec  # pyright: ignore
    seal(model)
    return model


def _tokenizer(engine: RemoteEngine) -> Any:
    """The server's tokenizer; None where it has none."""
    if not engine.ask("GET", "/v1/interp/capabilities").json()["tokenizer"]:
        return None
    archive = engine.ask("GET", "/v1/interp/tokenizer").content
    with tempfile.TemporaryDirectory(prefix="pymllm-interp-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    if params.constraint is not None:
        raise PromptError(
            "SamplingParams(constraint=...): a constraint is code, which a server does not take: use a local LM"
        )
    return {field.name: value for field in fields(params) if (value := getattr(params, field.name)) != field.default}


def _params_of(given: dict[str, Any]) -> dict[str, Any]:
    biases = given.get("logit_bias")
    return given if biases is None else given | {"logit_bias": {int(token): bias for token, bias in biases.items()}}
