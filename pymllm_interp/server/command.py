"""The options of `pymllm-interp serve`: of the command line, of a YAML file, and those that vLLM has under another name."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, TemplateSyntaxError

from ..config import ModelConfig, ServerConfig, renamed_fields
from ..core import unsupported
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

BURST_TOKENS = 2048
"""`max_prefill_tokens` of a server: on a GPU, larger steps are hardly faster a token (benchmarks/results/README.md)."""
VLLM_OPTIONS = ("tensor_parallel_size", "distributed_executor_backend")
"""Arguments of vLLM with an option of this command."""


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """The settings that the command line asks for. Raises ValueError, TypeError, OSError: an option that cannot be."""
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
    if vllm is None:
        server.setdefault("max_prefill_tokens", BURST_TOKENS)
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
    Raises ValueError: arguments of vLLM's, and another engine."""
    named = {name: value for name in VLLM_OPTIONS if (value := getattr(args, name)) is not None}
    given = dict(args.vllm_option or ()) | named
    if args.engine == "vllm" and args.lora_modules:
        raise ValueError("--lora-modules: adapters are not served with --engine vllm; leave one of the two out")
    if args.engine == "vllm":
        return given
    if given:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} is an argument of vLLM's: give --engine vllm, too")
    return None


JSON_OPTIONS = ("allowed-origins", "allowed-methods", "allowed-headers", "limit-mm-per-prompt")
"""Options with JSON as value."""


def arguments_of(file: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The options of a file, as a command line.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a mapping of options to values.
    """
    try:
        found = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file}: not YAML: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"--config {file}: expected long options and their values, such as `port: 8000`")
    known = {option for action in parser._actions for option in action.option_strings}
    arguments, model = [], found.pop("model", None)
    for key, value in found.items():
        name = key.replace("_", "-")
        if name in ("config", "help") or f"--{name}" not in known:
            raise ValueError(f"--config {file}: {key!r} is not an option of this command (--help)")
        try:
            arguments += _written(name, value, parser)
        except TypeError as error:
            raise ValueError(f"--config {file}: {key}: {error}") from None
    return arguments if model is None else [str(model), *arguments]


def _written(name: str, value: Any, parser: argparse.ArgumentParser) -> Iterator[str]:
    action = next(action for action in parser._actions if f"--{name}" in action.option_strings)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TypeError(f"expected true or false, not {value!r}")
        yield from [f"--{name}"] * value
        return
    if name in JSON_OPTIONS:
        yield f"--{name}={json.dumps(value)}"
        return
    values = [f"{key}={one}" for key, one in value.items()] if isinstance(value, dict) else value
    repeats = isinstance(action, argparse._AppendAction)
    if isinstance(values, list) and not repeats:
        raise TypeError(f"expected one value, not {value!r}")
    for one in values if isinstance(values, list) else [values]:
        if one is None or isinstance(one, bool | list | dict):
            raise TypeError(f"expected text or a number, not {one!r}")
        yield f"--{name}={one}"


def read_config(file: Path, parser: argparse.ArgumentParser) -> None:
    """Make the options of a file the defaults of a command: the command line wins. Repeatable ones are added to."""
    given = parser.parse_args(arguments_of(file, parser))
    parser.set_defaults(**vars(given))


_ONE_DEVICE = "one device holds the model; --device cuda:N chooses it"
_LOG = "--log-level sets what is logged; prompts and texts never are"

SAME: dict[str, str] = {
    "max_model_len": "", "seed": "", "kv_cache_dtype": "", "enable_prefix_caching": "True",
    "gpu_memory_utilization": "", "async_scheduling": "True", "generation_config": "", "load_format": "",
    "logprobs_mode": "", "mm_processor_cache_gb": "", "attention_backend": "", "max_loras": "", "max_lora_rank": "",
}  # fmt: skip
"""Arguments of LM with vLLM's name, which `--option` sets -> the value of a flag without one."""
RENAMED: dict[str, str] = {
    "block_size": "page_size", "max_num_batched_tokens": "max_num_tokens", "max_num_seqs": "max_running_requests",
    "model_impl": "impl", "scheduling_policy": "queue_order", "speculative_config": "speculative",
}  # fmt: skip
"""vLLM's name -> the argument of LM."""
OTHERS: dict[str, str] = {
    "all2all_backend": unsupported.EXPERT_PARALLEL,
    "api_server_count": "one process serves HTTP; `pymllm-interp cluster MODEL --fronts N` starts several",
    "chat_template_content_format": "templates get the text of a message",
    "compilation_config": "use --option enable_torch_compile=True",
    "cpu_offload_gb": "weights stay on the device: --dtype bfloat16 or --option quantize=fp8 makes them smaller",
    "disable_log_requests": _LOG,
    "disable_log_stats": "/metrics has the counters, and nothing of them is logged",
    "disable_uvicorn_access_log": _LOG,
    "download_dir": "the environment variable HF_HOME says where models are",
    "enable_auto_tool_choice": "--tool-call-parser NAME says how the model writes tool calls, and that they are parsed",
    "enable_chunked_prefill": "long prompts always run in chunks; --option prefill_policy=NAME says beside what",
    "enable_lora": "it is not needed: --lora-modules NAME=FOLDER loads adapters, and --option max_loras=N says how many at a time",
    "enable_log_requests": _LOG,
    "enable_server_load_tracking": "/load is always there",
    "enforce_eager": "use --option disable_cuda_graph=True",
    "headless": "one process serves HTTP, and one the engine",
    "max_logprobs": "at most 64 log probabilities are given, whatever the options",
    "model": "the model is the first argument: pymllm-interp serve MODEL",
    "no_enable_prefix_caching": "use --option enable_prefix_caching=False",
    "revision": "give the folder of a revision: hf download MODEL --revision R prints it",
    "served_model_names": "use --served-model-name",
    "swap_space": "swapped KV takes what host memory it needs",
    "tensor_parallel_size": f"our own engine has no tensor parallelism: {_ONE_DEVICE}; with --engine vllm the option is known",
    "tokenizer": "the tokenizer is the model's: put its files into the model's folder",
    "trust_remote_code": "code of a model's folder is not run: its architecture must be one of transformers'",
    "uvicorn_log_level": _LOG,
}
"""vLLM's name -> alternative."""
SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
}


def hint_of(arguments: Sequence[str]) -> str | None:
    """Advice for the first flag that is vLLM's, or None."""
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        name = SHORT.get(flag, flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else "")
        following = arguments[i + 1] if i + 1 < len(arguments) and not arguments[i + 1].startswith("-") else ""
        if hint := _hint(name, value if equals else following):
            return f"{flag}: {hint}"
    return None


def _hint(name: str, value: str) -> str | None:
    if name in SAME or name in RENAMED:
        return f"here it is --option {RENAMED.get(name, name)}={value or SAME.get(name) or 'VALUE'}"
    return OTHERS.get(name) or unsupported.OPTIONS.get(name)
