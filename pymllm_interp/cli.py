"""The command line: `pymllm-interp demo | generate | serve | bench | doctor | cache`. Each command imports only its needs."""

from __future__ import annotations

import argparse
import ast
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

from . import __version__
from .server.command import hint_of
from .utils.busy_cores import share_cores
from .utils.extras import install_command

SERVE_LIMITS: dict[str, tuple[type, float]] = {
    "max_body_bytes": (int, 64 << 20), "max_trace_bytes": (int, 64 << 20), "max_concurrent": (int, 256), "max_traces": (int, 32),
    "max_circuits": (int, 1), "max_circuit_tokens": (int, 2048), "max_circuit_features": (int, 4096),
    "max_circuit_bytes": (int, 2048 << 20), "circuit_timeout": (float, 600.0),
    "max_prompts": (int, 1024), "max_vectors": (int, 256), "max_vector_bytes": (int, 64 << 20), "inline_bytes": (int, 256 << 10),
    "max_store_bytes": (int, 4 << 30), "max_store_bytes_per_key": (int, 2 << 30),
    "max_responses": (int, 1024), "max_response_bytes": (int, 512 << 20), "max_response_bytes_per_key": (int, 64 << 20),
    "response_seconds": (float, 86400.0), "store_seconds": (float, 300.0), "trace_timeout": (float, 600.0),
    "max_queued_bytes": (int, 256 << 20), "max_connections": (int, 2048), "idle_seconds": (float, 30.0),
    "order_seconds": (float, 120.0),
    "engine_message_seconds": (float, 60.0), "engine_step_seconds": (float, 300.0), "engine_start_seconds": (float, 300.0),
    "replica_silence_seconds": (float, 10.0),
    "max_image_bytes": (int, 16 << 20), "max_audio_bytes": (int, 25 << 20), "image_fetch_seconds": (float, 5.0),
    "header_seconds": (float, 10.0), "max_header_bytes": (int, 64 << 10),
}  # fmt: skip
"""Limits of a server -> type and default, as in server/settings.py, which is not imported for --help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, or 2 with one line on stderr if it cannot be done."""
    share_cores()
    warnings.filterwarnings("default", "pymllm-interp 0.2 removes", DeprecationWarning)
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    try:
        if getattr(args, "config_file", None) is not None:
            from .server.command import read_config

            read_config(args.config_file, args.parser)
            args, unknown = parser.parse_known_args(argv)
        if unknown:
            if args.command in ("serve", "cluster") and (hint := hint_of(unknown)):
                raise ValueError(hint)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return args.run(args)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"pymllm-interp {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="pymllm-interp", description="An LLM serving runtime that a researcher can reach into."
    )
    parser.add_argument("--version", action="version", version=f"pymllm-interp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="plain prompts, a logit lens and a steered request on one engine")
    _add_model(demo)
    demo.add_argument(
        "--out", type=Path, default=Path("demo_out"), help="folder for the heatmap (default: %(default)s)"
    )
    demo.add_argument("--max-tokens", type=_count, default=40, help="new tokens of each request (default: %(default)s)")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="continue one prompt, or several at once")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    _add_model(generate)
    generate.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    generate.add_argument("--max-tokens", type=_count, default=64, help="new tokens at most (default: %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=None, help="of the sampling noise")
    generate.set_defaults(run=_generate)

    serve = commands.add_parser("serve", help="serve a model over HTTP: OpenAI's API, interventions, captures, traces")
    _add_serve(serve)
    serve.set_defaults(run=_serve)

    cluster = commands.add_parser(
        "cluster",
        help="serve a model by several replicas on a Ray cluster; status, scale N, drain REPLICA, restart, stop",
    )
    _add_cluster(cluster)
    cluster.set_defaults(run=_cluster)

    bench = commands.add_parser("bench", help="speed of plain decoding, and what reading layers costs a step")
    _add_model(bench)
    _add_bench(bench)
    bench.set_defaults(run=_bench)

    doctor = commands.add_parser("doctor", help="what is installed, what is missing, and how a model would run")
    doctor.add_argument(
        "model", nargs="?", help="a folder, a .gguf file or a hub id; its config is read, not its weights"
    )
    doctor.add_argument("--engine", choices=["own", "vllm"], default="own", help="(default: %(default)s)")
    doctor.set_defaults(run=_doctor)

    cache = commands.add_parser("cache", help="converted models and compiled kernels of this machine: list, clean")
    cache.add_argument("action", choices=["list", "clean"])
    cache.add_argument("names", nargs="*", metavar="NAME", help="entries to remove, as listed")
    cache.add_argument("--all", action="store_true", help="remove all")
    cache.set_defaults(run=_cache)
    return parser


def _add_cluster(cluster: argparse.ArgumentParser) -> None:
    cluster.add_argument(
        "model",
        help="demo, a folder that all nodes have, or a hub id; or of a cluster that runs: status, scale, drain, restart or stop",
    )
    cluster.add_argument("argument", nargs="?", help="of scale: the number of replicas; of drain: the replica")
    cluster.add_argument(
        "--name", default="pymllm", help="of the cluster, as in LM.connect('ray:NAME') (default: %(default)s)"
    )
    cluster.add_argument(
        "--address", default="auto", help="of the Ray cluster (default: that of this machine, or of RAY_ADDRESS)"
    )
    cluster.add_argument("--replicas", type=int, default=1, metavar="R", help="(default: %(default)s)")
    cluster.add_argument(
        "--fronts", type=int, default=1, metavar="F",
        help="HTTP processes, on ports from --port on; one ends near 11,000 tokens a second (default: %(default)s)",
    )  # fmt: skip
    cluster.add_argument("--replica-cpus", type=float, default=1.0, metavar="N", help="(default: %(default)s)")
    cluster.add_argument(
        "--replica-gpus",
        type=float,
        default=None,
        metavar="N",
        help="(default: 1, if the Ray cluster has as many GPUs)",
    )
    _add_serve_options(cluster)


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "model", nargs="?", default="demo", help="demo, a folder, a .gguf file or a hub id (default: demo)"
    )
    serve.add_argument("--uds", type=Path, metavar="PATH", help="listen on this Unix socket, not on --host and --port")
    _add_serve_options(serve)


