"""Real traffic: the suite "serving". Workloads on our engine, one `LM` for each scheduling policy, and on vLLM beside it.

A workload's name may end in "-steered" or "-traced". Such a run has the plain workload's lengths and arrivals. Its result is
compared with the plain run on the same engine. "steered": each request adds a vector of its own at eight layers. "traced": each
tenth request has a block that reads one layer at each step. Latencies are measured on the other requests.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from pymllm_interp.bench.suites import facts
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.hooks.interventions.op import Op
from pymllm_interp.hooks.interventions.specs import Steer
from pymllm_interp.lm import LM
from pymllm_interp.models.weights.source import resolve_model

from ..common import eighths
from ..own_engine import OurEngine
from .peers import VllmEngine, check_vllm
from .traffic import ServingEngine, ServingResult, measure
from .workloads import LONG_NEW_TOKENS, SHORTEST, Sizes, Workload, interference, long, make_workload

STEERED, TRACED = "steered", "traced"
TRACED_EVERY = 10
"""One request of so many is traced."""
WARM_REQUESTS, WARM_TOKENS = 8, 16
DEFAULT = (
    "mix", "mix-steered", "long", "poisson-10", "poisson-10-steered", "poisson-10-traced", "poisson-25", "poisson-25-steered",
    "poisson-25-traced", "shared-prefix", "multi-turn", "interference",
)  # fmt: skip
SHARING = ("shared-prefix", "multi-turn")
"""Workloads that peers run with their prefix cache on."""
ENGINES = ("ours", "vllm", "both")


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What is measured, and on which engines."""

    workloads: tuple[str, ...] = DEFAULT
    policies: tuple[str, ...] = ()
    """`prefill_policy` of each of our engines; empty: one engine with the default, or with that of `options`."""
    engine: str = "ours"
    scale: float = 1.0
    """Fraction of the requests, or of the duration, of each workload."""
    repeats: int = 3
    """Pairs of runs of "long"; medians count."""
    longest: int | None = None
    """Tokens of a request at most; None: as the model allows."""
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `LM`."""
    vllm_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""

    @classmethod
    def quick(cls) -> ServingSettings:
        """The smallest sizes."""
        return cls(scale=0.02, repeats=1, longest=24)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine {self.engine!r}: expected one of {', '.join(ENGINES)}")
        sizes = Sizes(vocab_size=1, longest=self.longest or 2 * SHORTEST, scale=self.scale)
        for name in self.workloads:
            make_workload(_split(name)[0], sizes)

    def sizes(self, engine: ServingEngine, run: int) -> Sizes:
        """Of the workloads for an engine."""
        longest = min(engine.max_model_len, self.longest or engine.max_model_len)
        return Sizes(vocab_size=engine.vocab_size, longest=longest, scale=self.scale, seed=self.seed, run=run)


def serving_records(
    model: str, dtype: str, device: str, load_format: str, settings: ServingSettings, machine: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The record of a run, as it grows by a workload.

    Args:
        model, dtype, device, load_format: what `LM` takes.
        machine: see `describe_machine`.

    Raises:
        ImportError: vLLM is asked for, and is not installed.
    """
    if settings.engine != "ours":
        check_vllm()
    source = resolve_model(ModelConfig(model=model, load_format=load_format))
    record: dict[str, Any] = {
        "suite": "serving", "load_format": load_format, "machine": machine, "settings": asdict(settings),
        "model": source.name, "dtype": dtype, "device": device, "rows": [],
    }  # fmt: skip
    rows: list[dict[str, Any]] = record["rows"]
    if settings.engine != "vllm":
        for policy in settings.policies or (None,):
            options: dict[str, Any] = {**settings.options}
            if policy is not None:
                options["prefill_policy"] = policy
            with LM(model, dtype=dtype, device=device, load_format=load_format, **with_tuning(**options)) as lm:
                record |= facts(lm) | {"limits": asdict(lm.limits)}
                for row in _on_ours(lm, settings):
                    rows.append({"policy": options.get("prefill_policy", ServerConfig.prefill_policy), **row})
                    yield record
            del lm
            _free()
    if settings.engine != "ours":
        for row in _on_vllm(str(source.folder or model), record["dtype"], load_format, settings):
            rows.append({"policy": None, **row})
            yield record


def _split(name: str) -> tuple[str, str | None]:
    """(the plain workload, the variant) of a name."""
    for variant in (STEERED, TRACED):
        if name.endswith(f"-{variant}"):
            return name.removesuffix(f"-{variant}"), variant
    return name, None


