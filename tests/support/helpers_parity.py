"""nnsight's model and ours over one checkpoint, and comparisons of what their scripts return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held, random_model, tiny_tokenizer
from nnsight.modeling.transformers import TransformersModel

from pymllm_interp import LM, SamplingParams

Pair = tuple[LM, TransformersModel]
PROMPT = [5, 17, 3, 80, 44, 9, 61]
OTHER = [7, 2, 93]
PAGE_PLUS_ONE = list(range(1, 18))
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=64, prompt_logprobs=64)


@pytest.fixture(scope="session")
def pair_of(lm_of: Callable[..., LM]) -> Callable[..., Pair]:
    """(family, **arguments) -> our LM and nnsight's model over the same weights."""
    made: dict[tuple, TransformersModel] = {}

    def pair(family: str, rename: tuple | None = None) -> Pair:
        key = (family, rename)
        if key not in made:
            extra = {"rename": dict(rename)} if rename else {}
            made[key] = TransformersModel(random_model(CONFIGS[family]()), tokenizer=tiny_tokenizer(), **extra)
        return lm_of(family, **({"rename": Rename(rename)} if rename else {})), made[key]

    return pair


class Rename(dict):
    """A dict that `lm_of` can hold as part of a key."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(self.items()))

    def __lt__(self, other: object) -> bool:
        return False


def assert_same(ours: Any, theirs: Any, where: str = "value") -> None:
    """Equal structure, shapes, types and values. The attention weights, which ours has not, may be None."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), f"{where}: {type(ours)}"
        assert ours.shape == theirs.shape, f"{where}: {list(ours.shape)}, expected {list(theirs.shape)}"
        assert ours.dtype == theirs.dtype, f"{where}: {ours.dtype}, expected {theirs.dtype}"
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=lambda m: f"{where}: {m}")
    elif isinstance(theirs, dict) and hasattr(theirs, "to_tuple"):
        assert type(ours) is type(theirs), f"{where}: {type(ours)}, expected {type(theirs)}"
        for name in set(theirs) - {"cache", "past_key_values"}:
            assert_same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs), f"{where}: {type(ours)}, expected {type(theirs)}"
        assert len(ours) == len(theirs), f"{where}: {len(ours)} values, expected {len(theirs)}"
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            weights = i == 1 and x is None and isinstance(y, torch.Tensor) and y.dim() == 4
            if not weights:
                assert_same(x, y, f"{where}[{i}]")
    elif isinstance(theirs, dict):
        assert type(ours) is type(theirs) and ours.keys() == theirs.keys(), f"{where}: {sorted(ours)}, {sorted(theirs)}"
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    else:
        assert type(ours) is type(theirs), f"{where}: {ours!r}, expected {theirs!r}"
        assert ours == pytest.approx(theirs, abs=1e-4) if isinstance(theirs, float) else ours == theirs, where


def same(pair: Pair, script: Callable[..., Any], *args: Any) -> Any:
    """Run the script over both models, then over ours beside plain requests; all are equal. Returns ours."""
    lm, reference = pair
    theirs = script(reference, *args)
    ours = script(lm, *args)
    assert_same(ours, theirs)
    with beside_plain_requests(lm):
        assert_same(script(lm, *args), theirs, "beside others: value")
    return ours


@contextmanager
def beside_plain_requests(lm: LM) -> Iterator[None]:
    """Two plain requests decode while the body runs, again and again; none of their tokens may change."""
    params = SamplingParams(temperature=0, max_tokens=110)
    if lm not in _undisturbed:
        _undisturbed[lm] = [out.token_ids for out in lm.generate([OTHER, [1]], params)]
    ended, handles, found = threading.Event(), list[Any](), list[tuple[list[int], list[int]]]()

    def run() -> None:
        while not ended.is_set():
            handles[:] = [lm.submit(prompt, params) for prompt in (OTHER, [1])]
            for handle, tokens in zip(handles, _undisturbed[lm], strict=True):
                found.append((handle.result().token_ids, tokens))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not handles and thread.is_alive():
            time.sleep(0.001)
        yield
    finally:
        ended.set()
        while thread.is_alive():
            for handle in list(handles):
                handle.cancel()
            thread.join(0.05)
    assert any(ids for ids, _ in found)
    assert all(ids == tokens[: len(ids)] for ids, tokens in found)


_undisturbed: dict[LM, list[list[int]]] = {}


def plain_beside(lm: LM, third: Callable[[], Any]) -> tuple[list[Any], Any]:
    """Two plain requests' tokens, log probabilities and prompt log probabilities, with `third` in the same batch."""
    box: list[Any] = []
    with held(lm) as arrived:
        handles = [lm.submit(prompt, PARAMS) for prompt in (OTHER, PAGE_PLUS_ONE)]
        arrived(2)
        thread = threading.Thread(target=lambda: box.append(third()))
        thread.start()
        arrived(3)
    thread.join()
    outs = [handle.result() for handle in handles]
    return [(out.token_ids, out.logprobs, out.prompt_logprobs) for out in outs], box[0]
