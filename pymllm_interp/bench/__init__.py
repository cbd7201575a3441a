"""`pymllm-interp bench`: decode steps, on a CPU beside transformers, and the cost of a request that reads layers.

Other measurements, such as captures, drafts and traffic, are in the scripts of the repository's benchmarks/ folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..utils.device import resolve_device
from .common import default_path, describe_machine, random_prompts, write
from .suites import BenchSettings, Model, records
from .tables import Report

__all__ = ["describe_machine", "random_prompts", "run_bench"]

SUITES = ("decode", "hooks", "all")
Record = dict[str, Any]


def run_bench(
    suite: str,
    model: str,
    dtype: str,
    load_format: str,
    *,
    device: str = "auto",
    quick: bool = False,
    commit: str | None = None,
    out: Path | None = None,
    **sizes: Any,
) -> Path:
    """Run a suite, print its tables, and write the JSON file; returns its path.

    Args:
        suite: name in `SUITES`.
        model: model argument of `LM`. A folder with a config.json suffices with load_format="dummy".
        device: device argument of `LM`.
        quick: the smallest sizes.
        commit: commit to record instead of the checkout's, if these files are a copy.
        out: the file; default: `gpu-<model>.json`, or `cpu-<model>.json` on a CPU, see `default_path`.
        sizes: fields of `BenchSettings`; None: the default.

    Raises:
        ValueError: an unknown suite, or sizes that cannot be measured.
    """
    if suite not in SUITES:
        raise ValueError(f"suite {suite!r}: expected one of {', '.join(SUITES)}")
    on_cuda = resolve_device(device).startswith("cuda")
    machine = describe_machine(commit)  # before the benchmark itself adds to the load average
    settings = BenchSettings.of(on_cuda, quick, **{name: value for name, value in sizes.items() if value is not None})
    measured = Model(model=model, dtype=dtype, device=device, load_format=load_format, settings=settings)
    return keep(
        records(suite, measured, machine), "gpu" if on_cuda else "cpu", out, lambda found: Report(found).lines()
    )


def keep(growing: Iterator[Record], name: str, out: Path | None, lines: Callable[[Record], list[str]]) -> Path:
    """Write a record after each part, so that results are kept if a later part fails, and print its tables.

    Args:
        growing: the same record, with more in it each time.
        name: first part of the default file name; the model's name follows.
        lines: the tables of a record.
    """
    path, record, console = out, {}, Console(stderr=True)
    for record in growing:
        path = path or default_path(f"{name}-{Path(record['model']).name}.json")
        write(record, path)
        for row in (record.get("rows") or record.get("hooks") or record.get("decode") or [])[-1:]:
            short = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
            console.log("measured", str(short), markup=False)
    assert path is not None
    console = Console()
    console.print("\n".join(lines(record)), markup=False, soft_wrap=True)
    console.print(f"Written: {path}")
    return path
