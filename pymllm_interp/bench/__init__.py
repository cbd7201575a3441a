"""`pymllm-interp bench`: the CPU suite, which compares with transformers, the GPU suites, and real traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..utils.device import resolve_device
from .common import default_path, describe_machine, random_prompts, write
from .cpu import CpuSettings, run_cpu
from .gpu import GpuSettings, Model, records
from .interventions import interventions_suite
from .memory import memory_suite
from .serving.serving_suite import ServingSettings, serving_records
from .speculative import speculative_suite
from .tables import read_aims, render
from .toolkit import toolkit_suite
from .traces import traces_suite

__all__ = ["describe_machine", "random_prompts", "run_bench"]

SUITES = ("cpu", "decode", "hooks", "all", "interventions", "traces", "toolkit", "memory", "speculative", "serving")
ON_ONE_ENGINE = {
    "interventions": interventions_suite, "traces": traces_suite, "toolkit": toolkit_suite, "memory": memory_suite,
    "speculative": speculative_suite,
}  # fmt: skip
"""Suites with one way of serving and without profiles."""


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
    """Run a suite, print its tables, and write the JSON file; returns its path.

    Args:
        suite: one of `SUITES`; None is "all" on CUDA, else "cpu".
        model: what `LM` takes; a folder with a config.json is enough with load_format="dummy".
        device: what `LM` takes.
        quick: the smallest sizes.
        profile: profile steps, too (suites "decode", "hooks" and "all").
        commit: to note in place of the checkout's, if these files are a copy.
        out: the file; default: `gpu-<model>.json`, `gpu-traces-<model>.json` and so on (`cpu-...` on a CPU), see `default_path`.
        sizes: fields of the suite's settings; None: the default.

    Raises:
        ValueError: an unknown suite, or settings that it does not take.
    """
    on_cuda = resolve_device(device).startswith("cuda")
    suite = suite or ("all" if on_cuda else "cpu")
    if suite not in SUITES:
        raise ValueError(f"suite {suite!r}: expected one of {', '.join(SUITES)}")
    given = {name: value for name, value in sizes.items() if value is not None}
    settings_type = {"cpu": CpuSettings, "serving": ServingSettings}.get(suite, GpuSettings)
    if unknown := given.keys() - settings_type.__dataclass_fields__:
        raise ValueError(f"the suite {suite!r} has no setting {', '.join(sorted(unknown))}")
    machine = describe_machine(commit)  # before the benchmark itself adds to the load average
    if suite == "cpu":
        if profile or device.startswith("cuda"):
            raise ValueError("the suite 'cpu' runs on a CPU and makes no profile: use decode, hooks or all")
        cpu = replace(CpuSettings.quick() if quick else CpuSettings(), **given)
        return run_cpu(model, dtype, load_format, cpu, machine, out)
    named = suite == "serving" or suite in ON_ONE_ENGINE
    if profile and named:
        raise ValueError(f"the suite {suite!r} makes no profile: use decode, hooks or all")
    if suite == "serving":
        serving = replace(ServingSettings.quick() if quick else ServingSettings(), **given)
        growing = serving_records(model, dtype, device, load_format, serving, machine)
    else:
        settings = replace(GpuSettings.quick() if quick else GpuSettings(), **given)
        measured = Model(model=model, dtype=dtype, device=device, load_format=load_format, settings=settings)
        growing = _growing(suite, measured, machine, profile)
    path, record, console = out, {}, Console(stderr=True)
    for record in growing:
        name = [*(["gpu"] if on_cuda else ["cpu"]), *([suite] if named else []), Path(record["model"]).name]
        path = path or default_path(f"{'-'.join(name)}.json")
        write(record, path)
        for row in (record.get("rows") or record["hooks"])[-1:]:
            short = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
            console.log("measured", str(short), markup=False)
    assert path is not None
    console = Console()
    console.print(render(record, read_aims(Path(model))), markup=False, soft_wrap=True)
    console.print(f"Written: {path}")
    return path


def _growing(suite: str, model: Model, machine: dict[str, Any], profile: bool) -> Iterator[dict[str, Any]]:
    """The record of a run after each part, so that results are kept if a later part fails."""
    if suite not in ON_ONE_ENGINE:
        yield from records(suite, model, machine, profile)
        return
    record = {"suite": suite, "load_format": model.load_format, "machine": machine, "settings": asdict(model.settings)}
    yield from (record | found for found in ON_ONE_ENGINE[suite](model))