def _add_serve_options(serve: argparse.ArgumentParser) -> None:
    serve.set_defaults(parser=serve)
    serve.add_argument(
        "--config", type=Path, dest="config_file", metavar="FILE",
        help="YAML with long options as keys, and `model`; the command line wins",
    )  # fmt: skip
    serve.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (default: %(default)s)")
    serve.add_argument("--device", default="auto", help="cpu, cuda or auto (default: %(default)s)")
    serve.add_argument(
        "--batch-invariant", action="store_true", help="equal bits in any company (docs/batch-invariance.md)"
    )
    serve.add_argument("--served-model-name", default=None, metavar="NAME", help="the model's name for clients")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    serve.add_argument("--port", type=int, default=8000, help="0 takes any free port (default: %(default)s)")
    serve.add_argument("--keys", type=Path, metavar="FILE", help="API keys: lines 'name key [plain | declared]'")
    serve.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="a key without a name, with the right 'declared'; repeatable. PYMLLM_INTERP_API_KEY gives one that other users of "
        "this machine do not see",
    )  # fmt: skip
    serve.add_argument(
        "--allow-code-from", action="append", metavar="NAME",
        help="the key of this name may send traces, which are arbitrary code; repeatable. Without --keys: 'anybody', if the "
        "server listens on this machine alone (docs/reference/security.md)",
    )  # fmt: skip
    serve.add_argument(
        "--operator", action="append", metavar="NAME",
        help="the key of this name may do what all clients feel, such as emptying the prefix cache; repeatable. Without --keys: "
        "clients on this machine",
    )  # fmt: skip
    serve.add_argument(
        "--shared-prefix-cache", action="store_true",
        help="keys share the KV of equal prompts, and can tell by cached_tokens and by times what others asked",
    )  # fmt: skip
    serve.add_argument("--store", type=Path, metavar="FOLDER", help="for captured states that wait to be fetched")
    serve.add_argument(
        "--on-engine-exit", choices=["restart", "exit"], default="restart", help="(default: %(default)s)"
    )
    serve.add_argument(
        "--drain-seconds", type=float, default=30.0, help="for running requests after SIGTERM (default: %(default)s)"
    )
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    serve.add_argument(
        "--log-format", choices=["json", "text"], default="json", help="of all processes (default: %(default)s)"
    )
    serve.add_argument(
        "--option", type=_option, action="append", metavar="NAME=VALUE",
        help="argument of LM, such as max_model_len; repeatable",
    )  # fmt: skip
    _add_vllm(serve.add_argument_group("vLLM as the engine (docs/engine/vllm.md)"))
    serve.add_argument(
        "--lora-modules", type=_named_path, nargs="+", action="extend", metavar="NAME=FOLDER",
        help="LoRA adapters to load; each is a model's name for clients; repeatable",
    )  # fmt: skip
    serve.add_argument(
        "--sae", type=_named_path, action="append", metavar="NAME=PATH",
        help="a sparse autoencoder that captures may name, a file or folder of SAE.load; repeatable",
    )  # fmt: skip
    serve.add_argument(
        "--monitor", type=Path, metavar="FILE",
        help="monitors of all requests: a list in JSON or YAML, each with a name (docs/reference/http.md)",
    )  # fmt: skip
    serve.add_argument("--monitor-visible", action="store_true", help="clients see these monitors, and their scores")
    serve.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="send a span for each request there, by OTLP over HTTP, such as http://localhost:4318/v1/traces (extra otel)",
    )  # fmt: skip
    serve.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template in place of the model's")
    serve.add_argument(
        "--tool-call-parser", metavar="NAME",
        help="how the model writes tool calls, which are parsed: hermes (Qwen's, too), llama3_json, mistral, openai (gpt-oss)",
    )  # fmt: skip
    serve.add_argument(
        "--reasoning-parser", metavar="NAME", help="split reasoning off: qwen3, deepseek_r1 (<think>), openai_gptoss"
    )
    _add_http(serve.add_argument_group("HTTP and images, with vLLM's names"))
    limits = serve.add_argument_group("limits, each answered with a 4xx (docs/reference/http.md)")
    for name, (kind, default) in SERVE_LIMITS.items():
        option = f"--{name.replace('_', '-')}"
        limits.add_argument(option, dest=name, type=kind, default=default, metavar="N", help=f"(default: {default})")