def _on_ours(lm: LM, settings: ServingSettings) -> Iterator[dict[str, Any]]:
    layers = eighths(lm.num_layers)

    def steered(workload: Workload) -> OurEngine:
        return OurEngine(lm, interventions=[_steers(lm, layers, i) for i in range(len(workload.prompts))])

    def traced(workload: Workload) -> OurEngine:
        chosen = range(1, len(workload.prompts), TRACED_EVERY)
        return OurEngine(lm, traced={index: layers[i % len(layers)] for i, index in enumerate(chosen)})

    engines: dict[str | None, Callable[[Workload], OurEngine]] = {
        None: lambda workload: OurEngine(lm), STEERED: steered, TRACED: traced,
    }  # fmt: skip
    plain: dict[str, ServingResult] = {}
    for run, name in enumerate(_with_plain(settings.workloads)):
        kind, variant = _split(name)
        row, result = measure_workload(engines[variant], OurEngine(lm), kind, settings, 1000 * run)
        if variant is None:
            plain[name] = result
        else:
            row["against_plain"] = _ratios(result, plain[kind])
        yield row | {"workload": kind, "variant": variant}


def _steers(lm: LM, layers: list[int], index: int) -> list[Op]:
    """A weak vector of the request's own: the cost does not depend on its strength."""
    vector = torch.randn(lm.hidden_size, generator=torch.Generator().manual_seed(index))
    return [Steer(f"resid_post.{layer}", vector, scale=1e-3) for layer in layers]


def _on_vllm(model: str, dtype: str, load_format: str, settings: ServingSettings) -> Iterator[dict[str, Any]]:
    """The plain workloads. Those with a shared prefix run on an engine with prefix cache."""
    names = [name for name in settings.workloads if _split(name)[1] is None]
    for cached in (False, True):
        chosen = [name for name in names if (name in SHARING) == cached]
        if not chosen:
            continue
        engine = VllmEngine(model, dtype, load_format, **{"enable_prefix_caching": cached, **settings.vllm_options})
        try:
            for run, name in enumerate(chosen):
                row, _ = measure_workload(lambda _, engine=engine: engine, engine, name, settings, 1000 * run)
                yield row | {"workload": name, "variant": None}
        finally:
            engine.shutdown()


def _with_plain(names: tuple[str, ...]) -> list[str]:
    """The names, each variant after its plain workload."""
    found: dict[str, None] = {}
    for name in names:
        found |= {_split(name)[0]: None, name: None}
    return list(found)


def measure_workload(
    engine_for: Callable[[Workload], ServingEngine],
    engine: ServingEngine,
    name: str,
    settings: ServingSettings,
    run: int,
) -> tuple[dict[str, Any], ServingResult]:
    """Warm up, and run a workload: (its row, its result).

    "long" runs in pairs of many and of few new tokens; "interference" once more without its long prompts.

    Args:
        engine_for: the engine for the workload, as it is made for each.
        run: the first number of the runs (`Sizes.run`).
    """
    warm = make_workload(name, settings.sizes(engine, run)).head(WARM_REQUESTS, WARM_TOKENS)
    measure(engine_for(warm), warm)
    if name != "long":
        workload = make_workload(name, settings.sizes(engine, run + 1))
        result = measure(engine_for(workload), workload)
        row = {"engine": engine.name, **result.record()}
        if name == "interference":
            alone = interference(settings.sizes(engine, run + 2), prompts=False)
            row["against_alone"] = _ratios(result, measure(engine_for(alone), alone))
        return row, result
    pairs: list[list[ServingResult]] = []
    for pair in range(settings.repeats):
        sizes = settings.sizes(engine, run + 1 + pair)
        pairs.append([])
        for i, new_tokens in enumerate(LONG_NEW_TOKENS):
            workload = long(replace(sizes, run=sizes.run + i * settings.repeats), new_tokens)
            pairs[-1].append(measure(engine_for(workload), workload))
    steps = [
        (many.seconds - few.seconds) / ((many.new_tokens - few.new_tokens) / many.requests) * 1e3 for many, few in pairs
    ]
    result = pairs[-1][0]
    return {
        "engine": engine.name,
        **result.record(),
        "step_ms": statistics.median(steps),
        "step_ms_runs": steps,
    }, result


def _ratios(result: ServingResult, plain: ServingResult) -> dict[str, Any]:
    """`result` over `plain`: throughput and latencies."""
    found: dict[str, Any] = {"tokens_per_s": result.tokens_per_s / plain.tokens_per_s}
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        pairs = zip(getattr(result, name), getattr(plain, name), strict=True)
        found[name] = dict(zip(("p50", "p90", "p99"), (own / other for own, other in pairs), strict=True))
    return found


def _free() -> None:
    """Release the memory of an engine that was shut down."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
