"""What is left of a trace whose block raised: nothing, once its caller lets go of the tracer and of the error."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from pymllm_interp import LM
from pymllm_interp.hooks.traces.nnsight_compat import OutOfOrderError

PROMPT = [3, 1, 4, 1, 5]
Refs = list[weakref.ref[Any]]


class BrokenError(Exception):
    pass


@pytest.fixture()
def lm(lm_of) -> LM:
    return lm_of("llama")


def in_a_block(lm: LM) -> Refs:
    try:
        with lm.trace(PROMPT) as tracer:
            h = lm.model.layers[0].output.save()  # noqa: F841
            raise BrokenError
    except BrokenError as error:
        return [weakref.ref(tracer), weakref.ref(error)]


def in_an_invoke(lm: LM) -> Refs:
    try:
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                h = lm.model.layers[0].output.save()  # noqa: F841
            with tracer.invoke(PROMPT[:2]):
                raise BrokenError
    except BrokenError as error:
        return [weakref.ref(tracer), weakref.ref(error)]


def in_a_whole_batch(lm: LM) -> Refs:
    try:
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                pass
            with tracer.invoke():
                raise BrokenError
    except BrokenError as error:
        return [weakref.ref(tracer), weakref.ref(error)]


def in_a_later_step(lm: LM) -> Refs:
    try:
        with lm.generate(PROMPT, max_new_tokens=3) as tracer:
            for step in tracer.iter[:]:
                h = lm.model.layers[0].output.save()  # noqa: F841
                if step == 1:
                    raise BrokenError
    except BrokenError as error:
        return [weakref.ref(tracer), weakref.ref(error)]


def in_a_backward_pass(lm: LM) -> Refs:
    try:
        with lm.trace(PROMPT) as tracer:
            h = lm.model.layers[0].output
            loss = lm.lm_head.output.sum()
            with loss.backward():
                gradient = h.grad.save()  # noqa: F841
                raise BrokenError
    except BrokenError as error:
        return [weakref.ref(tracer), weakref.ref(error)]


def out_of_order(lm: LM) -> Refs:
    try:
        with lm.trace(PROMPT) as tracer:
            late = lm.model.layers[1].output.save()  # noqa: F841
            early = lm.model.layers[0].output.save()  # noqa: F841
    except OutOfOrderError as error:
        return [weakref.ref(tracer), weakref.ref(error)]


SCRIPTS = [in_a_block, in_an_invoke, in_a_whole_batch, in_a_later_step, in_a_backward_pass, out_of_order]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tracer_whose_block_raised_goes_with_its_last_reference(lm: LM, script: Callable[[LM], Refs]) -> None:
    gc.collect()
    gc.disable()
    try:
        held = script(lm)
        deadline = time.monotonic() + 10
        while any(ref() is not None for ref in held) and time.monotonic() < deadline:
            time.sleep(0.01)  # the engine's thread may still be in the step
        assert len(held) == 2 and [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
