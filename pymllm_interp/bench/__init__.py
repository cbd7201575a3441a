"""`pymllm-interp bench`: the CPU suite, beside transformers; the GPU suites; the tables of their results."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import resolve_device
from .common import default_path, describe_machine, random_prompts, write
from .cpu import CpuSettings, run_cpu
from .gpu import GpuSettings, Model, records
from .interventions import interventions_suite
from .report import read_aims, render, update_page
from .traces import traces_suite

__all__ = ["describe_machine", "random_prompts", "run_bench", "update_page"]

SUITES = ("cpu", "decode", "hooks", "all", "interventions", "traces")
AGAINST_PLAIN = {"interventions": interventions_suite, "traces": traces_suite}
"""Suites whose numbers are ratios to plain steps of the same engine."""


def run_bench(
    suite: str | None,
    model: str,
    dtype: str,
    load_format: str,
    *,
    device: str = "auto",
    quick: bool = False,
    profile: bool = False,
    commit: str | None = None,
    out: Path | None = None,
    **sizes: Any,
) -> Path:
    """Measure, print, and write the JSON file; returns its path.

    Args:
        suite: one of `SUITES`; None is "all" on CUDA, else "cpu".
        model: what `LM` takes; a folder with a config.json is enough with load_format="dummy".
        device: what `LM` takes; "cpu" measures there alone.
        quick: as small as it gets.
        profile: say where the time of steps goes, too (not "cpu").
        commit: what to note where this is not a git checkout.
        out: the file; by default `gpu-<model>.json` or `cpu-<model>...json`, see `default_path`.
        sizes: fields of the suite's settings; None leaves them as they are.

    Raises:
        ValueError: no such suite, or settings that do not fit it.
    """
    on_cuda = resolve_device(device).startswith("cuda")
    suite = suite or ("all" if on_cuda else "cpu")
    if suite not in SUITES:
        raise ValueError(f"suite {suite!r}: expected one of {', '.join(SUITES)}")
    given = {name: value for name, value in sizes.items() if value is not None}
    machine = describe_machine(commit)  # before anything runs: the load of others
    if suite == "cpu":
        if profile or device.startswith("cuda"):
            raise ValueError("the suite 'cpu' runs on a CPU and makes no profile: use decode, hooks or all")
        cpu = replace(CpuSettings.quick() if quick else CpuSettings(), **given)
        return run_cpu(model, dtype, load_format, cpu, machine, out)
    settings = replace(GpuSettings.quick() if quick else GpuSettings(), **given)
    measured = Model(model=model, dtype=dtype, device=device, load_format=load_format, settings=settings)
    if suite in AGAINST_PLAIN:
        record = {"suite": suite, "load_format": load_format, "machine": machine, "settings": asdict(settings)}
        record |= AGAINST_PLAIN[suite](measured)
        kind = "gpu-" if on_cuda else ""
        path = out or default_path(f"{kind}{suite}-{Path(record['model']).name}.json")
        write(record, path)
        Console().print(render(record, read_aims(Path(model))), markup=False, soft_wrap=True)
        return path
    path, record = out, {}
    for record in records(suite, measured, machine, profile):
        path = path or default_path(f"{'gpu' if on_cuda else 'cpu'}-{Path(record['model']).name}.json")
        write(record, path)
    assert path is not None
    console = Console()
    console.print(render(record, read_aims(Path(model))), markup=False, soft_wrap=True)
    console.print(f"Written: {path}")
    return path
