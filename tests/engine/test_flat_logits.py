"""Tokens that edits leave without a distribution are counted in the receipt of their request, and said in a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_drafts import Told
from helpers_runner import random_ids

from pymllm_interp import LM, Capture, Patch, SamplingParams, Scale, Steer
from pymllm_interp.sampling import Sampler, SamplingBatch

WIDTH, VOCAB = CONFIGS["llama"]().hidden_size, CONFIGS["llama"]().vocab_size
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [random_ids(n, seed=n) for n in (9, 4, 12, 7)]
HUGE = Steer("resid_post.1", vector=torch.ones(WIDTH), scale=1e30)
SAID = "6 tokens have logits that are NaN, infinite or all equal"


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["steps", "ahead"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_edit_out_of_range_is_counted_and_said_and_its_neighbours_are_not(
    lm_of, oracle, options, temperature
) -> None:
    lm: LM = lm_of("llama", **options)
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1, ignore_eos=True)
    edits = [[HUGE], [], [Steer("resid_post.1", vector=torch.ones(WIDTH), scale=0.5)], [Scale("logits", factor=0.0)]]
    before = 0 if getattr(lm, "is_remote", False) else lm.engine.stats()["flat_logits"]
    outs = lm.generate(PROMPTS, params, interventions=edits, capture=[[Capture("logits")]] * 3 + [[]])
    assert [out.receipt.flat_logits for out in outs] == [6, 0, 0, 6]
    assert [any(SAID in text for text in out.warnings) for out in outs] == [True, False, False, True]
    assert "flat_logits" in repr(outs[0].receipt.table()) and len(outs[0].warnings) == 1
    rows = outs[0].activations["logits"][-6:].float()
    assert all(bool((row == row[0]).all() or row.isnan().any()) for row in rows), "the states themselves are flat"
    if not getattr(lm, "is_remote", False):
        assert lm.engine.stats()["flat_logits"] - before == 12


@pytest.mark.local
def test_transformers_with_the_same_edit_has_no_distribution_either(oracle) -> None:
    model = oracle("llama")
    hook = model.model.layers[1].register_forward_hook(lambda _, args, out: out + 1e30)
    try:
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0]
    finally:
        hook.remove()
    assert bool((logits == logits[:, :1]).all() or logits.isnan().all())


def test_nan_of_a_patch_is_counted(lm_of: Callable[..., LM]) -> None:
    """A vector is checked when it is given. A finite state may become infinite later: here by the largest number of float32."""
    lm = lm_of("llama")
    largest = torch.full((1, WIDTH), 3e38)
    (out,) = lm.generate(PROMPTS[:1], GREEDY, interventions=[Patch("resid_post.1", largest, positions=[-1])])
    assert out.receipt.flat_logits >= 1 and "flat_logits" in repr(out.receipt)


@pytest.mark.local
@pytest.mark.parametrize("lower", ["off", "require"])
def test_a_trace_counts_them_too(lm_of: Callable[..., LM], lower: str) -> None:
    lm = lm_of("llama", lower_traces=lower)
    with pytest.warns(UserWarning, match="5 tokens have logits") as caught:
        with lm.generate(PROMPTS[0], max_new_tokens=5, do_sample=False) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[1].output[:] += 1e30
    assert tracer.receipt.flat_logits == 5 and len([w for w in caught if "logits" in str(w.message)]) == 1


@pytest.mark.local
@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_tokens_of_accepted_drafts_count_once(lm_of, model_folder, kind: str) -> None:
    wanted = lm_of("llama").generate(PROMPTS[:1], GREEDY, interventions=[HUGE])
    told: Any = Told(kind, k=3)
    told.tell(wanted)
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=told) as lm:
        (out,) = lm.generate(PROMPTS[:1], GREEDY, interventions=[HUGE])
        assert out.token_ids == wanted[0].token_ids and out.receipt.drafted > 0
        assert out.receipt.flat_logits == wanted[0].receipt.flat_logits == 6


def test_a_plain_step_checks_nothing() -> None:
    assert Sampler()(torch.zeros(2, VOCAB), SamplingBatch(rows=2)).flat is None


def test_rows_are_told_apart() -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[1, 1, 1], [1, 2, 1], [1, nan, 2], [1, inf, 2], [-inf, 2, -inf], [-inf] * 3, [3, 3, 3]])
    found = Sampler()(logits, SamplingBatch(rows=7, checked=[0, 1, 2, 3, 4, 5])).flat
    assert found is not None and found.tolist() == [True, False, True, True, False, True, False]
    found = Sampler()(logits, SamplingBatch(rows=7, checked=list(range(7)))).flat
    assert found is not None and found.tolist() == [True, False, True, True, False, True, True]