def _add_vllm(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engine", choices=["own", "vllm"], default="own", help="(default: %(default)s)")
    group.add_argument("--tensor-parallel-size", type=_count, default=None, metavar="N", help="ranks of vLLM")
    group.add_argument(
        "--distributed-executor-backend", choices=["mp", "ray"], default=None, help="how vLLM starts its ranks"
    )
    group.add_argument(
        "--vllm-option", type=_option, action="append", metavar="NAME=VALUE", help="argument of vLLM's; repeatable"
    )


def _add_http(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--limit-mm-per-prompt",
        type=json.loads,
        metavar="JSON",
        help="most images of a prompt: '{\"image\": 4}' (default: 256)",
    )
    group.add_argument(
        "--allowed-media-domains", nargs="+", action="extend", metavar="HOST",
        help="hosts of the public web that images are fetched from; *: all (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--allowed-local-media-path",
        type=Path,
        metavar="FOLDER",
        help="folder with images that requests may name by file: URLs",
    )

    for name, what in (
        ("--ssl-keyfile", "private key of --ssl-certfile"),
        ("--ssl-certfile", "certificate: clients use https"),
        ("--ssl-ca-certs", "certificates that clients' are checked against"),
    ):
        group.add_argument(name, type=Path, metavar="FILE", help=what)
    group.add_argument(
        "--ssl-cert-reqs", type=int, choices=[0, 1, 2], default=0, help="2: clients need a certificate (default: 0)"
    )
    for name, default, what in (
        ("--allowed-origins", (), "origins whose web pages may use the server (CORS; default: none)"),
        ("--allowed-methods", ("*",), "their methods (default: all)"),
        ("--allowed-headers", ("*",), "their headers (default: all)"),
    ):
        group.add_argument(name, type=_strings, default=default, metavar="JSON", help=f"{what}: '[\"https://...\"]'")
    group.add_argument("--allow-credentials", action="store_true", help="they may send cookies and the like")
    group.add_argument("--root-path", default="", metavar="PATH", help="where a proxy serves this server, such as /llm")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--suite", choices=["decode", "hooks", "all"], default="all",
        help="decode: plain serving, on a CPU beside transformers; hooks: a request that reads beside plain ones, in each mode "
        "(default: all)",
    )  # fmt: skip
    bench.add_argument("--device", default="auto", help="cpu, cuda or auto (default: %(default)s)")
    bench.add_argument("--config", metavar="FOLDER", help="folder with a config.json, in place of --model")
    bench.add_argument("--load-format", default=None, help="dummy: random weights (with --config: the default)")
    bench.add_argument("--batches", type=_count, nargs="+", default=None, metavar="N", help="batch sizes")
    for name, what in (("prompt-tokens", "of a prompt"), ("new-tokens", "of a request"), ("repeats", "runs of each")):
        bench.add_argument(f"--{name}", type=_count, default=None, metavar="N", help=what)
    bench.add_argument("--commit", default=None, help="what to note in place of the checkout's own")
    bench.add_argument("--out", type=Path, default=None, metavar="FILE", help="where the JSON goes")
    bench.add_argument("--quick", action="store_true", help="a few tokens: shows that it runs, measures nothing")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="demo", help="demo, a folder, a .gguf file or a hub id (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (default: %(default)s)")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is expected")
    return value


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (equals and name and path):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PATH")
    return name, path


