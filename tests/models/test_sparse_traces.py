"""Traces of models with indexers, beside requests of all kinds. An indexer runs prompt by prompt, and the rest on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import tiny_tokenizer
from helpers_classes import GREEDY, TOLERANCE, load, oracle_of, random_prompt
from nnsight.modeling.transformers import TransformersModel

from pymllm_interp import LM

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

INDEXER = "model.layers.0.self_attn.indexer"
PROMPTS = [random_prompt(size, size) for size in (11, 9, 17, 12)]


class Pair(NamedTuple):
    lm: LM
    theirs: Any


@pytest.fixture(scope="module", params=["deepseek_v32", "hy_v4"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    lm = load(request.param, max_num_tokens=64, max_model_len=64, lower_traces="off")
    oracle = oracle_of(lm, request.param).requires_grad_(False)
    yield Pair(lm, TransformersModel(oracle, tokenizer=tiny_tokenizer()))
    lm.shutdown()


def options_of(model: Any) -> dict[str, Any]:
    return {"ignore_eos": True} if isinstance(model, LM) else {"eos_token_id": None, "pad_token_id": 0}


def script(model: Any, edit: str, found: Any, step: int) -> None:
    """One step: the keys that the last token attends to, and its logits; after an edit."""
    if edit == "inside":
        model.get(f"{INDEXER}.weights_proj").output = -model.get(f"{INDEXER}.weights_proj").output
    picked = model.get(INDEXER).output
    found[step, "picked"] = picked[:, -1:].sort(-1).values.int()
    if edit == "at the indexer":
        model.get(INDEXER).output = picked * 0
    if edit == "attention":
        model.get("model.layers.0.self_attn").output[0][:] *= 2
    found[step, "logits"] = model.lm_head.output[:, -1]


def generated(model: Any, prompt: list[int], edit: str) -> dict[Any, torch.Tensor]:
    with model.generate(prompt, max_new_tokens=3, **options_of(model)) as tracer:
        found = dict().save()  # pyright: ignore[reportAttributeAccessIssue]
        for step in tracer.iter[0:3]:
            script(model, edit, found, step)
    return dict(found)


def assert_close(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, **TOLERANCE, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("edit", ["", "inside", "at the indexer", "attention"])
def test_a_generation_is_transformers(pair: Pair, edit: str) -> None:
    found, expected = (generated(model, PROMPTS[0], edit) for model in (pair.lm, pair.theirs))
    assert_close(found, expected)
    plain = generated(pair.lm, PROMPTS[0], "")
    assert not edit or any(not torch.equal(found[key], value) for key, value in plain.items())


def test_traces_beside_others_see_and_edit_their_own_rows_only(pair: Pair) -> None:
    edits = ["", "inside", "at the indexer"]
    alone = [generated(pair.lm, prompt, edit) for prompt, edit in zip(PROMPTS, edits, strict=False)]
    (expected,) = pair.lm.generate([PROMPTS[3]], GREEDY)
    handle = pair.lm.submit(PROMPTS[3], GREEDY)
    with pair.lm.generate(max_new_tokens=3, ignore_eos=True) as tracer:
        kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for i in range(3):
            kept.append({})
            with tracer.invoke(PROMPTS[i]):
                for step in tracer.iter[0:3]:
                    script(pair.lm, edits[i], kept[i], step)
    for own, others in zip(kept, alone, strict=True):
        assert_close(own, others)
    assert handle.result().token_ids == expected.token_ids


@pytest.mark.parametrize("value", [10**6, -3])
def test_indices_of_no_key_select_none_and_leave_others_as_they_are(pair: Pair, value: int) -> None:
    (expected,) = pair.lm.generate([PROMPTS[3]], GREEDY)
    handle = pair.lm.submit(PROMPTS[3], GREEDY)
    with pair.lm.generate(PROMPTS[2], max_new_tokens=3, ignore_eos=True) as tracer:
        logits = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[0:3]:
            picked = pair.lm.get(INDEXER).output
            picked[..., 1:] = value
            logits.append(pair.lm.lm_head.output[:, -1])
    assert handle.result().token_ids == expected.token_ids
    assert len(logits) == 3 and all(each.isfinite().all() for each in logits)


def test_weights_are_transformers(pair: Pair) -> None:
    with pair.lm.trace(PROMPTS[2], output_attentions=True, output_hidden_states=True) as tracer:
        found = tracer.result.save()
    with pair.theirs.trace(PROMPTS[2], output_attentions=True, output_hidden_states=True) as tracer:
        expected = tracer.result.save()
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_a_block_of_several_prompts_does_not_see_inside(pair: Pair) -> None:
    with pytest.raises(
        ValueError, match=r"waits inside model\.model\.layers\.0\.self_attn\.indexer.*runs prompt by prompt"
    ):
        with pair.lm.generate(max_new_tokens=2, ignore_eos=True) as tracer:
            for prompt in PROMPTS[:2]:
                with tracer.invoke(prompt):
                    pass
            with tracer.invoke():
                pair.lm.get(f"{INDEXER}.wk").output.save()
