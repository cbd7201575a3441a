"""Comparisons of request outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pymllm_interp.client.completion import RequestOutput


def assert_equal(out: RequestOutput, wanted: RequestOutput) -> None:
    """The same tokens, log probabilities, states and receipts, up to the rounding of other batch shapes."""
    for mine, other in zip(out.outputs, wanted.outputs, strict=True):
        assert mine.token_ids == other.token_ids and mine.finish_reason == other.finish_reason
        for one, two in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            assert {t: e.logprob for t, e in one.items()} == pytest.approx(
                {t: e.logprob for t, e in two.items()}, abs=1e-3
            )
        assert list(mine.activations) == list(other.activations)
        for site, rows in other.activations.items():
            unit = (
                torch.finfo(rows.dtype).eps if rows.is_floating_point() else 0.0
            )  # of the last bit: states in half precision were rounded
            torch.testing.assert_close(mine.activations[site], rows, rtol=max(1e-4, unit), atol=1e-3)
            assert torch.equal(mine.activations.positions[site], other.activations.positions[site])
        if other.receipt is not None:
            assert mine.receipt.interventions == other.receipt.interventions
            assert mine.receipt.captures == other.receipt.captures and mine.receipt.spec == other.receipt.spec
    for one, two in zip(out.prompt_logprobs or [], wanted.prompt_logprobs or [], strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert {t: e.logprob for t, e in one.items()} == pytest.approx(
                {t: e.logprob for t, e in two.items()}, abs=1e-3
            )


def sharing_of(found: Any) -> list[int]:
    """For each tensor of a result, the number of the first one with its storage."""
    seen: dict[int, int] = {}

    def numbers(value: Any) -> Iterator[int]:
        if isinstance(value, torch.Tensor):
            yield seen.setdefault(value.untyped_storage().data_ptr() or id(value), len(seen))
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                yield from numbers(item)

    return list(numbers(found))
