"""Errors of any class: their caller gets them, and neither the engine nor another's trace is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch

from pymllm_interp import LM, SamplingParams

pytestmark = pytest.mark.local
PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@dataclass(frozen=True)
class FrozenError(Exception):
    """It takes no attributes: no traceback of the block, and no notes."""

    code: int


class EmptyError(Exception):
    """It is false."""

    def __len__(self) -> int:
        return 0


class NoTextError(Exception):
    """Its text raises what would end a thread."""

    def __str__(self) -> str:
        raise GeneratorExit

    __repr__ = __str__


class NoNotesError(RuntimeError):
    """A text that gets a note, and notes that are none."""

    __notes__ = 5

    def __str__(self) -> str:
        return "element 0 of tensors does not require grad"


class AskedError(Exception):
    """Each question, such as isinstance, raises what would end a thread."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit


ERRORS: dict[type[Exception], Any] = {
    FrozenError: 3,
    EmptyError: "empty",
    NoTextError: "lost",
    NoNotesError: "",
    AskedError: "",
}
EXPECTED: dict[type, Any] = {error: error for error in ERRORS}
EXPECTED[FrozenError] = FrozenError, FrozenInstanceError  # the latter where nnsight sets its context
EXPECTED[AskedError] = SystemExit  # where its caller is asked for the traceback
BY_CLASS = pytest.mark.parametrize("error", ERRORS)


def in_a_trace(lm: LM, error: type[Exception]) -> None:
    with lm.trace(PROMPT):
        lm.model.layers[0].output.save()
        raise error(ERRORS[error])


def in_an_invoke(lm: LM, error: type[Exception]) -> None:
    with lm.trace() as tracer:
        with tracer.invoke(PROMPT):
            lm.model.layers[0].output.save()
            raise error(ERRORS[error])
        with tracer.invoke(PROMPT):
            lm.model.layers[1].output.save()


def in_a_step(lm: LM, error: type[Exception]) -> None:
    with lm.generate(PROMPT, max_new_tokens=4) as tracer:
        for _ in tracer.iter[2:]:
            raise error(ERRORS[error])


@BY_CLASS
@pytest.mark.parametrize("run", [in_a_trace, in_an_invoke, in_a_step])
@pytest.mark.parametrize("way", ["off", "auto"])
def test_an_error_of_any_class_reaches_its_caller(
    run: Callable[[LM, type[Exception]], None], way: str, error: type[Exception], lm_of: Any
) -> None:
    lm = lm_of("llama", lower_traces=way)
    plain = lm.generate([PROMPT], GREEDY)[0].token_ids
    with pytest.raises(EXPECTED[error]):
        run(lm, error)
    assert lm.generate([PROMPT], GREEDY)[0].token_ids == plain


@BY_CLASS
def test_an_error_of_any_class_ends_no_other_trace_of_its_passes(error: type[Exception], lm_of: Any) -> None:
    lm = lm_of("llama", lower_traces="off")

    def read() -> list[torch.Tensor]:
        with lm.generate(PROMPT, max_new_tokens=50, ignore_eos=True) as tracer:
            states = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in tracer.iter[:]:
                states.append(lm.model.layers[1].output[:, -1].clone())
        return states

    alone = read()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(read)
        while not other.done():
            with pytest.raises(EXPECTED[error]):
                in_a_trace(lm, error)
        found = other.result()
    torch.testing.assert_close(torch.stack(found), torch.stack(alone), rtol=1e-5, atol=1e-5)
