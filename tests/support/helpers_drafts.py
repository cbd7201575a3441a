"""Drafters for tests: they know what the model will say, and propose it, something else, or both."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCAB

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.core.request import Request

NEW = 24
"""New tokens of a text."""
SMALL = {"page_size": 4, "kv_cache_tokens": 96, "max_num_tokens": 16, "max_running_requests": 4}
"""Pools in which requests are preempted, and prompts chunked."""
WAYS = pytest.mark.parametrize(
    ("graphs", "options"),
    [
        pytest.param(False, {}, marks=pytest.mark.slow),
        (False, SMALL),
        (False, {"async_scheduling": True}),
        (True, SMALL),
        (True, {"async_scheduling": True, "max_running_requests": 4}),
    ],
    ids=["large", "small pools", "ahead", "graphs, small pools", "graphs, ahead"],
)
"""Engines with a draft model: with graphs of drafts, and without."""
KINDS = ("right", "wrong", "partly", "empty", "too long", "random")


class Told:
    """Proposes texts that it was told, changed by `kinds`, one of them at random for each request and step.

    Args:
        kinds: of drafts.
        k: draft tokens of a step.
    """

    def __init__(self, *kinds: str, k: int = 3, seed: int = 0) -> None:
        self.kinds, self.num_speculative_tokens = kinds or KINDS, k
        self.rng = random.Random(seed)
        self.texts: dict[tuple[int, ...], list[list[int]]] = {}
        self.num_calls = 0

    def tell(self, outputs: Iterable[RequestOutput]) -> None:
        """Take these outputs as what the model says."""
        for out in outputs:
            self.texts.setdefault(tuple(out.prompt_token_ids), []).extend(one.token_ids for one in out.outputs)

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        self.num_calls += 1
        return [self._drafts(request, k) for request in requests]

    def _drafts(self, request: Request, k: int) -> list[int]:
        kind, said = self.rng.choice(self.kinds), request.output_token_ids
        known = [text for text in self.texts.get(tuple(request.prompt_token_ids), []) if text[: len(said)] == said]
        following = self.rng.choice(known)[len(said) :] if known else []
        if kind == "empty":
            return []
        if kind == "random" or not following:
            return [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(k + 1))]
        wrong = [(token + 1) % VOCAB for token in following]
        if kind == "wrong":
            return wrong[:k]
        if kind == "partly":
            right = self.rng.randrange(k)
            return (following[:right] + wrong[right:])[:k]
        return following + [5] * 40 if kind == "too long" else following[:k]


class Faulty:
    """Fails from its third call on.

    Args:
        answer: what it then gives for each request, or raises.
    """

    def __init__(self, answer: Any) -> None:
        self.answer, self.num_calls = answer, 0

    def propose(self, requests: Sequence[Request], k: int) -> list[Any]:
        self.num_calls += 1
        if self.num_calls < 3:
            return [[1]] * len(requests)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return [self.answer] * len(requests) if self.answer != "too few" else []


@contextmanager
def checked_steps(lm: LM) -> Iterator[list[dict[str, list[int]]]]:
    """`check_integrity` after every step. Between steps no request has pages behind its tokens. Yields the drafts of each step."""
    engine, drafted = lm.engine, []
    step, execute = engine.step, lm.runner.execute_model

    def checking() -> None:
        step()
        engine.scheduler.check_integrity()
        kv = engine.scheduler.kv
        for request in engine.scheduler.running:
            assert request.kv_len <= request.num_tokens
            assert len(request.pages) <= max(kv.pages_for(request.num_tokens), request.num_shared_pages)

    def executing(scheduled: Any) -> Any:
        drafted.append(dict(scheduled.drafts))
        return execute(scheduled)

    engine.step, lm.runner.execute_model = checking, executing  # type: ignore[method-assign]
    try:
        yield drafted
    finally:
        del engine.step, lm.runner.execute_model


def drafted_by(folder: Path, k: int = 3, method: str = "draft_model") -> dict[str, Any]:
    """Settings of a drafter with a model."""
    return {"method": method, "model": folder, "num_speculative_tokens": k}


def greedy(tokens: int = NEW, **kwargs: Any) -> SamplingParams:
    """For a greedy text of so many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **kwargs)


def drawn(tokens: int = NEW, **kwargs: Any) -> SamplingParams:
    """For a sampled text of so many tokens."""
    return SamplingParams(temperature=1.3, seed=4, max_tokens=tokens, ignore_eos=True, **kwargs)


@contextmanager
def proposals(lm: LM) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yields (tokens of a request, drafts that were proposed behind them) of each greedy request and call."""
    drafter, found = lm.runner.drafter, []
    assert drafter is not None
    propose = drafter.propose

    def seen(requests: Any, k: int) -> list[list[int]]:
        drafts = propose(requests, k)
        drafter.sequences.check_integrity()
        found.extend(
            (request.all_token_ids, own)
            for request, own in zip(requests, drafts, strict=True)
            if request.params.temperature == 0
        )
        return drafts

    drafter.propose = seen  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del drafter.propose


def replayed(lm: LM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of requests whenever one graph gives all drafts of a step."""
    drafter: Any = lm.runner.drafter
    drafts, found = drafter.graphs.drafts, []

    def noting(rows: Sequence[int], *args: Any) -> Any:
        found.append(len(rows))
        return drafts(rows, *args)

    monkeypatch.setattr(drafter.graphs, "drafts", noting)
    return found
