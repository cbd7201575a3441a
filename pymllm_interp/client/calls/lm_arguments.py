"""Arguments of `LM`, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

from ...config import RENAMED, TUNING, EngineTuning, ModelConfig, ServerConfig, renamed_fields
from ...core import unsupported
from ...utils.arguments import check_names, warn_renamed

ELSEWHERE = {
    "device_map": "one device holds the model, device='cuda' or 'cpu'",
    "dispatch": "the weights are always loaded; leave it out",
    "torch_dtype": "here it is dtype",
    "trust_remote_code": "code of a model's folder is not run: its architecture must be one of transformers'",
    "revision": "a folder is taken, too: huggingface_hub.snapshot_download(model, revision=...) returns one",
    "max_num_seqs": "here it is max_running_requests",
    "max_num_batched_tokens": "here it is max_num_tokens",
    "enforce_eager": "here it is disable_cuda_graph=True",
    **dict.fromkeys(
        ("speculative_config", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
        "here it is speculative={'method': 'ngram', 'num_speculative_tokens': k}",
    ),
    "tensor_parallel_size": "one device holds the model, unless engine='vllm' is given",
    **unsupported.OPTIONS,
}
"""Arguments of nnsight and vLLM -> advice."""
MOVED = {
    **{name: f"here it is tuning=EngineTuning({name}=...), of pymllm_interp.config" for name in TUNING},
    "schedule_policy": "here it is tuning=EngineTuning(prefill_policy=...), of pymllm_interp.config",
    "scheduling_policy": "here it is queue_order",
}
"""Old keywords -> what to do. They work until 0.2; messages for misspelt ones show this."""


def server_fields(given: Mapping[str, Any], tuning: EngineTuning | None) -> dict[str, Any]:
    """The keywords of an `LM` as fields of `ServerConfig`, with the tuning's. Warns of tuning that is given as a keyword.
    Raises TypeError: `tuning` is of another type."""
    # A `ServerConfig` is one, and its other fields would take the place of the keywords.
    if not isinstance(tuning, EngineTuning | None) or isinstance(tuning, ServerConfig):
        raise TypeError(f"tuning is a {type(tuning).__name__}: pymllm_interp.config.EngineTuning(...) is expected")
    for name in given:
        if (new := RENAMED.get(name, name)) in TUNING:
            warn_renamed(f"LM({name}=...)", f"LM(tuning=EngineTuning({new}=...)), of pymllm_interp.config", 4)
    new_names = {RENAMED[name] if RENAMED.get(name) in TUNING else name: value for name, value in given.items()}
    return vars(tuning or EngineTuning()) | renamed_fields(new_names, "LM({}=...)", 5)


def with_tuning(**options: Any) -> dict[str, Any]:
    """Keywords of `LM` from the options of a command line, which also name fields of `EngineTuning`."""
    tuning = {name: options.pop(name) for name in TUNING & options.keys()}
    return options | ({"tuning": EngineTuning(**tuning)} if tuning else {})


def check_arguments(model: Any, keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that `LM` does not take, with the alternative."""
    if not isinstance(model, str | PathLike):
        raise TypeError(
            f"model is a {type(model).__name__}: 'demo', a folder, a .gguf file or a hub id is expected; one that is loaded "
            "already becomes a folder by model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
        )
    known = [
        *ModelConfig.__dataclass_fields__,
        *ServerConfig.__dataclass_fields__,
        "rename",
        "attn_implementation",
        "tuning",
    ]
    check_names("LM", keywords, known, ELSEWHERE | MOVED)


def vllm_arguments(engine: str, server: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM's arguments, taken out of the keywords; None for the native engine. Raises ValueError: another engine."""
    if engine == "own":
        return None
    if engine != "vllm":
        raise ValueError(f"LM(engine={engine!r}): expected 'own' or 'vllm'")
    known = {*ServerConfig.__dataclass_fields__, *ModelConfig.__dataclass_fields__}
    return {name: server.pop(name) for name in list(server) if name not in known}


def check_unused(model: ModelConfig, server: ServerConfig) -> None:
    """Raise TypeError if arguments of a local engine are given together with a backend, which has its own."""
    for given, default in ((model, ModelConfig()), (server, ServerConfig())):
        for field in fields(default):
            if getattr(given, field.name) != getattr(default, field.name):
                raise TypeError(f"LM(backend=..., {field.name}=...): the backend's engine has its settings already")
