"""Captures that are bound once for several requests."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers_runner import random_ids

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.captures import Lens, Project
from pymllm_interp.hooks import bound_hooks

pytestmark = pytest.mark.local  # looks into an engine of this process
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [random_ids(5, seed=seed) for seed in range(3)]


def test_captures_of_several_requests_have_their_own_states(lm_of):
    lm: LM = lm_of("llama")
    captures = [Capture("resid_post.*"), Capture("mlp_out.0", reduce="mean")]
    again = [Capture("resid_post.*"), Capture("mlp_out.0", reduce="mean")]
    alone = [lm.generate([prompt], PARAMS, capture=again)[0] for prompt in PROMPTS]
    for _ in range(2):
        for found, wanted in zip(lm.generate(PROMPTS, PARAMS, capture=captures), alone, strict=True):
            assert found.receipt is not None and wanted.receipt is not None
            assert found.receipt.captures == wanted.receipt.captures
            for site, rows in wanted.activations.items():
                torch.testing.assert_close(found.activations[site], rows, rtol=1e-5, atol=1e-5)


def test_large_tables_are_not_kept(lm_of, monkeypatch):
    """Each group of captures has an entry for each position: a client with many would hold memory after its requests."""
    lm: LM = lm_of("llama")
    known = lm.backend.factory._declarations._bindings._known
    for most, kept in ((0, 0), (bound_hooks.MAX_TABLE_BYTES, 1)):
        monkeypatch.setattr(bound_hooks, "MAX_TABLE_BYTES", most)
        known.clear()
        outs = [lm.generate(PROMPTS[:1], PARAMS, capture=["resid_post.1"])[0] for _ in range(2)]
        assert len(known) == kept
        assert torch.equal(outs[0].activations["resid_post.1"], outs[1].activations["resid_post.1"])


def test_what_reads_weights_reads_them_as_they_are(lm_of):
    lm: LM = lm_of("llama")
    captures = [Capture("resid_post.0", reduce=Lens(top_k=2))]
    (before,) = lm.generate(PROMPTS[:1], PARAMS, capture=captures)
    weight = lm.model.norm.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-2)
        (edited,) = lm.generate(PROMPTS[:1], PARAMS, capture=captures)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    (after,) = lm.generate(PROMPTS[:1], PARAMS, capture=captures)
    assert not torch.equal(edited.activations["resid_post.0"], before.activations["resid_post.0"])
    assert torch.equal(after.activations["resid_post.0"], before.activations["resid_post.0"])


@pytest.mark.parametrize("kind", ["Steer", "Project"])
def test_no_vector_outlives_its_request(kind, lm_of):
    lm: LM = lm_of("llama")
    vector = torch.randn(lm.hidden_size)
    freed = weakref.ref(vector)
    if kind == "Steer":
        hooks = {"interventions": [Steer("resid_post.0", vector)], "capture": ["resid_post.1"]}
    else:
        hooks = {"capture": [Capture("resid_post.0", reduce=Project(vector[None]))]}
    out = lm.generate(PROMPTS[:1], PARAMS, **hooks)
    del vector, hooks, out
    lm.generate(PROMPTS[:1], PARAMS)
    gc.collect()
    assert freed() is None
