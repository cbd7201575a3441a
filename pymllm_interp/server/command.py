"""The options of `pymllm-interp serve`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ModelConfig, ServerConfig
from ..core.arguments import check_names
from .settings import ServeLimits, ServeSettings
from .trust import read_keys


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """The settings that the command line asks for.

    Raises:
        ValueError, TypeError, OSError: an option that cannot be.
    """
    model_fields, server_fields = set(ModelConfig.__dataclass_fields__), set(ServerConfig.__dataclass_fields__)
    options: dict[str, Any] = dict(args.option or ())
    check_names("pymllm-interp serve --option", options, [*model_fields - {"hf_config", "saes"}, *server_fields], {})
    model = {"model": args.model, "dtype": args.dtype} | {k: v for k, v in options.items() if k in model_fields}
    model["saes"] = dict(args.sae or ())
    server = {"device": args.device} | {k: v for k, v in options.items() if k in server_fields}
    ModelConfig(**model)
    ServerConfig(**server)
    limits = {field.name: getattr(args, field.name) for field in fields(ServeLimits)}
    return ServeSettings(
        model=model, server=server, name=args.served_model_name or Path(args.model).name, host=args.host, port=args.port,
        keys=read_keys(args.keys, args.allow_code_from or (), args.operator or ()), limits=ServeLimits(**limits), store=args.store,
        shared_prefix_cache=args.shared_prefix_cache,
        on_engine_exit=args.on_engine_exit, drain_seconds=args.drain_seconds, log_level=args.log_level,
    )  # fmt: skip
