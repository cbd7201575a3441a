"""Short ways of a visit: names of a block, and assignments of the tensor that was served."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pymllm_interp import LM
from pymllm_interp.hooks.traces.blocks.names import BlockNames
from pymllm_interp.hooks.traces.nnsight_compat import Scope

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture
def lm(lm_of) -> LM:
    return lm_of("llama", lower_traces="off")


def logits_with(lm: LM, body: Any, count: int) -> list[torch.Tensor]:
    """Logits [steps, vocab] of each of `count` requests; `body` runs in each step with the kept tensor of the step before."""
    with lm.generate(max_new_tokens=5, ignore_eos=True) as tracer:
        kept = list().save()
        for prompt in PROMPTS[:count]:
            with tracer.invoke(prompt):
                own, last = [], None
                kept.append(own)
                for step in tracer.iter[1:]:
                    last = body(lm.model.layers[1], last, step)
                    own.append(lm.logits[0])
    return [torch.stack(own) for own in kept]


def steered(layer: Any, last: Any, step: int) -> Any:
    layer.output *= 3.0
    return None


def steered_by_assignment(layer: Any, last: Any, step: int) -> Any:
    layer.output = layer.output * 3.0
    return None


def kept(layer: Any, last: Any, step: int) -> Any:
    if step % 2 == 0:
        layer.output = last  # waits for this step, though it is the tensor that the block was served last
    return layer.output


def kept_as_copy(layer: Any, last: Any, step: int) -> Any:
    if step % 2 == 0:
        layer.output = last.clone()
    return layer.output


def replaced_then_steered(layer: Any, last: Any, step: int) -> Any:
    layer.output = layer.output + 1.0
    layer.output *= 3.0
    return None


def replaced_at_once(layer: Any, last: Any, step: int) -> Any:
    layer.output = (layer.output + 1.0) * 3.0
    return None


def first_served_again(layer: Any, last: Any, step: int) -> Any:
    served = layer.output
    layer.output = served + 1.0
    layer.output = served  # back to the model's own rows
    return None


def nothing(layer: Any, last: Any, step: int) -> Any:
    return None


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("body", "same"),
    [
        (steered, steered_by_assignment), (kept, kept_as_copy), (replaced_then_steered, replaced_at_once),
        (first_served_again, nothing),
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_an_assignment_of_the_served_tensor_is_one_of_its_values(lm: LM, body: Any, same: Any, count: int) -> None:
    for ours, expected in zip(logits_with(lm, body, count), logits_with(lm, same, count), strict=True):
        assert torch.equal(ours, expected)
    plain = logits_with(lm, nothing, count)
    assert body is first_served_again or not torch.equal(plain[0], logits_with(lm, body, count)[0])


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_of_the_step_before_is_assigned_to_its_own_step(lm: LM, count: int) -> None:
    """The block has not waited since it was served the tensor, but is pinned to the next step."""

    def logits_of(change: Any) -> list[torch.Tensor]:
        with lm.generate(max_new_tokens=4, ignore_eos=True) as tracer:
            found = list().save()
            for prompt in PROMPTS[:count]:
                with tracer.invoke(prompt):
                    for step in tracer.iter[1:3]:
                        if step == 1:
                            last = lm.model.layers[1].output
                        else:
                            lm.model.layers[1].output = change(last)
                            found.append(lm.logits[0])
        return found

    for ours, copied, plain in zip(
        logits_of(lambda last: last), logits_of(torch.clone), logits_with(lm, nothing, count), strict=True
    ):
        assert torch.equal(ours, copied) and not torch.equal(ours, plain[1])


def test_an_assignment_in_place_is_counted_like_any_other(lm: LM) -> None:
    with lm.trace(PROMPTS[0]) as tracer:
        lm.model.layers[1].output *= 2.0
    with lm.trace(PROMPTS[0]) as again:
        lm.model.layers[1].output = lm.model.layers[1].output.mul_(2.0)
    assert tracer.receipts[0].edits == again.receipts[0].edits == 2  # torch's count, and the assignment


def test_names_are_found_in_nnsights_order() -> None:
    for kind in (Scope, BlockNames):
        names = kind({"own": 1, "both": 1}, {"both": 2, "shared": 2}, {"shared": 3, "both": 3, "glbl": 3})
        assert [names[name] for name in ("own", "both", "shared", "glbl")] == [1, 1, 2, 3]
        with pytest.raises(KeyError, match="absent"):
            names["absent"]
        exec("own = 5\nfound = [own, shared, glbl, len([1])]\nget = lambda: glbl + own", names)
        assert names["found"] == [5, 2, 3, 1] and names["get"]() == 8
        assert names.writes().keys() == {"own", "found", "get"} and names.shared["own"] == 5
