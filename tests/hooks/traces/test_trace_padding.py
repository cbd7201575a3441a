"""`padding=True`: the invokes of a trace are padded to one length, as nnsight pads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_parity import Pair, assert_same, pair_of  # noqa: F401

from pymllm_interp import LM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LONG, SHORT = [5, 17, 3, 80, 44], [7, 2, 93]


@pytest.fixture
def pair(pair_of: Callable[..., Pair]) -> Pair:  # noqa: F811
    return pair_of("llama")


def padded(model: Any) -> dict[str, bool]:
    return {"padding": True} if isinstance(model, LM) or hasattr(model, "is_remote") else {}


def same(pair: Pair, script: Callable[[Any], Any]) -> None:
    """The script's values from ours equal nnsight's, alone and beside a plain request whose tokens stay."""
    lm, reference = pair
    theirs, params = script(reference), SamplingParams(temperature=0, max_tokens=40)
    wanted = lm.generate([SHORT], params)[0].token_ids
    assert_same(script(lm), theirs)
    beside = lm.submit(SHORT, params)
    assert_same(script(lm), theirs, "beside another request: value")
    assert beside.result().token_ids == wanted


def without_pads(value: torch.Tensor) -> torch.Tensor:
    """Rows of the tokens; nnsight computes padding, too, and here it reads as zeros."""
    return value[:, -len(SHORT) :]


def reads(model: Any) -> Any:
    with model.trace(**padded(model)) as tracer:
        with tracer.invoke(LONG):
            long_mask = model.inputs[1]["attention_mask"].save()
            long = model.model.layers[0].output.save()
            all_logits = model.lm_head.output.save()
        with tracer.invoke(SHORT):
            short = model.model.layers[1].output.save()
            logits = model.lm_head.output.save()
            result = tracer.result.save()
    shapes = [list(short.shape), list(logits.shape), list(result.logits.shape)]
    return [shapes, long, all_logits, long_mask, without_pads(short), without_pads(logits), without_pads(result.logits)]


def masks(model: Any) -> Any:
    with model.trace(**padded(model)) as tracer:
        with tracer.invoke(SHORT):
            kwargs = model.inputs[1]
            single, positions = kwargs["attention_mask"].save(), kwargs["position_ids"].save()
        with tracer.invoke([LONG, SHORT]):
            several = model.inputs[1]["attention_mask"].save()
    return single, positions, several


def moved_whole(model: Any) -> Any:
    """The state of the longer prompt takes the place of the shorter one's, all positions at once."""
    with model.trace(**padded(model)) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(LONG):
            taken = model.model.layers[0].output
            barrier()
        with tracer.invoke(SHORT):
            barrier()
            model.model.layers[0].output = taken
            patched = model.lm_head.output.save()
    return without_pads(patched)


def edits_in_place(model: Any) -> Any:
    with model.trace(**padded(model)) as tracer:
        with tracer.invoke(LONG):
            long = model.lm_head.output.save()
        with tracer.invoke(SHORT):
            model.model.layers[0].output[:, -1] = 0
            short = model.lm_head.output.save()
    return long, without_pads(short)


def a_whole_batch(model: Any) -> Any:
    with model.trace(**padded(model)) as tracer:
        with tracer.invoke(LONG):
            pass
        with tracer.invoke(SHORT):
            own = model.model.layers[1].output.save()
        with tracer.invoke():
            whole = model.model.layers[1].output.save()
    return list(own.shape), list(whole.shape), whole[0], without_pads(own), without_pads(whole[1:])


def generations(model: Any) -> Any:
    with model.generate(max_new_tokens=3, min_new_tokens=3, do_sample=False, **padded(model)) as tracer:
        with tracer.invoke(LONG):
            pass
        with tracer.invoke(SHORT):
            steps, seen = list().save(), list().save()
            for _ in tracer.iter[:]:
                seen.append(model.inputs[1]["attention_mask"])
                steps.append(model.model.layers[1].output[:, -1])
        with tracer.invoke(SHORT):
            result = tracer.result.save()
    return steps, seen, result


@pytest.mark.parametrize(
    "script",
    [reads, masks, moved_whole, edits_in_place, a_whole_batch, generations],
    ids=lambda script: script.__name__,
)
def test_padded_invokes_have_nnsights_shapes_and_values(pair: Pair, script: Callable[[Any], Any]) -> None:
    same(pair, script)


def test_the_shorter_state_fills_the_longer_one_up_with_zeros(pair: Pair) -> None:
    """nnsight computes padding; here it is zeros."""
    lm, _ = pair
    with lm.trace(SHORT):
        state = lm.model.layers[0].output.save()
    with lm.trace(padding=True) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(SHORT):
            taken = lm.model.layers[0].output
            barrier()
        with tracer.invoke(LONG):
            barrier()
            lm.model.layers[0].output = taken
            logits = lm.lm_head.output.save()
    with lm.trace(LONG):
        lm.model.layers[0].output = torch.nn.functional.pad(state, (0, 0, len(LONG) - len(SHORT), 0))
        wanted = lm.lm_head.output.save()
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


def test_logits_and_samples_have_one_row(pair: Pair) -> None:
    lm, _ = pair
    with lm.generate(max_new_tokens=2, padding=True) as tracer:
        with tracer.invoke(LONG):
            pass
        with tracer.invoke(SHORT):
            logits, sample = lm.logits.save(), lm.samples.save()
    with lm.generate(SHORT, max_new_tokens=2):
        wanted, token = lm.logits.save(), lm.samples.save()
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(sample, token)


def test_the_logits_of_a_padded_encoding_have_one_row_for_each_prompt(pair: Pair) -> None:
    lm, _ = pair
    encoding = {
        "input_ids": torch.tensor([LONG, [*SHORT, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
    }
    with lm.generate(encoding, max_new_tokens=2):
        logits = lm.logits.save()
    with lm.generate([LONG, SHORT], max_new_tokens=2):
        wanted = lm.logits.save()
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


def test_without_padding_the_error_says_what_pads(pair: Pair) -> None:
    lm, _ = pair
    with pytest.raises(ValueError, match=r"differ in their tokens.*lm\.trace\(padding=True\)"), lm.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(LONG):
            taken = lm.model.layers[0].output
            barrier()
        with tracer.invoke(SHORT):
            barrier()
            lm.model.layers[0].output = taken


def test_padding_belongs_to_the_trace(pair: Pair) -> None:
    lm, _ = pair
    with pytest.raises(TypeError, match=r"padding= belongs to `with lm\.trace\(padding=True\)`"), lm.trace() as tracer:
        with tracer.invoke(LONG, padding=True):
            pass


def test_gradients_of_padded_invokes_are_those_of_each_alone(pair: Pair) -> None:
    lm, _ = pair
    found = []
    for padding in (False, True):
        with lm.trace(padding=padding) as tracer:
            with tracer.invoke(SHORT):
                h = lm.model.layers[0].output
                loss = lm.lm_head.output[0, -1].logsumexp(0)
                with loss.backward():
                    gradient = h.grad.save()
            with tracer.invoke(LONG):
                pass
        found.append(gradient)
    assert found[1].shape[1] == len(LONG)
    torch.testing.assert_close(found[1][:, -len(SHORT) :], found[0], atol=1e-6, rtol=1e-5)
