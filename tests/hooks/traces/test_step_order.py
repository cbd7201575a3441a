"""Reads in a step that ``tracer.iter`` pins a block to: in the order of the pass, or refused. nnsight serves the next step's."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from pymllm_interp import LM
from pymllm_interp.hooks.traces.nnsight_compat import NNsightDeprecationWarning, OutOfOrderError

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(params=["auto", "off"])
def lm(lm_of, request: pytest.FixtureRequest) -> LM:
    return lm_of("llama", lower_traces=request.param)


LATE_READS = {
    "a layer": (lambda lm: lm.model.layers[1].output, lambda lm: lm.model.layers[0].output),
    "the input of the same layer": (lambda lm: lm.model.layers[1].output, lambda lm: lm.model.layers[1].input),
    "a module of the same layer": (lambda lm: lm.model.layers[1].output, lambda lm: lm.model.layers[1].mlp.output),
    "an operation": (
        lambda lm: lm.model.layers[1].output,
        lambda lm: lm.model.layers[1].mlp.source.self_down_proj_0.output,
    ),
    "behind the logits": (lambda lm: lm.logits, lambda lm: lm.model.layers[0].output),
    "the embedding": (lambda lm: lm.model.layers[1].output, lambda lm: lm.model.embed_tokens.output),
    "the embedding behind the head": (lambda lm: lm.lm_head.output, lambda lm: lm.model.embed_tokens.output),
    "a layer behind the norm": (lambda lm: lm.model.norm.output, lambda lm: lm.model.layers[2].output),
    "the norm behind the head": (lambda lm: lm.lm_head.output, lambda lm: lm.model.norm.output),
    "behind the token": (lambda lm: lm.samples, lambda lm: lm.logits),
    "an edit": (lambda lm: lm.model.layers[1].output, lambda lm: lm.model.layers[0].output.add_(1)),
    "an assignment": (
        lambda lm: lm.model.layers[1].output,
        lambda lm: setattr(lm.model.layers[0], "output", torch.zeros(1, 1, 72)),
    ),
    "inside of a module that is skipped": (
        lambda lm: lm.model.layers[1].mlp.skip(torch.zeros(1, 1, 72)),
        lambda lm: lm.model.layers[1].mlp.down_proj.output,
    ),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("steps", [2, slice(1, 4), slice(2, None), [1, 3]])
@pytest.mark.parametrize("what", LATE_READS)
@pytest.mark.local
def test_a_read_that_its_step_has_passed_does_not_wait_for_the_next_step(lm: LM, what: str, steps: Any) -> None:
    first, second = LATE_READS[what]
    step = steps[0] if isinstance(steps, list) else getattr(steps, "start", steps)
    with pytest.raises(
        OutOfOrderError, match=rf"requested but the model already ran past it in step {step}: the block"
    ):
        with lm.generate(PROMPT, max_new_tokens=6, ignore_eos=True) as tracer:
            for _ in tracer.iter[steps]:
                first(lm)
                second(lm)


def test_a_late_read_of_a_plain_block_is_refused_in_each_form_of_the_loop(lm: LM) -> None:
    """Blocks without functions: they may be lowered, or sent."""
    with pytest.raises(
        OutOfOrderError, match=r"layers\.0\.output` .*ran past it in step 2: .*layers\.1\.output` before"
    ) as caught:
        with lm.generate(PROMPT, max_new_tokens=6, ignore_eos=True) as tracer:
            for _ in tracer.iter[2]:
                late = lm.model.layers[1].output[0, -1].save()
                early = lm.model.layers[0].output[0, -1].save()
    lines = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any("early =" in line for line in lines)
    for steps in (slice(0, 2), slice(2, 4)):
        with (
            pytest.raises(OutOfOrderError, match="already ran past it"),
            pytest.warns(NNsightDeprecationWarning),
            lm.generate(PROMPT, max_new_tokens=6, ignore_eos=True) as tracer,
        ):
            with tracer.iter[steps]:
                late = lm.model.layers[1].output[0, -1].save()
                early = lm.model.layers[0].output[0, -1].save()  # noqa: F841
    with lm.generate(PROMPT, max_new_tokens=6, ignore_eos=True) as tracer:
        pairs = list().save()
        for _ in tracer.iter[2:]:
            pairs.append((lm.model.layers[0].output[0, -1], lm.model.layers[1].output[0, -1], lm.logits, lm.samples))
        result = tracer.result.save()
    assert [int(token) for *_, token in pairs] == result[0, len(PROMPT) + 2 :].tolist()
    del late


@pytest.mark.parametrize("steps", [[3, 1], [1, 1], [0, 2, 1], (4, 2)])
def test_a_list_of_steps_that_does_not_ascend_is_refused(lm: LM, steps: Any) -> None:
    with pytest.raises(OutOfOrderError, match=r"each step once, in ascending order: tracer\.iter\[\[\d"):
        with lm.generate(PROMPT, max_new_tokens=6, ignore_eos=True) as tracer:
            for _ in tracer.iter[steps]:
                lm.model.layers[0].output.save()


def test_a_loop_over_steps_that_are_over_is_refused(lm: LM) -> None:
    with pytest.raises(OutOfOrderError, match="asks for step 1, but the model is at step 3"):
        with lm.generate(PROMPT, max_new_tokens=6, ignore_eos=True) as tracer:
            for _ in tracer.iter[3]:
                lm.model.layers[0].output.save()
            for _ in tracer.iter[1:]:
                lm.model.layers[1].output.save()


def test_a_block_that_a_barrier_held_over_a_step_does_not_slip(lm: LM) -> None:
    with pytest.raises(OutOfOrderError, match=r"in step 1|asks for step"):
        with lm.generate(max_new_tokens=6, ignore_eos=True) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[3]:
                    lm.model.layers[0].output  # noqa: B018
                    barrier()
                    lm.model.layers[1].output.save()
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[1]:
                    lm.model.layers[0].output  # noqa: B018
                    barrier()
                    lm.model.layers[1].output.save()
