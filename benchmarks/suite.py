"""What one engine's steps, memory, start and traffic cost, suite by suite; decode steps and hooks are `pymllm-interp bench`.

    python benchmarks/suite.py interventions --config benchmarks/configs/llama8b --dtype bfloat16
    python benchmarks/suite.py serving --config benchmarks/configs/llama8b --dtype bfloat16 --engine both

- interventions, toolkit, traces: steps in which every request steers, captures, reads features or has a block, against plain ones.
- memory: what 10,000 requests leave behind. startup: import and start in a fresh process.
- speculative: drafts against none. profile: kernels of decode steps.
- serving: workloads with arrival times, of this engine and of vLLM where it is installed.

Tables have the aims beside them, if the config's folder has an aims.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from suites import SUITES, growing_record
from suites.serving.suite import ENGINES, ServingSettings, serving_records
from suites.tables import read_aims, render

from pymllm_interp.bench import describe_machine, keep
from pymllm_interp.bench.suites import BenchSettings, Model
from pymllm_interp.utils.device import resolve_device


def option(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value as JSON where it is some."""
    name, equals, value = text.partition("=")
    if not (equals and name):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=[*SUITES, "serving"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--config", help="a folder with a config.json, for random weights")
    parser.add_argument("--load-format")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes: shows that it runs, measures nothing")
    parser.add_argument("--commit", help="to note in place of the checkout's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int)
    sizes = parser.add_argument_group("all suites but serving")
    sizes.add_argument("--batches", type=int, nargs="+")
    sizes.add_argument("--prompt-tokens", type=int)
    sizes.add_argument("--new-tokens", type=int)
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="see `suites/serving/workloads.py`; NAME-steered, NAME-traced"
    )
    serving.add_argument("--policies", nargs="+", metavar="POLICY", help="prefill_policy of each engine")
    serving.add_argument("--engine", choices=ENGINES)
    serving.add_argument("--scale", type=float, help="fraction of the requests, or of the duration")
    serving.add_argument("--longest", type=int, help="tokens of a request at most")
    serving.add_argument("--options", type=option, action="append", metavar="NAME=VALUE", help="of LM; repeatable")
    serving.add_argument("--vllm-options", type=option, action="append", metavar="NAME=VALUE", help="of vllm.LLM")
    return parser


def run(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write the record.

    Raises:
        ValueError: a setting that the suite does not take.
    """
    model, load_format = args.config or args.model, args.load_format or ("dummy" if args.config else "auto")
    names = ("repeats", "batches", "prompt_tokens", "new_tokens", "workloads", "policies", "engine", "scale", "longest")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    given |= {name: dict(value) for name in ("options", "vllm_options") if (value := getattr(args, name))}
    kind = ServingSettings if args.suite == "serving" else BenchSettings
    if unknown := given.keys() - kind.__dataclass_fields__:
        raise ValueError(f"the suite {args.suite!r} has no setting {', '.join(sorted(unknown))}")
    machine, device = describe_machine(args.commit), resolve_device(args.device)
    if args.suite == "serving":
        settings = replace(ServingSettings.quick() if args.quick else ServingSettings(), **given)
        growing = serving_records(model, args.dtype, args.device, load_format, settings, machine)
    else:
        sizes = BenchSettings.of(True, args.quick, **given)
        measured = Model(model=model, dtype=args.dtype, device=args.device, load_format=load_format, settings=sizes)
        growing = growing_record(args.suite, measured, machine)
    name = "profiles" if args.suite == "profile" else f"{device.partition(':')[0].replace('cuda', 'gpu')}-{args.suite}"
    aims = read_aims(Path(model))
    keep(growing, name, args.out, lambda record: [render(record, aims)])


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with a line on standard error."""
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