def _strings(text: str) -> tuple[str, ...]:
    """A JSON list of strings."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(value, str) for value in found):
        raise argparse.ArgumentTypeError(f"""{text!r}: expected a JSON list of strings, such as '["*"]'""")
    return tuple(found)


def _option(text: str) -> tuple[str, Any]:
    """A name and its value, which is a Python literal or a string."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _demo(args: argparse.Namespace) -> int:
    from .demo import run_demo

    run_demo(model=args.model, dtype=args.dtype, out=args.out, max_tokens=args.max_tokens)
    return 0


def _generate(args: argparse.Namespace) -> int:
    from .core.sampling_params import SamplingParams
    from .lm import LM

    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens, seed=args.seed
    )  # before the model is loaded: a bad value is reported at once
    with LM(args.model, dtype=args.dtype) as lm:
        prompts = [[{"role": "user", "content": text}] for text in args.prompts] if args.chat else args.prompts
        if len(prompts) == 1:
            for piece in lm.stream(prompts[0], params):
                print(piece, end="", flush=True)
            print()
            return 0
        for text, output in zip(args.prompts, lm.generate(prompts, params), strict=True):
            print(f">>> {text}\n{output.text}\n")
    return 0


def _serve(args: argparse.Namespace) -> int:
    try:
        from .server.command import settings_of
        from .server.serve import run
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}; {_remedy(error)}") from error
    return run(settings_of(args))


def _cluster(args: argparse.Namespace) -> int:
    try:
        from .cluster.command import run_cluster
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}; {_remedy(error)}") from error
    return run_cluster(args)


def _remedy(error: ModuleNotFoundError) -> str:
    """Extra to install after a failed import of the server; or the packages that one of its packages lacks."""
    frames = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    importer = next((name for name in reversed(frames) if name and name != "importlib"), "")
    if importer in ("", "pymllm_interp"):
        return f"the server needs more packages: {install_command('serve')}"
    return f"the installed {importer} needs it: install what `pip check` reports, or another version of {importer}"


def _bench(args: argparse.Namespace) -> int:
    from .bench import run_bench

    run_bench(
        args.suite, args.config or args.model, args.dtype, args.load_format or ("dummy" if args.config else "auto"),
        device=args.device, quick=args.quick, commit=args.commit, out=args.out, repeats=args.repeats,
        batches=tuple(args.batches) if args.batches else None, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens,
    )  # fmt: skip
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import run_doctor

    return run_doctor(args.model, args.engine)


def _cache(args: argparse.Namespace) -> int:
    from .cache_cli import run_cache

    return run_cache(args.action, args.names, args.all)


if __name__ == "__main__":
    sys.exit(main())
