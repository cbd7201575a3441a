"""The options of `pymllm-interp serve`."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, TemplateSyntaxError

from ..config import ModelConfig, ServerConfig, renamed_fields
from ..utils.arguments import check_names, shown
from .http.trust import read_keys
from .settings import ServeLimits, ServeSettings

KEY_VARIABLE = "PYMLLM_INTERP_API_KEY"
"""Environment variable with a key, without --api-key."""
HTTP_OPTIONS = (
    "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "allowed_origins", "allowed_methods", "allowed_headers",
    "allow_credentials",
)  # fmt: skip
"""Fields of ServeSettings with the name of their option."""

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

VLLM_OPTIONS = ("tensor_parallel_size", "distributed_executor_backend")
"""Arguments of vLLM with an option of this command."""


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """The settings that the command line asks for.

    Raises:
        ValueError, TypeError, OSError: an option that cannot be.
    """
    model_fields, server_fields = set(ModelConfig.__dataclass_fields__), set(ServerConfig.__dataclass_fields__)
    options: dict[str, Any] = renamed_fields(dict(args.option or ()), "--option {}")
    vllm = _vllm_arguments(args)
    check_names("pymllm-interp serve --option", options, [*model_fields - {"hf_config", "saes"}, *server_fields], {})
    model = {"model": args.model, "dtype": args.dtype} | {k: v for k, v in options.items() if k in model_fields}
    model["saes"] = dict(args.sae or ())
    server = {"device": args.device} | {k: v for k, v in options.items() if k in server_fields}
    if args.batch_invariant:
        server["batch_invariant"] = True
    if args.limit_mm_per_prompt is not None:
        server["limit_mm_per_prompt"] = args.limit_mm_per_prompt
    ModelConfig(**model)
    ServerConfig(**server)
    limits = {field.name: getattr(args, field.name) for field in fields(ServeLimits)}
    given = os.environ.pop(KEY_VARIABLE, "")  # not for the engine process, which may run clients' code
    secrets = args.api_key or ([given] if given else [])
    if args.monitor_visible and args.monitor is None:
        raise ValueError("--monitor-visible: there are no monitors; --monitor FILE has them")
    if args.command == "serve":  # a cluster's are on its nodes
        _check_paths(args)
    return ServeSettings(
        model=model, server=server, name=args.served_model_name or Path(args.model).name, host=args.host, port=args.port,
        uds=getattr(args, "uds", None),
        keys=read_keys(args.keys, args.allow_code_from or (), args.operator or (), secrets), limits=ServeLimits(**limits),
        adapters=dict(args.lora_modules or ()), store=args.store, shared_prefix_cache=args.shared_prefix_cache,
        monitors=_monitors_of(args.monitor), monitor_visible=args.monitor_visible,
        on_engine_exit=args.on_engine_exit, drain_seconds=args.drain_seconds, log_level=args.log_level, log_format=args.log_format,
        otlp_traces_endpoint=args.otlp_traces_endpoint, vllm=vllm, chat_template=_template_of(args.chat_template),
        tool_call_parser=args.tool_call_parser, reasoning_parser=args.reasoning_parser,
        allowed_media_domains=tuple(args.allowed_media_domains or ()), allowed_local_media_path=args.allowed_local_media_path,
        root_path=args.root_path, **{name: getattr(args, name) for name in HTTP_OPTIONS},
    )  # fmt: skip


def _check_paths(args: argparse.Namespace) -> None:
    """Refuse adapters and autoencoders that are not there, before the model is loaded."""
    for name, folder in args.lora_modules or ():
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ValueError(
                f"--lora-modules {name}={folder}: there is no adapter_config.json; PEFT's save_pretrained writes one"
            )
    for name, path in args.sae or ():
        if not Path(path).exists():
            raise ValueError(f"--sae {name}={path}: no such file or folder")


def _template_of(file: Path | None) -> str | None:
    """Text of a chat template's file, or None."""
    if file is None:
        return None
    template = file.read_text()
    if not template.strip():
        raise ValueError(f"--chat-template {file}: the file is empty")
    try:  # transformers adds the tag `generation`
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template {file}: line {error.lineno}: {error.message}") from error
    return template


def _monitors_of(file: Path | None) -> list[dict[str, Any]]:
    """The monitors of a file of JSON or YAML. The engine process reads all but their names."""
    if file is None:
        return []
    text = file.read_text()
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else yaml.safe_load(text)
        json.dumps(found)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"--monitor {file}: neither JSON nor YAML: {error}") from error
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"--monitor {file}: expected a list of monitors, each an object with name, site and probe")
    names = [one.get("name") for one in found]
    for name in names:
        if not isinstance(name, str) or not name or name == "clients" or names.count(name) > 1:
            raise ValueError(
                f"--monitor {file}: name is {shown(name)}; each monitor has a name of its own, other than 'clients'"
            )
    return found


def _vllm_arguments(args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's arguments, if it is the engine; None for the native engine.

    Raises:
        ValueError: arguments of vLLM's, and another engine.
    """
    named = {name: value for name in VLLM_OPTIONS if (value := getattr(args, name)) is not None}
    given = dict(args.vllm_option or ()) | named
    if args.engine == "vllm" and args.lora_modules:
        raise ValueError("--lora-modules: adapters are not served with --engine vllm; leave one of the two out")
    if args.engine == "vllm":
        return given
    if given:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} is an argument of vLLM's: give --engine vllm, too")
    return None
