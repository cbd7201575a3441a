"""The suite "toolkit": what features, lenses and set features cost a step, and the time of a prompt's lens.

Every request of the batch has them, and all requests decode in the measured steps (`steady_ms`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pymllm_interp import LM
from pymllm_interp.bench.common import greedy, random_prompts, timed
from pymllm_interp.bench.suites import BenchSettings, Model, facts
from pymllm_interp.hooks.captures.reductions.features import Features
from pymllm_interp.hooks.captures.reductions.lens import Lens
from pymllm_interp.hooks.captures.spec import Capture
from pymllm_interp.hooks.interventions.op import Gate
from pymllm_interp.hooks.interventions.set_feature import SetFeature
from pymllm_interp.hooks.interventions.specs import Steer
from pymllm_interp.hooks.saes.sae import SAE

from .common import against_plain
from .interventions import short_lengths

FEATURES, TOP_K, SET = 32_768, 64, 4
"""Features of the SAE; those that a row keeps; those that a request sets."""
LENS_TOP_K, LENS_ROWS = 10, 512
LENS_BATCH = 32
"""Largest batch of the lens at every layer: its products are 1.4 TFLOP for these rows of an 8B shape."""
PAIRS = 7
"""Of the lens of a prompt."""

Declared = Callable[[int], dict[str, Any]]
"""Request i's arguments of `LM.submit`."""


def toolkit_suite(model: Model) -> Iterator[dict[str, Any]]:
    """Ratios to plain steps, by case and batch size. Yields the growing record."""
    settings = model.settings
    with model.load() as lm:
        lengths = short_lengths(settings)
        found: dict[str, Any] = facts(lm) | lengths | {"rows": []}
        for case, (declared, largest) in cases(lm).items():
            for batch in settings.batches:
                if batch <= largest:
                    prompts = random_prompts(lm, batch, lengths["prompt_tokens"])
                    row = against_plain(lm, prompts, [declared(i) for i in range(batch)], lengths["new_tokens"])
                    found["rows"].append({"case": case, "batch": batch, **row})
                    yield found
        found["lens"] = measure_lens(lm, settings)
        found["execution"] = lm.engine.stats()["execution"]
        yield found


def cases(lm: LM) -> Mapping[str, tuple[Declared, int]]:
    """The cases, with the largest batch of each."""
    depth, width, most = lm.num_layers, lm.hidden_size, 1 << 30
    site, later = f"resid_post.{depth // 2}", f"resid_post.{min(depth // 2 + 1, depth - 1)}"
    lm.saes["bench"] = random_sae(width, site)

    def features_of(i: int) -> dict[int, float]:
        chosen = torch.randperm(FEATURES, generator=torch.Generator().manual_seed(i))[:SET]
        return dict.fromkeys(chosen.tolist(), 1e-2)

    def vector(seed: int) -> torch.Tensor:
        return torch.randn(width, generator=torch.Generator().manual_seed(seed))

    def gated(i: int) -> Steer:
        gate = Gate(vector(1), 0.0, site=site)
        return Steer(later, vector(100 + i), scale=1e-3, when=gate)

    read = Capture(site, positions="generated", reduce=Features("bench", top_k=TOP_K))
    seen = Capture("resid_post.*", positions="generated", reduce=Lens(top_k=LENS_TOP_K))
    return {
        f"top {TOP_K} of an SAE with {FEATURES:,} features, every row": (lambda i: {"capture": [read]}, most),
        f"{SET} features set, every request its own": (
            lambda i: {"interventions": [SetFeature("bench", features_of(i))]},
            most,
        ),
        f"logit lens, top {LENS_TOP_K} at every layer, every row": (lambda i: {"capture": [seen]}, LENS_BATCH),
        "one site steered, an earlier site's gate": (lambda i: {"interventions": [gated(i)]}, most),
    }


def random_sae(width: int, site: str) -> SAE:
    """A jumprelu SAE of bfloat16 with random weights."""
    generator = torch.Generator().manual_seed(0)
    decoder = torch.nn.functional.normalize(torch.randn(FEATURES, width, generator=generator), dim=-1).bfloat16()
    zeros = torch.zeros(FEATURES, dtype=torch.bfloat16)
    return SAE(
        W_enc=decoder.T.contiguous(), b_enc=zeros, W_dec=decoder, b_dec=torch.zeros(width, dtype=torch.bfloat16),
        architecture="jumprelu", threshold=zeros + 1e-2, site=site,
    )  # fmt: skip


def measure_lens(lm: LM, settings: BenchSettings) -> dict[str, float]:
    """Milliseconds until the caller has one layer's lens at each position of a prompt, less the plain prompt's time."""
    tokens = min(LENS_ROWS, settings.prefill_tokens)
    (prompt,) = random_prompts(lm, 1, tokens)
    capture = [Capture(f"resid_post.{lm.num_layers // 2}", reduce=Lens(top_k=LENS_TOP_K))]

    def ms(**given: Any) -> float:
        return timed(lambda: lm.generate([prompt], greedy(1), **given) and None) * 1e3

    for given in ({}, {"capture": capture}):
        ms(**given)  # warm-up
    pairs = [(ms(), ms(capture=capture)) for _ in range(PAIRS)]
    return {
        "rows": tokens,
        "ms": statistics.median(read - plain for plain, read in pairs),
        "with_prompt_ms": statistics.median(read for _, read in pairs),
    }
