"""What traces cost a decode step: the suite "traces".

Requests of a batch read or edit layers at every step, in one ``with`` block with an invoke for each. The other requests are plain.
See `compare`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from pymllm_interp import LM
from pymllm_interp.bench.common import Prompts, generate, greedy, random_prompts, timed
from pymllm_interp.bench.suites import BenchSettings, Model, facts

from .common import compare, eighths

PAIRS, NEW_TOKENS = 3, 100
SWEEP, SWEEP_TOKENS = 1024, 32
"""Invokes of one trace, and tokens of each prompt."""


MODES = {"auto": "", "off": ", in the passes"}
"""Values of `lower_traces`, and what their cases' names end in."""


class Case(NamedTuple):
    """What the blocks do at each step."""

    name: str
    layers: list[int]
    everyone: bool = True
    """Trace every request of the batch; else the first one."""
    edits: bool = False
    """Edit the output of each layer; else save it."""


def traces_suite(model: Model) -> Iterator[dict[str, Any]]:
    """Steps with traces against plain ones, by case and batch size, and a sweep over many prompts. Yields the growing record.

    First with blocks lowered where they can be, the default; then in the passes.
    """
    found: dict[str, Any] = {"pairs": PAIRS, "new_tokens": NEW_TOKENS, "rows": []}
    for mode, suffix in MODES.items():
        with model.load(lower_traces=mode) as lm:
            found |= facts(lm)
            for case in cases(lm.num_layers):
                for batch in model.settings.batches:
                    row = {"case": case.name + suffix, "batch": batch, **measure(lm, case, batch, model.settings)}
                    found["rows"].append(row)
                    found |= {name: lm.engine.stats()[name] for name in ("segments", "prompt_segments", "execution")}
                    yield found
            found[f"sweep{suffix}"] = measure_sweep(lm, model.settings)
            yield found


def cases(depth: int) -> list[Case]:
    """The cases for a model of `depth` layers."""
    middle = depth // 2
    eight = eighths(depth)
    return [
        Case("one request reads one layer", [middle], everyone=False),
        Case("every request reads one layer", [middle]),
        Case(f"every request reads {len(eight)} layers", eight),
        Case("every request edits one layer", [middle], edits=True),
    ]


def measure(lm: LM, case: Case, batch: int, settings: BenchSettings) -> dict[str, Any]:
    """A step of a case against a plain one."""
    prompts = random_prompts(lm, batch, settings.prompt_tokens)

    def traced(tokens: int) -> None:
        generate_traced(lm, prompts, batch if case.everyone else 1, case.layers, tokens, case.edits)

    return compare(partial(generate, lm, prompts), traced, min(NEW_TOKENS, settings.new_tokens), PAIRS)


def measure_sweep(lm: LM, settings: BenchSettings) -> dict[str, float]:
    """Seconds of one trace with many invokes that each save a layer, against plain generation for each prompt."""
    count, tokens = (SWEEP, SWEEP_TOKENS) if settings.repeats > 1 else (8, 4)
    prompts, layer = random_prompts(lm, count, tokens), lm.num_layers // 2

    def traced() -> None:
        with lm.generate(max_new_tokens=1, ignore_eos=True) as tracer:
            states = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for prompt in prompts:
                with tracer.invoke(prompt):
                    states.append(lm.model.layers[layer].output[0, -1])
        assert len(states) == count

    generate(lm, prompts, 1)
    traced()
    pairs = [(timed(lambda: generate(lm, prompts, 1)), timed(traced)) for _ in range(PAIRS)]
    ratios = [traced_s / plain_s for plain_s, traced_s in pairs]
    return {
        "invokes": count,
        "prompt_tokens": tokens,
        "plain_s": statistics.median(plain_s for plain_s, _ in pairs),
        "traced_s": statistics.median(traced_s for _, traced_s in pairs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def generate_traced(
    lm: LM, prompts: Prompts, traced: int, layers: list[int], new_tokens: int, edits: bool = False
) -> None:
    """`generate`, with the last position of `layers` saved, or edited, in the first `traced` requests at each step."""
    handles = [lm.submit(prompt, greedy(new_tokens)) for prompt in prompts[traced:]]
    with lm.generate(max_new_tokens=new_tokens, ignore_eos=True) as tracer:
        for prompt in prompts[:traced]:
            with tracer.invoke(prompt):
                kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
                for _ in tracer.iter[:]:
                    for layer in layers:
                        if edits:
                            lm.model.layers[layer].output[0, -1] += 1e-3
                        else:
                            kept.append(lm.model.layers[layer].output[0, -1])
    assert all(receipt.reads == len(layers) * new_tokens for receipt in tracer.receipts)
    for handle in handles:
        assert len(handle.result().token_ids) == new_tokens
