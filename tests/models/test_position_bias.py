"""Inkling, by its class: a bias of attention by distance, logits scaled by the position, and short convolutions with states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from helpers_classes import (
    GREEDY,
    TOLERANCE,
    check_chunks,
    check_padding,
    check_preempted,
    check_unwritten,
    greedily,
    load,
    oracle_of,
    random_prompt,
    state_gradient,
)
from nnsight.modeling.transformers import TransformersModel

from pymllm_interp import LM, Capture, Steer
from pymllm_interp.captures import Lens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAME = "inkling_text"
BIAS = "model.layers.1.self_attn.rel_logits_proj"


def test_chunks_of_any_size_are_transformers() -> None:
    check_chunks(NAME)


def test_preempted_requests_end_as_they_would_alone() -> None:
    check_preempted(NAME)


def test_a_prefix_with_a_snapshot_is_reused_and_a_steered_one_is_not() -> None:
    lm, prompt = load(NAME), random_prompt(30, 2)
    oracle, steer = oracle_of(lm, NAME), Steer("resid_post.0", torch.ones(32) * 4)
    plain = greedily(oracle, prompt, 6)
    steered = lm.submit(prompt, GREEDY, interventions=[steer]).result()
    assert steered.token_ids != plain
    outs = [lm.submit(prompt, GREEDY).result() for _ in range(2)]
    assert [out.token_ids for out in outs] == [plain, plain]
    assert [out.num_cached_tokens for out in outs] == [0, 28]
    lm.shutdown()


def test_slots_that_hold_nothing_do_not_matter() -> None:
    check_unwritten(NAME, (1, 6, 11, 26), (4, 1, 3))


def test_rows_of_padding_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_padding(NAME, monkeypatch)


def test_a_lens_has_the_scale_and_the_vocabulary_of_the_logits() -> None:
    lm, prompt = load(NAME), random_prompt(9, 1)
    lens = Capture("resid_post.1", reduce=Lens(top_k=3, tokens=[3, 96]))
    (out,) = lm.generate([prompt], GREEDY, capture=["logits", lens])
    expected, found = out.activations["logits"].log_softmax(-1), out.activations
    assert expected.shape[-1] == 97
    torch.testing.assert_close(found.token_log_probs["resid_post.1"][-1], expected[-1, [3, 96]], **TOLERANCE)
    torch.testing.assert_close(found["resid_post.1"][-1], expected[-1].topk(3).values, **TOLERANCE)
    lm.shutdown()


def script(model: Any, prompt: list[int], edits: bool) -> dict[Any, torch.Tensor]:
    options = {"ignore_eos": True} if isinstance(model, LM) else {"eos_token_id": None, "pad_token_id": 0}
    with model.generate(prompt, max_new_tokens=3, **options) as tracer:
        found = dict().save()
        for step in tracer.iter[0:3]:
            if edits:
                model.get(BIAS).output[..., -3:] -= 2
            found[step, "bias"] = model.get(BIAS).output.clone()
            found[step, "logits"] = model.lm_head.output[:, -1]
    return dict(found)


@pytest.mark.parametrize("edits", [False, True], ids=["read", "edited"])
def test_the_bias_of_a_request_alone_is_transformers(edits: bool) -> None:
    lm, prompt = load(NAME, max_num_tokens=64, max_running_requests=1), random_prompt(14, 3)
    theirs = TransformersModel(oracle_of(lm, NAME).requires_grad_(False), tokenizer=tiny_tokenizer())
    found, expected = script(lm, prompt, edits), script(theirs, prompt, edits)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        own = found[key][..., -value.shape[-1] :]
        torch.testing.assert_close(own, value, **TOLERANCE, msg=lambda m, key=key: f"{key}: {m}")
    lm.shutdown()


def test_the_bias_of_a_request_beside_others_is_refused() -> None:
    lm = load(NAME, max_num_tokens=64)
    expected = lm.generate([random_prompt(9, 1)], GREEDY)[0].token_ids
    handle = lm.submit(random_prompt(9, 1), GREEDY)
    with pytest.raises(RuntimeError, match=r"does not say which rows are this request's"):
        with lm.generate(max_new_tokens=3, ignore_eos=True) as tracer:
            for size in (4, 7):
                with tracer.invoke(random_prompt(size, size)):
                    lm.get(BIAS).output.save()
    assert handle.result().token_ids == expected
    lm.shutdown()


def test_gradients_of_a_prompt_are_those_of_transformers() -> None:
    lm = load(NAME, max_num_tokens=64)
    oracle, prompt = oracle_of(lm, NAME), random_prompt(13, 1)
    with lm.trace(prompt):
        hidden = lm.get("model.layers.0").output
        with lm.output.logits[0, -1].square().sum().backward():
            found = hidden.grad.save()
    torch.testing.assert_close(found, state_gradient(oracle, prompt), **TOLERANCE)
    lm.shutdown()
