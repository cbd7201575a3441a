"""Metrics of the last position's logits, which sweeps measure and attributions differentiate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch

from ..utils.arguments import PromptError, shown

Metric = int | str | Sequence[int | str] | Callable[[torch.Tensor], torch.Tensor]
"""Metric of the logits at the last position.

- two tokens, ``(" Paris", " Rome")``: the logit of the first minus the logit of the second;
- one token: its log probability;
- a function: float32 logits [rows, vocab] -> values [rows].

A token is an id, or a text that is one token.
"""
RowMetric = Callable[[torch.Tensor], torch.Tensor]
"""Float32 logits [rows, vocab] -> [rows]."""


def metric_of(metric: Metric, lm: Any) -> RowMetric:
    """The function that `metric` names.

    Args:
        lm: reads texts, and knows the size of the vocabulary.

    Raises:
        PromptError: neither one token, nor two, nor a function; a text of several tokens, or an id beyond the vocabulary.
    """
    if callable(metric):
        return _checked(metric)
    if isinstance(metric, str | Integral):
        token = token_of(metric, lm, "metric")
        return lambda logits: logits.log_softmax(-1)[:, token]
    pair = list(metric) if isinstance(metric, Sequence | torch.Tensor) else []
    if len(pair) != 2:
        raise PromptError(
            f"metric={shown(metric)}: expected two tokens (a logit difference), one token (a log probability), or a function of "
            "logits [rows, vocab]"
        )
    first, second = (token_of(token, lm, "metric") for token in pair)
    if first == second:
        raise PromptError(f"metric={shown(metric)}: both are token {first}, so that their difference is always 0")
    return lambda logits: logits[:, first] - logits[:, second]


def token_of(token: Any, lm: Any, what: str) -> int:
    """The id of a token, which is an id or a text. Raises PromptError."""
    if isinstance(token, str):
        return lm.to_single_token(token)
    vocab_size = lm.limits.vocab_size
    if isinstance(token, bool) or not isinstance(token, Integral | torch.Tensor) or not 0 <= int(token) < vocab_size:
        raise PromptError(f"{what}: {shown(token)} is not a token: expected text, or an id from 0 to {vocab_size - 1}")
    return int(token)


def _checked(function: Callable[[torch.Tensor], torch.Tensor]) -> RowMetric:
    def metric(logits: torch.Tensor) -> torch.Tensor:
        found = function(logits)
        if not isinstance(found, torch.Tensor) or found.shape != logits.shape[:1]:
            got = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(
                f"the metric returned {got} for logits {list(logits.shape)}; expected a tensor [{len(logits)}], a value for each "
                "row: lambda logits: logits[:, a] - logits[:, b]"
            )
        return found

    return metric
