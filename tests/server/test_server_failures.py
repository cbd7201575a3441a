"""Errors of blocks whose texts no message can hold: their client gets an error, and the engine serves others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers_served import served
from helpers_server import KEYS, Server
from nnsight import save

from pymllm_interp import LM, SamplingParams
from pymllm_interp.wire import messages as m

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SECONDS = 30


class NoTextError(Exception):
    """Its text raises what would end a thread."""

    def __str__(self) -> str:
        raise SystemExit(9)

    __repr__ = __str__


class Text(str):
    """A subclass of str that is its own text."""

    def __str__(self) -> str:
        return self


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(served_folder, "--allow-code-from", "code", folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


def with_notes(notes: Any) -> Exception:
    error = ValueError("with notes")
    error.__notes__ = notes  # pyright: ignore[reportAttributeAccessIssue]
    return error


def raised(kind: str) -> Exception:
    return {
        "half of a pair": lambda: ValueError("a text with \ud800"),
        "no text": lambda: NoTextError("lost"),
        "no text in a KeyError": lambda: KeyError(NoTextError()),
        "a text of a subclass": lambda: ValueError(Text("own")),
        "a number of too many digits": lambda: ValueError(10**6000),
        "notes that are no texts": lambda: with_notes(["one", 5, "\udfff"]),
        "notes that are no list": lambda: with_notes(7),
    }[kind]()


def fails(lm: LM, kind: str, where: str) -> None:
    """Run a trace that raises: in a block, in one of two invokes of a pass, or around a block."""
    if where == "block":
        with lm.trace(PROMPT):
            lm.model.layers[0].output.save()
            raise raised(kind)
    elif where == "invokes":
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT):
                lm.model.layers[0].output.save()
                raise raised(kind)
            with tracer.invoke(PROMPT):
                lm.model.layers[1].output.save()
    else:
        with lm.session():
            with lm.trace(PROMPT):
                lm.model.layers[0].output.save()
            raise raised(kind)


@pytest.mark.parametrize("where", ["block", "invokes", "session"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("half of a pair", r"a text with \\ud800"),
        ("no text", r"NoTextError without a text: SystemExit"),
        ("no text in a KeyError", r"NoTextError without a text: SystemExit"),
        ("a text of a subclass", "own"),
        ("a number of too many digits", "ValueError without a text: ValueError"),
        ("notes that are no texts", "with notes"),
        ("notes that are no list", "with notes|__notes__ is not a list"),
    ],
)
def test_an_error_without_a_text_reaches_its_client_and_costs_nobody_else(
    server: Server, kind: str, message: str, where: str
) -> None:
    pool = ThreadPoolExecutor(1)  # an answer that never comes fails the test, and does not hang it
    with LM.connect(server.url, api_key=KEYS["declared"]) as other, LM.connect(server.url, api_key=KEYS["code"]) as lm:
        before = other.generate([PROMPT], GREEDY)[0].token_ids
        with pytest.raises(Exception, match=message):
            pool.submit(fails, lm, kind, where).result(SECONDS)
        assert pool.submit(other.generate, [PROMPT], GREEDY).result(SECONDS)[0].token_ids == before
    pool.shutdown(wait=False)


def test_a_message_without_a_form_fails_its_own_call() -> None:
    good, bad = m.Answer(1, {"a": 1}), m.Answer(2, {"a": "\ud800"})
    found = m.from_engine.decode(m.encoded([good, bad, good]))
    assert [type(message) for message in found] == [m.Answer, m.Failed, m.Answer]
    assert found[1].call == 2 and found[1].failure.type == "UnicodeEncodeError"  # pyright: ignore
    assert m.encoded([good]) == msgspec.msgpack.encode([good])


def test_values_that_numpy_and_torch_keep_in_other_ways(server: Server) -> None:
    """An array of another byte order arrives; what has no dense values is refused by its name."""
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        with lm.trace(PROMPT):
            found = save(np.array([1, 70_000], ">i4"))
        assert found.tolist() == [1, 70_000]
        with (
            pytest.raises(TypeError, match=r"masked is a masked array.*: save its data and its mask"),
            lm.trace(PROMPT),
        ):
            masked = save(np.ma.array([1, 2], mask=[False, True]))  # noqa: F841
        with pytest.raises(TypeError, match=r"coded is a tensor of torch\.quint8"), lm.trace(PROMPT):
            coded = save(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))  # noqa: F841
